"""Classifier-free guidance as pairs of target rows that share one draft, one verdict and one rollback.

A batch of B rows with G branches occupies R = B * G target rows, the branch varying fastest: rows 2b and 2b + 1 are
the conditional and the unconditional view of row b. The combination `u + s (c - u)` itself happens inside the kernels,
so guided logits are read once.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["expand_rows", "expand_index", "split_branches"]


def expand_rows(tokens: Tensor, branches: int) -> Tensor:
    """[B, N] -> [B * branches, N]: every branch of a row sees the same tokens."""
    if branches == 1:
        return tokens
    rows, count = tokens.shape
    return tokens[:, None, :].expand(rows, branches, count).reshape(rows * branches, count)


def expand_index(rows: Tensor, branches: int) -> Tensor:
    """Row indices [B] into B rows -> [B * branches] into their target rows."""
    if branches == 1:
        return rows
    return (rows[:, None] * branches + torch.arange(branches, device=rows.device)).reshape(-1)


def split_branches(logits: Tensor, branches: int) -> Tensor:
    """[B * G, N, V] -> [B, G, N, V], a view."""
    return logits.view(-1, branches, *logits.shape[1:])
