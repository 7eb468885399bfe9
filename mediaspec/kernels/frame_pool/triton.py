# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""Block means as one Triton kernel: a program averages a row of neighbouring blocks of one channel.

Every cell is read once, neighbouring lanes read neighbouring columns of the blocks, and sums stay in registers; cells
over the end are the last ones again, by clamping the index instead of padding a copy.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["frame_pool"]

BLOCKS = 128
"""Output cells of a program: one per lane of 4 warps."""


@triton.jit(do_not_specialize=["channels", "frames", "rows", "columns", "out_t", "out_h", "out_w"])
def _pool_kernel(
    x, out, x_b, x_c, x_t, x_h, x_w, channels, frames, rows, columns, out_t, out_h, out_w,
    KT: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, BLOCKS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    plane = tl.program_id(1).to(tl.int64)
    cell = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    cells = out_t * out_h * out_w
    live = cell < cells
    t = cell // (out_h * out_w) * KT
    h = cell // out_w % out_h * KH
    w = cell % out_w * KW
    x += plane // channels * x_b + plane % channels * x_c
    total = tl.zeros((BLOCKS,), WIDE)
    for i in range(KT):
        at_t = tl.minimum(t + i, frames - 1).to(tl.int64) * x_t
        for j in range(KH):
            at_h = at_t + tl.minimum(h + j, rows - 1).to(tl.int64) * x_h
            for k in range(KW):
                at = at_h + tl.minimum(w + k, columns - 1).to(tl.int64) * x_w
                total += tl.load(x + at, mask=live, other=0.0).to(WIDE)
    tl.store(out + plane * cells + cell, (total / (KT * KH * KW)).to(out.dtype.element_ty), mask=live)


def frame_pool(frames: Tensor, kernel: tuple[int, int, int]) -> Tensor:
    """See `mediaspec.kernels.frame_pool.frame_pool`."""
    batch, channels, *size = frames.shape
    pooled = [-(-n // k) for n, k in zip(size, kernel)]
    out = torch.empty(batch, channels, *pooled, dtype=frames.dtype, device=frames.device)
    if out.numel():
        cells = pooled[0] * pooled[1] * pooled[2]
        _pool_kernel[(triton.cdiv(cells, BLOCKS), batch * channels)](
            frames, out, *frames.stride(), channels, *size, *pooled, KT=kernel[0], KH=kernel[1], KW=kernel[2],
            BLOCKS=BLOCKS, WIDE=tl.float64 if frames.dtype == torch.float64 else tl.float32, num_warps=4,
        )  # fmt: skip
    return out
