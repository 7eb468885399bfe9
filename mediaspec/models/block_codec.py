"""Packs blocks of past frames into few wide tokens, and gives the frames back when they are read.

What is kept is small; what attention reads has the form it knows from whole frames. A block of k frames takes log2 k
stages of 2 x 2 x 2 tokens each. A stage is a linear map, fitted to the data (`fit`: the principal components, the best
linear codec), and a small network that also knows how the camera moved and adds nothing at first.

B rows, N blocks, k frames of a block, s x s tokens of a frame, M width of a token, P width of a packed one, R features
of a pose against the centre of its block.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from transformers import initialization as init

__all__ = ["BlockCodec"]


class _Stage(nn.Module):
    """2 x 2 x 2 tokens of width `narrow` and one of width `wide`."""

    def __init__(self, narrow: int, wide: int, told: int) -> None:
        super().__init__()
        self.pack_line, self.unpack_line = nn.Linear(8 * narrow, wide), nn.Linear(wide, 8 * narrow)
        hidden = max(narrow, wide)
        self.pack_net = nn.Sequential(nn.Linear(8 * narrow + told, hidden), nn.GELU(), nn.Linear(hidden, wide))
        self.unpack_net = nn.Sequential(nn.Linear(wide + told, hidden), nn.GELU(), nn.Linear(hidden, 8 * narrow))

    def pack(self, x: Tensor, motion: Tensor) -> Tensor:
        """[B, N, t / 2, s / 2, s / 2, wide] of tokens [B, N, t, s, s, narrow] and motion [B, N, k * R]."""
        b, n, t, s, _, m = x.shape
        parts = x.reshape(b, n, t // 2, 2, s // 2, 2, s // 2, 2, m).permute(0, 1, 2, 4, 6, 3, 5, 7, 8).flatten(5)
        return self.pack_line(parts) + self.pack_net(_told(parts, motion))

    def unpack(self, x: Tensor, motion: Tensor) -> Tensor:
        """[B, N, 2 t, 2 s, 2 s, narrow] of packed tokens [B, N, t, s, s, wide] and motion [B, N, k * R]."""
        b, n, t, s, _, _ = x.shape
        parts = self.unpack_line(x) + self.unpack_net(_told(x, motion))
        parts = parts.reshape(b, n, t, s, s, 2, 2, 2, -1).permute(0, 1, 2, 5, 3, 6, 4, 7, 8)
        return parts.reshape(b, n, 2 * t, 2 * s, 2 * s, -1)


def _told(x: Tensor, motion: Tensor) -> Tensor:
    return torch.cat([x, motion[:, :, None, None, None].expand(*x.shape[:5], -1)], dim=-1)


class BlockCodec(nn.Module):
    """Packer and unpacker of blocks.

    Args:
        width: M of memory tokens.
        packed: P of packed tokens, at most 8 M.
        length: k, a power of two.
        motions: R.

    Raises:
        ValueError: sizes that do not fit.
    """

    def __init__(self, width: int, packed: int, length: int, motions: int) -> None:
        super().__init__()
        if length < 2 or length & (length - 1):
            raise ValueError(f"blocks of {length} frames: write a power of two, 2 or more")
        if not 0 < packed <= 8 * width:
            raise ValueError(f"packed tokens of width {packed}: write 1 to {8 * width}, 8 tokens of width {width}")
        self.length = length
        widths = [width] + [packed] * (length.bit_length() - 1)
        self.stages = nn.ModuleList(_Stage(a, b, length * motions) for a, b in zip(widths, widths[1:]))

    def _each(self) -> list[_Stage]:
        return [stage for stage in self.stages if isinstance(stage, _Stage)]

    def zero_outputs(self) -> None:
        """Linear maps alone."""
        for net in (net for stage in self._each() for net in (stage.pack_net, stage.unpack_net)):
            last = net[2]
            assert isinstance(last, nn.Linear)
            init.zeros_(last.weight)
            init.zeros_(last.bias)

    def pack(self, frames: Tensor, motion: Tensor) -> Tensor:
        """Packed tokens [B, N, (s / k)^2, P].

        Args:
            frames: [B, N, k, s, s, M]; motion: [B, N, k * R].
        """
        for stage in self._each():
            frames = stage.pack(frames, motion)
        return frames.flatten(2, 4)

    def unpack(self, packed: Tensor, motion: Tensor) -> Tensor:
        """Frames [B, N, k, s * s, M] of packed tokens [B, N, (s / k)^2, P]."""
        side = math.isqrt(packed.shape[2])
        x = packed.reshape(*packed.shape[:2], 1, side, side, -1)
        for stage in reversed(self._each()):
            x = stage.unpack(x, motion)
        return x.flatten(3, 4)

    @torch.no_grad()
    def fit(self, frames: Tensor, motion: Tensor) -> None:
        """Sets the linear maps to the principal components of blocks, as `pack` takes them.

        Raises:
            ValueError: fewer tokens than components.
        """
        for stage in self._each():
            b, n, t, s, _, m = frames.shape
            parts = frames.reshape(b, n, t // 2, 2, s // 2, 2, s // 2, 2, m).permute(0, 1, 2, 4, 6, 3, 5, 7, 8)
            rows = parts.reshape(-1, 8 * m)
            wide = stage.unpack_line.in_features
            if len(rows) < 2 * wide:
                raise ValueError(f"{len(rows)} packed tokens for {wide} components; give at least {2 * wide}")
            mean = rows.mean(0)
            _, axes = torch.linalg.eigh((rows - mean).T @ (rows - mean))
            axes = axes.T.flip(0)  # largest first
            stage.pack_line.weight.copy_(axes[:wide])
            stage.pack_line.bias.copy_(-axes[:wide] @ mean)
            stage.unpack_line.weight.copy_(axes[:wide].T)
            stage.unpack_line.bias.copy_(mean)
            frames = stage.pack(frames, motion)
