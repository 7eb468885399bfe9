"""Perplexity of a continuation after a long context, scored the way texts are decoded.

The context is read as a prompt, so that an attention policy judges it and drops what it drops at the end of a prompt.
The tokens behind it are scored in small blocks over what is left, as verification passes are. One pass over context
and continuation would measure full attention whatever the policy: prompts are always read in full.

Letters: C context tokens, N scored tokens, V vocabulary.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..core.prompt import TokenPrompt
from ..targets.causal_lm import CausalLMTarget
from .text_tasks.documents import prose

__all__ = ["Scores", "change_of_perplexity", "held_out_ids", "perplexity", "read_text", "score_continuation"]

BLOCK = 16


@dataclass(frozen=True)
class Scores:
    """Args: nll [N] float64, minus log-probability per token in nats; kv_bytes kept when the last token was scored."""

    nll: Tensor
    kv_bytes: int


@torch.inference_mode()
def score_continuation(model: PreTrainedModel, ids: Tensor, context: int, block: int = BLOCK) -> Scores:
    """Scores ids[context:] given what stands before each of them.

    Args:
        model: with or without an attention policy enabled.
        ids: [C + N] int64.
        context: C, read as the prompt.
        block: tokens per pass behind it, at most what the policy leaves room for.

    Raises:
        ValueError: no context, nothing to score, or a block below 1.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        ...                      num_attention_heads=2)
        >>> score_continuation(LlamaForCausalLM(config).eval(), torch.arange(9), context=4).nll.shape
        torch.Size([5])
    """
    total = len(ids)
    if not 1 <= context < total or block < 1:
        raise ValueError(
            f"a text of {total} tokens with a context of {context} in blocks of {block}; give a context of at least "
            f"one token that leaves one to score, and blocks of at least 1"
        )
    ids = ids.to(model.device)
    target = CausalLMTarget(model, total - context)
    cache = target.new_cache(1, block)
    parts = []
    with target.attached():
        logits = target.prefill(TokenPrompt.from_padded(ids[None, :context]), cache).logits[0, -1:]
        parts.append(_nll(logits, ids[context : context + 1]))
        for start in range(context, total - 1, block):
            stop = min(start + block, total - 1)
            logits = target.score(ids[None, start:stop], cache).logits[0]
            parts.append(_nll(logits, ids[start + 1 : stop + 1]))
            count = stop - start
            cache.advance(torch.full_like(cache.lengths, count), [count])
    return Scores(torch.cat(parts).double().cpu(), int(cache.nbytes))


def _nll(logits: Tensor, tokens: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits.float(), tokens, reduction="none")


def perplexity(nll: Sequence[Tensor]) -> float:
    """exp of the mean over all tokens of all texts."""
    return math.exp(float(torch.cat(list(nll)).mean()))


def change_of_perplexity(
    full: Sequence[Tensor], lossy: Sequence[Tensor], *, block: int = 32, rounds: int = 200, seed: int = 0
) -> dict[str, float]:
    """Perplexity of a policy over that of full attention, minus 1, on the same tokens.

    Args:
        full, lossy: nll [N] per text.
        block: neighbouring tokens that are drawn together, since their errors go together.
        rounds: bootstrap resamples of blocks for the error.
        seed: of the resamples.

    Returns:
        "value", and "error", one standard deviation over the resamples.
    """
    gaps = [b - a for a, b in zip(full, lossy, strict=True)]
    sums, counts = [], []
    for gap in gaps:
        for piece in gap.split(block):
            sums.append(piece.sum())
            counts.append(len(piece))
    totals, sizes = torch.stack(sums), torch.tensor(counts, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(counts), (rounds, len(counts)), generator=generator)
    resampled = torch.expm1(totals[drawn].sum(1) / sizes[drawn].sum(1))
    value = torch.expm1(totals.sum() / sizes.sum())
    return {"value": float(value), "error": float(resampled.std()) if rounds > 1 else 0.0}


def held_out_ids(tokenizer: PreTrainedTokenizerBase, length: int, count: int, text: str | None = None) -> list[Tensor]:
    """Ids of texts for perplexity, each [length] int64.

    Args:
        tokenizer: of the model.
        length: tokens per text.
        count: texts.
        text: cut into `count` pieces one after the other; None takes stories and minutes made for this project.

    Raises:
        ValueError: the given text is too short.
    """
    if text is not None:
        ids = _ids(tokenizer, text)
        if len(ids) < length * count:
            raise ValueError(
                f"the text has {len(ids)} tokens, {count} pieces of {length} need {length * count}; give a longer "
                f"file, fewer pieces or shorter lengths"
            )
        return [torch.tensor(ids[k * length : (k + 1) * length]) for k in range(count)]
    found = []
    for seed in range(count):
        words = length
        while len(ids := _ids(tokenizer, prose(seed, words))) < length:  # tokenizers differ in tokens per word
            words = int(words * max(1.2, length / max(len(ids), 1)))
        found.append(torch.tensor(ids[:length]))
    return found


def read_text(name: str) -> str:
    """A text by name.

    Args:
        name: a file, or "pydoc": the documentation of the language that comes with Python, every paragraph once. It is
            natural English, but another one in every Python version.

    Raises:
        ValueError: no such file, or a Python without its documentation.
    """
    if name != "pydoc":
        if not Path(name).is_file():
            raise ValueError(f"{name} is no file; name a text file, or pydoc")
        return Path(name).read_text(encoding="utf-8")
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ValueError("this Python came without its documentation (pydoc_data); name a text file") from error
    paragraphs = (paragraph for topic in sorted(topics) for paragraph in re.split(r"\n\s*\n", topics[topic].strip()))
    return "\n\n".join(dict.fromkeys(paragraphs))


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    encoded: Any = tokenizer(text, add_special_tokens=False, verbose=False)
    return list(encoded["input_ids"])
