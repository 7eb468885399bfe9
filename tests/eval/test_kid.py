"""Kernel distance against the textbook sum, unbiasedness, subsets."""

import numpy as np
import pytest
import torch

from mediaspec.eval.kid import kernel_distance, kid_half_floor, mmd2_unbiased


def rows(n: int, size: int, seed: int, shift: float = 0.0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(n, size)).astype(np.float32)) + shift


def test_equals_the_written_out_sum() -> None:
    x, y = rows(5, 3, 0).double(), rows(4, 3, 1, 0.5).double()

    def kernel(a: torch.Tensor, b: torch.Tensor) -> float:
        return (float(a @ b) / 3 + 1) ** 3

    def within(z: torch.Tensor) -> float:
        pairs = [(i, j) for i in range(len(z)) for j in range(len(z)) if i != j]
        return sum(kernel(z[i], z[j]) for i, j in pairs) / len(pairs)

    across = sum(kernel(a, b) for a in x for b in y) / (len(x) * len(y))
    assert mmd2_unbiased(x, y) == pytest.approx(within(x) + within(y) - 2 * across, rel=1e-12)


def test_is_unbiased_for_equal_laws() -> None:
    """Mean over 200 pairs of 30 rows of one law: 0 within 4 standard errors (fixed seeds; error rate 6e-5)."""
    values = np.array([mmd2_unbiased(rows(30, 4, 2 * i), rows(30, 4, 2 * i + 1)) for i in range(200)])
    assert abs(values.mean()) < 4 * values.std() / 200**0.5
    assert (values < 0).any()


def test_a_shift_is_seen() -> None:
    result = kernel_distance(rows(300, 8, 0), rows(300, 8, 1, shift=0.5), subsets=20, subset_size=100)
    assert result.subset_size == 100 and result.subsets == 20
    assert result.value > 0.3
    assert result.subset_mean == pytest.approx(result.value, abs=3 * result.subset_std)


def test_one_subset_of_everything_is_the_full_estimate() -> None:
    x, y = rows(40, 4, 0), rows(40, 4, 1, shift=0.3)
    result = kernel_distance(x, y, subsets=1, subset_size=1000)
    assert result.subset_size == 40
    assert result.subset_mean == pytest.approx(result.value, rel=1e-10)


def test_half_floor_is_near_zero() -> None:
    mean, spread = kid_half_floor(rows(200, 6, 3))
    assert abs(mean) < 3 * spread


def test_bad_shapes() -> None:
    with pytest.raises(ValueError, match="give \\[n, D\\]"):
        mmd2_unbiased(rows(4, 3, 0), rows(4, 5, 0))
    with pytest.raises(ValueError, match="at least 1 and 2"):
        kernel_distance(rows(4, 3, 0), rows(4, 3, 0), subsets=0)
