# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""The edit as one Triton kernel: a program holds one matrix, N x N padded to 16 or 32, from logits to output.

The tables are read once per program from the second-level cache (5 N^2 floats, 5 KB at N = 16) and every sum over the
row is a masked reduction in registers, so beside q, k, v and the output nothing goes to memory.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .plan import TemporalPlan

__all__ = ["tiara_temporal"]


@triton.jit(do_not_specialize=["heads"])
def _tiara_kernel(
    q, k, v, out, basis, shares, corner, means, scale, alpha, booster,
    q_r, q_h, q_n, k_r, k_h, k_n, v_r, v_h, v_n, out_r, out_h, out_n, heads,
    FRAMES: tl.constexpr, ROOM: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr, TERMS: tl.constexpr,
    ENERGIES: tl.constexpr, BOOST: tl.constexpr, CAP: tl.constexpr, CORNER: tl.constexpr, MEANS: tl.constexpr,
):  # fmt: skip
    matrix = tl.program_id(0).to(tl.int64)
    r, h = matrix // heads, matrix % heads
    n = tl.arange(0, ROOM)
    lane = tl.arange(0, WIDE)
    live = n < FRAMES
    held = live[:, None] & (lane < SIZE)[None, :]
    queries = tl.load(q + r * q_r + h * q_h + n[:, None] * q_n + lane[None, :], mask=held, other=0.0)
    keys = tl.load(k + r * k_r + h * k_h + n[:, None] * k_n + lane[None, :], mask=held, other=0.0)
    logits = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
    logits = tl.where(live[None, :], logits, float("-inf"))
    rows = tl.exp(logits - tl.max(logits, 1)[:, None])
    rows = rows / tl.sum(rows, 1)[:, None]

    both = live[:, None] & live[None, :]
    at = n[:, None] * ((TERMS + CAP) * FRAMES) + n[None, :]
    fast = tl.zeros((ROOM,), tl.float32)
    total = tl.zeros((ROOM,), tl.float32)
    beyond = tl.zeros((ROOM,), tl.float32)
    for c in tl.static_range(TERMS):
        y = tl.sum(rows * tl.load(basis + at + c * FRAMES, mask=both, other=0.0), 1)
        y = y * y
        share = shares + n * (ENERGIES * TERMS) + c
        fast += y * tl.load(share, mask=live, other=0.0)
        total += y * tl.load(share + TERMS, mask=live, other=0.0)
        if BOOST:
            beyond += y * tl.load(share + 2 * TERMS, mask=live, other=0.0)
    rho = fast / tl.maximum(total, 1e-12)
    delta = alpha - alpha * rho
    if BOOST:
        delta = delta * (1.0 + booster * beyond / tl.maximum(total + beyond, 1e-12))
    diagonal = n[:, None] == n[None, :]
    own = tl.sum(tl.where(diagonal, rows, 0.0), 1)
    if CAP:
        wanted = tl.sum(rows * tl.load(basis + at + TERMS * FRAMES, mask=both, other=0.0), 1)
        wanted = tl.minimum(wanted, own)
        binds = wanted > 0
        best = tl.log(own / tl.where(binds, wanted, 1.0))
        delta = tl.where(binds, tl.minimum(delta, best), delta)

    rows = tl.where(diagonal, rows * tl.exp(-tl.minimum(delta, 80.0))[:, None], rows)  # MOST of plan.py
    if CORNER:
        rows = rows * tl.load(corner + n[:, None] * FRAMES + n[None, :], mask=both, other=0.0)
    rows = rows / tl.sum(rows, 1)[:, None]
    values = tl.load(v + r * v_r + h * v_h + n[:, None] * v_n + lane[None, :], mask=held, other=0.0)
    result = tl.dot(rows.to(values.dtype), values, input_precision="ieee")
    tl.store(out + r * out_r + h * out_h + n[:, None] * out_n + lane[None, :], result, mask=held)
    if MEANS:
        after = tl.sum(tl.where(diagonal, rows, 0.0), 1)
        tl.store(means + matrix * 4, tl.sum(tl.where(live, delta, 0.0), 0) / FRAMES)
        tl.store(means + matrix * 4 + 1, tl.sum(tl.where(live, rho, 0.0), 0) / FRAMES)
        tl.store(means + matrix * 4 + 2, tl.sum(tl.where(live, own, 0.0), 0) / FRAMES)
        tl.store(means + matrix * 4 + 3, tl.sum(tl.where(live, after, 0.0), 0) / FRAMES)


def tiara_temporal(
    q: Tensor, k: Tensor, v: Tensor, plan: TemporalPlan, scale: float, means: bool
) -> tuple[Tensor, Tensor | None]:
    """See `mediaspec.kernels.tiara_temporal.tiara_temporal`."""
    q, k, v = (one if one.stride(-1) == 1 else one.contiguous() for one in (q, k, v))
    rows, heads, frames, size = q.shape
    # frames before heads in memory, as the projection behind it reads them
    out = torch.empty(rows, frames, heads, size, dtype=v.dtype, device=v.device).transpose(1, 2)
    parts = torch.empty(rows * heads, 4, dtype=torch.float32, device=v.device) if means else plan.basis
    if rows * heads:
        _tiara_kernel[(rows * heads,)](
            q, k, v, out, plan.basis, plan.shares, plan.basis if plan.corner is None else plan.corner, parts,
            scale, plan.alpha, plan.booster,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], heads,
            FRAMES=frames, ROOM=16 if frames <= 16 else 32, SIZE=size, WIDE=max(16, triton.next_power_of_2(size)),
            TERMS=plan.directions, ENERGIES=plan.shares.shape[1], BOOST=bool(plan.booster), CAP=int(plan.cap),
            CORNER=plan.corner is not None, MEANS=means, num_warps=2 if size <= 64 else 4,
        )  # fmt: skip
    return out, parts.mean(0) if means else None
