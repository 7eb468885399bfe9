"""Interpolation smoothness: how well a frame is predicted by the mean of its neighbours.

Even frames are kept, each odd frame is predicted as the rounded mean of the two around it, and the prediction error is
turned into a score as for flicker. VBench's motion smoothness does the same with the AMT-S network as predictor; the
straight mean needs no weights and punishes fast motion, so it bears its own name.
"""

from __future__ import annotations

import numpy as np

from .frames import check_frames

__all__ = ["interpolation_smoothness"]


def interpolation_smoothness(frames: np.ndarray) -> float:
    """Smoothness score; higher is smoother.

    Args:
        frames: [T, H, W, C] uint8, T >= 3.

    Returns:
        In 0..1: (255 - mean absolute error of the predicted odd frames) / 255.

    Raises:
        ValueError: not such frames.

    Example: `interpolation_smoothness(np.zeros((3, 8, 8, 3), np.uint8))` is 1.0.
    """
    frames = check_frames(frames, 3)
    errors = []
    for t in range(1, len(frames) - 1, 2):
        guess = np.rint((frames[t - 1].astype(np.float64) + frames[t + 1]) / 2)
        errors.append(np.abs(frames[t] - guess).mean())
    return float((255.0 - np.mean(errors)) / 255.0)
