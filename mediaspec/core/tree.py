"""Static draft trees: topology, attention among nodes, and the tables the verifier walks.

Row 0 of a scored tree is the root (the last committed token); node i of the draft is row i + 1. Nodes are in level
order, siblings next to each other in the order they were drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ..kernels.verify_tree import TreeTables

__all__ = ["TreeSpec"]


@dataclass(frozen=True)
class TreeSpec:
    """A fixed tree of draft nodes.

    Args:
        parents: for every node its parent's row, 0 for the root, i + 1 for node i; level order.

    Raises:
        ValueError: a parent comes after its child, or the nodes are not in level order with siblings together.

    Example:
        >>> tree = TreeSpec.from_widths([2, 1])        # two children, each with one child
        >>> tree.parents, tree.depth
        ((0, 0, 1, 2), (0, 1, 1, 2, 2))
    """

    parents: tuple[int, ...]
    _cache: dict[tuple[str, str], Tensor | TreeTables] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.parents:
            raise ValueError("a draft tree needs at least one node; to switch speculation off use num_draft_tokens=0")
        for node, parent in enumerate(self.parents):
            if not 0 <= parent <= node:
                raise ValueError(f"parent {parent} of node {node} must be the root (0) or an earlier row (1..{node})")
        if list(self.parents) != sorted(self.parents):
            raise ValueError(f"nodes must be in level order with siblings together, got parents {self.parents}")

    @staticmethod
    def from_widths(widths: Sequence[int]) -> TreeSpec:
        """A full tree: every node of level d has widths[d] children."""
        if not widths or min(widths) < 1:
            raise ValueError(f"widths must be positive, got {list(widths)}")
        parents: list[int] = []
        level = [0]
        for width in widths:
            following = []
            for row in level:
                for _ in range(width):
                    parents.append(row)
                    following.append(len(parents))
            level = following
        return TreeSpec(tuple(parents))

    @staticmethod
    def from_paths(paths: Sequence[Sequence[int]]) -> TreeSpec:
        """Nodes given as paths of child ranks, e.g. [(0,), (1,), (0, 0)]: the notation of published static trees."""
        ordered = sorted((tuple(path) for path in paths), key=lambda path: (len(path), path))
        rows: dict[tuple[int, ...], int] = {(): 0}
        for number, path in enumerate(ordered, start=1):
            if path[:-1] not in rows or (path[-1] > 0 and path[:-1] + (path[-1] - 1,) not in rows):
                raise ValueError(f"path {path} needs its parent and its elder sibling in the list")
            rows[path] = number
        return TreeSpec(tuple(rows[path[:-1]] for path in ordered))

    @staticmethod
    def chain(length: int) -> TreeSpec:
        return TreeSpec(tuple(range(length)))

    @property
    def num_nodes(self) -> int:
        return len(self.parents)

    @cached_property
    def depth(self) -> tuple[int, ...]:
        """Depth of every row, the root first."""
        depth = [0]
        for parent in self.parents:
            depth.append(depth[parent] + 1)
        return tuple(depth)

    @property
    def max_depth(self) -> int:
        return max(self.depth)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Child rows of every row in draw order."""
        table: list[list[int]] = [[] for _ in range(self.num_nodes + 1)]
        for node, parent in enumerate(self.parents):
            table[parent].append(node + 1)
        return tuple(tuple(row) for row in table)

    @cached_property
    def internal(self) -> tuple[int, ...]:
        """Rows that have children, in row order: row p of `Draft.probs` is the law their children were drawn from."""
        return tuple(row for row, below in enumerate(self.children) if below)

    def levels(self) -> list[list[int]]:
        """Rows grouped by depth, the root's level first."""
        groups: list[list[int]] = [[] for _ in range(self.max_depth + 1)]
        for row, depth in enumerate(self.depth):
            groups[depth].append(row)
        return groups

    def depth_tensor(self, device: torch.device) -> Tensor:
        """[N + 1] int64."""
        return self._tensor("depth", device)

    def ancestor_tensor(self, device: torch.device) -> Tensor:
        """[N + 1, N + 1] bool: row i may attend to row j (its ancestors and itself)."""
        return self._tensor("ancestor", device)

    def tables(self, device: torch.device) -> TreeTables:
        """The verifier's view of this tree on `device`."""
        key = ("tables", str(device))
        if key not in self._cache:
            width = max(len(below) for below in self.children)
            rows = [list(below) + [-1] * (width - len(below)) for below in self.children]
            number = {row: index for index, row in enumerate(self.internal)}
            self._cache[key] = TreeTables(
                parents=torch.tensor(self.parents, device=device),
                children=torch.tensor(rows, device=device),
                depth=torch.tensor(self.depth, device=device),
                internal=torch.tensor([number.get(row, -1) for row in range(self.num_nodes + 1)], device=device),
                levels=self.max_depth,
            )
        tables = self._cache[key]
        assert isinstance(tables, TreeTables)
        return tables

    def _tensor(self, name: str, device: torch.device) -> Tensor:
        key = (name, str(device))
        if key not in self._cache:
            if name == "depth":
                value = torch.tensor(self.depth, device=device)
            else:
                value = torch.eye(self.num_nodes + 1, dtype=torch.bool, device=device)
                for node, parent in enumerate(self.parents):
                    value[node + 1] |= value[parent]
            self._cache[key] = value
        tensor = self._cache[key]
        assert isinstance(tensor, Tensor)
        return tensor
