"""What a round of each arm costs: a table measured while decoding, by batch size and context length.

Costs enter every policy as expected cost per arm, never as the ratio of one round, because throughput converges to
the ratio of the means. Batch size and context act through this table alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..core.arm import Arm, groups_of

__all__ = ["CostTable"]

WINDOW = 32
"""Rounds an average looks back: it must follow a context that grows by an octave within some hundred rounds."""
OUTLIER = 2.0
"""A round beyond this multiple of its average counts as this multiple (a compilation, a page fault, another job)."""
DRAFT_SHARE = 0.1
"""Cost of one drafted and verified token in plain rounds, believed until something was measured."""


class _Cells:
    """One (batch, context) bucket: `count` and `mean` [A] of measured rounds, `shape` [A] believed before."""

    def __init__(self, shape: list[float]) -> None:
        self.count = [0] * len(shape)
        self.mean = [0.0] * len(shape)
        self.shape = shape
        self.cost = list(shape)


class CostTable:
    """Expected cost of a round per arm (A arms), in seconds once measured.

    Args:
        arms: the arms, plain decoding among them or not.
        given: [A] costs in any unit; nothing is measured then and decisions do not depend on the clock.

    Raises:
        ValueError: `given` does not hold one positive number per arm.

    Example:
        >>> from mediaspec.core.arm import make_arms
        >>> table = CostTable(make_arms(["ngram"], (1, 2)), given=[1.0, 1.1, 1.2])
        >>> table.costs(rows=1, length=0)
        [1.0, 1.1, 1.2]
    """

    def __init__(self, arms: Sequence[Arm], given: Sequence[float] | None = None) -> None:
        self.groups = groups_of(arms)
        self.depth = [arm.depth for arm in arms]
        self.plain = next((index for index, arm in enumerate(arms) if arm.off), None)
        self.member = [-1] * len(arms)
        for number, group in enumerate(self.groups):
            for index in group:
                self.member[index] = number
        self.measured = given is None
        shape = [1.0 + DRAFT_SHARE * depth for depth in self.depth]
        if given is not None:
            shape = [float(cost) for cost in given]
            if len(shape) != len(arms) or not all(0 < cost < float("inf") for cost in shape):
                raise ValueError(
                    f"costs must be one positive number for each of the {len(arms)} arms, got {list(given)}; "
                    f"write costs={[1.0 + DRAFT_SHARE * depth for depth in self.depth]} or leave them out"
                )
        self.shape = shape
        self.switch = [0.0] * len(self.groups)
        self._entries = [0] * len(self.groups)
        self._cells: dict[tuple[int, int], _Cells] = {}

    def costs(self, rows: int, length: int) -> list[float]:
        """[A] expected costs for `rows` live rows whose longest context is `length` tokens. Read it, do not write."""
        return self._bucket(rows, length).cost if self.measured else self.shape

    def observe(self, arm: int, rows: int, length: int, seconds: float, entering: bool) -> None:
        """Takes one measured round.

        Args:
            arm: index of the arm; rows, length: as in `costs`.
            seconds: from one host sync of the loop to the next.
            entering: its drafter did not run in the round before and may have caught up first; what the round
                cost beyond its average is then the drafter's switching cost.
        """
        if not self.measured:
            return
        cells = self._bucket(rows, length)
        count, mean, group = cells.count[arm], cells.mean[arm], self.member[arm]
        if entering and count > 1:
            extra = min(max(seconds - mean, 0.0), OUTLIER * mean)
            before = self.switch[group] if self._entries[group] else extra
            # the first entries find caches cold; the lowest of them is nearest to what later ones cost
            self.switch[group] = min(before, extra) if self._entries[group] < 3 else before + (extra - before) / 8
            self._entries[group] += 1
            return
        if count == 0:
            cells.mean[arm] = seconds
        elif count == 1:  # the first round of a shape is often cold
            cells.mean[arm] = min(mean, seconds)
        else:
            cells.mean[arm] = mean + (min(seconds, OUTLIER * mean) - mean) / min(count + 2, WINDOW)
        cells.count[arm] = count + 1
        self._estimate(cells, group)

    def anchors(self) -> list[int]:
        """Arms to measure first, each twice: plain decoding, then the longest and a middle arm of every group."""
        order = [] if self.plain is None else [self.plain]
        for group in self.groups:
            order += list(dict.fromkeys([group[-1], group[(len(group) - 1) // 2]]))
        return [arm for arm in order for _ in range(2)]

    def state_dict(self) -> dict[str, Any]:
        cells = [
            {"bucket": list(key), "count": list(one.count), "mean": list(one.mean), "shape": list(one.shape)}
            for key, one in self._cells.items()
        ]
        return {"switch": list(self.switch), "entries": list(self._entries), "cells": cells}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.switch = [float(extra) for extra in state["switch"]]
        self._entries = [int(count) for count in state["entries"]]
        self._cells = {}
        for saved in state["cells"]:
            cells = _Cells([float(cost) for cost in saved["shape"]])
            cells.count = [int(count) for count in saved["count"]]
            cells.mean = [float(mean) for mean in saved["mean"]]
            if not len(cells.shape) == len(cells.count) == len(cells.mean) == len(self.depth):
                raise ValueError(f"a saved cost table has {len(cells.count)} arms, this policy has {len(self.depth)}")
            self._estimate(cells, -1)
            self._cells[int(saved["bucket"][0]), int(saved["bucket"][1])] = cells

    def _bucket(self, rows: int, length: int) -> _Cells:
        """Octaves of the batch size and, from 256 tokens on, of the context length."""
        key = ((rows - 1).bit_length(), (length >> 8).bit_length())
        cells = self._cells.get(key)
        if cells is None:
            known = sorted(self._cells, key=lambda k: (4 * abs(k[0] - key[0]) + abs(k[1] - key[1]), k))
            cells = _Cells(list(self._cells[known[0]].cost if known else self.shape))
            self._cells[key] = cells
        return cells

    def _estimate(self, cells: _Cells, group: int) -> None:
        """Arms that were not measured: the believed shape in units of the measured plain round, plus what the
        measured lengths of the same group deviate from that, linear in the length."""
        count, mean, shape, cost, plain = cells.count, cells.mean, cells.shape, cells.cost, self.plain
        if plain is not None and count[plain]:
            scale = mean[plain] / shape[plain]
        else:
            seen = [index for index, number in enumerate(count) if number]
            scale = sum(mean[i] for i in seen) / sum(shape[i] for i in seen) if seen else 1.0
        every = group < 0 or not (plain is not None and count[plain])
        if plain is not None and every:
            cost[plain] = scale * shape[plain]
        floor = 0.5 * scale * (shape[plain] if plain is not None else min(shape))
        for members in self.groups if every else (self.groups[group],):
            before, off, waiting = 0, 0.0, []
            for index in members:
                if not count[index]:
                    waiting.append(index)
                    continue
                here, deviation = self.depth[index], mean[index] - scale * shape[index]
                slope = (deviation - off) / (here - before)
                for between in waiting:
                    part = off + slope * (self.depth[between] - before)
                    cost[between] = max(scale * shape[between] + part, floor)
                waiting = []
                cost[index] = mean[index]
                before, off = here, deviation
            slope = off / before if before else 0.0
            for beyond in waiting:
                cost[beyond] = max(scale * shape[beyond] + slope * self.depth[beyond], floor)
