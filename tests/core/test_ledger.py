"""The drift ledger's bookkeeping; its statistics are in tests/rules/test_sequences.py."""

from __future__ import annotations

import math

import pytest
import torch

from mediaspec.core.ledger import Ledger, hellinger_bound, tv_bound
from mediaspec.core.types import Verdict


def verdict(drift: list[list[float]], hellinger: list[list[float]] | None = None, weight: float = 0.0) -> Verdict:
    rows = len(drift)
    squared = None if hellinger is None else torch.tensor(hellinger)
    log_weight = None if hellinger is None else torch.full((rows,), weight)
    zero = torch.zeros(rows, dtype=torch.int64)
    return Verdict(zero, zero, torch.tensor(drift), hellinger=squared, weight=log_weight)


def test_rows_keep_their_sums_when_others_leave() -> None:
    ledger = Ledger(3)
    ledger.add(verdict([[0.1, 0.2], [0.0, 0.0], [0.3, 0.0]]))
    ledger.store([0, 1, 2])
    ledger.select(torch.tensor([0, 2]))
    ledger.add(verdict([[0.0, 0.1], [0.2, 0.2]]))
    ledger.store([0, 2])
    assert ledger.drift() == pytest.approx([0.4, 0.0, 0.7])
    assert ledger.hellinger_bound() is None
    assert ledger.report().bound == pytest.approx(1.1 / 3)


def test_the_hellinger_ledger_weighs_later_rounds() -> None:
    ledger = Ledger(1, kind="hellinger")
    ledger.add(verdict([[0.2]], [[0.01]], weight=math.log(0.5)))
    ledger.add(verdict([[0.2]], [[0.04]], weight=math.log(0.5)))
    ledger.add(verdict([[0.1]], [[0.04]]))
    ledger.store([0])
    total = 0.01 + 0.5 * 0.04 + 0.25 * 0.04
    assert ledger.report().hellinger.tolist() == pytest.approx([total])
    assert ledger.hellinger_bound() == pytest.approx([math.sqrt(1 - (1 - total) ** 2)])
    assert ledger.report().bound == pytest.approx(math.sqrt(1 - (1 - total) ** 2))


def test_a_round_without_drafts_costs_nothing() -> None:
    ledger = Ledger(2, kind="hellinger")
    ledger.add(Verdict(torch.zeros(2), torch.zeros(2), torch.zeros(2, 0)))
    ledger.store(torch.tensor([0, 1]))
    assert ledger.drift() == [0.0, 0.0] and ledger.hellinger_bound() == [0.0, 0.0]


def test_no_ledger_books_nothing() -> None:
    ledger = Ledger(1, kind="none")
    ledger.add(verdict([[0.5]]))
    ledger.store([0])
    assert ledger.drift() == [0.0]


def test_bounds_never_pass_one() -> None:
    assert tv_bound(torch.tensor([3.0, 1.0])) == 1.0
    assert hellinger_bound(torch.tensor([1.7])) == 1.0
    assert hellinger_bound(torch.zeros(4)) == 0.0


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match='write ledger="tv"'):
        Ledger(1, kind="kl")
