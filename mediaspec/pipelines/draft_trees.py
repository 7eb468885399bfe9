"""Draft trees in the notations people write, and a likely tree of a given size."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from ..core.tree import TreeSpec

__all__ = ["draft_tree", "likely_tree"]

FIRST_CHILD = 0.6
"""Chance of a node's first child that `likely_tree` assumes."""
NEXT_CHILD = 0.4
"""What each later sibling has of the chance of the one before it."""


def draft_tree(given: TreeSpec | Sequence[Any] | str | None) -> TreeSpec | None:
    """A tree in any of the notations people write.

    Args:
        given: a `TreeSpec`; children per level, [3, 2, 1]; paths of child ranks, [(0,), (1,), (0, 0)], also as text.

    Raises:
        ValueError: something else, or no tree.

    Example:
        >>> draft_tree([2, 1]).parents == draft_tree("[(0,), (1,), (0, 0), (1, 0)]").parents
        True
    """
    if given is None or isinstance(given, TreeSpec):
        return given
    wanted: Any = given
    if isinstance(given, str):
        try:
            wanted = ast.literal_eval(given)
        except (ValueError, SyntaxError):
            wanted = None
    if isinstance(wanted, Sequence) and not isinstance(wanted, str) and wanted:
        if all(type(one) is int for one in wanted):
            return TreeSpec.from_widths(wanted)
        if all(isinstance(one, Sequence) and not isinstance(one, str) and one for one in wanted):
            return TreeSpec.from_paths(wanted)
    raise ValueError(
        f"tree={given!r}; write a TreeSpec, the children per level such as [3, 2, 1], or paths of child ranks such as "
        f"[(0,), (1,), (0, 0)]"
    )


def likely_tree(topk: int, depth: int, nodes: int) -> TreeSpec:
    """The likeliest nodes of a tree with `topk` children everywhere, where a first child is right with chance 0.6 and
    every later sibling with 0.4 of the chance before it: a fixed stand-in for trees that are chosen by confidence.

    Args:
        topk: children per node at most; depth: levels; nodes: of the tree, the root not counted.

    Raises:
        ValueError: a number below 1.

    Example:
        >>> likely_tree(2, 3, 4).parents
        (0, 0, 1, 3)
    """
    if min(topk, depth, nodes) < 1:
        raise ValueError(f"a tree of {topk} children, {depth} levels and {nodes} nodes; write numbers of at least 1")
    chances = [FIRST_CHILD * NEXT_CHILD**rank for rank in range(topk)]
    best: list[tuple[float, tuple[int, ...]]] = []
    frontier: list[tuple[float, tuple[int, ...]]] = [(chances[0], (0,))]
    while frontier and len(best) < nodes:
        chance, path = max(frontier, key=lambda one: (one[0], -len(one[1]), [-rank for rank in one[1]]))
        frontier.remove((chance, path))
        best.append((chance, path))
        if path[-1] + 1 < topk:
            frontier.append((chance * NEXT_CHILD, path[:-1] + (path[-1] + 1,)))
        if len(path) < depth:
            frontier.append((chance * chances[0], (*path, 0)))
    return TreeSpec.from_paths([path for _, path in best])
