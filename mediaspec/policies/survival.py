"""Draft length from censored survival counts and a measured cost table: the default policy.

Draft length is not a bandit problem. Lengths are nested, so one round shows what every shorter length would have
given (`levels`), and the best length has a closed form (the throughput objective of
arXiv:2505.15141, with the expectation estimated level by level):

    length = argmax over g of E[g] / C(g),    E[g] = 1 + sum over k < g of prod over j <= k of conditional_j

The same ratio chooses among drafters, trees and rules. Conditional rates are those of the running request, shrunk
level by level to what earlier requests showed: the request moves all levels together, in odds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.arm import Arm, make_arms
from ..core.component import register_to_config
from ..core.outcome import Choice, Outcome
from ..core.tree import TreeSpec
from .base import DraftPolicy, Learner, check_count, check_number
from .levels import Levels, expected_tokens
from .off_switch import probe_interval

__all__ = ["SurvivalCounts", "SurvivalPolicy", "level_rates"]

FIRST_RATE = 0.7
"""Acceptance believed of a drafter nothing is known about: high enough to be tried."""
REQUEST_WEIGHT = 16.0
"""Tests that earlier requests count for in the rate of the running one."""
OPTIMISM = 1.5
"""Standard errors granted to a drafter that is not running: it is tried while its rate is not known."""
ALARM = 1e-3
"""Chance of a row of misses below which the counts are taken to be of another kind of text, and halved."""
HOLD = 32
"""Rounds over which a change of drafter must earn its catch-up."""
MARGIN = 1.02
"""What a draft must promise over plain decoding: the best of many uncertain promises is rarely kept in full."""
REMEMBER = 512.0
"""First-level tests that earlier requests count for at most."""


def level_rates(now: Levels, before: Levels, optimism: float = 0.0, rows: int = 1) -> list[float]:
    """[K] conditional acceptance per level of the running request.

    Args:
        now: counts of this request; before: of earlier ones.
        optimism: standard errors added to the request's own rate.
        rows: of the batch; the mean of B texts strays from earlier ones as little as B times the tests would.

    Example:
        >>> counts = Levels(2)
        >>> counts.add(accepted=1, tested=2)
        >>> [round(rate, 3) for rate in level_rates(counts, Levels(2))]
        [0.68, 0.48]
    """
    tests, weight = sum(now.risk), 2.0
    if sum(before.risk):
        pool, weight = before.pooled(FIRST_RATE), REQUEST_WEIGHT * rows
        usual = before.conditional([pool] * len(before.risk))
        due = sum(risk * rate for risk, rate in zip(now.risk, usual))
        seen = (sum(now.accept) + weight * pool) / (tests + weight)
        seen += optimism * math.sqrt(seen * (1.0 - seen) / (tests + weight))
        shift = _odds(seen) / _odds((due + weight * pool) / (tests + weight))
        return now.conditional([shift * _odds(rate) / (1.0 + shift * _odds(rate)) for rate in usual])
    pool = now.pooled(FIRST_RATE, weight)
    pool += optimism * math.sqrt(pool * (1.0 - pool) / (tests + weight))
    return now.conditional([min(pool, 1.0)] * len(now.risk))


def _odds(rate: float) -> float:
    rate = min(max(rate, 1e-4), 1.0 - 1e-4)
    return rate / (1.0 - rate)


@dataclass
class SurvivalCounts(Learner):
    """Per group of arms (drafter, tree, rule): counts of this request and of earlier ones, the last round it ran and
    its latest rounds in a row that accepted nothing."""

    risk: list[list[float]]
    accept: list[list[float]]
    old_risk: list[list[float]]
    old_accept: list[list[float]]
    last: list[int]
    misses: list[int]


class SurvivalPolicy(DraftPolicy):
    """Chooses drafter and draft length by expected tokens over measured cost; off when plain decoding is better.

    Args:
        max_draft_tokens: longest draft considered; every length up to it is an arm of every drafter.
        trees: draft trees to consider besides, each as the parents of its nodes.
        arms, costs, probe_every, seed: see `DraftPolicy` (no number is drawn here, the seed is unused).
        forget: what a round of a drafter leaves of the running request's counts; 0.98 looks back 50 rounds, 1 keeps
            all counts whatever happens.

    Example:
        >>> policy = SurvivalPolicy(max_draft_tokens=4, costs=[1.0, 1.1, 1.2, 1.3, 1.4])
        >>> policy.begin(["ngram"])
        >>> policy.choose([0]).arm.num_draft_tokens
        4
    """

    name = "survival"
    switching = False

    @register_to_config
    def __init__(
        self,
        max_draft_tokens: int = 8,
        trees: Sequence[Sequence[int]] = (),
        arms: Sequence[Mapping[str, Any]] | None = None,
        costs: Sequence[float] | None = None,
        probe_every: int = 32,
        seed: int = 0,
        forget: float = 0.98,
    ) -> None:
        self._shape(max_draft_tokens, trees, forget)
        self._settle(None, arms, costs, probe_every, seed)

    def _shape(self, max_draft_tokens: int, trees: Sequence[Sequence[int]], forget: float) -> None:
        check_count("max_draft_tokens", max_draft_tokens, 1, 8)
        check_number("forget", forget, 0.5, 1.0, 0.98)
        self._longest, self._forget = max_draft_tokens, float(forget)
        self._trees = [TreeSpec(tuple(parents)) for parents in trees]
        self._tokens: list[list[float]] | None = None
        self._for, self._rows = -1, 1

    def _arms(self, drafters: list[str], limits: Mapping[str, int] | None) -> tuple[Arm, ...]:
        return make_arms(drafters, range(1, self._longest + 1), trees=self._trees, limits=limits)

    def _fresh(self) -> SurvivalCounts:
        memory = self._now()
        depths = [memory.arms[group[-1]].depth for group in memory.costs.groups]
        risk, accept, old_risk, old_accept = ([[0.0] * depth for depth in depths] for _ in range(4))
        return SurvivalCounts(risk, accept, old_risk, old_accept, [0] * len(depths), [0] * len(depths))

    def _request(self) -> None:
        learner = self.learner
        for number in range(len(learner.last)):
            old = Levels.of(learner.old_risk[number], learner.old_accept[number])
            old.merge(Levels.of(learner.risk[number], learner.accept[number]))
            if old.risk[0] > REMEMBER:
                old.scale(REMEMBER / old.risk[0])
            learner.old_risk[number], learner.old_accept[number] = old.risk, old.accept
            learner.risk[number] = [0.0] * len(old.risk)
            learner.accept[number] = [0.0] * len(old.risk)
        self._tokens, self._for = None, -1

    def _expected(self) -> list[list[float]]:
        """Per group, [K+1] expected tokens by length; what has not changed since the last round is kept."""
        memory = self._now()
        running = self._running(memory)
        if self._tokens is None or self._for != running:
            groups = range(len(self.learner.last))
            self._tokens = [self._group_tokens(g, 0.0 if g == running else OPTIMISM) for g in groups]
            self._for = running
        return self._tokens

    def _running(self, memory: Any) -> int:
        """The group that ran the last round, -1 after a plain one."""
        last = self.learner.last
        return next((g for g, when in enumerate(last) if when == memory.rounds and when), -1)

    def _levels(self, number: int) -> tuple[Levels, Levels]:
        """Counts of a group in this request and in earlier ones."""
        learner = self.learner
        now = Levels.of(learner.risk[number], learner.accept[number])
        return now, Levels.of(learner.old_risk[number], learner.old_accept[number])

    def _group_tokens(self, number: int, optimism: float) -> list[float]:
        return expected_tokens(level_rates(*self._levels(number), optimism, self._rows))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._tokens, self._for = None, -1

    def _next(self, memory: Any, rows: tuple[int, ...], costs: list[float]) -> tuple[int, bool]:
        if len(rows) != self._rows:
            self._rows, self._tokens = len(rows), None
        index, learning = super()._next(memory, rows, costs)
        if learning or not self._every:
            return index, learning
        expected, table = self._expected(), memory.costs
        number = table.member[index]
        best = (1.0 if number < 0 else expected[number][memory.arms[index].depth]) / costs[index]
        for other, group in enumerate(table.groups):
            waited = memory.rounds - self.learner.last[other] + 1
            if other != number and waited >= self._every and group[0] not in memory.idle:
                gains = expected[other]
                loss, arm = min(
                    ((costs[arm] + table.switch[other]) * best - gains[memory.arms[arm].depth], arm) for arm in group
                )
                if waited >= probe_interval(len(table.groups) * loss, self._every):
                    return arm, True
        return index, False

    def _pick(self, rows: tuple[int, ...], costs: list[float], usable: list[int]) -> int:
        memory, expected = self._now(), self._expected()
        table, arms = memory.costs, memory.arms
        chosen, best = usable[0], 0.0  # every arm of a group is usable or none is
        if table.plain is not None:
            chosen, best = table.plain, MARGIN / costs[table.plain]
        for number, group in enumerate(table.groups):
            tokens, first = expected[number], arms[group[0]]
            if group[0] in memory.idle:
                continue
            extra = 0.0 if first.drafter == memory.drafter else table.switch[number] / HOLD
            for index in group:
                value = tokens[arms[index].depth] / (costs[index] + extra)
                if value > best:
                    chosen, best = index, value
        return chosen

    def _paid(self, choice: Choice, outcome: Outcome, costs: list[float]) -> bool:
        """True when a probe gave more tokens per cost than the best of the other groups is expected to."""
        table, arms, expected = self._now().costs, self.arms, self._expected()
        best = 0.0 if table.plain is None else 1.0 / costs[table.plain]
        for tokens, group in zip(expected, table.groups):
            if choice.index not in group:
                best = max(best, max(tokens[arms[index].depth] / costs[index] for index in group))
        return (1.0 + sum(outcome.accepted) / len(choice.rows)) / costs[choice.index] > best

    def _learn(self, choice: Choice, outcome: Outcome, costs: list[float]) -> None:
        memory, learner = self._now(), self.learner
        number = memory.costs.member[choice.index]
        if number < 0:
            return
        learner.last[number] = memory.rounds
        levels = Levels.of(learner.risk[number], learner.accept[number])
        tested = outcome.tested(choice)
        if any(tested):
            learner.misses[number] = 0 if any(outcome.accepted) else learner.misses[number] + 1
        misses = learner.misses[number]
        rate = (levels.risk[0] - levels.accept[0] + 1.0) / (levels.risk[0] + 2.0)
        changed = (misses > 1 and rate**misses < ALARM) or (choice.probe and self._paid(choice, outcome, costs))
        if self._forget < 1.0:  # half is left when the drafter is no longer what it was
            levels.scale(0.5 if changed else self._forget)
        for accepted, most in zip(outcome.accepted, tested):
            levels.add(accepted, most)
        learner.risk[number], learner.accept[number] = levels.risk, levels.accept
        if self._tokens is not None and self._for == number:
            self._tokens[number] = self._group_tokens(number, 0.0)
        else:
            self._tokens = None
