"""The ring against a list that forgets nothing: rejected drafts, rows of different lengths, trees."""

from __future__ import annotations

import random

import pytest
import torch

from mediaspec.attention.ring import Ring
from mediaspec.core.kv import Slots
from mediaspec.core.tree import TreeSpec

SINK, RECENT, GAMMA = 3, 13, 5


def write(stamps: torch.Tensor, slots: Slots, values: torch.Tensor) -> None:
    if slots.start is not None:
        stamps[:, slots.start : slots.start + values.shape[1]] = values
    else:
        assert slots.index is not None
        stamps.scatter_(1, slots.index[:, 0, :, 0].expand(values.shape), values)


def visible(stamps: torch.Tensor, slots: Slots, row: int, query: int) -> list[int]:
    """The stamps a query sees, in ascending order."""
    live = stamps[row, : slots.live]
    if slots.mask is not None:
        live = live[slots.mask[min(row, len(slots.mask) - 1), 0, query] == 0]
    return sorted(live.tolist())


def misses(ring: Ring, steps: int, uniform: bool) -> int:
    """Rounds of up to GAMMA + 1 inputs of which some are accepted; how many saw other keys than a full list shows."""
    draw, rows, wrong, stamp = random.Random(steps), 2, 0, 0
    stamps = torch.full((rows, ring.size), -1)
    truth: list[list[int]] = [[] for _ in range(rows)]
    for _ in range(steps):
        count = draw.randint(1, GAMMA + 1)
        host = [len(kept) for kept in truth]
        slots = ring.plan(torch.tensor(host), host, count, None, torch.float32)
        values = torch.arange(stamp, stamp + rows * count).view(rows, count)
        stamp += rows * count
        write(stamps, slots, values)
        accepted = draw.randint(0, count)
        for row, kept in enumerate(truth):
            seen = kept + values[row].tolist()
            for query in (0, count - 1):
                at = host[row] + query
                wanted = [seen[p] for p in range(at + 1) if p < ring.sink or p > at - ring.recent]
                wrong += visible(stamps, slots, row, query) != sorted(wanted)
            kept += values[row, : accepted if uniform else draw.randint(0, count)].tolist()
        assert slots.positions[0].tolist() == list(range(host[0], host[0] + count))
    return wrong


@pytest.mark.parametrize("uniform", [True, False])
def test_random_rounds_see_what_a_list_shows(uniform: bool) -> None:
    assert misses(Ring(SINK, RECENT, SINK + RECENT + GAMMA), 2500, uniform) == 0


def test_a_ring_of_just_the_window_loses_keys_of_rejected_drafts() -> None:
    """arXiv:2410.13846 keeps R = w_recent, which is right without speculation alone."""
    assert misses(Ring(SINK, RECENT, SINK + RECENT), 300, False) > 100
    assert misses(Ring(SINK, RECENT, SINK + RECENT + GAMMA - 1), 300, False) > 0


def test_it_knows_when_keys_are_lost() -> None:
    ring = Ring(SINK, RECENT, SINK + RECENT + GAMMA)
    assert not ring.lost(50 + GAMMA, 50)
    assert ring.lost(51 + GAMMA, 50)
    assert not ring.lost(ring.size - 1, 0), "nothing was overwritten yet"


def test_trees_see_their_ancestors_inside_the_window() -> None:
    tree = TreeSpec.from_widths([2, 2])
    ring = Ring.sized(2, 6, tree.num_nodes + 1)
    assert ring.size % 8 == 0
    stamps = torch.full((2, ring.size), -1)
    host = [40, 9]
    lengths = torch.tensor(host)
    for place in range(max(host)):
        at = ring.slot(torch.tensor([place]))
        for row, length in enumerate(host):
            if place < length:
                stamps[row, at] = place
    slots = ring.plan(lengths, host, tree.num_nodes + 1, tree, torch.float32)
    write(stamps, slots, torch.arange(100, 107).expand(2, -1))
    ancestors = tree.ancestor_tensor(torch.device("cpu"))
    for row, length in enumerate(host):
        for node in range(tree.num_nodes + 1):
            at = length + tree.depth[node]
            wanted = [p for p in range(length) if p < 2 or p > at - 6]
            wanted += [100 + j for j in range(tree.num_nodes + 1) if ancestors[node, j]]
            assert visible(stamps, slots, row, node) == wanted
            assert slots.positions[row, node] == at


def test_impossible_rings_are_refused() -> None:
    for sink, recent, size in ((-1, 4, 8), (0, 0, 8), (4, 5, 8)):
        with pytest.raises(ValueError, match="ring"):
            Ring(sink, recent, size)
