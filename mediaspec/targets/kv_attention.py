"""Attention of transformers models over a `KVStore`: the function behind `AttentionInterface` and the cache it reads.

A forward pass is given a `KVPass` as cache and once more as keyword `kv_pass`, which every model that supports
attention backends hands down to its attention function. Layers write into the store and attend to all live slots.

Letters: R rows, N positions, H query heads, G query heads per key head, D head size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache
from transformers.masking_utils import eager_mask

from ..attention.logits import LogitForm
from ..attention.restriction import Restriction, Visible, Watch, Window
from ..core.kv import KVStore, Slots
from ..models.row_attention import LayerSlots, RowAttention
from .restricted import Part, RestrictedPass, joined, parted_attention

__all__ = ["NAME", "KVPass", "Restriction", "Visible", "Watch", "Window"]

NAME = "mediaspec"
"""The name under which models find this attention: `model.set_attn_implementation(NAME)`."""


class KVPass(Cache):
    """One forward pass of N inputs over a store.

    Args:
        store: keys and values of all layers.
        slots: where the pass writes, from `store.plan`.
        key_positions: [R or 1, live] int64 sequence position of every live slot; needed where a layer has a window.
        restricted: which keys the pass reads, see `attention.restriction`; None: all.
        write: False only reads: what the pass computes is in the store already.
    """

    def __init__(
        self,
        store: KVStore,
        slots: Slots,
        key_positions: Tensor,
        restricted: RestrictedPass | None = None,
        write: bool = True,
    ) -> None:
        super().__init__(layers=[])
        self.store, self.slots, self.key_positions = store, slots, key_positions
        self.restricted, self.writes = restricted, write
        self.group: LayerSlots = store
        self.windows: dict[int, tuple[Slots, int]] = {}
        self.prepared: dict[int | str | None, RowAttention | None] = {}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.slots.live - self.slots.positions.shape[1]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        """Stores [R, H / G, N, D] keys and values of a layer; returns all live ones."""
        wanted = self.store.heads, self.store.head_dim
        if (key_states.shape[1], key_states.shape[3]) != wanted or value_states.shape != key_states.shape:
            raise ValueError(
                f"layer {layer_idx} has keys {list(key_states.shape)} and values {list(value_states.shape)}, the "
                f"store holds {wanted[0]} heads of size {wanted[1]}: models whose layers differ are not supported"
            )
        if not self.writes:
            keys, values = self.store.layer(layer_idx)
            return keys[:, :, : self.slots.live], values[:, :, : self.slots.live]
        return self.store.write(layer_idx, self.slots, key_states, value_states)

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
        """[R, H, N, D] queries over what `update` returned -> [R, N, H, D]."""
        if self.restricted is not None and window is None:
            parts = self.restricted.parts(layer, keys, values)
            if parts is not None:
                return attention_of_parts(queries, parts, scaling, softcap, sinks)
        if self.restricted is None and self.store.watch is not None:
            self.store.watch(layer, queries, keys, self.slots, LogitForm(scaling, softcap, window, sinks))
        slots, first = self._seen(window)
        if softcap is None and sinks is None:
            rows = self._rows(window, self.group, slots, queries)
            if rows is not None:
                return grouped(rows, self._place(layer), queries * scaling, keys.shape[1])
        return attention(queries, keys[:, :, first:], values[:, :, first:], slots.mask, scaling, softcap, sinks)

    def store_and_attend(
        self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scaling: float, window: int | None
    ) -> Tensor:
        """`update`, then `attend`."""
        keys, values = self.update(keys, values, layer)
        return self.attend(layer, queries, keys, values, scaling, window, None, None)

    def _place(self, layer: int) -> int:
        """Where the layer stands in `group`."""
        return layer

    def _rows(self, name: int | str | None, layers: LayerSlots, slots: Slots, queries: Tensor) -> RowAttention | None:
        """The bit-stable products for float32 on the CPU, made once per pass and `name` (a window, a layer's kind)."""
        if name not in self.prepared:
            heads = self.store.heads
            group, count = queries.shape[1] // heads, queries.shape[2]
            serves = RowAttention.serves(layers, heads, group * count)
            if serves and slots.mask is not None and group > 1:
                slots = replace(slots, mask=slots.mask.repeat(1, 1, group, 1))
            self.prepared[name] = RowAttention(layers, slots, group * count) if serves else None
        return self.prepared[name]

    def _seen(self, window: int | None) -> tuple[Slots, int]:
        """The slots with the layer's window in their mask, and the first slot any row still sees."""
        if window is None or self.slots.live <= window:
            return self.slots, 0
        if window not in self.windows:
            inside = self.key_positions[:, None, :] > self.slots.positions[:, :, None] - window
            mask = self.slots.mask
            if mask is None:
                mask = torch.zeros((), dtype=self.store.dtype, device=inside.device)
            mask = torch.where(inside[:, None], mask, float("-inf"))
            first = 0
            if not RowAttention.serves(self.group, self.store.heads, 1):
                first = max(0, min(self.store.host_lengths) - window + 1)
            self.windows[window] = replace(self.slots, mask=mask[..., first:]), first
        return self.windows[window]


def attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Softmax attention with what some models add to it.

    Args:
        queries: [R, H, N, D]; keys, values: [R, H / G, S, D].
        mask: [R or 1, 1, N, S] additive, or None.
        scaling: factor on the products.
        softcap: c of c tanh(x / c) on the scaled products.
        sinks: [H] logits of a slot without a value.

    Returns:
        [R, N, H, D].
    """
    group = queries.shape[1] // keys.shape[1]
    if softcap is None and sinks is None:
        seen = F.scaled_dot_product_attention(queries, keys, values, mask, scale=scaling, enable_gqa=group > 1)
        return seen.transpose(1, 2)
    if group > 1:
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    weights = queries @ keys.transpose(2, 3) * scaling
    if softcap is not None:
        weights = softcap * torch.tanh(weights / softcap)
    if mask is not None:
        weights = weights + mask
    if sinks is not None:
        sink = sinks.to(weights.dtype)[None, :, None, None].expand(*weights.shape[:3], 1)
        weights = torch.cat([weights, sink], -1)
    law = weights.softmax(-1, dtype=torch.float32).to(queries.dtype)
    return (law[..., : keys.shape[2]] @ values).transpose(1, 2)


def attention_of_parts(
    queries: Tensor, parts: list[Part], scaling: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """`attention` over several parts: joined where a copy is cheap, one by one in float32 on the CPU."""
    if softcap is None and sinks is None and queries.dtype == torch.float32 and queries.device.type == "cpu":
        return parted_attention(queries, parts, scaling)
    keys, values, mask = joined(parts, queries.shape[1] // parts[0][0].shape[1])
    return attention(queries, keys, values, mask, scaling, softcap, sinks)


def grouped(rows: RowAttention, layer: int, queries: Tensor, heads: int) -> Tensor:
    """Query heads that share a key head become rows of one product: [R, H, N, D] -> [R, N, H, D]."""
    count, _, length, size = queries.shape
    seen = rows(layer, queries.reshape(count, heads, -1, size))
    return seen.view(count, -1, length, heads, size).permute(0, 2, 3, 1, 4).reshape(count, length, -1, size)


def _forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    kv_pass: KVPass | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers calls. Without a `kv_pass` the model is used in its ordinary way and brings its own mask."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if kv_pass is None:
        return attention(query, key, value, attention_mask, scaling, softcap, s_aux).contiguous(), None
    seen = kv_pass.attend(module.layer_idx, query, key, value, scaling, sliding_window, softcap, s_aux)
    return seen.contiguous(), None


AttentionInterface.register(NAME, _forward)
AttentionMaskInterface.register(NAME, eager_mask)
