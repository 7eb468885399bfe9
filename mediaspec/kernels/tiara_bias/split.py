"""Own frame and the rest apart, merged by their log-sum-exps: stable for every delta (route R4a).

Exactly the products of plain attention, in up to 2F + 2 calls: all own-frame blocks are one call, frames folded into
the batch; the rest of a frame's keys lies on two sides of it, and each side is a slice, not a copy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .layout import FrameLayout, video_delta
from .lse import attend, merge

__all__ = ["own_frames", "split"]


def own_frames(
    q: Tensor, k: Tensor, v: Tensor, layout: FrameLayout, scale: float, key_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attention of every video query over its own frame: ([B, H, F, P, D], [B, H, F, P] log-sum-exp).

    Frames are folded into the heads or into the rows, whichever the strides of q allow without a copy.
    """
    frames, tokens = layout.frames, layout.tokens
    rows, heads = q.shape[:2]
    into_heads = q.stride(1) == frames * tokens * q.stride(2)
    own_q, own_k, own_v = (x[:, :, layout.start : layout.stop].unflatten(2, (frames, tokens)) for x in (q, k, v))
    mask = None if key_mask is None else key_mask[:, layout.start : layout.stop].unflatten(1, (frames, tokens))
    if into_heads and mask is None:
        out, lse = attend(own_q.flatten(1, 2), own_k.flatten(1, 2), own_v.flatten(1, 2), scale)
        return out.unflatten(1, (heads, frames)), lse.unflatten(1, (heads, frames))
    own_q, own_k, own_v = (x.transpose(1, 2).flatten(0, 1) for x in (own_q, own_k, own_v))
    out, lse = attend(own_q, own_k, own_v, scale, None if mask is None else mask.flatten(0, 1))
    return out.unflatten(0, (rows, frames)).transpose(1, 2), lse.unflatten(0, (rows, frames)).transpose(1, 2)


def split(
    q: Tensor, k: Tensor, v: Tensor, delta: Tensor, layout: FrameLayout, scale: float, key_mask: Tensor | None
) -> Tensor:
    """See `mediaspec.kernels.tiara_bias.framed_attention`, mode "frame"."""
    length = q.shape[2]
    own, lse = own_frames(q, k, v, layout, scale, key_mask)
    lse = lse - video_delta(delta, layout, lse.dtype)
    out = torch.empty_like(q)

    def side(rows: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
        seen = None if key_mask is None else key_mask[:, first:last]
        return attend(rows, k[:, :, first:last], v[:, :, first:last], scale, seen)

    for frame in range(layout.frames):
        first = layout.start + frame * layout.tokens
        last = first + layout.tokens
        rows, part, weight = q[:, :, first:last], own[:, :, frame], lse[:, :, frame]
        if first > 0:
            part, weight = merge(part, weight, *side(rows, 0, first))
        if last < length:
            part, weight = merge(part, weight, *side(rows, last, length))
        out[:, :, first:last] = part
    for first, last in ((0, layout.start), (layout.stop, length)):  # text sees everything as it is
        if last > first:
            out[:, :, first:last] = side(q[:, :, first:last], 0, length)[0]
    return out
