"""What a LongSpec head's training pass attends to: its own window, and the target's cache as late as a draft sees it.

Letters: N positions of a sequence, n of them with a query, H query heads, Hkv key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["anchor_positions", "batched", "lagged_attention", "packed", "rotate_halves", "window_attention"]


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pairs (i, i + D / 2) of x [N, heads, D] by cos, sin [N, D / 2], as Llama-like models do."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def anchor_positions(count: int, offset: int, anchors: int = 4) -> list[int]:
    """Anchor-offset indices (arXiv:2502.17421, section 4.2): short texts that stand at large positions.

    The first tokens keep their positions because they are attention sinks; the others jump by one offset.

    Example:
        >>> anchor_positions(6, 100)
        [0, 1, 2, 3, 104, 105]
    """
    return [place + (offset if place >= anchors else 0) for place in range(count)]


def lagged_attention(queries: Tensor, keys: Tensor, values: Tensor, lag: int) -> Tensor:
    """Causal attention in which query i sees keys 0..i - lag: "flash noisy" (arXiv:2502.17421, section 4.3).

    Both sides are cut, so that the fast causal kernel serves and no mask is made where all positions ask.

    Args:
        queries: [1, H, n, D], those of the last n of N positions.
        keys, values: [1, Hkv, N, D] the target's, one per position.
        lag: j >= 0; 1 is the root's lag in drafting (the newest token is not in the cache yet).

    Returns:
        [1, H, n, D], zero for the queries at positions 0..lag - 1, whose gradients are zero as well.
    """
    total = keys.shape[2]
    first = total - queries.shape[2]
    blind = max(lag - first, 0)
    if blind >= queries.shape[2]:
        return queries * 0.0
    keys, values = keys[:, :, : total - lag], values[:, :, : total - lag]
    return F.pad(_attend(queries[:, :, blind:], keys, values, first + blind - lag), (0, 0, blind, 0))


def window_attention(queries: Tensor, keys: Tensor, values: Tensor, positions: Tensor, window: int) -> Tensor:
    """Causal attention to keys less than `window` positions back; shapes as in `lagged_attention`, positions [N]."""
    first = keys.shape[2] - queries.shape[2]
    if int(positions[-1] - positions[0]) < window:
        return _attend(queries, keys, values, first)
    age = positions[first:, None] - positions
    return _attend(queries, keys, values, first, (age >= 0) & (age < window))


def _attend(queries: Tensor, keys: Tensor, values: Tensor, first: int, mask: Tensor | None = None) -> Tensor:
    """Attention of n queries to N keys; without a mask query i sees keys 0..first + i."""
    group, plain = queries.shape[1] // keys.shape[1], mask is None and first == 0
    if mask is None and not plain:
        mask = torch.ones(queries.shape[2], keys.shape[2], dtype=torch.bool, device=keys.device).tril(first)
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    return F.scaled_dot_product_attention(queries, keys, values, mask, is_causal=plain)


def batched(queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[n, heads, D] each -> [1, heads, n, D]."""
    return queries.transpose(0, 1)[None], keys.transpose(0, 1)[None], values.transpose(0, 1)[None]


def packed(parts: Sequence[Tensor]) -> Tensor:
    """[1, H, n, D] of every sequence -> [all n, H * D]."""
    return torch.cat([part[0].transpose(0, 1) for part in parts]).flatten(1)
