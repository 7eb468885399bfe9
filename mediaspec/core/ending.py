"""Where rows end before the horizon: end-of-sequence ids, lengths per row, and conditions on what was written.

A row is finished when its length reaches its end. Stopping lowers the end to where the row stands, so nothing behind a
stop is ever committed, streamed or counted. B rows, K draft length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .types import DecodeState

__all__ = ["Ending", "Ends", "StopAt"]


class Ending(Protocol):
    """Decides at which token a row stops."""

    def limits(self, batch: int, horizon: int, device: torch.device) -> Tensor:
        """[B] int64 in [1, horizon]: the most tokens of every row."""
        ...

    def cut(self, state: DecodeState, counts: Tensor, width: int, rows: list[int]) -> tuple[Tensor, Tensor]:
        """How much of a block counts, before it is committed.

        Args:
            state: with the block written behind `state.lengths`, which has not moved.
            counts: [B] int64, how many of its tokens would be committed (0 for rows that are finished).
            width: columns of the block, at least `counts`.
            rows: the rows' indices in the original batch.

        Returns:
            counts, at most those given, and [B] bool: which rows stop at the last token counted.
        """
        ...


@dataclass(frozen=True)
class StopAt:
    """Ends a row at the first of some ids, which is kept, or at its own length.

    Args:
        stop_ids: end-of-sequence ids; empty where a model has none.
        lengths: [B] int64, most tokens per row; None is the horizon for all.
    """

    stop_ids: Sequence[int] = ()
    lengths: Tensor | None = None

    def limits(self, batch: int, horizon: int, device: torch.device) -> Tensor:
        if self.lengths is None:
            return torch.full((batch,), horizon, dtype=torch.int64, device=device)
        if self.lengths.shape != (batch,):
            raise ValueError(f"lengths have shape {list(self.lengths.shape)}; give one per row, [{batch}]")
        return self.lengths.to(device).clamp(min=1, max=horizon)

    def cut(self, state: DecodeState, counts: Tensor, width: int, rows: list[int]) -> tuple[Tensor, Tensor]:
        if not self.stop_ids:
            return counts, torch.zeros_like(counts, dtype=torch.bool)
        columns = state.lengths[:, None] + torch.arange(width, device=counts.device)
        return cut_at(state.tokens.gather(1, columns), counts, self.stop_ids)


def cut_at(tokens: Tensor, counts: Tensor, stop_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Counts [B] of blocks [B, n] up to their first stop id, and which rows have one."""
    order = torch.arange(tokens.shape[1], device=tokens.device)
    stop = torch.zeros_like(tokens, dtype=torch.bool)
    for one in stop_ids:
        stop |= tokens == one
    stop &= order < counts[:, None]
    stopped = stop.any(1)
    return torch.where(stopped, stop.to(torch.int8).argmax(1) + 1, counts), stopped


class Ends:
    """The ends of the live rows of a run. Without an `Ending` all rows end at the horizon and nothing is computed.

    Args:
        ending: may be None.
        batch, horizon: B and T of the run.
    """

    def __init__(self, ending: Ending | None, batch: int, horizon: int, device: torch.device) -> None:
        self.ending, self.horizon = ending, horizon
        self.values = None if ending is None else ending.limits(batch, horizon, device)
        self.host = [horizon] * batch if self.values is None else [int(end) for end in self.values.tolist()]

    def finished(self, lengths: Sequence[int]) -> list[bool]:
        """Per row, from its length on the host."""
        return [length >= end for length, end in zip(lengths, self.host, strict=True)]

    def room(self, lengths: Tensor) -> Tensor:
        """[B] how many drafts may still count: the last token of a row is always the target's own draw."""
        ends: Tensor | int = self.horizon if self.values is None else self.values
        return (ends - 1 - lengths).clamp(min=0)

    def open(self, state: DecodeState, counts: Tensor) -> Tensor:
        """`counts` [B] with 0 for rows that are finished but have not left the batch."""
        if not any(self.finished(state.host_lengths)):
            return counts
        ends: Tensor | int = self.horizon if self.values is None else self.values
        return torch.where(state.lengths < ends, counts, 0)

    def cut(self, state: DecodeState, counts: Tensor, width: int, rows: list[int]) -> Tensor:
        """`counts` [B] of a block that is written but not committed, up to the first stop; moves the ends there."""
        if self.ending is None or self.values is None:
            return counts
        counts, stopped = self.ending.cut(state, torch.minimum(counts, self.values - state.lengths), width, rows)
        self.values = torch.where(stopped, state.lengths + counts, self.values)
        return counts

    def select(self, keep: list[int], rows: Tensor) -> None:
        """Keeps rows; `rows` is `keep` on the device."""
        self.host = [self.host[row] for row in keep]
        self.values = None if self.values is None else self.values.index_select(0, rows)
