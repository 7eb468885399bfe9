"""Residuals and distances of one draft position."""

from __future__ import annotations

import pytest
import torch

from mediaspec.core.law import emitted_law, one_step_drift, point_mass, residual_weights, squared_hellinger


def laws(rows: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.rand(rows, vocab, generator=generator, dtype=torch.float64) ** 3 for _ in range(2))
    return p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)


def kullback_leibler(p: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    return (p * (p / m).log()).sum(-1)


def chi_square(p: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    return ((m - p) ** 2 / p).sum(-1)


def test_the_band_residual_is_clipped_and_nearest_in_every_divergence() -> None:
    p, q = laws(200, 9)
    for omega in (1.2, 2.0, 5.0):
        a = torch.minimum(q, omega * p)
        m, plain = emitted_law(p, a, "band"), emitted_law(p, a, "gstar")
        level = (m / p).amin(-1, keepdim=True)
        torch.testing.assert_close(m, p * (q / p).clamp(max=omega).maximum(level), atol=1e-9, rtol=0)
        torch.testing.assert_close(0.5 * (m - p).abs().sum(-1), one_step_drift(p, a))
        for distance in (squared_hellinger, kullback_leibler, chi_square):
            assert (distance(p, m) <= distance(p, plain) + 1e-12).all()


def test_without_rejections_the_residual_is_the_target() -> None:
    p, _ = laws(4, 6)
    for kind in ("gstar", "band"):
        assert torch.equal(residual_weights(p, p, kind), p)
        torch.testing.assert_close(emitted_law(p, p, kind), p)


def test_no_residual_beats_gstar() -> None:
    p, q = laws(100, 7)
    _, other = laws(100, 7)
    a = torch.minimum(q, 1.7 * p)
    anything = a + (1 - a.sum(-1, keepdim=True)) * other.flip(0)
    assert (0.5 * (anything - p).abs().sum(-1) >= one_step_drift(p, a) - 1e-12).all()


def test_point_masses_and_padding() -> None:
    assert point_mass(torch.tensor([[2, -1]]), 3).tolist() == [[[0, 0, 1], [0, 0, 0]]]


def test_equal_laws_have_distance_zero_in_float32() -> None:
    p = torch.rand(5, 4096).softmax(-1)
    assert not squared_hellinger(p, p.clone()).any()


def test_an_unknown_residual_is_refused() -> None:
    with pytest.raises(ValueError, match='write residual="gstar"'):
        residual_weights(torch.ones(1), torch.ones(1), "vanilla")
