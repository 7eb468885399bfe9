"""The bias as a `score_mod` of FlexAttention (route R2): compiled when it is first called, no memory of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from .layout import FrameLayout, query_delta

__all__ = ["with_flex"]


def _run(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, ids: Tensor, seen: Tensor | None, near: Tensor, scale: float
) -> Tensor:
    """near [L, 3]: radius or -1, row and column of a token; tensors are arguments, so a new step compiles nothing."""

    def biased(score: Tensor, b: Tensor, h: Tensor, m: Tensor, n: Tensor) -> Tensor:
        same = (ids[m] == ids[n]) & (ids[m] >= 0)
        reach = near[m, 0]
        close = ((near[m, 1] - near[n, 1]).abs() <= reach) & ((near[m, 2] - near[n, 2]).abs() <= reach)
        score = torch.where(same & ((reach < 0) | close), score - bias[b, h, m], score)
        return score if seen is None else torch.where(seen[b, n], score, -torch.inf)

    found = flex_attention(q, k, v, score_mod=biased, scale=scale)
    return found[0] if isinstance(found, tuple) else found


@cache
def _compiled() -> Callable[..., Tensor]:
    return torch.compile(_run, dynamic=False)


def with_flex(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    delta: Tensor,
    layout: FrameLayout,
    mode: str,
    radius: int,
    scale: float,
    key_mask: Tensor | None,
    compiled: bool = True,
) -> Tensor:
    """See `mediaspec.kernels.tiara_bias.framed_attention`.

    Args:
        compiled: False runs torch's own unfused form, an L x L matrix: for tests.
    """
    batch, heads, length, _ = q.shape
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    bias = query_delta(delta, layout, length, wide).expand(batch, heads, length)
    place = (torch.arange(length, device=q.device) - layout.start) % layout.tokens
    across = layout.width or layout.tokens
    reach = {"frame": -1, "self_token": 0, "neighbourhood": radius}[mode]
    near = torch.stack([torch.full_like(place, reach), place // across, place % across], -1)
    run = _compiled() if compiled else _run
    return run(q, k, v, bias.contiguous(), layout.ids(length, q.device), key_mask, near, scale)
