"""Drafting with lazy layers: the target itself, with its laziest layers reading a sink and recent keys only.

The lossless half of LightTransfer (arXiv:2410.13846): the target keeps all keys and verifies with all of them, so the
choice of layers moves speed alone. Drafts cost what they read; for long contexts that approaches the share of full
layers (0.5 with half of them), which bounds the gain: a draft of cost 0.5 accepted 98 of 100 times gives 1.66x.

Letters: B rows, L layers without a sliding window, P of them full, w judging queries, H query heads, Hkv key heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..attention.laziness import JUDGES, weigh
from ..attention.logits import LogitForm
from ..attention.restriction import Window
from ..core.kv import KVStore, Slots
from ..core.prompt import TokenPrompt
from ..core.tree import TreeSpec
from ..core.types import DecodeState, Draft, Target, TargetOutput, Verdict, Warp
from ._self_draft import RestrictableTarget, check_restrictable, self_draft

__all__ = ["LazyDrafter"]


@dataclass
class _Run:
    """Per row: the prompt, right-aligned in `ids` [B, C] with its length, and the lazy layers once judged."""

    ids: Tensor
    lengths: Tensor
    lazy: list[frozenset[int] | None]


class LazyDrafter:
    """Drafts with the target's own weights and keys, fewer of them in lazy layers. Needs a `CausalLMTarget`.

    A row's layers are judged once, when its text has grown beyond what a lazy layer keeps: its last `w_last` tokens
    run through the target once more, and it is measured how much each layer's output owes to the other keys. Other
    rows have no influence; rows that chose differently share a pass, which then reads a mixed layer whole.

    Args:
        full_layers: P; None: half, rounded up. 0 makes every layer lazy.
        w_sink, w_recent: first and last committed keys a lazy layer reads.
        w_last: queries that judge, at most w_sink + w_recent.
        judge: "output" or "mass", see `attention.selection.LightTransfer`.
        lazy_layers: a fixed set instead of a choice per row.
        warp: how logits become the law drafts are drawn from; None is the run's own.

    Raises:
        ValueError: values out of range; from `begin`, a target or prompt it cannot draft for.

    Example:
        >>> Engine(target, CoupledRule(), LazyDrafter(full_layers=8)).decode(prompt, seeds)  # doctest: +SKIP
    """

    needs: frozenset[str] = frozenset()

    def __init__(
        self,
        full_layers: int | None = None,
        w_sink: int = 4,
        w_recent: int = 508,
        w_last: int = 32,
        judge: str = "output",
        lazy_layers: Sequence[int] | None = None,
        warp: Warp | None = None,
    ) -> None:
        if w_sink < 0 or w_recent < 1 or not 1 <= w_last <= w_sink + w_recent:
            raise ValueError(
                f"w_sink={w_sink}, w_recent={w_recent}, w_last={w_last}: they count tokens, w_sink from 0 and the "
                f"others from 1, and w_last is at most w_sink + w_recent"
            )
        if full_layers is not None and (full_layers < 0 or lazy_layers is not None):
            raise ValueError(
                f"full_layers={full_layers} with lazy_layers={lazy_layers}; give one of them, full_layers from 0"
            )
        self.full_layers, self.w_sink, self.w_recent, self.w_last = full_layers, w_sink, w_recent, w_last
        if judge not in JUDGES:
            raise ValueError(f"judge={judge!r}; write one of {', '.join(map(repr, JUDGES))}")
        self.judge = judge
        self.lazy_layers = None if lazy_layers is None else frozenset(lazy_layers)
        self.warp = warp
        self._run: _Run | None = None

    def check(self, target: Target) -> None:
        """Refuses a target that cannot read part of its keys.

        Raises:
            ValueError: naming what to use instead.
        """
        check_restrictable(target, "the lazy drafter")

    @property
    def kept(self) -> int:
        return self.w_sink + self.w_recent

    def begin(self, state: DecodeState, output: TargetOutput, extra: int) -> None:
        self.check(state.target)
        if not isinstance(state.condition, TokenPrompt) or state.branches != 1:
            raise ValueError("the lazy drafter drafts text: give the prompts as a TokenPrompt, without guidance")
        if type(state.cache) is not KVStore:
            raise ValueError(
                f"the lazy drafter reads a KVStore with all keys and the target has a {type(state.cache).__name__}: a "
                f"lossy attention policy is enabled on the model; call handle.remove(), or use another drafter"
            )
        prompt = state.condition if state.copies is None else state.condition.select(state.copies)
        self._run = _Run(prompt.ids, prompt.lengths, [self.lazy_layers] * state.rows)

    def propose(self, state: DecodeState, budget: int, tree: TreeSpec | None = None) -> Draft:
        run = self._live()
        assert state.cache is not None
        new = [
            row for row, length in enumerate(state.cache.host_lengths) if run.lazy[row] is None and length > self.kept
        ]
        if new:
            self._judge(state, state.cache, run, new)
        if self.warp is not None:
            state = replace(state, warp=self.warp)
        return self_draft(state, budget, tree, self)

    def observe(self, state: DecodeState, draft: Draft | None, verdict: Verdict, output: TargetOutput) -> None:
        """Nothing to keep."""

    def select(self, rows: Tensor) -> None:
        run = self._live()
        run.ids, run.lengths = run.ids.index_select(0, rows), run.lengths.index_select(0, rows)
        run.lazy = [run.lazy[row] for row in rows.tolist()]

    def visible(self, layer: int) -> Window | None:
        """The `Restriction` of the current rows."""
        rows = tuple(lazy is not None and layer in lazy for lazy in self._live().lazy)
        return Window(self.w_sink, self.w_recent, rows) if any(rows) else None

    def lazy_sets(self) -> list[list[int] | None]:
        """Per live row: its lazy layers, None while its text is short."""
        return [None if lazy is None else sorted(lazy) for lazy in self._live().lazy]

    def _live(self) -> _Run:
        if self._run is None:
            raise ValueError("begin(state, output, extra) starts a run; call it before propose, observe or select")
        return self._run

    def _judge(self, state: DecodeState, cache: KVStore, run: _Run, new: list[int]) -> None:
        """Chooses the lazy layers of rows that have none yet; reads from the device once."""
        target: RestrictableTarget = state.target  # type: ignore[assignment]
        eye = _Eye(cache, self)
        before, cache.watch = cache.watch, eye
        try:
            target.retrace(self._tail(state, cache, run), cache)
        finally:
            cache.watch = before
        layers = list(eye.scores)
        full = -(-len(layers) // 2) if self.full_layers is None else self.full_layers
        scores = torch.stack([eye.scores[layer] for layer in layers], 1).tolist() if layers else []
        for row in new:
            order = sorted(range(len(layers)), key=lambda place, row=row: (-scores[row][place], place))  # type: ignore[misc]
            run.lazy[row] = frozenset(layers[place] for place in order[: max(len(layers) - full, 0)])

    def _tail(self, state: DecodeState, cache: KVStore, run: _Run) -> Tensor:
        """[B, w] the last committed tokens that the cache holds; rows with fewer get any ids and are not judged."""
        at = cache.lengths[:, None] - self.w_last + torch.arange(self.w_last, device=cache.lengths.device)
        behind = at - run.lengths[:, None]
        prompt = run.ids.gather(1, at.clamp(0, run.ids.shape[1] - 1))
        written = state.tokens.gather(1, behind.clamp(0, state.tokens.shape[1] - 1))
        return torch.where(behind < 0, prompt, written)


class _Eye:
    """Scores every layer that a retraced tail goes through: [B], larger for lazier ones."""

    def __init__(self, cache: KVStore, drafter: LazyDrafter) -> None:
        self.cache, self.drafter, self.lengths = cache, drafter, cache.lengths
        self.scores: dict[int, Tensor] = {}

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, slots: Slots, form: LogitForm) -> None:
        if form.window is not None:
            return
        cache, mine = self.cache, self.drafter
        values = cache.layer(layer)[1][:, :, : keys.shape[2]]
        sight = cache.sight
        residual = None if sight is None else sight.residual
        kept = mine.w_sink, mine.w_recent
        found = weigh(mine.judge, queries, keys, values, self.lengths, *kept, form, sight, residual)
        self.scores[layer] = found.ratio.mean(1) if found.error is None else -found.error
