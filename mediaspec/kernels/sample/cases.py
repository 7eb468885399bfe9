"""Inputs that the tests and the benchmark of the sampling kernel share. Every case is a function of its seed alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import Warp

__all__ = ["Case", "cases", "make_logits"]


@dataclass(frozen=True)
class Case:
    """Arguments of one call of `sample`, under a name."""

    name: str
    logits: Tensor
    warp: Warp
    seeds: Tensor
    positions: Tensor
    guidance: Tensor | None = None
    allowed: Tensor | None = None
    forced: Tensor | None = None
    noise: Tensor | None = None
    width: int = 1


def make_logits(
    generator: torch.Generator, batch: int, branches: int, rows: int, vocab: int, spread: float = 2.0
) -> Tensor:
    """[B, G, N, V] float32 normal logits; with two branches they share most of their signal, as guided models do."""
    shared = torch.randn(batch, 1, rows, vocab, generator=generator)
    own = torch.randn(batch, branches, rows, vocab, generator=generator)
    return spread * (0.9 * shared + 0.4 * own)


def cases(vocab: int, batch: int = 2, rows: int = 2, device: str = "cpu", seed: int = 0) -> list[Case]:
    """The cases at one vocabulary size: every switch alone, the usual ones together, and degenerate rows."""
    g = torch.Generator().manual_seed(seed)
    plain = make_logits(g, batch, 1, rows, vocab)
    guided = make_logits(g, batch, 2, rows, vocab)
    tied = plain.mul(2).round().div(2)
    seeds = torch.arange(batch, dtype=torch.int64) * 7919 - 3
    positions = torch.arange(rows)[None] + torch.arange(batch)[:, None] * 11
    guidance = torch.linspace(0.25, 7.5, batch)
    allowed = torch.rand(vocab, generator=g) < 0.6
    allowed[vocab // 2] = True
    forced = torch.full((batch, rows), -1)
    forced[0, -1] = vocab - 1
    k = max(1, vocab // 3)
    broken = plain.clone()
    broken[0, 0, 0, vocab // 2] = float("nan")
    if batch > 1:
        broken[1, 0, 0, 0] = float("inf")
        broken[1, 0, -1] = float("-inf")
    noise = torch.empty(batch, rows, vocab).exponential_(generator=g)
    both = Warp(temperature=1.3, top_k=k, top_p=0.8)
    found = [
        Case("plain", plain, Warp(), seeds, positions),
        Case("noise", plain, Warp(), seeds, positions, noise=noise),
        Case("temperature", plain, Warp(temperature=0.7), seeds, positions),
        Case("greedy", tied, Warp(temperature=0.0), seeds, positions),
        Case("greedy-width", plain, Warp(temperature=0.0), seeds, positions, width=min(3, vocab)),
        Case("top-k", plain, Warp(top_k=k), seeds, positions),
        Case("top-1", plain, Warp(top_k=1), seeds, positions),
        Case("top-k-off", plain, Warp(top_k=vocab), seeds, positions),
        Case("top-k-ties", tied, Warp(top_k=k), seeds, positions),
        Case("top-p", plain, Warp(top_p=0.7), seeds, positions),
        Case("top-k-top-p", plain, both, seeds, positions),
        Case("top-p-top-k", plain, Warp(top_k=k, top_p=0.8, order=("top_p", "top_k")), seeds, positions),
        Case("guided", guided, Warp(), seeds, positions, guidance=guidance),
        Case("allowed", plain, Warp(top_k=k), seeds, positions, allowed=allowed),
        Case("forced", plain, Warp(), seeds, positions, forced=forced),
        Case("all", guided, both, seeds, positions, guidance, allowed, forced, noise),
        Case("width", plain, Warp(), seeds, positions, width=min(4, vocab)),
        Case("width-exhausted", plain, Warp(top_k=2), seeds, positions, width=min(4, vocab)),
        Case("broken", broken, Warp(), seeds, positions),
        Case("broken-top-k", broken, Warp(top_k=k), seeds, positions),
        Case("broken-top-p", broken, Warp(top_p=0.5), seeds, positions),
        Case("broken-greedy", broken, Warp(temperature=0.0), seeds, positions),
        Case("broken-forced", broken, Warp(), seeds, positions, forced=torch.zeros_like(forced)),
    ]
    return [_to(case, device) for case in found]


def _to(case: Case, device: str) -> Case:
    moved = {name: value.to(device) for name, value in vars(case).items() if isinstance(value, Tensor)}
    return replace(case, **moved)  # type: ignore[arg-type]
