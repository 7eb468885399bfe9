"""The one check that every metric on pixels makes of its frames."""

from __future__ import annotations

import numpy as np

__all__ = ["check_frames"]


def check_frames(frames: np.ndarray, least: int = 2) -> np.ndarray:
    """Returns the frames if they are a video that can be measured.

    Args:
        frames: [T, H, W, C] uint8.
        least: fewest frames that the metric is defined on.

    Raises:
        ValueError: another dtype or rank, an empty picture, or too few frames.

    Example: `check_frames(np.zeros((2, 4, 4, 3), np.uint8)).shape` is (2, 4, 4, 3).
    """
    frames = np.asarray(frames)
    if frames.dtype != np.uint8 or frames.ndim != 4:
        raise ValueError(
            f"frames are {frames.dtype} {frames.shape}; give uint8 [frames, height, width, channels] in 0..255"
        )
    if 0 in frames.shape[1:]:
        raise ValueError(f"frames of shape {frames.shape} hold no pixels; give pictures of at least 1x1")
    if len(frames) < least:
        raise ValueError(f"the video has {len(frames)} frames and this metric needs at least {least}")
    return frames
