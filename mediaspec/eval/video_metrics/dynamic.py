"""Dynamic degree: whether a video moves, by VBench's rule (arXiv:2311.17982) on any flow.

At about 8 frames a second, the radius of a pair of frames is the mean of the largest 5 % of its flow lengths. A pair
moves if its radius exceeds 6 min(H, W) / 256; a video of T such frames moves if at least round(4 T / 16) pairs do.
VBench takes RAFT's flow; with other flow the number bears that flow's name. Flicker that a flow estimator mistakes for
motion raises it too, so it guards against frozen videos and proves no motion.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["DYNAMIC_FPS", "dynamic_stride", "is_dynamic", "motion_radii"]

DYNAMIC_FPS = 8
TOP_SHARE = 0.05


def dynamic_stride(fps: float) -> int:
    """Every how many frames a frame is kept to come near 8 a second.

    Raises:
        ValueError: fps not positive.
    """
    if not fps > 0:
        raise ValueError(f"fps is {fps}; give the video's frames per second, a positive number")
    return max(1, round(fps / DYNAMIC_FPS))


def motion_radii(flow: np.ndarray) -> np.ndarray:
    """Mean of the largest 5 % of the flow lengths of each pair.

    Args:
        flow: [pairs, H, W, 2] in pixels.

    Returns:
        [pairs] float64 in pixels.
    """
    length = np.sqrt((np.asarray(flow, dtype=np.float64) ** 2).sum(-1)).reshape(len(flow), -1)
    count = max(1, int(length.shape[1] * TOP_SHARE))
    return np.asarray(np.partition(length, length.shape[1] - count, axis=1)[:, -count:].mean(1))


def is_dynamic(radii: Sequence[float] | np.ndarray, height: int, width: int, num_frames: int | None = None) -> bool:
    """Whether enough pairs move.

    Args:
        radii: of the pairs, from `motion_radii`.
        height: pixels of the frames the flow was found on; width: likewise.
        num_frames: T, the frames kept; default one more than there are pairs.

    Example: `is_dynamic([8.0] * 4 + [1.0] * 11, 320, 512)` is True.
    """
    frames = len(radii) + 1 if num_frames is None else num_frames
    needed = round(4 * frames / 16)  # Python's rounding, half to even, as VBench has it
    # Clips of one or two frames would need no moving pair at all and count as moving; here they need one.
    moving = int((np.asarray(radii) > 6.0 * min(height, width) / 256.0).sum())
    return moving >= max(needed, 1)
