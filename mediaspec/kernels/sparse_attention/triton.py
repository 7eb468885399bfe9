# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""Attention over a key set in Triton: the pieces of `tree_attention`, with listed slots in place of consecutive ones.

One program owns `SPLIT` places of one key head's list, or all slots from `newer` on; a draft is short, so those are
one piece however long the cache is, and its number of blocks is read on the device. It is the first piece, so that the
others keep their numbers, and with them their place in the merge, whatever the width of the list is. Its blocks begin
at multiples of the block, so their borders are a function of the slot.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..lse_merge.triton import launch_merge
from ..tree_attention import SPLIT, Attended
from ..tree_attention.triton import (
    attend_block,
    blocking,
    check_kernel,
    last_dense,
    load_queries,
    logit_factors,
    store_part,
)

__all__ = ["sparse_attention"]


@triton.jit(do_not_specialize=["capacity", "heads", "count", "listed", "window"])
def _list_kernel(
    q, k, v, lengths, newer, index, out, lse,
    q_b, q_h, q_m, k_b, k_h, k_n, v_b, v_h, v_n, index_b, index_h,
    out_s, out_b, out_h, out_m, lse_s, lse_b, lse_h,
    capacity, heads, count, listed, window, scale, cap,
    GROUP: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    SPLIT: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    piece = tl.program_id(1)
    b = (tl.program_id(2) // heads).to(tl.int64)
    h = (tl.program_id(2) % heads).to(tl.int64)
    lane = tl.arange(0, WIDE)
    queries, m, g = load_queries(q + b * q_b + h * GROUP * q_h, q_h, q_m, tile, count, GROUP, SIZE, ROWS, WIDE)
    n = tl.load(lengths + b).to(tl.int32)
    fresh = tl.minimum(tl.load(newer + b).to(tl.int32), n)
    live = tl.minimum(n + count, capacity)
    chosen = piece > 0
    begin = tl.where(chosen, (piece - 1) * SPLIT, fresh // BLOCK * BLOCK)
    stop = tl.where(chosen, tl.minimum(begin + SPLIT, listed), live)

    top = tl.full((ROWS,), float("-inf"), tl.float32)
    mass = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDE), tl.float32)
    for start in range(begin, stop, BLOCK):
        place = start + tl.arange(0, BLOCK)
        entry = tl.load(index + b * index_b + h * index_h + place, mask=chosen & (place < listed), other=-1)
        entry = entry.to(tl.int32)
        slot = tl.where(chosen, tl.where(entry < fresh, entry, -1), tl.where(place < fresh, -1, place))
        real = (slot >= 0) & (slot < live)
        position = n + m
        seen = real[None, :] & (slot[None, :] <= position[:, None])
        if WINDOWED:
            seen = seen & (slot[None, :] > position[:, None] - window)
        here = real[:, None] & (lane < SIZE)[None, :]
        at = tl.where(real, slot, 0).to(tl.int64)[:, None]
        keys = tl.load(k + b * k_b + h * k_h + at * k_n + lane[None, :], mask=here, other=0.0)
        values = tl.load(v + b * v_b + h * v_h + at * v_n + lane[None, :], mask=here, other=0.0)
        top, mass, acc = attend_block(queries, keys, values, seen, scale, cap, top, mass, acc, CAPPED)
    store_part(
        out + piece * out_s + b * out_b + h * GROUP * out_h, lse + piece * lse_s + b * lse_b + h * GROUP * lse_h,
        out_h, out_m, lse_h, m, g, count, top, mass, acc, SIZE, WIDE,
    )  # fmt: skip


def sparse_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    index: Tensor,
    newer: Tensor,
    scale: float,
    softcap: float | None,
    window: int | None,
    sinks: Tensor | None,
    need_lse: bool,
) -> Attended:
    """See `mediaspec.kernels.sparse_attention.sparse_attention`."""
    check_kernel(queries)
    queries, keys, values, index = last_dense(queries), last_dense(keys), last_dense(values), last_dense(index)
    batch, heads, count, size = queries.shape
    kv_heads, capacity = keys.shape[1:3]
    listed = index.shape[-1]
    device = queries.device
    shape = blocking(queries, heads // kv_heads, SPLIT)
    pieces = -(-listed // SPLIT) + 1
    out = torch.empty(batch, count, heads, size, dtype=queries.dtype, device=device).transpose(1, 2)
    lse = torch.empty(batch, heads, count, device=device)
    if not lse.numel():
        return Attended(out, lse if need_lse else None)
    parts = torch.empty(pieces, batch, heads, count, size, device=device)
    part_lse = torch.empty(pieces, batch, heads, count, device=device)
    _list_kernel[(-(-count * shape["GROUP"] // shape["ROWS"]), pieces, batch * kv_heads)](
        queries, keys, values, lengths.contiguous(), newer.contiguous(), index, parts, part_lse,
        *queries.stride()[:3], *keys.stride()[:3], *values.stride()[:3], *index.stride()[:2],
        *parts.stride()[:4], *part_lse.stride()[:3],
        capacity, kv_heads, count, listed, window or 0, *logit_factors(scale, softcap), **shape,
        WINDOWED=window is not None, CAPPED=softcap is not None,
    )  # fmt: skip
    launch_merge(parts, part_lse, sinks, out, lse)
    return Attended(out, lse if need_lse else None)
