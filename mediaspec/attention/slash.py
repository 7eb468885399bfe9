"""Slash scores: how much attention a head gives to a fixed distance, arXiv:2601.08297, eq. (1).

    S(d) = mean over queries i >= d of A[i, i - d]

On a strip of the last w queries every distance d <= n - w has exactly w samples; over a whole matrix the long
diagonals have few, and one strong entry (a sink's) looks like a slash.

Letters: B rows, H query heads, n keys, w strip rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .logits import strip_positions
from .strip import StripSums

__all__ = ["slash_dominant", "slash_samples", "slash_scores"]


def slash_samples(sums: StripSums) -> Tensor:
    """[B, n] int64, how many strip rows have a key at every distance."""
    distance = torch.arange(sums.offsets.shape[2], device=sums.offsets.device)
    return torch.minimum(sums.rows[:, None], sums.lengths[:, None] - distance).clamp(min=0)


def slash_scores(sums: StripSums, without_sinks: bool = True) -> Tensor:
    """[B, H, n] slash score of every distance.

    Args:
        without_sinks: leave out the mass of the first four keys, which are columns and no diagonals.
    """
    offsets = sums.offsets
    if without_sinks:
        at = strip_positions(sums.lengths, sums.lse.shape[2])
        first = torch.arange(sums.leading.shape[3], device=at.device)
        distance = at[:, :, None] - first
        here = (distance >= 0)[:, None]
        index = distance.clamp(min=0)[:, None].expand_as(sums.leading).flatten(2)
        offsets = offsets.scatter_add(2, index, -(sums.leading * here).flatten(2)).clamp(min=0)
    samples = slash_samples(sums)[:, None]
    return torch.where(samples > 0, offsets / samples.clamp(min=1), 0.0)


def slash_dominant(
    scores: Tensor, samples: Tensor, kappa: float = 0.1, min_samples: int = 64
) -> list[list[tuple[int, float]]]:
    """Distances at which a head is slash-dominant, S(d) >= kappa, strongest first.

    Args:
        scores: [H, n] of one row; samples: [n].
        kappa: 0.1 to report, 0.2 to build patterns from.
        min_samples: distances with fewer strip rows are left out.

    Returns:
        Per head, (distance, score) pairs.

    Example:
        >>> slash_dominant(torch.tensor([[0.1, 0.7, 0.2]]), torch.tensor([64, 64, 3]))
        [[(1, 0.7), (0, 0.1)]]
    """
    usable = torch.where(samples >= min_samples, scores, -1.0)
    order = usable.argsort(dim=1, descending=True, stable=True)[:, : int((usable >= kappa).sum(1).max())]
    return [
        [(d, round(float(usable[head, d]), 6)) for d in row.tolist() if float(usable[head, d]) >= kappa]
        for head, row in enumerate(order)
    ]
