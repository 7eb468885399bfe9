# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""The merge as one Triton kernel: a program joins the parts of a few (head, query) rows, in blocks of a fixed size.

The sum inside a block is a tree whose shape depends on nothing but the block's size, and blocks follow each other. So
a result depends on the non-empty parts and their numbers alone, not on how many empty ones surround them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["launch_merge", "lse_merge"]

PARTS, ROWS = 8, 4
"""Parts that are read at once, and rows of a program: with D = 128, 32 values per thread."""


@triton.jit(do_not_specialize=["parts", "heads", "count"])
def _merge_kernel(
    outs, lse, sinks, out, merged,
    outs_s, outs_b, outs_h, outs_m, lse_s, lse_b, lse_h, lse_m, out_b, out_h, out_m, merged_b, merged_h,
    parts, heads, count,
    SIZE: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, SINK: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < heads * count
    h = (row // count).to(tl.int64)
    m = (row % count).to(tl.int64)
    lane = tl.arange(0, WIDE)
    step = tl.arange(0, PARTS)
    outs += b * outs_b
    outs_at = (h * outs_h + m * outs_m)[:, None, None] + lane[None, None, :]
    lse_at = lse + b * lse_b + (h * lse_h + m * lse_m)[:, None]

    top = tl.full((ROWS,), float("-inf"), tl.float32)
    for first in range(0, parts, PARTS):
        s = (first + step)[None, :]
        part = tl.load(lse_at + s.to(tl.int64) * lse_s, mask=live[:, None] & (s < parts), other=float("-inf"))
        top = tl.maximum(top, tl.max(part, 1))
    if SINK:
        sink = tl.load(sinks + h, mask=live, other=0.0).to(tl.float32)
        top = tl.maximum(top, sink)
    top = tl.where(top == float("-inf"), 0.0, top)

    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDE), tl.float32)
    for first in range(0, parts, PARTS):
        s = (first + step)[None, :].to(tl.int64)
        part = tl.load(lse_at + s * lse_s, mask=live[:, None] & (s < parts), other=float("-inf"))
        weight = tl.exp(part - top[:, None])
        total += tl.sum(weight, 1)
        seen = (part > float("-inf"))[:, :, None] & (lane < SIZE)[None, None, :]
        value = tl.load(outs + outs_at + s[:, :, None] * outs_s, mask=seen, other=0.0)
        acc += tl.sum(weight[:, :, None] * value, 1)
    if SINK:
        total += tl.exp(sink - top)
    some = total > 0
    total = tl.where(some, total, 1.0)
    inside = live[:, None] & (lane < SIZE)[None, :]
    tl.store(out + b * out_b + (h * out_h + m * out_m)[:, None] + lane[None, :], acc / total[:, None], mask=inside)
    tl.store(merged + b * merged_b + h * merged_h + m, tl.where(some, top + tl.log(total), float("-inf")), mask=live)


def launch_merge(outs: Tensor, lse: Tensor, sinks: Tensor | None, out: Tensor, merged: Tensor) -> None:
    """Merges into given tensors; all but `lse` have a dense last dimension."""
    parts, batch, heads, count, size = outs.shape
    _merge_kernel[(-(-heads * count // ROWS), batch)](
        outs, lse, lse if sinks is None else sinks.contiguous(), out, merged,
        *outs.stride()[:4], *lse.stride(), *out.stride()[:3], *merged.stride()[:2],
        parts, heads, count, SIZE=size, WIDE=triton.next_power_of_2(size), PARTS=PARTS, ROWS=ROWS,
        SINK=sinks is not None, num_warps=4,
    )  # fmt: skip


def lse_merge(outs: Tensor, lse: Tensor, sinks: Tensor | None, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """See `mediaspec.kernels.lse_merge.lse_merge`."""
    if outs.dtype != torch.float32:
        raise ValueError(f"the Triton merge takes float32, not {outs.dtype}; convert, or write impl='reference'.")
    outs = outs if outs.stride(-1) == 1 else outs.contiguous()
    out = torch.empty(outs.shape[1:], dtype=dtype or outs.dtype, device=outs.device)
    merged = torch.empty(lse.shape[1:], dtype=lse.dtype, device=lse.device)
    if merged.numel():
        launch_merge(outs, lse, sinks, out, merged)
    return out, merged
