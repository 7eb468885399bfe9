"""Tokenised pictures and captions of emoji-64, drawn once and kept."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

from captions import MAX_LENGTH, without_article  # noqa: E402
from codes import Composer  # noqa: E402
from render import Renderer, caption, sample_spec  # noqa: E402

from mediaspec.models.llamagen.vq import LlamaGenVQ  # noqa: E402

KINDS = {
    "unsaid": r"(?!.*(background|beside|small|mirrored|style))",
    "styled": r"(?!.*(background|beside|small|mirrored)).*style",
    "coloured": r"(?!.*(beside|small|mirrored|flat|fluent)).*background",
    "tinted": r"(?!.*(beside|small|mirrored)).*background",
}
"""Kinds of captions that training can boost: plain shaded, plain with a named style, shaded on a colour, any style on
a colour."""


class Examples:
    """Tokenised pictures and captions, drawn once and kept.

    Args:
        renderer: draws the pictures.
        vq: tokenizer of pictures.
        tokenizer: tokenizer of captions.
        count: number of sampled specs; equal pictures are tokenised once.
        split: "train" or "held_out".
    """

    def __init__(
        self, renderer: Renderer, vq: LlamaGenVQ, tokenizer: PreTrainedTokenizerFast, count: int, split: str, seed: int
    ) -> None:  # fmt: skip
        specs = [sample_spec(i, seed, split) for i in range(count)]
        place: dict[tuple[str, ...], int] = {}
        drawings = []
        self.picture = torch.empty(count, dtype=torch.long)
        for i, s in enumerate(specs):
            key = (s.concept, s.style, s.background, s.size, s.other)
            if key not in place:
                place[key] = len(drawings)
                drawings.append(s)
            self.picture[i] = place[key]
        self.codes = Composer(renderer, lambda x: vq.encode(x)[1]).codes(drawings).short()
        self.captions = [caption(s) for s in specs]
        self.ids = self._encode(tokenizer, self.captions)
        self.short_ids = self._encode(tokenizer, [without_article(c) for c in self.captions])

    @classmethod
    def load(cls, path: Path) -> dict[str, Examples]:
        """Both splits as the transformer's trainer kept them."""
        sets = {}
        for split, values in torch.load(path, weights_only=True).items():
            sets[split] = cls.__new__(cls)
            sets[split].__dict__.update(values)
        return sets

    @staticmethod
    def _encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Tensor:
        return torch.tensor(tokenizer(texts, padding="max_length", max_length=MAX_LENGTH).input_ids, dtype=torch.short)

    def pool(self, kind: str) -> Tensor:
        """Indices of all examples of a kind of caption, a key of `KINDS`."""
        if kind not in KINDS:
            raise ValueError(f"unknown kind of caption {kind!r}; allowed are {', '.join(KINDS)}")
        return torch.tensor([i for i, c in enumerate(self.captions) if re.match(KINDS[kind], c)])

    def distinct(self, kind: str) -> Tensor:
        """One example of every caption of a kind."""
        first: dict[str, int] = {}
        for i in self.pool(kind).tolist():
            first.setdefault(self.captions[i], i)
        return torch.tensor(list(first.values()))

    def batch(self, index: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [B, 256], caption ids [B, 16] (every tenth without its first article) and their mask."""
        hasty = torch.rand(len(index), 1, generator=generator) < 0.1
        ids = torch.where(hasty, self.short_ids[index], self.ids[index]).long()
        return self.codes[self.picture[index]].long(), ids, ids != 0
