# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""Flash attention with the frame bias in Triton (route R5): a program owns a tile of queries and walks over the keys.

The frames of a tile's queries are consecutive, so their keys are one stretch of the sequence. The walk has three
parts: before the stretch, the stretch, behind it. Only the middle one, 1/F of the keys plus the tiles that cross a
border, compares frames; the other two are plain attention. P need not be a multiple of a tile.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .layout import FrameLayout, query_delta

__all__ = ["framed_attention"]


@triton.jit
def _walk(
    q, k, v, seen, k_n, v_n, begin, end, length, m, frame, y, x, delta, scale, start, tokens, frames, across, radius,
    top, mass, acc,
    SIZE: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, BIASED: tl.constexpr, NEAR: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """The running softmax in base 2 over keys begin .. end - 1, begin a multiple of BLOCK.

    q [ROWS, WIDE]; m, frame, y, x, delta [ROWS] of the queries; state: top [ROWS] largest logit, mass [ROWS] sum of
    2^(logit - top), acc [ROWS, WIDE] their sum with the values.
    """
    lane = tl.arange(0, WIDE)
    for first in range(begin, end, BLOCK):
        n = first + tl.arange(0, BLOCK)
        here = (n < length)[:, None] & (lane < SIZE)[None, :]
        keys = tl.load(k + n.to(tl.int64)[:, None] * k_n + lane[None, :], mask=here, other=0.0)
        z = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
        if BIASED:
            place = n - start
            owner = tl.where((place >= 0) & (place < frames * tokens), place // tokens, -2)
            same = frame[:, None] == owner[None, :]
            if NEAR:
                spot = place % tokens
                down = y[:, None] - (spot // across)[None, :]
                right = x[:, None] - (spot % across)[None, :]
                same = same & (down <= radius) & (down >= -radius) & (right <= radius) & (right >= -radius)
            z = tl.where(same, z - delta[:, None], z)
        real = n < length
        if MASKED:
            real = real & (tl.load(seen + n, mask=real, other=0) != 0)
        z = tl.where(real[None, :], z, float("-inf"))
        new_top = tl.maximum(top, tl.max(z, 1))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(z - shift[:, None])
        keep = tl.exp2(top - shift)
        mass = mass * keep + tl.sum(weight, 1)
        values = tl.load(v + n.to(tl.int64)[:, None] * v_n + lane[None, :], mask=here, other=0.0)
        acc = tl.dot(weight.to(values.dtype), values, acc * keep[:, None], input_precision="ieee")
        top = new_top
    return top, mass, acc


@triton.jit
def _framed_kernel(
    q, k, v, delta, seen, out,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, delta_b, delta_h, seen_b, out_b, out_h, out_n,
    heads, length, start, tokens, frames, across, radius, scale,
    SIZE: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, NEAR: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = (tl.program_id(1) % heads).to(tl.int64)
    lane = tl.arange(0, WIDE)
    m = tile * ROWS + tl.arange(0, ROWS)
    inside = (m < length)[:, None] & (lane < SIZE)[None, :]
    queries = tl.load(q + b * q_b + h * q_h + m.to(tl.int64)[:, None] * q_n + lane[None, :], mask=inside, other=0.0)
    place = m - start
    video = (place >= 0) & (place < frames * tokens)
    frame = tl.where(video, place // tokens, -1)
    spot = place % tokens
    y = spot // across
    x = spot % across
    less = tl.load(delta + b * delta_b + h * delta_h + m, mask=m < length, other=0.0)

    # the stretch of keys that share a frame with one of the tile's queries, widened to whole blocks
    low = tl.maximum(tile * ROWS, start)
    high = tl.minimum(tl.minimum(tile * ROWS + ROWS, length), start + frames * tokens)
    some = low < high
    first = start + (low - start) // tokens * tokens
    last = start + ((high - 1 - start) // tokens + 1) * tokens
    first = tl.where(some, first // BLOCK * BLOCK, 0)
    last = tl.where(some, (last + BLOCK - 1) // BLOCK * BLOCK, 0)

    k += b * k_b + h * k_h
    v += b * v_b + h * v_h
    seen += b * seen_b
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    mass = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDE), tl.float32)
    top, mass, acc = _walk(
        queries, k, v, seen, k_n, v_n, 0, first, length, m, frame, y, x, less, scale, start, tokens, frames, across,
        radius, top, mass, acc, SIZE, WIDE, BLOCK, False, NEAR, MASKED,
    )  # fmt: skip
    top, mass, acc = _walk(
        queries, k, v, seen, k_n, v_n, first, last, length, m, frame, y, x, less, scale, start, tokens, frames, across,
        radius, top, mass, acc, SIZE, WIDE, BLOCK, True, NEAR, MASKED,
    )  # fmt: skip
    top, mass, acc = _walk(
        queries, k, v, seen, k_n, v_n, last, length, length, m, frame, y, x, less, scale, start, tokens, frames,
        across, radius, top, mass, acc, SIZE, WIDE, BLOCK, False, NEAR, MASKED,
    )  # fmt: skip
    acc = acc / tl.where(mass > 0, mass, 1.0)[:, None]
    tl.store(out + b * out_b + h * out_h + m.to(tl.int64)[:, None] * out_n + lane[None, :], acc, mask=inside)


def framed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    delta: Tensor,
    layout: FrameLayout,
    mode: str,
    radius: int,
    scale: float,
    key_mask: Tensor | None,
) -> Tensor:
    """See `mediaspec.kernels.tiara_bias.framed_attention`; head sizes up to 128, no float64."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    batch, heads, length, size = q.shape
    bias = query_delta(delta, layout, length, torch.float32) * math.log2(math.e)
    bias = bias.expand(batch, heads, length)
    bias = bias if bias.stride(-1) == 1 else bias.contiguous()
    out = torch.empty(batch, length, heads, size, dtype=q.dtype, device=q.device).transpose(1, 2)
    seen = q.new_ones((1, 1), dtype=torch.uint8) if key_mask is None else key_mask.to(torch.uint8).contiguous()
    # float32 tiles are twice as wide in memory
    rows, block = (64, 32) if q.dtype == torch.float32 else (128, 64)
    _framed_kernel[(-(-length // rows), batch * heads)](
        q, k, v, bias, seen, out,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *bias.stride()[:2], seen.stride(0), *out.stride()[:3],
        heads, length, layout.start, layout.tokens, layout.frames, layout.width or layout.tokens,
        0 if mode == "self_token" else radius, scale * math.log2(math.e),
        SIZE=size, WIDE=max(16, triton.next_power_of_2(size)), ROWS=rows, BLOCK=block, NEAR=mode != "frame",
        MASKED=key_mask is not None, num_warps=8 if size > 64 and rows == 128 else 4, num_stages=2,
    )  # fmt: skip
    return out
