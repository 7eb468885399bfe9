"""The biased attention in plain torch, in blocks of queries: the readable truth, in memory linear in L (route R1)."""

from __future__ import annotations

import torch
from torch import Tensor

from .layout import FrameLayout, query_delta, same_set

__all__ = ["dense"]

LOGITS = 1 << 22
"""Logits that exist at one time: 16 MB in float32."""


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    delta: Tensor,
    layout: FrameLayout,
    mode: str,
    radius: int,
    scale: float,
    key_mask: Tensor | None,
) -> Tensor:
    """See `mediaspec.kernels.tiara_bias.framed_attention`. 16-bit inputs are computed in float32. Differentiable."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    batch, heads, length, _ = q.shape
    bias = query_delta(delta, layout, length, wide)
    keys, values = k.to(wide).transpose(-1, -2), v.to(wide)
    place = torch.arange(length, device=q.device)
    step = max(1, LOGITS // max(1, batch * heads * length))
    parts = []
    for first in range(0, length, step):
        rows = place[first : first + step]
        logits = scale * (q[:, :, first : first + step].to(wide) @ keys)
        logits = logits - bias[..., first : first + step, None] * same_set(layout, mode, radius, rows, place)
        if key_mask is not None:
            logits = logits.masked_fill(~key_mask[:, None, None], -torch.inf)
        parts.append(logits.softmax(-1) @ values)
    return torch.cat(parts, 2).to(q.dtype)
