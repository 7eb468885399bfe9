"""Networks that turn frames into few tokens, one rate each.

A patch packer is a convolution whose kernel is its stride: k1 is the base patch, k2 and k4 cover twice and four times
as many cells along time, height and width (FramePack, arXiv:2504.12626; Helios; FAR's old frames are (1, 4, 4)). With
the base weights repeated over its block and divided by the block's volume it equals the base patch embedding of the
2x or 4x average-pooled latents, so an untrained packer is already a memory.

B rows, C channels, T frames, H x W cells, D width. Blocks that reach over the end repeat the last frame, row, column.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..kernels.frame_pool import frame_pool
from .base import FrameGroup, Kernel, MemoryTokens

__all__ = ["KERNELS", "MeanPacker", "Packer", "PatchPacker", "block_layout", "kernel_of", "token_count"]

BASE: Kernel = (1, 2, 2)
KERNELS: dict[str, Kernel] = {
    "k1": (1, 2, 2),
    "k2": (2, 4, 4),
    "k4": (4, 8, 8),
    "k8": (8, 16, 16),
    "far": (1, 4, 4),
}
"""Kernels by name, in latent cells, for the base patch (1, 2, 2)."""


def kernel_of(kernel: str | tuple[int, int, int]) -> Kernel:
    """A kernel from its name or as it is.

    Example:
        >>> kernel_of("k4")
        (4, 8, 8)
    """
    if isinstance(kernel, str):
        if kernel not in KERNELS:
            raise ValueError(f"kernel={kernel!r}; allowed are {', '.join(KERNELS)}, or (kt, kh, kw)")
        return KERNELS[kernel]
    if len(kernel) != 3 or min(kernel) < 1:
        raise ValueError(f"kernel={kernel}; give (kt, kh, kw), each at least 1")
    return (int(kernel[0]), int(kernel[1]), int(kernel[2]))


def token_count(frames: int, height: int, width: int, kernel: str | tuple[int, int, int]) -> int:
    """Tokens of a group: ceil(T / kt) ceil(H / kh) ceil(W / kw).

    Example:
        >>> token_count(16, 60, 104, "k4")
        416
    """
    kt, kh, kw = kernel_of(kernel)
    return -(-frames // kt) * -(-height // kh) * -(-width // kw)


def block_layout(
    frame_ids: Tensor, height: int, width: int, kernel: Kernel, base: Kernel = BASE
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Where the tokens of frames [B, T] lie: (positions [B, L, 3], times [B, L, kt], spans [L, 2], counts [L]).

    Tokens run over time, then rows, then columns. Repeated cells at the end count as nothing.
    """
    batch, frames = frame_ids.shape
    device = frame_ids.device
    missing = -frames % kernel[0]
    times = F.pad(frame_ids.float(), (0, missing), value=float("nan")).unflatten(1, (-1, kernel[0]))  # [B, T', kt]
    axes = []
    for cells, size, patch in ((height, kernel[1], base[1]), (width, kernel[2], base[2])):
        patches, each = -(-cells // patch), max(size // patch, 1)
        first = torch.arange(-(-cells // size), device=device) * each
        span = (patches - first).clamp(1, each)
        axes.append((first + (span - 1) / 2, span))
    (rows, row_span), (columns, column_span) = axes
    steps, across = times.shape[1], len(rows) * len(columns)
    centre = times.nanmean(-1)  # [B, T']
    positions = torch.stack(
        [
            centre[:, :, None, None].expand(-1, -1, len(rows), len(columns)),
            rows[None, None, :, None].expand(batch, steps, -1, len(columns)),
            columns[None, None, None, :].expand(batch, steps, len(rows), -1),
        ],
        dim=-1,
    ).flatten(1, 3)
    spans = torch.stack(
        [
            row_span[None, :, None].expand(steps, -1, len(columns)),
            column_span[None, None, :].expand(steps, len(rows), -1),
        ],
        dim=-1,
    ).flatten(0, 2)
    merged = (~times[0].isnan()).sum(-1).repeat_interleave(across)  # the same in every row
    return positions, times.repeat_interleave(across, 1), spans, merged * spans.prod(-1)


class Packer(nn.Module):
    """Base of packers of one rate.

    Args:
        kernel: cells of a block; base: cells of a base patch.
    """

    def __init__(self, kernel: str | tuple[int, int, int], base: Kernel = BASE) -> None:
        super().__init__()
        self.kernel, self.base = kernel_of(kernel), base

    def forward(self, frames: Tensor) -> Tensor:
        """[B, C, T, H, W] -> [B, L, D]."""
        raise NotImplementedError

    def pack(self, group: FrameGroup) -> MemoryTokens:
        """Tokens of a group with their places."""
        ids = group.frame_ids.to(group.frames.device)
        return MemoryTokens(self(group.frames), *self.layout(ids, *group.frames.shape[-2:]))

    def layout(self, frame_ids: Tensor, height: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Positions, times, spans and counts of the tokens of frames [B, T], see `block_layout`."""
        return block_layout(frame_ids, height, width, self.kernel, self.base)

    def refresh(self, tokens: MemoryTokens, targets: Sequence[int] | Tensor | None = None) -> MemoryTokens:
        """Tokens as they are shown to the frames `targets`; packers whose tokens age change them here."""
        return tokens


class PatchPacker(Packer):
    """A convolution with kernel = stride.

    Args:
        channels: C; dim: D.
        kernel: name or (kt, kh, kw) in latent cells.
        base: cells of a base patch; only `from_base` and positions use it.

    Example:
        >>> packer = PatchPacker(4, 16, "k2")
        >>> packer(torch.zeros(1, 4, 4, 8, 8)).shape
        torch.Size([1, 8, 16])
    """

    def __init__(
        self, channels: int, dim: int, kernel: str | tuple[int, int, int] = "k1", base: Kernel = BASE
    ) -> None:
        super().__init__(kernel, base)
        self.proj = nn.Conv3d(channels, dim, self.kernel, self.kernel)

    @classmethod
    def from_base(cls, proj: nn.Conv3d, kernel: str | tuple[int, int, int]) -> PatchPacker:
        """A packer that starts as the base patch embedding of average-pooled latents.

        Args:
            proj: the base patch embedding, kernel = stride.
            kernel: a whole multiple of its kernel along each axis.

        Raises:
            ValueError: no whole multiple.
        """
        base: Kernel = tuple(proj.kernel_size)  # type: ignore[assignment]
        size = kernel_of(kernel)
        if any(k % b for k, b in zip(size, base)):
            raise ValueError(f"kernel {size} is no whole multiple of the base patch {base}")
        factor = [k // b for k, b in zip(size, base)]
        packer = cls(proj.in_channels, proj.out_channels, size, base).to(proj.weight.device, proj.weight.dtype)
        with torch.no_grad():
            wide = proj.weight
            for axis, repeats in enumerate(factor, start=2):
                wide = wide.repeat_interleave(repeats, axis)
            packer.proj.weight.copy_(wide / math.prod(factor))
            assert packer.proj.bias is not None
            packer.proj.bias.zero_() if proj.bias is None else packer.proj.bias.copy_(proj.bias)
        return packer

    def forward(self, frames: Tensor) -> Tensor:
        for axis, size in enumerate(self.kernel, start=2):
            missing = -frames.shape[axis] % size
            if missing:
                edge = frames.narrow(axis, frames.shape[axis] - 1, 1)
                frames = torch.cat([frames, *[edge] * missing], dim=axis)
        return self.proj(frames).flatten(2).transpose(1, 2)


class MeanPacker(Packer):
    """Average-pooled latents through a base patch embedding: a memory without weights of its own.

    Equal to `PatchPacker.from_base` where the blocks fit the video, at the cost of one pass over the pooled cells.

    Args:
        proj: the base patch embedding, used as it is (not copied).
        kernel: a whole multiple of its kernel.

    Example:
        >>> proj = nn.Conv3d(4, 16, (1, 2, 2), (1, 2, 2))
        >>> frames = torch.randn(1, 4, 4, 8, 8, generator=torch.Generator().manual_seed(0))
        >>> torch.allclose(MeanPacker(proj, "k2")(frames), PatchPacker.from_base(proj, "k2")(frames), atol=1e-6)
        True
    """

    def __init__(self, proj: nn.Conv3d, kernel: str | tuple[int, int, int]) -> None:
        base: Kernel = tuple(proj.kernel_size)  # type: ignore[assignment]
        super().__init__(kernel, base)
        if any(k % b for k, b in zip(self.kernel, base)):
            raise ValueError(f"kernel {self.kernel} is no whole multiple of the base patch {base}")
        self.factor: Kernel = tuple(k // b for k, b in zip(self.kernel, base))  # type: ignore[assignment]
        self.proj = proj

    def forward(self, frames: Tensor) -> Tensor:
        pooled = frame_pool(frames, self.factor)
        patch = self.base
        # whole blocks first, whole patches second: an edge block has as many tokens as a packer gives it
        for axis, (cells, size) in enumerate(zip(frames.shape[2:], self.kernel), start=2):
            missing = -(-cells // size) * patch[axis - 2] - pooled.shape[axis]
            if missing:
                edge = pooled.narrow(axis, pooled.shape[axis] - 1, 1)
                pooled = torch.cat([pooled, *[edge] * missing], dim=axis)
        return self.proj(pooled).flatten(2).transpose(1, 2)
