"""What streaming would change in a layer's output: the second way to judge a layer, besides its lazy ratio.

The lazy ratio counts attention on the first tokens like any other, yet their values are next to nothing: a layer can
look lazy because most of its attention rests there, and still owe its whole output to the rest. This file takes the
outputs themselves, of all keys and of the kept ones renormalised,

    e = mean over the last w queries of  |W (o_all - o_kept)| / |residual|

with the layer's output matrix W and the stream it is added to where the model shows them (`LayerSight`), else the
heads' outputs side by side and |o_all|. SmolLM2-135M, 4,096 tokens, half the layers lazy with 508 recent keys: the KL
divergence of the next 256 tokens' laws is 0.013 to 0.052 nats on three texts, and 0.11 to 1.3 when chosen by ratio.

Letters: B rows, H query heads, Hkv key heads, w judging queries, C slots, K kept keys, D head size, M model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .logits import LogitForm, strip_positions

__all__ = ["LayerSight", "output_error", "strip_output"]


@dataclass(frozen=True)
class LayerSight:
    """A layer while it runs.

    Args:
        residual: [B, N, M] the stream its attention is added to, at the pass's positions.
        project: [..., H * D] heads side by side -> [..., M] what is added.
    """

    residual: Tensor
    project: Callable[[Tensor], Tensor]


def strip_output(
    queries: Tensor, keys: Tensor, values: Tensor, at: Tensor, lse: Tensor, lengths: Tensor, form: LogitForm, tile: int
) -> Tensor:
    """Attention outputs [B, H, w, D] float32 of the last w queries, tile by tile.

    Args:
        queries: [B, H, w, D]; keys, values: [B, Hkv, C, D].
        at: [B or 1, C] int64 positions of the keys.
        lse: [B, H, w] row sums over these keys.
        lengths: [B] int64; form: of the logits.
        tile: keys per step.
    """
    rows, heads, count, size = queries.shape
    own, query_at = keys.shape[1], strip_positions(lengths, queries.shape[2])
    out = queries.new_zeros(rows, own, heads // own * count, size, dtype=torch.float32)
    for start in range(0, keys.shape[2], tile):
        part = slice(start, start + tile)
        logits = form.tile(queries, keys[:, :, part], query_at, at[:, None, part])
        law = (logits - lse[..., None]).exp().reshape(rows, own, -1, logits.shape[3])
        out = out + law @ values[:, :, part].float()
    return out.view(rows, heads, count, size)


def output_error(
    full: Tensor, kept: Tensor, lengths: Tensor, sight: LayerSight | None = None, residual: Tensor | None = None
) -> Tensor:
    """Mean relative change of a layer's output.

    Args:
        full, kept: [B, H, w, D] outputs over all and over the kept keys.
        lengths: [B] int64; queries before position 0 do not count.
        sight: gives the output matrix; None compares the heads' outputs with themselves.
        residual: [B, w, M] the stream at the queries' positions; needed with `sight`.

    Returns:
        [B] float32.

    Example:
        >>> one = torch.ones(1, 2, 3, 4)
        >>> output_error(one, 0.75 * one, torch.tensor([9])).tolist()
        [0.25]
    """
    there = strip_positions(lengths, full.shape[2]) >= 0
    one, other = (part.transpose(1, 2).flatten(2) for part in (full, kept))
    if sight is None or residual is None:
        change, scale = one - other, one
    else:
        dtype = residual.dtype
        change = sight.project(one.to(dtype)).float() - sight.project(other.to(dtype)).float()
        scale = residual.float()
    share = change.norm(dim=-1) / scale.norm(dim=-1).clamp(min=1e-12)
    return share.masked_fill(~there, 0.0).sum(1) / there.sum(1)
