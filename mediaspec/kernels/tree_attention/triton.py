# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""Split-KV attention over a cache and a draft in Triton.

One program owns one piece of the slots of one key head and a tile of query rows; the G query heads of a key head
and the M positions are packed into rows r = m * G + g. It walks over its piece in blocks of keys with a running
softmax and writes a partial output and log-sum-exp in float32, which `lse_merge` joins. Row tiles are the fastest grid
axis: the tiles that share a piece run next to each other, and all but the first find its keys in the L2 cache.

What keeps a row's bits (the contract's three claims):

* the row tile depends on G, the block of keys on D and the dtype, the piece on the slot: never on M, B or lengths;
* every block goes through the same instructions, masked or not. An unmasked loop for the prefix would be free to fuse
  other multiply-adds, and a slot moves from the masked to the unmasked loop as the prefix grows;
* a block in which a row sees nothing leaves its state as it is: its weights are 0 and its rescaling factor is 1;
* M is not specialised, so that M = 1 and M = 16 run the same machine code.

The running maximum may be -inf; it is replaced by 0 before it is subtracted, so no NaN arises.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..lse_merge.triton import launch_merge
from ..sample.triton import dense
from . import SPLIT, TREE_SPLIT, Attended

__all__ = [
    "attend_block",
    "blocking",
    "by_row",
    "check_kernel",
    "last_dense",
    "load_queries",
    "logit_factors",
    "store_part",
    "tree_attention",
]

WIDEST = 256


@triton.jit
def load_queries(
    q, q_h, q_m, tile, count, GROUP: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """[ROWS, WIDE] packed queries of one key head, zeros beyond the last row; and their position and head in it."""
    row = tile * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, WIDE)
    m = row // GROUP
    g = row % GROUP
    inside = (m < count)[:, None] & (lane < SIZE)[None, :]
    at = g.to(tl.int64)[:, None] * q_h + m.to(tl.int64)[:, None] * q_m + lane[None, :]
    return tl.load(q + at, mask=inside, other=0.0), m, g


@triton.jit
def attend_block(q, keys, values, seen, scale, cap, top, mass, acc, CAPPED: tl.constexpr):
    """One block of the running softmax in base 2.

    q [ROWS, WIDE], keys and values [BLOCK, WIDE], seen [ROWS, BLOCK]; state: top [ROWS] largest logit (-inf at first),
    mass [ROWS] sum of 2^(logit - top), acc [ROWS, WIDE] their sum with the values. See `logit_factors`.
    """
    z = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
    if CAPPED:
        z = cap - 2.0 * cap / (1.0 + tl.exp2(z))  # cap * tanh
    z = tl.where(seen, z, float("-inf"))
    new_top = tl.maximum(top, tl.max(z, 1))
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    weight = tl.exp2(z - shift[:, None])
    keep = tl.exp2(top - shift)
    mass = mass * keep + tl.sum(weight, 1)
    acc = tl.dot(weight.to(values.dtype), values, acc * keep[:, None], input_precision="ieee")
    return new_top, mass, acc


@triton.jit
def store_part(
    out, lse, out_h, out_m, lse_h, m, g, count, top, mass, acc, SIZE: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Writes normalised rows and natural log-sum-exps; a row that saw nothing gets 0 and -inf."""
    lane = tl.arange(0, WIDE)
    some = mass > 0
    mass = tl.where(some, mass, 1.0)
    inside = (m < count)[:, None] & (lane < SIZE)[None, :]
    at = g.to(tl.int64)[:, None] * out_h + m.to(tl.int64)[:, None] * out_m + lane[None, :]
    tl.store(out + at, acc / mass[:, None], mask=inside)
    total = tl.where(some, (top + tl.log2(mass)) * 0.6931471805599453, float("-inf"))
    tl.store(lse + g.to(tl.int64) * lse_h + m, total, mask=m < count)


@triton.jit
def _seen_in_draft(
    words, depths, start, slot, n, m, count, width, window, TREE: tl.constexpr, WINDOWED: tl.constexpr
):  # fmt: skip
    """[ROWS, BLOCK] bool: what positions m see of the slots from start on."""
    position = n + m
    key_position = slot
    if TREE:
        # a block lies across at most two words; a slot of the prefix has a negative offset
        first = (start - n) >> 6
        at = ((start - n) & 63) + (slot - start)
        row = m < count
        low = tl.load(words + m * width + first, mask=row & (first >= 0) & (first < width), other=0)
        high = tl.load(words + m * width + first + 1, mask=row & (first >= -1) & (first + 1 < width), other=0)
        word = tl.where((at < 64)[None, :], low[:, None], high[:, None])
        related = ((word >> (at & 63).to(tl.int64)[None, :]) & 1) != 0
        seen = (slot < n)[None, :] | related | (slot[None, :] == position[:, None])
        if WINDOWED:
            new = (slot >= n) & (slot < n + count)
            below = tl.load(depths + tl.where(new, slot - n, 0), mask=new, other=0).to(tl.int32)
            key_position = tl.where(new, n + below, slot)
            position = n + tl.load(depths + m, mask=row, other=0).to(tl.int32)
    else:
        seen = slot[None, :] <= position[:, None]
    if WINDOWED:
        seen = seen & (key_position[None, :] > position[:, None] - window)
    return seen


@triton.jit(do_not_specialize=["capacity", "heads", "count", "width", "window"])
def _split_kernel(
    q, k, v, lengths, words, depths, hidden, out, lse,
    q_b, q_h, q_m, k_b, k_h, k_n, v_b, v_h, v_n, words_b, depths_b, hidden_b,
    out_s, out_b, out_h, out_m, lse_s, lse_b, lse_h,
    capacity, heads, count, width, window, scale, cap,
    GROUP: tl.constexpr, SIZE: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    SPLIT: tl.constexpr, TREE: tl.constexpr, WINDOWED: tl.constexpr, HIDDEN: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    piece = tl.program_id(1)
    b = (tl.program_id(2) // heads).to(tl.int64)
    h = (tl.program_id(2) % heads).to(tl.int64)
    lane = tl.arange(0, WIDE)
    queries, m, g = load_queries(q + b * q_b + h * GROUP * q_h, q_h, q_m, tile, count, GROUP, SIZE, ROWS, WIDE)
    n = tl.load(lengths + b).to(tl.int32)
    begin = piece * SPLIT
    stop = tl.minimum(begin + SPLIT, tl.minimum(n + count, capacity))
    if WINDOWED:
        # blocks that lie behind everybody's window change nothing
        begin = tl.maximum(begin, tl.maximum(n - window + 1, 0) // BLOCK * BLOCK)

    top = tl.full((ROWS,), float("-inf"), tl.float32)
    mass = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDE), tl.float32)
    for start in range(begin, stop, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        seen = _seen_in_draft(
            words + b * words_b, depths + b * depths_b, start, slot, n, m, count, width, window, TREE, WINDOWED
        )
        if HIDDEN:
            away = tl.load(hidden + b * hidden_b + slot, mask=slot < tl.minimum(n, stop), other=0) != 0
            seen = seen & (away == 0)[None, :]
        here = (slot < stop)[:, None] & (lane < SIZE)[None, :]
        at = slot.to(tl.int64)[:, None]
        keys = tl.load(k + b * k_b + h * k_h + at * k_n + lane[None, :], mask=here, other=0.0)
        values = tl.load(v + b * v_b + h * v_h + at * v_n + lane[None, :], mask=here, other=0.0)
        seen = seen & (slot < stop)[None, :]
        top, mass, acc = attend_block(queries, keys, values, seen, scale, cap, top, mass, acc, CAPPED)
    store_part(
        out + piece * out_s + b * out_b + h * GROUP * out_h, lse + piece * lse_s + b * lse_b + h * GROUP * lse_h,
        out_h, out_m, lse_h, m, g, count, top, mass, acc, SIZE, WIDE,
    )  # fmt: skip


def blocking(queries: Tensor, group: int, split: int) -> dict[str, int]:
    """Tile sizes, a function of G, D and the dtype alone, for pieces of `split` slots.

    Rows hold 8 positions of a key head's group, 16 to 64 in all: a draft of up to 7 tokens reads the cache once. A
    tile of rows and a block of keys are at most 16 KB, so two stages of keys and values fit into the 99 KB of shared
    memory that every device from sm_80 on has. float32 goes through plain multiply-adds, which are unrolled: half of
    that keeps its 255 registers from spilling.
    """
    size = queries.shape[-1]
    wide = max(16, triton.next_power_of_2(size))
    row_bytes = wide * queries.element_size()
    most = max(16, min(64, (16384 if queries.element_size() == 2 else 8192) // row_bytes))
    rows = min(most, max(16, triton.next_power_of_2(8 * group)))
    return {
        "GROUP": group, "SIZE": size, "WIDE": wide, "ROWS": rows, "BLOCK": most, "SPLIT": split, "num_warps": 4,
        "num_stages": 2,
    }  # fmt: skip


def logit_factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """The two factors of `attend_block`, which computes exponentials to the base 2."""
    base = math.log2(math.e)
    return (scale * base, 0.0) if softcap is None else (2 * scale * base / softcap, softcap * base)


def check_kernel(queries: Tensor) -> None:
    """What the kernels do not do."""
    if queries.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"the Triton kernel does not take {queries.dtype}; convert, or write impl='reference'.")
    if queries.shape[-1] > WIDEST:
        raise ValueError(f"heads of {queries.shape[-1]} are wider than {WIDEST}; write impl='reference'.")


def last_dense(value: Tensor) -> Tensor:
    """The tensor itself where its last dimension is dense; other strides are free."""
    return value if value.stride(-1) == 1 else value.contiguous()


def by_row(value: Tensor) -> int:
    """The stride from row to row; 0 where one entry serves all."""
    return value.stride(0) if len(value) > 1 else 0


def tree_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    words: Tensor | None,
    depths: Tensor | None,
    hidden: Tensor | None,
    scale: float,
    softcap: float | None,
    window: int | None,
    sinks: Tensor | None,
    need_lse: bool,
) -> Attended:
    """See `mediaspec.kernels.tree_attention.tree_attention`."""
    check_kernel(queries)
    queries, keys, values = last_dense(queries), last_dense(keys), last_dense(values)
    batch, heads, count, size = queries.shape
    kv_heads, capacity = keys.shape[1:3]
    device = queries.device
    split = SPLIT if words is None else TREE_SPLIT
    shape = blocking(queries, heads // kv_heads, split)
    pieces = -(-capacity // split)
    # [B, M, H, D] in memory: the next projection reads a position's heads side by side
    out = torch.empty(batch, count, heads, size, dtype=queries.dtype, device=device).transpose(1, 2)
    lse = torch.empty(batch, heads, count, device=device)
    if not lse.numel():
        return Attended(out, lse if need_lse else None)
    # one piece is its own merge, bit for bit
    alone = pieces == 1 and sinks is None
    parts = out[None] if alone else torch.empty(pieces, batch, heads, count, size, device=device)
    part_lse = lse[None] if alone else torch.empty(pieces, batch, heads, count, device=device)
    lengths = lengths.contiguous()
    bits, below = dense(words, lengths), dense(depths, lengths)
    away = lengths if hidden is None else last_dense(hidden).view(torch.uint8)
    _split_kernel[(-(-count * shape["GROUP"] // shape["ROWS"]), pieces, batch * kv_heads)](
        queries, keys, values, lengths, bits, below, away, parts, part_lse,
        *queries.stride()[:3], *keys.stride()[:3], *values.stride()[:3],
        by_row(bits), by_row(below), by_row(away), *parts.stride()[:4], *part_lse.stride()[:3],
        capacity, kv_heads, count, bits.shape[-1], window or 0, *logit_factors(scale, softcap), **shape,
        TREE=words is not None, WINDOWED=window is not None, HIDDEN=hidden is not None, CAPPED=softcap is not None,
    )  # fmt: skip
    if not alone:
        launch_merge(parts, part_lse, sinks, out, lse)
    return Attended(out, lse if need_lse else None)
