"""transformers' logits processors and stopping criteria on rows that advance at their own pace.

Both are written for a loop that adds one token to every row at a time: they take the ids of the whole batch, of one
length, padded on the left. Here they get exactly that for every length they are asked about, and of the answer only
the rows that stand at this length are used; the other rows hold some earlier or later text.

Letters: B rows of the whole batch, b live rows, N scored positions, V vocabulary, C prompt columns, T horizon.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import logits_process as known

from ..core.ending import StopAt
from ..core.types import DecodeState, Draft, Warp

__all__ = ["CriteriaEnding", "ScoreBook", "StepwiseProcessors", "Texts", "drafting_warp", "split_warp"]

FREE = (
    known.TemperatureLogitsWarper, known.TopKLogitsWarper, known.TopPLogitsWarper, known.MinPLogitsWarper,
    known.TypicalLogitsWarper, known.EpsilonLogitsWarper, known.EtaLogitsWarper, known.TopHLogitsWarper,
    known.SuppressTokensLogitsProcessor, known.InfNanRemoveLogitsProcessor, known.LogitNormalization,
)  # fmt: skip
"""Processors whose answer depends on the scores alone: one call serves all positions of all rows."""

STATEFUL = (
    known.UnbatchedClassifierFreeGuidanceLogitsProcessor,
    known.SynthIDTextWatermarkLogitsProcessor,
    known.WhisperTimeStampLogitsProcessor,
)
"""Processors that remember their last call, so that they cannot be asked about tokens that may be taken back."""


class Texts:
    """Ids of all rows, prompts and what follows them.

    Args:
        input_ids: [B, C] prompts.
        horizon: T.
        pad: fills what is not written yet.
        lengths: ids of every prompt, which then stands at column 0 without padding: rows are asked about one by one
            and nothing of a row depends on the others. None: prompts padded on the left to one length, as `generate`
            holds them; then processors and criteria see the whole batch, of which a user's own may make use.
    """

    def __init__(self, input_ids: Tensor, horizon: int, pad: int, lengths: Sequence[int] | None = None) -> None:
        batch, self.columns = input_ids.shape
        self.together = lengths is None
        self.starts = [self.columns] * batch if lengths is None else list(lengths)
        self.ids = torch.cat([input_ids, input_ids.new_full((batch, horizon), pad)], 1)
        self.horizon, self.pad = horizon, pad

    def update(self, state: DecodeState, rows: Sequence[int]) -> None:
        """Takes over what the live rows have written, committed or not."""
        if self.together:
            self.ids[list(rows), self.columns :] = state.tokens[:, : self.horizon]
            return
        for live, row in enumerate(rows):
            start = self.starts[row]
            self.ids[row, start : start + self.horizon] = state.tokens[live, : self.horizon]

    def upto(self, place: int) -> Tensor:
        """[B, place] the first columns."""
        return self.ids[:, :place].clone()


def split_warp(processors: LogitsProcessorList) -> tuple[LogitsProcessorList, Warp]:
    """Takes temperature, top-k and top-p off the end of a list, in the order in which a `Warp` applies them."""
    rest = list(processors)
    found: dict[str, Any] = {}
    for kind, name in ((known.TopPLogitsWarper, "top_p"), (known.TopKLogitsWarper, "top_k")):
        if rest and type(rest[-1]) is kind and rest[-1].filter_value == -float("inf"):
            found[name] = getattr(rest.pop(), name)
    if rest and type(rest[-1]) is known.TemperatureLogitsWarper:
        found["temperature"] = rest.pop().temperature
    try:
        return LogitsProcessorList(rest), Warp(**found)
    except ValueError:  # a value only transformers' own classes allow
        return processors, Warp()


def drafting_warp(processors: LogitsProcessorList) -> Warp:
    """The temperature, top-k and top-p of a list, wherever they stand: the law a draft model had best draw from."""
    found: dict[str, Any] = {}
    for one in processors:
        for kind, name in (
            (known.TemperatureLogitsWarper, "temperature"), (known.TopKLogitsWarper, "top_k"),
            (known.TopPLogitsWarper, "top_p"),
        ):  # fmt: skip
            if type(one) is kind:
                found[name] = getattr(one, name)
    try:
        return Warp(**found)
    except ValueError:  # a value only transformers' own classes allow
        return Warp()


class StepwiseProcessors:
    """A processor list evaluated at every scored position with the text before it.

    Args:
        processors: what `generate` prepared.
        texts: shared with the criteria.

    Raises:
        ValueError: a processor that keeps state between calls.
    """

    def __init__(self, processors: LogitsProcessorList, texts: Texts) -> None:
        for one in processors:
            if isinstance(one, STATEFUL):
                raise ValueError(
                    f"{type(one).__name__} remembers its last call and cannot be asked about drafts that may be taken "
                    f"back; leave its option out or call generate() without custom_generate"
                )
        self.texts = texts
        self.parts: list[tuple[bool, Any]] = []
        for one in processors:
            free = type(one) in FREE
            if not self.parts or self.parts[-1][0] != free:
                self.parts.append((free, LogitsProcessorList()))
            self.parts[-1][1].append(one)

    def __call__(self, state: DecodeState, logits: Tensor, draft: Draft | None, rows: list[int]) -> Tensor:
        """[b, 1, N, V] logits -> the same with all processors applied, float32."""
        scores = logits[:, 0].to(torch.float32, copy=True)
        for free, part in self.parts:
            if free:
                flat = scores.flatten(0, 1)
                scores = part(self.texts.ids[:1, :1].expand(len(flat), 1), flat).view_as(scores)
            else:
                scores = self._stepwise(part, scores, state, draft, rows)
        return scores[:, None]

    def _stepwise(self, part: Any, scores: Tensor, state: DecodeState, draft: Draft | None, rows: list[int]) -> Tensor:
        texts = self.texts
        texts.update(state, rows)
        # (columns of the text, rank) -> node -> rows; those at the same place and node share their path's columns
        groups: dict[tuple[int, int], dict[int, list[int]]] = {}
        paths = _paths(draft, scores.shape[1])
        for node, (path, rank) in enumerate(paths):
            for live, length in enumerate(state.host_lengths):
                # rows behind their end are scored as well; their text is as long as the horizon at most
                place = texts.starts[rows[live]] + min(length + len(path), texts.horizon)
                groups.setdefault((place, rank), {}).setdefault(node, []).append(live)
        done = torch.empty_like(scores)
        for (place, _), nodes in sorted(groups.items()):
            ids = texts.upto(place)
            whole = scores.new_zeros(len(ids), scores.shape[2])
            asked, at, lives = [], [], []
            for node, members in nodes.items():
                path = paths[node][0]
                inside = [live for live in members if state.host_lengths[live] + len(path) <= texts.horizon]
                if path and draft is not None and inside:
                    written = draft.tokens[inside][:, path]
                    ids[[rows[live] for live in inside], place - len(path) :] = written
                here = [rows[live] for live in members]
                whole[here] = scores[members, node]
                asked, at, lives = asked + here, at + [node] * len(members), lives + members
            processed = part(ids, whole)[asked] if texts.together else part(ids[asked], whole[asked])
            done[lives, at] = processed
        return done


def _paths(draft: Draft | None, nodes: int) -> list[tuple[list[int], int]]:
    """Per scored position the draft columns before it, and its rank among those as deep."""
    if draft is None or draft.tree is None:
        return [(list(range(node)), 0) for node in range(nodes)]
    paths: list[list[int]] = [[]]
    for node, parent in enumerate(draft.tree.parents):
        paths.append([*paths[parent], node])
    ranks: dict[int, int] = {}
    found = []
    for path in paths:
        rank = ranks.get(len(path), 0)
        ranks[len(path)] = rank + 1
        found.append((path, rank))
    return found


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
    """

    def __init__(
        self,
        stop_ids: Sequence[int],
        criteria: StoppingCriteriaList,
        texts: Texts,
        apart: bool = True,
        book: ScoreBook | None = None,
    ) -> None:
        self.ids, self.criteria, self.texts, self.apart, self.book = StopAt(stop_ids), criteria, texts, apart, book
        self.stops: dict[int, int] = {}

    def limits(self, batch: int, horizon: int, device: torch.device) -> Tensor:
        return self.ids.limits(batch, horizon, device)

    def cut(self, state: DecodeState, counts: Tensor, width: int, rows: list[int]) -> tuple[Tensor, Tensor]:
        counts, stopped = self.ids.cut(state, counts, width, rows)
        if not self.criteria and self.book is None:
            return counts, stopped
        host = [int(count) for count in counts.tolist()]
        if self.criteria:
            hit = self._ask(state, host, rows)
            if self.apart:
                counts = torch.tensor(host, device=counts.device)
                stopped = stopped | torch.tensor(hit, device=counts.device)
        if self.book is not None:
            self.book.keep(state, host, rows)
        return counts, stopped

    def _ask(self, state: DecodeState, host: list[int], rows: list[int]) -> list[bool]:
        """Asks about every new token in order; shortens `host` to the first one that stops its row."""
        self.texts.update(state, rows)
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
