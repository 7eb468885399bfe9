# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""Chain verification in two Triton passes.

Pass A, one program per (row, position): reads the target's logit row once, finds its thresholds on chip (see
`kernels.sample.triton` for the blocking), reads the draft row once, and leaves an accept flag, the drift and the
threshold.
Pass B, one program per row: counts the accepted prefix and draws from the residual (or bonus) of that one position,
whose rows it reads again with the threshold known. No probability is ever written to memory.

The draws of mode "match" (and `need_choices`, `need_probs`) come from the sampling kernel, so that they are the very
numbers of plain decoding.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..philox import ACCEPT, TARGET
from ..philox.triton import uniform_scalar
from ..sample import Warp
from ..sample import triton as rows
from ..sample.triton import dense, draw_row, finish_row, load_row, truncate_row
from . import ChainVerdict

__all__ = ["band_row", "residual_row", "verify_chain"]

TINY = tl.constexpr(1e-9)


@triton.jit
def band_row(p, a):
    """[c p - a]_+ with c in (0, 1] such that it sums to 1 - sum(a).

    Newton from c = 1 on a convex, increasing, piecewise linear function descends to the root and stops on it. Random
    rows of 64 to 16384 tokens took at most 17 steps, and those where nothing is rejected (R = 0) the most.
    """
    rejected = tl.maximum(1.0 - tl.sum(a, 0), 0.0)
    c = tl.sum(p * 0.0, 0) + 1.0
    for _ in range(24):
        active = a < c * p
        mass = tl.sum(tl.where(active, p, 0.0), 0)
        c = tl.where(mass > 0, (rejected + tl.sum(tl.where(active, a, 0.0), 0)) / mass, c)
    return tl.maximum(c * p - a, 0.0)


@triton.jit
def residual_row(p, a, BAND: tl.constexpr):
    """Residual weights of a rejected row and their sum."""
    w = band_row(p, a) if BAND else tl.maximum(p - a, 0.0)
    return w, tl.sum(w, 0)


@triton.jit
def _accept_kernel(
    logits, stride_b, stride_g, stride_n, tokens, draft_probs, guidance, allowed, forced, seeds, start, uniforms,
    scales, offsets, scale_stride, offset_stride, flags, excess, thresholds,
    K, V, temperature, top_k, top_p, ACCEPT_PURPOSE,
    BLOCK: tl.constexpr, GUIDED: tl.constexpr, MASKED: tl.constexpr, SCALED: tl.constexpr,
    GREEDY: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, K_FIRST: tl.constexpr, FORCED: tl.constexpr,
    POINT: tl.constexpr, RELAXED: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_OFFSET: tl.constexpr,
    STORED_U: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1).to(tl.int64)
    token = tl.arange(0, BLOCK)
    guide = tl.load(guidance + b) if GUIDED else 1.0
    fixed = tl.load(forced + b * (K + 1) + i).to(tl.int32) if FORCED else tl.full((), -1, tl.int32)
    z = load_row(
        logits + b * stride_b + i * stride_n, stride_g, guide, allowed, temperature, V, BLOCK, GUIDED, MASKED, SCALED
    )
    z, threshold = truncate_row(z, top_k, top_p, TOP_K, TOP_P, K_FIRST)
    tl.store(thresholds + b * (K + 1) + i, threshold)
    if i < K:
        p, bad = finish_row(z, fixed, BLOCK, GREEDY)
        line = b * K + i
        x = tl.load(tokens + line).to(tl.int32)
        hit = token == x
        px = tl.sum(tl.where(hit, p, 0.0), 0)
        s = tl.load(scales + b * scale_stride + i) if HAS_SCALE else 1.0
        o = tl.load(offsets + b * offset_stride + i) if HAS_OFFSET else 0.0
        if STORED_U:
            u = tl.load(uniforms + line)
        else:
            u = uniform_scalar(tl.load(seeds + b), tl.load(start + b) + i, ACCEPT_PURPOSE, 0)
        if POINT:
            bound = s * px + o
            ok = u < bound
            cost = tl.maximum(tl.minimum(bound, 1.0) - px, 0.0)
        else:
            if RELAXED:
                q = tl.load(draft_probs + line * V + token, mask=token < V, other=0.0)
                qx = tl.sum(tl.where(hit, q, 0.0), 0)
                cost = tl.sum(tl.maximum(tl.minimum(s * p + o * q, q) - p, 0.0), 0)
            else:
                qx = tl.load(draft_probs + line * V + x)
                cost = 0.0
            ok = u * qx < s * px + o * qx
        ok = ok & (bad == 0)
        if FORCED:
            ok = tl.where(fixed >= 0, fixed == x, ok)
            cost = tl.where(fixed >= 0, 0.0, cost)
        tl.store(flags + line, ok.to(tl.int32))
        tl.store(excess + line, cost)


@triton.jit
def _emit_kernel(
    logits, stride_b, stride_g, stride_n, tokens, lengths, draft_probs, guidance, allowed, forced, seeds, start, noise,
    scales, offsets, scale_stride, offset_stride, flags, excess, thresholds, accepted, emitted, drift,
    K, V, temperature, TARGET_PURPOSE,
    BLOCK: tl.constexpr, GUIDED: tl.constexpr, MASKED: tl.constexpr, SCALED: tl.constexpr,
    GREEDY: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, K_FIRST: tl.constexpr, FORCED: tl.constexpr,
    POINT: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_OFFSET: tl.constexpr, BAND: tl.constexpr,
    STORED: tl.constexpr, KPAD: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    token = tl.arange(0, BLOCK)
    step = tl.arange(0, KPAD)
    length = tl.load(lengths + b).to(tl.int32)
    ok = tl.load(flags + b * K + step, mask=step < K, other=0) != 0
    n = tl.min(tl.where(ok & (step < length), KPAD, step), 0)
    guide = tl.load(guidance + b) if GUIDED else 1.0
    line = b * (K + 1) + n
    fixed = tl.load(forced + line).to(tl.int32) if FORCED else tl.full((), -1, tl.int32)
    z = load_row(
        logits + b * stride_b + n.to(tl.int64) * stride_n, stride_g, guide, allowed, temperature, V,
        BLOCK, GUIDED, MASKED, SCALED,
    )  # fmt: skip
    z = tl.where(z < tl.load(thresholds + line), float("-inf"), z)
    p, bad = finish_row(z, fixed, BLOCK, GREEDY)
    if n < length:
        s = tl.load(scales + b * scale_stride + n) if HAS_SCALE else 1.0
        o = tl.load(offsets + b * offset_stride + n) if HAS_OFFSET else 0.0
        if POINT:
            hit = token == tl.load(tokens + b * K + n).to(tl.int32)
            a = tl.where(hit, tl.minimum(s * p + o, 1.0), 0.0)
        else:
            q = tl.load(draft_probs + (b * K + n) * V + token, mask=token < V, other=0.0)
            a = tl.minimum(s * p + o * q, q)
        w, total = residual_row(p, a, BAND)
        p = tl.where(total > TINY, w, p)
    choice = draw_row(
        p, bad, noise + line * V, tl.load(seeds + b), tl.load(start + b) + n, TARGET_PURPOSE, V, BLOCK, STORED
    )
    tl.store(emitted + b, choice.to(tl.int64))
    tl.store(accepted + b, tl.where(bad, 0, n).to(tl.int64))
    cost = tl.load(excess + b * K + step, mask=step < K, other=0.0)
    tested = (step <= n) & (step < length) & (bad == 0)
    tl.store(drift + b * K + step, tl.where(tested, cost, 0.0), mask=step < K)


@triton.jit
def _follow_kernel(choices, tokens, lengths, accepted, emitted, K, KPAD: tl.constexpr):
    b = tl.program_id(0).to(tl.int64)
    step = tl.arange(0, KPAD)
    length = tl.load(lengths + b).to(tl.int32)
    drawn = tl.load(choices + b * (K + 1) + step, mask=step < K, other=-1)
    ok = (drawn == tl.load(tokens + b * K + step, mask=step < K, other=-2)) & (step < length)
    n = tl.min(tl.where(ok, KPAD, step), 0)
    choice = tl.load(choices + b * (K + 1) + n)
    tl.store(emitted + b, choice)
    tl.store(accepted + b, tl.where(choice < 0, 0, n).to(tl.int64))


def verify_chain(
    target_logits: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    warp: Warp,
    draft_probs: Tensor | None,
    seeds: Tensor,
    start: Tensor,
    scale: Tensor | None,
    offset: Tensor | None,
    residual: str,
    guidance: Tensor | None,
    allowed: Tensor | None,
    forced: Tensor | None,
    noise: Tensor | None,
    uniforms: Tensor | None,
    mode: str,
    need_choices: bool,
    need_probs: bool,
) -> ChainVerdict:
    """See `mediaspec.kernels.verify_chain.verify_chain`."""
    logits = rows.rows_in_place(target_logits)
    batch, length = tokens.shape
    vocab = logits.shape[-1]
    device = logits.device
    tokens, lengths, start = tokens.contiguous(), lengths.contiguous(), start.contiguous()
    accepted = torch.empty(batch, dtype=torch.int64, device=device)
    emitted = torch.empty(batch, dtype=torch.int64, device=device)
    padded = triton.next_power_of_2(length + 1)

    choices: Tensor | None = None
    target_probs: Tensor | None = None
    if mode == "match" or need_choices:
        positions = start[:, None] + torch.arange(length + 1, device=device)
        drawn = rows.sample(
            logits, warp, seeds, positions, TARGET, guidance, allowed, forced, noise, 1, need_probs, True
        )
        choices, target_probs = drawn.tokens, drawn.probs
    elif need_probs:
        target_probs = rows.probabilities(logits, warp, guidance, allowed, forced)
    if mode == "match":
        assert choices is not None
        choices = choices.contiguous()
        drift = torch.zeros(batch, length, device=device)
        _follow_kernel[(batch,)](choices, tokens, lengths, accepted, emitted, length, KPAD=padded)
        return ChainVerdict(accepted, emitted, drift, choices, target_probs)

    flags = torch.empty(batch, length, dtype=torch.int32, device=device)
    excess = torch.empty(batch, length, dtype=torch.float32, device=device)
    drift = torch.empty(batch, length, dtype=torch.float32, device=device)
    thresholds = torch.empty(batch, length + 1, dtype=torch.float32, device=device)
    point = draft_probs is None
    relaxed = scale is not None or offset is not None
    switches = rows.row_flags(warp, vocab, guidance, allowed, forced)
    shape = rows.launch_shape(vocab)
    strides = (logits.stride(0), logits.stride(1), logits.stride(2))
    draft = dense(draft_probs, logits)
    guides, mask, fixed = dense(guidance, logits), dense(allowed, logits), dense(forced, tokens)
    linear = {"POINT": point, "HAS_SCALE": scale is not None, "HAS_OFFSET": offset is not None}
    scales, offsets = dense(scale, excess), dense(offset, excess)
    by_row = [length if value is not None and value.dim() == 2 else 0 for value in (scale, offset)]
    seeds = seeds.contiguous()
    _accept_kernel[(length + 1, batch)](
        logits, *strides, tokens, draft, guides, mask, fixed, seeds, start, dense(uniforms, excess),
        scales, offsets, *by_row, flags, excess, thresholds,
        length, vocab, warp.temperature, warp.top_k, warp.top_p, ACCEPT,
        **switches, **linear, **shape, RELAXED=relaxed, STORED_U=uniforms is not None,
    )  # fmt: skip
    _emit_kernel[(batch,)](
        logits, *strides, tokens, lengths, draft, guides, mask, fixed, seeds, start, dense(noise, logits),
        scales, offsets, *by_row, flags, excess, thresholds, accepted, emitted, drift,
        length, vocab, warp.temperature, TARGET,
        **switches, **linear, **shape, BAND=residual == "band", STORED=noise is not None, KPAD=padded,
    )  # fmt: skip
    return ChainVerdict(accepted, emitted, drift, choices, target_probs)
