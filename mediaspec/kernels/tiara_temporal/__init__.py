"""Temporal attention with an adaptive bias on the own frame, in one pass: TiARA (arXiv:2412.17254).

R rows (videos times positions), H heads, N frames (at most 32 on the device), D head size. Every (row, head) has a
matrix of its own:

    S = scale q k^T          A = softmax(S)                        N x N, float32 or better
    rho_i                    share of fast motion in the spectrum of row i at frame i
    delta_i = alpha (1 - rho_i) (1 + booster eta_i),               at most the spectral cap where there is one
    O = softmax(S - diag(delta) - corners) v

`plan.py` says how rho follows from a few sums, `mediaspec.attention.tiara.temporal_plan` makes the plan of given
settings. The bias needs A and the edit needs the bias; both happen on the matrix while it is at hand.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..backend import choose, launching_on
from .plan import TemporalPlan, make_plan

__all__ = ["MEANS", "TemporalPlan", "make_plan", "tiara_temporal"]

MEANS = ("delta", "rho", "own_mass", "own_mass_after")
"""What `means` holds, in this order: averages over rows, heads and frames; own mass is the mean diagonal of A."""


def tiara_temporal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: TemporalPlan,
    *,
    scale: float | None = None,
    pool: str | None = None,
    videos: int = 1,
    means: bool = False,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Edited temporal attention, without a host sync.

    Args:
        q, k, v: [R, H, N, D], any strides; float16, bfloat16, float32 or float64. Of 16-bit inputs the matrix is
            float32 all the same.
        plan: tables for N frames on the device of q, float64 for float64 inputs and float32 for others.
        scale: factor on the products; None for D ** -0.5.
        pool: None: a bias per row and head; "heads" or "space": the bias comes from the matrix averaged over the heads
            of a row, or over the rows of a video.
        videos: rows of one video follow each other, R / videos of them; only "space" asks.
        means: also return averages.
        impl: see `mediaspec.kernels.backend`; the kernel has no pooling, and takes up to 32 frames and D <= 256: an
            automatic choice takes the reference for others.

    Returns:
        [R, H, N, D] in the dtype of v, and [4] `MEANS` in the plan's dtype, or None.

    Raises:
        ValueError: shapes or dtypes do not fit, or an explicit choice cannot run.

    Example:
        >>> bins = torch.ones(5, 5, 2, dtype=torch.complex128)        # every bin sees the sum of a row, which is 1
        >>> plan = make_plan(bins, 1, 2, alpha=2.0)                    # so rho = 1 / 2
        >>> out, found = tiara_temporal(*torch.zeros(3, 1, 1, 5, 4), plan, means=True)
        >>> [round(x, 4) for x in found.tolist()]
        [1.0, 0.5, 0.2, 0.0842]
    """
    if q.dim() != 4 or q.shape != k.shape or q.shape != v.shape:
        raise ValueError(
            f"q, k and v have shapes {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}; give [R, H, N, D] three "
            "times."
        )
    if q.shape[2] != plan.frames:
        raise ValueError(f"q has {q.shape[2]} frames and the plan {plan.frames}; make a plan for {q.shape[2]} frames.")
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    if plan.basis.dtype != wide or plan.basis.device != q.device:
        raise ValueError(
            f"the plan is {plan.basis.dtype} on {plan.basis.device}; for {q.dtype} inputs on {q.device} make it "
            f"{wide} there."
        )
    if pool not in (None, "heads", "space"):
        raise ValueError(f"pool={pool!r} is unknown; write None, 'heads' or 'space'.")
    if videos < 1 or (pool == "space" and q.shape[0] % videos):
        raise ValueError(f"{q.shape[0]} rows are no whole number of rows for {videos} videos.")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    obstacle = _obstacle(q, k, v, pool)
    if choose("tiara_temporal", q, impl) == "triton" and (impl is not None or obstacle is None):
        if obstacle is not None:
            raise ValueError(f"tiara_temporal: the kernel {obstacle}; write impl='reference' or leave it unset.")
        from .triton import tiara_temporal as run

        with launching_on(q):
            return run(q, k, v, plan, scale, means)
    from . import reference

    return reference.tiara_temporal(q, k, v, plan, scale, pool, videos, means)


def _obstacle(q: Tensor, k: Tensor, v: Tensor, pool: str | None) -> str | None:
    if pool is not None:
        return f"has no pool={pool!r}"
    if q.shape[2] > 32 or q.shape[3] > 256:
        return f"takes up to 32 frames and a head size up to 256, not {q.shape[2]} and {q.shape[3]}"
    if q.dtype == torch.float64:
        return "takes no float64"
    wants = torch.is_grad_enabled() and any(one.requires_grad for one in (q, k, v))
    return "has no backward pass" if wants else None
