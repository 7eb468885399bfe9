"""Drafting without a draft model: the target's own last pass proposes the next window (SJD, arXiv:2410.01699).

A window of W positions behind the newest token holds guesses. A verification pass gives the target's law at every one
of them; what lies behind the first rejection is drawn again from those laws and is the next draft, whose own law is
thus known exactly. So speculative sampling applies and nothing is lost. How the new token is drawn decides how often a
guess survives from pass to pass:

    fresh     a new independent draw                                                    (SJD, arXiv:2410.01699)
    maximal   keep the old token x with probability min(1, p_new(x) / p_old(x)), else draw from [p_new - p_old]_+
    gumbel    share one noise vector per absolute position between passes              (both: coupled Jacobi, SCD)

Why every choice is lossless: the new law at position j depends on guesses before j only, hence not on the numbers that
drew position j. Fresh numbers (fresh, maximal) or the very same ones (gumbel) then both draw exactly from the new law.

B rows, W window, K draft length, V vocabulary, T tokens per image; t absolute position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.component import ConfigMixin, SchedulerMixin, register_to_config
from ..core.law import point_mass
from ..core.rng import TARGET
from ..core.tree import TreeSpec
from ..core.types import DecodeState, Draft, Target, TargetOutput, Verdict
from ..kernels import philox
from ..kernels.sample import draw
from ._draw import draft_lengths

__all__ = ["JacobiDrafter"]

INITS = ("left", "above", "repeat", "random", "sample")
REDRAFTS = ("fresh", "maximal", "gumbel")
# Purposes of numbers that must be new in every pass: two per pass, behind the purposes of `core.rng`.
FIRST_PURPOSE = 16


@dataclass
class _Run:
    """The window of one run: guesses at positions `lengths + 0..W-1`; `probs` [B, W, V] is None for a coupled rule."""

    tokens: Tensor
    probs: Tensor | None
    passes: int


class JacobiDrafter(SchedulerMixin, ConfigMixin):
    """Proposes the target's own previous guesses.

    Args:
        window: W; a draft is its first `num_draft_tokens` positions, a wider window keeps guesses alive longer.
        init: what a position gets when it enters the window. "left": the token before it. "above": the token one grid
            row up. "repeat": the newest committed token. These are point masses. "random": an id drawn from the
            uniform law. "sample": a draw from the law of the last verified position (with a coupling rule, which
            shows tokens only, the same as "left").
        redraft: "fresh", "maximal" or "gumbel", see the module's head. With a rule that couples (it compares drafts
            with the target's own draw under shared noise) the redraft is that draw, whatever stands here.

    Raises:
        ValueError: an unknown choice, or init="above" on a target without a grid.

    Example:
        >>> JacobiDrafter(window=16, init="above", redraft="maximal").config.redraft
        'maximal'
    """

    needs: frozenset[str] = frozenset({"target_probs", "choices"})

    @register_to_config
    def __init__(self, window: int = 16, init: str = "left", redraft: str = "gumbel") -> None:
        if window < 1:
            raise ValueError(f"window={window}; write a positive number of positions, e.g. window=16")
        for name, value, allowed in (("init", init, INITS), ("redraft", redraft, REDRAFTS)):
            if value not in allowed:
                raise ValueError(f"{name}={value!r} is not allowed: write one of {', '.join(map(repr, allowed))}")
        self.window, self.init, self.redraft = window, init, redraft
        self._run: _Run | None = None

    def check(self, target: Target) -> None:
        """Refuses init="above" where the target has no grid."""
        if self.init == "above" and target.grid is None:
            raise ValueError('init="above" needs a target with a token grid, this one has none; write init="left"')

    def begin(self, state: DecodeState, output: TargetOutput, extra: int) -> None:
        self.check(state.target)
        coupled = state.draft_purpose == TARGET
        self.needs = frozenset({"choices" if coupled else "target_probs"})
        tokens = state.tokens.new_zeros(state.rows, self.window)
        probs = None if coupled else tokens.new_zeros(*tokens.shape, state.target.vocab_size, dtype=torch.float32)
        fresh = torch.full_like(state.lengths, self.window)
        self._run = self._fill(state, _Run(tokens, probs, 0), state.tokens, state.lengths, fresh, None)

    def propose(self, state: DecodeState, budget: int, tree: TreeSpec | None = None) -> Draft:
        if tree is not None:
            raise ValueError("a Jacobi window is a chain; leave tree=None with this drafter")
        run = self._live()
        # positions beyond the window repeat its last one and are cut off by the lengths
        order = torch.arange(budget, device=run.tokens.device).clamp(max=self.window - 1)
        probs = run.probs.index_select(1, order) if run.probs is not None else None
        return Draft(run.tokens.index_select(1, order), draft_lengths(state, min(budget, self.window)), probs)

    def observe(self, state: DecodeState, draft: Draft, verdict: Verdict, output: TargetOutput) -> None:
        run = self._live()
        count, passes = draft.tokens.shape[1], run.passes + 1
        moved = verdict.num_accepted + 1
        # the window's offset j is offset j + moved of the one just scored; row i of the scores is the law of offset i
        old = moved[:, None] + torch.arange(self.window, device=moved.device)
        scored, held = old <= min(count, self.window), old < self.window
        rows, kept = old.clamp(max=count), old.clamp(max=self.window - 1)
        tokens = run.tokens.gather(1, kept)
        probs = last = None
        if run.probs is None:
            assert verdict.choices is not None, "a coupling rule must report the target's choices"
            tokens = torch.where(scored, verdict.choices.gather(1, rows), tokens)
        else:
            assert verdict.target_probs is not None, "this drafter needs the target's law at every scored position"
            vocab = run.probs.shape[2]
            laws = verdict.target_probs.gather(1, rows[..., None].expand(-1, -1, vocab))
            before = run.probs.gather(1, kept[..., None].expand(-1, -1, vocab))
            positions = (state.lengths[:, None] + old).clamp(max=state.target.num_tokens - 1)
            drawn = self._redraw(state, positions, laws, tokens, before, held, passes)
            tokens = torch.where(scored, drawn, tokens)
            probs = torch.where(scored[..., None], laws, before)
            last = verdict.target_probs[:, min(count, self.window)]
        fresh = self.window - (scored | held).sum(1)
        run = _Run(tokens, probs, passes)
        self._run = self._fill(state, run, _committed(state, draft, verdict), state.lengths + moved, fresh, last)

    def select(self, rows: Tensor) -> None:
        run = self._live()
        probs = run.probs.index_select(0, rows) if run.probs is not None else None
        self._run = _Run(run.tokens.index_select(0, rows), probs, run.passes)

    def _live(self) -> _Run:
        if self._run is None:
            raise ValueError("begin(state, output, extra) starts a run; call it before propose, observe or select")
        return self._run

    def _redraw(
        self,
        state: DecodeState,
        positions: Tensor,
        laws: Tensor,
        tokens: Tensor,
        before: Tensor,
        held: Tensor,
        passes: int,
    ) -> Tensor:
        """[B, W] draws from the laws `laws` [B, W, V].

        `tokens`, `before`: the guesses they replace and the laws those were drawn from, where `held` [B, W].
        """
        if self.redraft == "gumbel":
            noise = state.rng.noise(positions, state.draft_purpose)
            return _draw(state, laws, positions, state.draft_purpose, noise)
        purpose = FIRST_PURPOSE + 2 * passes
        if self.redraft == "fresh":
            return _draw(state, laws, positions, purpose, None)
        guess = tokens[..., None]
        uniform = philox.uniform(state.rng.seeds, positions, purpose + 1)
        keep = held & (uniform * before.gather(2, guess)[..., 0] < laws.gather(2, guess)[..., 0])
        residual = (laws - before).clamp(min=0)
        usable = held[..., None] & (residual.sum(-1, keepdim=True) > 0)
        drawn = _draw(state, torch.where(usable, residual, laws), positions, purpose, None)
        return torch.where(keep, tokens, drawn)

    def _fill(
        self, state: DecodeState, run: _Run, known: Tensor, start: Tensor, fresh: Tensor, last: Tensor | None
    ) -> _Run:
        """Puts guesses into the last `fresh` [B] positions of the window at `start` [B].

        `known` [B, T'] holds all committed tokens, `last` [B, V] the law of the last verified position.
        """
        order = torch.arange(self.window, device=start.device)
        entering = order >= (self.window - fresh)[:, None]
        vocab, law = state.target.vocab_size, None
        positions = (start[:, None] + order).clamp(max=state.target.num_tokens - 1)
        if self.init == "sample" and last is not None:
            law = last[:, None].expand(-1, self.window, -1)
            noise = state.rng.noise(positions, state.draft_purpose)
            tokens = _draw(state, law, positions, state.draft_purpose, noise)
        elif self.init == "random":
            uniform = state.rng.uniform(positions, state.draft_purpose)
            tokens, law = _uniform_draw(uniform, state.allowed, vocab)
        else:
            tokens = self._neighbours(state, run.tokens, known, start, fresh)
        probs = run.probs
        if probs is not None:
            law = point_mass(tokens, vocab) if law is None else law
            probs = torch.where(entering[..., None], law, probs)
        return _Run(torch.where(entering, tokens, run.tokens), probs, run.passes)

    def _neighbours(self, state: DecodeState, tokens: Tensor, known: Tensor, start: Tensor, fresh: Tensor) -> Tensor:
        """[B, W] copies of earlier tokens, committed or in the window; the newest one where there is none above."""
        newest = known.gather(1, (start - 1)[:, None].clamp(min=0, max=known.shape[1] - 1))
        if self.init == "repeat":
            return newest.expand(-1, self.window)
        back = 1
        if self.init == "above":
            assert state.target.grid is not None
            back = state.target.grid[1]
        # the nearest offset j - back, j - 2 back, ... in front of the entering positions; negative ones are committed
        order = torch.arange(self.window, device=start.device)
        first = (self.window - fresh)[:, None]
        source = order - back * ((order - first).clamp(min=0) // back + 1)
        position = start[:, None] + source
        committed = known.gather(1, position.clamp(min=0, max=known.shape[1] - 1))
        inside = tokens.gather(1, source.clamp(min=0))
        return torch.where(source >= 0, inside, torch.where(position >= 0, committed, newest))


def _draw(state: DecodeState, laws: Tensor, positions: Tensor, purpose: int, noise: Tensor | None) -> Tensor:
    """[B, W] draws from weights [B, W, V]."""
    return draw(laws, seeds=state.rng.seeds, positions=positions, purpose=purpose, noise=noise).clamp(min=0)


def _uniform_draw(uniform: Tensor, allowed: Tensor | None, vocab: int) -> tuple[Tensor, Tensor]:
    """Ids [B, W] from numbers in [0, 1), and the uniform law [V] over the allowed ones."""
    if allowed is None:
        tokens = (uniform * vocab).long().clamp(max=vocab - 1)
        return tokens, torch.full((vocab,), 1 / vocab, device=uniform.device)
    upto = allowed.cumsum(0)
    rank = torch.minimum((uniform * upto[-1]).long(), upto[-1] - 1)
    return torch.searchsorted(upto, rank, right=True), allowed / upto[-1]


def _committed(state: DecodeState, draft: Draft, verdict: Verdict) -> Tensor:
    """[B, T'] the tokens of every row with this round's in place; what lies behind them is undefined."""
    emitted = torch.cat([draft.tokens, verdict.next_token[:, None]], 1)
    emitted = emitted.scatter(1, verdict.num_accepted[:, None], verdict.next_token[:, None])
    where = state.lengths[:, None] + torch.arange(emitted.shape[1], device=emitted.device)
    return state.tokens.scatter(1, where, emitted)
