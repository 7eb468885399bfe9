"""Float32 attention on the CPU whose rows do not depend on how many are computed together, to the last bit.

Plain decoding asks for one position, verification for six, a batch for more; with shared noise their tokens agree
only where their logits do. `F.scaled_dot_product_attention` rounds differently for every number of rows and of cached
positions: guided logits of a 5-layer model differ by 9e-6 in the mean, which flips one token in some 100,000. MKL's
batched products are a function of the row alone under three conditions, which this file keeps (elsewhere they cost
nothing, and rows agree to rounding as before):

    at least 4 rows          below, other kernels run: fewer are padded with zero rows; heads above 64 need D / 16
    at most 192 summands     longer sums are split in halves: values are summed in chunks of 128 keys
    sums a multiple of 8     the number of keys is rounded up, the surplus is masked

Chunks are added up in the order of their keys. With 1 position it costs 10 microseconds more than the fused kernel,
with 6 the same (2 x 6 heads of 32, 1 core).

Letters: R rows, N positions, H heads, D head size.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..core.kv import Slots

__all__ = ["LayerSlots", "RowAttention"]

FEWEST, CHUNK, STEP = 4, 128, 8
FAR = 1024  # keys from which on one product per head serves all its chunks
MOST = 64  # rows checked to agree; a prefill has more and is computed the same way in every mode


class LayerSlots(Protocol):
    """Layers with equally many slots: one tensor [layers, R, H, S, D], or a list of [R, H, S, D]."""

    @property
    def keys(self) -> Tensor | list[Tensor]: ...

    @property
    def values(self) -> Tensor | list[Tensor]: ...


class RowAttention:
    """Attention of one pass over all layers of a store; its mask and views are made here, once.

    Args:
        store: float32 keys and values on the CPU, as a `KVStore` or as lists of layers of one size.
        slots: what `store.plan` gave.
        count: N.
    """

    def __init__(self, store: LayerSlots, slots: Slots, count: int) -> None:
        rows, heads, capacity, size = store.keys[0].shape
        self.shape, self.count = (rows, heads, max(count, FEWEST, size // 16), size), count
        live = min(-(-slots.live // STEP) * STEP, capacity)
        self.keys = [keys.transpose(1, 2) for keys in _flat(store.keys, live)]
        self.values = _flat(store.values, live)
        self.ones = store.keys[0].new_ones(FEWEST, CHUNK) if live >= FAR else None
        self.queries = store.keys[0].new_zeros(self.shape)
        self.given = self.queries[:, :, :count]
        self.flat_queries = self.queries.view(rows * heads, -1, size)
        self.mask = self._mask(slots, live)

    @staticmethod
    def serves(store: LayerSlots, query_heads: int, count: int) -> bool:
        """Whether this file's products are the ones to use."""
        keys = store.keys[0]
        return (
            keys.dtype == torch.float32
            and keys.device.type == "cpu"
            and keys.shape[1] == query_heads
            and count <= MOST
        )

    def _mask(self, slots: Slots, live: int) -> Tensor:
        """[1 or R * H, at least 4, live]."""
        rows, heads, padded, _ = self.shape
        if slots.mask is None:
            mask = self.queries.new_zeros(1, padded, live)
        else:
            mask = self.queries.new_zeros(slots.mask.shape[0], padded, live)
            mask[:, : self.count, : slots.live] = slots.mask[:, 0]
        mask[:, :, slots.live :] = float("-inf")
        if mask.shape[0] > 1:
            mask = mask[:, None].expand(-1, heads, -1, -1).reshape(rows * heads, padded, live)
        return mask

    def __call__(self, layer: int, queries: Tensor) -> Tensor:
        """[R, H, N, D] queries, already scaled -> [R * N, H * D], over everything live in the layer."""
        rows, heads, _, size = self.shape
        self.given.copy_(queries)
        weights = torch.baddbmm(self.mask, self.flat_queries, self.keys[layer]).softmax(-1)
        values = self.values[layer]
        if self.ones is not None:
            out = self._far(weights, values, self.ones)
        else:
            parts = [torch.bmm(*pair) for pair in zip(weights.split(CHUNK, 2), values.split(CHUNK, 1))]
            out = parts[0]
            for part in parts[1:]:
                out += part
        return out.view(self.shape)[:, :, : self.count].transpose(1, 2).reshape(-1, heads * size)

    @staticmethod
    def _far(weights: Tensor, values: Tensor, ones: Tensor) -> Tensor:
        """[R * H, N, D], the same to the last bit: per head one product for all chunks, then one that adds them up.

        Many keys of few heads are many small products otherwise: with 3 heads of 64 and 8,192 keys 0.34 instead of
        0.94 ms a layer on 2 cores.
        """
        heads, count, live = weights.shape
        size, whole = values.shape[2], live // CHUNK
        out = weights.new_empty(heads, count, size)
        parts = weights.new_zeros(whole // STEP * STEP + STEP, count, size)
        tail = torch.bmm(weights[:, :, whole * CHUNK :], values[:, whole * CHUNK :])  # zeros where nothing is left
        for head in range(heads):
            part = weights[head, :, : whole * CHUNK].unflatten(1, (whole, CHUNK)).transpose(0, 1)
            torch.bmm(part, values[head, : whole * CHUNK].unflatten(0, (whole, CHUNK)), out=parts[:whole])
            parts[whole] = tail[head]
            total: Tensor | None = None
            for some in parts.view(len(parts), -1).split(CHUNK):
                sums = torch.mm(ones[:, : len(some)], some)[0]
                total = sums if total is None else total + sums
            assert total is not None
            out[head] = total.view(count, size)
        return out


def _flat(layers: Tensor | list[Tensor], live: int) -> list[Tensor]:
    """Views [R * H, live, D] of every layer."""
    if isinstance(layers, Tensor):
        return list(layers.flatten(1, 2)[:, :, :live].unbind(0))
    return [layer.flatten(0, 1)[:, :live] for layer in layers]
