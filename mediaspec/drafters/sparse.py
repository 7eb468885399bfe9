"""Sparse self-speculation: the target drafts while it reads only the keys that its last verification looked at.

Verification computes the product of every query with every cached key anyway. The first verified row, which is always
on the true path, says how much attention each key of the store got; the best ones per key head, the sinks and the
newest tokens are what the next drafts read (arXiv:2602.07223, arXiv:2512.01278). A static pattern from `mediaspec
inspect` may replace or complete the choice (arXiv:2601.08297). The target verifies with all keys, so the choice moves
speed alone.

Letters: B rows, L layers, H query heads, Hkv key heads, S slots, K kept keys.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..attention.logits import LogitForm
from ..attention.pattern import SparsePattern, indices_of
from ..attention.select import budget_of, group_scores, top_keys, union, verification_weights
from ..attention.strip import strip_pass
from ..core.kv import KVStore, Slots
from ..core.prompt import TokenPrompt
from ..core.tree import TreeSpec
from ..core.types import DecodeState, Draft, Target, TargetOutput, Verdict, Warp
from ._self_draft import RestrictableTarget, check_restrictable, self_draft

__all__ = ["SparseDrafter"]

TILE = 1024


@dataclass
class _Run:
    """State of one decoding run.

    Args:
        prompt: of every row.
        scores: [L, B, Hkv, S] float32, how much attention each key got.
        known, host_known: [B] keys among which is chosen; later ones are read whole.
        chosen: [L, B, Hkv, K] int64 positions, None until the first choice.
        index: the same with newer tokens and the pattern, as of the present round.
        tables: pattern tables by draft depth.
        dense: layers whose pattern keeps everything.
        watch: what looks at the present round's verification, if anything does.
        round: rounds proposed so far.
    """

    prompt: TokenPrompt
    scores: Tensor
    known: Tensor
    host_known: list[int]
    chosen: Tensor | None
    index: Tensor | None
    tables: dict[int, tuple[Tensor, Tensor]]
    dense: frozenset[int]
    watch: _FirstRow | None = None
    round: int = 0


class SparseDrafter:
    """Drafts with the target's own weights over part of its own keys. Needs a `CausalLMTarget`.

    Args:
        ratio: share of the keys to keep per key head, at least `min_keys`; 0 keeps what `pattern` names and no other.
        min_keys, max_keys: bounds on the number kept; max_keys=None: no upper one.
        sinks: first positions that are always kept.
        stride: rounds between two choices; newer tokens are read whole in between.
        rho: weight of the older scores where a key has both.
        recent: newest keys that are always read; before anything was verified their queries choose. At most min_keys.
        pattern: a `SparsePattern`, the report of `mediaspec inspect` as dict or the path of its JSON; None: none.
        warp: how logits become the law drafts are drawn from; None is the run's own.

    Raises:
        ValueError: values out of range, no key to keep, or a file without patterns; from `begin`, a target, prompt or
            pattern it cannot draft for.

    Example:
        >>> Engine(target, CoupledRule(), SparseDrafter(ratio=0.07)).decode(prompt, seeds)  # doctest: +SKIP
    """

    needs: frozenset[str] = frozenset()

    def __init__(
        self,
        ratio: float = 0.05,
        min_keys: int = 256,
        max_keys: int | None = None,
        sinks: int = 4,
        stride: int = 1,
        rho: float = 0.5,
        recent: int = 32,
        pattern: SparsePattern | Mapping[str, Any] | str | Path | None = None,
        warp: Warp | None = None,
    ) -> None:
        if not 0 <= ratio <= 1 or not 0 <= rho < 1:
            raise ValueError(f"ratio={ratio}, rho={rho}: they are shares, give ratio in [0, 1] and rho in [0, 1)")
        if sinks < 0 or stride < 1 or not 1 <= recent <= min_keys:
            raise ValueError(
                f"sinks={sinks}, stride={stride}, recent={recent}, min_keys={min_keys}: give at least 1 (0 sinks), "
                f"and no more recent than min_keys"
            )
        if max_keys is not None and max_keys < min_keys:
            raise ValueError(f"max_keys={max_keys} is below min_keys={min_keys}; give max_keys >= min_keys, or None")
        if ratio == 0 and pattern is None:
            raise ValueError("ratio=0 keeps no key by itself; give a pattern, or a ratio such as 0.05")
        self.ratio, self.min_keys, self.max_keys = ratio, min_keys, max_keys
        self.sinks, self.stride, self.rho, self.recent, self.warp = sinks, stride, rho, recent, warp
        self.pattern = _pattern(pattern)
        self._run: _Run | None = None

    def check(self, target: Target) -> None:
        """Refuses a target that cannot read part of its keys.

        Raises:
            ValueError: naming what to use instead.
        """
        check_restrictable(target, "the sparse drafter")

    def begin(self, state: DecodeState, output: TargetOutput, extra: int) -> None:
        self.check(state.target)
        cache = state.cache
        if not isinstance(state.condition, TokenPrompt) or state.branches != 1 or cache is None:
            raise ValueError("the sparse drafter drafts text: give the prompts as a TokenPrompt, without guidance")
        if type(cache) is not KVStore:
            raise ValueError(
                f"the sparse drafter reads a KVStore with all keys, the target has a {type(cache).__name__}; remove "
                f"the lossy attention policy (handle.remove()) to draft losslessly"
            )
        layers, heads = cache.keys.shape[0], cache.heads
        dense: list[int] = []
        if self.pattern is not None:
            self.pattern.check(layers, heads)
            whole = [all(one.recent >= cache.capacity for one in layer) for layer in self.pattern.heads]
            dense = [layer for layer, keeps in enumerate(whole) if keeps]
        prompt = state.condition if state.copies is None else state.condition.select(state.copies)
        width = cache.capacity if self.ratio else 0
        scores = torch.zeros(layers, cache.rows, heads, width, device=cache.lengths.device)
        nothing = torch.zeros_like(cache.lengths)
        self._run = _Run(prompt, scores, nothing, [0] * cache.rows, None, None, {}, frozenset(dense))

    def propose(self, state: DecodeState, budget: int, tree: TreeSpec | None = None) -> Draft:
        run, cache = self._live(), state.cache
        assert cache is not None
        if self.warp is not None:
            state = replace(state, warp=self.warp)
        most = self.min_keys + self.recent
        stale = [now - was > most for now, was in zip(cache.host_lengths, run.host_known, strict=True)]
        if self.ratio and any(stale):
            self._read_tail(state, cache, run, stale)
        run.index = self._visible(cache, run, budget if tree is None else tree.max_depth)
        draft = self_draft(state, budget, tree, self)
        if self.ratio and run.round % self.stride == 0:
            cache.watch = run.watch = _FirstRow()
        run.round += 1
        return draft

    def observe(self, state: DecodeState, draft: Draft | None, verdict: Verdict, output: TargetOutput) -> None:
        """Takes in what the verification looked at."""
        run, cache = self._live(), state.cache
        seen = run.watch
        if seen is None or cache is None:  # another drafter's round
            return
        if cache.watch is run.watch:
            cache.watch = None
        run.watch = None
        # the row's own key and its neighbours matter to the next query whatever this one thinks of them
        back = self.recent - 1
        host = [max(length - back, 0) for length in cache.host_lengths]
        self._take(run, seen.weights, (cache.lengths - back).clamp(min=0), host, run.known)

    def select(self, rows: Tensor) -> None:
        run = self._live()
        run.prompt = run.prompt.select(rows)
        run.scores, run.known = run.scores.index_select(1, rows), run.known.index_select(0, rows)
        run.host_known = [run.host_known[row] for row in rows.tolist()]
        run.chosen = None if run.chosen is None else run.chosen.index_select(1, rows)
        run.index = None

    def visible(self, layer: int) -> Tensor | None:
        """The `Restriction` of the present round: [B, Hkv, K] positions, or None where all keys are kept."""
        run = self._live()
        return None if run.index is None or layer in run.dense else run.index[layer]

    def _live(self) -> _Run:
        if self._run is None:
            raise ValueError("begin(state, output, extra) starts a run; call it before propose, observe or select")
        return self._run

    def _read_tail(self, state: DecodeState, cache: KVStore, run: _Run, stale: list[bool]) -> None:
        """Chooses for rows of which too much is new: their last tokens run once more, without writing anything.

        That is a long prompt before its first verification, or a text that other drafters went on with. The tokens
        that choose are read whole, as few of them see each other. What shorter rows compute is not used.
        """
        at = cache.lengths[:, None] - self.recent + torch.arange(self.recent, device=cache.lengths.device)
        behind = at - run.prompt.lengths[:, None]
        prompt = run.prompt.ids.gather(1, at.clamp(0, run.prompt.ids.shape[1] - 1))
        written = state.tokens.gather(1, behind.clamp(0, state.tokens.shape[1] - 1))
        target: RestrictableTarget = state.target  # type: ignore[assignment]
        strip = _Strip(cache.lengths)
        before, cache.watch = cache.watch, strip
        try:
            target.retrace(torch.where(behind < 0, prompt, written), cache)
        finally:
            cache.watch = before
        rows = torch.tensor(stale, device=cache.lengths.device)
        weights = {
            layer: torch.where(rows[:, None, None], fresh, run.scores[layer, :, :, : fresh.shape[2]])
            for layer, fresh in strip.weights.items()
        }
        known = torch.where(rows, cache.lengths - self.recent, run.known)
        lengths = zip(stale, cache.host_lengths, run.host_known, strict=True)
        host = [now - self.recent if new else was for new, now, was in lengths]
        self._take(run, weights, known, host, torch.zeros_like(known))

    def _take(
        self, run: _Run, weights: Mapping[int, Tensor], known: Tensor, host_known: list[int], mixed: Tensor
    ) -> None:
        """Puts fresh weights [B, Hkv, live] into the scores, mixed with older ones in the first `mixed` [B] keys."""
        for layer, fresh in weights.items():
            live = fresh.shape[2]
            old = run.scores[layer, :, :, :live]
            both = (torch.arange(live, device=fresh.device) < mixed[:, None])[:, None]
            old.copy_(torch.where(both, self.rho * old + (1 - self.rho) * fresh, fresh))
        run.known, run.host_known, run.chosen = known, host_known, None

    def _visible(self, cache: KVStore, run: _Run, depth: int) -> Tensor | None:
        """[L, B, Hkv, K] committed positions the drafts of this round read; None: all."""
        parts = []
        if self.ratio:
            if run.chosen is None:
                run.chosen = self._choose(run)
            if run.chosen is None:
                return None
            parts.append(run.chosen)
            newer = max(now - was for now, was in zip(cache.host_lengths, run.host_known, strict=True))
            if newer:
                at = run.known[:, None] + torch.arange(newer, device=run.known.device)
                at = torch.where(at < cache.lengths[:, None], at, -1)[:, None]
                parts.append(at.expand(*run.chosen.shape[:3], -1))
        if self.pattern is None:
            return torch.cat(parts, -1)
        if depth not in run.tables:
            run.tables[depth] = self.pattern.tables(cache.capacity, cache.lengths.device, depth)
        static = indices_of(*run.tables[depth], cache.lengths)
        parts.append(torch.where(static < cache.lengths[:, None, None], static, -1))
        return union(parts) if len(parts) > 1 else parts[0]

    def _choose(self, run: _Run) -> Tensor | None:
        """The best keys of every head; None where that would be all of them."""
        longest = max(run.host_known)
        budgets = [self._budget(known) for known in run.host_known]
        if budgets == run.host_known:
            return None
        counts = budget_of(run.known, self.ratio, self.min_keys, self.max_keys)
        keep = range(min(self.sinks, longest))
        return top_keys(run.scores[..., :longest], counts, run.known, keep, max(*budgets, len(keep)))

    def _budget(self, known: int) -> int:
        """`budget_of` on the host."""
        count = max(math.ceil(known * self.ratio), self.min_keys)
        return min(count if self.max_keys is None else min(count, self.max_keys), known)


class _FirstRow:
    """Weighs the keys of every layer by the first verified row: [B, Hkv, live] per layer without a window."""

    def __init__(self) -> None:
        self.weights: dict[int, Tensor] = {}

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, slots: Slots, form: LogitForm) -> None:
        if form.window is not None:
            return
        key_at = torch.arange(keys.shape[2], device=keys.device)
        # what stands behind the row's own slot lies at a later position, in a tree as well
        logits = form.tile(queries[:, :, :1], keys, slots.positions[:, :1], key_at)
        lse = form.with_sinks(logits.logsumexp(-1))
        groups = (keys.shape[1], -1)
        self.weights[layer] = verification_weights(logits.unflatten(1, groups), lse.unflatten(1, groups))


class _Strip:
    """Weighs the keys of every layer by the last queries of the text."""

    def __init__(self, lengths: Tensor) -> None:
        self.lengths = lengths
        self.weights: dict[int, Tensor] = {}

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, slots: Slots, form: LogitForm) -> None:
        if form.window is not None:
            return
        columns = strip_pass(queries, keys, self.lengths, form, tile=TILE).columns
        heads, count = keys.shape[1], queries.shape[2]
        self.weights[layer] = group_scores(columns, heads) / (count * queries.shape[1] // heads)


def _pattern(given: SparsePattern | Mapping[str, Any] | str | Path | None) -> SparsePattern | None:
    if given is None or isinstance(given, SparsePattern):
        return given
    if isinstance(given, Mapping):
        return SparsePattern.from_dict(given)
    try:
        data = json.loads(Path(given).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"pattern={given!s} is no JSON file ({error}); write one with `mediaspec inspect`") from error
    return SparsePattern.from_dict(data)
