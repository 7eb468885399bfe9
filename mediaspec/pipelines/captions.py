"""Captions to text features, one caption at a time so that a picture never depends on its neighbours in a batch.

P prompts, C condition positions of the transformer, L tokens of a caption, D width of the text features.
"""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["check_prompts", "encode_captions", "unknown_words"]


def check_prompts(prompt: Any, negative_prompt: Any) -> tuple[list[str], list[str | None]]:
    """Both as lists of equal length.

    Raises:
        TypeError: neither a string nor a list of strings. ValueError: an empty caption, or lists that do not pair up.
    """
    prompts = [prompt] if isinstance(prompt, str) else prompt
    if not isinstance(prompts, (list, tuple)) or not all(isinstance(p, str) for p in prompts):
        raise TypeError(f"prompt={prompt!r}; give a string or a list of strings")
    if not prompts:
        raise ValueError("prompt is an empty list; give at least one caption")
    for number, text in enumerate(prompts):
        if not text.strip():
            raise ValueError(f"prompt {number} is empty; write a caption, for instance 'a red apple'")
    negatives = negative_prompt if isinstance(negative_prompt, (list, tuple)) else [negative_prompt] * len(prompts)
    if len(negatives) != len(prompts):
        raise ValueError(
            f"{len(negatives)} negative prompts were given for {len(prompts)} prompts; give one for all, or one each"
        )
    for number, text in enumerate(negatives):
        if text is not None and not isinstance(text, str):
            raise TypeError(f"negative_prompt {number} is {text!r}; give a string, or None for the model's own")
        if text is not None and not text.strip():
            raise ValueError(f"negative prompt {number} is empty; write None for the model's own unconditional branch")
    return list(prompts), list(negatives)


def unknown_words(text: str, tokenizer: Any) -> dict[str, list[str]]:
    """Words of `text` the tokenizer does not know, each with up to three known words that look like it."""
    unknown = tokenizer.unk_token_id
    if unknown is None:
        return {}
    encoded = tokenizer(text, return_offsets_mapping=True)
    found: dict[str, list[str]] = {}
    for token, (start, stop) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
        if token == unknown:
            word = _whole_word(text, start, stop)
            if word and word not in found:
                words = [w.lstrip("\u2581") for w in tokenizer.get_vocab()]
                known = [w for w in words if re.fullmatch(r"[^\W\d_]{2,}", w)]
                found[word] = difflib.get_close_matches(word.lower(), known, 3, cutoff=0.6)
    return found


def _whole_word(text: str, start: int, stop: int) -> str:
    while start > 0 and (text[start - 1].isalnum() or text[start - 1] in "'-"):
        start -= 1
    while stop < len(text) and (text[stop].isalnum() or text[stop] in "'-"):
        stop += 1
    return text[start:stop].strip()


def encode_captions(
    captions: Sequence[str],
    tokenizer: Any,
    text_encoder: Any,
    positions: int,
    device: torch.device,
    what: str = "prompt",
) -> tuple[Tensor, Tensor]:
    """Text features, padded on the left as LlamaGen wants them (arXiv:2406.06525, section 2.2).

    Args:
        captions: P captions; equal ones are encoded once.
        tokenizer: with its special tokens set up as the encoder was trained.
        text_encoder: maps input_ids [1, L] to last_hidden_state [1, L, D].
        positions: C; device: where the encoder runs.
        what: how messages name the captions.

    Returns:
        (features [P, C, D] with zeros at padding, mask [P, C] bool, True at caption tokens).

    Raises:
        ValueError: a caption of more than C tokens.

    Warns:
        UserWarning: words the tokenizer does not know, with the nearest known ones.
    """
    rows: dict[str, Tensor] = {}
    for number, text in enumerate(captions):
        if text in rows:
            continue
        encoded = tokenizer(text, return_tensors="pt")
        ids = encoded["input_ids"]
        if ids.shape[1] > positions:
            fits = _beginning(text, tokenizer, positions)
            raise ValueError(
                f"{what} {number} has {ids.shape[1]} tokens, this model reads {positions}; shorten it, for instance "
                f"to {fits!r}"
            )
        strange = unknown_words(text, tokenizer)
        if strange:
            listed = "; ".join(f"{w!r} (near: {', '.join(near)})" if near else repr(w) for w, near in strange.items())
            warnings.warn(f"{what} {number} has words this model never saw: {listed}", stacklevel=3)
        mask = encoded.get("attention_mask", torch.ones_like(ids))
        rows[text] = text_encoder(input_ids=ids.to(device), attention_mask=mask.to(device)).last_hidden_state[0]
    first = next(iter(rows.values()))
    features = first.new_zeros(len(captions), positions, first.shape[-1])
    mask = torch.zeros(len(captions), positions, dtype=torch.bool, device=first.device)
    for number, text in enumerate(captions):
        length = rows[text].shape[0]
        features[number, positions - length :] = rows[text]
        mask[number, positions - length :] = True
    return features, mask


def _beginning(text: str, tokenizer: Any, positions: int) -> str:
    words = text.split()
    while words and len(tokenizer(" ".join(words))["input_ids"]) > positions:
        words.pop()
    return " ".join(words)
