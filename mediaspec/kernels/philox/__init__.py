"""Counter-based random numbers: Philox4x32-10 keyed by a row's seed and an absolute token position.

A number depends on (seed, position, purpose, sibling, token) alone: not on the batch, the rank, the round or the
order of calls. The layout, with every field a 32-bit word:

    key     = (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF)
    counter = (block, position, purpose, sibling)

`uniform` takes lane 0 of block 0. `exponential` gives token v lane v % 4 of block v // 4.

B rows, n positions, V vocabulary. Source of the generator: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as
easy as 1, 2, 3", SC 2011, section 3 (Philox-4x32, 10 rounds).
"""

from __future__ import annotations

from torch import Tensor

from ..backend import choose, launching_on
from . import reference

__all__ = ["ACCEPT", "DRAFT", "TARGET", "exponential", "uniform"]

TARGET = 0
"""Purpose of the emitted draw at a position: plain sampling, bonus and residual."""
DRAFT = 1
"""Purpose of a drafter's own draws."""
ACCEPT = 2
"""Purpose of the acceptance uniforms."""


def uniform(seeds: Tensor, positions: Tensor, purpose: int, sibling: int = 0, *, impl: str | None = None) -> Tensor:
    """Uniform numbers in [0, 1) with 24 random bits.

    Args:
        seeds: [B] int64, one per row, any value.
        positions: [B, n] int64 absolute token positions, >= 0.
        purpose: TARGET, DRAFT or ACCEPT.
        sibling: rank of a child among its siblings (trees), 0 otherwise.
        impl: see `mediaspec.kernels.backend`.

    Returns:
        [B, n] float32, bit-equal in both implementations.

    Example:
        >>> import torch
        >>> uniform(torch.tensor([0]), torch.tensor([[0]]), 0).shape
        torch.Size([1, 1])
    """
    if choose("philox.uniform", seeds, impl) == "triton":
        from .triton import uniform as run

        with launching_on(seeds):
            return run(seeds, positions, purpose, sibling)
    return reference.uniform(seeds, positions, purpose, sibling)


def exponential(seeds: Tensor, positions: Tensor, vocab_size: int, purpose: int, *, impl: str | None = None) -> Tensor:
    """Standard exponential numbers, one per token: argmax(p / E) is a draw from p (the Gumbel-max trick).

    Args:
        seeds: [B] int64.
        positions: [B, n] int64 absolute token positions, >= 0.
        vocab_size: V.
        purpose: TARGET or DRAFT.
        impl: see `mediaspec.kernels.backend`.

    Returns:
        [B, n, V] float32, strictly positive and finite: E = -log(u'), u' = ((bits >> 9) * 2 + 1) * 2^-24 in (0, 1).
    """
    if choose("philox.exponential", seeds, impl) == "triton":
        from .triton import exponential as run

        with launching_on(seeds):
            return run(seeds, positions, vocab_size, purpose)
    return reference.exponential(seeds, positions, vocab_size, purpose)
