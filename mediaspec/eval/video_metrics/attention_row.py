"""Diagnostics of temporal attention: how much a frame reads itself, and how jerky neighbouring rows are.

For independent values of unit variance the output of row i moves by E|O_{i+1} - O_i|^2 = D |A_{i+1} - A_i|^2, so the
squared difference of neighbouring rows tells flicker without looking at a picture.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["AttentionDiagnosis", "diagnose_attention"]


@dataclass(frozen=True)
class AttentionDiagnosis:
    """What one or many temporal attention matrices look like.

    Args:
        diagonal: mean weight of a frame on itself; 1/N where nothing prefers itself.
        row_step: mean of |A_{i+1} - A_i|^2 over neighbouring rows.
        rho_histogram: share of the rows whose motion intensity falls into each of ten equal bins of 0..1; empty where
            no intensities were given.
    """

    diagonal: float
    row_step: float
    rho_histogram: tuple[float, ...]


def diagnose_attention(weights: Tensor, rho: Tensor | None = None) -> AttentionDiagnosis:
    """Summarises temporal attention.

    Args:
        weights: [.., N, N] float, rows sum to 1.
        rho: [.., N] motion intensity of the rows, in 0..1.

    Raises:
        ValueError: not square, fewer than two frames, or rows that do not sum to 1.

    Example: `diagnose_attention(torch.eye(4)).diagonal` is 1.0.
    """
    if weights.ndim < 2 or weights.shape[-1] != weights.shape[-2] or weights.shape[-1] < 2:
        raise ValueError(f"attention weights are {tuple(weights.shape)}; give [.., N, N] with N >= 2 frames")
    weights = weights.double()
    if not torch.allclose(weights.sum(-1), torch.ones((), dtype=torch.float64), atol=1e-3):
        raise ValueError("rows of the attention weights do not sum to 1; give them after the softmax")
    step = (weights[..., 1:, :] - weights[..., :-1, :]).square().sum(-1).mean()
    histogram: tuple[float, ...] = ()
    if rho is not None:
        counts = torch.histc(rho.float().clamp(0, 1), bins=10, min=0, max=1)
        histogram = tuple((counts / counts.sum()).tolist())
    return AttentionDiagnosis(float(weights.diagonal(dim1=-2, dim2=-1).mean()), float(step), histogram)
