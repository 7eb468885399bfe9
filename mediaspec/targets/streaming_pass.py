"""Attention over a `StreamingStore`: full layers as always, lazy ones over their ring, prefills in blocks of queries.

Letters: R rows, N positions, H query heads, G query heads per key head, Hkv key heads, K keys, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..attention.logits import LogitForm
from ..attention.streaming import StreamingSlots, StreamingStore
from ..core.kv import KVStore, Slots
from .kv_attention import KVPass, attention, grouped

__all__ = ["StreamingPass"]

BLOCK = 512  # queries per attention call of a prefill: a mask of 16 MB at 8k keys in float32


class StreamingPass(KVPass):
    """`KVPass` over a `StreamingStore`; what `watch` is shown are the full layers alone."""

    store: StreamingStore
    slots: StreamingSlots

    def __init__(self, store: KVStore, slots: Slots, *more: Any) -> None:
        assert isinstance(store, StreamingStore)
        super().__init__(store, slots, *more)
        self.group = store.full

    def _place(self, layer: int) -> int:
        return self.store.full.place[layer]

    def attend(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        store = self.store
        if store.filling:
            seen = self._fill(layer, queries, keys, values, scaling, window, softcap, sinks)
            store.judge(layer, queries, LogitForm(scaling, softcap, window, sinks))
            return seen
        if layer not in store.lazy.place:
            return super().attend(layer, queries, keys, values, scaling, window, softcap, sinks)
        ring = self.slots.ring
        assert ring is not None
        if softcap is None and sinks is None:
            rows = self._rows("lazy", store.lazy, ring, queries)
            if rows is not None:
                return grouped(rows, store.lazy.place[layer], queries * scaling, keys.shape[1])
        return attention(queries, keys, values, ring.mask, scaling, softcap, sinks)

    def _fill(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Prefill attention, a block of queries at a time; a layer cut in an earlier chunk sees its ring in front."""
        store, count = self.store, queries.shape[2]
        first = self.slots.start
        assert first is not None
        cut = layer in store.lazy.place
        at = store.filled(count) if cut else torch.arange(first + count, device=keys.device)[None]
        out = []
        for low in range(0, count, BLOCK):
            high = min(low + BLOCK, count)
            stop = at.shape[1] - count + high
            begin = 0 if window is None or cut else max(0, first + low - window + 1)
            here = at[:, None, begin:stop]
            query = torch.arange(first + low, first + high, device=at.device)[:, None]
            visible = here <= query
            if cut:
                ring = store.ring
                visible = visible & (here >= 0) & ((here > query - ring.recent) | (here < ring.sink))
            elif window is not None:
                visible = visible & (here > query - window)
            mask = torch.zeros(visible.shape, dtype=queries.dtype, device=at.device)
            mask = mask.masked_fill_(~visible, float("-inf"))[:, None]
            part = slice(begin, stop)
            out.append(
                attention(queries[:, :, low:high], keys[:, :, part], values[:, :, part], mask, scaling, softcap, sinks)
            )
        return out[0] if len(out) == 1 else torch.cat(out, 1)
