"""Noise that depends on (row seed, frame, purpose, step) alone, so that a rollout can stop and go on anywhere.

Nothing is drawn in sequence: a frame gets the same numbers alone, in a batch, and after a resume.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..kernels import philox

__all__ = ["FRESH", "INIT", "STEP", "FrameNoise", "NoiseSource"]

FRESH = 0
"""Purpose of the pure noise of new frames."""
INIT = 1
"""Purpose of the noise that takes the first frames back to their levels."""
STEP = 2
"""Purpose of the noise inside a step."""
_FIRST_PURPOSE = 1 << 16
"""Above every purpose of token sampling."""


class NoiseSource(Protocol):
    """Anything that hands out standard normal numbers for frames."""

    def __call__(self, frame_ids: Sequence[int], purpose: int, step: int = 0) -> Tensor:
        """[B, C, n, ...] for n frames; `step` counts the sub-steps of the whole run."""
        ...


class FrameNoise:
    """Standard normal frames from the counter-based generator.

    Args:
        seeds: [B] int64, one per video.
        shape: of one frame, (C, H, W) or (C,).
        dtype: of the result; the numbers have 23 random bits (|z| <= 5.8).

    Raises:
        ValueError: seeds or shape of another form.

    Example:
        >>> noise = FrameNoise(torch.tensor([7]), (2, 4, 4))
        >>> noise([3, 5], FRESH).shape
        torch.Size([1, 2, 2, 4, 4])
        >>> torch.equal(noise([5], FRESH)[:, :, 0], noise([3, 5], FRESH)[:, :, 1])
        True
    """

    def __init__(self, seeds: Tensor, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> None:
        if seeds.dim() != 1 or seeds.dtype != torch.int64:
            raise ValueError(f"seeds are {seeds.dtype} of shape {tuple(seeds.shape)}; give an int64 tensor [B]")
        if not shape or any(n < 1 for n in shape):
            raise ValueError(f"shape={tuple(shape)}; give the shape of a frame, (C, H, W)")
        self.seeds, self.shape, self.dtype = seeds, tuple(shape), dtype

    def __call__(self, frame_ids: Sequence[int], purpose: int, step: int = 0) -> Tensor:
        cells = math.prod(self.shape)
        pairs = -(-cells // 2)
        ids = torch.as_tensor(list(frame_ids), dtype=torch.int64, device=self.seeds.device)
        if not len(ids):
            return torch.zeros(len(self.seeds), self.shape[0], 0, *self.shape[1:], dtype=self.dtype)
        wide = philox.exponential(
            self.seeds, ids.expand(len(self.seeds), -1), 2 * pairs, _FIRST_PURPOSE + 4 * step + purpose
        )
        # Box-Muller: an exponential is half a squared radius, and exp(-exponential) a uniform angle
        first, second = wide.to(torch.float64).chunk(2, dim=-1)
        radius, angle = (2 * first).sqrt(), 2 * math.pi * torch.exp(-second)
        normal = torch.cat([radius * torch.cos(angle), radius * torch.sin(angle)], dim=-1)[..., :cells]
        return normal.reshape(len(self.seeds), len(ids), *self.shape).transpose(1, 2).to(self.dtype).contiguous()
