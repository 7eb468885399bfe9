"""UCBSpec: the arm with the highest upper confidence bound of tokens per cost (arXiv:2505.15141).

The paper's radius of arm i after n_i pulls, round t, A arms, longest draft L_i:

    r_i = L_i/2 * sqrt( (1 + n_i)/n_i^2 * (1 + 2 log( A t^2 sqrt(1 + n_i) / delta )) ),    delta = 1/2

It holds for all n_i at once but is wide (936 pulls for a gap of one token at A = L = 4), so it is scaled: simulations
are flat from 0.2 to 0.4, 1 is the paper's setting. The index is (mean tokens + scale r_i) / expected cost. Few arms
learn faster: the default lengths are a short and a long one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.component import register_to_config
from ..core.outcome import Choice, Outcome
from .base import DraftPolicy, Learner, check_number

__all__ = ["UCBPolicy", "ucb_radius"]


def ucb_radius(pulls: float, rounds: float, arms: int, depth: int, delta: float = 0.5) -> float:
    """The paper's confidence radius, in tokens.

    Args:
        pulls: n_i >= 1; rounds: t >= 1; arms: A; depth: L; delta: the probability that the bound fails.

    Example:
        >>> round(ucb_radius(1, 3, 3, 4), 6)
        8.795961
    """
    inside = 1.0 + 2.0 * math.log(arms * rounds * rounds * math.sqrt(1.0 + pulls) / delta)
    return 0.5 * depth * math.sqrt((1.0 + pulls) * inside) / pulls


@dataclass
class _Sums(Learner):
    pulls: list[float]
    tokens: list[float]


class UCBPolicy(DraftPolicy):
    """Optimism over arms that tell nothing about each other.

    Args:
        lengths, arms, costs, probe_every, seed: see `DraftPolicy`.
        scale: of the radius; 1 is the paper's, 0 is greedy.
        forget: what a round leaves of the sums, 1 keeps everything; below 1 the policy follows changing text.

    Example:
        >>> policy = UCBPolicy(lengths=(2, 4))
        >>> policy.begin(["ngram"])
        >>> len(policy.arms)
        3
    """

    name = "ucb"
    default_lengths = (3, 8)

    @register_to_config
    def __init__(
        self,
        lengths: Sequence[int] | None = None,
        arms: Sequence[Mapping[str, Any]] | None = None,
        costs: Sequence[float] | None = None,
        probe_every: int = 32,
        seed: int = 0,
        scale: float = 0.3,
        forget: float = 1.0,
    ) -> None:
        check_number("scale", scale, 0.0, 100.0, 0.3)
        check_number("forget", forget, 0.5, 1.0, 0.995)
        self._scale, self._forget = float(scale), float(forget)
        self._settle(lengths, arms, costs, probe_every, seed)

    def _fresh(self) -> _Sums:
        return _Sums([0.0] * len(self.arms), [0.0] * len(self.arms))

    def _pick(self, rows: tuple[int, ...], costs: list[float], usable: list[int]) -> int:
        pulls, tokens, arms = self.learner.pulls, self.learner.tokens, self.arms
        total = sum(pulls)
        best, chosen = -math.inf, usable[0]
        for index in usable:
            count = pulls[index]
            if count <= 0.0:
                return index
            radius = ucb_radius(count, total, len(arms), arms[index].depth) if arms[index].depth else 0.0
            value = (tokens[index] / count + self._scale * radius) / costs[index]
            if value > best:
                best, chosen = value, index
        return chosen

    def _learn(self, choice: Choice, outcome: Outcome, costs: list[float]) -> None:
        learner, rows = self.learner, len(choice.rows)
        if self._forget < 1.0:
            learner.pulls = [self._forget * count for count in learner.pulls]
            learner.tokens = [self._forget * count for count in learner.tokens]
        if outcome.shortened(choice.arm.depth) and learner.pulls[choice.index] > 0.0:
            return  # what the arm would have given is not known
        learner.pulls[choice.index] += rows
        learner.tokens[choice.index] += rows + sum(outcome.accepted)
