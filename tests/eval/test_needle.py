"""Needles: where they stand, how long the text is, and that only a reader that sees them finds them."""

from __future__ import annotations

import re

import pytest
from transformers import PreTrainedTokenizerFast

from mediaspec.eval.needle import ANSWER_TOKENS, DIGITS, make_needle, needle_table, needle_texts
from tests.pipelines.test_text_generation import make_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


def read(prompt: str) -> str:
    """A reader that understands the question and sees the whole prompt."""
    place = re.findall(r"The secret number of the (.*) is$", prompt)[-1]
    found = re.search(rf"The secret number of the {place} is (\d+)\.", prompt)
    return f" {found.group(1)}, that is all." if found else " unknown"


def test_a_needle_stands_at_its_depth_and_the_text_fits(tokenizer: PreTrainedTokenizerFast) -> None:
    before = []
    for depth in (0.0, 0.3, 0.5, 1.0):
        needle = make_needle(tokenizer, 1500, depth, seed=4)
        size = len(tokenizer(needle.prompt)["input_ids"])
        assert 1200 < size <= 1500 - ANSWER_TOKENS
        sentence = re.search(rf"The secret number of the [a-z ]+ is {needle.answer}\.", needle.prompt)
        assert sentence is not None and needle.prompt.count(needle.answer) == 1 and len(needle.answer) == DIGITS
        assert needle.prompt.endswith(sentence.group().removesuffix(f" {needle.answer}."))
        before.append(sentence.start() / len(needle.prompt))
    assert before == sorted(before) and before[0] < 0.02 and before[-1] > 0.9
    assert before[1] == pytest.approx(0.3, abs=0.06) and before[2] == pytest.approx(0.5, abs=0.06)


def test_texts_without_a_template_are_plain(tokenizer: PreTrainedTokenizerFast) -> None:
    bare = make_tokenizer()
    bare.chat_template = None
    assert "user" not in make_needle(bare, 600, 0.5, 0).prompt.split()
    assert "user" in make_needle(tokenizer, 600, 0.5, 0).prompt.split()


def test_only_a_reader_that_sees_a_needle_finds_it(tokenizer: PreTrainedTokenizerFast) -> None:
    needles = needle_texts(tokenizer, 800, [0.1, 0.5, 0.9], each=2)
    assert len({needle.answer for needle in needles}) == 6
    assert needle_table(needles, read) == {
        "right": 6, "of": 6, "by_depth": {"0.10": [2, 2], "0.50": [2, 2], "0.90": [2, 2]}
    }  # fmt: skip
    near = needle_table(needles, lambda prompt: read(prompt[-1200:]))
    assert near["by_depth"]["0.10"] == [0, 2] and near["by_depth"]["0.90"] == [2, 2]
    wrong = needle_table(needles, lambda prompt: " 1" + read(prompt)[1:])
    assert wrong["right"] == 0


def test_too_short_texts_are_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="no room"):
        make_needle(tokenizer, 40, 0.5, 0)
    with pytest.raises(ValueError, match="outside"):
        make_needle(tokenizer, 800, 1.5, 0)
