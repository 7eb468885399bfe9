"""Drafting with a smaller model of the same vocabulary (arXiv:2211.17192): any `Target`, with its own key/value store.

B rows, G guidance branches, R = B * G, K draft length, T tokens per image. The draft model runs the target's condition
through its own prefill and uses both guidance branches.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..core.guidance import expand_index, expand_rows, split_branches
from ..core.kv import KVStore
from ..core.tree import TreeSpec
from ..core.types import DecodeState, Draft, Target, TargetOutput, Verdict, Warp
from ._draw import Numbers, draft_lengths, draft_steps, joined_chain, per_branch
from ._levels import expand_children, tree_levels

__all__ = ["ModelDrafter"]


@dataclass
class _Run:
    """State of one decoding run: the cache holds `prefix` [R] condition positions, then a row's first image tokens."""

    cache: KVStore
    prefix: Tensor
    host_prefix: list[int]
    branches: int


class ModelDrafter:
    """Drafts with a smaller target.

    Args:
        target: the draft model; same vocabulary and as many tokens as the model being sped up, and it must accept the
            same condition.
        warp: how its logits become the law drafts are drawn from; None is the run's own. A run whose law is made by
            processors outside the warp drafts better with the temperature they apply.

    Raises:
        ValueError: from `check` or `begin`, where the two models do not fit.

    Example:
        >>> Engine(large, ExactRule(), ModelDrafter(small)).decode(condition, seeds)  # doctest: +SKIP
    """

    needs: frozenset[str] = frozenset()

    def __init__(self, target: Target, warp: Warp | None = None) -> None:
        self.target, self.warp = target, warp
        self._run: _Run | None = None

    def check(self, target: Target) -> None:
        """Refuses a target with another vocabulary or length.

        Raises:
            ValueError: vocabulary, number of tokens or grid differ.
        """
        mine = self.target
        if mine.vocab_size != target.vocab_size:
            raise ValueError(
                f"the draft model has vocab_size={mine.vocab_size} but the target has {target.vocab_size}: their "
                f"token ids mean different things; use a draft model trained on the target's tokenizer"
            )
        if mine.num_tokens < target.num_tokens or mine.grid != target.grid:
            raise ValueError(
                f"the draft model makes {mine.num_tokens} tokens on a {mine.grid} grid but the target makes "
                f"{target.num_tokens} on {target.grid}; use a draft model of the same resolution"
            )

    def begin(self, state: DecodeState, output: TargetOutput, extra: int) -> None:
        self.check(state.target)
        prompts = len(output.logits) // state.branches if state.copies is None else int(state.copies.max()) + 1
        # rows may lag behind by a whole image (drafting was paused for them), so a padded block may need T more slots
        cache = self.target.new_cache(prompts * state.branches, self.target.num_tokens + extra)
        self.target.prefill(state.condition, cache)
        if state.copies is not None:
            cache.select(expand_index(state.copies, state.branches))
        self._run = _Run(cache, cache.lengths, cache.host_lengths, state.branches)

    def propose(self, state: DecodeState, budget: int, tree: TreeSpec | None = None) -> Draft:
        run = self._live()
        if self.warp is not None:
            state = replace(state, warp=self.warp)
        # a tree's passes score the root (the newest token) themselves, so it must not be committed before them
        logits = self._catch_up(state, run, behind=0 if tree is None else 1)
        lengths, host_lengths = run.cache.lengths, run.cache.host_lengths
        draft = self._grow(state, run, logits, tree) if tree is not None else self._chain(state, run, logits, budget)
        run.cache.rollback(lengths, host_lengths)
        return draft

    def observe(self, state: DecodeState, draft: Draft | None, verdict: Verdict, output: TargetOutput) -> None:
        """Nothing to keep: committed tokens are fed at the next `propose`."""

    def select(self, rows: Tensor) -> None:
        run = self._live()
        index = expand_index(rows, run.branches)
        run.host_prefix = [run.host_prefix[row] for row in index.tolist()]
        run.prefix = run.prefix.index_select(0, index)
        run.cache.select(index)

    def _live(self) -> _Run:
        if self._run is None:
            raise ValueError("begin(state, output, extra) starts a run; call it before propose, observe or select")
        return self._run

    def _catch_up(self, state: DecodeState, run: _Run, behind: int) -> Tensor:
        """Scores all tokens committed since the last round; returns the newest one's logits [R, 1, V].

        `behind`: how many of the newest tokens stay out of the cache.
        """
        cache, g = run.cache, run.branches
        lengths = per_branch(state.lengths, g)
        host_lengths = [length for length in state.host_lengths for _ in range(g)]
        filled = [cached - first for cached, first in zip(cache.host_lengths, run.host_prefix, strict=True)]
        pending = [length - done for length, done in zip(host_lengths, filled, strict=True)]
        count = max(pending)
        if min(pending) == count and min(filled) == max(filled):
            tokens = expand_rows(state.tokens[:, filled[0] : filled[0] + count], g)
            logits = self.target.score(tokens, cache).logits[:, -1:]
        else:
            first = cache.lengths - run.prefix
            where = first[:, None] + torch.arange(count, device=first.device)
            tokens = expand_rows(state.tokens, g).gather(1, where.clamp(max=state.tokens.shape[1] - 1))
            logits = self.target.score(tokens, cache).logits
            newest = (lengths - first - 1).clamp(min=0)
            logits = logits.gather(1, newest[:, None, None].expand(-1, 1, logits.shape[2]))
        stop = [length + first - behind for length, first in zip(host_lengths, run.host_prefix, strict=True)]
        cache.rollback(lengths + run.prefix - behind, stop)
        return logits

    def _chain(self, state: DecodeState, run: _Run, logits: Tensor, budget: int) -> Draft:
        one, host_one = torch.ones_like(run.cache.lengths), [1] * run.cache.rows
        steps = draft_steps(state, budget)
        numbers = Numbers(state, steps)
        drawn = [numbers.draw(state, split_branches(logits, run.branches), 0)]
        for depth in range(1, steps):
            logits = self.target.score(expand_rows(drawn[-1].tokens, run.branches), run.cache).logits
            run.cache.advance(one, host_one)
            drawn.append(numbers.draw(state, split_branches(logits, run.branches), depth))
        return joined_chain(state, drawn)

    def _grow(self, state: DecodeState, run: _Run, logits: Tensor, tree: TreeSpec) -> Draft:
        """Level by level; every level is one pass over the nodes so far, which needs nothing beyond `Target.score`."""
        tokens, numbers = state.last_token[:, None], Numbers(state, tree.max_depth)
        laws: list[Tensor] = []
        for depth, level in enumerate(tree_levels(tree, tokens.device)):
            if depth:
                known = TreeSpec(tree.parents[: tokens.shape[1] - 1])
                logits = self.target.score(expand_rows(tokens, run.branches), run.cache, known).logits
                logits = logits.index_select(1, level.rows)
            drawn = numbers.draw(state, split_branches(logits, run.branches), depth, level.width)
            tokens = torch.cat([tokens, expand_children(drawn.tokens, level)], 1)
            if drawn.probs is not None:
                laws.append(drawn.probs)
        lengths = draft_lengths(state, tree.max_depth)
        return Draft(tokens[:, 1:], lengths, torch.cat(laws, 1) if laws else None, tree)
