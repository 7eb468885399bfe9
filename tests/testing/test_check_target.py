"""The suite passes a right target and catches targets broken in one place each."""

import pytest
import torch

from mediaspec.core.types import TargetOutput
from mediaspec.testing.check_target import check_target
from tests.toy import ToyTarget


def condition(rows):
    return 2 * torch.arange(rows)


@pytest.mark.parametrize(
    "target", [ToyTarget(), ToyTarget(vocab_size=11, num_tokens=9, prefix=4, gap=0.8), ToyTarget(num_tokens=7)]
)
def test_right_targets_pass(target):
    check_target(target, condition)


class Misplaced(ToyTarget):
    """Takes every row's positions from row 0."""

    def score(self, tokens, cache, tree=None):
        wrong = super().score(tokens + 0, cache, tree)
        if min(cache.host_lengths) == max(cache.host_lengths):
            return wrong
        lengths = cache.lengths
        cache.lengths, cache.host_lengths = lengths[:1].expand_as(lengths), [cache.host_lengths[0]] * cache.rows
        output = super().score(tokens, cache, tree)
        cache.lengths, cache.host_lengths = lengths, lengths.tolist()
        return output


class TreeBlind(ToyTarget):
    """Lets tree nodes see all nodes before them."""

    def score(self, tokens, cache, tree=None):
        return super().score(tokens, cache)


class Forgetful(ToyTarget):
    """Sees only its own block."""

    def score(self, tokens, cache, tree=None):
        cache.keys[:, :, :, : max(cache.host_lengths)] = 0
        return super().score(tokens, cache, tree)


class Normed(ToyTarget):
    """Reports hidden states that its head does not read."""

    def score(self, tokens, cache, tree=None):
        output = super().score(tokens, cache, tree)
        return TargetOutput(output.logits, output.hidden * 0.5)


class Committing(ToyTarget):
    """Moves the cache's lengths itself."""

    def score(self, tokens, cache, tree=None):
        output = super().score(tokens, cache, tree)
        cache.advance(torch.full_like(cache.lengths, tokens.shape[1]))
        return output


class Tight(ToyTarget):
    """Leaves no room for drafts at the end of an image."""

    def new_cache(self, rows, extra):
        return super().new_cache(rows, 0)


class Mixing(ToyTarget):
    """Rows see each other."""

    def score(self, tokens, cache, tree=None):
        output = super().score(tokens, cache, tree)
        return TargetOutput(output.logits + output.logits.mean(0), None)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (Misplaced, "different lengths"),
        (TreeBlind, "tree node"),
        (Forgetful, "one block"),
        (Normed, "hidden"),
        (Committing, "moved the cache's lengths"),
        (Tight, "does not fit"),
        (Mixing, "row 0 alone"),
    ],
)
def test_broken_targets_fail(broken, message):
    with pytest.raises(AssertionError, match=message):
        check_target(broken(), condition)


def test_a_target_that_is_too_short_is_refused():
    with pytest.raises(ValueError, match="at least 5"):
        check_target(ToyTarget(num_tokens=3), condition)
