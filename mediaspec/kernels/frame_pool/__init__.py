"""Averages a video over blocks of cells: what a patch packer with mean weights sees (mean-init packer).

B rows, C channels, T frames, H x W cells; a block is kt x kh x kw cells. With t = min(kt * T' + i, T - 1), and h, w
likewise,

    out[b, c, T', H', W'] = mean over i < kt, j < kh, k < kw of frames[b, c, t, h, w]

so blocks that reach over the end repeat the last frame, row and column. A patch embedding whose weights are repeated
over a block of k^3 cells and divided by k^3 equals the base embedding of this average (arXiv:2504.12626).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..backend import choose, launching_on

__all__ = ["frame_pool"]

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def frame_pool(frames: Tensor, kernel: tuple[int, int, int], *, impl: str | None = None) -> Tensor:
    """Block means, without a host sync.

    Args:
        frames: [B, C, T, H, W] floating point, any strides, at least 1 of each of T, H, W.
        kernel: (kt, kh, kw), each at least 1.
        impl: see `mediaspec.kernels.backend`. Frames that need a gradient go through the reference, which has one.

    Returns:
        [B, C, ceil(T / kt), ceil(H / kh), ceil(W / kw)] in the dtype of `frames`, summed in float32 (float64 for
        float64).

    Raises:
        ValueError: shapes or dtypes do not fit, or `impl="triton"` for frames that need a gradient.

    Example:
        >>> frames = torch.arange(6.0).view(1, 1, 3, 1, 2)
        >>> frame_pool(frames, (2, 1, 2)).flatten().tolist()
        [1.5, 4.5]
    """
    if frames.dim() != 5 or min(frames.shape[2:]) < 1:
        raise ValueError(
            f"frames have shape {tuple(frames.shape)}; give [B, C, T, H, W] with at least 1 frame and cell"
        )
    if frames.dtype not in DTYPES:
        raise ValueError(f"frames are {frames.dtype}; give floating point frames")
    if len(kernel) != 3 or min(kernel) < 1:
        raise ValueError(f"kernel={kernel}; give (kt, kh, kw), each at least 1")
    learning = frames.requires_grad and torch.is_grad_enabled()
    if learning and impl == "triton":
        raise ValueError("frame_pool: the Triton kernel has no gradient; write impl='reference', or detach the frames")
    if not learning and choose("frame_pool", frames, impl) == "triton":
        from .triton import frame_pool as run

        with launching_on(frames):
            return run(frames, kernel)
    from . import reference

    return reference.frame_pool(frames, kernel)
