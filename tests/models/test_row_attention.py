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


@pytest.mark.parametrize("length", [1023, 1100, 3000, 17000])
@pytest.mark.parametrize("count", [1, 5, 18])
def test_many_keys_give_the_same_bits(monkeypatch: pytest.MonkeyPatch, length: int, count: int) -> None:
    """Above FAR keys the chunks are multiplied together; alone or beside a longer row, rows keep their bits."""
    alone = filled(1, 3, 8, 17100, [length])
    queries = torch.randn(1, 3, count, 8, generator=torch.Generator().manual_seed(1))
    far = RowAttention(alone, alone.plan(count), count)(0, queries)
    both = KVStore(1, 2, 3, 8, 17100)
    both.keys[:, :1], both.values[:, :1] = alone.keys[:1], alone.values[:1]
    both.advance(torch.tensor([length, 17050]), [length, 17050])
    beside = RowAttention(both, both.plan(count), count)(0, queries.expand(2, -1, -1, -1))
    assert torch.equal(beside[:count], far)
    if length > 16000:  # 128 chunks are added up as one group, the near way knows no groups
        return
    monkeypatch.setattr("mediaspec.models.row_attention.FAR", 10**9)
    near = RowAttention(alone, alone.plan(count), count)(0, queries)
    assert torch.equal(near, far)
