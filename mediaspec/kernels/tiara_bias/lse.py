"""Attention that also returns the log-sum-exp, through the flash kernels that torch ships.

`F.scaled_dot_product_attention` keeps the log-sum-exp to itself. Its kernels are public operators: one for the CPU
(every float dtype, with a mask), two for CUDA: flash (16-bit, no mask) and memory-efficient (float32, its
log-sum-exps padded behind L). None of them returns a gradient of the log-sum-exp.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["HIDDEN", "attend", "merge", "pad_columns"]

HIDDEN = -3e4
"""Logit of a key that nobody sees: exp underflows to 0, the number fits float16, and a row whose keys are all hidden
stays finite (-inf would make it NaN, and one NaN part spoils a merge)."""


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, key_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Plain attention and its log-sum-exp.

    Args:
        q: [B, H, M, D]; k, v: [B, H, N, D], any strides with a dense last axis.
        scale: factor on the products.
        key_mask: [B, N] bool, True where a key is seen.

    Returns:
        ([B, H, M, D] in the dtype of q, [B, H, M] natural log-sum-exp in float32, in float64 where q is).
    """
    count = q.shape[2]
    if q.device.type == "cpu":
        bias = None
        if key_mask is not None:
            bias = q.new_zeros(key_mask.shape).masked_fill_(~key_mask, HIDDEN)[:, None, None]
            bias = bias.expand(-1, 1, count, -1)
        run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = run(q, k, v, 0.0, False, attn_mask=bias, scale=scale)
        return out, lse
    size = q.shape[-1]
    if q.device.type != "cuda" or q.dtype == torch.float64 or size + (key_mask is not None) > 256:
        return _explicit(q, k, v, scale, key_mask)
    if key_mask is not None:  # a column: 1 in the queries, HIDDEN / scale in the keys
        shown = k.new_zeros(key_mask.shape).masked_fill_(~key_mask, HIDDEN)[:, None, :, None]
        q = torch.cat([q, q.new_full((1,), 1 / scale).expand(*q.shape[:-1], 1)], -1)
        k = torch.cat([k, shown.expand(*k.shape[:-1], 1)], -1)
        v = pad_columns(v, 1)
    q, k, v = (pad_columns(x, -x.shape[-1] % 8) for x in (q, k, v))
    if q.dtype != torch.float32 and torch.cuda.get_device_capability(q.device) >= (8, 0):
        found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False, False, scale=scale)
    else:
        found = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, False, scale=scale)
    return found[0][..., :size], found[1][..., :count]


def pad_columns(x: Tensor, count: int) -> Tensor:
    """Zero columns behind the last axis; `x` itself where there is nothing to add."""
    return F.pad(x, (0, count)) if count else x


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint key sets from their parts: weights sigmoid(lse_1 - lse_2), in float32 or better."""
    weight = torch.sigmoid(lse - other_lse)[..., None].to(out.dtype)
    return torch.lerp(other, out, weight), torch.logaddexp(lse, other_lse)


def _explicit(q: Tensor, k: Tensor, v: Tensor, scale: float, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """The same by a matrix of logits, for float64 on CUDA and other devices; blocks of queries bound its memory."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    step = max(1, (1 << 24) // max(1, k.shape[0] * k.shape[1] * k.shape[2]))
    outs, sums = [], []
    for rows in q.split(step, 2):
        logits = scale * (rows.to(wide) @ k.to(wide).transpose(-1, -2))
        if key_mask is not None:
            logits = logits.masked_fill(~key_mask[:, None, None], HIDDEN)
        outs.append((logits.softmax(-1) @ v.to(wide)).to(q.dtype))
        sums.append(logits.logsumexp(-1))
    return torch.cat(outs, 2), torch.cat(sums, 2)
