"""The random numbers of a run: one counter-based stream per row, addressed by absolute token position and purpose.

Nothing is drawn in sequence, so a number does not depend on the batch around a row, on the rank, on the round that
asks for it or on a resume. B rows, n positions, T horizon, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels import philox
from ..kernels.philox import ACCEPT, DRAFT, TARGET
from .kv import shared_length

__all__ = ["ACCEPT", "DRAFT", "TARGET", "RowRng"]


MARGIN = 32
"""Tabulated positions behind the horizon: the last rounds of a run score a few positions past its end."""


class RowRng:
    """Numbers keyed by (row seed, absolute position, purpose).

    On the CPU the numbers of a purpose are computed once for the whole horizon and gathered afterwards (a gather
    costs a few microseconds, Philox in torch a hundred); tables that would exceed `budget_bytes` together are
    computed call by call instead. On CUDA nothing is stored: the kernels compute the numbers in place. The numbers
    are the same in all three cases.

    Args:
        seeds: [B] int64, one per row.
        vocab_size: V.
        horizon: T, positions [0, T + MARGIN) are tabulated; positions behind that are computed directly.
        budget_bytes: memory for all tables of this generator together.

    Raises:
        ValueError: seeds are not a [B] int64 tensor.

    Example:
        >>> import torch
        >>> rng = RowRng(torch.tensor([11, 12]), vocab_size=8, horizon=16)
        >>> rng.uniform(torch.tensor([[0, 1], [4, 5]]), ACCEPT).shape
        torch.Size([2, 2])
    """

    def __init__(self, seeds: Tensor, vocab_size: int, horizon: int, budget_bytes: int = 256 << 20) -> None:
        if seeds.dim() != 1 or seeds.dtype != torch.int64:
            raise ValueError(f"seeds are {seeds.dtype} of shape {tuple(seeds.shape)}; give an int64 tensor [B].")
        self.seeds = seeds
        self.vocab_size = vocab_size
        self.horizon = horizon
        self.budget_bytes = budget_bytes
        self._tables = _Tables(seeds, vocab_size, horizon + MARGIN, budget_bytes)
        self._rows = torch.arange(len(seeds), device=seeds.device)[:, None]
        self._whole = True  # the live rows are those of the tables, in order

    def uniform(self, positions: Tensor, purpose: int, sibling: int = 0) -> Tensor:
        """[B, n] int64 absolute positions -> [B, n] float32 in [0, 1)."""
        table = self._tables.uniform(purpose, sibling)
        if table is not None:
            try:
                return table[self._rows, positions]
            except IndexError:  # behind the horizon
                pass
        return philox.uniform(self.seeds, positions, purpose, sibling)

    def exponential(self, positions: Tensor, purpose: int) -> Tensor:
        """[B, n] int64 absolute positions -> [B, n, V] float32 standard exponentials."""
        table = self._tables.exponential(purpose)
        if table is not None:
            try:
                return table[self._rows, positions]
            except IndexError:  # behind the horizon
                pass
        return philox.exponential(self.seeds, positions, self.vocab_size, purpose)

    def noise(self, positions: Tensor, purpose: int) -> Tensor | None:
        """`exponential` on the CPU; None on CUDA, where the kernels compute the same numbers in place."""
        return None if self.seeds.is_cuda else self.exponential(positions, purpose)

    def noise_from(self, start: Tensor, host_start: list[int] | None, count: int, purpose: int) -> Tensor | None:
        """`noise` at `count` positions from `start` [B] on: a view of the table where all rows stand alike.

        Args:
            start: [B] int64 first positions; host_start: the same on the host, None where it is not known there.
        """
        if self.seeds.is_cuda:
            return None
        first = self._together(host_start, count)
        table = self._tables.exponential(purpose) if first is not None else None
        if table is not None and first is not None:
            return table.narrow(1, first, count)
        return self.exponential(self._positions(start, count), purpose)

    def uniforms_from(
        self, start: Tensor, host_start: list[int] | None, count: int, purpose: int, sibling: int = 0
    ) -> Tensor:
        """`uniform` at `count` positions from `start` [B] on; arguments as in `noise_from`."""
        first = self._together(host_start, count)
        table = self._tables.uniform(purpose, sibling) if first is not None else None
        if table is not None and first is not None:
            return table.narrow(1, first, count)
        return self.uniform(self._positions(start, count), purpose, sibling)

    def _together(self, host_start: list[int] | None, count: int) -> int | None:
        """The one first position of all rows, if there is one and tables reach far enough."""
        if host_start is None or not self._whole:
            return None
        first = shared_length(host_start)
        return first if first is not None and first + count <= self.horizon + MARGIN else None

    @staticmethod
    def _positions(start: Tensor, count: int) -> Tensor:
        return start[:, None] + torch.arange(count, device=start.device)

    def select(self, rows: Tensor) -> RowRng:
        """A generator for the given rows ([n] int64 indices, repeats allowed) that shares this one's tables."""
        chosen = RowRng.__new__(RowRng)
        chosen.seeds = self.seeds[rows]
        chosen.vocab_size = self.vocab_size
        chosen.horizon = self.horizon
        chosen.budget_bytes = self.budget_bytes
        chosen._tables = self._tables
        chosen._rows = self._rows[rows]
        chosen._whole = False
        return chosen


class _Tables:
    """The tabulated numbers of a run, built on first use and shared by every row selection of it."""

    def __init__(self, seeds: Tensor, vocab_size: int, horizon: int, budget_bytes: int) -> None:
        self._seeds = seeds
        self._vocab_size = vocab_size
        self._horizon = horizon
        self._left = budget_bytes if seeds.device.type == "cpu" else 0
        self._uniform: dict[tuple[int, int], Tensor | None] = {}
        self._exponential: dict[int, Tensor | None] = {}

    def _reserve(self, numbers: int) -> bool:
        if 4 * numbers > self._left:
            return False
        self._left -= 4 * numbers
        return True

    def _positions(self) -> Tensor:
        return torch.arange(self._horizon, device=self._seeds.device).expand(len(self._seeds), -1)

    def uniform(self, purpose: int, sibling: int) -> Tensor | None:
        key = (purpose, sibling)
        if key not in self._uniform:
            fits = self._reserve(len(self._seeds) * self._horizon)
            self._uniform[key] = philox.uniform(self._seeds, self._positions(), *key) if fits else None
        return self._uniform[key]

    def exponential(self, purpose: int) -> Tensor | None:
        if purpose not in self._exponential:
            fits = self._reserve(len(self._seeds) * self._horizon * self._vocab_size)
            self._exponential[purpose] = (
                philox.exponential(self._seeds, self._positions(), self._vocab_size, purpose) if fits else None
            )
        return self._exponential[purpose]
