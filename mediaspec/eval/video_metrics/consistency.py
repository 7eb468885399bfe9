"""Consistency of a video's frames in any feature space, from one row of features per frame.

    chain = mean over t >= 1 of (max(0, cos(E_t, E_{t-1})) + max(0, cos(E_t, E_0))) / 2      (VBench, arXiv:2311.17982)
    CSCV  = 1 / (1 + 10 std(s) / mean(s)),   s = cosines of neighbours, std of the population     (arXiv:2412.18597)

VBench computes the chain on DINO (subject) and CLIP (background) features; on other features the number bears their
name. A frozen video has chain 1 and CSCV 1. CSCV falls with one abrupt change, and not with an even drift.
"""

from __future__ import annotations

import numpy as np

__all__ = ["adjacent_cosines", "consistency_chain", "cscv", "frame_similarity"]


def _unit(features: np.ndarray, least: int) -> np.ndarray:
    rows = np.asarray(features, dtype=np.float64)
    if rows.ndim != 2 or len(rows) < least:
        raise ValueError(f"features are {rows.shape}; give one row per frame, [T, D] with T >= {least}")
    if not np.isfinite(rows).all():
        raise ValueError("feature rows hold NaN or infinity; check those frames")
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    if (length == 0).any():
        raise ValueError(f"feature row {int(np.argmin(length))} is all zero and has no direction; check that frame")
    return np.asarray(rows / length)


def adjacent_cosines(features: np.ndarray) -> np.ndarray:
    """Cosine of every frame's features with those of the frame before.

    Args:
        features: [T, D] float, T >= 2, no zero row.

    Returns:
        [T-1] float64 in -1..1.

    Raises:
        ValueError: not such rows.
    """
    rows = _unit(features, 2)
    return np.asarray((rows[1:] * rows[:-1]).sum(1))


def consistency_chain(features: np.ndarray) -> float:
    """Mean likeness to the frame before and to the first frame, negative cosines counting as 0.

    Args:
        features: [T, D] float, T >= 2.

    Returns:
        In 0..1.

    Raises:
        ValueError: not such rows.

    Example: `consistency_chain(np.ones((3, 2)))` is 1.0.
    """
    rows = _unit(features, 2)
    before = (rows[1:] * rows[:-1]).sum(1)
    first = rows[1:] @ rows[0]
    return float((np.maximum(before, 0) + np.maximum(first, 0)).mean() / 2)


def frame_similarity(features: np.ndarray) -> float:
    """Mean cosine of neighbouring frames: what papers print as CLIP frame consistency, on any features.

    Args:
        features: [T, D] float, T >= 2.
    """
    return float(adjacent_cosines(features).mean())


def cscv(features: np.ndarray, weight: float = 10.0) -> float:
    """Clip similarity coefficient of variation: evenness of the change between frames.

    Args:
        features: [T, D] float, T >= 2.
        weight: how hard unevenness counts.

    Returns:
        In 0..1; 0 where the neighbours' mean cosine is not positive.

    Raises:
        ValueError: not such rows.
    """
    steps = adjacent_cosines(features)
    if steps.mean() <= 0:
        return 0.0
    return float(1.0 / (1.0 + weight * steps.std() / steps.mean()))
