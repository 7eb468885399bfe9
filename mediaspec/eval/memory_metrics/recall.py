"""Recall: how well revisit frames are predicted, PSNR and SSIM on those frames only.

Over a whole video, frames that need no memory hide the ones that do (arXiv:2503.10704 scores the revisit alone).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

__all__ = ["BEST_PSNR", "frame_psnr", "frame_ssim", "psnr_rows", "recall_scores"]

BEST_PSNR = 99.0
"""dB of equal frames."""


def _same(made: np.ndarray, truth: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    a, b = np.asarray(made, dtype=np.float64), np.asarray(truth, dtype=np.float64)
    if a.shape != b.shape or not a.size:
        raise ValueError(f"frames of shape {a.shape} against {b.shape}; give the same, with at least one pixel")
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise ValueError("a frame holds NaN or infinity; a model made it whose weights or steps went wrong")
    return a, b


def frame_psnr(made: np.ndarray, truth: np.ndarray) -> float:
    """Peak signal-to-noise ratio in dB of colours in 0..1; 99 where they are equal.

    Raises:
        ValueError: other shapes, or values that are not finite.

    Example: `round(frame_psnr(np.zeros(4), np.full(4, 0.1)), 6)` is 20.0.
    """
    a, b = _same(made, truth)
    error = float(np.mean((a - b) ** 2))
    return BEST_PSNR if error < 1e-12 else -10 * math.log10(error)


def psnr_rows(made: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """PSNR of each frame: [N] float64 of frames [N, H, W, 3]."""
    return np.array([frame_psnr(a, b) for a, b in zip(made, truth, strict=True)])


def frame_ssim(made: np.ndarray, truth: np.ndarray) -> float:
    """Structural similarity of two frames [H, W, 3] in 0..1 (Wang et al. 2004: Gaussian window 11, sigma 1.5).

    Averaged over colours and the places where the window fits.

    Raises:
        ValueError: other shapes, values that are not finite, or fewer than 11 pixels a side.
    """
    a, b = _same(made, truth)
    if a.ndim != 3 or min(a.shape[:2]) < 11:
        raise ValueError(f"frames of shape {a.shape}; give [height, width, colours] of at least 11 pixels a side")
    line = torch.exp(-0.5 * ((torch.arange(11, dtype=torch.float64) - 5) / 1.5) ** 2)
    window = (line[:, None] * line / line.sum() ** 2)[None, None]

    def blur(x: np.ndarray) -> torch.Tensor:
        return F.conv2d(torch.from_numpy(x).permute(2, 0, 1)[:, None], window)

    mean_a, mean_b = blur(a), blur(b)
    var_a, var_b, cov = blur(a * a) - mean_a**2, blur(b * b) - mean_b**2, blur(a * b) - mean_a * mean_b
    c1, c2 = 0.01**2, 0.03**2
    value = (2 * mean_a * mean_b + c1) * (2 * cov + c2) / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2))
    return float(value.mean())


def recall_scores(made: np.ndarray, truth: np.ndarray, asked: Sequence[bool] | np.ndarray) -> dict[str, float] | None:
    """Mean PSNR and SSIM over the asked frames.

    Args:
        made, truth: [N, 64, 64, 3] in 0..1.
        asked: [N] bool, from `recall_frames`.

    Returns:
        psnr, ssim and last_psnr (the last quarter of the asked frames, where failures have diverged); None where no
        frame is asked.
    """
    at = np.flatnonzero(asked)
    if not len(at):
        return None
    rows = psnr_rows(made[at], truth[at])
    ssim = [frame_ssim(made[t], truth[t]) for t in at]
    tail = max(1, len(at) // 4)
    return {"psnr": float(rows.mean()), "ssim": float(np.mean(ssim)), "last_psnr": float(rows[-tail:].mean())}
