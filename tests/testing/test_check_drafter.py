"""The suite catches drafters broken in one place each (right ones pass it in tests/drafters)."""

from dataclasses import replace

import pytest
import torch

from mediaspec.core.types import Draft
from mediaspec.drafters import EagleDrafter, JacobiDrafter, ModelDrafter
from mediaspec.testing.check_drafter import check_drafter
from tests.drafters.heads import toy_condition, toy_head
from tests.toy import ToyTarget

TARGET = ToyTarget(vocab_size=7, num_tokens=9)


class Sharpened(ModelDrafter):
    """States a sharper law than it draws from."""

    def propose(self, state, budget, tree=None):
        draft = super().propose(state, budget, tree)
        return draft if draft.probs is None else replace(draft, probs=(1.3 * draft.probs.log()).softmax(-1))


class DeepLie(ModelDrafter):
    """States the first row's law at every position."""

    def propose(self, state, budget, tree=None):
        draft = super().propose(state, budget, tree)
        if draft.probs is None:
            return draft
        law = (draft.probs[:, :1] + 0.05 * draft.probs) / 1.05
        return replace(draft, probs=torch.cat([draft.probs[:, :1], law[:, 1:]], 1))


class RaggedCache(EagleDrafter):
    """Forgets that rows have different lengths."""

    def observe(self, state, draft, verdict, output):
        host = state.host_lengths
        super().observe(replace(state, host_lengths=host[:1] * len(host)), draft, verdict, output)


class Scribbling(JacobiDrafter):
    """Writes to the state."""

    def propose(self, state, budget, tree=None):
        state.tokens[:, 0] += 1
        return super().propose(state, budget, tree)


class Empty(JacobiDrafter):
    """Drafts no column at all."""

    def propose(self, state, budget, tree=None):
        draft = super().propose(state, budget, tree)
        probs = draft.probs[:, :0] if draft.probs is not None else None
        return Draft(draft.tokens[:, :0], draft.lengths.clamp(max=0), probs)


class Impure(JacobiDrafter):
    """Draws with numbers of its own."""

    count = 0

    def propose(self, state, budget, tree=None):
        draft = super().propose(state, budget, tree)
        Impure.count += 1
        tokens = (draft.tokens + Impure.count) % state.target.vocab_size
        law = torch.nn.functional.one_hot(tokens, state.target.vocab_size).float()
        return replace(draft, tokens=tokens, probs=None if draft.probs is None else law)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sharpened(ToyTarget(7, 9, gap=0.8)), "must be the law the token was drawn from"),
        (lambda: DeepLie(ToyTarget(7, 9, gap=0.8)), "must be the law the token was drawn from"),
        (lambda: RaggedCache(toy_head(TARGET)), "in a batch of 5"),
        (lambda: Scribbling(window=3), "wrote to the state"),
        (lambda: Empty(window=3), "instead of int64"),
        (lambda: Impure(window=3), "two equal runs|alone differs"),
    ],
)
def test_broken_drafters_fail(make, message):
    with pytest.raises(AssertionError, match=message):
        check_drafter(make, TARGET, toy_condition(1), budgets=(4,), rows=512)


def test_unknown_needs_are_refused():
    class Curious(JacobiDrafter):
        needs = frozenset({"weather"})

    with pytest.raises(AssertionError, match="weather"):
        check_drafter(lambda: Curious(), TARGET, toy_condition(1))
