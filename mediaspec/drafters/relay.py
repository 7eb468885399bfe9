"""Two drafters in one draft: a network proposes the first tokens, where the newest ones count, a free one the rest.

A Jacobi window costs nothing but goes stale at its front after a rejection: its first guesses were drawn behind the
token that was just replaced. A draft head reads the new token, but every further token costs a step. Their concatenation
is again a draft whose every token was drawn from a law known at that time: the numbers of a position are used for no
other, so what stands before it, whoever proposed it, does not depend on them.

B rows, K draft length, n tokens of the first drafter, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.law import point_mass
from ..core.tree import TreeSpec
from ..core.types import DecodeState, Draft, Drafter, TargetOutput, Verdict
from ._draw import draft_lengths

__all__ = ["RelayDrafter"]


class RelayDrafter:
    """Lets one drafter begin and another go on.

    Args:
        first: proposes the first `handover` tokens, for instance an `EagleDrafter`.
        rest: proposes the others, for instance a `JacobiDrafter`.
        handover: n, at least 1.

    Raises:
        ValueError: handover below 1, or from `propose` a tree.

    Example:
        >>> RelayDrafter(EagleDrafter(head), JacobiDrafter(), handover=2)  # doctest: +SKIP
    """

    def __init__(self, first: Drafter, rest: Drafter, handover: int = 1) -> None:
        if handover < 1:
            raise ValueError(f"handover={handover}; write how many tokens the first drafter proposes, e.g. handover=1")
        self.first, self.rest, self.handover = first, rest, handover

    @property
    def needs(self) -> frozenset[str]:
        return self.first.needs | self.rest.needs

    def begin(self, state: DecodeState, output: TargetOutput, extra: int) -> None:
        self.first.begin(state, output, extra)
        self.rest.begin(state, output, extra)

    def propose(self, state: DecodeState, budget: int, tree: TreeSpec | None = None) -> Draft:
        if tree is not None:
            raise ValueError("a relay drafts chains; leave tree=None with this drafter")
        head, tail = self.first.propose(state, min(self.handover, budget)), self.rest.propose(state, budget)
        count = head.tokens.shape[1]
        tokens = torch.cat([head.tokens, tail.tokens[:, count:]], 1)
        probs = None
        if head.probs is not None or tail.probs is not None:
            vocab = state.target.vocab_size
            laws = [point_mass(draft.tokens, vocab) if draft.probs is None else draft.probs for draft in (head, tail)]
            probs = torch.cat([laws[0], laws[1][:, count:]], 1)
        return Draft(tokens, torch.maximum(tail.lengths, draft_lengths(state, count)), probs)

    def observe(self, state: DecodeState, draft: Draft, verdict: Verdict, output: TargetOutput) -> None:
        self.first.observe(state, draft, verdict, output)
        self.rest.observe(state, draft, verdict, output)

    def select(self, rows: Tensor) -> None:
        self.first.select(rows)
        self.rest.select(rows)
