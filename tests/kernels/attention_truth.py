"""Attention in float64 from its definition, with masks built one position at a time: what the kernels are held to."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from mediaspec.kernels.sparse_attention.cases import Case as SparseCase
from mediaspec.kernels.tree_attention.cases import Case as TreeCase

ORACLE = json.loads((Path(__file__).parents[1] / "data" / "attention_kernel_cases.json").read_text())
"""Float64 values of the project's oracle for trees, merges and sparse key sets."""


def numbers(values: list[object]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def tree_truth(case: TreeCase) -> tuple[Tensor, Tensor]:
    """([B, H, M, D] output, [B, H, M] log-sum-exp) of a `tree_attention` case."""
    batch, heads, count, _ = case.queries.shape
    seen = torch.zeros(batch, heads, count, case.keys.shape[2], dtype=torch.bool)
    for b, n in enumerate(case.lengths.tolist()):
        depths = list(range(count)) if case.depths is None else case.depths[b % len(case.depths)].tolist()
        position = torch.cat([torch.arange(n), n + torch.tensor(depths)])
        words = None if case.words is None else case.words[b % len(case.words)].tolist()
        for i in range(count):
            row = torch.zeros(n + count, dtype=torch.bool)
            row[:n] = True if case.hidden is None else ~case.hidden[b, :n].cpu()
            for j in range(count):
                row[n + j] = j <= i if words is None else j == i or words[i][j // 64] >> (j % 64) & 1
            if case.window is not None:
                row &= position[n + i] - position < case.window
            seen[b, :, i, : n + count] = row
    return _attend(case, seen)


def sparse_truth(case: SparseCase) -> tuple[Tensor, Tensor]:
    """([B, H, M, D] output, [B, H, M] log-sum-exp) of a `sparse_attention` case."""
    batch, heads, count, _ = case.queries.shape
    group = heads // case.keys.shape[1]
    seen = torch.zeros(batch, heads, count, case.keys.shape[2], dtype=torch.bool)
    for b, (n, newer) in enumerate(zip(case.lengths.tolist(), case.newer.tolist())):
        newer = min(newer, n)
        for h in range(heads):
            listed = [j for j in case.index[b, h // group].tolist() if 0 <= j < newer]
            for i in range(count):
                visible = listed + list(range(newer, n + i + 1))
                if case.window is not None:
                    visible = [j for j in visible if n + i - j < case.window]
                seen[b, h, i, visible] = True
    return _attend(case, seen)


def _attend(case: TreeCase | SparseCase, seen: Tensor) -> tuple[Tensor, Tensor]:
    group = case.queries.shape[1] // case.keys.shape[1]
    q, k, v = (value.cpu().double() for value in (case.queries, case.keys, case.values))
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    logits = q @ k.mT * (q.shape[-1] ** -0.5 if case.scale is None else case.scale)
    if case.softcap is not None:
        logits = case.softcap * torch.tanh(logits / case.softcap)
    logits = logits.masked_fill(~seen, -torch.inf)
    lse = logits.logsumexp(-1)
    if case.sinks is not None:
        lse = torch.logaddexp(lse, case.sinks.cpu().double()[:, None])
    return (logits - lse[..., None]).exp() @ v, lse


def close(found: Tensor, wanted: Tensor, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(found.cpu().double(), wanted.cpu().double(), atol=tolerance, rtol=tolerance)
