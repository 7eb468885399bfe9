"""The decode loop on exact toy models: same tokens whatever drafts, whatever shares the batch, whatever is forced."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from scipy import stats

from mediaspec.core.engine import DecodingError, Engine, Round
from mediaspec.core.grammar import GridGrammar
from mediaspec.core.kv import KVStore
from mediaspec.core.tree import TreeSpec
from mediaspec.core.types import TargetOutput, Warp
from mediaspec.drafters.model import ModelDrafter
from mediaspec.rules import make_rule
from tests.toy import ToyTarget

SEEDS = torch.tensor([11, 22, 33, 44, 55, 66, 77, 88])
CONDITION = torch.tensor([0, 3, 1, 2, 5, 0, 2, 2, 9, 1, 4, 4, 7, 0, 6, 1])


def toy_engine(rule: str = "coupled", drafter: bool = True, **settings: object) -> Engine:
    target = ToyTarget(5, 16)
    return Engine(target, make_rule(rule, **settings), ModelDrafter(ToyTarget(5, 16, gap=0.8)) if drafter else None)


def plain_tokens(**settings: object) -> torch.Tensor:
    return toy_engine(drafter=False).decode(CONDITION, SEEDS, guidance_scale=1.5, **settings).tokens


@pytest.mark.parametrize("length", [1, 4, 9, 20])
def test_coupled_drafts_give_the_tokens_of_plain_decoding(length: int) -> None:
    result = toy_engine().decode(CONDITION, SEEDS, guidance_scale=1.5, num_draft_tokens=length)
    assert torch.equal(result.tokens, plain_tokens())
    assert result.stats.target_calls < 16 and result.stats.guarantee == "exact-tokens"
    assert result.stats.tokens == 8 * 16 and result.lengths == [16] * 8


@pytest.mark.parametrize("widths", [(2, 1), (3, 2, 1), (1, 1, 1, 1)])
def test_coupled_trees_give_the_tokens_of_plain_decoding(widths: tuple[int, ...]) -> None:
    tree = TreeSpec.from_widths(widths)
    result = toy_engine().decode(CONDITION, SEEDS, guidance_scale=1.5, tree=tree)
    assert torch.equal(result.tokens, plain_tokens())


@pytest.mark.parametrize("tree", [None, (2, 2)])
@pytest.mark.parametrize("rule", ["exact", "cool_sd"])
def test_a_row_does_not_notice_its_neighbours(rule: str, tree: tuple[int, ...] | None) -> None:
    spec = TreeSpec.from_widths(tree) if tree else None
    whole = toy_engine(rule).decode(CONDITION, SEEDS, guidance_scale=1.5, tree=spec)
    for row in range(8):
        alone = toy_engine(rule).decode(
            CONDITION[2 * row : 2 * row + 2], SEEDS[row : row + 1], guidance_scale=1.5, tree=spec
        )
        assert torch.equal(alone.tokens[0], whole.tokens[row])
        assert alone.stats.drift[0] == pytest.approx(whole.stats.drift[row], abs=1e-5)


def test_copies_fork_after_one_prefill() -> None:
    copies = torch.tensor([0, 0, 1, 1, 1])
    forked = toy_engine("exact").decode(torch.tensor([4, 1]), SEEDS[:5], copies=copies)
    repeated = toy_engine("exact").decode(torch.tensor([4, 4, 1, 1, 1]), SEEDS[:5])
    assert torch.equal(forked.tokens, repeated.tokens)


@pytest.mark.parametrize("tree", [None, (2, 1)])
@pytest.mark.parametrize("rule", ["exact", "coupled"])
def test_the_law_of_whole_sequences_is_the_targets(rule: str, tree: tuple[int, ...] | None) -> None:
    """Chi-square over all 3^3 sequences, 8,000 rows, threshold p > 0.001 with fixed seeds."""
    target = ToyTarget(3, 3, grid=(1, 3))
    engine = Engine(target, make_rule(rule), ModelDrafter(ToyTarget(3, 3, gap=0.8, grid=(1, 3))))
    rows = 8000
    spec = TreeSpec.from_widths(tree) if tree else None
    copies = torch.zeros(rows, dtype=torch.int64)
    seeds = torch.arange(rows) + 1000
    tokens = engine.decode(torch.zeros(1), seeds, copies=copies, num_draft_tokens=2, tree=spec).tokens
    seen = Counter(map(tuple, tokens.tolist()))
    observed, expected = [], []
    for sequence in itertools.product(range(3), repeat=3):
        mass = 1.0
        for i, token in enumerate(sequence):
            mass *= float(target.logits(list(sequence[:i])).softmax(-1)[token])
        observed.append(seen[sequence])
        expected.append(rows * mass)
    assert stats.chisquare(observed, expected).pvalue > 0.001


def test_greedy_follows_the_argmax() -> None:
    target = ToyTarget(5, 16)
    tokens = toy_engine("exact").decode(torch.tensor([0]), SEEDS[:1], warp=Warp(temperature=0.0)).tokens[0].tolist()
    for position, token in enumerate(tokens):
        assert token == int(target.logits(tokens[:position]).argmax())


@pytest.mark.parametrize("rule", ["coupled", "exact", "cool_sd"])
def test_forced_tokens_appear_where_the_grammar_puts_them(rule: str) -> None:
    grammar = GridGrammar(width=3, height=3, end_of_row=6, end_of_image=7, first_id=0, last_id=5, vocab_size=8)
    target = ToyTarget(8, grammar.num_tokens, grid=None)
    draft = ToyTarget(8, grammar.num_tokens, gap=0.8, grid=None)
    plain = Engine(target, make_rule(rule), None, grammar).decode(torch.zeros(4), SEEDS[:4], trace=True)
    fast = Engine(target, make_rule(rule), ModelDrafter(draft), grammar).decode(torch.zeros(4), SEEDS[:4], trace=True)
    for result in (plain, fast):
        assert (result.tokens[:, [3, 7, 11]] == 6).all() and (result.tokens[:, 12] == 7).all()
        free = result.tokens[:, [0, 1, 2, 4, 5, 6, 8, 9, 10]]
        assert (free <= 5).all()
        assert result.trace is not None and (result.trace.kind[:, [3, 7, 11, 12]] == 3).all()
        assert (result.trace.drift[:, [3, 7, 11, 12]] == 0).all()
    if rule == "coupled":
        assert torch.equal(plain.tokens, fast.tokens)


def test_counts_and_trace_add_up() -> None:
    result = toy_engine("cool_sd").decode(CONDITION, SEEDS, guidance_scale=1.5, trace=True, num_draft_tokens=3)
    trace, stats_ = result.trace, result.stats
    assert trace is not None
    assert int((trace.kind == trace.ACCEPTED).sum()) == sum(stats_.accepted_per_position)
    assert all(a <= t for a, t in zip(stats_.accepted_per_position, stats_.tested_per_position))
    assert int((trace.kind == trace.RESAMPLED).sum()) == sum(stats_.tested_per_position) - sum(
        stats_.accepted_per_position
    )
    assert trace.drift.sum(1).tolist() == pytest.approx(stats_.drift, abs=1e-5)
    rounds_of_row = [len(set(row)) for row in trace.round.tolist()]
    assert sum(rounds_of_row) == stats_.row_calls
    assert stats_.tokens_per_call == pytest.approx(128 / stats_.row_calls)


def test_a_run_can_be_stopped_and_keeps_what_it_has() -> None:
    seen: list[int] = []

    def stop(step: Round) -> bool:
        seen.append(step.index)
        return step.index < 2

    result = toy_engine().decode(CONDITION, SEEDS, guidance_scale=1.5, on_round=stop)
    assert seen == [0, 1, 2]
    plain = plain_tokens()
    for row, length in enumerate(result.lengths):
        assert 3 <= length < 16 and torch.equal(result.tokens[row, :length], plain[row, :length])


class BrokenTarget(ToyTarget):
    """Gives NaN logits for row 1 from the third token on."""

    def score(self, tokens: torch.Tensor, cache: KVStore, tree: TreeSpec | None = None) -> TargetOutput:
        before = cache.host_lengths
        output = super().score(tokens, cache, tree)
        if len(before) > 1 and before[1] >= 3:
            output.logits[1] = float("nan")
        return output


@pytest.mark.parametrize("drafter", [False, True])
def test_nan_logits_name_the_row_and_the_position(drafter: bool) -> None:
    helper = ModelDrafter(ToyTarget(5, 16, gap=0.8)) if drafter else None
    engine = Engine(BrokenTarget(5, 16), make_rule("exact"), helper)
    with pytest.raises(DecodingError, match="NaN or infinite") as caught:
        engine.decode(torch.zeros(3), SEEDS[:3])
    assert caught.value.rows == [1]


class CliffTarget(ToyTarget):
    """Gives NaN logits behind the last position of the image, where nothing is ever drawn."""

    def score(self, tokens: torch.Tensor, cache: KVStore, tree: TreeSpec | None = None) -> TargetOutput:
        output = super().score(tokens, cache, tree)
        behind = [length >= self.prefix + self.num_tokens - 1 for length in cache.host_lengths]
        output.logits[torch.tensor(behind)] = float("nan")
        return output


@pytest.mark.parametrize("rule", ["exact", "coupled", "cool_sd"])
def test_a_finished_row_that_waits_for_the_others_cannot_fail(rule: str) -> None:
    helper = ModelDrafter(ToyTarget(5, 16, gap=0.8))
    cliff, whole = (
        Engine(kind(5, 16), make_rule(rule), helper).decode(torch.zeros(8), SEEDS) for kind in (CliffTarget, ToyTarget)
    )
    assert torch.equal(cliff.tokens, whole.tokens)


def test_impossible_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="one prompt per seed"):
        toy_engine().decode(torch.zeros(1), SEEDS, copies=torch.zeros(3, dtype=torch.int64))
    for seeds in (SEEDS[:0], SEEDS.float(), SEEDS[None], SEEDS[0]):
        with pytest.raises(ValueError, match="give int64"):
            toy_engine().decode(torch.zeros(8), seeds)
    with pytest.raises(ValueError, match="num_draft_tokens must be 0"):
        toy_engine().decode(CONDITION, SEEDS, guidance_scale=1.5, num_draft_tokens=-1)
    with pytest.raises(ValueError, match="2 guidance branch"):
        toy_engine().decode(CONDITION[:5], SEEDS, guidance_scale=1.5)
    with pytest.raises(ValueError, match="vocab"):
        Engine(ToyTarget(5, 16), make_rule("exact"), ModelDrafter(ToyTarget(7, 16))).decode(torch.zeros(1), SEEDS[:1])
