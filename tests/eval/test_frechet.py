"""Fréchet distance: closed forms of normal laws, singular covariances, exact shard sums, errors."""

import numpy as np
import pytest
import torch

from mediaspec.eval.frechet import (
    GRID,
    Moments,
    bootstrap_frechet,
    frechet_distance,
    frechet_gaussian,
    frechet_rows,
    half_floor,
    on_grid,
)


def covariance(size: int, seed: int, rank: int | None = None) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    a = torch.from_numpy(rng.normal(size=(size, rank or size)))
    return a @ a.T / (rank or size)


def rows(n: int, size: int, seed: int, shift: float = 0.0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    mixing = np.random.default_rng(99).normal(size=(size, size)) / size**0.5
    return torch.from_numpy((rng.normal(size=(n, size)) @ mixing + shift).astype(np.float32))


def test_one_dimension_closed_form() -> None:
    value = frechet_gaussian(torch.tensor([1.0]), torch.tensor([[4.0]]), torch.tensor([3.5]), torch.tensor([[9.0]]))
    assert value == pytest.approx(2.5**2 + (3 - 2) ** 2, abs=1e-12)


def test_commuting_covariances_closed_form() -> None:
    """Covariances with common eigenvectors: d^2 = |mu|^2 + sum (sqrt a_i - sqrt b_i)^2."""
    basis = torch.linalg.qr(torch.from_numpy(np.random.default_rng(0).normal(size=(12, 12)))).Q
    a, b = torch.linspace(0.01, 7, 12).double(), torch.linspace(3, 0.2, 12).double()
    mean = torch.linspace(-1, 1, 12).double()
    value = frechet_gaussian(mean, basis * a @ basis.T, torch.zeros(12).double(), basis * b @ basis.T)
    assert value == pytest.approx(float(mean.square().sum() + (a.sqrt() - b.sqrt()).square().sum()), rel=1e-10)


def test_two_by_two_closed_form() -> None:
    """tr (A B)^1/2 = sqrt(tr AB + 2 sqrt(det A det B)) for 2 x 2 matrices, which do not commute here."""
    a, b = torch.tensor([[2.0, 0.5], [0.5, 1.0]]).double(), torch.tensor([[1.0, -0.7], [-0.7, 3.0]]).double()
    root = ((a @ b).trace() + 2 * (a.det() * b.det()).sqrt()).sqrt()
    value = frechet_gaussian(torch.zeros(2), a, torch.zeros(2), b)
    assert value == pytest.approx(float(a.trace() + b.trace() - 2 * root), rel=1e-12)


def test_equal_laws_have_distance_zero_and_order_does_not_matter() -> None:
    a, b = covariance(64, 1), covariance(64, 2)
    zero = torch.zeros(64)
    assert frechet_gaussian(zero, a, zero, a) < 1e-9
    assert frechet_gaussian(zero, a, zero, b) == pytest.approx(frechet_gaussian(zero, b, zero, a), rel=1e-11)


def test_agrees_with_the_square_root_of_the_product() -> None:
    scipy_linalg = pytest.importorskip("scipy.linalg")
    a, b = covariance(40, 3), covariance(40, 4)
    root = scipy_linalg.sqrtm((a @ b).numpy()).real
    expected = float(a.trace() + b.trace()) - 2 * float(np.trace(root))
    assert frechet_gaussian(torch.zeros(40), a, torch.zeros(40), b) == pytest.approx(expected, rel=1e-8)


def test_singular_covariance_is_handled() -> None:
    """Laws on orthogonal lines: no overlap, d^2 is the sum of both traces. Rank 8 of 32 against itself: 0."""
    a, b = torch.zeros(3, 3).double(), torch.zeros(3, 3).double()
    a[0, 0], b[1, 1] = 2.0, 5.0
    assert frechet_gaussian(torch.zeros(3), a, torch.zeros(3), b) == pytest.approx(7.0, abs=1e-12)
    low = covariance(32, 5, rank=8)
    assert frechet_gaussian(torch.zeros(32), low, torch.zeros(32), low) < 1e-6


def test_fewer_rows_than_features() -> None:
    x = rows(20, 64, 0)
    moments = Moments.of(x)
    assert frechet_distance(moments, moments) < 1e-4
    assert frechet_distance(moments, Moments.of(x + 0.5)) == pytest.approx(64 * 0.25, rel=1e-5)


@pytest.mark.parametrize("counts", [(12, 20), (20, 500), (500, 12), (300, 400)])
def test_rows_and_moments_agree(counts: tuple[int, int]) -> None:
    """Fewer rows than the 64 features on either side, or on none."""
    x, y = rows(counts[0], 64, 1), rows(counts[1], 64, 2, shift=0.2)
    assert frechet_rows(x, y) == pytest.approx(frechet_distance(Moments.of(x), Moments.of(y)), rel=1e-6)


def test_an_indefinite_matrix_is_refused() -> None:
    with pytest.raises(ValueError, match="not a covariance"):
        frechet_gaussian(torch.zeros(2), torch.diag(torch.tensor([1.0, -1.0])), torch.zeros(2), torch.eye(2))


def test_shapes_must_fit() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        frechet_gaussian(torch.zeros(2), torch.eye(2), torch.zeros(3), torch.eye(3))


@pytest.mark.parametrize("cuts", [(1,), (7, 100), (50, 51, 120)])
def test_shards_add_up_exactly(cuts: tuple[int, ...]) -> None:
    """Sums of grid values are exact in float64, so any grouping gives the bits of one pass."""
    x = rows(150, 33, 6, shift=0.3) * 3
    whole = Moments.of(x)
    parts = [Moments.of(part) for part in torch.tensor_split(x, cuts)]
    left = parts[0]
    for part in parts[1:]:
        left = left + part
    right = parts[-1]
    for part in reversed(parts[:-1]):
        right = right + part
    for joined in (left, right):
        assert joined.count == whole.count
        assert torch.equal(joined.total, whole.total)
        assert torch.equal(joined.outer, whole.outer)


def test_moments_are_mean_and_covariance() -> None:
    x = on_grid(rows(200, 10, 7, shift=1.0))
    moments = Moments.of(x)
    torch.testing.assert_close(moments.mean(), x.double().mean(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(moments.covariance(), torch.cov(x.double().T), rtol=1e-9, atol=1e-12)


def test_grid() -> None:
    x = torch.tensor([[0.1, 1.0, -0.3]])
    snapped = on_grid(x)
    assert float((snapped - x).abs().max()) <= GRID / 2
    assert torch.equal(on_grid(snapped), snapped)
    with pytest.raises(ValueError, match="NaN"):
        on_grid(torch.tensor([[float("nan"), 0.0]]))


def test_moments_of_different_extractors_do_not_add() -> None:
    with pytest.raises(ValueError, match="same feature extractor"):
        Moments.of(rows(4, 3, 0)) + Moments.of(rows(4, 5, 0))


def test_bootstrap_spread_matches_fresh_samples() -> None:
    """The bootstrap standard error agrees within a factor of 1.6 with the spread over 40 independent pairs of sets."""
    size, n = 6, 400
    fresh = [
        frechet_distance(Moments.of(rows(n, size, 100 + i)), Moments.of(rows(n, size, 500 + i, shift=0.4)))
        for i in range(40)
    ]
    values = bootstrap_frechet(rows(n, size, 1), rows(n, size, 2, shift=0.4), rounds=60)
    assert 1 / 1.6 < values.std() / np.std(fresh) < 1.6


def test_bootstrap_is_paired_for_equal_seeds() -> None:
    x, y = rows(200, 4, 1), rows(200, 4, 2)
    assert np.array_equal(bootstrap_frechet(x, y, 5, seed=3), bootstrap_frechet(x, y, 5, seed=3))
    assert not np.array_equal(bootstrap_frechet(x, y, 5, seed=3), bootstrap_frechet(x, y, 5, seed=4))


def test_half_floor_shrinks_with_the_number_of_rows() -> None:
    small, large = half_floor(rows(100, 8, 1)), half_floor(rows(3200, 8, 1))
    assert 0 < large < small / 8  # the bias of the distance goes like 1 / n


def test_grid_error_is_negligible() -> None:
    """Features with a spread of 0.028 (EfficientNet-Lite0): rounding to the grid moves the distance by less than 0.1
    %."""
    x, y = rows(500, 16, 1).double() * 0.028, rows(500, 16, 2, shift=0.5).double() * 0.028
    exact = frechet_gaussian(x.mean(0), torch.cov(x.T), y.mean(0), torch.cov(y.T))
    assert frechet_distance(Moments.of(x), Moments.of(y)) == pytest.approx(exact, rel=1e-3)
