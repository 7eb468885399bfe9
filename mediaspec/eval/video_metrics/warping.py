"""Warping error: what is left between a frame and the next one moved back along the flow, where both see the same.

    error_t = sum m |f_t - warp(f_{t+1}, F_t)|^2 / sum m,      m = in bounds and |F + B(x + F)|^2 <= bound
    bound   = 0.01 (|F|^2 + |B(x + F)|^2) + 0.5

F is the flow t -> t+1, B the flow t+1 -> t. The check of forward against backward flow is that of arXiv:1808.00449
(section 4.3, after Ruder et al.). A video whose flow cannot be found at all is masked away, so the share of pixels
that were compared stands beside every error.
"""

from __future__ import annotations

import numpy as np

__all__ = ["backward_warp", "visible", "warping_error"]


def backward_warp(image: np.ndarray, flow: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Samples a picture where the flow points to: out(y, x) = image(y + flow_y, x + flow_x), bilinear.

    Args:
        image: [H, W] or [H, W, C] float.
        flow: [H, W, 2] float, (x, y) in pixels.

    Returns:
        (the warped picture, [H, W] bool: the sample lay inside).

    Raises:
        ValueError: sizes differ.

    Example: `backward_warp(np.ones((4, 4)), np.zeros((4, 4, 2)))[0].sum()` is 16.0.
    """
    if flow.shape != (*image.shape[:2], 2):
        raise ValueError(
            f"the picture is {image.shape} and the flow {flow.shape}; give flow of shape {(*image.shape[:2], 2)}"
        )
    height, width = image.shape[:2]
    y = np.arange(height, dtype=np.float64)[:, None] + flow[..., 1]
    x = np.arange(width, dtype=np.float64)[None, :] + flow[..., 0]
    inside = (y >= 0) & (y <= height - 1) & (x >= 0) & (x <= width - 1)
    y, x = np.clip(y, 0, height - 1), np.clip(x, 0, width - 1)
    top, left = np.floor(y).astype(np.intp), np.floor(x).astype(np.intp)
    bottom, right = np.minimum(top + 1, height - 1), np.minimum(left + 1, width - 1)
    down, across = y - top, x - left
    if image.ndim == 3:
        down, across = down[..., None], across[..., None]
    upper = (1 - across) * image[top, left] + across * image[top, right]
    lower = (1 - across) * image[bottom, left] + across * image[bottom, right]
    return (1 - down) * upper + down * lower, inside


def visible(forward: np.ndarray, backward: np.ndarray) -> np.ndarray:
    """Pixels of frame t that frame t+1 shows too: inside the picture, and forth and back ends where it began.

    Args:
        forward: [H, W, 2] flow t -> t+1.
        backward: [H, W, 2] flow t+1 -> t.

    Returns:
        [H, W] bool.
    """
    returned, inside = backward_warp(backward, forward)
    gap = ((forward + returned) ** 2).sum(-1)
    bound = 0.01 * ((forward**2).sum(-1) + (returned**2).sum(-1)) + 0.5
    return np.asarray(inside & (gap <= bound))


def warping_error(frames: np.ndarray, forward: np.ndarray, backward: np.ndarray) -> tuple[float, float]:
    """Mean masked squared error of frame t against frame t+1 warped back.

    Args:
        frames: [T, H, W] or [T, H, W, C], any real values; give 0..1 for errors that compare between videos.
        forward: [T-1, H, W, 2] flow t -> t+1 in pixels, (x, y).
        backward: [T-1, H, W, 2] flow t+1 -> t.

    Returns:
        (error: mean over pairs, a pair without a comparable pixel counting as 0; coverage: share of pixels compared).

    Raises:
        ValueError: fewer than two frames, shapes that do not fit, or flow that is not finite.

    Example: `warping_error(np.ones((2, 4, 4)), np.zeros((1, 4, 4, 2)), np.zeros((1, 4, 4, 2)))` is (0.0, 1.0).
    """
    wanted = (len(frames) - 1, *frames.shape[1:3], 2)
    if len(frames) < 2 or forward.shape != wanted or backward.shape != wanted:
        raise ValueError(
            f"{len(frames)} frames of {frames.shape[1:]} with flow {forward.shape} and {backward.shape}; give at "
            f"least 2 frames and flow of shape {wanted} both ways"
        )
    if not (np.isfinite(forward).all() and np.isfinite(backward).all()):
        raise ValueError("the flow holds NaN or infinity; estimate it again")
    errors, shares = [], []
    for t in range(len(frames) - 1):
        there, back = forward[t].astype(np.float64), backward[t].astype(np.float64)
        moved, _ = backward_warp(frames[t + 1].astype(np.float64), there)
        mask = visible(there, back)
        error = (frames[t] - moved) ** 2
        if error.ndim == 3:
            error = error.mean(-1)
        errors.append(error[mask].sum() / max(int(mask.sum()), 1))
        shares.append(mask.mean())
    return float(np.mean(errors)), float(np.mean(shares))
