"""Drafts from logits over a reduced vocabulary, drawn without ever making a row as wide as the target's.

A head that may draft Vd of V tokens has a law that is 0 elsewhere, so its draws need Vd numbers: at V = 49,152 and
Vd = 8,192 noise, softmax and search cost a sixth. Letters: B rows, N nodes of one depth, K draft length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..core.rng import TARGET
from ..core.tree import TreeSpec
from ..core.types import DecodeState, Draft
from ..kernels import philox
from ..kernels.philox.reference import philox4x32
from ..kernels.sample import probabilities, sample
from ._draw import Numbers, draft_lengths
from ._levels import Level, expand_children, tree_levels

__all__ = ["Drawn", "ReducedNumbers", "reduced_tree"]

LIKELIEST = 64
"""Tokens that compete in a coupled draw; what lies beyond them rarely wins, and then a draft is lost, no more."""
WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class Drawn:
    """Tokens of the target's vocabulary [B, N] or [B, N, width]; `law` [B, N, Vd], None for a point mass."""

    tokens: Tensor
    law: Tensor | None = None


class ReducedNumbers:
    """Noise of all draft depths of one round, and the draws made with it.

    Args:
        state: the rows at the start of the round.
        depth: how many draft positions there are.
        draft_ids: [Vd] int64 the target's id of every draft id, ascending.
    """

    def __init__(self, state: DecodeState, depth: int, draft_ids: Tensor) -> None:
        self.state, self.draft_ids = state, draft_ids
        self.greedy, self.coupled = state.warp.temperature == 0, state.draft_purpose == TARGET
        self.allowed = None if state.allowed is None else state.allowed[draft_ids]
        # a forced token may lie outside the draft vocabulary: such runs draw among all tokens
        self.whole = Numbers(state, depth) if state.forced is not None else None
        order = torch.arange(depth, device=draft_ids.device)
        self.positions = state.lengths[:, None] + order
        self.noise: Tensor | None = None
        if self.whole is None and not self.greedy and not self.coupled:
            # the draft's own noise belongs to draft ids: any numbers that are its own alone will do
            self.noise = philox.exponential(state.rng.seeds, self.positions, len(draft_ids), state.draft_purpose)

    def draw(self, logits: Tensor, depth: int, width: int = 1) -> Drawn:
        """Draws `width` tokens without replacement for every node.

        Args:
            logits: [B, N, Vd]; the N rows are nodes of one depth, so they share a position and its noise.
            depth: 0 is the next token.
        """
        if self.whole is not None:
            wide = logits.new_full((*logits.shape[:2], self.state.target.vocab_size), float("-inf"))
            wide[..., self.draft_ids] = logits
            drawn = self.whole.draw(self.state, wide[:, None], depth, width)
            return Drawn(drawn.tokens, None if drawn.probs is None else drawn.probs[..., self.draft_ids])
        if self.greedy:
            return Drawn(self.draft_ids[self._largest(logits, width)])
        if self.coupled:
            return Drawn(self.draft_ids[self._coupled(logits, depth, width)])
        assert self.noise is not None
        drawn = sample(
            logits[:, None],
            self.state.warp,
            seeds=self.state.rng.seeds,
            positions=None,
            purpose=self.state.draft_purpose,
            allowed=self.allowed,
            noise=self.noise[:, depth : depth + 1].expand(-1, logits.shape[1], -1),
            width=width,
            need_probs=True,
            mark_undefined=False,
        )
        return Drawn(self.draft_ids[drawn.tokens], drawn.probs)

    def chain(self, drawn: Sequence[Drawn], lengths: Tensor | None = None) -> Draft:
        """Joins the draws of successive depths.

        Args:
            drawn: one node each.
            lengths: [B] int64 where rows end by themselves; None is nowhere.
        """
        tokens, law = torch.cat([one.tokens for one in drawn], 1), self.widened([one.law for one in drawn])
        draft = Draft(tokens, draft_lengths(self.state, len(drawn)), law)
        return draft if lengths is None else replace(draft, lengths=torch.minimum(draft.lengths, lengths))

    def widened(self, laws: Sequence[Tensor | None]) -> Tensor | None:
        """Laws [B, n, Vd] of successive depths as one [B, all n, V]; None where the draws were point masses."""
        known = [law for law in laws if law is not None]
        if not known:
            return None
        law = torch.cat(known, 1)
        wide = law.new_zeros(*law.shape[:2], self.state.target.vocab_size)
        return wide.index_copy_(2, self.draft_ids, law)

    def _largest(self, logits: Tensor, width: int) -> Tensor:
        if self.allowed is not None:
            logits = logits.masked_fill(~self.allowed, float("-inf"))
        return logits.argmax(-1) if width == 1 else logits.topk(width, -1).indices

    def _coupled(self, logits: Tensor, depth: int, width: int) -> Tensor:
        """The tokens that the target's own noise picks from the head's law: p / E at the likeliest few.

        Under a coupled rule drafts are only compared, so leaving out unlikely tokens costs acceptance alone.
        """
        law = probabilities(logits[:, None], self.state.warp, allowed=self.allowed)
        p, index = law.topk(min(max(LIKELIEST, width), law.shape[-1]), -1)
        noise = _exponentials(self.state.rng.seeds, self.positions[:, depth], self.draft_ids[index])
        weight = p / noise
        if width == 1:
            return index.gather(-1, weight.argmax(-1, keepdim=True))[..., 0]
        return index.gather(-1, weight.topk(width, -1).indices)


def reduced_tree(
    state: DecodeState, tree: TreeSpec, draft_ids: Tensor, expand: Callable[[int, Level, Tensor | None], Tensor]
) -> Draft:
    """A tree of the shape asked for, children drawn without replacement, level by level.

    Args:
        state: the rows at the start of the round.
        draft_ids: as of `ReducedNumbers`.
        expand: (depth, level, tokens [B, N] of its nodes or None at the root) to logits [B, N, Vd] behind them.
    """
    numbers = ReducedNumbers(state, tree.max_depth, draft_ids)
    tokens: list[Tensor] = []
    laws: list[Tensor | None] = []
    for depth, level in enumerate(tree_levels(tree, state.tokens.device)):
        nodes = tokens[-1].index_select(1, level.among_siblings) if depth else None
        drawn = numbers.draw(expand(depth, level, nodes), depth, level.width)
        tokens.append(expand_children(drawn.tokens, level))
        laws.append(drawn.law)
    return Draft(torch.cat(tokens, 1), draft_lengths(state, tree.max_depth), numbers.widened(laws), tree)


def _exponentials(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """`philox.exponential` of purpose TARGET at single tokens: seeds, positions [B], ids [B, N, n] -> [B, N, n]."""
    seeds, positions = seeds[:, None, None], positions[:, None, None]
    counter = (tokens >> 2, positions & WORD, torch.full_like(positions, TARGET), torch.zeros_like(positions))
    lanes = torch.stack(philox4x32(counter, (seeds & WORD, (seeds >> 32) & WORD)), -1)
    bits = lanes.gather(-1, (tokens & 3)[..., None])[..., 0]
    return ((bits >> 9) * 2 + 1).to(torch.float32).mul_(2.0**-24).log_().neg_()
