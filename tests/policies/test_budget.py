"""The allocation of the verify budget is exact, on tensors and on the host; the policy that uses it."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mediaspec.policies import Outcome, allocate, make_policy, verify_budget

rate = st.integers(0, 20).map(lambda n: n / 20)


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[list[float]], list[float]]:
    rows, depth = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    survival = []
    for _ in range(rows):
        alive, row = 1.0, []
        for _ in range(depth):
            alive *= draw(rate)
            row.append(alive)
        survival.append(row)
    steps = draw(st.lists(st.integers(0, 30), min_size=rows * depth, max_size=rows * depth))
    seconds = [1.0]
    for step in steps:
        seconds.append(seconds[-1] + step / 20)
    return survival, seconds


@settings(max_examples=60, deadline=None)
@given(problems())
def test_equals_brute_force(problem: tuple[list[list[float]], list[float]]) -> None:
    survival, seconds = problem
    rows, depth = len(survival), len(survival[0])

    def value(lengths: tuple[int, ...]) -> float:
        tokens = rows + sum(sum(row[:length]) for row, length in zip(survival, lengths))
        return tokens / seconds[sum(lengths)]

    best = max(map(value, itertools.product(range(depth + 1), repeat=rows)))
    lengths, got = allocate(survival, seconds)
    assert got == pytest.approx(best) and value(tuple(lengths)) == pytest.approx(best)
    chosen, tensor = verify_budget(
        torch.tensor(survival, dtype=torch.float64), 1 / torch.tensor(seconds, dtype=torch.float64)
    )
    assert float(tensor) == pytest.approx(best) and value(tuple(chosen.tolist())) == pytest.approx(best)


def test_ties_take_prefixes_and_fewer_drafts() -> None:
    survival = torch.tensor([[0.5, 0.5, 0.5], [0.5, 0.5, 0.0]])
    lengths, _ = verify_budget(survival, torch.ones(7))
    assert lengths.tolist() == [3, 2]
    lengths, _ = verify_budget(survival, torch.tensor([1.0, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2]))
    assert lengths.tolist() == [0, 0]


def test_bad_shapes() -> None:
    with pytest.raises(ValueError, match=r"one row per sequence"):
        verify_budget(torch.ones(3), torch.ones(4))
    with pytest.raises(ValueError, match=r"need \[7\]"):
        verify_budget(torch.ones(2, 3), torch.ones(6))
    with pytest.raises(ValueError, match=r"need 3"):
        allocate([[0.5, 0.2]], [1.0, 1.1])


def test_rows_that_accept_get_the_drafts() -> None:
    costs = [1.0 + 0.12 * length for length in range(9)]
    policy = make_policy("budget", costs=costs)
    policy.begin(["ngram"])
    for _ in range(60):
        choice = policy.choose([5, 9], length=100)
        lengths = choice.lengths or (choice.arm.num_draft_tokens,) * 2
        assert max(lengths) <= choice.arm.num_draft_tokens
        policy.observe(choice, Outcome([lengths[0], 0]))
    assert policy.choose([5, 9], length=100).lengths == (8, 0)
    assert policy.choose([5], length=100).lengths is None
    with pytest.raises(ValueError, match="exceeds the lengths"):
        policy.observe(policy.choose([5, 9]), Outcome([8, 1]))


def test_all_rows_hopeless_is_plain_decoding() -> None:
    policy = make_policy("budget", costs=[1.0 + 0.1 * length for length in range(9)])
    policy.begin(["ngram"])
    for _ in range(40):
        policy.observe(policy.choose([0, 1, 2]), Outcome([0, 0, 0]))
    assert policy.choose([0, 1, 2]).arm.off
