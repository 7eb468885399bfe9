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
from ..core.kv import shared_length
from ..core.law import point_mass
from ..core.rng import TARGET
from ..core.tree import TreeSpec
from ..core.types import DecodeState, Draft, Target, TargetOutput, Verdict
from ..kernels import philox
from ..kernels.sample import draw
from ._draw import draft_lengths, draft_steps

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


@dataclass
class _Seen:
    """One scored pass, kept until the next proposal: by then the host knows how far the rows moved.

    Args:
        drafted: K, scored guesses per row.
        scores: the target's choices [B, K+1] (coupled rule) or laws [B, K+1, V] at the scored positions.
        lengths, host_lengths: committed tokens per row before the round.
    """

    drafted: int
    scores: Tensor
    lengths: Tensor
    host_lengths: list[int]


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

    chains_only = True
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
        self._seen: _Seen | None = None
        self._stale = False

    def check(self, target: Target) -> None:
        """Refuses init="above" where the target has no grid."""
        if self.init == "above" and target.grid is None:
            raise ValueError('init="above" needs a target with a token grid, this one has none; write init="left"')

    def begin(self, state: DecodeState, output: TargetOutput, extra: int) -> None:
        self.check(state.target)
        coupled = state.draft_purpose == TARGET
        self.needs = frozenset({"choices" if coupled else "target_probs"})
        self._run, self._seen, self._stale = self._empty(state, coupled, 0), None, False

    def _empty(self, state: DecodeState, coupled: bool, passes: int) -> _Run:
        """A window of fresh guesses behind the newest token."""
        tokens = state.tokens.new_zeros(state.rows, self.window)
        probs = None if coupled else tokens.new_zeros(*tokens.shape, state.target.vocab_size, dtype=torch.float32)
        return self._fill(state, _Run(tokens, probs, passes), torch.full_like(state.lengths, self.window), None)

    def propose(self, state: DecodeState, budget: int, tree: TreeSpec | None = None) -> Draft:
        if tree is not None:
            raise ValueError("a Jacobi window is a chain; leave tree=None with this drafter")
        if self._stale:
            run = self._live()
            self._run, self._stale = self._empty(state, run.probs is None, run.passes + 1), False
        run = self._advance(state, self._live())
        steps = draft_steps(state, budget)
        lengths = draft_lengths(state, min(steps, self.window))
        if steps <= self.window:
            return Draft(run.tokens[:, :steps], lengths, run.probs[:, :steps] if run.probs is not None else None)
        # positions beyond the window repeat its last one and are cut off by the lengths
        order = torch.arange(steps, device=run.tokens.device).clamp(max=self.window - 1)
        probs = run.probs.index_select(1, order) if run.probs is not None else None
        return Draft(run.tokens.index_select(1, order), lengths, probs)

    def observe(self, state: DecodeState, draft: Draft | None, verdict: Verdict, output: TargetOutput) -> None:
        coupled = self._live().probs is None
        scores = verdict.choices if coupled else verdict.target_probs
        if draft is None or scores is None:  # another drafter's round: the window no longer stands where it was made
            self._seen, self._stale = None, True
            return
        self._seen = _Seen(draft.tokens.shape[1], scores, state.lengths, list(state.host_lengths))

    def select(self, rows: Tensor) -> None:
        run, seen = self._live(), self._seen
        probs = run.probs.index_select(0, rows) if run.probs is not None else None
        self._run = _Run(run.tokens.index_select(0, rows), probs, run.passes)
        if seen is not None:
            kept = [seen.host_lengths[row] for row in rows.tolist()]
            self._seen = _Seen(
                seen.drafted, seen.scores.index_select(0, rows), seen.lengths.index_select(0, rows), kept
            )

    def _advance(self, state: DecodeState, run: _Run) -> _Run:
        """The window of this round: what the last pass scored is drawn anew, the rest moves up, guesses fill up."""
        seen, self._seen = self._seen, None
        if seen is None:
            return run
        steps = [now - before for now, before in zip(state.host_lengths, seen.host_lengths, strict=True)]
        shared = run.probs is None or self.redraft == "gumbel"
        together = shared and self.init in ("left", "repeat") and 0 < min(steps) == max(steps)
        if together and shared_length(state.host_lengths) is not None:
            self._run = self._slide(state, run, seen, steps[0])
        else:
            self._run = self._move(state, run, seen)
        return self._run

    def _slide(self, state: DecodeState, run: _Run, seen: _Seen, moved: int) -> _Run:
        """`_move` for rows that all moved alike: slices instead of gathers. Row i of the scores is offset i's law."""
        scored = max(0, min(seen.drafted, self.window) + 1 - moved)
        held = max(0, self.window - moved - scored)
        new, old = slice(moved, moved + scored), slice(moved + scored, moved + scored + held)
        laws: list[Tensor] = []
        if run.probs is None:
            drawn = seen.scores[:, new]
        else:
            noise = state.rng.noise_from(state.lengths, state.host_lengths, scored, state.draft_purpose)
            laws = [seen.scores[:, new], run.probs[:, old]]
            drawn = _draw(state, laws[0], self._positions(state, scored), state.draft_purpose, noise)
        tokens = torch.cat([drawn, run.tokens[:, old]], 1)
        fresh = self.window - scored - held
        if fresh:
            newest = state.tokens[:, state.host_lengths[0] - 1, None]
            guess = tokens[:, -1:] if self.init == "left" and scored + held else newest
            guess = guess.expand(-1, fresh)
            tokens = torch.cat([tokens, guess], 1)
            if run.probs is not None:
                certain = run.probs.new_zeros(len(guess), fresh, run.probs.shape[2])
                laws.append(certain.scatter_(2, guess[..., None], 1.0))
        return _Run(tokens, torch.cat(laws, 1) if laws else None, run.passes + 1)

    def _move(self, state: DecodeState, run: _Run, seen: _Seen) -> _Run:
        count, passes = seen.drafted, run.passes + 1
        moved = state.lengths - seen.lengths
        # the window's offset j is offset j + moved of the one just scored; row i of the scores is the law of offset i
        old = moved[:, None] + torch.arange(self.window, device=moved.device)
        scored, held = old <= min(count, self.window), old < self.window
        rows, kept = old.clamp(max=count), old.clamp(max=self.window - 1)
        tokens = run.tokens.gather(1, kept)
        probs = last = None
        if run.probs is None:
            tokens = torch.where(scored, seen.scores.gather(1, rows), tokens)
        else:
            vocab = run.probs.shape[2]
            laws = seen.scores.gather(1, rows[..., None].expand(-1, -1, vocab))
            before = run.probs.gather(1, kept[..., None].expand(-1, -1, vocab))
            drawn = self._redraw(state, self._positions(state, self.window), laws, tokens, before, held, passes)
            tokens = torch.where(scored, drawn, tokens)
            probs = torch.where(scored[..., None], laws, before)
            last = seen.scores[:, min(count, self.window)]
        fresh = self.window - (scored | held).sum(1)
        return self._fill(state, _Run(tokens, probs, passes), fresh, last)

    @staticmethod
    def _positions(state: DecodeState, count: int) -> Tensor:
        """[B, count] absolute positions of the window's first offsets."""
        order = torch.arange(count, device=state.lengths.device)
        return (state.lengths[:, None] + order).clamp(max=state.target.num_tokens - 1)

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

    def _fill(self, state: DecodeState, run: _Run, fresh: Tensor, last: Tensor | None) -> _Run:
        """Puts guesses into the last `fresh` [B] positions of the window; `last` [B, V]: the last verified law."""
        order = torch.arange(self.window, device=fresh.device)
        entering = order >= (self.window - fresh)[:, None]
        vocab, law = state.target.vocab_size, None
        positions = self._positions(state, self.window)
        if self.init == "sample" and last is not None:
            law = last[:, None].expand(-1, self.window, -1)
            noise = state.rng.noise(positions, state.draft_purpose)
            tokens = _draw(state, law, positions, state.draft_purpose, noise)
        elif self.init == "random":
            uniform = state.rng.uniform(positions, state.draft_purpose)
            tokens, law = _uniform_draw(uniform, state.allowed, vocab)
        else:
            tokens = self._neighbours(state, run.tokens, fresh)
        probs = run.probs
        if probs is not None:
            law = point_mass(tokens, vocab) if law is None else law
            probs = torch.where(entering[..., None], law, probs)
        return _Run(torch.where(entering, tokens, run.tokens), probs, run.passes)

    def _neighbours(self, state: DecodeState, tokens: Tensor, fresh: Tensor) -> Tensor:
        """[B, W] copies of earlier tokens, committed or in the window; the newest one where there is none above."""
        known, start = state.tokens, state.lengths
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
