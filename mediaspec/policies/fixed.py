"""One arm for every round: no learning, no measuring, nothing is turned off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..core.arm import PLAIN, Arm
from ..core.component import register_to_config
from ..core.outcome import Choice, Outcome
from ..core.tree import TreeSpec
from .base import DraftPolicy, Learner, check_count

__all__ = ["FixedPolicy"]


class FixedPolicy(DraftPolicy):
    """Always the same drafter, length, tree and rule: (prompt, seed, config) gives the same run everywhere.

    Args:
        num_draft_tokens: K; 0 decodes plainly. drafter: its name; None takes the first one offered.
        tree: parents of a draft tree's nodes (`TreeSpec.parents`), replaces K.
        rule: name of the acceptance rule; None keeps the run's own.

    Raises:
        ValueError: a K below 0; parents that are no tree; at `begin`, a drafter that is not there.

    Example:
        >>> policy = FixedPolicy(num_draft_tokens=4)
        >>> policy.begin(["ngram"])
        >>> policy.choose([0]).arm.num_draft_tokens
        4
    """

    name = "fixed"
    adaptive = False

    @register_to_config
    def __init__(
        self,
        num_draft_tokens: int = 5,
        drafter: str | None = None,
        tree: Sequence[int] | None = None,
        rule: str | None = None,
    ) -> None:
        check_count("num_draft_tokens", num_draft_tokens, 0, 5)
        self._length, self._drafter, self._rule = num_draft_tokens, drafter, rule
        self._tree = None if tree is None else TreeSpec(tuple(tree))
        self._settle(None, None, None, 0, 0)

    def _arms(self, drafters: list[str], limits: Mapping[str, int] | None) -> tuple[Arm, ...]:
        drafter = self._drafter if self._drafter is not None else next(iter(drafters), None)
        if drafter is None or (self._tree is None and self._length == 0):
            return (PLAIN,)
        if self._tree is not None:
            return (Arm(drafter, self._tree.max_depth, self._tree, self._rule),)
        length = min(self._length, (limits or {}).get(drafter, self._length))
        return (Arm(drafter, length, None, self._rule),) if length else (PLAIN,)

    def _fresh(self) -> Learner:
        return Learner()

    def _pick(self, rows: tuple[int, ...], costs: list[float], usable: list[int]) -> int:
        return 0

    def _learn(self, choice: Choice, outcome: Outcome, costs: list[float]) -> None:
        pass
