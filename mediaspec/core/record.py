"""Keeps what a run has produced: finished tokens, acceptance counts and, if asked, how every token came about."""

from __future__ import annotations

import torch
from torch import Tensor

from .stats import Trace
from .types import DecodeState, Draft, Verdict

__all__ = ["Recorder"]


class Recorder:
    """Accumulates per live row and stores rows at their original place when they finish.

    Args:
        batch, horizon: B and T of the whole run; depth: longest draft; trace: record token kinds.
    """

    def __init__(self, batch: int, horizon: int, depth: int, device: torch.device, trace: bool) -> None:
        self.horizon, self.depth = horizon, depth
        self.tokens = torch.zeros(batch, horizon, dtype=torch.int64, device=device)
        self.final_lengths = [0] * batch
        self.calls = 0
        self.row_calls = 0
        self.accepted = [0] * depth
        self.tested = [0] * depth
        self.order = torch.arange(depth + 1, device=device)
        self.live: dict[str, Tensor] | None = None
        self.stored: dict[str, Tensor] | None = None
        if trace:
            kinds = {"kind": torch.uint8, "round": torch.int32, "drift": torch.float32}
            self.live = {n: torch.zeros(batch, horizon + depth + 1, dtype=d, device=device) for n, d in kinds.items()}
            self.stored = {n: torch.zeros(batch, horizon, dtype=d, device=device) for n, d in kinds.items()}

    def prefill(self, forced: Tensor | None) -> None:
        self.calls += 1
        self.row_calls += len(self.final_lengths)
        if self.live is not None and forced is not None:
            self.live["kind"][:, 0] = torch.where(forced[:, 0] >= 0, Trace.FORCED, Trace.BONUS).to(torch.uint8)

    def add(self, state: DecodeState, draft: Draft | None, verdict: Verdict, counts: Tensor, index: int) -> None:
        """Records how one round's tokens came about, before `state.lengths` moves; nothing without a trace."""
        if self.live is None:
            return
        accepted = verdict.num_accepted[:, None]
        depth = 0 if draft is None else draft.tokens.shape[1] if draft.tree is None else draft.tree.max_depth
        order = self.order[: depth + 1]
        where = (state.lengths[:, None] + order).clamp(max=self.live["kind"].shape[1] - 1)
        stopped = torch.full_like(accepted, Trace.BONUS)
        if draft is not None:
            stopped = torch.where(accepted < draft.lengths[:, None], Trace.RESAMPLED, Trace.BONUS)
        kind = torch.where(order < accepted, Trace.ACCEPTED, stopped)
        if state.forced is not None:
            kind = torch.where(state.forced[:, : order.shape[0]] >= 0, Trace.FORCED, kind)
        drift = torch.zeros(kind.shape, dtype=torch.float32, device=kind.device)
        drift[:, : verdict.drift.shape[1]] = verdict.drift
        written = order < counts[:, None]
        updates = {"kind": kind.to(torch.uint8), "round": torch.full_like(kind, index).to(torch.int32), "drift": drift}
        for name, value in updates.items():
            old = self.live[name].gather(1, where)
            self.live[name].scatter_(1, where, torch.where(written, value, old))

    def count(self, grown: list[int], drafted: list[int]) -> None:
        """Counts one round on the host: tokens every live row gained and draft positions that counted."""
        self.calls += 1
        for gained, length in zip(grown, drafted, strict=True):
            if gained == 0:
                continue
            self.row_calls += 1
            for position in range(gained - 1):
                self.accepted[position] += 1
            for position in range(min(gained, length)):
                self.tested[position] += 1

    def store(self, state: DecodeState, active: list[int]) -> None:
        """Writes the live rows to their original places."""
        if not active:
            return
        rows = torch.tensor(active, dtype=torch.int64, device=self.tokens.device)
        self.tokens[rows] = state.tokens[:, : self.horizon]
        for row, length in zip(active, state.host_lengths, strict=True):
            self.final_lengths[row] = min(length, self.horizon)
        if self.live is not None and self.stored is not None:
            for name, value in self.live.items():
                self.stored[name][rows] = value[:, : self.horizon]

    def select(self, rows: Tensor) -> None:
        if self.live is not None:
            self.live = {name: value.index_select(0, rows) for name, value in self.live.items()}

    def trace(self) -> Trace | None:
        return Trace(**{name: value.cpu() for name, value in self.stored.items()}) if self.stored is not None else None
