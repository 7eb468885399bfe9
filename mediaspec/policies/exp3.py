"""EXP3Spec: exponential weights over importance-weighted losses, for streams that change regime (arXiv:2505.15141).

With t counted from 1 and Z the summed loss estimates:

    eta_t = sqrt(log A / (t A)),   p_t = softmax(-eta_t Z),   Z[arm] += loss / p_t[arm]

The cumulated sum is multiplied by the current eta. The loss is 1 - (rate - lowest)/(highest - lowest) with the rate
tokens/cost and its attainable range over the arms; at equal costs that is the paper's (L + 1 - Y)/L.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.component import register_to_config
from ..core.outcome import Choice, Outcome
from .base import DraftPolicy, Learner, check_number

__all__ = ["EXP3Policy", "exp3_probabilities"]


def exp3_probabilities(losses: Sequence[float], turn: int, floor: float = 0.0) -> list[float]:
    """p_t of the arms.

    Args:
        losses: [A] summed loss estimates Z; turn: t, from 1; floor: least probability of an arm.

    Example:
        >>> exp3_probabilities([0.0, 0.0], 1)
        [0.5, 0.5]
    """
    arms = len(losses)
    eta = math.sqrt(math.log(arms) / (turn * arms)) if arms > 1 else 0.0
    least = min(losses)
    weights = [math.exp(-eta * (loss - least)) for loss in losses]
    share = (1.0 - floor * arms) / sum(weights)
    return [floor + share * weight for weight in weights]


@dataclass
class _Losses(Learner):
    losses: list[float]
    chances: list[float]
    turn: int


class EXP3Policy(DraftPolicy):
    """No assumption on how the arms behave; slower than `ucb` where they behave.

    Args:
        lengths, arms, costs, probe_every, seed: see `DraftPolicy`. The choice is drawn with the policy's own numbers.
        floor: least probability of an arm, keeps the estimates' variance bounded; 0 is the paper's.

    Example:
        >>> policy = EXP3Policy(lengths=(2, 4), seed=1)
        >>> policy.begin(["ngram"])
        >>> policy.choose([0]).arm.drafter is None  # the first rounds measure plain decoding
        True
    """

    name = "exp3"

    @register_to_config
    def __init__(
        self,
        lengths: Sequence[int] | None = None,
        arms: Sequence[Mapping[str, Any]] | None = None,
        costs: Sequence[float] | None = None,
        probe_every: int = 32,
        seed: int = 0,
        floor: float = 0.02,
    ) -> None:
        check_number("floor", floor, 0.0, 0.1, 0.02)
        self._floor = float(floor)
        self._settle(lengths, arms, costs, probe_every, seed)

    def _fresh(self) -> _Losses:
        return _Losses([0.0] * len(self.arms), [0.0] * len(self.arms), 0)

    def _pick(self, rows: tuple[int, ...], costs: list[float], usable: list[int]) -> int:
        learner, stream = self.learner, self._now().stream
        floor = self._floor if len(usable) * self._floor < 0.5 else 0.0
        chances = exp3_probabilities([learner.losses[arm] for arm in usable], learner.turn + 1, floor)
        learner.chances = [0.0] * len(learner.losses)
        for arm, chance in zip(usable, chances):
            learner.chances[arm] = chance
        point, chosen = stream.uniform(), usable[-1]
        for arm, chance in zip(usable, chances):
            point -= chance
            if point < 0.0:
                chosen = arm
                break
        return int(chosen)

    def _learn(self, choice: Choice, outcome: Outcome, costs: list[float]) -> None:
        learner = self.learner
        if choice.probe or outcome.shortened(choice.arm.depth):  # such a round was not drawn from p, or shows less
            return
        tokens = 1.0 + sum(outcome.accepted) / len(choice.rows)
        usable = [arm for arm, chance in enumerate(learner.chances) if chance > 0.0]
        highest = max((1.0 + self.arms[arm].depth) / costs[arm] for arm in usable)
        lowest = min(1.0 / costs[arm] for arm in usable)
        loss = (highest - tokens / costs[choice.index]) / (highest - lowest) if highest > lowest else 0.0
        learner.losses[choice.index] += loss / learner.chances[choice.index]
        learner.turn += 1
