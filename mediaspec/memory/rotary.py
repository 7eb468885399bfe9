"""Rotary phases of merged tokens.

A token that stands for a block of cells can take the average of the cells' cosines and sines ("mean", what FramePack
and Helios were trained with) or the phase of the block's centre ("centre"). For k neighbours the average is the centre
phase times

    sin(k theta / 2) / (k sin(theta / 2))

which is small or negative at high frequencies (k = 4, theta = 2: -0.22) and turns signs around there.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .base import MemoryTokens

__all__ = ["block_rope", "merged_phase"]

Rope = Literal["mean", "centre"]


def merged_phase(centre: Tensor, count: Tensor, frequencies: Tensor, rope: Rope = "centre") -> tuple[Tensor, Tensor]:
    """Cosine and sine of `count` neighbouring positions merged around `centre`.

    Args:
        centre: [...] positions; count: [...] whole numbers, neighbours lie 1 apart.
        frequencies: [F] radians per position.
        rope: "mean" or "centre".

    Returns:
        Two [..., F] tensors in the dtype of `frequencies`.

    Example:
        >>> cos, sin = merged_phase(torch.tensor(0.5), torch.tensor(2), torch.tensor([1.0]), "mean")
        >>> round(cos.item(), 4), round(sin.item(), 4)
        (0.7702, 0.4207)
    """
    if rope not in ("mean", "centre"):
        raise ValueError(f"rope={rope!r}; allowed are 'mean' (trained that way) and 'centre'")
    angle = centre.to(frequencies.dtype)[..., None] * frequencies
    cos, sin = torch.cos(angle), torch.sin(angle)
    if rope == "centre":
        return cos, sin
    count = count.to(frequencies.dtype)[..., None]
    below = torch.sin(frequencies / 2)
    flat = below.abs() < 1e-6  # theta a multiple of 2 pi: all phases are equal
    shrink = torch.where(flat, 1.0, torch.sin(count * frequencies / 2) / (count * torch.where(flat, 1.0, below)))
    return cos * shrink, sin * shrink


def block_rope(
    tokens: MemoryTokens, frequencies: tuple[Tensor, Tensor, Tensor], rope: Rope = "centre"
) -> tuple[Tensor, Tensor]:
    """Rotary cosines and sines of memory tokens along time, rows and columns.

    Args:
        tokens: of a memory; times with gaps are averaged as they are.
        frequencies: radians per frame [F_t], per row [F_h] and per column [F_w] of base patches.
        rope: "mean" or "centre".

    Returns:
        Two [B, L, F_t + F_h + F_w] tensors.
    """
    of_time, of_rows, of_columns = frequencies
    times = tokens.times.to(of_time.dtype)
    if rope == "mean":
        angle = times[..., None] * of_time
        time = torch.cos(angle).nanmean(-2), torch.sin(angle).nanmean(-2)
    else:
        time = merged_phase(tokens.positions[..., 0], torch.ones_like(tokens.positions[..., 0]), of_time, rope)
    rows = merged_phase(tokens.positions[..., 1], tokens.spans[:, 0], of_rows, rope)
    columns = merged_phase(tokens.positions[..., 2], tokens.spans[:, 1], of_columns, rope)
    return torch.cat([time[0], rows[0], columns[0]], -1), torch.cat([time[1], rows[1], columns[1]], -1)
