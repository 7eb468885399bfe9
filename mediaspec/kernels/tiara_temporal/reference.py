"""The edit in plain torch, written for few passes over memory.

Heads lie side by side in q, k and v and are narrow (24 numbers at width 96), so that putting each head's matrix into a
block of its own costs more than the products; instead every head is one batched product over strided views. The sums
over a row need no gather: rows of equal frame are multiplied with that frame's table, N products [C, N] x [N, M]. With
D = 24, N = 16 and C = 5 these are 1280 multiply-adds per matrix beside 12288 for the attention itself.

Letters as in `__init__.py`; M = H R matrices, heads outermost.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .plan import MOST, TemporalPlan

__all__ = ["row_bias", "tiara_temporal"]

EPSILON = 1e-12  # energy of a row that is as good as zero
TINY = 1e-38  # smallest normal float32: an own weight below it has nothing to lose


def row_bias(rows: Tensor, plan: TemporalPlan) -> tuple[Tensor, Tensor]:
    """e^-delta and rho, both [N, M], of M matrices.

    The cap x*/a bounds e^-delta from below, which needs no logarithm and no case for x* <= 0.

    Args:
        rows: [M, N, N] probabilities in the plan's dtype.
        plan: tables.
    """
    found = torch.bmm(plan.basis, rows.permute(1, 2, 0))  # [N, C (+ 1), M]: along M everything after is dense
    count = plan.directions
    energy = torch.bmm(plan.shares, found[:, :count].square())  # [N, E, M]
    total = energy[:, 1]
    # an empty row has a zero above too, so the floor alone gives it rho = 0
    rho = energy[:, 0] / total.clamp_min(EPSILON)
    bias = (rho - 1.0).mul_(plan.alpha)  # -delta
    if plan.booster:
        beyond = energy[:, 2]
        bias = bias * (1.0 + plan.booster * beyond / (total + beyond).clamp_min(EPSILON))
    strongest = plan.alpha * (1.0 + plan.booster)
    factor = (bias if strongest <= MOST else bias.clamp_min(-MOST)).exp_()
    if plan.cap:
        own = rows.diagonal(dim1=1, dim2=2).t().contiguous()
        factor = factor.maximum(found[:, count].minimum(own) / own.clamp_min(TINY))
    return factor, rho


def tiara_temporal(
    q: Tensor, k: Tensor, v: Tensor, plan: TemporalPlan, scale: float, pool: str | None, videos: int, means: bool
) -> tuple[Tensor, Tensor | None]:
    """See `mediaspec.kernels.tiara_temporal.tiara_temporal`."""
    heads = q.shape[1]
    queries, keys, values = (one.to(plan.basis.dtype).unbind(1) for one in (q, k, v))
    rows = _logits(queries, keys, scale, plan.basis).softmax(-1)  # [M, N, N]
    factor, rho = row_bias(_pooled(rows, pool, videos, heads), plan)
    edited = rows.clone() if rows.requires_grad else rows  # softmax's backward needs its result as it is
    own = edited.diagonal(dim1=1, dim2=2)  # [M, N], a view
    before = own.detach().t().contiguous() if means else None
    own.mul_((factor if pool is None else _spread(factor, pool, videos, heads, len(rows))).t())
    if plan.corner is not None:
        edited.mul_(plan.corner)
    edited.div_(edited.sum(-1, keepdim=True))
    parts = [torch.bmm(a, b) for a, b in zip(edited.chunk(heads), values)]
    # frames before heads in memory, as the projection behind it reads them
    out = torch.cat(parts, -1).unflatten(-1, (heads, -1)).transpose(1, 2).to(v.dtype)
    return out, None if before is None else _means(factor.detach(), rho.detach(), before, own.detach().t())


def _logits(queries: tuple[Tensor, ...], keys: tuple[Tensor, ...], scale: float, like: Tensor) -> Tensor:
    """[M, N, N] scaled products, every head's written where it belongs; a gradient asks for parts of their own."""
    nothing = like.new_empty(1)  # read by nobody, beta being zero
    if torch.is_grad_enabled() and (queries[0].requires_grad or keys[0].requires_grad):
        return torch.cat(
            [torch.baddbmm(nothing, a, b.transpose(1, 2), beta=0, alpha=scale) for a, b in zip(queries, keys)]
        )
    rows, frames = queries[0].shape[:2]
    logits = like.new_empty(len(queries) * rows, frames, frames)
    for part, a, b in zip(logits.chunk(len(queries)), queries, keys):
        torch.baddbmm(nothing, a, b.transpose(1, 2), beta=0, alpha=scale, out=part)
    return logits


def _means(factor: Tensor, rho: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """[4] means of delta = -log(factor), rho and the own mass; pooled rows stand for equally many rows each."""
    if rho.shape != before.shape:
        own = torch.stack([before, after]).mean((1, 2))
        return torch.cat([torch.stack([factor.log().neg_(), rho]).mean((1, 2)), own])
    return torch.stack([factor.log().neg_(), rho, before, after]).mean((1, 2))


def _pooled(rows: Tensor, pool: str | None, videos: int, heads: int) -> Tensor:
    """[M', N, N] averages over heads, or over the positions of a video."""
    if pool is None:
        return rows
    if pool == "heads":
        return rows.view(heads, -1, *rows.shape[1:]).mean(0)
    return rows.view(heads * videos, -1, *rows.shape[1:]).mean(1)


def _spread(factor: Tensor, pool: str, videos: int, heads: int, count: int) -> Tensor:
    """[N, M] from pooled [N, M']."""
    if pool == "heads":
        return factor.repeat(1, heads)
    return factor.repeat_interleave(count // (heads * videos), 1)
