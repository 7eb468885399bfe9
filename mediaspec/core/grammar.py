"""Token grammars by position: which tokens may appear at all, and which positions have only one possible token.

A forced token is appended without a draft or verification draw, has zero drift and is not counted in the schedule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Grammar", "GridGrammar"]


class Grammar(Protocol):
    def allowed(self, device: torch.device) -> Tensor | None:
        """[V] bool: the ids a free position may take (forced ids need not be among them); None when all."""
        ...

    def forced(self, positions: Tensor) -> Tensor:
        """[B, n] absolute positions -> [B, n] forced ids, -1 where the model chooses."""
        ...


@dataclass(frozen=True)
class GridGrammar:
    """Rows of `width` image ids, each closed by `end_of_row`, the picture by `end_of_image` (Lumina-mGPT, Emu3).

    Args:
        width, height: the grid; one finished picture has height * (width + 1) + 1 tokens.
        end_of_row, end_of_image: forced ids.
        first_id, last_id: the image ids (inclusive).
        vocab_size: V.
    """

    width: int
    height: int
    end_of_row: int
    end_of_image: int
    first_id: int
    last_id: int
    vocab_size: int

    @property
    def num_tokens(self) -> int:
        return self.height * (self.width + 1) + 1

    def allowed(self, device: torch.device) -> Tensor | None:
        ids = torch.arange(self.vocab_size, device=device)
        return (ids >= self.first_id) & (ids <= self.last_id)

    def forced(self, positions: Tensor) -> Tensor:
        row_end = (positions + 1) % (self.width + 1) == 0
        forced = torch.where(row_end, self.end_of_row, -1)
        return torch.where(positions >= self.num_tokens - 1, self.end_of_image, forced)
