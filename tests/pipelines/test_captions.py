"""Captions become left-padded features, one at a time; strange words and lengths are named."""

from __future__ import annotations

import warnings

import pytest
import torch

from mediaspec.pipelines.captions import check_prompts, encode_captions, unknown_words

from . import tiny

CPU = torch.device("cpu")


def test_features_are_padded_on_the_left_and_do_not_depend_on_neighbours() -> None:
    tokenizer, encoder = tiny.tokenizer(), tiny.text_encoder()
    with torch.no_grad():
        both, mask = encode_captions(["a red apple", "a cat"], tokenizer, encoder, 8, CPU)
        alone, _ = encode_captions(["a cat"], tokenizer, encoder, 8, CPU)
    assert both.shape == (2, 8, 16) and mask.sum(1).tolist() == [4, 3]  # the end token counts
    assert not both[~mask].any() and mask[:, -1].all()
    assert torch.equal(both[1], alone[0])


def test_unknown_words_are_named_with_their_nearest_known_ones() -> None:
    tokenizer = tiny.tokenizer()
    assert unknown_words("a red aple on Mars", tokenizer) == {"aple": ["apple"], "Mars": []}
    with pytest.warns(UserWarning, match="prompt 0 has words this model never saw: 'aple' \\(near: apple"):
        encode_captions(["a red aple"], tokenizer, tiny.text_encoder(), 8, CPU)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encode_captions(["A Red apple"], tokenizer, tiny.text_encoder(), 8, CPU)


def test_a_caption_that_is_too_long_is_refused_with_one_that_fits() -> None:
    long = "a red apple on a blue background beside a green car"
    with pytest.raises(ValueError, match="prompt 0 has 12 tokens, this model reads 8.*'a red apple on a blue"):
        encode_captions([long], tiny.tokenizer(), tiny.text_encoder(), 8, CPU)


def test_prompts_pair_up_with_negative_prompts() -> None:
    assert check_prompts("a cat", None) == (["a cat"], [None])
    assert check_prompts(["a", "b"], "c") == (["a", "b"], ["c", "c"])
    assert check_prompts(["a", "b"], ["c", None]) == (["a", "b"], ["c", None])


@pytest.mark.parametrize(
    "prompt, negative, kind, message",
    [
        ("", None, ValueError, "prompt 0 is empty"),
        (["a", "  "], None, ValueError, "prompt 1 is empty"),
        ([], None, ValueError, "empty list"),
        (3, None, TypeError, "give a string"),
        (["a", 3], None, TypeError, "give a string"),
        (["a", "b"], ["c"], ValueError, "1 negative prompts were given for 2"),
        ("a", "", ValueError, "negative prompt 0 is empty"),
        ("a", [3], TypeError, "negative_prompt 0"),
    ],
)
def test_bad_prompts_are_refused(prompt, negative, kind, message) -> None:
    with pytest.raises(kind, match=message):
        check_prompts(prompt, negative)
