import pytest
import torch
import torch.nn.functional as F

from mediaspec.core.kv import KVStore
from mediaspec.core.tree import TreeSpec
from mediaspec.models.row_attention import RowAttention


def filled(rows: int, heads: int, size: int, capacity: int, lengths: list[int]) -> KVStore:
    store = KVStore(2, rows, heads, size, capacity)
    generator = torch.Generator().manual_seed(capacity)
    store.keys.copy_(torch.randn(store.keys.shape, generator=generator))
    store.values.copy_(torch.randn(store.values.shape, generator=generator))
    store.advance(torch.tensor(lengths), lengths)
    return store


@pytest.mark.parametrize("count", [1, 2, 3, 6])
@pytest.mark.parametrize("lengths", [[5, 5], [20, 3], [140, 140], [290, 262]])
@pytest.mark.parametrize("hidden", [False, True])
def test_equals_the_fused_kernel(count: int, lengths: list[int], hidden: bool) -> None:
    store = filled(2, 3, 8, 301, lengths)
    if hidden:
        store.hide(torch.tensor([[True, False, False], [True, True, False]]))
    slots = store.plan(count)
    queries = torch.randn(2, 3, count, 8, generator=torch.Generator().manual_seed(1))
    attention = RowAttention(store, slots, count)
    for layer in range(2):
        keys, values = store.keys[layer][:, :, : slots.live], store.values[layer][:, :, : slots.live]
        wanted = F.scaled_dot_product_attention(queries, keys, values, slots.mask, scale=1.0)
        wanted = wanted.transpose(1, 2).reshape(2 * count, 24)
        torch.testing.assert_close(attention(layer, queries), wanted, atol=2e-6, rtol=1e-5)


def test_trees() -> None:
    store, tree = filled(2, 2, 4, 64, [9, 4]), TreeSpec.from_widths([2, 2])
    slots = store.plan(7, tree)
    queries = torch.randn(2, 2, 7, 4, generator=torch.Generator().manual_seed(1))
    keys, values = store.keys[1][:, :, : slots.live], store.values[1][:, :, : slots.live]
    wanted = F.scaled_dot_product_attention(queries, keys, values, slots.mask, scale=1.0)
    got = RowAttention(store, slots, 7)(1, queries)
    torch.testing.assert_close(got, wanted.transpose(1, 2).reshape(14, 8), atol=2e-6, rtol=1e-5)


def test_what_it_serves() -> None:
    store = KVStore(1, 2, 4, 8, 16)
    assert RowAttention.serves(store, 4, 1)
    assert not RowAttention.serves(store, 8, 1), "grouped key heads"
    assert not RowAttention.serves(store, 4, 65), "a long prefill"
    assert not RowAttention.serves(KVStore(1, 2, 4, 8, 16, torch.bfloat16), 4, 1)
