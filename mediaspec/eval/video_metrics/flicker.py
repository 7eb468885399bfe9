"""Temporal flicker: how little a pixel changes from one frame to the next.

    flicker = mean over t of (255 - mean |f_t - f_{t+1}|) / 255

1 is a frozen video, so the number is read beside the dynamic degree. VBench (arXiv:2311.17982) first drops static
videos and calls it temporal flickering.
"""

from __future__ import annotations

import numpy as np

from .frames import check_frames

__all__ = ["temporal_flicker"]


def temporal_flicker(frames: np.ndarray) -> float:
    """Flicker score; higher is steadier.

    Args:
        frames: [T, H, W, C] uint8, T >= 2.

    Returns:
        In 0..1.

    Raises:
        ValueError: not such frames.

    Example: `temporal_flicker(np.zeros((3, 8, 8, 3), np.uint8))` is 1.0.
    """
    frames = check_frames(frames)
    # One pair at a time: a difference of the whole video would hold 4 to 8 times its bytes.
    steps = [np.abs(b.astype(np.int16) - a).mean(dtype=np.float64) for a, b in zip(frames[:-1], frames[1:])]
    return float((255.0 - np.mean(steps)) / 255.0)
