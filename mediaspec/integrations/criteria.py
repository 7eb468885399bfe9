"""What `generate` asks about committed tokens: transformers' stopping criteria, and its scores and logits.

Criteria are asked token by token, with the ids of the whole batch at one length, as in plain `generate`.

Letters: B rows of the whole batch, b live rows, N scored positions, V vocabulary, C prompt columns, T horizon.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from ..core.ending import StopAt
from ..core.types import DecodeState, Draft
from ..pipelines.lockstep import StepwiseProcessors, Texts

__all__ = ["CriteriaEnding", "ScoreBook"]


class ScoreBook:
    """Keeps logits and scores of committed tokens, for `output_logits` and `output_scores`.

    Args:
        process: computes the scores; None where they are the logits.
        raw, processed: what to keep.
    """

    def __init__(self, process: StepwiseProcessors | None, raw: bool, processed: bool) -> None:
        self.process, self.raw, self.processed = process, raw, processed
        self.latest: list[tuple[dict[int, list[Tensor]], Tensor]] = []
        self.draft: Draft | None = None
        self.logits: dict[int, list[Tensor]] = {}
        self.scores: dict[int, list[Tensor]] = {}

    def __call__(self, state: DecodeState, logits: Tensor, draft: Draft | None, rows: list[int]) -> Tensor:
        done = logits if self.process is None else self.process(state, logits, draft, rows)
        self.latest, self.draft = [], draft
        if self.raw:
            self.latest.append((self.logits, logits[:, 0].float()))
        if self.processed:
            self.latest.append((self.scores, done[:, 0].float()))
        return done

    def keep(self, state: DecodeState, counts: Sequence[int], rows: Sequence[int]) -> None:
        """Keeps the positions that the first `counts` tokens of every live row's block were drawn at."""
        if not self.latest:
            return
        for live, (count, row) in enumerate(zip(counts, rows, strict=True)):
            at = self._positions(state, live, count)
            for kept, values in self.latest:
                kept.setdefault(row, []).extend(values[live, at].clone())

    def _positions(self, state: DecodeState, live: int, count: int) -> list[int]:
        """A chain is scored in order; in a tree every committed token leads on to the node that holds it."""
        if self.draft is None or self.draft.tree is None:
            return list(range(count))
        begin = state.host_lengths[live]
        written, drafted = state.tokens[live, begin : begin + count].tolist(), self.draft.tokens[live].tolist()
        children, at = self.draft.tree.children, [0]
        for token in written[: count - 1]:
            at.append(next(node for node in children[at[-1]] if drafted[node - 1] == token))
        return at[:count]

    @staticmethod
    def steps(kept: dict[int, list[Tensor]], batch: int, length: int) -> tuple[Tensor, ...]:
        """One [B, V] per token; zeros for rows that had stopped."""
        blank = torch.zeros_like(next(iter(kept.values()))[0])
        return tuple(
            torch.stack([kept[row][step] if step < len(kept.get(row, ())) else blank for row in range(batch)])
            for step in range(length)
        )


class CriteriaEnding:
    """Stop ids on the device, and transformers' other criteria token by token on the host.

    Args:
        stop_ids: ids that end a row.
        criteria: all other criteria; may be empty.
        texts: shared with the processors.
        apart: rows stop one by one, as `generate` does where there are stop ids. Without them a stopped row goes on
            until all have stopped; then `stops` says when each did.
        book: told which tokens were committed; None where nobody asked.
        follow: keep `texts` up to date for processors that look at rows which have left.
    """

    def __init__(
        self,
        stop_ids: Sequence[int],
        criteria: StoppingCriteriaList,
        texts: Texts,
        apart: bool = True,
        book: ScoreBook | None = None,
        follow: bool = False,
    ) -> None:
        self.ids, self.criteria, self.texts, self.apart, self.book = StopAt(stop_ids), criteria, texts, apart, book
        self.follow = follow
        self.stops: dict[int, int] = {}

    def limits(self, batch: int, horizon: int, device: torch.device) -> Tensor:
        return self.ids.limits(batch, horizon, device)

    def cut(self, state: DecodeState, counts: Tensor, width: int, rows: list[int]) -> tuple[Tensor, Tensor]:
        counts, stopped = self.ids.cut(state, counts, width, rows)
        if not self.criteria and self.book is None and not self.follow:
            return counts, stopped
        host = [int(count) for count in counts.tolist()]
        if self.criteria:
            hit = self._ask(state, host, rows)
            if self.apart:
                counts = torch.tensor(host, device=counts.device)
                stopped = stopped | torch.tensor(hit, device=counts.device)
        if self.follow:
            self.texts.update(state, rows, host)
        if self.book is not None:
            self.book.keep(state, host, rows)
        return counts, stopped

    def _ask(self, state: DecodeState, host: list[int], rows: list[int]) -> list[bool]:
        """Asks about every new token in order; shortens `host` to the first one that stops its row."""
        self.texts.update(state, rows, host)
        before, hit = state.host_lengths, [False] * len(host)
        reach = max(length + count for length, count in zip(before, host, strict=True))
        for length in range(min(before) + 1, reach + 1):
            new = [
                live
                for live, count in enumerate(host)
                if before[live] < length <= before[live] + count and not hit[live] and rows[live] not in self.stops
            ]
            if not new:
                continue
            done = self.criteria(self.texts.upto(self.texts.columns + length), None).tolist()
            for live in new:
                if done[rows[live]]:
                    hit[live] = True
                    self.stops[rows[live]] = length
                    if self.apart:
                        host[live] = length - before[live]
        return hit
