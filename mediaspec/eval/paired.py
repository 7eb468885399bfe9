"""Paired statistics: the same prompt and seed with and without a treatment.

    result = paired_difference(without, with_, better="higher")
    result.mean, result.low, result.high, result.p_value

Per metric the mean difference with a bootstrap interval over pairs and Wilcoxon's signed-rank test; over several
metrics Holm's step-down correction (Scandinavian Journal of Statistics 6, 1979, p. 65) keeps the chance of any false
finding below the level.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

__all__ = ["PairedDifference", "compare_metrics", "holm", "paired_difference"]


@dataclass(frozen=True)
class PairedDifference:
    """A metric with a treatment minus the same metric without it.

    Args:
        pairs: how many.
        without: mean without the treatment.
        treated: mean with it.
        mean: of the differences.
        low, high: ends of the interval of `mean` at `level`.
        relative: mean / without; None where that is 0.
        relative_low, relative_high: interval of `relative`, by resampling pairs.
        improved: share of the pairs that got better; None where the metric has no better direction.
        effect: mean over standard deviation of the differences; None where they are all equal.
        p_value: two-sided, Wilcoxon's signed-rank test.
        p_holm: corrected over the metrics of one comparison; equal to p_value alone.
        better: "higher", "lower" or None.
        level: of the intervals.
    """

    pairs: int
    without: float
    treated: float
    mean: float
    low: float
    high: float
    relative: float | None
    relative_low: float | None
    relative_high: float | None
    improved: float | None
    effect: float | None
    p_value: float
    p_holm: float
    better: str | None
    level: float

    @property
    def verdict(self) -> str:
        """At p_holm < 0.01 "better", "worse" or "changed" (no better direction), else "no difference".

        The test looks at ranks and the direction is the mean's; where some outliers turn the mean against the ranks,
        its interval holds 0 and nothing is claimed.
        """
        if self.p_holm >= 0.01 or self.low <= 0 <= self.high:
            return "no difference"
        if self.better is None:
            return "changed"
        return "better" if (self.mean > 0) == (self.better == "higher") else "worse"

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}


def paired_difference(
    without: Sequence[float],
    treated: Sequence[float],
    *,
    better: str | None = "higher",
    rounds: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> PairedDifference:
    """Compares two runs of the same items.

    Args:
        without: a metric of n items.
        treated: of the same items in the same order.
        better: "higher", "lower", or None where neither is.
        rounds: bootstrap resamples of the pairs.
        level: coverage of the intervals.
        seed: of the resampling.

    Raises:
        ValueError: fewer than two pairs, other counts, or values that are not finite.
        ImportError: SciPy is missing; the message names the extra.

    Example: `paired_difference([1, 1, 1], [2, 2, 2]).mean` is 1.0.
    """
    if better not in ("higher", "lower", None):
        raise ValueError(f"better is {better!r}; write 'higher', 'lower' or None")
    a, b = np.asarray(without, dtype=np.float64), np.asarray(treated, dtype=np.float64)
    if a.ndim != 1 or a.shape != b.shape or len(a) < 2:
        raise ValueError(f"{a.shape} values without and {b.shape} with the treatment; give at least 2 pairs")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise ValueError("a value is NaN or infinite; leave those pairs out")
    difference = b - a
    p_value = _wilcoxon(difference)
    low, high = _interval(difference, rounds, level, seed)
    base = float(a.mean())
    relative = relative_low = relative_high = None
    if base != 0:
        relative = float(difference.mean() / base)
        draws = np.random.default_rng(seed).integers(0, len(a), (rounds, len(a)))
        means = a[draws].mean(1)
        ratios = difference[draws].mean(1)[means != 0] / means[means != 0]
        if len(ratios):
            relative_low, relative_high = map(float, np.quantile(ratios, [(1 - level) / 2, (1 + level) / 2]))
    spread = float(difference.std(ddof=1))
    sign = {"higher": 1.0, "lower": -1.0, None: 0.0}[better]
    return PairedDifference(
        pairs=len(a), without=base, treated=float(b.mean()), mean=float(difference.mean()), low=low, high=high,
        relative=relative, relative_low=relative_low, relative_high=relative_high,
        improved=None if better is None else float((sign * difference > 0).mean()),
        effect=float(difference.mean() / spread) if spread > 0 else None,
        p_value=p_value, p_holm=p_value, better=better, level=level,
    )  # fmt: skip


def _stats() -> Any:
    try:
        from scipy import stats
    except ImportError as error:
        raise ImportError('paired statistics need SciPy; write: pip install "mediaspec[eval]"') from error
    return stats


def _wilcoxon(difference: np.ndarray) -> float:
    """Two-sided p; 1 where nothing differs."""
    if not difference.any():
        return 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SciPy warns that few pairs or ties make it choose the approximation
        return float(_stats().wilcoxon(difference, zero_method="pratt", alternative="two-sided").pvalue)


def _interval(difference: np.ndarray, rounds: int, level: float, seed: int) -> tuple[float, float]:
    """BCa interval of the mean difference (Efron 1987); the mean itself where all differences are equal."""
    mean = float(difference.mean())
    if np.ptp(difference) == 0:
        return mean, mean
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = _stats().bootstrap(
            (difference,), np.mean, n_resamples=rounds, confidence_level=level, method="BCa",
            rng=np.random.default_rng(seed),
        ).confidence_interval  # fmt: skip
    low, high = float(found.low), float(found.high)
    if math.isnan(low) or math.isnan(high):  # two or three pairs: the acceleration is undefined
        draws = np.random.default_rng(seed).integers(0, len(difference), (rounds, len(difference)))
        low, high = map(float, np.quantile(difference[draws].mean(1), [(1 - level) / 2, (1 + level) / 2]))
    return low, high


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's corrected p-values, in the order given.

    Args:
        p_values: in 0..1.

    Example: `holm([0.01, 0.04])` is [0.02, 0.04].
    """
    order = sorted(range(len(p_values)), key=lambda place: p_values[place])
    out, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        out[place] = largest
    return out


def compare_metrics(
    without: Sequence[Mapping[str, float]],
    treated: Sequence[Mapping[str, float]],
    metrics: Mapping[str, str | None],
    *,
    rounds: int = 2000,
    seed: int = 0,
) -> dict[str, PairedDifference]:
    """Compares rows of metrics item by item and corrects over the metrics.

    Args:
        without: one mapping of metrics per item.
        treated: of the same items in the same order.
        metrics: name -> "higher", "lower" or None. A metric that a row lacks is left out of that pair; one with fewer
            than two pairs is left out altogether.

    Returns:
        name -> difference, Holm-corrected over the metrics that have a better direction. The others are watched for
        side effects; they make no claim, and correcting them would hide a loss.

    Raises:
        ValueError: other counts.
    """
    if len(without) != len(treated):
        raise ValueError(f"{len(without)} items without and {len(treated)} with the treatment; give the same items")
    found: dict[str, PairedDifference] = {}
    for name, better in metrics.items():
        pairs = [(a[name], b[name]) for a, b in zip(without, treated) if _has(a, name) and _has(b, name)]
        if len(pairs) < 2:
            continue
        left, right = zip(*pairs)
        found[name] = paired_difference(left, right, better=better, rounds=rounds, seed=seed)
    claims = [name for name, one in found.items() if one.better is not None]
    corrected = dict(zip(claims, holm([found[name].p_value for name in claims])))
    return {name: replace(one, p_holm=corrected.get(name, one.p_value)) for name, one in found.items()}


def _has(row: Mapping[str, Any], name: str) -> bool:
    value = row.get(name)
    return isinstance(value, (int, float)) and math.isfinite(value)
