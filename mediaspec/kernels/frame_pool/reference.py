"""Block means in plain torch: repeat the edge up to whole blocks, cut into blocks, average."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["frame_pool"]


def frame_pool(frames: Tensor, kernel: tuple[int, int, int]) -> Tensor:
    """See `mediaspec.kernels.frame_pool.frame_pool`."""
    wide = frames.to(torch.promote_types(frames.dtype, torch.float32))
    for axis, size in enumerate(kernel, start=2):
        missing = -wide.shape[axis] % size
        if missing:
            edge = wide.narrow(axis, wide.shape[axis] - 1, 1)
            wide = torch.cat([wide, *[edge] * missing], dim=axis)
    blocks = wide.unflatten(4, (-1, kernel[2])).unflatten(3, (-1, kernel[1])).unflatten(2, (-1, kernel[0]))
    pooled: Tensor = blocks.mean((3, 5, 7))
    return pooled.to(frames.dtype)
