"""Float32 attention on the CPU whose rows do not depend on how many are computed together, to the last bit.

Plain decoding asks for one position, verification for six, a batch for more; with shared noise their tokens agree
only where their logits do. `F.scaled_dot_product_attention` rounds differently for every number of rows and of cached
positions: guided logits of a 5-layer model differ by 9e-6 in the mean, which flips one token in some 100,000. MKL's
batched products are a function of the row alone under three conditions, which this file keeps (elsewhere they cost
nothing, and rows agree to rounding as before):

    at least 4 rows          below, other kernels run: fewer are padded with zero rows
    at most 192 summands     longer sums are split in halves: values are summed in chunks of 128 keys
    sums a multiple of 8     the number of keys is rounded up, the surplus is masked

With 1 position it costs 10 microseconds more than the fused kernel, with 6 the same (2 x 6 heads of 32, 1 core).

Letters: R rows, N positions, H heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.kv import KVStore, Slots

__all__ = ["RowAttention"]

FEWEST, CHUNK, STEP = 4, 128, 8
MOST = 64  # rows checked to agree; a prefill has more and is computed the same way in every mode


class RowAttention:
    """Attention of one pass over all layers of a store; its mask and views are made here, once.

    Args:
        store: float32 keys and values on the CPU.
        slots: what `store.plan` gave.
        count: N.
    """

    def __init__(self, store: KVStore, slots: Slots, count: int) -> None:
        layers, rows, heads, capacity, size = store.keys.shape
        self.shape, self.count = (rows, heads, max(count, FEWEST), size), count
        live = min(-(-slots.live // STEP) * STEP, capacity)
        flat = (layers, rows * heads, capacity, size)
        self.keys = store.keys.view(flat)[:, :, :live].transpose(2, 3).unbind(0)
        values = store.values.view(flat)
        self.chunks = [(start, min(start + CHUNK, live)) for start in range(0, live, CHUNK)]
        self.values = [values[:, :, start:stop].unbind(0) for start, stop in self.chunks]
        self.queries = store.keys.new_zeros(self.shape)
        self.given = self.queries[:, :, :count]
        self.flat_queries = self.queries.view(rows * heads, -1, size)
        self.mask = self._mask(slots, live)

    @staticmethod
    def serves(store: KVStore, query_heads: int, count: int) -> bool:
        """Whether this file's products are the ones to use."""
        keys = store.keys
        return (
            keys.dtype == torch.float32
            and keys.device.type == "cpu"
            and keys.shape[2] == query_heads
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
        out: Tensor | None = None
        for (start, stop), values in zip(self.chunks, self.values):
            part = weights[:, :, start:stop]
            out = torch.bmm(part, values[layer]) if out is None else out.baddbmm_(part, values[layer])
        assert out is not None
        return out.view(self.shape)[:, :, : self.count].transpose(1, 2).reshape(-1, heads * size)
