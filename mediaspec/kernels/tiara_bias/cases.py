"""Inputs that the tests and the benchmark of the frame bias share. Every case is a function of its seed alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import FrameLayout, framed_attention

__all__ = ["Case", "cases", "make_case", "run"]


@dataclass(frozen=True)
class Case:
    """Arguments of one call of `framed_attention`, under a name."""

    name: str
    q: Tensor
    k: Tensor
    v: Tensor
    delta: Tensor
    layout: FrameLayout
    mode: str = "frame"
    radius: int = 1
    scale: float | None = None
    key_mask: Tensor | None = None


def run(case: Case, route: str = "auto", delta_limit: float | None = None) -> Tensor:
    """Calls the operation on a case."""
    return framed_attention(
        case.q,
        case.k,
        case.v,
        case.delta,
        case.layout,
        mode=case.mode,
        radius=case.radius,
        scale=case.scale,
        key_mask=case.key_mask,
        delta_limit=delta_limit,
        route=route,
    )


def make_case(
    layout: FrameLayout,
    behind: int = 0,
    batch: int = 2,
    heads: int = 2,
    size: int = 16,
    most: float = 1.5,
    per_token: bool = False,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> Case:
    """Random tokens in the memory order of diffusers ([B, L, H, D]); delta from 0 to `most`, 0 at a tenth of it."""
    g = torch.Generator().manual_seed(seed)
    length = layout.stop + behind
    q, k, v = (
        torch.randn(batch, length, heads, size, generator=g).to(device, dtype).transpose(1, 2) for _ in range(3)
    )
    count = length if per_token else layout.frames
    delta = (most * (1.1 * torch.rand(batch, heads, count, generator=g) - 0.1).clamp(min=0)).to(device)
    return Case("plain", q, k, v, delta, layout)


def cases(size: int = 16, device: str = "cpu", dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Case]:
    """Text first, last, on both sides and none; odd frames; masks, strides, scales; each mode."""
    video = make_case(FrameLayout(5, 15, width=5), size=size, device=device, dtype=dtype, seed=seed)
    first = make_case(FrameLayout(3, 21, 7, width=7), size=size, device=device, dtype=dtype, seed=seed + 1)
    last = make_case(FrameLayout(6, 9, width=3), 11, size=size, device=device, dtype=dtype, seed=seed + 2)
    both = make_case(FrameLayout(4, 13, 3), 5, 1, 3, size=size, device=device, dtype=dtype, seed=seed + 3)
    fine = make_case(
        FrameLayout(3, 8, 2, width=4), 2, per_token=True, size=size, device=device, dtype=dtype, seed=seed
    )
    seen = torch.ones(2, 65, dtype=torch.bool, device=device)
    seen[0, 60:], seen[1, 54:] = False, False  # the second row hides all of its text
    rows = {name: getattr(last, name).contiguous() for name in ("q", "k", "v")}
    found = [
        replace(video, name="video"),
        replace(first, name="text-first"),
        replace(last, name="text-last"),
        replace(both, name="text-both"),
        replace(fine, name="per-token"),
        replace(last, name="masked", key_mask=seen),
        replace(last, name="head-major", **rows),
        replace(
            video, name="head-major-video", q=video.q.contiguous(), k=video.k.contiguous(), v=video.v.contiguous()
        ),
        replace(both, name="shared-delta", delta=both.delta[:, :1]),
        replace(both, name="scale", scale=0.5),
        replace(video, name="strong", delta=6 * torch.ones_like(video.delta)),
        replace(video, name="none", delta=0 * video.delta),
        make_case(FrameLayout(7, 1), 0, size=size, device=device, dtype=dtype, seed=seed + 4),
        make_case(FrameLayout(1, 9), 4, size=size, device=device, dtype=dtype, seed=seed + 5),
    ]
    near = [
        replace(case, name=f"{mode}-{case.name}", mode=mode, radius=radius)
        for case in (found[0], found[1], found[2], found[4], found[5], found[10])
        for mode, radius in (("self_token", 0), ("neighbourhood", 1), ("neighbourhood", 2))
    ]
    return found + near
