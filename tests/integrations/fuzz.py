"""A drafter that knows what comes and spoils it at random: every accept length, row by row, chains and trees."""

from __future__ import annotations

import torch
from torch import Tensor

from mediaspec.core.tree import TreeSpec
from mediaspec.core.types import DecodeState, Draft, TargetOutput, Verdict

__all__ = ["FuzzDrafter", "random_tree"]


class FuzzDrafter:
    """Drafts the right token with chance 1 - `wrong`, else any other; every row's draft has a random length.

    Args:
        right: [B, T] what the rows will write.
        vocab: V; seed: of the spoiling.
    """

    needs: frozenset[str] = frozenset()

    def __init__(self, right: Tensor, vocab: int, seed: int, wrong: float = 0.25) -> None:
        self.right, self.vocab, self.wrong = right, vocab, wrong
        self.generator = torch.Generator().manual_seed(seed)
        self.live = right

    def begin(self, state: DecodeState, output: TargetOutput, extra: int) -> None:
        self.live = self.right

    def propose(self, state: DecodeState, budget: int, tree: TreeSpec | None = None) -> Draft:
        depth = budget if tree is None else tree.max_depth
        lengths = torch.randint(0, depth + 1, (state.rows,), generator=self.generator)
        where = state.lengths[:, None] + torch.arange(depth)
        truth = self.live.gather(1, where.clamp(max=self.live.shape[1] - 1))
        if tree is None:
            return Draft(self._spoil(truth), lengths)
        rows = [self._grow(tree, row) for row in truth.tolist()]
        return Draft(torch.tensor(rows), lengths, None, tree)

    def observe(self, state: DecodeState, draft: Draft | None, verdict: Verdict, output: TargetOutput) -> None:
        pass

    def select(self, rows: Tensor) -> None:
        self.live = self.live.index_select(0, rows)

    def _spoil(self, truth: Tensor) -> Tensor:
        other = torch.randint(0, self.vocab, truth.shape, generator=self.generator)
        return torch.where(torch.rand(truth.shape, generator=self.generator) < self.wrong, other, truth)

    def _grow(self, tree: TreeSpec, truth: list[int]) -> list[int]:
        """Different siblings, of which one at most is right, at a random rank."""
        tokens, on_path = [0] * (tree.num_nodes + 1), {0}
        for row, below in enumerate(tree.children):
            if not below:
                continue
            drawn = torch.randperm(self.vocab, generator=self.generator)[: len(below)].tolist()
            if row in on_path and float(torch.rand((), generator=self.generator)) >= self.wrong:
                token, rank = truth[tree.depth[row]], int(torch.randint(len(below), (), generator=self.generator))
                drawn = [one if one != token else drawn[rank] for one in drawn]
                drawn[rank] = token
                on_path.add(below[rank])
            for node, token in zip(below, drawn, strict=True):
                tokens[node] = token
        return tokens[1:]


def random_tree(seed: int, nodes: int) -> TreeSpec:
    """A tree of that many nodes in level order."""
    generator = torch.Generator().manual_seed(seed)
    parents = [0]
    for node in range(1, nodes):
        low = parents[-1]
        parents.append(int(torch.randint(low, node + 1, (), generator=generator)))
    return TreeSpec(tuple(parents))
