"""Optical flow to measure videos with: block matching without dependencies, Farneback and DIS through OpenCV.

    flow = load_flow("auto")                      # farneback where OpenCV is installed, else blocks
    forward = flow(frames[:-1], frames[1:])       # uint8 [n, H, W, 3] twice -> float32 [n, H, W, 2], (x, y) in pixels

Numbers from different flows are not comparable, so the flow's name stands beside every metric that rests on it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ...pipelines.keywords import nearest
from .frames import check_frames

__all__ = ["FLOWS", "block_matching", "estimate_flow", "load_flow", "resolve_flow"]

Flow = Callable[[np.ndarray, np.ndarray], np.ndarray]

FLOWS = ("auto", "blocks", "farneback", "dis")

CHUNK = 1 << 22
"""Bytes of float frames matched at once; the table of costs is then about 40 times as large, 160 MB."""


def block_matching(
    first: np.ndarray, second: np.ndarray, reach: int = 7, window: int = 7, ease: float = 0.05
) -> np.ndarray:
    """Flow by full search: for every pixel the shift whose window has the least absolute difference.

    Shifts between whole pixels come from a parabola through the costs left and right of the best one.

    Args:
        first: [n, H, W, C] uint8.
        second: [n, H, W, C] uint8, the frames `first` moves to.
        reach: largest shift per axis in pixels.
        window: side of the compared square, odd.
        ease: cost per pixel of shift, in grey levels; lets flat areas, where every shift fits, stay at rest.

    Returns:
        [n, H, W, 2] float32, (x, y).

    Raises:
        ValueError: shapes differ, an even window or a negative reach.
    """
    first, second = check_frames(first, 1), check_frames(second, 1)
    if first.shape != second.shape:
        raise ValueError(f"the frames are {first.shape} and {second.shape}; give pairs of one size")
    if reach < 1 or window < 1 or window % 2 == 0:
        raise ValueError(f"reach is {reach} and window {window}; give a reach >= 1 and an odd window >= 1")
    step = max(1, CHUNK // (first[0].size * 4))
    parts = [
        _match(first[at : at + step], second[at : at + step], reach, window, ease) for at in range(0, len(first), step)
    ]
    return np.concatenate(parts)


def _match(first: np.ndarray, second: np.ndarray, reach: int, window: int, ease: float) -> np.ndarray:
    a = torch.from_numpy(first).permute(0, 3, 1, 2).float()
    b = torch.from_numpy(second).permute(0, 3, 1, 2).float()
    n, _, height, width = a.shape
    border = F.pad(b, (reach,) * 4, mode="replicate")
    side = 2 * reach + 1

    def cost(dy: int, dx: int) -> torch.Tensor:
        shifted = border[:, :, reach + dy : reach + dy + height, reach + dx : reach + dx + width]
        difference = (a - shifted).abs().mean(1, keepdim=True)
        blurred = F.avg_pool2d(difference, window, 1, window // 2, count_include_pad=False)[:, 0]
        return blurred + ease * float(np.hypot(dy, dx))

    # Half precision halves the table of all costs; its rounding, 1/16 grey level at 128, is far below noise.
    table = torch.empty(n, side * side, height, width, dtype=torch.float16)
    for place in range(side * side):
        table[:, place] = cost(place // side - reach, place % side - reach)
    best = table.argmin(1)
    row, column = best // side, best % side

    def parabola(centre: torch.Tensor, stride: int) -> torch.Tensor:
        """Offset of the minimum in -0.5..0.5 along one axis; 0 at the end of the reach."""
        inner = (centre > 0) & (centre < side - 1)
        at = torch.where(inner, best, torch.full_like(best, stride))  # any place with neighbours both ways
        low, mid, high = (
            table.gather(1, (at + shift).clamp(0, side * side - 1)[:, None])[:, 0].float()
            for shift in (-stride, 0, stride)
        )
        bend = low - 2 * mid + high
        offset = torch.where(bend > 1e-3, (low - high) / (2 * bend.clamp_min(1e-3)), torch.zeros_like(bend))
        shift = torch.hypot((row - reach).float(), (column - reach).float())
        exact = mid - ease * shift <= 0.05  # a perfect fit needs no fraction; 0.05 covers half precision
        return torch.where(inner & ~exact, offset.clamp(-0.5, 0.5), torch.zeros_like(offset))

    x = (column - reach).float() + parabola(column, 1)
    y = (row - reach).float() + parabola(row, side)
    return torch.stack([x, y], -1).numpy()


def resolve_flow(name: str) -> str:
    """The flow that a name stands for: "auto" is farneback where OpenCV is installed, else blocks.

    Raises:
        ValueError: unknown name. ImportError: OpenCV is asked for and missing.
    """
    if name not in FLOWS:
        raise ValueError(f"there is no flow {name!r}; {nearest(name, FLOWS)}")
    have = importlib.util.find_spec("cv2") is not None
    if name == "auto":
        return "farneback" if have else "blocks"
    if name in ("farneback", "dis") and not have:
        raise ImportError(
            f'flow {name!r} needs OpenCV; write: pip install "mediaspec[video]", or use --flow blocks, which needs '
            "nothing"
        )
    return name


def load_flow(name: str = "auto") -> Flow:
    """A flow estimator.

    Args:
        name: "auto", "blocks", "farneback" or "dis".

    Returns:
        `flow(first, second)`: uint8 [n, H, W, 3] twice -> float32 [n, H, W, 2].

    Raises:
        ValueError: unknown name. ImportError: OpenCV is asked for and missing; the message names the extra.
    """
    name = resolve_flow(name)
    return block_matching if name == "blocks" else _opencv(name)


def _opencv(name: str) -> Flow:
    import cv2 as opencv

    cv2: Any = opencv  # its stubs know neither DIS nor a flow of None

    def run(first: np.ndarray, second: np.ndarray) -> np.ndarray:
        first, second = check_frames(first, 1), check_frames(second, 1)
        height, width = first.shape[1:3]
        # Both estimators halve the picture repeatedly and fail on pictures smaller than their windows.
        need = max(0, 32 - height), max(0, 32 - width)
        out = np.zeros((*first.shape[:3], 2), np.float32)
        if name == "dis":
            estimator = cv2.DISOpticalFlow_create(cv2.DISOPTICAL_FLOW_PRESET_MEDIUM)
            estimator.setFinestScale(0)  # full resolution; the preset stops at a half, too coarse for 64 pixels
        for place, (a, b) in enumerate(zip(first, second, strict=True)):
            grey = [_grey(one) for one in (a, b)]
            if any(need):
                grey = [np.pad(one, ((0, need[0]), (0, need[1])), mode="edge") for one in grey]
            if name == "dis":
                flow = estimator.calc(grey[0], grey[1], None)
            else:
                flow = cv2.calcOpticalFlowFarneback(grey[0], grey[1], None, 0.5, 3, 11, 3, 5, 1.1, 0)
            out[place] = flow[:height, :width]
        return out

    return run


def _grey(picture: np.ndarray) -> np.ndarray:
    """Luma of BT.601, rounded, uint8 [H, W]."""
    if picture.shape[-1] == 1:
        return np.ascontiguousarray(picture[..., 0])
    weights = np.array([0.299, 0.587, 0.114])
    return np.ascontiguousarray(np.rint(picture[..., :3] @ weights).clip(0, 255).astype(np.uint8))


def estimate_flow(flow: Flow, frames: np.ndarray, stride: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Flow of neighbouring frames both ways.

    Args:
        flow: from `load_flow`.
        frames: [T, H, W, 3] uint8.
        stride: distance of the frames of a pair; only every stride-th frame is used.

    Returns:
        (forward, backward), each [pairs, H, W, 2] float32.

    Raises:
        ValueError: fewer than two frames are left.
    """
    kept = check_frames(frames[::stride], 2)
    return flow(kept[:-1], kept[1:]), flow(kept[1:], kept[:-1])
