"""A memory's frames in front of the window, for networks that take them as clean frames of one clip.

B videos, C channels, n frames of the window, p frames of the memory, h x w latent cells.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...memory.base import MemoryRead

__all__ = ["Prefixed", "prefix_frames"]


@dataclass(frozen=True)
class Prefixed:
    """A call with the memory's frames in front; `cut` takes them off the network's output again.

    Args:
        x: [B, C, p + n, h, w].
        levels: [B, p + n] float64.
        frame_ids: [B, p + n] int64.
        count: p, frames of the memory.
    """

    x: Tensor
    levels: Tensor
    frame_ids: Tensor
    count: int

    def cut(self, output: Tensor) -> Tensor:
        """[B, C, n, h, w] of an output for p + n frames."""
        return output[:, :, self.count :]


def prefix_frames(x: Tensor, levels: Tensor, frame_ids: Tensor, read: MemoryRead) -> Prefixed:
    """Puts `read.frames` in front of the window, at the level at which the memory shows them.

    Args:
        x: [B, C, n, h, w]; levels: [n]; frame_ids: [n].
        read: what the memory shows; a read of tokens alone is an error.

    Raises:
        ValueError: frames of another size, or a memory that keeps tokens only.

    Example:
        >>> x = torch.zeros(1, 4, 3, 2, 2)
        >>> prefix_frames(x, torch.ones(3), torch.arange(3), MemoryRead()).count
        0
    """
    batch = x.shape[0]
    levels = levels.to(x.device, torch.float64).expand(batch, -1)
    frame_ids = frame_ids.to(x.device).expand(batch, -1)
    frames, ids = read.frames, read.frame_ids
    if frames is None or ids is None:
        if read.tokens is not None:
            raise ValueError(
                "the memory keeps tokens only, and this network takes frames; use 'window', 'sink_window', 'full', "
                "'retrieve' or 'pack' without packers"
            )
        return Prefixed(x, levels, frame_ids, 0)
    wanted = (batch, x.shape[1], *x.shape[3:])
    if (frames.shape[0], frames.shape[1], *frames.shape[3:]) != wanted:
        raise ValueError(
            f"the memory shows frames {tuple(frames.shape)} to a window {tuple(x.shape)}; rows, channels and cells "
            "must agree, history and video need one size"
        )
    count = frames.shape[2]
    shown = torch.full((batch, count), float(read.level), dtype=torch.float64, device=x.device)
    return Prefixed(
        torch.cat([frames.to(x), x], 2),
        torch.cat([shown, levels], 1),
        torch.cat([ids.to(frame_ids), frame_ids], 1),
        count,
    )
