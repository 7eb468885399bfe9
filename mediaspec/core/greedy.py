"""Random numbers of a greedy run: none. At temperature 0 every law is one-hot, so the noise of a draw decides nothing.

A vocabulary of 50,000 costs as much noise per drafted token as a layer of a small model; here it is one number,
broadcast (on CUDA kernels compute their noise in place, which costs nothing there).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .rng import RowRng

__all__ = ["GreedyRng"]


class GreedyRng(RowRng):
    """A `RowRng` whose exponentials are all 1. Uniforms stay: relaxed rules may test them at temperature 0 too."""

    def __init__(self, seeds: Tensor, vocab_size: int, horizon: int) -> None:
        super().__init__(seeds, vocab_size, horizon)
        self._one = torch.ones((), device=seeds.device)

    def exponential(self, positions: Tensor, purpose: int) -> Tensor:
        return self._one.expand(*positions.shape, self.vocab_size)

    def noise(self, positions: Tensor, purpose: int) -> Tensor | None:
        return None if self.seeds.is_cuda else self.exponential(positions, purpose)

    def noise_from(self, start: Tensor, host_start: list[int] | None, count: int, purpose: int) -> Tensor | None:
        return None if self.seeds.is_cuda else self._one.expand(len(start), count, self.vocab_size)

    def select(self, rows: Tensor) -> GreedyRng:
        return GreedyRng(self.seeds[rows], self.vocab_size, self.horizon)
