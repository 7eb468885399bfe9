"""Draft trees grown by beam search: the likeliest continuations of a chain head (arXiv:2502.17421, section 3.3).

Every step keeps the w best (frontier node, token) pairs by cumulative draft log-probability. Nodes of earlier steps
are never dropped while growing, so keys of the draft need not move; `Beam.best` cuts the grown tree afterwards.

Letters: B rows, f frontier nodes, n nodes so far (the root is row 0 and no node), V draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.tree import TreeSpec

__all__ = ["Beam", "Front", "grow_beam"]


@dataclass(frozen=True)
class Front:
    """The nodes whose children are wanted next.

    Args:
        depth: 0 for the root.
        first: row of the first of them; they are rows first .. first + f - 1.
        tokens: [B, f] int64; what stands there at depth 0 means nothing.
        seen: [B, f, first + f - 1] bool, which of rows 1.. each of them sees (ancestors and itself).
    """

    depth: int
    first: int
    tokens: Tensor
    seen: Tensor


@dataclass(frozen=True)
class Beam:
    """A grown tree per row; n nodes in the order they were kept, so levels lie one behind the other.

    Args:
        tokens: [B, n] int64.
        parents: [B, n] int64 rows: 0 is the root, i + 1 node i.
        scores: [B, n] float32 cumulative log-probability of the path to each node.
        depth: n depths from 1 on.
    """

    tokens: Tensor
    parents: Tensor
    scores: Tensor
    depth: tuple[int, ...]

    def best(self, count: int, row: int = 0) -> tuple[TreeSpec, Tensor]:
        """The `count` likeliest nodes of one row as a topology for verification.

        A child is never likelier than its parent, so the kept nodes are a tree. This reads the tree on the host.

        Returns:
            The tree, and [count] int64 indices of its nodes into this beam's, in the tree's order: level by level,
            siblings together, the likelier first.
        """
        parents, scores = self.parents[row].tolist(), self.scores[row].tolist()
        ranked = sorted(range(len(parents)), key=lambda node: (-scores[node], node))
        kept = sorted(ranked[:count])
        place: dict[int, int] = {0: 0}
        order: list[int] = []
        mapped: list[int] = []
        for level in range(1, max(self.depth) + 1):
            nodes = [node for node in kept if self.depth[node] == level]
            for node in sorted(nodes, key=lambda node: (place[parents[node]], -scores[node], node)):
                place[node + 1] = len(order) + 1
                order.append(node)
                mapped.append(place[parents[node]])
        return TreeSpec(tuple(mapped)), torch.tensor(order, device=self.tokens.device)


def grow_beam(widths: Sequence[int], expand: Callable[[Front], Tensor], tokens: Tensor) -> Beam:
    """Grows a tree.

    Two stages of top-k are exact, since at most w of the winners can come from one node, and avoid a search over
    f * V. Equal scores are ordered by frontier node, then by token; which of equal tokens is found at the border of a
    node's top-k is the kernel's choice, the same in every run. All shapes follow from `widths`; nothing is read on the
    host.

    Args:
        widths: nodes kept per level, the first level first; (4, 16, 16, 16, 16) in the paper.
        expand: draft logits [B, f, V] behind the nodes of a front; never asked about the last level.
        tokens: [B] int64 the root's.

    Raises:
        ValueError: a width below 1, or a level wider than all there is to choose from.

    Example:
        >>> beam = grow_beam((2, 2), lambda front: torch.zeros(1, front.tokens.shape[1], 2), torch.tensor([0]))
        >>> beam.tokens.tolist(), beam.parents.tolist()
        ([[0, 1, 0, 1]], [[0, 0, 1, 1]])
    """
    if not widths or min(widths) < 1:
        raise ValueError(f"widths={list(widths)}; write the nodes kept per level, each at least 1, such as (4, 8, 8)")
    rows, device = len(tokens), tokens.device
    total = sum(widths)
    masks = torch.zeros(rows, total, total, dtype=torch.bool, device=device)
    front = Front(0, 0, tokens[:, None], masks[:, :1, :0])
    reached = torch.zeros(rows, 1, device=device)
    kept_tokens: list[Tensor] = []
    kept_parents: list[Tensor] = []
    kept_scores: list[Tensor] = []
    first = 1
    for depth, width in enumerate(widths, 1):
        logp = expand(front).float().log_softmax(-1) + reached[..., None]
        nodes, vocab = logp.shape[1:]
        if width > nodes * vocab:
            raise ValueError(
                f"level {depth} is {width} wide, but {nodes} nodes have {nodes * vocab} children together"
            )
        each = min(width, vocab)
        value, token = _best_by_id(logp, each)
        value, flat = value.flatten(1).sort(dim=-1, descending=True, stable=True)
        reached, flat = value[:, :width], flat[:, :width]
        chosen = token.flatten(1).gather(1, flat)
        above = flat // each
        kept_tokens.append(chosen)
        kept_parents.append(above + front.first)
        kept_scores.append(reached)
        rows_here = slice(first - 1, first - 1 + width)
        if depth > 1:
            masks[:, rows_here, : first - 1] = front.seen.gather(1, above[..., None].expand(-1, -1, first - 1))
        masks[:, rows_here, rows_here] |= torch.eye(width, dtype=torch.bool, device=device)
        front = Front(depth, first, chosen, masks[:, rows_here, : first - 1 + width])
        first += width
    depths = tuple(depth for depth, width in enumerate(widths, 1) for _ in range(width))
    return Beam(torch.cat(kept_tokens, 1), torch.cat(kept_parents, 1), torch.cat(kept_scores, 1), depths)


def _best_by_id(logp: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest per row [.., V], equal ones by their id."""
    value, token = logp.topk(count, -1)
    token, order = token.sort(-1)
    value, order = value.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    return value, token.gather(-1, order)
