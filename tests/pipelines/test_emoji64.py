"""The embedded model: coupled tokens are plain tokens for every drafter, and a batch is its single pictures."""

from __future__ import annotations

import pytest
import torch

from mediaspec import AutoPipeline
from mediaspec.eval.prompts import held_out_prompts, spread


@pytest.fixture(scope="module")
def pipe():
    pipe = AutoPipeline.from_pretrained("emoji-64")
    pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(pipe, prompts: list[str], rule: str, drafter: str | None = None, batch: int = 16) -> torch.Tensor:
    parts = []
    for start in range(0, len(prompts), batch):
        captions = prompts[start : start + batch]
        seeds = list(range(start, start + len(captions)))
        parts.append(pipe(captions, seeds=seeds, rule=rule, drafter=drafter, output_type="tokens").images)
    return torch.cat(parts)


@pytest.mark.parametrize("count", [4, pytest.param(64, marks=pytest.mark.slow)])
def test_coupled_tokens_are_plain_tokens(pipe, count: int) -> None:
    prompts = spread(held_out_prompts("emoji-64"), count)
    plain = draw(pipe, prompts, "plain")
    for drafter in ("eagle", "jacobi"):
        assert torch.equal(draw(pipe, prompts, "coupled", drafter), plain), drafter


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "drafter"), [("exact", "eagle"), ("cool_sd", "eagle"), ("exact", "jacobi")])
def test_a_batch_of_eight_is_eight_single_pictures(pipe, rule: str, drafter: str) -> None:
    prompts = spread(held_out_prompts("emoji-64"), 8)
    assert torch.equal(draw(pipe, prompts, rule, drafter, 8), draw(pipe, prompts, rule, drafter, 1))
