"""Drafting with a one-block head over the target's hidden states: chains and static sampled trees (arXiv:2401.15077).

Letters: B rows, G guidance branches the head runs (1 for a guided head), R = B * G, K draft length, V vocabulary,
D hidden size, T tokens per image. Slot i holds (token i, hidden state that predicted it) and predicts token i + 1; the
head's own cache holds image tokens only. A round first feeds the slots of the tokens committed since the last one,
with the target's true hidden states, then K - 1 slots of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ..core.guidance import expand_index, expand_rows, split_branches
from ..core.kv import KVStore, Slots, shared_length
from ..core.tree import TreeSpec
from ..core.types import DecodeState, Draft, Target, TargetOutput, Verdict
from ._draw import Numbers, draft_lengths, draft_steps, joined_chain, per_branch
from ._levels import expand_children, tree_levels
from ._slots import chain_slots, level_slots

__all__ = ["DraftHead", "DraftStep", "EagleDrafter"]


class DraftStep(Protocol):
    """A head prepared for inference: slots in, predicted hidden states [R, N, D] out."""

    dtype: torch.dtype
    heads: int
    head_dim: int
    logit_scale: float | None

    def __call__(self, tokens: Tensor, hidden: Tensor, store: KVStore, slots: Slots) -> Tensor: ...


class DraftHead(Protocol):
    """The network this drafter runs; `mediaspec.models.eagle.EagleHead` is one.

    `config` has hidden_size, vocab_size, max_positions, grid and guided.
    """

    config: Any

    def read(self, hidden: Tensor, guidance: Tensor | None) -> Tensor: ...

    def prepare(self, embeddings: Tensor, dtype: torch.dtype | None = None) -> DraftStep: ...


@dataclass
class _Run:
    """State of one decoding run; `hidden` [R, T + extra, D] holds at i the hidden state that predicted token i."""

    step: DraftStep
    store: KVStore
    hidden: Tensor
    branches: int
    target_dtype: torch.dtype


class EagleDrafter:
    """Drafts with an EAGLE head.

    Args:
        head: the trained network; it stays the saved component, this class only drives it.
        dtype: what the head's matrices are kept in while drafting; None lets the head choose. It changes speed and
            acceptance, never the emitted law.

    Raises:
        ValueError: from `check` or `begin`, where head and target do not fit.

    Example:
        >>> drafter = EagleDrafter(head)                                   # doctest: +SKIP
        >>> Engine(target, ExactRule(), drafter).decode(condition, seeds)  # doctest: +SKIP
    """

    needs = frozenset({"hidden"})

    def __init__(self, head: DraftHead, dtype: torch.dtype | None = None) -> None:
        self.head, self.dtype = head, dtype
        # a list, so that shallow copies (one per run where runs overlap) share what one of them prepares
        self._prepared: list[tuple[Target, torch.device, DraftStep]] = []
        self._run: _Run | None = None

    def check(self, target: Target) -> None:
        """Refuses a target this head was not made for.

        Raises:
            ValueError: vocabulary, hidden size, number of tokens or grid differ.
        """
        config = self.head.config
        for name, mine, theirs in (
            ("vocab_size", config.vocab_size, target.vocab_size),
            ("hidden_size", config.hidden_size, target.hidden_size),
        ):
            if mine != theirs:
                raise ValueError(
                    f"the draft head has {name}={mine} but the target has {theirs}: a head drafts only for the target "
                    f"it was trained on; load the head that belongs to this target"
                )
        if config.max_positions < target.num_tokens - 1:
            raise ValueError(
                f"the draft head knows {config.max_positions} positions but the target makes {target.num_tokens} "
                f"tokens; use a head with max_positions>={target.num_tokens}"
            )
        if config.grid is not None and target.grid is not None and tuple(config.grid) != tuple(target.grid):
            raise ValueError(
                f"the draft head was made for a {tuple(config.grid)} grid but the target makes {tuple(target.grid)}; "
                f"use a head trained at that resolution"
            )

    def begin(self, state: DecodeState, output: TargetOutput, extra: int) -> None:
        target = state.target
        if output.hidden is None:
            raise ValueError("an EAGLE head reads the target's hidden states, but this target returns none")
        step = self._step(target)
        first = self.head.read(output.hidden, state.guidance).to(step.dtype)
        rows, size = first.shape[0], first.shape[2]
        # rows may lag behind by a whole image (drafting was paused for them), so a padded block may need 2 T slots
        slots = 2 * target.num_tokens + extra
        store = KVStore(1, rows, step.heads, step.head_dim, slots, step.dtype, target.device)
        hidden = first.new_zeros(rows, state.tokens.shape[1] + 1, size)
        hidden[:, :1] = first
        self._run = _Run(step, store, hidden, rows // state.rows, output.hidden.dtype)

    def propose(self, state: DecodeState, budget: int, tree: TreeSpec | None = None) -> Draft:
        run = self._live()
        hidden = self._catch_up(state, run)
        # draft slots lie behind the committed ones, whose lengths do not move: nothing to roll back
        return self._grow(state, run, hidden, tree) if tree is not None else self._chain(state, run, hidden, budget)

    def observe(self, state: DecodeState, draft: Draft | None, verdict: Verdict, output: TargetOutput) -> None:
        run = self._live()
        assert output.hidden is not None
        hidden = self.head.read(output.hidden, state.guidance).to(run.hidden.dtype)
        if verdict.path is not None:
            root = torch.zeros_like(verdict.path[:, :1])
            nodes = expand_rows(torch.cat([root, verdict.path.clamp(min=0)], 1), run.branches)
            hidden = hidden.gather(1, nodes[..., None].expand(-1, -1, hidden.shape[2]))
        # rows behind the accepted ones are overwritten by later rounds before anything reads them
        count, first = hidden.shape[1], state.host_lengths[0]
        if shared_length(state.host_lengths) is not None:
            run.hidden[:, first : first + count] = hidden[:, : run.hidden.shape[1] - first]
            return
        where = per_branch(state.lengths, run.branches)[:, None] + torch.arange(count, device=hidden.device)
        where = where.clamp(max=run.hidden.shape[1] - 1)
        run.hidden.scatter_(1, where[..., None].expand(-1, -1, hidden.shape[2]), hidden)

    def select(self, rows: Tensor) -> None:
        run = self._live()
        index = expand_index(rows, run.branches)
        run.store.select(index)
        run.hidden = run.hidden.index_select(0, index)

    def _step(self, target: Target) -> DraftStep:
        """The prepared head; made once per target and device, so weights changed later need a new drafter."""
        for known, device, step in self._prepared:
            if known is target and device == target.device:
                return step
        self.check(target)
        ids = torch.arange(target.vocab_size, device=target.device)[None]
        step = self.head.prepare(target.embed(ids)[0], self.dtype)
        self._prepared[:] = [(target, target.device, step)]
        return step

    def _live(self) -> _Run:
        if self._run is None:
            raise ValueError("begin(state, output, extra) starts a run; call it before propose, observe or select")
        return self._run

    def _catch_up(self, state: DecodeState, run: _Run) -> Tensor:
        """Feeds the slots of all tokens committed since the last round; returns the newest prediction [R, 1, D]."""
        store, g = run.store, run.branches
        pending = [length - store.host_lengths[row * g] for row, length in enumerate(state.host_lengths)]
        count, start = max(pending), store.host_lengths[0]
        uniform = min(pending) == count and shared_length(store.host_lengths) is not None
        if uniform:
            tokens, hidden = state.tokens[:, start : start + count], run.hidden[:, start : start + count]
        else:
            where = store.lengths[:, None] + torch.arange(count, device=state.tokens.device)
            where = where.clamp(max=state.tokens.shape[1] - 1)
            tokens = state.tokens.gather(1, where[::g])
            hidden = run.hidden.gather(1, where[..., None].expand(-1, -1, run.hidden.shape[2]))
        out = run.step(expand_rows(tokens, g), hidden, store, store.plan(count))
        if uniform:
            out = out[:, -1:]
        else:
            newest = (per_branch(state.lengths, g) - store.lengths - 1).clamp(min=0)
            out = out.gather(1, newest[:, None, None].expand(-1, -1, out.shape[2]))
        store.rollback(per_branch(state.lengths, g), [n for n in state.host_lengths for _ in range(g)])
        return out

    def _laws(self, state: DecodeState, run: _Run, hidden: Tensor) -> Tensor:
        """Predicted hidden states [R, N, D] to draft logits [B, G, N, V]."""
        logits = state.target.head(hidden.to(run.target_dtype))
        if run.step.logit_scale is not None:
            logits = logits * run.step.logit_scale
        return split_branches(logits, run.branches)

    def _chain(self, state: DecodeState, run: _Run, hidden: Tensor, budget: int) -> Draft:
        """A chain that ends early in rows where the head is unlikely to be followed further.

        Position i + 1 is drafted while prod_{j <= i} max_x q_j(x) reaches the head's `confidence_threshold`. The laws
        q_j depend on earlier tokens only and token i is tested whatever it is, so stopping cannot change the emitted
        law; it reads no other row, so it does not depend on the batch. On the CPU, where reading a number costs
        nothing, undrafted positions are not computed either.
        """
        steps = draft_steps(state, budget)
        numbers, slots = Numbers(state, steps), chain_slots(run.store, steps - 1)
        threshold = float(getattr(self.head.config, "confidence_threshold", 0.0))
        weighing = threshold > 0 and steps > 1
        drawn = [numbers.draw(state, self._laws(state, run, hidden), 0, need_probs=weighing)]
        survival = torch.zeros_like(state.lengths, dtype=torch.float32)
        lengths = torch.ones_like(state.lengths)
        for depth in range(1, steps):
            if weighing:
                law = drawn[-1].probs
                assert law is not None
                survival = survival + law[:, 0].amax(-1).log()
                going = survival >= math.log(threshold)
                lengths = lengths + going
                if going.device.type == "cpu" and not going.any():
                    break
            hidden = run.step(expand_rows(drawn[-1].tokens, run.branches), hidden, run.store, slots[depth - 1])
            drawn.append(numbers.draw(state, self._laws(state, run, hidden), depth, need_probs=weighing))
        draft = joined_chain(state, drawn)
        return replace(draft, lengths=torch.minimum(draft.lengths, lengths)) if weighing else draft

    def _grow(self, state: DecodeState, run: _Run, hidden: Tensor, tree: TreeSpec) -> Draft:
        levels = tree_levels(tree, state.tokens.device)
        numbers = Numbers(state, tree.max_depth)
        tokens: list[Tensor] = []
        laws: list[Tensor] = []
        for depth, level in enumerate(levels):
            if depth:
                fed = expand_rows(tokens[-1].index_select(1, level.among_siblings), run.branches)
                parents = hidden.index_select(1, level.parents)
                hidden = run.step(fed, parents, run.store, level_slots(run.store, level, depth - 1))
            drawn = numbers.draw(state, self._laws(state, run, hidden), depth, level.width)
            tokens.append(expand_children(drawn.tokens, level))
            if drawn.probs is not None:
                laws.append(drawn.probs)
        lengths = draft_lengths(state, tree.max_depth)
        return Draft(torch.cat(tokens, 1), lengths, torch.cat(laws, 1) if laws else None, tree)
