"""Full-information choice: every drafter is scored on every round's tokens, not only the one that ran (HedgeSpec).

After verification the emitted tokens and the target's laws along them are known. With g_{i,j} the chance that
drafter i's token at position j would have been accepted (sum_x min(p, q_i); greedy: 1 or 0), an arm of length K gives

    est = 1 + sum over k <= K of prod over j <= k of g_{i,j},    loss = 1 - (est/cost) / highest attainable rate

and the weights follow NormalHedge (Chaudhuri, Freund, Hsu, NeurIPS 2009): w ~ R+/c exp(R+^2 / 2c) with R the regret to
each arm and c such that the mean of exp(R+^2 / 2c) is e; or exponential weights, softmax(-sqrt(8 log A / t) sum of
losses). All lengths of a scored drafter are scored together. Emitting positions j of unequal count is censored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.component import register_to_config
from ..core.outcome import Choice, Outcome
from .base import DraftPolicy, Learner, check_number
from .levels import expected_tokens

__all__ = ["HedgePolicy", "exponential_weights", "normal_hedge_weights"]

SCHEMES = ("normal", "exponential")


def exponential_weights(losses: Sequence[float], eta: float) -> list[float]:
    """softmax(-eta losses), [A].

    Example:
        >>> [round(w, 5) for w in exponential_weights([0.369533, 0.477746, 0.509805], 0.937491)]
        [0.35967, 0.32497, 0.31535]
    """
    least = min(losses)
    weights = [math.exp(-eta * (loss - least)) for loss in losses]
    total = sum(weights)
    return [weight / total for weight in weights]


def normal_hedge_weights(regrets: Sequence[float]) -> list[float]:
    """NormalHedge weights from the summed regrets to each arm, [A]; uniform while no regret is positive.

    Example:
        >>> normal_hedge_weights([0.0, -1.0])
        [0.5, 0.5]
    """
    arms = len(regrets)
    squares = [max(regret, 0.0) ** 2 for regret in regrets]
    top = max(squares)
    if top <= 0.0:
        return [1.0 / arms] * arms
    low, high = top / (2.0 * (1.0 + math.log(arms))), top / 2.0 + 1e-300  # mean exp(R^2/2c) is >= e, then <= e
    gained = [square for square in squares if square]
    wanted = arms * math.e - (arms - len(gained))
    for _ in range(12):
        middle = 0.5 * (low + high)
        if sum([math.exp(square / (2.0 * middle)) for square in gained]) > wanted:
            low = middle
        else:
            high = middle
    scale = 0.5 * (low + high)
    weights = [math.sqrt(square) / scale * math.exp((square - top) / (2.0 * scale)) for square in squares]
    total = sum(weights)
    return [weight / total for weight in weights]


@dataclass
class _Scores(Learner):
    losses: list[float]
    regrets: list[float]
    weights: list[float]
    turn: int


class HedgePolicy(DraftPolicy):
    """For a few drafters that are kept warm: scoring one costs what its catch-up costs anyway.

    Args:
        lengths, arms, costs, probe_every, seed: see `DraftPolicy`. The choice is drawn with the policy's own numbers.
        scheme: "normal" (no learning rate) or "exponential".
        forget: what a round leaves of the sums; 0.98 looks back 50 rounds.

    A drafter without scores in an outcome (see `Outcome.agreement`) keeps its mean loss, except that the drafter
    that ran is scored by what was accepted.

    Example:
        >>> policy = HedgePolicy(lengths=(3,), costs=[1.0, 1.2, 1.2])
        >>> policy.begin(["ngram", "eagle"])
        >>> sum(policy.learner.weights)
        1.0
    """

    name = "hedge"
    default_lengths = (1, 2, 4, 8)

    @register_to_config
    def __init__(
        self,
        lengths: Sequence[int] | None = None,
        arms: Sequence[Mapping[str, Any]] | None = None,
        costs: Sequence[float] | None = None,
        probe_every: int = 32,
        seed: int = 0,
        scheme: str = "normal",
        forget: float = 0.98,
    ) -> None:
        if scheme not in SCHEMES:
            raise ValueError(f'scheme must be one of {SCHEMES}, got {scheme!r}; write scheme="normal"')
        check_number("forget", forget, 0.5, 1.0, 0.98)
        self._scheme, self._forget = scheme, float(forget)
        self._settle(lengths, arms, costs, probe_every, seed)

    def _fresh(self) -> _Scores:
        arms = len(self.arms)
        return _Scores([0.0] * arms, [0.0] * arms, [1.0 / arms] * arms, 0)

    def _pick(self, rows: tuple[int, ...], costs: list[float], usable: list[int]) -> int:
        weights = self.learner.weights
        total = sum(weights[arm] for arm in usable)
        if total <= 0.0:
            return min(usable, key=lambda arm: self.learner.losses[arm])
        point, chosen = self._now().stream.uniform() * total, usable[-1]
        for arm in usable:
            point -= weights[arm]
            if point < 0.0:
                return arm
        return chosen

    def _learn(self, choice: Choice, outcome: Outcome, costs: list[float]) -> None:
        learner, arms = self.learner, self.arms
        known = self._scored(choice, outcome)
        for arm, tokens in enumerate(known):
            if tokens is not None and arm != choice.index:
                self._now().switch.observe(arm, tokens, costs)
        highest = max((1.0 + arm.depth) / cost for arm, cost in zip(arms, costs))
        turn = max(learner.turn, 1)
        losses = [
            total / turn if tokens is None else 1.0 - tokens / cost / highest
            for tokens, cost, total in zip(known, costs, learner.losses)
        ]
        mixed = sum(weight * loss for weight, loss in zip(learner.weights, losses))
        forget = self._forget
        learner.turn += 1
        learner.losses = [forget * total + loss for total, loss in zip(learner.losses, losses)]
        learner.regrets = [forget * total + mixed - loss for total, loss in zip(learner.regrets, losses)]
        if self._scheme == "normal":
            learner.weights = normal_hedge_weights(learner.regrets)
        else:
            eta = math.sqrt(8.0 * math.log(max(len(arms), 2)) / learner.turn)
            learner.weights = exponential_weights(learner.losses, eta)

    def _scored(self, choice: Choice, outcome: Outcome) -> list[float | None]:
        """[A] tokens per row each arm would have given in this round, None where it is not known."""
        arms, agreement, rows = self.arms, outcome.agreement or {}, len(choice.rows)
        tokens: list[float | None] = [1.0 if arm.off else None for arm in arms]
        for group in self._now().costs.groups:
            drafter = arms[group[0]].drafter
            if drafter is not None and drafter in agreement:
                by_length = [expected_tokens(row) for row in agreement[drafter]]
                if len(by_length) != rows:
                    raise ValueError(
                        f"agreement of {drafter!r} has {len(by_length)} rows for {rows} row(s) of the round"
                    )
                for index in group:
                    deep = [_at(row, arms[index].depth) for row in by_length]
                    tokens[index] = sum(deep) / rows
            elif choice.index in group:
                limit = outcome.limit or [choice.arm.depth] * rows
                for index in group:
                    depth = arms[index].depth
                    if all(m < most or depth <= most for m, most in zip(outcome.accepted, limit)):
                        tokens[index] = 1.0 + sum(min(m, depth) for m in outcome.accepted) / rows
        return tokens


def _at(by_length: list[float], depth: int) -> float:
    """Expected tokens of `depth` drafts; positions behind the scored ones go on at the mean rate so far."""
    scored = len(by_length) - 1
    if depth <= scored:
        return by_length[depth]
    if not scored:
        return 1.0
    alive = by_length[scored] - by_length[scored - 1]
    rate = min(alive ** (1.0 / scored), 1.0)
    total = by_length[scored]
    for _ in range(depth - scored):
        alive *= rate
        total += alive
    return total
