"""Kernel distance (KID): unbiased squared MMD under the cubic kernel k(x, y) = (x.y / D + 1)^3.

    MMD^2 = sum_{i != j} k(x_i, x_j) / n(n-1) + the same for y - 2 mean_ij k(x_i, y_j)     (arXiv:1801.01401, eq. 3-4)

It has no bias from a small number of images, so its expectation for two sets of one law is 0 (single values may be
negative). Letters: n, m rows, D features.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

__all__ = ["Kid", "kernel_distance", "kid_half_floor", "mmd2_unbiased"]


@dataclass(frozen=True)
class Kid:
    """A kernel distance.

    Args:
        value: unbiased estimate over all rows.
        subset_mean: mean over random subsets, the figure most papers print.
        subset_std: spread over the subsets.
        subsets: how many.
        subset_size: rows per set and subset.
    """

    value: float
    subset_mean: float
    subset_std: float
    subsets: int
    subset_size: int


def _kernel(x: Tensor, y: Tensor) -> Tensor:
    return (x @ y.T / x.shape[1] + 1.0) ** 3


def _mmd2(xx: Tensor, yy: Tensor, xy: Tensor) -> float:
    n, m = xx.shape[0], yy.shape[0]
    within_x = (xx.sum() - xx.diagonal().sum()) / (n * (n - 1))
    within_y = (yy.sum() - yy.diagonal().sum()) / (m * (m - 1))
    return float(within_x + within_y - 2 * xy.mean())


def _check(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    if first.ndim != 2 or second.ndim != 2 or first.shape[1] != second.shape[1] or min(len(first), len(second)) < 2:
        raise ValueError(
            f"feature shapes {tuple(first.shape)} and {tuple(second.shape)}; give [n, D] and [m, D] with n, m >= 2"
        )
    return first.double(), second.double()


def mmd2_unbiased(first: Tensor, second: Tensor) -> float:
    """Unbiased squared MMD between feature rows [n, D] and [m, D], float64."""
    x, y = _check(first, second)
    return _mmd2(_kernel(x, x), _kernel(y, y), _kernel(x, y))


def kernel_distance(first: Tensor, second: Tensor, subsets: int = 100, subset_size: int = 1000, seed: int = 0) -> Kid:
    """KID of two sets of feature rows.

    Args:
        first, second: [n, D], [m, D].
        subsets: number of random subsets.
        subset_size: rows per subset, drawn without replacement; at most min(n, m) is used.
        seed: of the subsets.

    Source: arXiv:1801.01401. Example: `kernel_distance(x, x + 1).value > 0`.
    """
    x, y = _check(first, second)
    size = min(subset_size, len(x), len(y))
    if subsets < 1 or size < 2:
        raise ValueError(f"subsets is {subsets} and subset_size {subset_size}; give at least 1 and 2")
    xx, yy, xy = _kernel(x, x), _kernel(y, y), _kernel(x, y)
    rng = np.random.default_rng(seed)
    values = []
    for _ in range(subsets):
        i = torch.from_numpy(rng.choice(len(x), size, replace=False))
        j = torch.from_numpy(rng.choice(len(y), size, replace=False))
        values.append(_mmd2(xx[i][:, i], yy[j][:, j], xy[i][:, j]))
    return Kid(_mmd2(xx, yy, xy), float(np.mean(values)), float(np.std(values)), subsets, size)


def kid_half_floor(features: Tensor, seed: int = 0, splits: int = 20) -> tuple[float, float]:
    """Mean and spread of the unbiased MMD^2 between random halves of one set [n, D]."""
    rng = np.random.default_rng(seed)
    values = []
    for _ in range(splits):
        order = torch.from_numpy(rng.permutation(len(features)))
        half = len(order) // 2
        values.append(mmd2_unbiased(features[order[:half]], features[order[half:]]))
    return float(np.mean(values)), float(np.std(values))
