"""Attention over chosen keys: what a draft pass reads while a restriction is open, and nothing else of the store.

Committed keys outside the choice are not touched, so a pass costs what it reads. A window of rows that stand alike is
two slices of the store; other choices are gathered once per round and layer.

Letters: R rows, N positions, H query heads, G query heads per key head, Hkv key heads, K keys, D head size.
"""

from __future__ import annotations

from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor

from ..attention.restriction import Restriction, Window
from ..core.kv import KVStore, Slots, shared_length

__all__ = ["Part", "RestrictedKeys", "RestrictedPass", "joined", "parted_attention"]

Part: TypeAlias = "tuple[Tensor, Tensor, Tensor | None]"
"""Keys and values [R, Hkv, K, D] and their additive mask [R or 1, Hkv or 1, N or 1, K]."""


class RestrictedKeys:
    """The keys of one round; what is committed at its start is chosen, what comes behind is always seen.

    Args:
        store: its lengths are where the round starts.
        restriction: is asked once per layer.

    Raises:
        ValueError: a store that keeps no full keys, or one with hidden slots.
    """

    def __init__(self, store: KVStore, restriction: Restriction) -> None:
        if type(store) is not KVStore or store.hidden_slots is not None:
            raise ValueError(
                "a restriction needs a store with all keys and no hidden slots; where a lossy attention policy is "
                "enabled on the model, call handle.remove() first"
            )
        self.store, self.restriction = store, restriction
        self.start, self.host_start = store.lengths, list(store.host_lengths)
        self.first = shared_length(self.host_start)
        self._asked: dict[int, Window | Part | None] = {}

    def committed(self, layer: int) -> Window | Part | None:
        """The layer's choice: a window to slice or mask, gathered keys, or None for everything."""
        if layer not in self._asked:
            chosen = self.restriction.visible(layer)
            if isinstance(chosen, Window):
                chosen = self._window(chosen)
            self._asked[layer] = self._gather(layer, chosen) if isinstance(chosen, Tensor) else chosen
        return self._asked[layer]

    def rows_of(self, layer: int, at: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [R, Hkv, K, D] at slots `at` [R, Hkv or 1, K] int64."""
        keys, values = self.store.layer(layer)
        rows, heads, capacity, size = keys.shape
        order = torch.arange(rows * heads, device=at.device).view(rows, heads, 1) * capacity
        flat = (order + at).flatten()
        shape = (rows, heads, at.shape[2], size)
        return keys.reshape(-1, size)[flat].view(shape), values.reshape(-1, size)[flat].view(shape)

    def _window(self, window: Window) -> Window | Tensor | None:
        """None where nothing is left out; positions where rows of different lengths need their own slices."""
        if window.sink + window.recent >= max(self.host_start) or (window.rows is not None and not any(window.rows)):
            return None
        if window.rows is not None and not all(window.rows):
            return window
        if self.first is not None:
            return Window(window.sink, window.recent)
        device = self.start.device
        sink = torch.arange(window.sink, device=device).expand(len(self.start), -1)
        recent = self.start[:, None] - window.recent + torch.arange(window.recent, device=device)
        recent = recent.masked_fill(recent < window.sink, -1)
        return torch.cat([sink.masked_fill(sink >= self.start[:, None], -1), recent], 1)[:, None]

    def _gather(self, layer: int, at: Tensor) -> Part:
        rows, heads = self.store.rows, self.store.heads
        if at.dim() != 3 or len(at) != rows or at.shape[1] not in (1, heads) or at.dtype != torch.int64:
            raise ValueError(
                f"layer {layer}: visible keys are {at.dtype} of shape {list(at.shape)}; give int64 [{rows}, {heads} "
                f"or 1, K] positions, -1 where a row has fewer"
            )
        keys, values = self.rows_of(layer, at.clamp(min=0))
        missing = at < 0
        if at.device.type == "cpu" and not bool(missing.any()):
            return keys, values, None
        mask = torch.zeros(at.shape, dtype=keys.dtype, device=at.device).masked_fill_(missing, float("-inf"))
        return keys, values, mask[:, :, None]


class RestrictedPass:
    """One pass under a restriction.

    Args:
        keys: the round's; slots: of this pass, from `store.plan`.
    """

    def __init__(self, keys: RestrictedKeys, slots: Slots) -> None:
        self.keys, self.slots = keys, slots

    def parts(self, layer: int, keys: Tensor, values: Tensor) -> list[Part] | None:
        """What the layer reads of its live keys and values [R, Hkv, live, D]; None: everything."""
        chosen = self.keys.committed(layer)
        if chosen is None:
            return None
        if not isinstance(chosen, Window):
            return [chosen, self._new(layer, keys, values)]
        if chosen.rows is not None:
            return [(keys, values, self._masked(chosen))]
        first = self.keys.first
        assert first is not None
        low = first - chosen.recent  # beyond the sink, else `committed` had found nothing to leave out
        return [
            (keys[:, :, a:b], values[:, :, a:b], None if self.slots.mask is None else self.slots.mask[..., a:b])
            for a, b in ((0, chosen.sink), (low, self.slots.live))
            if a < b
        ]

    def _new(self, layer: int, keys: Tensor, values: Tensor) -> Part:
        """Keys behind the round's start."""
        first = self.keys.first
        if first is not None and self.slots.start is not None:
            mask = self.slots.mask
            return keys[:, :, first:], values[:, :, first:], None if mask is None else mask[..., first:]
        at, mask = self._behind
        return (*self.keys.rows_of(layer, at[:, None]), mask)

    @cached_property
    def _behind(self) -> tuple[Tensor, Tensor]:
        """Slots [R, n] behind the start of rows of different lengths, and the pass's mask there."""
        round_, slots = self.keys, self.slots
        count = slots.positions.shape[1]
        grown = max(now - was for now, was in zip(round_.store.host_lengths, round_.host_start, strict=True))
        at = round_.start[:, None] + torch.arange(grown + count, device=round_.start.device)
        beyond = at >= slots.live
        at = at.clamp(max=slots.live - 1)
        assert slots.mask is not None
        mask = slots.mask.expand(len(at), -1, -1, -1).gather(3, at[:, None, None].expand(-1, -1, count, -1))
        return at, mask.masked_fill(beyond[:, None, None], float("-inf"))

    def _masked(self, window: Window) -> Tensor:
        """[R, 1, N, live]: the pass's mask with the committed keys outside the window taken out of some rows."""
        start, slots = self.keys.start[:, None], self.slots
        at = torch.arange(slots.live, device=start.device)
        inside = (at < window.sink) | (at >= start - window.recent)
        some = torch.tensor(window.rows, device=start.device)
        closed = (~inside & some[:, None])[:, None, None]
        mask = slots.mask
        if mask is None:
            mask = torch.zeros((), dtype=self.keys.store.dtype, device=start.device)
        shape = (len(start), 1, slots.positions.shape[1], slots.live)
        return torch.where(closed, float("-inf"), mask).expand(shape)


def joined(parts: list[Part], group: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Parts as one: keys, values and a mask that broadcasts over H = Hkv * `group` query heads."""
    keys = torch.cat([part[0] for part in parts], 2)
    values = torch.cat([part[1] for part in parts], 2)
    if all(mask is None for *_, mask in parts):
        return keys, values, None
    masks = [key.new_zeros(1, 1, 1, key.shape[2]) if mask is None else mask for key, _, mask in parts]
    lead = torch.broadcast_shapes(*(mask.shape[:3] for mask in masks))
    mask = torch.cat([mask.expand(*lead, -1) for mask in masks], 3)
    return keys, values, mask.repeat_interleave(group, 1) if mask.shape[1] > 1 else mask


def parted_attention(queries: Tensor, parts: list[Part], scaling: float) -> Tensor:
    """Softmax attention over several parts without joining their keys; for a CPU, where a copy costs as much.

    Args:
        queries: [R, H, N, D], float32.
        parts: what is seen.
        scaling: factor on the products.

    Returns:
        [R, N, H, D].
    """
    rows, heads, count, size = queries.shape
    own = parts[0][0].shape[1]
    group = heads // own
    flat = (queries * scaling).reshape(rows * own, group * count, size)
    scores = []
    for keys, _, mask in parts:
        turned = keys.flatten(0, 1).transpose(1, 2)
        if mask is None:
            scores.append(torch.bmm(flat, turned))
            continue
        wide = mask.expand(rows, own, count, -1).repeat(1, 1, group, 1)
        scores.append(torch.baddbmm(wide.flatten(0, 1), flat, turned))
    law = torch.cat(scores, 2).softmax(-1)
    out: Tensor | None = None
    for weights, (_, values, _) in zip(law.split([keys.shape[2] for keys, *_ in parts], 2), parts):
        part = values.flatten(0, 1)
        out = torch.bmm(weights, part) if out is None else out.baddbmm_(weights, part)
    assert out is not None
    return out.view(rows, heads, count, size).transpose(1, 2)
