# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""The processed law of one logit row as Triton device functions, and the sampling kernel on top of them.

Blocking: one program owns one row, and the row is one block of next_power_of_2(V) values, read from memory once and
kept on chip while thresholds are found, so probabilities are never written. Up to 16384 tokens that is at most 16
values per thread (32 warps), which stay in registers: ptxas for sm_90 spills nothing in the chain kernels and at most
160 bytes per thread elsewhere (the tree walk holds two laws). At 65536 it is 64 values per thread, and ptxas spills
0.2-1.7 KB per thread into local memory, which the L1 and L2 caches serve: the logits are still read once.

Truncation: thresholds are exact. A float's bits map to an unsigned integer of the same order; the k-th largest value
is the largest integer t with at least k values >= t, built bit by bit from the top (32 counts over the on-chip row,
fewer when a count hits k exactly). Top-p is the same search with mass in place of the count.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..philox.triton import exponential_row
from . import Sampled, Warp

__all__ = [
    "draw_row",
    "finish_row",
    "launch_shape",
    "load_row",
    "row_flags",
    "sample",
    "truncate_row",
    "probabilities",
]


@triton.jit
def load_row(
    base, stride_g, scale, allowed, temperature, V,
    BLOCK: tl.constexpr, GUIDED: tl.constexpr, MASKED: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """[BLOCK] float32 logits after guidance, mask and temperature; -inf at and beyond V."""
    token = tl.arange(0, BLOCK)
    inside = token < V
    z = tl.load(base + token, mask=inside, other=0.0).to(tl.float32)
    if GUIDED:
        u = tl.load(base + stride_g + token, mask=inside, other=0.0).to(tl.float32)
        difference = z - u
        # The numerically even form of u + s (c - u), the one torch.lerp takes.
        z = tl.where(tl.abs(scale) < 0.5, u + scale * difference, z - difference * (1.0 - scale))
    if MASKED:
        inside = inside & (tl.load(allowed + token, mask=inside, other=0) != 0)
    if SCALED:
        z = z / temperature
    return tl.where(inside, z, float("-inf"))


@triton.jit
def _ordered(z):
    """Unsigned integers in the order of the floats."""
    bits = z.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def _value(key):
    """Inverse of `_ordered` for one scalar."""
    bits = (key ^ 0x80000000).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _top_k_threshold(z, k):
    key = _ordered(z)
    threshold = tl.sum(key * 0, 0).to(tl.uint32)
    bit = tl.full((), 0x80000000, tl.uint32)
    searching = k > 0
    while searching:
        candidate = threshold | bit
        count = tl.sum((key >= candidate).to(tl.int32), 0)
        threshold = tl.where(count >= k, candidate, threshold)
        bit = bit >> 1
        searching = (bit != 0) & (count != k)
    return _value(threshold)


@triton.jit
def _top_p_threshold(z, top_p):
    key = _ordered(z)
    mass = tl.exp(z - tl.max(z, 0))
    wanted = top_p * tl.sum(mass, 0)
    threshold = tl.sum(key * 0, 0).to(tl.uint32)
    bit = tl.full((), 0x80000000, tl.uint32)
    while bit != 0:
        candidate = threshold | bit
        reached = tl.sum(tl.where(key >= candidate, mass, 0.0), 0) >= wanted
        threshold = tl.where(reached, candidate, threshold)
        bit = bit >> 1
    return _value(threshold)


@triton.jit
def truncate_row(
    z, top_k, top_p, TOP_K: tl.constexpr, TOP_P: tl.constexpr, K_FIRST: tl.constexpr
):  # fmt: skip
    """The row with truncated tokens at -inf, and the threshold in use. A NaN is never truncated away."""
    t = tl.full((), float("-inf"), tl.float32)
    if TOP_K and K_FIRST:
        t = _top_k_threshold(z, top_k)
        z = tl.where(z < t, float("-inf"), z)
    if TOP_P:
        tp = _top_p_threshold(z, top_p)
        z = tl.where(z < tp, float("-inf"), z)
        t = tl.where(tp > t, tp, t)
    if TOP_K and not K_FIRST:
        tk = _top_k_threshold(z, top_k)
        z = tl.where(z < tk, float("-inf"), z)
        t = tl.where(tk > t, tk, t)
    return z, t


@triton.jit
def finish_row(z, forced, BLOCK: tl.constexpr, GREEDY: tl.constexpr):
    """([BLOCK] probabilities, bad): bad, and a row of NaN, where no law is defined. forced >= 0 overrules all."""
    token = tl.arange(0, BLOCK)
    mass = tl.exp(z - tl.max(z, 0))
    total = tl.sum(mass, 0)
    bad = (total != total) & (forced < 0)
    p = mass / total
    if GREEDY:
        p = (token == tl.argmax(z, 0)).to(tl.float32)
        p = tl.where(bad, float("nan"), p)
    p = tl.where(forced >= 0, (token == forced).to(tl.float32), p)
    return p, bad


@triton.jit
def draw_row(
    p, bad, noise, seed, position, purpose, V,
    BLOCK: tl.constexpr, STORED: tl.constexpr,
):  # fmt: skip
    """argmax(p / E), -1 where the row is bad. `noise` points at the row's stored exponentials when STORED."""
    token = tl.arange(0, BLOCK)
    if STORED:
        e = tl.load(noise + token, mask=token < V, other=1.0)
    else:
        e = exponential_row(seed, position, purpose, 0, BLOCK)
    choice = tl.argmax(tl.where(token < V, p / e, -1.0), 0)
    return tl.where(bad, -1, choice)


@triton.jit
def _sample_kernel(
    logits, stride_b, stride_g, stride_n, guidance, allowed, forced, seeds, positions, noise, tokens, probs,
    N, V, temperature, top_k, top_p, purpose, width,
    BLOCK: tl.constexpr, GUIDED: tl.constexpr, MASKED: tl.constexpr, SCALED: tl.constexpr, GREEDY: tl.constexpr,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, K_FIRST: tl.constexpr, FORCED: tl.constexpr, DRAW: tl.constexpr,
    STORED: tl.constexpr, NEED_PROBS: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1).to(tl.int64)
    line = b * N + n
    token = tl.arange(0, BLOCK)
    scale = tl.load(guidance + b) if GUIDED else 1.0
    fixed = tl.load(forced + line).to(tl.int32) if FORCED else tl.full((), -1, tl.int32)
    base = logits + b * stride_b + n * stride_n
    raw = load_row(base, stride_g, scale, allowed, temperature, V, BLOCK, GUIDED, MASKED, SCALED)
    z, _ = truncate_row(raw, top_k, top_p, TOP_K, TOP_P, K_FIRST)
    p, bad = finish_row(z, fixed, BLOCK, GREEDY)
    if NEED_PROBS:
        tl.store(probs + line * V + token, p, mask=token < V)
    if DRAW:
        if STORED:
            e = tl.load(noise + line * V + token, mask=token < V, other=1.0)
        else:
            e = exponential_row(tl.load(seeds + b), tl.load(positions + line), purpose, 0, BLOCK)
        weight = p / e
        if GREEDY and width > 1:
            # One-hot mass orders only the first token; the others follow their logits.
            rest = tl.exp(raw - tl.max(raw, 0))
            total = tl.sum(rest, 0)
            rest = tl.where(total == total, rest / total, 0.0)
            weight = tl.where(p > 0, float("inf"), rest)
        weight = tl.where(token < V, weight, -2.0)
        for rank in range(width):
            choice = tl.argmax(weight, 0)
            tl.store(tokens + line * width + rank, tl.where(bad, -1, choice).to(tl.int64))
            weight = tl.where(token == choice, -1.0, weight)


def launch_shape(vocab_size: int) -> dict[str, int | bool]:
    """Block and warps for rows of `vocab_size`: see the blocking note of this module."""
    block = max(16, triton.next_power_of_2(vocab_size))
    return {"BLOCK": block, "num_warps": min(32, max(4, block // 512))}


def row_flags(
    warp: Warp, vocab_size: int, guidance: Tensor | None, allowed: Tensor | None, forced: Tensor | None
) -> dict[str, bool]:
    """The compile-time switches of a row: what is off is not compiled in."""
    greedy = warp.temperature == 0
    return {
        "GUIDED": guidance is not None,
        "MASKED": allowed is not None,
        "SCALED": not greedy and warp.temperature != 1,
        "GREEDY": greedy,
        "TOP_K": not greedy and 0 < warp.top_k < vocab_size,
        "TOP_P": not greedy and warp.top_p < 1,
        "K_FIRST": warp.order[0] == "top_k",
        "FORCED": forced is not None,
    }


def rows_in_place(logits: Tensor) -> Tensor:
    """The logits with a dense last dimension; other strides are free."""
    return logits if logits.stride(-1) == 1 else logits.contiguous()


def dense(value: Tensor | None, instead: Tensor) -> Tensor:
    """A contiguous pointer argument; `instead` fills the slot of a missing one and is never read."""
    return instead if value is None else value.contiguous()


def _run(
    logits: Tensor,
    warp: Warp,
    seeds: Tensor | None,
    positions: Tensor | None,
    purpose: int,
    guidance: Tensor | None,
    allowed: Tensor | None,
    forced: Tensor | None,
    noise: Tensor | None,
    width: int,
    need_probs: bool,
) -> tuple[Tensor, Tensor | None]:
    logits = rows_in_place(logits)
    batch, _, count, vocab = logits.shape
    draw = seeds is not None
    tokens = torch.empty(batch, count, width, dtype=torch.int64, device=logits.device)
    probs = torch.empty(batch, count, vocab, dtype=torch.float32, device=logits.device) if need_probs else None
    if batch * count:
        _sample_kernel[(count, batch)](
            logits, logits.stride(0), logits.stride(1), logits.stride(2),
            dense(guidance, logits), dense(allowed, logits), dense(forced, tokens), dense(seeds, tokens),
            dense(positions, tokens), dense(noise, logits), tokens, dense(probs, logits),
            count, vocab, warp.temperature, warp.top_k, warp.top_p, purpose, width,
            **row_flags(warp, vocab, guidance, allowed, forced), **launch_shape(vocab),
            DRAW=draw, STORED=noise is not None, NEED_PROBS=need_probs,
        )  # fmt: skip
    return tokens, probs


def probabilities(
    logits: Tensor, warp: Warp, guidance: Tensor | None, allowed: Tensor | None, forced: Tensor | None
) -> Tensor:
    """See `mediaspec.kernels.sample.probabilities`."""
    _, probs = _run(logits, warp, None, None, 0, guidance, allowed, forced, None, 1, True)
    assert probs is not None
    return probs


def sample(
    logits: Tensor,
    warp: Warp,
    seeds: Tensor,
    positions: Tensor | None,
    purpose: int,
    guidance: Tensor | None,
    allowed: Tensor | None,
    forced: Tensor | None,
    noise: Tensor | None,
    width: int,
    need_probs: bool,
    mark_undefined: bool,
) -> Sampled:
    """See `mediaspec.kernels.sample.sample`."""
    tokens, probs = _run(logits, warp, seeds, positions, purpose, guidance, allowed, forced, noise, width, need_probs)
    if not mark_undefined:
        tokens.clamp_(min=0)
    return Sampled(tokens[..., 0] if width == 1 else tokens, probs)
