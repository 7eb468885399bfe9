"""Follows a run round by round: progress bar in tokens, callback, interruption, and the numbers for `stats`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..core.engine import Round
from ..core.stats import DecodeResult
from .versions import versions

__all__ = ["Callback", "Watch"]

# (pipe, index of the round, committed tokens of the slowest picture, tensors asked for) -> the tensors, unchanged
Callback = Callable[[Any, int, int, dict[str, Tensor]], dict[str, Tensor] | None]


class Watch:
    """Called by the engine after every round; round 0 is the prefill. Returns False once the pipe is interrupted.

    Args:
        pipe: the pipeline, whose `_interrupt` is read and which the callback gets.
        count: pictures B; length: tokens per picture T.
        callback: called after every round with `names` out of "tokens" ([B, T] int64, -1 where not committed yet),
            "num_accepted" ([B] drafts accepted in this round) and "progress" ([B] in [0, 1]).
    """

    def __init__(self, pipe: Any, count: int, length: int, callback: Callback | None, names: list[str]) -> None:
        self.pipe, self.length, self.callback, self.names = pipe, length, callback, names
        self.lengths = [0] * count
        self.calls = [0] * count
        self.rounds = 0
        self.bar: Any = None
        self.tokens = torch.full((count, length), -1, dtype=torch.int64)

    def __call__(self, step: Round) -> bool:
        grown = [now - before for now, before in zip(step.lengths, self.lengths, strict=True)]
        self.calls = [calls + (more > 0) for calls, more in zip(self.calls, grown, strict=True)]
        self.lengths, self.rounds = list(step.lengths), step.index
        active = sum(more > 0 for more in grown)
        if step.index and active:
            self.bar.set_postfix_str(f"{sum(grown) / active - 1:.1f} accepted/round", refresh=False)
        self.bar.update(sum(grown))
        if self.callback is not None:
            self._call_back(self.callback, step, grown)
        return not self.pipe._interrupt

    def _call_back(self, callback: Callback, step: Round, grown: list[int]) -> None:
        rows = torch.tensor(step.rows)
        now = step.state.tokens[:, : self.length].to(self.tokens.device)
        done = torch.arange(self.length) < torch.tensor(self.lengths)[rows, None]
        self.tokens[rows] = torch.where(done, now, -1)
        known = {
            "tokens": self.tokens.clone(),
            "num_accepted": torch.tensor([max(more - 1, 0) for more in grown]),
            "progress": torch.tensor(self.lengths) / self.length,
        }
        inputs = {}
        for name in self.names:
            inputs[name] = known[name]
        returned = callback(self.pipe, step.index, min(self.lengths), inputs)
        if returned is not None and not isinstance(returned, dict):
            raise TypeError(f"the callback returned {returned!r}; return the tensors it was given, or None")
        changed = (returned or {}).get("tokens")
        if changed is not None and not torch.equal(changed.to(self.tokens.device), self.tokens):
            raise ValueError(
                "the callback returned changed tokens; committed tokens already stand in the key/value cache and "
                "cannot be edited. Return them unchanged, or stop with pipe._interrupt = True"
            )

    def stats(self, result: DecodeResult, settings: dict[str, Any], seeds: list[int]) -> dict[str, Any]:
        """The output's numbers, JSON-ready; see `ImagePipelineOutput`."""
        counts = result.stats
        drift = [float(value) for value in counts.drift]
        return {
            "tokens": counts.tokens,
            "target_calls": counts.target_calls,
            "rounds": self.rounds,
            "tokens_per_call": counts.tokens_per_call,
            "accepted_per_position": counts.accepted_per_position,
            "tested_per_position": counts.tested_per_position,
            "drift": {"mean": sum(drift) / len(drift), "max": max(drift), "per_image": drift},
            "hellinger_bound": counts.hellinger_bound,
            "guarantee": counts.guarantee,
            "tokens_per_image": list(result.lengths),
            "calls_per_image": self.calls,
            "settings": settings,
            "seeds": seeds,
            "versions": versions(),
        }
