"""Loss gap: the nats a memory is worth, from denoising errors alone, without a rollout.

A denoiser that also reads M has a smaller error. By the I-MMSE relation

    I(x ; M | R) between two noise levels  =  1/2 integral ( mse(R) - mse(R, M) ) d snr            (arXiv:math/0412108)

and the memory bottleneck of arXiv:2503.10704 is that integral for M = what R leaves out. `snr_grid` gives the levels
and weights of the integral by the trapezoid rule in log snr, which 40 levels bring within 1 % where the denoisers are
exact. `mediaspec.memory.loss_gap` has the sum that belongs to the steps of a schedule.
"""

from __future__ import annotations

import numpy as np

__all__ = ["flow_snr", "nats_of_errors", "snr_grid"]


def flow_snr(level: float | np.ndarray) -> np.ndarray:
    """Signal-to-noise ratio (1 - u)^2 / u^2 of x_u = (1 - u) x + u e."""
    u = np.asarray(level, dtype=np.float64)
    return ((1 - u) / u) ** 2


def snr_grid(low: float, high: float, points: int = 16) -> tuple[np.ndarray, np.ndarray]:
    """Levels of the flow path at equal steps of log snr, and what the squared error at each weighs.

    Args:
        low, high: noise levels u of the clean and the noisy end, 0 < low < high < 1.
        points: at least 2.

    Returns:
        levels [points] float64, falling from `high` to `low`, and weights [points], so that
        `(weights * errors).sum()` is half the integral of the error over snr.

    Raises:
        ValueError: levels outside (0, 1) or too few points.
    """
    if not 0 < low < high < 1 or points < 2:
        raise ValueError(
            f"levels {low} to {high} in {points} points; write 0 < low < high < 1 and at least 2 points, "
            "as in snr_grid(0.1, 0.98, 16)"
        )
    ends = np.log(flow_snr(np.array([high, low])))
    snr = np.exp(np.linspace(ends[0], ends[1], points))
    # each point's share of the piecewise linear integral over log snr, d snr = snr d log snr
    step = np.full(points, (ends[1] - ends[0]) / (points - 1))
    step[[0, -1]] /= 2
    return 1 / (1 + np.sqrt(snr)), 0.5 * snr * step


def nats_of_errors(errors: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Half the snr integral of squared errors.

    Args:
        errors: [M, ...] squared errors, summed over the dimensions of a frame, at M levels.
        weights: [M].

    Returns:
        [...] nats: `... - this` is the evidence bound of a denoiser up to a constant that all denoisers share. The
        nats of a smaller memory minus those of a larger one are what the larger knows and the smaller does not.
    """
    return np.tensordot(np.asarray(weights, dtype=np.float64), np.asarray(errors, dtype=np.float64), axes=1)
