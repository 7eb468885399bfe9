"""Index lists are sorted, unique and the right ones, row by row."""

from __future__ import annotations

import pytest
import torch

from mediaspec.attention.select import (
    budget_of,
    keys_of_pages,
    page_bounds,
    snapkv_scores,
    top_keys,
    union,
    vertical_slash,
)


def test_top_keys_of_ragged_rows() -> None:
    scores = torch.rand(2, 4, 3, 50, generator=torch.Generator().manual_seed(0))
    lengths, counts = torch.tensor([50, 20, 3, 50]), torch.tensor([6, 6, 6, 2])
    chosen = top_keys(scores, counts, lengths, keep=(0, 1, 40))
    assert chosen.shape == (2, 4, 3, 6)
    for layer in range(2):
        for row in range(4):
            for head in range(3):
                length, count = int(lengths[row]), max(int(counts[row]), 3)
                forced = [key for key in (0, 1, 40) if key < length]
                mine = scores[layer, row, head].tolist()
                ranked = sorted(range(length), key=lambda key: (key not in forced, -mine[key]))
                wanted = sorted(ranked[:count])
                got = chosen[layer, row, head].tolist()
                assert got == wanted + [-1] * (6 - len(wanted))
    assert torch.equal(chosen, top_keys(scores, counts, lengths, keep=(0, 1, 40), width=6))


def test_a_row_alone_chooses_as_in_a_batch() -> None:
    scores = torch.rand(3, 2, 40, generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([40, 17, 29])
    together = top_keys(scores, 5, lengths)
    for row in range(3):
        length = int(lengths[row])
        alone = top_keys(scores[row : row + 1, :, :length], 5, lengths[row : row + 1])
        assert torch.equal(together[row : row + 1], alone)


def test_union_is_sorted_and_unique() -> None:
    draw = torch.Generator().manual_seed(2)
    parts = [torch.randint(-1, 30, (4, 2, count), generator=draw) for count in (7, 12, 1)]
    joined = union(parts)
    for row in range(4):
        for head in range(2):
            wanted = sorted({int(key) for part in parts for key in part[row, head] if key >= 0})
            got = joined[row, head].tolist()
            assert got == wanted + [-1] * (20 - len(wanted))


def test_budgets() -> None:
    assert budget_of(torch.tensor([100, 300, 8000, 10**6]), 0.05, 256, 2000).tolist() == [100, 256, 400, 2000]


def test_snapkv_pooling_spreads_votes() -> None:
    votes = torch.zeros(2, 9)
    votes[:, 4] = 5
    assert snapkv_scores(votes, 5)[0].tolist() == [0, 0, 1, 1, 1, 1, 1, 0, 0]
    assert snapkv_scores(votes, 3, "max")[1].tolist() == [0, 0, 0, 5, 5, 5, 0, 0, 0]
    with pytest.raises(ValueError, match="odd"):
        snapkv_scores(votes, 4)
    with pytest.raises(ValueError, match="'average' or 'max'"):
        snapkv_scores(votes, 5, "mean")


def test_pages() -> None:
    draw = torch.Generator().manual_seed(3)
    queries, keys = torch.randn(2, 1, 4, generator=draw), torch.randn(2, 1, 24, 4, generator=draw)
    bounds = page_bounds(queries, keys, 8)
    best = (keys @ queries[..., None])[..., 0].view(2, 1, 3, 8).amax(-1)
    assert bool((bounds >= best).all())
    pages = top_keys(bounds, 2, keep=(0,))
    keys_in = keys_of_pages(pages, 8)
    assert keys_in.shape == (2, 1, 16) and bool((keys_in[..., :8] == torch.arange(8)).all())
    with pytest.raises(ValueError, match="no multiple"):
        page_bounds(queries, keys, 7)


def test_forced_lines_are_always_in() -> None:
    columns, offsets = torch.zeros(100), torch.zeros(100)
    columns[70], offsets[50] = 9.0, 9.0
    got = vertical_slash(columns, offsets, 31, 31)
    assert got[0].tolist() == [*range(30), 70] and got[1].tolist() == [*range(30), 50]
