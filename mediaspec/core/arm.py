"""An arm: one speculative configuration a policy can choose for a round, drafter x length x tree x rule.

Which arm runs is chosen from the past alone, so a choice among lossless arms leaves the output law unchanged
(arXiv:2505.15141).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .tree import TreeSpec

__all__ = ["PLAIN", "Arm", "groups_of", "make_arms"]

FIELDS = ("drafter", "num_draft_tokens", "tree", "rule")


@dataclass(frozen=True)
class Arm:
    """What one round does.

    Args:
        drafter: name of the drafter; None decodes plainly.
        num_draft_tokens: K, tokens drafted per row (for a tree: its depth); 0 with no drafter.
        tree: the draft tree, None for a chain.
        rule: name of the acceptance rule; None keeps the run's own.

    Raises:
        ValueError: fields that contradict each other.

    Example:
        >>> Arm("ngram", 4).depth, Arm().off
        (4, True)
    """

    drafter: str | None = None
    num_draft_tokens: int = 0
    tree: TreeSpec | None = None
    rule: str | None = None

    def __post_init__(self) -> None:
        length = self.num_draft_tokens
        if isinstance(length, bool) or not isinstance(length, int) or length < 0:
            raise ValueError(f"num_draft_tokens must be an integer of at least 0, got {length!r}; 0 decodes plainly")
        if self.drafter is not None and (not isinstance(self.drafter, str) or not self.drafter):
            raise ValueError(f"drafter must be a name or None, got {self.drafter!r}")
        if self.drafter is None and (length or self.tree is not None):
            raise ValueError(f"an arm with {length} draft tokens needs a drafter; write Arm('ngram', {length or 4})")
        if self.drafter is not None and not length:
            raise ValueError(f"drafter {self.drafter!r} with 0 draft tokens is plain decoding; write Arm()")
        if self.tree is not None and self.tree.max_depth != length:
            raise ValueError(
                f"the tree is {self.tree.max_depth} levels deep but num_draft_tokens is {length}; "
                f"write num_draft_tokens={self.tree.max_depth}"
            )

    @property
    def off(self) -> bool:
        """True for plain decoding."""
        return self.drafter is None

    @property
    def depth(self) -> int:
        """Most drafts of one row that a round can accept."""
        return self.num_draft_tokens

    def to_dict(self) -> dict[str, Any]:
        """JSON form; a tree is written as its parents."""
        tree = None if self.tree is None else list(self.tree.parents)
        return {"drafter": self.drafter, "num_draft_tokens": self.num_draft_tokens, "tree": tree, "rule": self.rule}

    @staticmethod
    def from_dict(given: Mapping[str, Any]) -> Arm:
        """Reads `to_dict`; absent fields keep their defaults.

        Raises:
            ValueError: not a mapping, or an unknown field.
        """
        if not isinstance(given, Mapping):
            raise ValueError(f"an arm is a dict with any of {FIELDS}, got {given!r}")
        unknown = sorted(set(given) - set(FIELDS))
        if unknown:
            raise ValueError(f"an arm has no field {unknown[0]!r}; it has {FIELDS}")
        tree = given.get("tree")
        spec = None if tree is None else TreeSpec(tuple(tree))
        length = given.get("num_draft_tokens", 0 if spec is None else spec.max_depth)
        return Arm(given.get("drafter"), length, spec, given.get("rule"))


PLAIN = Arm()
"""Speculation off."""


def make_arms(
    drafters: Sequence[str],
    lengths: Iterable[int],
    *,
    trees: Sequence[TreeSpec] = (),
    rules: Sequence[str | None] = (None,),
    limits: Mapping[str, int] | None = None,
) -> tuple[Arm, ...]:
    """Plain decoding, then every drafter x (length or tree) x rule.

    Args:
        drafters: names; lengths: draft lengths, 0 is left out (plain decoding is always there).
        trees: draft trees; rules: rule names, None for the run's own.
        limits: longest useful draft per drafter name.

    Example:
        >>> [arm.num_draft_tokens for arm in make_arms(["ngram"], (2, 4))]
        [0, 2, 4]
    """
    arms = [PLAIN]
    wanted = sorted({length for length in lengths if length})
    for drafter in drafters:
        most = (limits or {}).get(drafter)
        shapes: list[tuple[int, TreeSpec | None]] = [(n, None) for n in wanted if most is None or n <= most]
        shapes += [(tree.max_depth, tree) for tree in trees if most is None or tree.max_depth <= most]
        arms += [Arm(drafter, length, tree, rule) for rule in rules for length, tree in shapes]
    return tuple(arms)


def groups_of(arms: Sequence[Arm]) -> list[list[int]]:
    """Indices of the arms that differ in length alone, shortest first: what one shows, the shorter ones share."""
    groups: dict[Any, list[int]] = {}
    for index, arm in enumerate(arms):
        if not arm.off:
            parents = None if arm.tree is None else arm.tree.parents
            groups.setdefault((arm.drafter, parents, arm.rule), []).append(index)
    return [sorted(group, key=lambda index: arms[index].depth) for group in groups.values()]
