"""Forgetting and drift in one line each, where the video is simple enough.

s2 is a noise variance, rho the correlation of neighbouring frames, m past views and r referenced ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

__all__ = [
    "ar1_bottleneck",
    "diluted_evidence",
    "diluted_variance",
    "reference_gain_radius",
    "reference_noise_tradeoff",
    "scene_bottleneck",
]


def ar1_bottleneck(rho: float) -> float:
    """Nats that a chunk without references forgets of an AR(1) video: -ln(1 - rho^2) / 2."""
    if not -1 < rho < 1:
        raise ValueError(f"rho={rho}; a stationary AR(1) video has |rho| < 1")
    return -0.5 * math.log(1 - rho * rho)


def scene_bottleneck(m: int, r: float, s2: float) -> float:
    """Nats forgotten of a hidden scene seen m times when r of the views are referenced.

    Example:
        >>> round(scene_bottleneck(16, 1, 0.1), 3)
        0.293
    """
    if s2 <= 0 or not 0 <= r <= m:
        raise ValueError(f"m={m}, r={r}, s2={s2}; need s2 > 0 and 0 <= r <= m")

    def left(views: float) -> float:
        return 1 / (1 + views / s2)

    return 0.5 * math.log((s2 + left(r)) / (s2 + left(m)))


def diluted_evidence(q: int, g: int) -> float:
    """Views that an average of q frames is worth when g of them show the scene: g^2 / q."""
    if not 0 <= g <= q or q < 1:
        raise ValueError(f"q={q}, g={g}; need 0 <= g <= q and q >= 1")
    return g * g / q


def diluted_variance(q: int, g: int, s2: float) -> float:
    """Variance of a new view given that average: s2 + 1 / (1 + g^2 / (q s2))."""
    return s2 + 1 / (1 + diluted_evidence(q, g) / s2)


def reference_noise_tradeoff(rho: float, s2: float, steps: int) -> dict[str, float]:
    """References shown with noise of variance s2: they say less (`mb`), and errors die out faster (`accumulation`).

    Args:
        steps: autoregressive steps over which the energy of a unit error per step is added up.

    Example:
        >>> {name: round(value, 3) for name, value in reference_noise_tradeoff(0.99, 0.25, 32).items()}
        {'gain': 0.792, 'mb': 1.192, 'accumulation': 2.683}
    """
    if s2 < 0 or not 0 <= rho < 1 or steps < 1:
        raise ValueError(f"rho={rho}, s2={s2}, steps={steps}; need 0 <= rho < 1, s2 >= 0 and steps >= 1")
    gain = rho / (1 + s2)
    mb = 0.5 * math.log((1 - rho**2 / (1 + s2)) / (1 - rho**2))
    return {"gain": gain, "mb": mb, "accumulation": (1 - gain ** (2 * steps)) / (1 - gain * gain)}


def reference_gain_radius(coefficients: Sequence[float]) -> float:
    """Spectral radius of x_k = sum_i c_i x_{k-i}: below 1 errors of the references saturate, above 1 they explode.

    Example:
        >>> round(reference_gain_radius([0.6, 0.3, 0.15]), 2)
        1.03
    """
    order = len(coefficients)
    if not order:
        return 0.0
    companion = torch.zeros(order, order, dtype=torch.float64)
    companion[0] = torch.tensor(coefficients, dtype=torch.float64)
    companion[1:, :-1] = torch.eye(order - 1, dtype=torch.float64)
    return float(torch.linalg.eigvals(companion).abs().max())
