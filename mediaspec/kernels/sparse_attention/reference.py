"""Attention over a key set in plain torch: gather what is seen, then attend densely.

On the CPU the gathered keys are as many as the longest list and the tokens drafted this round. On a device, where the
host does not know the lengths, every slot is gathered behind the list and masked.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..tree_attention import Attended
from ..tree_attention.reference import attend

__all__ = ["sparse_attention"]

STEP = 16
"""Gathered keys are rounded up to a multiple of it, for the reasons of `tree_attention.reference`."""


def sparse_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    index: Tensor,
    newer: Tensor,
    scale: float,
    softcap: float | None,
    window: int | None,
    sinks: Tensor | None,
    need_lse: bool,
) -> Attended:
    """See `mediaspec.kernels.sparse_attention.sparse_attention`."""
    batch, _, count, _ = queries.shape
    kv_heads, capacity = keys.shape[1:3]
    device = queries.device
    newer = torch.minimum(newer, lengths).long()
    span = capacity if lengths.is_cuda else int((lengths - newer).max()) + count
    listed = -(-index.shape[-1] // STEP) * STEP
    slots = torch.full((batch, kv_heads, listed + -(-span // STEP) * STEP), -1, dtype=torch.int64, device=device)
    slots[:, :, : index.shape[-1]] = index.masked_fill(index >= newer[:, None, None], -1)
    recent = newer[:, None] + torch.arange(span, device=device)
    slots[:, :, listed : listed + span] = recent.masked_fill(recent >= lengths[:, None] + count, -1)[:, None]

    position = (lengths[:, None] + torch.arange(count, device=device))[:, None, :, None]
    at = slots[:, :, None]
    seen = (at >= 0) & (at <= position)
    if window is not None:
        seen = seen & (at > position - window)
    rows = torch.arange(batch, device=device)[:, None, None], torch.arange(kv_heads, device=device)[:, None]
    place = (*rows, slots.clamp(min=0))
    return attend(queries, keys[place], values[place], seen, scale, softcap, sinks, need_lse)
