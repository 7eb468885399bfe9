"""Drafting with a one-block head that reads the target's own cache (LongSpec, arXiv:2502.17421).

The head keeps a ring buffer of a few hundred own keys, whatever the context, and attends to the keys the target has
cached anyway. Chains, static trees, and trees grown by beam search in every round (one row, see `drafters.beam`).

Letters: B rows, C prompt tokens of a row, N inputs of one pass, K draft length, Vd draft vocabulary. The newest
committed token, the root, stands at sequence position r; the target's cache holds positions 0..r - 1.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.kv import shared_length
from ..core.prompt import TokenPrompt
from ..core.tree import TreeSpec
from ..core.types import DecodeState, Draft, Target, TargetOutput, Verdict
from ..models.longspec import LongSpecConfig, LongSpecHead, last_full_layer, rope_of
from ..models.longspec_step import Cached, LongSpecStep, Ring
from ._draw import draft_lengths, draft_steps
from ._levels import Level
from ._reduced import ReducedNumbers, reduced_tree
from .beam import Front, grow_beam

__all__ = ["LongSpecDrafter"]


@dataclass
class _Run:
    """State of one decoding run: the ring, C of every row, and up to which sequence position own keys are known."""

    step: LongSpecStep
    ring: Ring
    prompt: Tensor
    host_prompt: list[int]
    fed: list[int]


@dataclass(frozen=True)
class _Root:
    """The newest tokens of all rows, ready for the block: residual [B, 1, C], turned queries, r, what is cached."""

    x: Tensor
    queries: Tensor
    position: Tensor
    shared: int | None
    cached: Cached


class LongSpecDrafter:
    """Drafts with a LongSpec head.

    Args:
        head: the trained network; it stays the saved component, this class only drives it.
        beam: nodes kept per level of a tree grown anew in every round, such as (4, 8, 8, 8); of these the likeliest
            `num_nodes` of the tree asked for are drafted, so that tree is a budget and not a shape. With more than one
            row, and None: trees are drawn in the shape asked for.
        dtype: what the head's matrices are kept in while drafting; None lets the head choose. It changes speed and
            acceptance, never the emitted law.

    Raises:
        ValueError: from `check` or `begin`, where head and target do not fit.

    Example:
        >>> drafter = LongSpecDrafter(head)                                # doctest: +SKIP
        >>> Engine(target, ExactRule(), drafter).decode(prompt, seeds)     # doctest: +SKIP
    """

    needs: frozenset[str] = frozenset()

    def __init__(
        self, head: LongSpecHead, beam: Sequence[int] | None = None, dtype: torch.dtype | None = None
    ) -> None:
        if beam is not None and (not beam or min(beam) < 1):
            raise ValueError(f"beam={list(beam)}; write the nodes kept per level, such as (4, 8, 8), or None")
        self.head, self.beam, self.dtype = head, None if beam is None else tuple(beam), dtype
        # a list, so that shallow copies (one per run where runs overlap) share what one of them prepares
        self._prepared: list[tuple[Any, torch.device, LongSpecStep]] = []
        self._run: _Run | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of state of the live run; the same at every context length."""
        return 0 if self._run is None else self._run.ring.nbytes

    def check(self, target: Target) -> None:
        """Refuses a target this head was not made for.

        Raises:
            ValueError: no transformers model, or sizes, vocabulary, cached layer or rotation differ.
        """
        mine, config = self.head.config, getattr(target, "config", None)
        if getattr(target, "model", None) is None or config is None:
            raise ValueError(
                f"a LongSpec head reads the cache and the output matrix of a transformers language model, and the "
                f"target is a {type(target).__name__}; use CausalLMTarget, or another drafter"
            )
        heads = config.num_attention_heads
        for name, own, theirs in (
            ("vocab_size", mine.vocab_size, target.vocab_size),
            ("hidden_size", mine.hidden_size, target.hidden_size),
            ("num_key_value_heads", mine.num_key_value_heads, getattr(config, "num_key_value_heads", None) or heads),
            ("head_dim", mine.head_dim, getattr(config, "head_dim", None) or config.hidden_size // heads),
            ("target_layer", mine.target_layer, last_full_layer(config)),
        ):
            if own != theirs:
                raise ValueError(
                    f"the draft head has {name}={own} but the target has {theirs}: a head drafts only for the target "
                    f"it was trained on; load the head that belongs to this target"
                )
        ours, (turns, factor) = rope_of(config), mine.frequencies()
        like = LongSpecConfig(
            **{key: getattr(mine, key) for key in ("hidden_size", "num_attention_heads", "num_key_value_heads")},
            head_dim=mine.head_dim,
            rotary=ours,
            max_position_embeddings=config.max_position_embeddings,
        )
        theirs_turns, theirs_factor = like.frequencies()
        if turns.shape != theirs_turns.shape or not torch.allclose(turns, theirs_turns) or factor != theirs_factor:
            raise ValueError(
                f"the draft head rotates with {mine.rotary} but the target with {ours}: it could not read the "
                f"target's keys; load the head that belongs to this target"
            )

    def begin(self, state: DecodeState, output: TargetOutput, extra: int) -> None:
        target, prompt = state.target, state.condition
        if state.branches != 1:
            raise ValueError("a LongSpec head drafts one branch per row; leave guidance_scale out")
        if state.cache is None or not isinstance(prompt, TokenPrompt):
            raise ValueError(
                f"a LongSpec head reads a TokenPrompt and the target's cache, and the condition is a "
                f"{type(prompt).__name__}; run it through Engine with a CausalLMTarget"
            )
        step = self._step(target)
        if state.cache.layer(self.head.config.target_layer)[0].shape[2] < state.cache.capacity:
            raise ValueError(
                f"the target keeps only a window of layer {self.head.config.target_layer}, which this head reads in "
                f"full; leave the attention policy off, or use another drafter"
            )
        if state.copies is not None:
            prompt = prompt.select(state.copies)
        step.reach(max(prompt.host_lengths) + target.num_tokens + extra)
        spare = max(extra, sum(self.beam or ()), 1)
        ring = step.new_ring(state.rows, spare)
        self._run = _Run(step, ring, prompt.lengths, list(prompt.host_lengths), list(prompt.host_lengths))
        count = min(step.window, max(prompt.host_lengths))
        # rows with shorter prompts feed their first token several times, into one slot
        order = torch.arange(count, device=prompt.lengths.device)
        where = (prompt.lengths[:, None] - count + order).clamp(min=0)
        _, _, keys, values = step.project(prompt.ids.gather(1, where), where)
        ring.scatter(where, keys, values)

    def propose(self, state: DecodeState, budget: int, tree: TreeSpec | None = None) -> Draft:
        run = self._live()
        root = self._catch_up(state, run)
        if tree is None:
            return self._chain(state, run, root, budget)
        if self.beam is not None and state.rows == 1 and state.forced is None:
            return self._search(state, run, root, tree)
        return self._grow(state, run, root, tree)

    def observe(self, state: DecodeState, draft: Draft | None, verdict: Verdict, output: TargetOutput) -> None:
        """Nothing to keep: committed tokens are fed at the next `propose`, whoever drafted them."""

    def select(self, rows: Tensor) -> None:
        run = self._live()
        run.ring.select(rows)
        run.prompt = run.prompt.index_select(0, rows)
        chosen = rows.tolist()
        run.host_prompt = [run.host_prompt[row] for row in chosen]
        run.fed = [run.fed[row] for row in chosen]

    def _live(self) -> _Run:
        if self._run is None:
            raise ValueError("begin(state, output, extra) starts a run; call it before propose, observe or select")
        return self._run

    def _step(self, target: Target) -> LongSpecStep:
        """The prepared head; made once per model and device, so weights changed later need a new drafter."""
        self.check(target)
        model: Any = getattr(target, "model", target)
        for known, device, step in self._prepared:
            if known() is model and device == target.device:
                return step
        embed = target.embed if model is target else model.get_input_embeddings()
        step = self.head.prepare(embed, *_output_rows(target, self.head.draft_ids), dtype=self.dtype)
        self._prepared[:] = [(weakref.ref(model), target.device, step)]
        return step

    def _catch_up(self, state: DecodeState, run: _Run) -> _Root:
        """Own keys of all tokens committed since the last draft, and everything about the newest ones.

        A token's own key depends on nothing but the token, so a draft by someone else or a tree leaves nothing to
        move: accepted tokens are simply fed, some of them a second time.
        """
        cache, step, ring = state.cache, run.step, run.ring
        assert cache is not None
        newest = cache.host_lengths
        # a row that waited for longer than the window has forgotten the rest anyway
        count = min(max(root + 1 - fed for root, fed in zip(newest, run.fed, strict=True)), step.window)
        shared = shared_length(newest)
        if shared is not None and shared_length(run.host_prompt) is not None:
            stop = shared + 1 - run.host_prompt[0]
            count = min(count, stop)
            first = shared + 1 - count
            x, queries, keys, values = step.project(state.tokens[:, stop - count : stop], first)
            ring.write(first, keys, values)
        else:
            order = torch.arange(1 - count, 1, device=cache.lengths.device)
            where = torch.maximum(cache.lengths[:, None] + order, run.prompt[:, None])
            tokens = state.tokens.gather(1, where - run.prompt[:, None])
            x, queries, keys, values = step.project(tokens, where)
            ring.scatter(where, keys, values)
        run.fed = [root + 1 for root in newest]
        return _Root(x[:, -1:], queries[:, :, -1:], cache.lengths, shared, self._cached(state))

    def _cached(self, state: DecodeState) -> Cached:
        cache = state.cache
        assert cache is not None
        live = max(cache.host_lengths)
        keys, values = (part[:, :, :live] for part in cache.layer(self.head.config.target_layer))
        hidden = None
        if shared_length(cache.host_lengths) is None:
            hidden = torch.arange(live, device=keys.device) >= cache.lengths[:, None]
        if cache.hidden_slots is not None:
            padding = cache.hidden_slots[:, :live]
            hidden = padding if hidden is None else hidden | padding
        mask = None
        if hidden is not None:
            mask = torch.zeros(hidden.shape, dtype=keys.dtype, device=keys.device)
            mask = mask.masked_fill_(hidden, float("-inf"))[:, None, None]
        return Cached(keys, values, mask)

    @staticmethod
    def _along(run: _Run, root: _Root, depth: int) -> tuple[Tensor | int, Tensor]:
        """Position and mask of a chain token at `depth` (0: the root)."""
        if root.shared is not None:
            return root.shared + depth, run.ring.chain_mask(root.shared + depth)
        where = root.position[:, None] + depth
        return where, run.ring.mask(where)

    def _chain(self, state: DecodeState, run: _Run, root: _Root, budget: int) -> Draft:
        """A chain that ends early in rows where the head is unlikely to be followed further.

        Token i + 1 is drafted while the product of the head's largest probabilities up to i reaches its
        `confidence_threshold`. These depend on earlier tokens only and token i is tested whatever it is, so stopping
        cannot change the emitted law.
        """
        step, ring = run.step, run.ring
        steps = min(draft_steps(state, budget), ring.spare + 1)
        numbers = ReducedNumbers(state, steps, step.draft_ids)
        threshold = float(self.head.config.confidence_threshold)
        weighing = threshold > 0 and steps > 1
        position, mask = self._along(run, root, 0)
        logits = step.logits(root.x, root.queries, position, ring, mask, root.cached)
        drawn = [numbers.draw(logits, 0)]
        survival, lengths = torch.zeros_like(state.lengths, dtype=torch.float32), torch.ones_like(state.lengths)
        for depth in range(1, steps):
            if weighing:
                survival = survival + (logits.amax(-1) - logits.logsumexp(-1))[:, 0].float()
                going = survival >= math.log(threshold)
                lengths = lengths + going
                if going.device.type == "cpu" and not going.any():
                    break
            position, mask = self._along(run, root, depth)
            x, queries, keys, values = step.project(drawn[-1].tokens, position)
            ring.write(position if isinstance(position, int) else position[:, 0], keys, values)
            logits = step.logits(x, queries, position, ring, mask, root.cached)
            drawn.append(numbers.draw(logits, depth))
        return numbers.chain(drawn, lengths if weighing else None)

    def _grow(self, state: DecodeState, run: _Run, root: _Root, tree: TreeSpec) -> Draft:
        def expand(depth: int, level: Level, tokens: Tensor | None) -> Tensor:
            if tokens is None:
                return self._level(run, root, state.last_token[:, None], 0, 0, None)
            return self._level(run, root, tokens, depth, level.first + 1, level.ancestors[None])

        return reduced_tree(state, tree, run.step.draft_ids, expand)

    def _search(self, state: DecodeState, run: _Run, root: _Root, tree: TreeSpec) -> Draft:
        """The likeliest `tree.num_nodes` continuations; a function of the prefix, so no law is stated."""
        assert self.beam is not None
        widths = self.beam[: tree.max_depth]
        ids, heat = run.step.draft_ids, state.warp.temperature or 1.0
        closed = None if state.allowed is None else ~state.allowed[ids]

        def expand(front: Front) -> Tensor:
            logits = self._level(run, root, ids[front.tokens], front.depth, front.first, front.seen) / heat
            return logits if closed is None else logits.masked_fill(closed, -1e9)

        beam = grow_beam(widths, expand, torch.zeros_like(state.lengths))
        found, order = beam.best(tree.num_nodes)
        tokens = ids[beam.tokens.index_select(1, order)]
        return Draft(tokens, draft_lengths(state, found.max_depth), None, found)

    def _level(self, run: _Run, root: _Root, tokens: Tensor, depth: int, first: int, seen: Tensor | None) -> Tensor:
        """Logits [B, N, Vd] behind nodes of one depth, which stand in the tree's rows from `first` on.

        Args:
            tokens: [B, N] target ids; of no meaning at depth 0, where the root's are known.
            seen: [B or 1, N, first - 1 + N] bool, which of the rows from 1 on each one sees.
        """
        step, ring = run.step, run.ring
        if depth == 0:
            position, mask = self._along(run, root, 0)
            return step.logits(root.x, root.queries, position, ring, mask, root.cached)
        assert seen is not None
        count = tokens.shape[1]
        if first - 1 + count > ring.spare:
            raise ValueError(
                f"the tree has {first - 1 + count} inner nodes, the run was begun for {ring.spare}; begin it with a "
                f"larger `extra`"
            )
        where = (root.position + depth)[:, None].expand(-1, count)
        x, queries, keys, values = step.project(tokens, where)
        ring.write(root.position + first if root.shared is None else root.shared + first, keys, values)
        return step.logits(x, queries, where, ring, ring.tree_mask(root.position, depth, seen), root.cached)


def _output_rows(target: Any, draft_ids: Tensor) -> tuple[Tensor, Tensor | None, float | None]:
    """Rows, bias and soft cap of the target's output, scaled as its logits are."""
    head, config = target.model.get_output_embeddings(), target.config
    scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    weight = head.weight.detach()[draft_ids.to(head.weight.device)] * scale
    bias = getattr(head, "bias", None)
    bias = None if bias is None else bias.detach()[draft_ids] * scale
    return weight, bias, getattr(config, "final_logit_softcapping", None)
