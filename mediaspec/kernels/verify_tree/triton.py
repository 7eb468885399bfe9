# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""Tree verification: one Triton program per row walks from the root, the current target and draft law on chip.

Only the rows on the walked path are read (at most levels + 1 of N + 1 target rows, levels of the draft rows), each
once; see `kernels.sample.triton` for the blocking. Mode "match" draws every row with the sampling kernel and follows
the choices.
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
from ..verify_chain.triton import TINY, residual_row
from . import TreeTables, TreeVerdict

__all__ = ["verify_tree"]

SMALLEST = tl.constexpr(torch.finfo(torch.float32).tiny)


@triton.jit
def _walk_kernel(
    logits, stride_b, stride_g, stride_n, tokens, limits, children, depth, internal, draft_probs,
    guidance, allowed, forced, seeds, start, noise, uniforms, scales, offsets,
    accepted, emitted, path, drift,
    N, P, levels, width, V, temperature, top_k, top_p, ACCEPT_PURPOSE, TARGET_PURPOSE,
    BLOCK: tl.constexpr, GUIDED: tl.constexpr, MASKED: tl.constexpr, SCALED: tl.constexpr,
    GREEDY: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr, K_FIRST: tl.constexpr, FORCED: tl.constexpr,
    POINT: tl.constexpr, HAS_SCALE: tl.constexpr, SCALE_ALL: tl.constexpr, HAS_OFFSET: tl.constexpr,
    OFFSET_ALL: tl.constexpr, BAND: tl.constexpr, STORED: tl.constexpr, STORED_U: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0).to(tl.int64)
    token = tl.arange(0, BLOCK)
    limit = tl.load(limits + b).to(tl.int32)
    seed = tl.load(seeds + b)
    first = tl.load(start + b)
    guide = tl.load(guidance + b) if GUIDED else 1.0

    node = tl.full((), 0, tl.int64)
    fixed = tl.load(forced + b * (N + 1)).to(tl.int32) if FORCED else tl.full((), -1, tl.int32)
    z = load_row(logits + b * stride_b, stride_g, guide, allowed, temperature, V, BLOCK, GUIDED, MASKED, SCALED)
    z, _ = truncate_row(z, top_k, top_p, TOP_K, TOP_P, K_FIRST)
    p, bad = finish_row(z, fixed, BLOCK, GREEDY)
    going = limit >= 0
    n = tl.full((), 0, tl.int32)
    for level in range(levels):
        going = going & (level < limit)
        child = node * 0
        price = tl.full((), 0.0, tl.float32)
        if going:
            q = p * 0.0
            if not POINT:
                law = tl.maximum(tl.load(internal + node), 0)
                q = tl.load(draft_probs + (b * P + law) * V + token, mask=token < V, other=0.0)
            for rank in range(width):
                row = tl.load(children + node * width + rank)
                after = tl.load(children + node * width + rank + 1, mask=rank + 1 < width, other=-1)
                tried = (child == 0) & (row >= 0)
                x = tl.load(tokens + b * N + tl.maximum(row - 1, 0)).to(tl.int32)
                hit = token == x
                px = tl.sum(tl.where(hit, p, 0.0), 0)
                s = tl.full((), 1.0, tl.float32)
                o = tl.full((), 0.0, tl.float32)
                if HAS_SCALE:
                    if SCALE_ALL:
                        s = tl.load(scales + level * width + rank)
                    else:
                        s = tl.where(after < 0, tl.load(scales + level), 1.0)
                if HAS_OFFSET:
                    if OFFSET_ALL:
                        o = tl.load(offsets + level * width + rank)
                    else:
                        o = tl.where(after < 0, tl.load(offsets + level), 0.0)
                if STORED_U:
                    u = tl.load(uniforms + (b * levels + level) * width + rank)
                else:
                    u = uniform_scalar(seed, first + level, ACCEPT_PURPOSE, rank)
                if POINT:
                    ok = u < s * px + o
                    a = tl.where(hit, tl.minimum(s * p + o, 1.0), 0.0)
                else:
                    qx = tl.sum(tl.where(hit, q, 0.0), 0)
                    # A child without draft mass was never drawn: it is passed over, and p stays as it is.
                    tried = tried & (qx > 0)
                    ok = u * qx < s * px + o * qx
                    a = tl.minimum(s * p + o * q, q)
                cost = tl.sum(tl.maximum(a - p, 0.0), 0)
                if FORCED:
                    ok = tl.where(fixed >= 0, fixed == x, ok)
                    cost = tl.where(fixed >= 0, 0.0, cost)
                price = tl.where(tried, price + cost, price)
                rejected = tried & (ok == 0)
                child = tl.where(tried & ok, row, child)
                w, total = residual_row(p, a, BAND)
                p = tl.where(rejected & (total > TINY) & (fixed < 0), w / total, p)
                if not POINT:
                    rest = tl.where(hit, 0.0, q)
                    q = tl.where(rejected, rest / tl.maximum(tl.sum(rest, 0), SMALLEST), q)
            if child > 0:
                node = child
                n += 1
                if FORCED:
                    fixed = tl.load(forced + b * (N + 1) + node).to(tl.int32)
                z = load_row(
                    logits + b * stride_b + node * stride_n, stride_g, guide, allowed, temperature, V,
                    BLOCK, GUIDED, MASKED, SCALED,
                )  # fmt: skip
                z, _ = truncate_row(z, top_k, top_p, TOP_K, TOP_P, K_FIRST)
                p, bad = finish_row(z, fixed, BLOCK, GREEDY)
        going = child > 0
        tl.store(path + b * levels + level, tl.where(going, node, -1))
        tl.store(drift + b * levels + level, price)
    deep = tl.load(depth + node)
    choice = draw_row(
        p, bad, noise + (b * (levels + 1) + deep) * V, seed, first + deep, TARGET_PURPOSE, V, BLOCK, STORED
    )
    tl.store(emitted + b, choice.to(tl.int64))
    tl.store(accepted + b, tl.where(bad, 0, n).to(tl.int64))
    if bad:
        for level in range(levels):
            tl.store(path + b * levels + level, node * 0 - 1)
            tl.store(drift + b * levels + level, 0.0)


@triton.jit
def _follow_kernel(choices, tokens, limits, children, accepted, emitted, path, N, levels, width):
    b = tl.program_id(0).to(tl.int64)
    limit = tl.load(limits + b).to(tl.int32)
    node = tl.full((), 0, tl.int64)
    going = limit >= 0
    n = tl.full((), 0, tl.int32)
    choice = tl.load(choices + b * (N + 1))
    for level in range(levels):
        going = going & (level < limit)
        child = node * 0
        for rank in range(width):
            row = tl.load(children + node * width + rank)
            x = tl.load(tokens + b * N + tl.maximum(row - 1, 0))
            child = tl.where(going & (child == 0) & (row >= 0) & (x == choice), row, child)
        going = child > 0
        node = tl.where(going, child, node)
        n += going.to(tl.int32)
        choice = tl.load(choices + b * (N + 1) + node)
        tl.store(path + b * levels + level, tl.where(going, node, -1))
    tl.store(emitted + b, choice)
    tl.store(accepted + b, tl.where(choice < 0, 0, n).to(tl.int64))
    if choice < 0:
        for level in range(levels):
            tl.store(path + b * levels + level, node * 0 - 1)


def verify_tree(
    target_logits: Tensor,
    tokens: Tensor,
    depth_limit: Tensor,
    tree: TreeTables,
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
) -> TreeVerdict:
    """See `mediaspec.kernels.verify_tree.verify_tree`."""
    logits = rows.rows_in_place(target_logits)
    batch, nodes = tokens.shape
    vocab = logits.shape[-1]
    device = logits.device
    levels, width = tree.levels, tree.children.shape[1]
    tokens, limits, start = tokens.contiguous(), depth_limit.contiguous(), start.contiguous()
    seeds, children = seeds.contiguous(), tree.children.contiguous()
    accepted = torch.empty(batch, dtype=torch.int64, device=device)
    emitted = torch.empty(batch, dtype=torch.int64, device=device)
    path = torch.empty(batch, levels, dtype=torch.int64, device=device)

    choices: Tensor | None = None
    target_probs: Tensor | None = None
    if mode == "match" or need_choices:
        positions = start[:, None] + tree.depth
        stored = None if noise is None else noise[:, tree.depth]
        drawn = rows.sample(
            logits, warp, seeds, positions, TARGET, guidance, allowed, forced, stored, 1, need_probs, True
        )
        choices, target_probs = drawn.tokens.contiguous(), drawn.probs
    elif need_probs:
        target_probs = rows.probabilities(logits, warp, guidance, allowed, forced)
    if mode == "match":
        drift = torch.zeros(batch, levels, device=device)
        _follow_kernel[(batch,)](choices, tokens, limits, children, accepted, emitted, path, nodes, levels, width)
        return TreeVerdict(accepted, emitted, path, drift, choices, target_probs)

    drift = torch.empty(batch, levels, dtype=torch.float32, device=device)
    _walk_kernel[(batch,)](
        logits, logits.stride(0), logits.stride(1), logits.stride(2), tokens, limits, children,
        tree.depth.contiguous(), tree.internal.contiguous(), dense(draft_probs, logits), dense(guidance, logits),
        dense(allowed, logits), dense(forced, tokens), seeds, start, dense(noise, logits), dense(uniforms, drift),
        dense(scale, drift), dense(offset, drift), accepted, emitted, path, drift,
        nodes, 0 if draft_probs is None else draft_probs.shape[1], levels, width, vocab,
        warp.temperature, warp.top_k, warp.top_p, ACCEPT, TARGET,
        **rows.row_flags(warp, vocab, guidance, allowed, forced), **rows.launch_shape(vocab),
        POINT=draft_probs is None, HAS_SCALE=scale is not None, SCALE_ALL=scale is not None and scale.dim() == 2,
        HAS_OFFSET=offset is not None, OFFSET_ALL=offset is not None and offset.dim() == 2,
        BAND=residual == "band", STORED=noise is not None, STORED_U=uniforms is not None,
    )  # fmt: skip
    return TreeVerdict(accepted, emitted, path, drift, choices, target_probs)
