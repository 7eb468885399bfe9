"""A real model, float32: tokens of transformers' generate for every drafter, of plain decoding when sampling.

Every case is a test of its own, so that a run can be cut and gone on with (`pytest -m slow --lf`, `-k "tree and
eagle3"`); the references of transformers and of plain decoding are kept in pytest's cache. MEDIASPEC_TEST_PROMPTS=5
takes the first five prompts only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from mediaspec.integrations.generate import speculative
from mediaspec.models.heads import shipped_names
from mediaspec.targets.causal_lm import CausalLMTarget
from tests.integrations import smollm2

pytestmark = pytest.mark.slow
NEW = 16
TREE = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 0, 0, 0)]
DRAFTERS = ("ngram", "suffix", "model", "lazy", "sparse", "eagle3", "longspec")
GROWERS = DRAFTERS[2:]
SAMPLED: dict[str, Any] = dict(do_sample=True, temperature=0.8, top_p=0.95, top_k=0)
SHAPES = [*((name, "chain") for name in DRAFTERS), *((name, "tree") for name in GROWERS), ("default", "policy")]
Parts = tuple[Any, Any]


@pytest.fixture(scope="module")
def parts() -> Iterator[Parts]:
    yield smollm2.load()


@pytest.fixture(scope="module")
def small(parts: Parts) -> Any:
    return smollm2.smaller(parts[0], 8)


def generate(parts: Parts, texts: list[str], **settings: Any) -> list[list[int]]:
    """New tokens of every prompt, without padding behind the end."""
    model, tokenizer = parts
    inputs = smollm2.encode(tokenizer, texts)
    settings = {"max_new_tokens": NEW, "pad_token_id": tokenizer.pad_token_id, **settings}
    tokens: Tensor = model.generate(**inputs, **settings)[:, inputs["input_ids"].shape[1] :]
    stop = model.generation_config.eos_token_id
    stops = stop if isinstance(stop, list) else [stop]
    rows = []
    for row in tokens.tolist():
        ends = [place + 1 for place, token in enumerate(row) if token in stops]
        rows.append(row[: ends[0] if ends else NEW])
    return rows


@pytest.fixture(scope="module")
def reference(parts: Parts, request: pytest.FixtureRequest) -> Callable[[bool], list[list[int]]]:
    """Texts one prompt at a time: transformers' own greedy ones, or plainly sampled ones with the prompt's number as
    seed."""

    def get(sampled: bool) -> list[list[int]]:
        kind = "sampled" if sampled else "greedy"
        key = f"mediaspec/smollm2-{kind}-{NEW}-{smollm2.COUNT}-{torch.__version__}-{transformers.__version__}"
        cache: Any = request.config.cache
        known = cache.get(key, None)
        if known is None:
            plain = dict(SAMPLED, custom_generate=speculative, drafter="none")
            known = []
            for number, text in enumerate(smollm2.prompts()):
                settings = {**plain, "row_seeds": [number]} if sampled else {"do_sample": False}
                known += generate(parts, [text], **settings)
            cache.set(key, known)
        return known  # type: ignore[no-any-return]

    return get


def chosen(parts: Parts, small: Any, name: str, shape: str) -> dict[str, Any]:
    """Settings of a case; skips heads that are not shipped."""
    if name in ("eagle3", "longspec") and name not in shipped_names(CausalLMTarget(parts[0], 1)):
        pytest.skip(f"no trained {name} head is shipped for this model")
    settings: dict[str, Any] = {"custom_generate": speculative}
    if shape != "policy":
        settings["drafter"] = small if name == "model" else name
    return {**settings, "tree": TREE} if shape == "tree" else settings


def differing(parts: Parts, wrong: dict[int, tuple[list[int], list[int]]]) -> str:
    """Which prompts, at which token, and how far apart the two best ids were there: far below 1e-3 is rounding."""
    model, tokenizer = parts
    lines = []
    for number, (got, wanted) in wrong.items():
        place = next((i for i, pair in enumerate(zip(got, wanted, strict=False)) if pair[0] != pair[1]), -1)
        ids = smollm2.encode(tokenizer, [smollm2.prompts()[number]])["input_ids"]
        whole = torch.cat([ids, torch.tensor([wanted[: max(place, 0)]], dtype=torch.int64)], 1)
        with torch.no_grad():
            best = model(input_ids=whole).logits[0, -1].topk(2).values
        lines.append(f"prompt {number}, token {place}: margin {float(best[0] - best[1]):.2e}")
    return f"{len(wrong)} of {smollm2.COUNT} differ: " + "; ".join(lines)


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize(("name", "shape"), SHAPES)
def test_a_hundred_greedy_texts_are_those_of_generate(
    parts: Parts, small: Any, reference: Callable[[bool], list[list[int]]], name: str, shape: str, batch: int
) -> None:
    settings, greedy, texts = chosen(parts, small, name, shape), reference(False), smollm2.prompts()
    wrong = {}
    for first in range(0, len(texts), batch):
        got = generate(parts, texts[first : first + batch], do_sample=False, **settings)
        for number, row in enumerate(got, start=first):
            if row != greedy[number]:
                wrong[number] = row, greedy[number]
    assert not wrong, differing(parts, wrong)


@pytest.mark.parametrize(("name", "shape"), SHAPES)
def test_a_hundred_coupled_texts_are_those_of_plain_decoding(
    parts: Parts, small: Any, reference: Callable[[bool], list[list[int]]], name: str, shape: str
) -> None:
    settings, plain = chosen(parts, small, name, shape), reference(True)
    wrong = {}
    for number, text in enumerate(smollm2.prompts()):
        (row,) = generate(parts, [text], row_seeds=[number], **SAMPLED, **settings)
        if row != plain[number]:
            wrong[number] = row, plain[number]
    assert not wrong, differing(parts, wrong)
