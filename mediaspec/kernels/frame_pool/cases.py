"""Inputs that the tests and the benchmark of the block means share. Every case is a function of its seed alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from . import frame_pool

__all__ = ["Case", "cases", "run"]


@dataclass(frozen=True)
class Case:
    """Arguments of one call of `frame_pool`, under a name."""

    name: str
    frames: Tensor
    kernel: tuple[int, int, int]


def run(case: Case, impl: str | None = None) -> Tensor:
    """Calls the operation on a case."""
    return frame_pool(case.frames, case.kernel, impl=impl)


def cases(batch: int = 2, channels: int = 3, device: str = "cpu", seed: int = 0) -> list[Case]:
    """Whole and ragged blocks, single cells, strides and narrow dtypes."""
    g = torch.Generator().manual_seed(seed)
    frames = torch.randn(batch, channels, 4, 8, 8, generator=g).to(device)
    ragged = torch.randn(batch, channels, 5, 7, 9, generator=g).to(device)
    return [
        Case("k1", frames, (1, 1, 1)),
        Case("k2", frames, (2, 2, 2)),
        Case("k4", frames, (4, 4, 4)),
        Case("far", frames, (1, 2, 2)),
        Case("ragged", ragged, (2, 2, 4)),
        Case("larger-than-the-video", ragged[:, :, :2, :3, :3], (3, 4, 5)),
        Case("one-cell", ragged[:, :, :1, :1, :1], (2, 2, 2)),
        Case("strided", ragged.permute(0, 1, 2, 4, 3)[:, :, ::2], (2, 3, 2)),
        Case("expanded", frames[:1].expand(3, -1, -1, -1, -1), (2, 2, 2)),
        Case("half", frames.half(), (2, 2, 2)),
        Case("bfloat16", frames.bfloat16(), (2, 4, 4)),
        Case("float64", frames.double(), (2, 2, 2)),
        Case("no-rows", frames[:0], (2, 2, 2)),
    ]
