"""The merge in plain torch: one pass over the parts, in their order."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["lse_merge"]


def lse_merge(
    outs: Tensor, lse: Tensor, sinks: Tensor | None = None, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """See `mediaspec.kernels.lse_merge.lse_merge`."""
    top = lse.amax(0)
    if sinks is not None:
        sink = sinks.to(lse.dtype)[:, None]
        top = torch.maximum(top, sink)
    # -inf - (-inf) is never computed: where nothing is seen at all, every weight is exp(-inf - 0) = 0
    top = top.masked_fill(top == -torch.inf, 0.0)
    weights = (lse - top).exp_()
    empty = lse == -torch.inf
    total = torch.zeros_like(top)
    out = torch.zeros_like(outs[0])
    for weight, part, missing in zip(weights, outs, empty):
        total = total + weight
        out = torch.addcmul(out, weight[..., None], part.masked_fill(missing[..., None], 0.0))
    if sinks is not None:
        total = total + (sink - top).exp_()
    out = out / total.masked_fill(total == 0, 1.0)[..., None]
    return out if dtype is None else out.to(dtype), top + total.log()
