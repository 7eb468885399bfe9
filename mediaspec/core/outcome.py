"""What travels between the loop and a policy: the choice before a round and the outcome after it. B rows, K drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .arm import Arm

__all__ = ["Choice", "Outcome"]


@dataclass(frozen=True)
class Choice:
    """What a round shall do.

    Args:
        arm: drafter, draft length, tree and rule; `arm.off` decodes plainly.
        index: of the arm in `policy.arms`.
        rows: the B rows it was chosen for, in the order of the outcome.
        length: longest context among them, tokens.
        lengths: draft length per row where the policy allocates them, each at most `arm.num_draft_tokens`.
        probe: the round is there to learn, the arm is not the best known one.
        entering: the drafter did not run in the round before.
    """

    arm: Arm
    index: int
    rows: tuple[int, ...]
    length: int
    lengths: tuple[int, ...] | None = None
    probe: bool = False
    entering: bool = False


@dataclass(frozen=True)
class Outcome:
    """What a round gave, per row in the order of `Choice.rows`.

    Args:
        accepted: [B] accepted drafts (tree: accepted depth) *before* any cut by a stop token or the token budget:
            the cut shortens the output, not the evidence. A plain round accepts 0.
        seconds: wall clock of the whole round, from one sync of the loop to the next; None when not measured.
        limit: [B] drafts that could have been accepted where something other than the drafter and the choice
            shortened the draft (room left in the budget, a full cache): the levels behind count as censored. A
            draft that the *drafter* ended early (no match, low confidence) is not limited: that is its yield.
        agreement: per drafter name, [B][<= K] chances that its draft at each emitted position of this round would
            be accepted: sum_x min(p, q) for sampled drafts, 1 or 0 for greedy ones. Only `hedge` reads it.
    """

    accepted: Sequence[int]
    seconds: float | None = None
    limit: Sequence[int] | None = None
    agreement: Mapping[str, Sequence[Sequence[float]]] | None = None

    def shortened(self, depth: int) -> bool:
        """True when a row could not show what a draft of `depth` tokens would have given."""
        return self.limit is not None and min(self.limit) < depth

    def tested(self, choice: Choice) -> Sequence[int]:
        """[B] levels of every row that this round could have accepted."""
        own = choice.lengths or (choice.arm.depth,) * len(choice.rows)
        return own if self.limit is None else [min(pair) for pair in zip(own, self.limit)]
