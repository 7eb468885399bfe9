"""Conformance suite for drafters: is a draft drawn from exactly the law it states, whatever the batch and the history?

What a lossless rule needs from a drafter is one statement: given everything before a position, the draft token there
was drawn from the reported row. The suite tests it as a martingale over real decoding runs, and checks through the
engine that no draft can change what a coupling rule emits. B rows, K draft length, V vocabulary, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.engine import Engine
from ..core.tree import TreeSpec
from ..core.types import DecodeState, Draft, Drafter, Target, TargetOutput, Verdict, Warp
from ..rules.coupled import CoupledRule
from ..rules.exact import ExactRule

__all__ = ["check_drafter"]

WARP = Warp(temperature=0.9, top_k=0, top_p=0.95)
# |z| of a standard normal number beyond this has probability 7e-6; four sets of tokens are tried per topology
ALARM = 4.5
OBSERVABLE = frozenset({"hidden", "target_probs", "choices"})


def check_drafter(
    make: Callable[[], Drafter],
    target: Target,
    condition: Callable[[int], Any],
    *,
    guidance_scale: float | None = None,
    budgets: Sequence[int] = (1, 4, 9),
    trees: Sequence[TreeSpec] = (),
    rows: int = 256,
) -> None:
    """Checks a drafter on a target.

    Args:
        make: builds a fresh drafter.
        target: a small target of the kind it drafts for.
        condition: called with a number of rows B, returns what `target.prefill` takes for B rows (times two branches
            with guidance); row b must get the same condition for every B.
        guidance_scale: also the number of branches; None decodes with one.
        budgets: draft lengths to try.
        trees: topologies to try; leave empty for a chain drafter.
        rows: B of the statistical run, which tests about rows * T draws.

    Raises:
        AssertionError: naming the statement that fails, and the numbers. A right drafter fails a run of the suite with
            a probability below 1e-4 (and always in the same way: nothing is random but the fixed seeds).

    Example:
        >>> check_drafter(lambda: JacobiDrafter(window=4), target, condition)  # doctest: +SKIP
    """
    needs = make().needs
    if not needs <= OBSERVABLE:
        raise AssertionError(f"needs={set(needs)} names unknown observations; allowed are {sorted(OBSERVABLE)}")
    for tree in (None, *trees):
        for budget in budgets if tree is None else (tree.max_depth,):
            case = _Case(make, target, condition, guidance_scale, budget, tree)
            _tokens_of_plain_sampling(case)
            _alone_or_in_a_batch(case)
            _honest_law(case, rows)


class _Case:
    """One way of running the drafter."""

    def __init__(
        self,
        make: Callable[[], Drafter],
        target: Target,
        condition: Callable[[int], Any],
        guidance_scale: float | None,
        budget: int,
        tree: TreeSpec | None,
    ) -> None:
        self.make, self.target, self.condition = make, target, condition
        self.guidance_scale, self.budget, self.tree = guidance_scale, budget, tree
        self.label = f"K={budget}" if tree is None else f"tree {tree.parents}"

    def run(self, rule: Any, drafter: Drafter | None, seeds: Tensor, fork: bool = False) -> Tensor:
        """Decodes rows with these seeds; [B, T]. `fork` gives all rows the first condition, after one prefill."""
        result = Engine(self.target, rule, drafter).decode(
            self.condition(1 if fork else len(seeds)),
            seeds,
            copies=torch.zeros_like(seeds) if fork else None,
            warp=WARP,
            guidance_scale=self.guidance_scale,
            num_draft_tokens=self.budget,
            tree=self.tree,
        )
        return result.tokens


class _Watcher:
    """Passes everything on to a drafter and checks what it returns."""

    def __init__(self, drafter: Drafter, case: _Case) -> None:
        self.drafter, self.case = drafter, case
        self.feature_layers: tuple[int, ...] = tuple(getattr(drafter, "feature_layers", ()))
        self.surplus = torch.zeros(4, dtype=torch.float64)
        self.variance = torch.zeros(4, dtype=torch.float64)

    @property
    def needs(self) -> frozenset[str]:
        return self.drafter.needs

    def begin(self, state: DecodeState, output: TargetOutput, extra: int) -> None:
        self.drafter.begin(state, output, extra)

    def propose(self, state: DecodeState, budget: int, tree: TreeSpec | None = None) -> Draft:
        before = state.tokens.clone(), state.lengths.clone()
        draft = self.drafter.propose(state, budget, tree)
        if not (torch.equal(before[0], state.tokens) and torch.equal(before[1], state.lengths)):
            raise AssertionError("propose wrote to the state; drafters only read it")
        self._shapes(state, draft, budget, tree)
        return draft

    def observe(self, state: DecodeState, draft: Draft | None, verdict: Verdict, output: TargetOutput) -> None:
        if draft is not None and draft.probs is not None:
            self._tally(draft, verdict)
        self.drafter.observe(state, draft, verdict, output)

    def select(self, rows: Tensor) -> None:
        self.drafter.select(rows)

    def _shapes(self, state: DecodeState, draft: Draft, budget: int, tree: TreeSpec | None) -> None:
        count = min(budget, draft.tokens.shape[-1]) if tree is None else tree.num_nodes
        vocab = state.target.vocab_size
        if count < 1 or draft.tokens.shape != (state.rows, count) or draft.tokens.dtype != torch.int64:
            raise AssertionError(
                f"{self.case.label}: tokens {draft.tokens.dtype} {tuple(draft.tokens.shape)} instead of int64 "
                f"{(state.rows, budget if tree is None else count)}; a chain may be shorter but not empty"
            )
        if bool(((draft.tokens < 0) | (draft.tokens >= vocab)).any()):
            raise AssertionError(f"{self.case.label}: a draft token lies outside [0, {vocab})")
        longest = count if tree is None else budget
        if draft.lengths.shape != (state.rows,) or bool(((draft.lengths < 0) | (draft.lengths > longest)).any()):
            raise AssertionError(f"{self.case.label}: lengths {draft.lengths.tolist()} leave [0, {longest}]")
        if draft.tree != tree:
            raise AssertionError(f"{self.case.label}: the draft names another tree than it was asked for")
        if draft.probs is None:
            return
        laws = count if tree is None else len(tree.internal)
        if draft.probs.shape != (state.rows, laws, vocab) or draft.probs.dtype != torch.float32:
            raise AssertionError(
                f"{self.case.label}: probs {draft.probs.dtype} {tuple(draft.probs.shape)} instead of float32 "
                f"{(state.rows, laws, vocab)}"
            )
        mass = draft.probs.sum(-1)
        if not bool(((mass - 1).abs() < 1e-3).all()):
            low, high = float(mass.min()), float(mass.max())
            raise AssertionError(f"{self.case.label}: draft laws must sum to 1, found {low:.4f}..{high:.4f}")

    def _tally(self, draft: Draft, verdict: Verdict) -> None:
        """Counts the draft tokens of every tested position; it is tested once, so the counts form a martingale."""
        assert draft.probs is not None
        depth = draft.probs.shape[1] if draft.tree is None else draft.tree.max_depth
        for level in range(depth):
            live = (level <= verdict.num_accepted) & (level < draft.lengths)
            if draft.tree is None:
                self._count(draft.probs[:, level].double(), draft.tokens[:, level : level + 1], live)
                continue
            assert verdict.path is not None
            tables = draft.tree.tables(draft.tokens.device)
            node = verdict.path[:, level - 1].clamp(min=0) if level else torch.zeros_like(live, dtype=torch.int64)
            law = draft.probs[torch.arange(len(node)), tables.internal[node].clamp(min=0)].double()
            for rank in range(tables.children.shape[1]):
                child = tables.children[node, rank]
                token = draft.tokens.gather(1, (child - 1).clamp(min=0)[:, None])
                # siblings are drawn without replacement; fewer admissible tokens than children leave no law to test
                live = live & (child > 0) & (law.sum(1) > 0)
                self._count(law, token, live)
                law = law.scatter(1, token, 0.0)
                law = law / law.sum(1, keepdim=True).clamp(min=1e-30)

    def _count(self, law: Tensor, token: Tensor, live: Tensor) -> None:
        """`law` [B, V], `token` [B, 1] drawn from it, where `live` [B]."""
        if bool((live & (law.gather(1, token)[:, 0] == 0)).any()):
            raise AssertionError(f"{self.case.label}: a drafted token has probability 0 in the law it was drawn from")
        order = torch.arange(law.shape[1], device=law.device)
        best = law.argmax(1, keepdim=True) == order
        likely = law >= law.mean(1, keepdim=True)
        odd, low = (order % 2 == 1).expand_as(law), (order < law.shape[1] // 2).expand_as(law)
        for index, members in enumerate((best, likely, odd, low)):
            expected = (law * members).sum(1)
            hit = members.gather(1, token)[:, 0].double()
            self.surplus[index] += ((hit - expected) * live).sum().cpu()
            self.variance[index] += (expected * (1 - expected) * live).sum().cpu()


def _tokens_of_plain_sampling(case: _Case) -> None:
    """Under a coupling rule a drafter decides speed only."""
    for rows in (1, 5):
        seeds = torch.arange(rows) + 11
        plain = case.run(CoupledRule(), None, seeds)
        got = case.run(CoupledRule(), _Watcher(case.make(), case), seeds)
        if not torch.equal(plain, got):
            row, place = torch.nonzero(plain != got)[0].tolist()
            raise AssertionError(
                f"{case.label}, B={rows}: with the coupled rule row {row} differs from plain sampling at token "
                f"{place}; the drafter disturbs the state, the cache or the random numbers"
            )


def _alone_or_in_a_batch(case: _Case) -> None:
    """A row's drafts, and so its tokens under a rule that tests them, do not depend on its neighbours."""
    seeds = torch.arange(5) + 23
    together = case.run(ExactRule(), _Watcher(case.make(), case), seeds, fork=True)
    if not torch.equal(together, case.run(ExactRule(), _Watcher(case.make(), case), seeds, fork=True)):
        raise AssertionError(f"{case.label}: two equal runs give different tokens; draw with the state's numbers only")
    for row in range(len(seeds)):
        alone = case.run(ExactRule(), _Watcher(case.make(), case), seeds[row : row + 1])
        if not torch.equal(together[row : row + 1], alone):
            place = int(torch.nonzero(together[row] != alone[0])[0])
            raise AssertionError(
                f"{case.label}: row {row} alone differs from the same row in a batch of 5 from token {place} on; look "
                f"at the drafter's cache when rows have different lengths, at `state.copies` and at `select`"
            )


def _honest_law(case: _Case, rows: int) -> None:
    watcher = _Watcher(case.make(), case)
    case.run(ExactRule(), watcher, torch.arange(rows) + 1000)
    names = ("the likeliest token was", "tokens above mean probability were", "odd ids were", "low ids were")
    for name, gap, variance in zip(names, watcher.surplus.tolist(), watcher.variance.tolist(), strict=True):
        if abs(gap) > ALARM * variance**0.5 + 1e-6:
            raise AssertionError(
                f"{case.label}: {name} drafted {gap:+.0f} times more than the stated laws say (standard deviation "
                f"{variance**0.5:.0f}); `probs` must be the law the token was drawn from"
            )
