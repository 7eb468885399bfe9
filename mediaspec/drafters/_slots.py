"""Where a head with keys and values of its own writes its drafts: behind the committed slots, whose lengths stay."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..core.kv import KVStore, Slots, shared_length
from ._levels import Level

__all__ = ["chain_slots", "level_slots"]


def chain_slots(store: KVStore, count: int) -> list[Slots]:
    """The `count` slots behind the committed ones, one per row and draft step; a step sees the earlier ones."""
    longest, aligned = max(store.host_lengths), shared_length(store.host_lengths) is not None
    order = torch.arange(count, device=store.lengths.device)
    positions = (store.lengths[:, None] + order).split(1, 1) if count else ()
    if aligned:
        return [Slots(longest + i, None, where, longest + i + 1, None) for i, where in enumerate(positions)]
    closed = torch.arange(longest + count, device=order.device) > store.lengths[:, None] + order[:, None, None]
    mask = torch.zeros(closed.shape, dtype=store.keys.dtype, device=order.device).masked_fill_(closed, float("-inf"))
    return [
        Slots(None, where[:, None, :, None], where, longest + i + 1, mask[i, :, None, None, : longest + i + 1])
        for i, where in enumerate(positions)
    ]


def level_slots(store: KVStore, level: Level, depth: int) -> Slots:
    """Slots of one tree level: inner nodes lie one after another behind the committed ones and see their ancestors."""
    longest, count = max(store.host_lengths), level.ancestors.shape[0]
    inside = level.first + count
    positions = (store.lengths + depth)[:, None].expand(-1, count)
    closed = ~level.ancestors
    if shared_length(store.host_lengths) is not None:
        mask = torch.zeros(closed.shape, dtype=store.keys.dtype, device=closed.device)
        mask = F.pad(mask.masked_fill_(closed, float("-inf")), (longest, 0))
        return Slots(longest + level.first, None, positions, longest + inside, mask[None, None])
    offset = torch.arange(longest + inside, device=closed.device) - store.lengths[:, None]
    inner = offset.clamp(0, inside - 1)
    hidden = (offset >= inside)[:, None] | ((offset >= 0)[:, None] & closed[:, inner].transpose(0, 1))
    mask = torch.zeros(hidden.shape, dtype=store.keys.dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
    index = store.lengths[:, None] + level.first + torch.arange(count, device=closed.device)
    return Slots(None, index[:, None, :, None], positions, longest + inside, mask[:, None])
