"""Learned queries: a block of frames is read by a few trained vectors, whose answers are the memory.

The number of tokens does not depend on the size of the frames. Trained together with the network that reads them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .base import Kernel
from .pack import PackMemory
from .packers import BASE, Packer

__all__ = ["QueryMemory", "QueryPacker"]


def _waves(position: Tensor, dim: int) -> Tensor:
    """[n] positions -> [n, dim] cosines and sines, wavelengths from 2 pi to 2 pi 10^4."""
    half = -(-dim // 2)
    rates = torch.exp(torch.arange(half, device=position.device) * (-9.210340371976184 / max(half, 1)))
    angle = position.float()[:, None] * rates
    return torch.cat([angle.cos(), angle.sin()], -1)[:, :dim]


class QueryPacker(Packer):
    """Cross-attention from `queries` trained vectors to the base tokens of every block of `frames` frames.

    Args:
        channels: C; dim: D.
        queries: tokens per block.
        frames: frames of a block; the last one repeats where a block is not full.
        heads: of the attention, a divisor of dim.
        base: cells of a base patch.

    Example:
        >>> QueryPacker(4, 16, queries=3, frames=2, heads=2)(torch.zeros(1, 4, 4, 8, 8)).shape
        torch.Size([1, 6, 16])
    """

    def __init__(
        self, channels: int, dim: int, queries: int, frames: int, heads: int = 4, base: Kernel = BASE
    ) -> None:
        super().__init__((frames, *base[1:]), base)
        if queries < 1 or dim % heads:
            raise ValueError(f"queries={queries}, dim={dim}, heads={heads}; need a query, and heads that divide dim")
        self.count = queries
        self.proj = nn.Conv3d(channels, dim, base, base)
        self.queries = nn.Parameter(_waves(torch.arange(queries) * 7.0, dim) * 0.5)
        self.before = nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.after = nn.Linear(dim, dim)

    def forward(self, frames: Tensor) -> Tensor:
        kt, patch = self.kernel[0], self.base
        sizes = (kt, patch[1], patch[2])
        for axis, size in enumerate(sizes, start=2):
            missing = -frames.shape[axis] % size
            if missing:
                edge = frames.narrow(axis, frames.shape[axis] - 1, 1)
                frames = torch.cat([frames, *[edge] * missing], dim=axis)
        cells = self.proj(frames)  # [B, D, T, h, w]
        batch, dim, steps, rows, columns = cells.shape
        place = (
            _waves(torch.arange(steps, device=cells.device) % kt, dim)[:, None, None]
            + _waves(torch.arange(rows, device=cells.device) * 31.0, dim)[None, :, None]
            + _waves(torch.arange(columns, device=cells.device) * 17.0, dim)[None, None]
        )
        cells = cells.permute(0, 2, 3, 4, 1) + place.to(cells.dtype)
        cells = self.before(cells).reshape(batch * (steps // kt), kt * rows * columns, dim)
        queries = self.queries.to(cells.dtype).expand(len(cells), -1, -1)
        read = self.attention(queries, cells, cells, need_weights=False)[0]
        return self.after(queries + read).reshape(batch, -1, dim)

    def layout(self, frame_ids: Tensor, height: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        kt = self.kernel[0]
        missing = -frame_ids.shape[1] % kt
        times = nn.functional.pad(frame_ids.float(), (0, missing), value=float("nan")).unflatten(1, (-1, kt))
        blocks = times.shape[1]
        rows, columns = -(-height // self.base[1]), -(-width // self.base[2])
        times = times.repeat_interleave(self.count, 1)
        centre = times.nanmean(-1, keepdim=True)
        middle = centre.new_tensor([(rows - 1) / 2, (columns - 1) / 2]).expand(*centre.shape[:2], 2)
        spans = torch.tensor([rows, columns], device=frame_ids.device).expand(blocks * self.count, 2)
        # the tokens of a block share its cells, and each counts as at least one
        counts = (~times[0].isnan()).sum(-1) * (rows * columns / self.count)
        return torch.cat([centre, middle], -1), times, spans, counts.clamp_min(1.0)


class QueryMemory(PackMemory):
    """Old frames as answers to learned queries, recent ones at full resolution.

    Args:
        frames: old frames, a multiple of the block of `queries`; None keeps all of them.
        queries: the packer of old frames; recent_packer: of recent ones.
        recent: frames at full resolution.
        settings: of `PackMemory`.
    """

    name = "queries"

    def __init__(
        self, frames: int | None, queries: QueryPacker, recent_packer: Packer, recent: int = 1, **settings: Any
    ) -> None:
        groups = [(frames, queries.kernel), (recent, recent_packer.kernel)]
        super().__init__(groups, [queries, recent_packer], **settings)
