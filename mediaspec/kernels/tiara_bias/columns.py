"""Frame codes as extra columns of queries and keys: the bias by any attention kernel whatever (route R3).

    q~ = [q, -delta_i / scale e_f(i)]      k~ = [k, e_f(j)]      q~ k~^T scale = q k^T scale - delta_i [f(i) = f(j)]

Text has a zero code. Exact up to the rounding of delta / scale in the dtype of q (2^-9 relative in bfloat16). Not for
kernels that quantise the keys: they would quantise the codes too.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .layout import FrameLayout, query_delta
from .lse import HIDDEN

__all__ = ["frame_columns", "with_columns"]


def frame_columns(
    q: Tensor, k: Tensor, v: Tensor, delta: Tensor, layout: FrameLayout, scale: float, key_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values with the codes appended, and zeros up to a multiple of 8 columns.

    Args:
        q, k, v: [B, H, L, D]; delta, layout, key_mask: see `mediaspec.kernels.tiara_bias.framed_attention`.
        scale: factor that the attention will put on the products; pass it explicitly, 1 / sqrt(D) of the **old** D.

    Returns:
        three tensors [B, H, L, D'], D' >= D + F; the first D columns of plain attention over them are the result.
    """
    batch, heads, length, size = q.shape
    ids = layout.ids(length, q.device)
    codes = F.one_hot(ids.clamp(min=0), layout.frames).to(q.dtype) * (ids >= 0).to(q.dtype)[:, None]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    bias = (query_delta(delta, layout, length, wide) / -scale).to(q.dtype)
    mine = (bias[..., None] * codes).expand(batch, heads, length, -1)
    theirs = codes.expand(batch, heads, length, -1)
    if key_mask is not None:
        hidden = k.new_zeros(key_mask.shape).masked_fill(~key_mask, HIDDEN)[:, None, :, None]
        mine = torch.cat([mine, mine.new_full((1,), 1 / scale).expand(*mine.shape[:-1], 1)], -1)
        theirs = torch.cat([theirs, hidden.expand(batch, heads, length, 1)], -1)
    spare = -(size + mine.shape[-1]) % 8
    return (
        torch.cat([q, F.pad(mine, (0, spare))], -1),
        torch.cat([k, F.pad(theirs, (0, spare))], -1),
        F.pad(v, (0, mine.shape[-1] + spare)),
    )


def with_columns(
    q: Tensor, k: Tensor, v: Tensor, delta: Tensor, layout: FrameLayout, scale: float, key_mask: Tensor | None
) -> Tensor:
    """`framed_attention` in mode "frame" by `F.scaled_dot_product_attention`. Differentiable."""
    wide_q, wide_k, wide_v = frame_columns(q, k, v, delta, layout, scale, key_mask)
    return F.scaled_dot_product_attention(wide_q, wide_k, wide_v, scale=scale)[..., : q.shape[-1]]
