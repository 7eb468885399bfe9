"""Layers of `FrameDiT`: the block over new tokens, the packer of past frames, the reader of frames on channels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

__all__ = ["BlockPacker", "ChannelReader", "FrameBlock", "KeysValues"]


@dataclass(frozen=True)
class KeysValues:
    """Keys and values of all layers, each [B, L, heads, N, head size]; keys have unit scale."""

    keys: Tensor
    values: Tensor

    @classmethod
    def split(cls, keys: Tensor, values: Tensor, heads: int) -> KeysValues:
        """From [B, L, N, D]."""
        k, v = (x.unflatten(-1, (heads, -1)).transpose(2, 3) for x in (keys, values))
        return cls(unit(k), v)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, heads, N, head size] of one layer."""
        return self.keys[:, index], self.values[:, index]


def unit(x: Tensor) -> Tensor:
    """x at root mean square 1 along the last dimension: queries and keys that cannot run away in training."""
    return F.rms_norm(x, x.shape[-1:])


class FrameBlock(nn.Module):
    """Attention over past and new tokens, optionally a second one over older tokens, and a feed-forward layer.

    Args:
        width: D; heads: of attention; cross: whether it has the second attention.
    """

    def __init__(self, width: int, heads: int, cross: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.mix = nn.Linear(width, width)
        # how sharply a head looks, times the usual 1 / sqrt(head size)
        self.sharpness = nn.Parameter(torch.ones(heads))
        self.cross_norm = nn.RMSNorm(width) if cross else None
        self.cross_q = nn.Linear(width, width, bias=False) if cross else None
        self.cross_mix = nn.Linear(width, width) if cross else None
        self.mlp_norm = nn.RMSNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def zero_outputs(self) -> None:
        """Every branch adds nothing at first."""
        init.ones_(self.sharpness)
        for layer in (self.mix, self.cross_mix, self.narrow):
            if layer is not None:
                init.zeros_(layer.weight)
                init.zeros_(layer.bias)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = unit(q) * self.sharpness[:, None, None]
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    def forward(
        self, h: Tensor, past: tuple[Tensor, Tensor] | None, other: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """New tokens h [B, N, D] after the block; `past` stands in front of them, `other` in the second attention."""
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in self.qkv(self.norm(h)).chunk(3, dim=-1))
        k = unit(k)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        h = h + self.mix(self._attend(q, k, v))
        if other is not None and self.cross_q is not None and self.cross_mix is not None:
            assert self.cross_norm is not None
            q = self.cross_q(self.cross_norm(h)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            h = h + self.cross_mix(self._attend(q, *other))
        return h + self.narrow(F.gelu(self.widen(self.mlp_norm(h)), approximate="tanh"))


class BlockPacker(nn.Module):
    """Packs blocks of frames: the embedding of average-pooled latents, plus what a small network adds to it.

    Packing k frames takes log2 k stages of 2 x 2 x 2 tokens each. The networks add nothing at first, so that an
    untrained packer is average pooling. A mean of moving views forgets what is small; the networks see the unpooled
    tokens and how the camera moved, and learn to do better.

    Args:
        width: M of memory tokens; length: frames of a block, a power of two; motions: features of a pose against the
            centre of its block.
    """

    def __init__(self, width: int, length: int, motions: int) -> None:
        super().__init__()
        self.stages = nn.ModuleList()
        size = 1
        while size < length:
            size *= 2
            self.stages.append(
                nn.Sequential(
                    nn.Linear(8 * width + length * motions, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
                )
            )
        if size != length:
            raise ValueError(f"blocks of {length} frames: write a power of two")

    def zero_outputs(self) -> None:
        """Pooling alone."""
        for stage in self.stages:
            assert isinstance(stage, nn.Sequential)
            last = stage[2]
            assert isinstance(last, nn.Linear)
            init.zeros_(last.weight)
            init.zeros_(last.bias)

    def forward(self, x: Tensor, pooled: list[Tensor], motion: Tensor) -> Tensor:
        """Tokens [B, N, tokens of a block, M].

        Args:
            x: [B, N, length, side, side, M] embedded frames.
            pooled: per stage [B, N, T, side', side', M], the embedding of the latents pooled that far.
            motion: [B, N, length * R].
        """
        for stage, mean in zip(self.stages, pooled, strict=True):
            b, n, t, h, w, m = x.shape
            parts = x.reshape(b, n, t // 2, 2, h // 2, 2, w // 2, 2, m).permute(0, 1, 2, 4, 6, 3, 5, 7, 8)
            told = motion[:, :, None, None, None].expand(b, n, t // 2, h // 2, w // 2, -1)
            x = mean + stage(torch.cat([parts.flatten(5), told], dim=-1))
        return x.flatten(2, 4)


class ChannelReader(nn.Module):
    """Old frames on the channels of new ones, with where they stand against each other; adds nothing at first.

    Args:
        values: numbers of a token; frames: old frames; motions: features of a pose against another; width: D.
    """

    def __init__(self, values: int, frames: int, motions: int, width: int) -> None:
        super().__init__()
        self.content = nn.Linear(frames * values, 2 * width)
        self.motion = nn.Linear(frames * motions, 2 * width)
        self.out = nn.Linear(2 * width, width)

    def zero_outputs(self) -> None:
        init.zeros_(self.out.weight)
        init.zeros_(self.out.bias)

    def forward(self, content: Tensor, motion: Tensor) -> Tensor:
        """To add to new tokens: [B, w, n, D] of old tokens [B, F, n, values] and motion [B, w, F, R]."""
        old = self.content(content.transpose(1, 2).flatten(2))  # [B, n, 2 D]
        where = self.motion(motion.flatten(2))  # [B, w, 2 D]
        return self.out(F.gelu(old[:, None] + where[:, :, None]))
