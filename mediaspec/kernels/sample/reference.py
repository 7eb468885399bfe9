"""Warping and drawing in plain torch.

Every step that is off costs nothing: at B = 1, V = 1024 an operation takes 2-10 us.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..philox import reference as philox
from . import Sampled, Warp

__all__ = ["best", "combine", "draw", "probabilities", "sample"]

NEG_INF = float("-inf")


def combine(logits: Tensor, guidance: Tensor | None, allowed: Tensor | None) -> Tensor:
    """[B, G, N, V] -> [B, N, V] float32: guidance and the static mask."""
    if guidance is None:
        z = logits[:, 0].float()
    else:
        z = torch.lerp(logits[:, 1].float(), logits[:, 0].float(), guidance[:, None, None])
    if allowed is not None:
        z = z.masked_fill(~allowed, NEG_INF)
    return z


def _top_k(z: Tensor, k: int) -> Tensor:
    if k == 0 or k >= z.shape[-1]:
        return z
    threshold = z.topk(k, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    # `<` keeps NaN in place, so that a faulty row stays visible.
    return z.masked_fill(z < threshold, NEG_INF)


def _top_p(z: Tensor, mass: float) -> Tensor:
    if mass >= 1:
        return z
    ordered, _ = z.sort(dim=-1, descending=True)
    p = ordered.softmax(-1)
    kept = (p.cumsum(-1) - p < mass).sum(-1, keepdim=True)
    threshold = ordered.gather(-1, (kept - 1).clamp_(min=0))
    return z.masked_fill(z < threshold, NEG_INF)


def probabilities(
    logits: Tensor, warp: Warp, guidance: Tensor | None, allowed: Tensor | None, forced: Tensor | None
) -> Tensor:
    """[B, N, V] float32 law; every entry NaN in a row without a defined law."""
    z = combine(logits, guidance, allowed)
    if warp.temperature == 0:
        peak, index = z.max(-1, keepdim=True)
        # peak - peak is 0, or NaN for an infinite or NaN row, which then spreads over the row.
        p = torch.zeros_like(z).scatter_(-1, index, 1.0).add_(peak - peak)
    else:
        if warp.temperature != 1:
            z = z / warp.temperature
        for step in warp.order:
            z = _top_k(z, warp.top_k) if step == "top_k" else _top_p(z, warp.top_p)
        p = z.softmax(-1)
    if forced is not None:
        target = forced[..., None]
        p = torch.where(target < 0, p, (torch.arange(p.shape[-1], device=p.device) == target).to(p.dtype))
    return p


def draw(p: Tensor, noise: Tensor) -> Tensor:
    """[..., V] weights and exponentials -> [...] int64 argmax(p / E), -1 where p is NaN."""
    score, token = (p / noise).max(-1)
    return torch.where(score == score, token, -1)


def best(weights: Tensor, width: int) -> Tensor:
    """[..., V] weights >= 0 (overwritten) -> [..., width] int64, largest first, ties to the lowest id, NaN: -1."""
    tokens = []
    for _ in range(width):
        score, token = weights.max(-1, keepdim=True)
        tokens.append(torch.where(score == score, token, -1))
        weights.scatter_(-1, token, -1.0)
    return torch.cat(tokens, -1)


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
    p = probabilities(logits, warp, guidance, allowed, forced)
    if noise is None:
        assert positions is not None
        noise = philox.exponential(seeds, positions, p.shape[-1], purpose)
    if width == 1:
        tokens = draw(p, noise) if mark_undefined else (p / noise).argmax(-1)
    else:
        weights = p / noise
        if warp.temperature == 0:
            # One-hot mass orders only the first token; the others follow their logits.
            rest = combine(logits, guidance, allowed).softmax(-1).nan_to_num(0.0)
            weights = torch.where(p > 0, float("inf"), rest) + (p - p)
        tokens = best(weights, width)
        if not mark_undefined:
            tokens.clamp_(min=0)
    return Sampled(tokens, p if need_probs else None)
