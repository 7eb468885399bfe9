"""Inputs that the tests and the benchmark of the edit share. Every case is a function of its seed alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import tiara_temporal
from .plan import TemporalPlan, make_plan

__all__ = ["Case", "cases", "make_case", "run", "windowed_bins"]


@dataclass(frozen=True)
class Case:
    """Arguments of one call of `tiara_temporal`, under a name."""

    name: str
    q: Tensor
    k: Tensor
    v: Tensor
    plan: TemporalPlan
    scale: float | None = None


def run(case: Case, impl: str | None = None) -> tuple[Tensor, Tensor | None]:
    """Calls the operation on a case, averages included."""
    return tiara_temporal(case.q, case.k, case.v, case.plan, scale=case.scale, means=True, impl=impl)


def windowed_bins(frames: int, length: int, count: int) -> Tensor:
    """[N, N, count] complex128: a raised cosine of `length` taps around every frame, circular."""
    lag = torch.arange(length, dtype=torch.float64) - length // 2
    taps = (torch.pi * lag / (length + 1)).cos().square()
    angle = -2 * torch.pi * lag[:, None] * torch.arange(count, dtype=torch.float64) / frames
    terms = taps[:, None] * torch.polar(torch.ones_like(angle), angle)
    index = (torch.arange(frames)[:, None] + lag.long()) % frames
    bins = torch.zeros(frames, frames, count, dtype=torch.complex128)
    return bins.scatter_add_(1, index[..., None].expand(-1, -1, count), terms.expand(frames, -1, -1))


def make_case(
    name: str,
    rows: int,
    heads: int,
    frames: int,
    size: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    booster: float = 0.0,
    cap: bool = False,
    corner: bool = False,
    sharp: float = 1.0,
    seed: int = 0,
) -> Case:
    """One call; q, k and v lie in memory as projections leave them, heads side by side."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(rows, frames, heads, size, generator=g).to(device, dtype).transpose(1, 2) for _ in range(3))
    bins = windowed_bins(frames, 5, frames // 2 + 1)
    best = torch.rand(frames, frames, generator=g, dtype=torch.float64).sub_(0.3).fill_diagonal_(0.0)
    far = (torch.arange(frames)[:, None] - torch.arange(frames)).abs() >= frames - 2
    plan = make_plan(
        bins,
        max(1, frames // 4),
        frames // 2,
        alpha=6.0,
        booster=booster,
        cap=best if cap else None,
        corner=2.0 * far.double() if corner else None,
        device=device,
        dtype=torch.float64 if dtype == torch.float64 else torch.float32,
    )
    return Case(name, q * sharp, k, v, plan)


def cases(rows: int = 3, heads: int = 2, frames: int = 9, size: int = 20, device: str = "cpu") -> list[Case]:
    """Plain, with each option, sharp and flat rows, 16-bit inputs, and another scale."""
    shape = (rows, heads, frames, size)
    plain = make_case("plain", *shape, device=device)
    return [
        plain,
        make_case("booster", *shape, booster=0.7, device=device, seed=1),
        make_case("cap", *shape, cap=True, device=device, seed=2),
        make_case("corner", *shape, corner=True, device=device, seed=3),
        make_case("all", *shape, booster=0.5, cap=True, corner=True, device=device, seed=4),
        make_case("sharp", *shape, sharp=8.0, cap=True, device=device, seed=5),
        make_case("sharper", *shape, sharp=60.0, device=device, seed=5),
        make_case("flat", *shape, sharp=0.0, device=device, seed=6),
        make_case("half", *shape, dtype=torch.float16, cap=True, device=device, seed=7),
        make_case("bfloat16", *shape, dtype=torch.bfloat16, device=device, seed=8),
        replace(plain, name="scale", scale=0.3),
        replace(plain, name="dense", q=plain.q.contiguous(), k=plain.k.contiguous()),
        replace(plain, name="no-rows", q=plain.q[:0], k=plain.k[:0], v=plain.v[:0]),
    ]
