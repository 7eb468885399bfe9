"""Confidence intervals over rooms and training seeds by the bootstrap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

__all__ = ["Interval", "bootstrap_mean", "spearman"]


@dataclass(frozen=True)
class Interval:
    """Args: mean; low, high, ends of its interval; count, of values; groups, of seeds that were resampled."""

    mean: float
    low: float
    high: float
    count: int
    groups: int

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def bootstrap_mean(
    values: Sequence[float], groups: Sequence[int] | None = None, *, rounds: int = 2000, level: float = 0.95,
    seed: int = 0,
) -> Interval:  # fmt: skip
    """Mean with a percentile interval.

    Args:
        values: [n] finite.
        groups: [n] training seed (or other cluster) of each value. Groups are resampled first and values within them
            after, so that rooms of one training count as what they are. None: every value by itself.
        rounds: resamples.
        level: coverage.
        seed: of the resampling.

    Raises:
        ValueError: no values, values that are not finite, or other counts.

    Example: `bootstrap_mean([1.0, 1.0]).high` is 1.0.
    """
    data = np.asarray(values, dtype=np.float64)
    if data.ndim != 1 or not len(data) or not np.isfinite(data).all():
        raise ValueError(f"{data.shape} values; give at least one, all finite")
    if groups is not None and len(groups) != len(data):
        raise ValueError(f"{len(groups)} groups for {len(data)} values; give one each")
    rng = np.random.default_rng(seed)
    tail = (1 - level) / 2
    if groups is None or len(set(groups)) == 1:
        means = data[rng.integers(0, len(data), (rounds, len(data)))].mean(1)
    else:
        names = np.asarray(groups)
        parts = [data[names == name] for name in sorted(set(groups))]
        sizes = np.array([len(part) for part in parts])
        padded = np.zeros((len(parts), sizes.max()))
        for part, row in zip(parts, padded):
            row[: len(part)] = part
        drawn = rng.integers(0, len(parts), (rounds, len(parts)))
        count = sizes[drawn][..., None]  # [rounds, groups, 1]
        within = (rng.random((rounds, len(parts), sizes.max())) * count).astype(np.int64)
        taken = np.arange(sizes.max()) < count  # a group gives as many values as it has
        means = np.where(taken, padded[drawn[..., None], within], 0).sum((1, 2)) / taken.sum((1, 2))
    low, high = np.quantile(means, [tail, 1 - tail])
    return Interval(float(data.mean()), float(low), float(high), len(data), 1 if groups is None else len(set(groups)))


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Rank correlation of two lists, ties sharing their mean rank; None below two values or where one is constant.

    Example: `spearman([1, 2, 3], [10, 30, 20])` is 0.5.
    """
    if len(a) != len(b):
        raise ValueError(f"{len(a)} against {len(b)} values; give pairs")
    if len(a) < 2:
        return None
    ranks = []
    for values in (np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)):
        order = (values[:, None] > values).sum(1) + 0.5 * ((values[:, None] == values).sum(1) - 1)
        ranks.append(order - order.mean())
    norm = float(np.linalg.norm(ranks[0]) * np.linalg.norm(ranks[1]))
    return round(float(ranks[0] @ ranks[1]) / norm, 12) if norm else None
