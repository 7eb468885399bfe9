"""A static draft tree cut into levels: what a drafter draws, feeds and lets see each other, one level at a time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..core.tree import TreeSpec

__all__ = ["Level", "expand_children", "tree_levels"]


@dataclass(frozen=True)
class Level:
    """The inner nodes (those with children) of one depth, n of them; level 0 is the root alone.

    Args:
        width: the most children one of them has.
        picks: [children] int64, index of every child into the n * width draws, in row order; None when all are used.
        rows: [n] int64, their rows in the scored tree.
        among_siblings: [n] int64, index of the level's inner nodes among all nodes of their depth.
        parents: [n] int64, index of their parents among the inner nodes one level up.
        first: inner nodes of all levels between the root and this one.
        ancestors: [n, first + n] bool, which of the inner nodes below the root each one sees (ancestors and itself).
    """

    width: int
    picks: Tensor | None
    rows: Tensor
    among_siblings: Tensor
    parents: Tensor
    first: int
    ancestors: Tensor


def expand_children(drawn: Tensor, level: Level) -> Tensor:
    """Draws [B, n] or [B, n, width] of a level's inner nodes to their children [B, children] in row order."""
    tokens = drawn.flatten(1)
    return tokens if level.picks is None else tokens.index_select(1, level.picks)


def tree_levels(tree: TreeSpec, device: torch.device) -> tuple[Level, ...]:
    """The levels of `tree` that have children, from the root on; tables are built once per topology and device."""
    return _tree_levels(tree.parents, device)


@lru_cache(maxsize=64)
def _tree_levels(parents: tuple[int, ...], device: torch.device) -> tuple[Level, ...]:
    tree = TreeSpec(parents)
    children, groups = tree.children, tree.levels()
    inner = [[row for row in group if children[row]] for group in groups]
    below_root = [row for rows in inner[1:] for row in rows]
    slot = {row: index for index, row in enumerate(below_root)}
    ancestor = tree.ancestor_tensor(torch.device("cpu"))
    levels = []
    first = 0
    for depth, rows in enumerate(inner):
        if not rows:
            break
        width = max(len(children[row]) for row in rows)
        picks = [i * width + rank for i, row in enumerate(rows) for rank in range(len(children[row]))]
        full = len(picks) == len(rows) * width
        siblings = [groups[depth].index(row) for row in rows]
        above = [inner[depth - 1].index(parents[row - 1]) for row in rows] if depth else [0]
        count = 0 if depth == 0 else len(rows)
        seen = torch.zeros(count, first + count, dtype=torch.bool)
        for i in range(count):
            for other in below_root[: first + count]:
                seen[i, slot[other]] = ancestor[rows[i], other]
        levels.append(
            Level(
                width=width,
                picks=None if full else torch.tensor(picks, device=device),
                rows=torch.tensor(rows, device=device),
                among_siblings=torch.tensor(siblings, device=device),
                parents=torch.tensor(above, device=device),
                first=first,
                ancestors=seen.to(device),
            )
        )
        first += count
    return tuple(levels)
