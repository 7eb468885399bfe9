"""The store against a per-row list: append, commit, rollback, tree commit and selection, ragged rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mediaspec.core.kv import KVStore
from mediaspec.core.tree import TreeSpec

HEADS, SIZE, CAPACITY = 2, 4, 40


def value_of(stamp: torch.Tensor) -> torch.Tensor:
    """[R, N] stamps -> [R, H, N, Dh] distinct vectors."""
    return stamp[:, None, :, None] + 1000.0 * torch.arange(HEADS)[:, None, None] + 0.001 * torch.arange(SIZE)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_random_rounds_match_a_list_per_row(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 4))
    store = KVStore(2, rows, HEADS, SIZE, CAPACITY)
    model: list[list[float]] = [[] for _ in range(rows)]
    stamp = 0
    for _ in range(data.draw(st.integers(1, 8))):
        count = data.draw(st.integers(1, 4))
        stamps = torch.arange(stamp, stamp + rows * count, dtype=torch.float32).view(rows, count)
        stamp += rows * count
        slots = store.plan(count)
        for layer in range(2):
            keys, values = store.write(layer, slots, value_of(stamps), -value_of(stamps))
            for row, kept in enumerate(model):
                expected = value_of(torch.tensor([kept + stamps[row].tolist()]))
                seen = len(kept) + count
                assert torch.equal(keys[row, :, :seen], expected[0])
                assert torch.equal(values[row, :, :seen], -expected[0])
                if slots.mask is not None:
                    mask = slots.mask.expand(rows, 1, count, slots.live)[row, 0]
                    for query in range(count):
                        visible = (mask[query] == 0).nonzero().flatten().tolist()
                        assert visible == list(range(len(kept) + query + 1))
        counts = torch.tensor([data.draw(st.integers(0, count)) for _ in range(rows)])
        store.advance(counts)
        for row, kept in enumerate(model):
            kept.extend(stamps[row, : counts[row]].tolist())
        if data.draw(st.booleans()):
            lengths = torch.tensor([data.draw(st.integers(0, len(kept))) for kept in model])
            store.rollback(lengths)
            model = [kept[:length] for kept, length in zip(model, lengths.tolist())]
        if data.draw(st.booleans()):
            index = torch.tensor([data.draw(st.integers(0, rows - 1)) for _ in range(rows)])
            store.select(index)
            model = [list(model[row]) for row in index.tolist()]
        assert store.lengths.tolist() == store.host_lengths == [len(kept) for kept in model]


def test_tree_pass_sees_ancestors_only_and_commits_a_path() -> None:
    tree = TreeSpec.from_widths([2, 2])
    store = KVStore(1, 2, HEADS, SIZE, 16)
    start = torch.arange(6, dtype=torch.float32).view(2, 3)
    store.write(0, store.plan(3), value_of(start), value_of(start))
    store.advance(torch.tensor([3, 2]))
    slots = store.plan(tree.num_nodes + 1, tree)
    assert slots.positions.tolist() == [[3, 4, 4, 5, 5, 5, 5], [2, 3, 3, 4, 4, 4, 4]]
    assert slots.mask is not None
    for row, length in enumerate((3, 2)):
        for node in range(tree.num_nodes + 1):
            visible = (slots.mask[row, 0, node] == 0).nonzero().flatten().tolist()
            ancestors = [j for j in range(7) if tree.ancestor_tensor(torch.device("cpu"))[node, j]]
            assert visible == [*range(length), *(length + j for j in ancestors)]
    stamps = torch.arange(100, 114, dtype=torch.float32).view(2, 7)
    store.write(0, slots, value_of(stamps), value_of(stamps))
    store.commit(torch.tensor([[0, 2, 6], [0, 1, 0]]), torch.tensor([3, 2]))
    assert store.lengths.tolist() == [6, 4]
    kept = [start[0].tolist() + [100.0, 102.0, 106.0], start[1, :2].tolist() + [107.0, 108.0]]
    for row, stamps_of_row in enumerate(kept):
        expected = value_of(torch.tensor([stamps_of_row]))[0]
        assert torch.equal(store.keys[0, row, :, : len(stamps_of_row)], expected)


def test_hidden_prefix_is_never_visible() -> None:
    store = KVStore(1, 2, 1, SIZE, 8)
    store.hide(torch.tensor([[True, False], [False, False]]))
    store.rollback(torch.tensor([2, 2]))
    slots = store.plan(1)
    assert slots.mask is not None
    assert (slots.mask[:, 0, 0] == 0).tolist() == [[False, True, True], [True, True, True]]


def test_a_full_store_says_so() -> None:
    store = KVStore(1, 1, 1, SIZE, 4)
    store.rollback(torch.tensor([3]))
    with pytest.raises(ValueError, match="do not fit into 4 slots"):
        store.plan(2)
