"""Noise of a rollout: every room has generators of its own, so that a room's noise is the same in any batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .worlds import Episode

__all__ = ["normal_rows", "room_noise"]


def room_noise(seed: int, episode: Episode, start: int) -> torch.Generator:
    """The noise of the chunk that begins at frame `start` of a room, whatever memory makes it."""
    return torch.Generator().manual_seed(((seed * 1_000_003 + episode.seed) * 4099 + start) % 2**63)


def normal_rows(shape: Sequence[int], generator: torch.Generator | Sequence[torch.Generator]) -> Tensor:
    """Normal noise [B, ...] float32: all of it from one generator, or row i from generator i.

    Args:
        shape: (B, ...).
        generator: one, or one per row; a row then gets what it would get alone.

    Raises:
        ValueError: another number of generators than rows.

    Example:
        >>> pair = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
        >>> both = normal_rows((2, 4, 8), pair)
        >>> torch.equal(both[1:], normal_rows((1, 4, 8), torch.Generator().manual_seed(2)))
        True
    """
    if isinstance(generator, torch.Generator):
        return torch.randn(*shape, generator=generator)
    if len(generator) != shape[0]:
        raise ValueError(f"{len(generator)} generators for {shape[0]} rows; give one for all, or one per row")
    return torch.cat([torch.randn(1, *shape[1:], generator=one) for one in generator])
