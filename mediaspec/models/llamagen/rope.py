"""The 2-D rotary embedding of LlamaGen (arXiv:2406.06525, section 2.2).

Letters: C condition positions, S = grid * grid image positions, D head size.

A head's D/2 pairs are the interleaved elements (2i, 2i + 1). The first half of the pairs turns with the row of an
image position, the second half with its column. The published models' condition positions carry cos = sin = 0, which
is not the identity rotation: their queries and keys vanish, every attention logit from or to them is 0, and what
remains of the prefix is an evenly weighted mean of its values. "identity" leaves the condition unturned instead, so
that image tokens can look words up.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rope_2d(
    grid: int, head_dim: int, base: float, prefix: int, prefix_rotation: str = "zero"
) -> tuple[Tensor, Tensor]:
    """Rotary tables for a condition prefix followed by a square image grid in raster order.

    Args:
        grid: image positions along one side.
        head_dim: D, a multiple of 4.
        base: frequency base; pair i of an axis turns by ``base ** (-4 * i / D)`` radians per position.
        prefix: C, the condition positions in front.
        prefix_rotation: their rotation: "zero" (cos = sin = 0, as published) or "identity" (cos = 1, sin = 0).

    Returns:
        ``(cos, sin)``, each [C + S, D / 2] fp32.
    """
    half = head_dim // 2
    inv_freq = 1.0 / (base ** (torch.arange(0, half, 2).float() / half))
    angles = torch.outer(torch.arange(grid), inv_freq)  # [grid, D / 4]
    rows = angles[:, None, :].expand(-1, grid, -1)
    columns = angles[None, :, :].expand(grid, -1, -1)
    table = torch.cat([rows, columns], dim=-1).flatten(0, 1)
    zeros = torch.zeros(prefix, half)
    return torch.cat([zeros + float(prefix_rotation == "identity"), table.cos()]), torch.cat([zeros, table.sin()])


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs of every head, in fp32.

    Args:
        x: [B, N, H, D] queries or keys, any float dtype (the result has the same).
        cos: [N, D / 2], or [B, N, D / 2] where the rows stand at different positions.
        sin: as ``cos``.
    """
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # one table for all heads
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2).type_as(x)
