"""Which rows get how many drafts: the exact allocation of a batch's verify budget.

With S[b, k] the chance that the first k + 1 drafts of row b are all accepted and sps(x) the steps per second with x
scored tokens in the batch, the lengths that maximise

    ( B + sum over b and k < length_b of S[b, k] ) * sps( B + sum of lengths )

are found by one sort: for every total the best set is the largest S, prefixes form by themselves because S falls
within a row, and the best total is an argmax. B rows, K draft length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.component import register_to_config
from ..core.outcome import Choice, Outcome
from .levels import Levels
from .survival import SurvivalCounts, SurvivalPolicy, level_rates

__all__ = ["BudgetPolicy", "allocate", "verify_budget"]


def verify_budget(survival: Tensor, steps_per_second: Tensor) -> tuple[Tensor, Tensor]:
    """The exact allocation on the tensors' device, without a sync.

    Args:
        survival: [B, K] float, S, not rising within a row.
        steps_per_second: [B*K + 1] float, sps(B + x) for x = 0..B*K drafted tokens.

    Returns:
        lengths [B] int64 and the value of the objective, a scalar. Ties take fewer drafts, lower rows first.

    Raises:
        ValueError: shapes that do not fit.

    Example:
        >>> lengths, value = verify_budget(torch.tensor([[0.9, 0.8], [0.2, 0.1]]), torch.tensor([9., 8, 7, 4, 3]))
        >>> lengths.tolist(), round(float(value), 1)
        ([2, 0], 25.9)
    """
    if survival.dim() != 2 or not survival.shape[0]:
        raise ValueError(f"survival has shape {list(survival.shape)}; give [B, K], one row per sequence")
    rows, depth = survival.shape
    if steps_per_second.shape != (rows * depth + 1,):
        raise ValueError(
            f"steps_per_second has shape {list(steps_per_second.shape)}; {rows} rows of {depth} drafts need "
            f"[{rows * depth + 1}], one entry for every number of drafted tokens from 0 on"
        )
    flat = survival.flatten()
    ordered, order = flat.sort(descending=True, stable=True)
    tokens = rows + torch.cat([flat.new_zeros(1), ordered.cumsum(0)])
    value = tokens * steps_per_second
    best = value.argmax()
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(rows * depth, device=flat.device))
    lengths = (rank < best).view(rows, depth).sum(1)
    return lengths, value[best]


def allocate(survival: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[list[int], float]:
    """The same on the host, for the few rows a policy decides on.

    Args:
        survival: [B][K] S, not rising within a row.
        seconds: [B*K + 1] cost of a round with 0, 1, ... drafted tokens in the batch.

    Returns:
        lengths [B] and expected tokens per second.

    Example:
        >>> allocate([[0.9, 0.8], [0.2, 0.1]], [1.0, 1.1, 1.2, 2.0, 2.0])[0]
        [2, 0]
    """
    rows = len(survival)
    order = sorted(((-chance, row) for row, chances in enumerate(survival) for chance in chances))
    if len(seconds) <= len(order):
        raise ValueError(f"seconds has {len(seconds)} entries; {len(order)} drafts need {len(order) + 1}")
    tokens, best, count = float(rows), rows / seconds[0], 0
    for drafted, (negative, _) in enumerate(order, start=1):
        tokens -= negative
        value = tokens / seconds[drafted]
        if value > best:
            best, count = value, drafted
    lengths = [0] * rows
    for _, row in order[:count]:
        lengths[row] += 1
    return lengths, best


@dataclass
class _RowCounts(SurvivalCounts):
    """Counts per row besides: row id (as text) -> per group [risk [K], accept [K]]."""

    rows: dict[str, list[list[list[float]]]]


class BudgetPolicy(SurvivalPolicy):
    """`survival` whose rows draft unequal lengths: drafts go where they survive.

    The drafter is chosen as by `survival`; then every row's own counts, shrunk to the batch's, say how far its drafts
    get, and the budget is allocated exactly. The cost of x drafted tokens is read off the cost table as that of x/B
    drafts per row, so this pays where a pass costs by its scored tokens (large batches, packed rows); where a pass
    costs by its longest row, use `survival`.

    Args: as `SurvivalPolicy`.

    Example:
        >>> policy = BudgetPolicy(max_draft_tokens=2, costs=[1.0, 1.1, 1.2])
        >>> policy.begin(["ngram"])
        >>> policy.choose([0, 1]).lengths
        (2, 2)
    """

    name = "budget"

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

    def _fresh(self) -> _RowCounts:
        counts = super()._fresh()
        return _RowCounts(
            counts.risk, counts.accept, counts.old_risk, counts.old_accept, counts.last, counts.misses, {}
        )

    def _request(self) -> None:
        super()._request()
        self.learner.rows = {}

    def _allocate(self, index: int, rows: tuple[int, ...], costs: list[float]) -> tuple[int, tuple[int, ...] | None]:
        memory, table = self._now(), self._now().costs
        number = table.member[index]
        if number < 0 or memory.arms[index].tree is not None or len(rows) < 2:
            return index, None
        group = table.groups[number]
        depths = [0] + [memory.arms[arm].depth for arm in group]
        plain = group[0] if table.plain is None else table.plain
        seconds = _by_total(depths, [costs[plain]] + [costs[arm] for arm in group], len(rows))
        usual = level_rates(*self._levels(number))
        survival = []
        for row in rows:
            counts = self.learner.rows.get(str(row))
            rates = usual if counts is None else Levels.of(*counts[number]).conditional(usual)
            alive = 1.0
            survival.append([alive := alive * rate for rate in rates])
        lengths, _ = allocate(survival, seconds)
        longest = max(lengths)
        if not longest and table.plain is not None:
            return table.plain, None
        fitting = next(arm for arm in group if memory.arms[arm].depth >= longest)
        return fitting, tuple(lengths)

    def _learn(self, choice: Choice, outcome: Outcome, costs: list[float]) -> None:
        super()._learn(choice, outcome, costs)
        memory, learner = self._now(), self.learner
        number = memory.costs.member[choice.index]
        if number < 0:
            return
        limit = outcome.tested(choice)
        for row, accepted, most in zip(choice.rows, outcome.accepted, limit):
            counts = learner.rows.get(str(row))
            if counts is None:
                depths = [len(risk) for risk in learner.risk]
                counts = learner.rows[str(row)] = [[[0.0] * depth, [0.0] * depth] for depth in depths]
            levels = Levels.of(*counts[number])
            levels.scale(self._forget)
            levels.add(accepted, most)
            counts[number] = [levels.risk, levels.accept]


def _by_total(depths: list[int], costs: list[float], rows: int) -> list[float]:
    """[rows * K + 1] cost of a round with x drafted tokens, linear between the known x = rows * depth."""
    table = [costs[0]]
    for (start, low), (end, high) in zip(zip(depths, costs), zip(depths[1:], costs[1:])):
        steps = (end - start) * rows
        table += [low + (high - low) * step / steps for step in range(1, steps + 1)]
    return table
