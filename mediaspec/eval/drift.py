"""Drift of a set of pictures: the ledger's per-picture totals, averaged.

A relaxed rule emits every token from a law at a known total-variation distance from the target's. With m the law of
whole pictures and p the target's,

    TV(m, p) <= E_m [ sum_i TV_i ]                                       (arXiv:2601.09212; chain rule for couplings)

and the ledger of one picture is one draw of the inner sum. So the mean over pictures estimates a bound on the
distance of the two laws of whole pictures; above 1 it says nothing, since no two laws are further apart than 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

__all__ = ["DriftSummary", "drift_summary"]


@dataclass(frozen=True)
class DriftSummary:
    """Drift per picture.

    Args:
        mean: average accumulated TV of a picture, the estimated bound before it is cut at 1.
        error: standard error of the mean.
        largest: of any picture.
        per_token: mean divided by tokens per picture.
        tv_bound: min(1, mean): bound on TV between the laws of whole pictures.
    """

    mean: float
    error: float
    largest: float
    per_token: float
    tv_bound: float

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def drift_summary(per_image: Sequence[float], tokens_per_image: int) -> DriftSummary:
    """Summarises the ledger's totals.

    Args:
        per_image: accumulated TV of each picture, >= 0.
        tokens_per_image: T.

    Raises:
        ValueError: no pictures, or a negative or non-finite value.

    Example: `drift_summary([0.0, 0.0], 256).tv_bound` is 0.0.
    """
    values = np.asarray(per_image, dtype=np.float64)
    if values.size == 0 or not np.isfinite(values).all() or (values < 0).any():
        raise ValueError(
            f"drift of {values.size} pictures holds no, negative or non-finite values; give the ledger's totals"
        )
    error = float(values.std(ddof=1) / np.sqrt(values.size)) if values.size > 1 else 0.0
    mean = float(values.mean())
    return DriftSummary(mean, error, float(values.max()), mean / tokens_per_image, min(1.0, mean))
