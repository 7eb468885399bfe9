"""Inputs that the tests and the benchmark of the merge share. Every case is a function of its seed alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import lse_merge

__all__ = ["Case", "cases", "run"]


@dataclass(frozen=True)
class Case:
    """Arguments of one call of `lse_merge`, under a name."""

    name: str
    outs: Tensor
    lse: Tensor
    sinks: Tensor | None = None
    dtype: torch.dtype | None = None


def run(case: Case, impl: str | None = None) -> tuple[Tensor, Tensor]:
    """Calls the operation on a case."""
    return lse_merge(case.outs, case.lse, case.sinks, dtype=case.dtype, impl=impl)


def cases(
    parts: int = 5, batch: int = 2, heads: int = 2, count: int = 3, size: int = 8, device: str = "cpu", seed: int = 0
) -> list[Case]:
    """Full and empty parts, sinks, wide logits and strides."""
    g = torch.Generator().manual_seed(seed)
    outs = torch.randn(parts, batch, heads, count, size, generator=g)
    lse = 2 * torch.randn(parts, batch, heads, count, generator=g)
    sinks = torch.linspace(-2.0, 3.0, heads)
    ragged = lse.clone()
    ragged[parts // 2 :, -1] = -torch.inf
    ragged[0, 0, 0] = -torch.inf
    nothing = torch.full_like(lse, -torch.inf)
    unread = torch.where(ragged[..., None] == -torch.inf, torch.nan, outs)
    strided = outs.transpose(2, 3).contiguous().transpose(2, 3)
    found = [
        Case("plain", outs, lse),
        Case("sinks", outs, lse, sinks),
        Case("half", outs, lse, dtype=torch.float16),
        Case("wide", outs, 60 * lse, 40 * sinks),
        Case("ragged", outs, ragged),
        Case("unread", unread, ragged, sinks),
        Case("nothing", torch.full_like(outs, torch.nan), nothing),
        Case("only-sinks", outs, nothing, sinks),
        Case("one-part", outs[:1], lse[:1]),
        Case("strided", strided, lse),
    ]
    return [_to(case, device) for case in found]


def _to(case: Case, device: str) -> Case:
    moved = {name: value.to(device) for name, value in vars(case).items() if isinstance(value, Tensor)}
    return replace(case, **moved)  # type: ignore[arg-type]
