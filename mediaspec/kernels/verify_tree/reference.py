"""Tree verification in plain torch: a fixed loop over levels and sibling ranks, masks instead of branches."""

from __future__ import annotations

import torch
from torch import Tensor

from ..philox import ACCEPT, TARGET
from ..philox import reference as philox
from ..sample import Warp
from ..sample.reference import draw, probabilities
from ..verify_chain.reference import TINY, _arange, band_residual
from . import TreeTables, TreeVerdict

__all__ = ["verify_tree"]


def per_sibling(value: Tensor | None, neutral: float, last: Tensor, level: int, sibling: int) -> Tensor | None:
    """The [B] (or scalar) coefficient of a sibling: a per-level value counts for a node's last child only."""
    if value is None:
        return None
    if value.dim() == 2:
        return value[level, sibling]
    return torch.where(last, value[level], neutral)


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
    batch = tokens.shape[0]
    vocab = target_logits.shape[-1]
    device = tokens.device
    levels, width = tree.levels, tree.children.shape[1]
    every = _arange(batch, device)

    full: Tensor | None = None
    choices: Tensor | None = None
    if need_probs or need_choices or mode == "match":
        full = probabilities(target_logits, warp, guidance, allowed, forced)
    if mode == "match" or need_choices:
        assert full is not None
        if noise is None:
            noise = philox.exponential(seeds, start[:, None] + _arange(levels + 1, device), vocab, TARGET)
        choices = draw(full, noise[:, tree.depth])
    target_probs = full if need_probs else None

    node = torch.zeros_like(depth_limit)
    active = torch.ones_like(depth_limit, dtype=torch.bool)
    steps = []
    if mode == "match":
        assert choices is not None
        for level in range(levels):
            kids = tree.children[node]
            hit = (tokens.gather(1, (kids - 1).clamp(min=0)) == choices[every, node, None]) & (kids >= 0)
            found, first = hit.max(1)
            active = active & found & (level < depth_limit)
            node = torch.where(active, kids[every, first], node)
            steps.append(torch.where(active, node, -1))
        next_token = choices[every, node]
        drift = torch.zeros(batch, levels, device=device)
        return _verdict(steps, next_token, drift, choices, target_probs)

    def law(rows: Tensor) -> Tensor:
        if full is not None:
            return full[every, rows]
        picked = target_logits[every, :, rows].unsqueeze(2)
        forced_here = None if forced is None else forced[every, rows][:, None]
        return probabilities(picked, warp, guidance, allowed, forced_here)[:, 0]

    if uniforms is None:
        positions = start[:, None] + _arange(levels, device)
        uniforms = torch.stack([philox.uniform(seeds, positions, ACCEPT, k) for k in range(width)], -1)
    relaxed = scale is not None or offset is not None
    prices = []
    p = law(node)
    for level in range(levels):
        kids = tree.children[node]
        active = active & (level < depth_limit)
        fixed = None if forced is None else forced[every, node]
        q = None if draft_probs is None else draft_probs[every, tree.internal[node].clamp(min=0)]
        taken = torch.zeros_like(active)
        child = node
        price = torch.zeros(batch, device=device)
        for rank in range(width):
            row = kids[:, rank]
            tried = active & ~taken & (row >= 0)
            x = tokens.gather(1, (row - 1).clamp(min=0)[:, None])
            last = torch.ones_like(tried) if rank + 1 == width else kids[:, rank + 1] < 0
            s = per_sibling(scale, 1.0, last, level, rank)
            o = per_sibling(offset, 0.0, last, level, rank)
            px = p.gather(1, x)[:, 0]
            bound = px if s is None else s * px
            u = uniforms[:, level, rank]
            if q is None:
                bound = bound if o is None else bound + o
                ok = u < bound
                ax = bound.clamp(max=1)
                a = torch.zeros_like(p).scatter_(1, x, ax[:, None])
                cost = (ax - px).clamp_(min=0) if relaxed else None
            else:
                qx = q.gather(1, x)[:, 0]
                bound = bound if o is None else bound + o * qx
                # A child without draft mass was never drawn: it is passed over, and p stays as it is.
                tried = tried & (qx > 0)
                ok = u * qx < bound
                a = p if s is None else p * s.reshape(-1, 1)
                a = a if o is None else a + o.reshape(-1, 1) * q
                a = torch.minimum(a, q)
                cost = (a - p).clamp_(min=0).sum(-1) if relaxed else None
            if fixed is not None:
                ok = torch.where(fixed < 0, ok, fixed == x[:, 0])
                cost = cost if cost is None else cost.masked_fill(fixed >= 0, 0.0)
            if cost is not None:
                price = torch.where(tried, price + cost, price)
            child = torch.where(tried & ok, row, child)
            taken = taken | (tried & ok)

            rejected = tried & ~ok
            w = band_residual(p, a) if residual == "band" else (p - a).clamp_(min=0)
            total = w.sum(-1)
            update = rejected & (total > TINY)
            if fixed is not None:
                update = update & (fixed < 0)
            p = torch.where(update[:, None], w / total[:, None], p)
            if q is not None and rank + 1 < width:
                rest = q.scatter(1, x, 0.0)
                rest = rest / rest.sum(-1, keepdim=True).clamp_(min=torch.finfo(torch.float32).tiny)
                q = torch.where(rejected[:, None], rest, q)
        node, active = child, taken
        p = torch.where(active[:, None], law(node), p)
        steps.append(torch.where(active, node, -1))
        prices.append(price)
    depth = tree.depth[node]
    noise_row = (
        philox.exponential(seeds, (start + depth)[:, None], vocab, TARGET)[:, 0]
        if noise is None
        else noise[every, depth]
    )
    return _verdict(steps, draw(p, noise_row), torch.stack(prices, 1), choices, target_probs)


def _verdict(
    steps: list[Tensor], next_token: Tensor, drift: Tensor, choices: Tensor | None, target_probs: Tensor | None
) -> TreeVerdict:
    faulty = (next_token < 0)[:, None]
    path = torch.stack(steps, 1).masked_fill(faulty, -1)
    drift = drift.masked_fill(faulty, 0.0)
    return TreeVerdict((path >= 0).sum(1), next_token, path, drift, choices, target_probs)
