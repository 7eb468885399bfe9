"""RowRng: the same numbers alone, in a batch, in any order, from a table or computed directly."""

import pytest
import torch

from mediaspec.core.rng import ACCEPT, DRAFT, TARGET, RowRng
from mediaspec.kernels import philox

SEEDS = torch.tensor([3, -9, 1 << 50, 3])


def make(seeds=SEEDS, horizon=12, **more):
    return RowRng(seeds, vocab_size=10, horizon=horizon, **more)


def test_table_and_direct_computation_agree():
    positions = torch.tensor([[0, 5], [11, 2], [7, 7], [1, 0]])
    table, direct = make(), make(budget_bytes=0)
    for purpose in (TARGET, DRAFT):
        expected = philox.exponential(SEEDS, positions, 10, purpose)
        assert torch.equal(table.exponential(positions, purpose), expected)
        assert torch.equal(direct.exponential(positions, purpose), expected)
        assert torch.equal(table.noise(positions, purpose), expected)
    for sibling in (0, 2):
        expected = philox.uniform(SEEDS, positions, ACCEPT, sibling)
        assert torch.equal(table.uniform(positions, ACCEPT, sibling), expected)
        assert torch.equal(direct.uniform(positions, ACCEPT, sibling), expected)


def test_a_row_alone_and_in_a_batch():
    positions = torch.tensor([[4, 9]])
    batch = make().exponential(positions.expand(4, -1), TARGET)
    for b in range(4):
        assert torch.equal(make(SEEDS[b : b + 1]).exponential(positions, TARGET)[0], batch[b])
    assert torch.equal(batch[0], batch[3])
    assert torch.equal(make().exponential(positions.flip(1).expand(4, -1), TARGET), batch.flip(1))


def test_positions_behind_the_horizon():
    positions = torch.tensor([[11, 12], [500, 43], [44, 45], [0, 10**6]])
    rng = make()
    assert torch.equal(rng.exponential(positions, TARGET), philox.exponential(SEEDS, positions, 10, TARGET))
    assert torch.equal(rng.uniform(positions, ACCEPT), philox.uniform(SEEDS, positions, ACCEPT))


def test_selection_keeps_the_rows_numbers():
    positions = torch.tensor([[4, 9], [0, 3], [2, 2]])
    rows = torch.tensor([2, 0, 2])
    for rng in (make(), make(budget_bytes=0)):
        chosen = rng.select(rows)
        expected = philox.exponential(SEEDS[rows], positions, 10, DRAFT)
        assert torch.equal(chosen.exponential(positions, DRAFT), expected)
        again = chosen.select(torch.tensor([1]))
        assert torch.equal(
            again.exponential(positions[:1], DRAFT), philox.exponential(SEEDS[:1], positions[:1], 10, DRAFT)
        )
        assert torch.equal(again.seeds, SEEDS[:1])


def test_purposes_are_separate():
    positions = torch.arange(10).expand(4, -1)
    rng = make()
    assert not torch.equal(rng.exponential(positions, TARGET), rng.exponential(positions, DRAFT))
    assert len({TARGET, DRAFT, ACCEPT}) == 3


def test_seeds_are_checked():
    with pytest.raises(ValueError, match="int64"):
        make(torch.zeros(2))
