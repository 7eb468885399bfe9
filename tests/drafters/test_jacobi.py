"""What is particular to Jacobi windows: initial guesses, coupling across passes, saving."""

import pytest
import torch

from mediaspec.core.engine import Engine
from mediaspec.core.grammar import GridGrammar
from mediaspec.core.rng import DRAFT, TARGET, RowRng
from mediaspec.core.tree import TreeSpec
from mediaspec.core.types import DecodeState, TargetOutput, Warp
from mediaspec.drafters import JacobiDrafter
from mediaspec.rules.coupled import CoupledRule
from mediaspec.rules.exact import ExactRule
from tests.drafters.heads import decode
from tests.toy import ToyTarget


def fresh_state(target, tokens, length, purpose=DRAFT, allowed=None):
    """A decoding state with `length` committed tokens."""
    rows = len(tokens)
    buffer = torch.zeros(rows, target.num_tokens + 8, dtype=torch.int64)
    buffer[:, :length] = torch.tensor(tokens)
    return DecodeState(
        tokens=buffer,
        lengths=torch.full((rows,), length),
        branches=1,
        warp=Warp(),
        guidance=None,
        rng=RowRng(torch.arange(rows), target.vocab_size, target.num_tokens),
        draft_purpose=purpose,
        target=target,
        host_lengths=[length] * rows,
        allowed=allowed,
    )


def started(init, tokens, window=6, **settings):
    target = ToyTarget(vocab_size=9, num_tokens=16)
    state = fresh_state(target, tokens, len(tokens[0]), **settings)
    drafter = JacobiDrafter(window=window, init=init)
    drafter.begin(state, TargetOutput(torch.zeros(1)), 8)
    return drafter.propose(state, window)


def test_left_and_repeat_copy_the_newest_token():
    for init in ("left", "repeat"):
        assert started(init, [[3, 1, 4]]).tokens.tolist() == [[4] * 6]


def test_above_copies_the_row_above_and_then_the_window():
    # grid 4 x 4, five tokens known: positions 5..7 stand below 1..3, 8 below 4, 9 and 10 below guesses at 5 and 6
    draft = started("above", [[3, 1, 4, 2, 8]])
    assert draft.tokens.tolist() == [[1, 4, 2, 8, 1, 4]]
    assert started("above", [[3, 1]]).tokens[0, :2].tolist() == [1, 1]


def test_guesses_are_point_masses_and_random_ones_uniform():
    assert torch.equal(started("left", [[3, 1, 4]]).probs.argmax(-1), started("left", [[3, 1, 4]]).tokens)
    allowed = torch.tensor([False, True, True, False, True, False, False, False, True])
    draft = started("random", [[3, 1, 4]] * 50, allowed=allowed)
    assert bool(allowed[draft.tokens].all())
    assert set(draft.tokens.unique().tolist()) == {1, 2, 4, 8}
    assert torch.allclose(draft.probs.sum(-1), torch.ones(50, 6), atol=1e-6)
    assert torch.allclose(draft.probs[..., 1], torch.full((50, 6), 0.25), atol=1e-6)


def test_a_coupling_rule_needs_no_laws():
    draft = started("left", [[3, 1, 4]], purpose=TARGET)
    assert draft.probs is None


def passes(redraft, target, rows=24, window=8):
    drafter = JacobiDrafter(window=window, init="random", redraft=redraft)
    return decode(target, ExactRule(), drafter, rows, num_draft_tokens=window).stats.row_calls


def test_coupled_redraws_need_fewer_passes_than_fresh_ones():
    # SCD's point (arXiv:2410.01699 against its successors): guesses that stay let the sequence converge. Laws that
    # depend weakly on the prefix make the difference visible; 24 rows, fixed seeds.
    target = ToyTarget(vocab_size=12, num_tokens=36, sharpness=0.5)
    fresh, maximal, gumbel = (passes(redraft, target) for redraft in ("fresh", "maximal", "gumbel"))
    assert maximal < fresh
    assert gumbel < fresh


@pytest.mark.parametrize("budget", [2, 6, 9])
def test_budget_and_window_may_differ(budget):
    target = ToyTarget(vocab_size=5, num_tokens=16)
    plain = decode(target, CoupledRule(), None, 4)
    got = decode(target, CoupledRule(), JacobiDrafter(window=6), 4, num_draft_tokens=budget)
    assert torch.equal(got.tokens, plain.tokens)
    assert got.stats.target_calls < plain.stats.target_calls


class GatheringDrafter(JacobiDrafter):
    """Moves windows by the general path even where all rows moved alike."""

    def _slide(self, state, run, seen, moved):
        return self._move(state, run, seen)


@pytest.mark.parametrize("rule", [ExactRule(), CoupledRule()], ids=["laws", "choices"])
@pytest.mark.parametrize("init", ["left", "repeat"])
@pytest.mark.parametrize("window, budget", [(4, 4), (6, 3), (3, 5)])
def test_sliding_and_gathering_give_the_same_windows(rule, init, window, budget):
    target, seeds = ToyTarget(vocab_size=11, num_tokens=25), torch.tensor([5])
    runs = [
        Engine(target, rule, kind(window=window, init=init)).decode(None, seeds, num_draft_tokens=budget)
        for kind in (JacobiDrafter, GatheringDrafter)
    ]
    assert torch.equal(runs[0].tokens, runs[1].tokens)
    assert runs[0].stats.accepted_per_position == runs[1].stats.accepted_per_position
    assert sum(runs[0].stats.accepted_per_position) > 0


def test_forced_tokens_of_a_grammar():
    grammar = GridGrammar(3, 3, end_of_row=6, end_of_image=7, first_id=0, last_id=5, vocab_size=8)
    target = ToyTarget(vocab_size=8, num_tokens=grammar.num_tokens, grid=None)
    seeds, condition = torch.arange(4), torch.zeros(4)
    plain = Engine(target, CoupledRule(), grammar=grammar).decode(condition, seeds)
    for rule in (CoupledRule(), ExactRule()):
        result = Engine(target, rule, JacobiDrafter(window=5), grammar).decode(condition, seeds)
        assert bool((result.tokens[:, 3:12:4] == 6).all())
        assert bool((result.tokens[:, 12] == 7).all())
        if rule.coupled:
            assert torch.equal(result.tokens, plain.tokens)


def test_saved_like_a_scheduler(tmp_path):
    JacobiDrafter(window=5, init="above", redraft="maximal").save_pretrained(tmp_path)
    loaded = JacobiDrafter.from_pretrained(tmp_path)
    assert (loaded.window, loaded.init, loaded.redraft) == (5, "above", "maximal")


def test_refusals():
    with pytest.raises(ValueError, match="window=0"):
        JacobiDrafter(window=0)
    with pytest.raises(ValueError, match="'lft' is not allowed"):
        JacobiDrafter(init="lft")
    with pytest.raises(ValueError, match="'maximal'"):
        JacobiDrafter(redraft="max")
    target = ToyTarget(vocab_size=5, num_tokens=7)
    with pytest.raises(ValueError, match="grid"):
        decode(target, ExactRule(), JacobiDrafter(init="above"), 1)
    with pytest.raises(ValueError, match="chain"):
        decode(target, ExactRule(), JacobiDrafter(), 1, tree=TreeSpec.from_widths([2]))
