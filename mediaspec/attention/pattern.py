"""A static sparse pattern of a key head: sinks, recent window, slashes and columns, and how a strip builds it.

    keep(p) = sinks + {p - recent + 1 .. p} + {p - d - band .. p - d + band for every slash d} + columns

Slash positions are arithmetic in the query's position p, so nothing is updated while decoding. A pattern decides what
a draft reads; the verification reads everything. Letters: L layers, H query heads, G query heads per key head,
w strip rows, n keys, p position of a query.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .select import union

__all__ = ["HeadPattern", "SparsePattern", "build_pattern", "indices_of"]

COLUMNS_AT_ONCE = 8  # with 32, one strong column is taken for 21 weak slashes


@dataclass(frozen=True)
class HeadPattern:
    """What one key head reads.

    Args:
        sinks: positions that every query sees.
        recent: keys up to the query's own, itself included; at least 1.
        slash: distances d; each keeps d - band .. d + band.
        band: half width of a slash.
        columns: further positions, taken from one prompt (they mean nothing on another).

    Raises:
        ValueError: `recent` below 1 or a negative number anywhere.

    Example:
        >>> HeadPattern(sinks=(0,), recent=2, slash=(6,)).keys(10)
        [0, 3, 4, 5, 9, 10]
    """

    sinks: tuple[int, ...] = (0, 1, 2, 3)
    recent: int = 128
    slash: tuple[int, ...] = ()
    band: int = 1
    columns: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.recent < 1:
            raise ValueError(f"recent={self.recent}; a query sees at least itself, give 1 or more")
        if min((*self.sinks, *self.slash, *self.columns, self.band), default=0) < 0:
            raise ValueError(f"{self}: positions, distances and band must not be negative")

    def distances(self, limit: int) -> list[int]:
        """Distances below `limit` that every query sees, ascending, each once."""
        around = {d + step for d in self.slash for step in range(-self.band, self.band + 1)}
        near = min(self.recent, limit)
        return [*range(near), *sorted(d for d in around if near <= d < limit)]

    def positions(self) -> list[int]:
        """Positions that every query sees, ascending, each once."""
        return sorted({*self.sinks, *self.columns})

    def keys(self, position: int) -> list[int]:
        """What the query at `position` sees: ascending, unique, within [0, position]."""
        fixed = {key for key in self.positions() if key <= position}
        return sorted(fixed | {position - d for d in self.distances(position + 1)})

    def mask(self, query_at: Tensor, key_at: Tensor) -> Tensor:
        """[..., n] bool, which of the keys at `key_at` [n] a query at `query_at` [...] sees."""
        distance = query_at[..., None] - key_at
        seen = torch.isin(key_at, torch.tensor(self.positions(), dtype=torch.int64, device=key_at.device))
        seen = seen | (distance < self.recent)
        for d in self.slash:
            seen = seen | ((distance - d).abs() <= self.band)
        return seen & (distance >= 0)


@dataclass(frozen=True)
class SparsePattern:
    """The patterns of all layers and key heads of a model.

    Args:
        heads: [layer][key head].
        model: what it was measured on, for messages; "" where nothing was.

    Raises:
        ValueError: no layer, or layers with different numbers of heads.

    Example:
        >>> pattern = SparsePattern(((HeadPattern(sinks=(0,), recent=2),),))
        >>> pattern.indices(torch.tensor([0, 5]), 8)[0].tolist()
        [[[0, -1, -1]], [[0, 4, 5]]]
    """

    heads: tuple[tuple[HeadPattern, ...], ...]
    model: str = ""

    def __post_init__(self) -> None:
        if not self.heads or len({len(layer) for layer in self.heads}) != 1 or not self.heads[0]:
            raise ValueError("a pattern needs at least one layer, and as many key heads in each: give [layer][head]")

    @classmethod
    def uniform(cls, layers: int, heads: int, pattern: HeadPattern) -> SparsePattern:
        """The same pattern everywhere."""
        return cls(((pattern,) * heads,) * layers)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SparsePattern:
        """From `to_dict`, or from a whole report of `mediaspec inspect` (its "patterns" are taken).

        Raises:
            ValueError: neither.
        """
        found = data.get("patterns", data.get("heads"))
        if not isinstance(found, Sequence) or isinstance(found, str):
            raise ValueError(
                f'no "patterns" among {sorted(data)}; pass the JSON object that `mediaspec inspect` wrote'
            )
        layers = tuple(tuple(_head(one) for one in layer) for layer in found)
        return cls(layers, str(data.get("model", "")))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"model": self.model, "heads": [[_plain(one) for one in layer] for layer in self.heads]}

    def without_columns(self) -> SparsePattern:
        """The part that holds for every prompt: sinks, window and slashes."""
        return replace(self, heads=tuple(tuple(replace(one, columns=()) for one in layer) for layer in self.heads))

    def check(self, layers: int, heads: int) -> None:
        """Refuses a model of another shape.

        Raises:
            ValueError: naming both shapes.
        """
        mine = len(self.heads), len(self.heads[0])
        if mine != (layers, heads):
            raise ValueError(
                f"the pattern{f' of {self.model}' if self.model else ''} has {mine[0]} layers of {mine[1]} key heads, "
                f"the target {layers} of {heads}; measure this model with `mediaspec inspect`"
            )

    def tables(self, limit: int, device: torch.device | str = "cpu", ahead: int = 1) -> tuple[Tensor, Tensor]:
        """Positions [L, heads, A] and distances [L, heads, E] of all heads below `limit`, padded with -1.

        Args:
            ahead: the distances are seen from the first of so many queries in a row and hold what any of them sees.
        """
        flat = [one for layer in self.heads for one in layer]
        shape = len(self.heads), len(self.heads[0])
        fixed = [[key for key in one.positions() if key < limit] for one in flat]
        back: list[list[int]] = []
        for one in flat:
            seen = one.distances(limit + ahead - 1)
            back.append(sorted({d - step for d in seen for step in range(min(ahead, d + 1)) if d - step < limit}))
        tables = []
        for rows in (fixed, back):
            width = max(1, max(map(len, rows)))
            padded = torch.tensor([row + [-1] * (width - len(row)) for row in rows], device=device)
            tables.append(padded.view(*shape, width))
        return tables[0], tables[1]

    def indices(self, positions: Tensor, limit: int) -> Tensor:
        """[L, B, heads, K] int64: what queries at `positions` [B] see, ascending, unique, -1 behind.

        Args:
            limit: no position lies at or beyond it; bounds K.
        """
        return indices_of(*self.tables(limit, positions.device), positions)


def indices_of(fixed: Tensor, distances: Tensor, positions: Tensor) -> Tensor:
    """[L, B, heads, K] from the tables of `SparsePattern.tables` and query positions [B]."""
    at = positions[:, None, None]
    here = torch.where((fixed[:, None] >= 0) & (fixed[:, None] <= at), fixed[:, None], -1)
    back = torch.where(distances[:, None] >= 0, at - distances[:, None], -1)
    return union([here.expand(-1, len(positions), -1, -1), back])


def build_pattern(
    mass: Tensor,
    sinks: Sequence[int] = (0, 1, 2, 3),
    *,
    recent: int = 128,
    band: int = 1,
    target: float = 0.95,
    budget: int = 1024,
) -> HeadPattern:
    """Adds whatever keeps the most new mass per key until `target` of it or the budget is reached.

    Choices at every step: the recent window doubles, one slash, the 8 best columns. Mass that is kept already does not
    count again, so crossings of columns and slashes are counted once.

    Args:
        mass: [w, n] probabilities of the strip's rows, mean over the query heads of the key head; row r stands at
            position n - w + r.
        sinks, recent: what every pattern starts from.
        band: half width of a slash.
        target: share of the mass to keep.
        budget: keys per query at most.

    Raises:
        ValueError: more rows than keys, or a target outside (0, 1].
    """
    rows, total = mass.shape
    if rows > total or not 0 < target <= 1:
        raise ValueError(f"mass is {list(mass.shape)}, target {target}: give [w, n] with w <= n and 0 < target <= 1")
    left = _Left(mass)
    whole = float(left.columns.sum())
    kept_sinks = [key for key in sorted(set(sinks)) if key < total]
    left.drop_columns(torch.tensor(kept_sinks, dtype=torch.int64, device=mass.device))
    recent = min(recent, total)
    left.drop_distances(0, recent)
    slash: list[int] = []
    columns: list[int] = []
    used = len(kept_sinks) + recent
    width = 2 * band + 1
    while float(left.columns.sum()) > (1 - target) * whole:
        choices = []  # gain per key, keys, kind
        wider = min(recent, total - recent)
        if wider and used + wider <= budget:
            choices.append((float(left.distances[recent : recent + wider].sum()) / wider, wider, 0))
        # distances beyond n - w are seen by some rows only; their mass is that of columns at the start
        reach = total - rows + 1
        if used + width <= budget and reach > recent:
            bands = _bands(left.distances[:reach], band)
            bands[:recent] = 0
            best = int(bands.argmax())
            choices.append((float(bands[best]) / width, width, 1))
        count = min(COLUMNS_AT_ONCE, budget - used)
        if count > 0:
            top = left.columns.topk(min(count, total))
            choices.append((float(top.values.sum()) / len(top.values), len(top.values), 2))
        if not choices or max(choices)[0] <= 0:
            break
        _, cost, kind = max(choices, key=lambda one: (one[0], -one[2]))
        if kind == 0:
            left.drop_distances(recent, recent + wider)
            recent += wider
        elif kind == 1:
            left.drop_distances(max(best - band, 0), best + band + 1)
            slash.append(best)
        else:
            found = top.indices[top.values > 0]
            left.drop_columns(found)
            columns += found.tolist()
        used += cost
    slash = [d for d in slash if d + band >= recent]
    return HeadPattern(tuple(kept_sinks), recent, tuple(sorted(slash)), band, tuple(sorted(columns)))


def _bands(distances: Tensor, band: int) -> Tensor:
    """Mass of d - band .. d + band where d is the strongest of them, else 0: a slash is centred on its peak."""
    width = 2 * band + 1
    around = F.pad(distances, (band, band)).unfold(0, width, 1)
    return torch.where(distances >= around.amax(1), around.sum(1), 0.0)


class _Left:
    """Mass not kept yet, with its sums by column and by distance."""

    def __init__(self, mass: Tensor) -> None:
        self.mass = mass.double().clone()
        rows, total = mass.shape
        self.at = torch.arange(total - rows, total, device=mass.device)
        self.row = torch.arange(rows, device=mass.device)
        self.columns = self.mass.sum(0)
        distance = (self.at[:, None] - torch.arange(total, device=mass.device)).clamp(min=0)
        self.distances = torch.zeros_like(self.columns).scatter_add(0, distance.flatten(), self.mass.flatten())

    def drop_columns(self, keys: Tensor) -> None:
        row = self.row[:, None].expand(-1, len(keys))
        self._drop(row, keys.expand(len(self.row), -1))

    def drop_distances(self, first: int, stop: int) -> None:
        keys = self.at[:, None] - torch.arange(first, stop, device=self.at.device)
        row = self.row[:, None].expand_as(keys)
        there = keys >= 0
        self._drop(row[there], keys[there])

    def _drop(self, row: Tensor, keys: Tensor) -> None:
        gone = self.mass[row, keys].flatten()
        self.mass[row, keys] = 0
        self.columns.scatter_add_(0, keys.flatten(), -gone)
        self.distances.scatter_add_(0, (self.at[row] - keys).clamp(min=0).flatten(), -gone)


def _plain(one: HeadPattern) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(one).items()}


def _head(data: Mapping[str, Any]) -> HeadPattern:
    settings: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
    return HeadPattern(**settings)
