"""What is particular to drafting with a smaller model."""

import pytest
import torch

from mediaspec.core.engine import Engine
from mediaspec.core.tree import TreeSpec
from mediaspec.drafters import ModelDrafter
from mediaspec.rules.coupled import CoupledRule
from mediaspec.rules.exact import ExactRule
from tests.drafters.heads import decode
from tests.toy import ToyTarget

TARGET = ToyTarget(vocab_size=7, num_tokens=16, prefix=3)


@pytest.mark.parametrize("guidance", [None, 2.0])
@pytest.mark.parametrize("tree", [None, TreeSpec.from_widths([2, 1, 1, 1])])
def test_the_target_itself_is_always_accepted(tree, guidance):
    for rows in (1, 5):
        drafter = ModelDrafter(ToyTarget(vocab_size=7, num_tokens=16, prefix=2))
        result = decode(TARGET, ExactRule(), drafter, rows, num_draft_tokens=4, tree=tree, guidance_scale=guidance)
        assert result.stats.target_calls == 1 + 3


def test_copies_fork_the_draft_cache_too():
    copies = torch.tensor([0, 1, 1, 0])
    drafter = ModelDrafter(ToyTarget(vocab_size=7, num_tokens=16, gap=0.8))
    seeds = torch.arange(4)
    forked = Engine(TARGET, ExactRule(), drafter).decode(torch.tensor([3, 5]), seeds, copies=copies)
    whole = Engine(TARGET, ExactRule(), drafter).decode(torch.tensor([3, 5, 5, 3]), seeds)
    assert torch.equal(forked.tokens, whole.tokens)
    assert forked.stats.accepted_per_position == whole.stats.accepted_per_position


def test_finished_rows_leave():
    drafter = ModelDrafter(ToyTarget(vocab_size=7, num_tokens=16, gap=0.8))
    result = decode(TARGET, CoupledRule(), drafter, 8, num_draft_tokens=9)
    plain = decode(TARGET, CoupledRule(), None, 8)
    assert torch.equal(result.tokens, plain.tokens)
    assert result.stats.row_calls < 8 * result.stats.target_calls


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (ToyTarget(vocab_size=8, num_tokens=16), "vocab_size=8 but the target has 7"),
        (ToyTarget(vocab_size=7, num_tokens=9), "9 tokens"),
        (ToyTarget(vocab_size=7, num_tokens=16, grid=(2, 8)), r"\(2, 8\)"),
    ],
)
def test_refuses_a_foreign_target(other, message):
    with pytest.raises(ValueError, match=message):
        decode(TARGET, ExactRule(), ModelDrafter(other), 1)
