"""How far the rows of a `generate` call are: what a streamer may be told, and how the result is padded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.engine import Round
from ..core.stats import DecodeResult
from .criteria import CriteriaEnding

__all__ = ["Pace"]


class Pace:
    """How far the rows are: what a streamer may be told, and when a run without stop ids is over for all.

    Args:
        pad: stands behind the end of rows that stopped.
        listener: gets [B] ids per step, as in plain `generate`; None.
        ending: knows when rows stopped that go on for the others' sake.
    """

    def __init__(
        self, batch: int, horizon: int, stop_ids: Sequence[int], pad: int, listener: Any, ending: CriteriaEnding
    ) -> None:
        self.tokens = torch.full((batch, horizon), pad, dtype=torch.int64)
        self.lengths, self.done, self.told = [0] * batch, [False] * batch, 0
        self.stop_ids, self.pad, self.listener, self.ending = frozenset(stop_ids), pad, listener, ending

    def add(self, step: Round) -> bool:
        """Takes a round; whether to go on."""
        rows = step.state.tokens.cpu()
        for live, row in enumerate(step.rows):
            before, now = self.lengths[row], step.lengths[row]
            self.tokens[row, before:now] = rows[live, before:now]
            self.lengths[row] = now
            stopped = self.ending.apart and row in self.ending.stops
            last = int(self.tokens[row, now - 1])
            self.done[row] = stopped or now >= self.tokens.shape[1] or last in self.stop_ids
        together = self._together()
        waiting = [length for length, done in zip(self.lengths, self.done, strict=True) if not done]
        ready = min(waiting) if waiting else max(self.lengths)
        self._tell(ready if together is None else min(ready, together))
        return together is None

    def finish(self, result: DecodeResult) -> Tensor:
        """[B, n] the new tokens as plain `generate` returns them; ends the stream."""
        together = self._together()
        lengths = result.lengths if together is None else [together] * len(result.lengths)
        length = max(lengths)
        tokens = result.tokens[:, :length].clone()
        behind = torch.arange(length) >= torch.tensor(lengths)[:, None]
        tokens[behind.to(tokens.device)] = self.pad
        if self.listener is not None:
            self._tell(length)
            self.listener.end()
        return tokens

    def _tell(self, upto: int) -> None:
        if self.listener is not None:
            for step in range(self.told, upto):
                self.listener.put(self.tokens[:, step].clone())
            self.told = max(self.told, upto)

    def _together(self) -> int | None:
        """Where all rows end at once, if they go on for each other's sake and all have stopped."""
        if self.ending.apart or len(self.ending.stops) < len(self.lengths):
            return None
        return max(self.ending.stops.values())
