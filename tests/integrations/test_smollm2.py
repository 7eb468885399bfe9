"""A real model, float32: tokens of transformers' generate for every drafter, of plain decoding when sampling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor

from mediaspec.integrations.generate import speculative
from tests.integrations import smollm2

pytestmark = pytest.mark.slow
NEW = 24


@pytest.fixture(scope="module")
def parts() -> Iterator[tuple[Any, Any]]:
    yield smollm2.load()


def generate(parts: tuple[Any, Any], texts: list[str], **settings: Any) -> list[list[int]]:
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
def greedy(parts: tuple[Any, Any]) -> list[list[int]]:
    """transformers' own greedy tokens, one prompt at a time."""
    return [generate(parts, [text], do_sample=False)[0] for text in smollm2.prompts()]


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("drafter", ["ngram", "suffix", "model"])
def test_a_hundred_greedy_texts_are_those_of_generate(
    parts: tuple[Any, Any], greedy: list[list[int]], drafter: str, batch: int
) -> None:
    chosen: Any = smollm2.smaller(parts[0], 8) if drafter == "model" else drafter
    texts = smollm2.prompts()
    wrong = []
    for first in range(0, len(texts), batch):
        some = texts[first : first + batch]
        got = generate(parts, some, do_sample=False, custom_generate=speculative, drafter=chosen)
        wrong += [first + k for k, row in enumerate(got) if row != greedy[first + k]]
    assert not wrong, f"prompts {wrong} of {len(texts)} differ"


@pytest.mark.parametrize("drafter", ["ngram", "suffix", "model"])
def test_a_hundred_coupled_texts_are_those_of_plain_decoding(parts: tuple[Any, Any], drafter: str) -> None:
    chosen: Any = smollm2.smaller(parts[0], 8) if drafter == "model" else drafter
    settings = dict(do_sample=True, temperature=0.8, top_p=0.95, top_k=0, custom_generate=speculative)
    wrong = []
    for number, text in enumerate(smollm2.prompts()):
        plain = generate(parts, [text], drafter="none", row_seeds=[number], **settings)
        fast = generate(parts, [text], drafter=chosen, row_seeds=[number], **settings)
        wrong += [number] if plain != fast else []
    assert not wrong, f"prompts {wrong} differ"
