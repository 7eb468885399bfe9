"""Geometric Thompson sampling: draw an acceptance rate per drafter, take the length that is best for it.

The model is the truncated geometric one of arXiv:2505.15141: every draft is accepted with p, so a round of length L
gives (1 - p^(L+1))/(1 - p) tokens. p has the posterior Beta(1 + accepts, 1 + rejects), shared by all lengths of a
drafter (with its tree and rule). There is no scale to tune.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.component import register_to_config
from ..core.outcome import Choice, Outcome
from .base import DraftPolicy, Learner, check_number

__all__ = ["ThompsonPolicy", "geometric_tokens"]


def geometric_tokens(rate: float, depth: int) -> float:
    """Expected tokens of a round of `depth` drafts that are each accepted with `rate`.

    Example:
        >>> round(geometric_tokens(0.8, 4), 6)
        3.3616
    """
    return depth + 1.0 if rate >= 1.0 else (1.0 - rate ** (depth + 1)) / (1.0 - rate)


@dataclass
class _Posterior(Learner):
    accepts: list[float]
    rejects: list[float]


class ThompsonPolicy(DraftPolicy):
    """Explores in proportion to how likely an arm is the best one.

    Args:
        lengths, arms, costs, probe_every, seed: see `DraftPolicy`.
        forget: what a round of a drafter leaves of its counts; 0.99 looks back 100 rounds.

    Example:
        >>> policy = ThompsonPolicy(seed=3)
        >>> policy.begin(["ngram", "eagle"])
        >>> policy.choose([0, 1], length=100).rows
        (0, 1)
    """

    name = "thompson"
    default_lengths = (1, 2, 3, 4, 6, 8)

    @register_to_config
    def __init__(
        self,
        lengths: Sequence[int] | None = None,
        arms: Sequence[Mapping[str, Any]] | None = None,
        costs: Sequence[float] | None = None,
        probe_every: int = 32,
        seed: int = 0,
        forget: float = 0.99,
    ) -> None:
        check_number("forget", forget, 0.5, 1.0, 0.99)
        self._forget = float(forget)
        self._settle(lengths, arms, costs, probe_every, seed)

    def _fresh(self) -> _Posterior:
        groups = len(self._now().costs.groups)
        return _Posterior([1.0] * groups, [1.0] * groups)

    def _pick(self, rows: tuple[int, ...], costs: list[float], usable: list[int]) -> int:
        memory, learner = self._now(), self.learner
        member, arms, rates = memory.costs.member, memory.arms, {}
        chosen, best = usable[0], 0.0
        for arm in usable:
            group = member[arm]
            if group < 0:
                value = 1.0 / costs[arm]
            else:
                if group not in rates:
                    rates[group] = memory.stream.beta(learner.accepts[group], learner.rejects[group])
                value = geometric_tokens(rates[group], arms[arm].depth) / costs[arm]
            if value > best:
                chosen, best = arm, value
        return chosen

    def _learn(self, choice: Choice, outcome: Outcome, costs: list[float]) -> None:
        group, depth, learner = self._now().costs.member[choice.index], choice.arm.depth, self.learner
        if group < 0:
            return
        limit = outcome.limit or [depth] * len(choice.rows)
        rejected = sum(accepted < most for accepted, most in zip(outcome.accepted, limit))
        forget = self._forget
        learner.accepts[group] = 1.0 + forget * (learner.accepts[group] - 1.0) + sum(outcome.accepted)
        learner.rejects[group] = 1.0 + forget * (learner.rejects[group] - 1.0) + rejected
