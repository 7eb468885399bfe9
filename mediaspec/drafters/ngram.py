"""Drafting by copying: what followed the present words when they last stood in the prompt, the output or older texts.

Two ways of choosing the continuation, both by comparing the end of a row with all its earlier positions at once, on
the device and without a model:

    lookup   copy what follows one earlier occurrence of the longest matching suffix (prompt lookup)
    suffix   walk on from all occurrences of the longest matching suffix, taking the commonest next token each time and
             keeping the occurrences that agree: what a suffix automaton over the text holds, read along one path

Drafts are point masses. B rows, K draft length, C prompt columns, M memory columns, W columns of a row's whole text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.prompt import TokenPrompt
from ..core.tree import TreeSpec
from ..core.types import DecodeState, Draft, TargetOutput, Verdict

__all__ = ["NgramDrafter"]

METHODS = ("lookup", "suffix")
PICKS = ("latest", "earliest")
NOTHING = -1  # fills columns without a token; equals no token


@dataclass
class _Run:
    """`before` [B, M + C]: what stands before the new tokens of every row, at the right end. `matched` [B, W]: the
    matches when the rows had the lengths `asked`."""

    before: Tensor
    matched: Tensor | None = None
    asked: tuple[int, ...] = ()


class NgramDrafter:
    """Drafts by lookup in the text so far.

    Args:
        max_ngram, min_ngram: longest and shortest suffix that is looked up. "lookup" is used with about 3, "suffix"
            with about 24, where long matches carry the draft.
        method: "lookup" or "suffix", see the head of this file.
        pick: which occurrence of the longest suffix "lookup" copies from; transformers takes the earliest.
        stop_ids: a draft ends before the first of these.
        min_share: "suffix" stops where the product of the shares of the chosen tokens falls below this.
        spec_factor: "suffix" drafts at most this many tokens per matched token, 0 is no such limit.
        memory: M, how many tokens of older texts are kept by `remember`.

    Raises:
        ValueError: values out of range.

    Example:
        >>> text = TokenPrompt.from_padded(torch.tensor([[1, 2, 3, 4, 9, 1, 2, 3]]))
        >>> tokens, lengths, matched = NgramDrafter().continuation(text.ids, 4)
        >>> tokens.tolist(), lengths.tolist(), matched.tolist()
        ([[4, 9, 1, 2]], [4], [3])
    """

    chains_only = True
    needs: frozenset[str] = frozenset()

    def __init__(
        self,
        max_ngram: int = 3,
        min_ngram: int = 1,
        *,
        method: str = "lookup",
        pick: str = "latest",
        stop_ids: Sequence[int] = (),
        min_share: float = 0.1,
        spec_factor: float = 0.0,
        memory: int = 0,
    ) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"min_ngram={min_ngram} and max_ngram={max_ngram}; write 1 <= min_ngram <= max_ngram")
        if method not in METHODS or pick not in PICKS:
            raise ValueError(f"method={method!r} must be one of {METHODS} and pick={pick!r} one of {PICKS}")
        if not 0 <= min_share <= 1 or spec_factor < 0 or memory < 0:
            raise ValueError(
                f"min_share={min_share} must be in [0, 1], spec_factor={spec_factor} and memory={memory} >= 0"
            )
        self.max_ngram, self.min_ngram, self.method, self.pick = max_ngram, min_ngram, method, pick
        self.stop_ids, self.min_share, self.spec_factor = tuple(stop_ids), min_share, spec_factor
        self.memory = memory
        self._older = torch.empty(0, dtype=torch.int64)
        self._run: _Run | None = None

    def remember(self, tokens: Tensor) -> None:
        """Keeps a finished text [n] int64 for later runs; only the newest `memory` tokens of all texts stay.

        Under a rule that is exact in law, what is remembered changes which of the equally lawful tokens come out;
        the tokens of the coupled rule and of greedy decoding do not change.
        """
        gap = tokens.new_full((1,), NOTHING)
        self._older = (
            torch.cat([self._older.to(tokens.device), tokens, gap])[-self.memory :] if self.memory else gap[:0]
        )

    def begin(self, state: DecodeState, output: TargetOutput, extra: int) -> None:
        prompt = state.condition
        parts = [self._older.to(state.tokens.device).expand(state.rows, -1)]
        if isinstance(prompt, TokenPrompt):
            if state.copies is not None:
                prompt = prompt.select(state.copies)
            parts.append(prompt.aligned_right(NOTHING))
        self._run = _Run(torch.cat(parts, 1))

    def propose(self, state: DecodeState, budget: int, tree: TreeSpec | None = None) -> Draft:
        if tree is not None:
            raise ValueError("the ngram drafter proposes chains; leave `tree` out and set num_draft_tokens")
        text, ends, matched = self._look(state)
        tokens, lengths, _ = self._continue(text, budget, ends, matched)
        room = (state.target.num_tokens - 1 - state.lengths).clamp(min=0)
        lengths = torch.minimum(lengths, room)
        # columns that count in no row are scored for nothing; on the CPU looking costs no sync
        width = max(1, int(lengths.max())) if tokens.device.type == "cpu" else budget
        return Draft(tokens[:, :width].clamp(min=0), lengths)

    def ready(self, state: DecodeState) -> bool:
        """Whether at least half of the rows have a match; True on an accelerator, where looking would be a sync."""
        if state.tokens.device.type != "cpu":
            return True
        found = self._look(state)[2].amax(1) > 0
        return 2 * int(found.sum()) >= state.rows

    def _look(self, state: DecodeState) -> tuple[Tensor, Tensor, Tensor]:
        """The rows' whole texts [B, W], their ends [B] and the matches [B, W], searched once per round."""
        run = self._live()
        width = run.before.shape[1] + max(state.host_lengths)
        text = torch.cat([run.before, state.tokens[:, : max(state.host_lengths)]], 1)
        ends, asked = run.before.shape[1] + state.lengths, tuple(state.host_lengths)
        if run.matched is None or run.asked != asked or run.matched.shape[1] != width:
            run.matched, run.asked = self._matches(text, ends), asked
        return text, ends, run.matched

    def observe(self, state: DecodeState, draft: Draft | None, verdict: Verdict, output: TargetOutput) -> None:
        """Nothing to keep: the text is read from the state."""

    def select(self, rows: Tensor) -> None:
        self._run = _Run(self._live().before.index_select(0, rows))

    def continuation(self, text: Tensor, count: int, ends: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """What is likely to follow.

        Args:
            text: [B, W] int64, negative where there is no token.
            count: K.
            ends: [B] int64, how many leading columns count; None for all.

        Returns:
            tokens [B, K], how many of them count [B], and the length of the suffix found [B] (0: none).
        """
        if ends is None:
            ends = torch.full_like(text[:, 0], text.shape[1])
        return self._continue(text, count, ends, self._matches(text, ends))

    def _continue(self, text: Tensor, count: int, ends: Tensor, matched: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`continuation` from known matches [B, W]."""
        if self.method == "lookup":
            tokens, length = self._copy(text, ends, matched, count)
        else:
            tokens, length = self._walk(text, ends, matched, count)
        found = matched.amax(1)
        steps = torch.arange(count, device=text.device)
        good = (steps < length[:, None]) & (tokens >= 0)
        for stop in self.stop_ids:
            good &= tokens != stop
        lengths = good.long().cumprod(1).sum(1)
        return tokens, torch.where(found > 0, lengths, 0), found

    def _live(self) -> _Run:
        if self._run is None:
            raise ValueError("begin(state, output, extra) starts a run; call it before propose or select")
        return self._run

    def _matches(self, text: Tensor, ends: Tensor) -> Tensor:
        """[B, W]: how many tokens before column i equal the last ones of the row, at most `max_ngram`; 0 where fewer
        than `min_ngram` do, or where nothing follows."""
        columns = torch.arange(text.shape[1], device=text.device)
        alive = columns < ends[:, None]
        matched = torch.zeros_like(text)
        for back in range(1, min(self.max_ngram, text.shape[1] - 1) + 1):
            token = text.gather(1, (ends - back).clamp(min=0)[:, None])
            equal = (text == token) & (token >= 0) & (ends >= back)[:, None]
            alive = alive & torch.nn.functional.pad(equal, (back, 0))[:, : text.shape[1]]
            matched += alive
        return torch.where(matched >= self.min_ngram, matched, 0)

    def _copy(self, text: Tensor, ends: Tensor, matched: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Copies from behind one occurrence; where the copy would pass the end of the row, it starts over (a text that
        repeats itself with that period)."""
        columns = torch.arange(text.shape[1], device=text.device)
        order = columns if self.pick == "latest" else text.shape[1] - 1 - columns
        start = (matched * text.shape[1] + order).argmax(1)[:, None]
        period = (ends[:, None] - start).clamp(min=1)
        where = start + torch.arange(count, device=text.device) % period
        return text.gather(1, where.clamp(max=text.shape[1] - 1)), torch.full_like(ends, count)

    def _walk(self, text: Tensor, ends: Tensor, matched: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Follows the commonest continuation of all occurrences of the longest suffix, ties to the latest one."""
        width = text.shape[1]
        columns = torch.arange(width, device=text.device)
        best = matched.amax(1, keepdim=True)
        there = (matched == best) & (best > 0)
        share = torch.ones_like(ends, dtype=torch.float32)
        length, tokens = torch.zeros_like(ends), []
        for step in range(count):
            following = torch.nn.functional.pad(text, (0, step), value=NOTHING)[:, step:]
            there = there & (columns + step < ends[:, None]) & (following >= 0)
            token, votes = _commonest(torch.where(there, following, NOTHING))
            share = share * votes / there.sum(1).clamp(min=1)
            tokens.append(token)
            length = length + ((length == step) & (token >= 0) & (share >= self.min_share))
            there = there & (following == token[:, None])
        if self.spec_factor:
            length = torch.minimum(length, (best[:, 0] * self.spec_factor).long().clamp(min=1))
        return torch.stack(tokens, 1), length


def _commonest(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The commonest nonnegative entry of every row [B, W], the latest of several, and how often it stands there."""
    width = tokens.shape[1]
    ordered, place = tokens.sort(dim=1, stable=True)
    columns = torch.arange(width, device=tokens.device).expand_as(tokens)
    fresh = torch.nn.functional.pad(ordered[:, 1:] != ordered[:, :-1], (1, 0), value=True)
    begin = torch.where(fresh, columns, 0).cummax(1).values
    votes = torch.where(ordered >= 0, columns - begin + 1, 0)
    at = (votes * width + place).argmax(1, keepdim=True)
    return ordered.gather(1, at)[:, 0], votes.gather(1, at)[:, 0]
