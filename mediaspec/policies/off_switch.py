"""Turns off arms that do not pay, and probes them now and then within a fixed share of the time.

An arm is off while an optimistic estimate of its rate (mean tokens plus two standard errors, over its expected cost)
stays below the rate of plain decoding. The variance of n rounds is taken 1/n larger than seen: a drafter that was
always wrong is off after `TRIAL` rounds if it costs 25 % of a plain round, after 60 if it costs 3 %.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["PROBE_SHARE", "OffSwitch", "probe_interval"]

TRIAL = 8
"""Rounds of an arm before it can be turned off, unless it loses more than half of the time."""
MEMORY = 64.0
"""Rounds of an arm that its statistics look back."""
PROBE_SHARE = 0.01
"""Largest share of the time that probes may lose."""


def probe_interval(loss: float, every: int, share: float = PROBE_SHARE) -> int:
    """Rounds between two probes.

    Args:
        loss: what a probe loses, in rounds of the best arm.
        every: the shortest interval; share: largest loss per round on average.

    Example:
        >>> probe_interval(0.1, 32), probe_interval(2.0, 32)
        (32, 200)
    """
    return max(every, math.ceil(loss / share))


class OffSwitch:
    """Statistics of A arms and the set that is open.

    Args:
        arms: A; plain: index of plain decoding, None when it is not an arm (then no arm is ever turned off).
        every: rounds between probes at least; 0 switches the switch off.
    """

    def __init__(self, arms: int, plain: int | None, every: int) -> None:
        self.plain, self.every = plain, every
        self.active = plain is not None and every > 0
        self.open = [True] * arms
        self.rounds = [0.0] * arms
        self.tokens = [0.0] * arms
        self.squares = [0.0] * arms
        self.waited = 0
        self.turn = 0

    def probe(self, costs: Sequence[float]) -> int | None:
        """The arm to probe in this round, None for an ordinary one. Called once per round."""
        if not self.active or all(self.open):
            return None
        self.waited += 1
        if self.waited < self.every:
            return None
        closed = [index for index, is_open in enumerate(self.open) if not is_open]
        index = closed[self.turn % len(closed)]
        rounds = self.rounds
        best = max(
            (self.tokens[i] / rounds[i] / costs[i] for i, is_open in enumerate(self.open) if is_open and rounds[i]),
            default=0.0,
        )
        expected = self.tokens[index] / max(rounds[index], 1e-9)
        loss = costs[index] / min(costs) - expected if not best else costs[index] * best - expected
        if self.waited < probe_interval(loss, self.every):
            return None
        self.waited = 0
        self.turn += 1
        return index

    def observe(self, arm: int, tokens: float, costs: Sequence[float]) -> None:
        """Takes a round's tokens per row and decides whether the arm stays open."""
        if not self.active or arm == self.plain:
            if arm == self.plain:
                self.rounds[arm], self.tokens[arm] = 1.0, 1.0
            return
        keep = 1.0 if self.rounds[arm] < MEMORY else 1.0 - 1.0 / MEMORY
        count = self.rounds[arm] = keep * self.rounds[arm] + 1.0
        total = self.tokens[arm] = keep * self.tokens[arm] + tokens
        square = self.squares[arm] = keep * self.squares[arm] + tokens * tokens
        if count < 2.0:
            return
        mean, unseen = total / count, 1.0 / count if self.open[arm] else 0.0
        error = math.sqrt((max(square / count - mean * mean, 0.0) + unseen) / count)
        assert self.plain is not None
        share = (mean + 2.0 * error) * costs[self.plain] / costs[arm]
        pays = share >= (1.0 if count >= TRIAL or not self.open[arm] else 0.5)
        if self.open[arm] and not pays:  # forget most of it: a few probes must be able to open the arm again
            shrink = 4.0 / count
            self.rounds[arm], self.tokens[arm], self.squares[arm] = 4.0, shrink * total, shrink * square
        self.open[arm] = pays

    def state_dict(self) -> dict[str, Any]:
        names = ("open", "rounds", "tokens", "squares")
        return {name: list(getattr(self, name)) for name in names} | {"waited": self.waited, "turn": self.turn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        arms = len(self.open)
        for name in ("open", "rounds", "tokens", "squares"):
            values = list(state[name])
            if len(values) != arms:
                raise ValueError(f"a saved switch has {len(values)} arms, this policy has {arms}")
            setattr(self, name, values)
        self.waited, self.turn = int(state["waited"]), int(state["turn"])
