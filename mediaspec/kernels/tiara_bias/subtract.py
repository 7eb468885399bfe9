"""One plain pass, then the excess mass of the damped keys is taken out again (routes R4b and R4c).

With S the keys of a query's set, m their mass and O_S attention over them alone:

    c = (1 - e^-delta) m        O = (O_all - c O_S) / (1 - c) = O_all + g (O_all - O_S),    g = c / (1 - c)

Extra work over plain attention: a frame's own block is 1/F of the products (5 % for 21 frames) and one pass that
merges in place; a set of (2r + 1)^2 positions is that many dot products per query. An error of O_all grows by
(1 + c) / (1 - c), which is 9 at c = 0.8: beyond it another route has to do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .layout import FrameLayout, video_delta
from .lse import attend
from .split import own_frames

__all__ = ["MOST", "subtract_frame", "subtract_near"]

MOST = 0.8
"""The largest c that is trusted."""


def subtract_frame(
    q: Tensor, k: Tensor, v: Tensor, delta: Tensor, layout: FrameLayout, scale: float, key_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Mode "frame": the result and c of every video query, [B, H, F, P]."""
    out, lse = attend(q, k, v, scale, key_mask)
    own, own_lse = own_frames(q, k, v, layout, scale, key_mask)
    video = slice(layout.start, layout.stop)
    mass = own_lse.sub_(lse[:, :, video].unflatten(2, (layout.frames, layout.tokens))).exp_()
    excess = mass.mul_(video_delta(delta, layout, mass.dtype).neg().expm1().neg())
    gain = (excess / (excess - 1)).to(out.dtype)  # -g: lerp(O_all, O_S, -g) = O_all + g (O_all - O_S)
    out[:, :, video].unflatten(2, (layout.frames, layout.tokens)).lerp_(own, gain[..., None])
    return out, excess


def subtract_near(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    delta: Tensor,
    layout: FrameLayout,
    radius: int,
    scale: float,
    key_mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Modes "self_token" (radius 0) and "neighbourhood": the result and c of every video query, [B, H, F, P]."""
    out, lse = attend(q, k, v, scale, key_mask)
    wide = layout.width or layout.tokens
    tall = layout.tokens // wide
    grid = (layout.frames, tall, wide)
    video = slice(layout.start, layout.stop)
    queries, keys, values = (x[:, :, video].unflatten(2, grid) for x in (q, k, v))
    wide_queries, wide_keys = queries.to(lse.dtype), keys.to(lse.dtype)  # a logit of 20 in 16 bits is off by 0.06
    total = lse[:, :, video].unflatten(2, grid)
    seen = None if key_mask is None else key_mask[:, None, video].unflatten(2, grid)
    strength = video_delta(delta, layout, lse.dtype).neg().expm1().neg()
    if strength.shape[-1] > 1:
        strength = strength.unflatten(-1, (tall, wide))
    else:
        strength = strength[..., None]
    removed = torch.zeros_like(total)
    moved = torch.zeros_like(queries)
    for dy in range(-min(radius, tall - 1), min(radius, tall - 1) + 1):
        for dx in range(-min(radius, wide - 1), min(radius, wide - 1) + 1):
            here = (..., slice(max(0, -dy), tall - max(0, dy)), slice(max(0, -dx), wide - max(0, dx)))
            there = (..., slice(max(0, dy), tall + min(0, dy)), slice(max(0, dx), wide + min(0, dx)))
            a, b = (*here, slice(None)), (*there, slice(None))
            logit = scale * torch.linalg.vecdot(wide_queries[a], wide_keys[b])
            mass = (logit - total[here]).exp_()
            if seen is not None:
                mass = mass * seen[there]
            removed[here] += mass
            moved[a].addcmul_(values[b], mass[..., None].to(moved.dtype))
    excess = removed * strength
    share = (strength / (1 - excess))[..., None]  # O = (O_all - strength sum_S p v) / (1 - c)
    place = out[:, :, video].unflatten(2, grid)
    place.div_((1 - excess)[..., None].to(out.dtype)).addcmul_(moved, share.to(out.dtype), value=-1)
    return out, excess.flatten(-2)
