"""Drafting with an EAGLE-3 head: chains and static trees over a reduced vocabulary (arXiv:2503.01840).

Letters: B rows, K draft length, F feature layers, D hidden size, V vocabulary, W draft vocabulary, T new tokens, C
prompt positions, P the prompt length of a row, n its committed new tokens.
Slot i of the head holds (token i + 1, the target's features at position i) and predicts token i + 2. With n tokens
committed the target has given features up to position P + n - 2, so slots up to there are complete, and the newest one
predicts the next token. A row's slots begin `window` positions before the end of its prompt.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..core.kv import KVStore, Slots, shared_length
from ..core.prompt import TokenPrompt
from ..core.tree import TreeSpec
from ..core.types import DecodeState, Draft, Target, TargetOutput, Verdict
from ._draw import draft_steps
from ._levels import Level
from ._reduced import ReducedNumbers, reduced_tree
from ._slots import chain_slots, level_slots

__all__ = ["Eagle3Drafter", "FeatureHead", "FeatureStep"]

PENDING = 64
"""Slots whose features are kept while other drafters run; then they go through the head in one block."""
BLOCK = 256  # prompt slots per pass


class FeatureStep(Protocol):
    """A head prepared for inference."""

    key_heads: int
    head_dim: int
    draft_ids: Tensor

    def reserve(self, slots: int) -> None: ...

    def fuse(self, features: Tensor) -> Tensor: ...

    def logits(self, states: Tensor) -> Tensor: ...

    def __call__(self, tokens: Tensor, states: Tensor, store: KVStore, slots: Slots) -> Tensor: ...


class FeatureHead(Protocol):
    """The network this drafter runs; `mediaspec.models.eagle3.Eagle3Head` is one.

    `config` has hidden_size, vocab_size, feature_layers and confidence_threshold.
    """

    config: Any

    def prepare(self, embeddings: Tensor, output: Tensor, dtype: torch.dtype | None = None) -> FeatureStep: ...


@dataclass
class _Prompt:
    """The slots of the prompts, until they are needed: tokens [B, most] and features [B, most, F * D]."""

    tokens: Tensor
    features: Tensor


@dataclass
class _Run:
    """State of one decoding run.

    Args:
        base: [B] int64 slots of a row that hold prompt tokens; slot base + j holds new token j.
        pending: [B, PENDING + .., F * D] at i the features of slot `store.lengths` + i.
        prompt: what has not gone through the head yet; None once it has.
    """

    step: FeatureStep
    store: KVStore
    base: Tensor
    host_base: list[int]
    pending: Tensor
    prompt: _Prompt | None


class Eagle3Drafter:
    """Drafts with an EAGLE-3 head.

    Args:
        head: the trained network; it stays the owner of its weights, this class only drives it.
        dtype: what the head's matrices are kept in while drafting; None lets the head choose. It changes speed and
            acceptance, never the emitted law.
        window: prompt positions that the head reads, the last ones. Heads are trained on texts of some 500 tokens,
            and what lies farther back costs time at every step.
        confidence: a chain stops where the product of the head's largest probabilities falls below it; None takes
            what the head was saved with, 0 drafts in full.

    Raises:
        ValueError: a setting outside its range; from `check` or `begin`, where head and target do not fit.

    Example:
        >>> drafter = Eagle3Drafter(Eagle3Head.from_pretrained(folder))    # doctest: +SKIP
        >>> Engine(target, ExactRule(), drafter).decode(condition, seeds)  # doctest: +SKIP
    """

    needs: frozenset[str] = frozenset()

    def __init__(
        self,
        head: FeatureHead,
        dtype: torch.dtype | None = None,
        *,
        window: int = 512,
        confidence: float | None = None,
    ) -> None:
        if window < 1:
            raise ValueError(f"window={window} is not allowed: write the prompt positions to read, such as 512")
        if confidence is not None and not 0 <= confidence < 1:
            raise ValueError(f"confidence={confidence} is a probability below 1; write 0 to draft in full")
        self.head, self.dtype, self.window = head, dtype, window
        self.confidence = float(head.config.confidence_threshold) if confidence is None else confidence
        self.feature_layers: tuple[int, ...] = tuple(head.config.feature_layers)
        # a list, so that shallow copies (one per run where runs overlap) share what one of them prepares
        self._prepared: list[tuple[Any, torch.device, FeatureStep]] = []
        self._run: _Run | None = None

    def check(self, target: Target) -> None:
        """Refuses a target this head was not made for.

        Raises:
            ValueError: vocabulary, hidden size or number of layers do not fit, or the target has no feature layers.
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
        if not hasattr(target, "feature_layers") or not hasattr(target, "model"):
            raise ValueError(
                f"an EAGLE-3 head reads inner layers of a language model and a {type(target).__name__} shows none; "
                f"use a CausalLMTarget, or an EAGLE head (drafter 'eagle') for image models"
            )
        layers = getattr(getattr(target, "config", None), "num_hidden_layers", None)
        if layers is not None and self.feature_layers[-1] >= layers:
            raise ValueError(
                f"the draft head reads layers {self.feature_layers} but the target has {layers}, counted from 0; load "
                f"the head that belongs to this target"
            )

    def begin(self, state: DecodeState, output: TargetOutput, extra: int) -> None:
        step = self._step(state.target)
        features, prompt = output.features, state.condition
        if state.branches != 1 or not isinstance(prompt, TokenPrompt):
            raise ValueError("an EAGLE-3 head drafts behind token prompts, without guidance; leave guidance_scale out")
        width = len(self.feature_layers) * self.head.config.hidden_size
        if features is None or features.shape[-1] != width:
            given = "none" if features is None else f"{features.shape[-1]} numbers per position"
            raise ValueError(
                f"an EAGLE-3 head reads the outputs of layers {self.feature_layers}, {width} numbers per position, "
                f"but the target gave {given}; set target.feature_layers to the drafter's before the prefill"
            )
        if state.copies is not None:
            prompt = prompt.select(state.copies)
        device = features.device
        host_base = [min(length - 1, self.window - 1) for length in prompt.host_lengths]
        base, most = torch.tensor(host_base, device=device), max(host_base)
        first = prompt.lengths - 1 - base
        where = (first[:, None] + torch.arange(most + 1, device=device)).clamp(max=features.shape[1] - 1)
        kept = features.gather(1, where[..., None].expand(-1, -1, width))
        room = PENDING + extra
        pending = kept.new_zeros(len(kept), room, width)
        pending[:, 0] = features[torch.arange(len(kept), device=device), prompt.lengths - 1]
        tokens = prompt.ids.gather(1, (where[:, :most] + 1).clamp(max=prompt.ids.shape[1] - 1))
        # a block of the slowest row may be all of `room` wide and is padded to that width in the others
        slots = most + 1 + state.target.num_tokens + extra + room
        step.reserve(slots)
        store = KVStore(1, len(kept), step.key_heads, step.head_dim, slots, torch.float32, device)
        store.rollback(base, list(host_base))
        self._run = _Run(step, store, base, host_base, pending, _Prompt(tokens, kept[:, :most]))

    def propose(self, state: DecodeState, budget: int, tree: TreeSpec | None = None) -> Draft:
        run = self._live()
        newest = self._catch_up(state, run)
        # draft slots lie behind the committed ones, whose lengths do not move: nothing to roll back
        return self._grow(state, run, newest, tree) if tree is not None else self._chain(state, run, newest, budget)

    def observe(self, state: DecodeState, draft: Draft | None, verdict: Verdict, output: TargetOutput) -> None:
        """Keeps the features of the accepted positions; they go through the head when it drafts next."""
        run = self._live()
        features = output.features
        assert features is not None
        if verdict.path is not None:
            root = torch.zeros_like(verdict.path[:, :1])
            nodes = torch.cat([root, verdict.path.clamp(min=0)], 1)
            features = features.gather(1, nodes[..., None].expand(-1, -1, features.shape[2]))
        count = features.shape[1]
        behind = self._behind(state, run)
        if max(behind) + count > run.pending.shape[1]:
            self._catch_up(state, run)
            behind = self._behind(state, run)
        # features behind the accepted ones are overwritten by later rounds before anything reads them
        first = shared_length(behind)
        if first is not None:
            run.pending[:, first : first + count] = features
            return
        where = (state.lengths + run.base - run.store.lengths)[:, None] + torch.arange(count, device=features.device)
        run.pending.scatter_(1, where[..., None].expand(-1, -1, features.shape[2]), features.to(run.pending.dtype))

    def select(self, rows: Tensor) -> None:
        run = self._live()
        kept = rows.tolist()
        run.store.select(rows, kept)
        run.base, run.host_base = run.base.index_select(0, rows), [run.host_base[row] for row in kept]
        run.pending = run.pending.index_select(0, rows)
        if run.prompt is not None:
            tokens, features = run.prompt.tokens, run.prompt.features
            run.prompt = _Prompt(tokens.index_select(0, rows), features.index_select(0, rows))

    def _step(self, target: Target) -> FeatureStep:
        """The prepared head; made once per model and device, so weights changed later need a new drafter."""
        self.check(target)
        model: Any = target.model  # type: ignore[attr-defined]
        for known, device, step in self._prepared:
            if known() is model and device == target.device:
                return step
        embeddings, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        step = self.head.prepare(embeddings, output, self.dtype)
        self._prepared[:] = [(weakref.ref(model), target.device, step)]
        return step

    def _live(self) -> _Run:
        if self._run is None:
            raise ValueError("begin(state, output, extra) starts a run; call it before propose, observe or select")
        return self._run

    @staticmethod
    def _behind(state: DecodeState, run: _Run) -> list[int]:
        """Complete slots of every row that have not gone through the head, prompt slots aside."""
        known = zip(state.host_lengths, run.host_base, run.store.host_lengths, strict=True)
        return [n + base - done for n, base, done in known]

    def _read_prompt(self, run: _Run, prompt: _Prompt) -> None:
        store, most = run.store, prompt.tokens.shape[1]
        store.rollback(torch.zeros_like(run.base), [0] * store.rows)
        for start in range(0, most, BLOCK):
            tokens = prompt.tokens[:, start : start + BLOCK]
            states = run.step.fuse(prompt.features[:, start : start + BLOCK])
            count = tokens.shape[1]
            run.step(tokens, states, store, store.plan(count))
            store.advance(torch.full_like(store.lengths, count), [count] * store.rows)
        # the rest of a shorter prompt's row is overwritten
        store.rollback(run.base, list(run.host_base))
        run.prompt = None

    def _catch_up(self, state: DecodeState, run: _Run) -> Tensor:
        """Feeds all complete slots; returns the newest one's state [B, 1, D]."""
        if run.prompt is not None:
            self._read_prompt(run, run.prompt)
        store, behind = run.store, self._behind(state, run)
        count, together = max(behind), shared_length(behind) is not None
        done = [slots - base for slots, base in zip(store.host_lengths, run.host_base, strict=True)]
        first = shared_length(done)
        if first is not None and together:
            tokens = state.tokens[:, first : first + count]
        else:
            where = (store.lengths - run.base)[:, None] + torch.arange(count, device=state.tokens.device)
            tokens = state.tokens.gather(1, where.clamp(max=state.tokens.shape[1] - 1))
        out = run.step(tokens, run.step.fuse(run.pending[:, :count]), store, store.plan(count))
        complete = state.lengths + run.base
        if together:
            out = out[:, -1:]
        else:
            newest = (complete - store.lengths - 1).clamp(min=0)
            out = out.gather(1, newest[:, None, None].expand(-1, 1, out.shape[2]))
        store.rollback(complete, [n + base for n, base in zip(state.host_lengths, run.host_base, strict=True)])
        return out

    def _chain(self, state: DecodeState, run: _Run, newest: Tensor, budget: int) -> Draft:
        """A chain that ends early in rows where the head is unlikely to be followed further.

        Position i + 1 is drafted while prod_{j <= i} max_x q_j(x) reaches `confidence`, q at temperature 1. The laws
        q_j depend on earlier tokens only and token i is tested whatever it is, so stopping cannot change the emitted
        law; it reads no other row, so it does not depend on the batch. On the CPU, where reading a number costs
        nothing, undrafted positions are not computed either.
        """
        steps = draft_steps(state, budget)
        numbers, slots = ReducedNumbers(state, steps, run.step.draft_ids), chain_slots(run.store, steps - 1)
        weighing = self.confidence > 0 and steps > 1
        logits, survival = run.step.logits(newest), torch.zeros_like(state.lengths, dtype=torch.float32)
        drawn, lengths = [numbers.draw(logits, 0)], torch.ones_like(state.lengths)
        for depth in range(1, steps):
            if weighing:
                survival = survival + logits[:, 0].amax(-1) - logits[:, 0].logsumexp(-1)
                going = survival >= math.log(self.confidence)
                lengths = lengths + going
                if going.device.type == "cpu" and not going.any():
                    break
            newest = run.step(drawn[-1].tokens, newest, run.store, slots[depth - 1])
            logits = run.step.logits(newest)
            drawn.append(numbers.draw(logits, depth))
        return numbers.chain(drawn, lengths if weighing else None)

    def _grow(self, state: DecodeState, run: _Run, newest: Tensor, tree: TreeSpec) -> Draft:
        def expand(depth: int, level: Level, tokens: Tensor | None) -> Tensor:
            nonlocal newest
            if tokens is not None:
                parents = newest.index_select(1, level.parents)
                newest = run.step(tokens, parents, run.store, level_slots(run.store, level, depth - 1))
            return run.step.logits(newest)

        return reduced_tree(state, tree, run.step.draft_ids, expand)
