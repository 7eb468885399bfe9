"""Static patterns: index lists, how they are built from a strip, and what they keep."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from mediaspec.attention.diagnostics import kept_mass
from mediaspec.attention.logits import LogitForm
from mediaspec.attention.pattern import HeadPattern, SparsePattern, build_pattern
from mediaspec.attention.strip import strip_lse

PATTERNS = (
    HeadPattern(),
    HeadPattern(sinks=(0,), recent=1),
    HeadPattern(sinks=(0, 7), recent=5, slash=(6, 30, 31), band=1, columns=(3, 40, 41)),
    HeadPattern(sinks=(), recent=3, slash=(4, 5), band=2, columns=(0,)),
)


@pytest.mark.parametrize("position", [0, 1, 6, 33, 90])
def test_index_lists_are_sorted_unique_and_in_the_past(position: int) -> None:
    for pattern in PATTERNS:
        keys = pattern.keys(position)
        assert keys == sorted(set(keys)) and keys[-1] == position and keys[0] >= 0
        mask = pattern.mask(torch.tensor([position]), torch.arange(120))[0]
        assert mask.nonzero().flatten().tolist() == keys
    both = SparsePattern((PATTERNS[:2], PATTERNS[2:]))
    at = torch.tensor([position, 50])
    index = both.indices(at, 100)
    assert torch.equal(index, both.indices(at, 100))
    for layer, heads in enumerate(both.heads):
        for head, pattern in enumerate(heads):
            for row, place in enumerate(at.tolist()):
                got = index[layer, row, head]
                assert got[got >= 0].tolist() == pattern.keys(place)


def strip(name: str, rows: int = 32, total: int = 600) -> Tensor:
    """[rows, total] masses of made-up heads."""
    at, key = torch.arange(total - rows, total)[:, None], torch.arange(total)
    logits = torch.randn(rows, total, generator=torch.Generator().manual_seed(0))
    if name == "slash":
        logits = logits + 12.0 * (at - key == 300)
    elif name == "vertical":
        logits = logits + 9.0 * torch.isin(key, torch.tensor([77, 200, 311]))
    elif name == "streaming":
        logits = logits + 9.0 * ((key < 2) | (at - key < 20))
    elif name == "crossing":
        logits = logits + 9.0 * ((at - key == 300) | (key == 290))
    return logits.masked_fill(key > at, float("-inf")).softmax(1)


def kept(mass: Tensor, pattern: HeadPattern) -> float:
    rows, total = mass.shape
    return float((mass * pattern.mask(torch.arange(total - rows, total), torch.arange(total))).sum() / mass.sum())


@pytest.mark.parametrize("name", ["slash", "vertical", "streaming", "crossing", "diffuse"])
def test_patterns_keep_what_they_promise(name: str) -> None:
    mass = strip(name)
    pattern = build_pattern(mass, recent=32, target=0.9, budget=10_000)
    assert kept(mass, pattern) >= 0.9
    assert pattern == build_pattern(mass, recent=32, target=0.9, budget=10_000)
    if name == "slash":
        assert pattern.slash == (300,) and not pattern.columns
    if name == "vertical":
        assert {77, 200, 311} <= set(pattern.columns) and not pattern.slash
    if name == "streaming":
        assert not pattern.slash and not pattern.columns
    if name == "crossing":
        assert 300 in pattern.slash and 290 in pattern.columns


def test_the_budget_is_kept() -> None:
    mass = strip("diffuse")
    for budget in (30, 100, 300):
        pattern = build_pattern(mass, recent=16, target=0.99, budget=budget)
        assert len(pattern.keys(599)) <= budget
    assert kept(mass, pattern) > kept(mass, build_pattern(mass, recent=16, target=0.99, budget=30))
    everything = build_pattern(mass, recent=16, target=1.0, budget=10_000)
    assert kept(mass, everything) > 0.9999


def test_more_mass_per_key_comes_first() -> None:
    """A column and a slash hold half of the mass each; with room for 4 keys beside the window, a slash is taken."""
    pattern = build_pattern(strip("crossing"), sinks=(), recent=8, target=0.99, budget=12)
    assert pattern.slash == (300,)


def test_the_kept_mass_is_measured() -> None:
    """Equal to the sum over the full matrix, each crossing counted once."""
    draw = torch.Generator().manual_seed(0)
    queries, keys = torch.randn(1, 4, 16, 8, generator=draw), torch.randn(1, 2, 1500, 8, generator=draw)
    form, lengths = LogitForm(1.0, softcap=5.0), torch.tensor([1500])
    lse = strip_lse(queries, keys, lengths, form)
    patterns = (
        HeadPattern(recent=40, slash=(60, 900), columns=(500, 1490, 1499)),
        HeadPattern(sinks=(0, 9), recent=8, slash=(8, 9, 30), band=2),
    )
    at, key = torch.arange(1484, 1500), torch.arange(1500)
    logits = 5.0 * torch.tanh(queries[0] @ keys[0].repeat_interleave(2, 0).transpose(1, 2) / 5.0)
    law = logits.masked_fill(key > at[:, None], float("-inf")).softmax(2)
    wanted = [float((law[head] * patterns[head // 2].mask(at, key)).sum() / 16) for head in range(4)]
    got = kept_mass(queries, keys, form, lse, patterns)
    torch.testing.assert_close(got, torch.tensor(wanted), atol=1e-5, rtol=0)


def test_patterns_travel_as_json() -> None:
    pattern = SparsePattern((PATTERNS[:2], PATTERNS[2:]), "tiny")
    back = SparsePattern.from_dict(json.loads(json.dumps(pattern.to_dict())))
    assert back == pattern
    assert all(not one.columns for layer in pattern.without_columns().heads for one in layer)
    with pytest.raises(ValueError, match="mediaspec inspect"):
        SparsePattern.from_dict({"rows": 3})
    with pytest.raises(ValueError, match="tiny has 2 layers of 2 key heads, the target 4 of 1"):
        pattern.check(4, 1)
    with pytest.raises(ValueError, match="at least itself"):
        HeadPattern(recent=0)
    with pytest.raises(ValueError, match="negative"):
        HeadPattern(slash=(-1,))
    with pytest.raises(ValueError, match="as many key heads"):
        SparsePattern((PATTERNS[:1], PATTERNS[:2]))
