"""transformers' logits processors on rows that advance at their own pace.

They are written for a loop that adds one token to every row at a time: they take the ids of the whole batch, of one
length, padded on the left. Here they get exactly that for every length they are asked about, and of the answer only
the rows that stand at this length are used; the other rows hold an earlier text, or their whole one and padding.

Letters: B rows of the whole batch, b live rows, N scored positions, V vocabulary, C prompt columns, T horizon.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as known

from ..core.types import DecodeState, Draft, Warp

__all__ = ["StepwiseProcessors", "Texts", "drafting_warp", "split_warp"]

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

    def update(self, state: DecodeState, rows: Sequence[int], counts: Sequence[int] | None = None) -> None:
        """Takes over what the live rows have committed, and behind it the first `counts` tokens of a written block;
        the rest of a row is padding, as it is for rows that stopped."""
        ends = [length + more for length, more in zip(state.host_lengths, counts or [0] * len(rows), strict=True)]
        order, reach = torch.arange(self.horizon, device=self.ids.device), torch.tensor(ends, device=self.ids.device)
        written = torch.where(order < reach[:, None], state.tokens[:, : self.horizon], self.pad)
        if self.together:
            self.ids[list(rows), self.columns :] = written
            return
        for live, row in enumerate(rows):
            self.ids[row, self.starts[row] : self.starts[row] + self.horizon] = written[live]

    def upto(self, place: int) -> Tensor:
        """[B, place] the first columns."""
        return self.ids[:, :place].clone()


def split_warp(processors: LogitsProcessorList) -> tuple[LogitsProcessorList, Warp]:
    """Takes temperature, top-k and top-p off the end of a list, in the order in which a `Warp` applies them."""
    rest = list(processors)
    found: dict[str, Any] = {}
    for kind, name in ((known.TopPLogitsWarper, "top_p"), (known.TopKLogitsWarper, "top_k")):
        if rest and type(rest[-1]) is kind and rest[-1].filter_value == -float("inf") and _keeps_one(rest[-1]):
            found[name] = getattr(rest.pop(), name)
    if rest and type(rest[-1]) is known.TemperatureLogitsWarper:
        found["temperature"] = rest.pop().temperature
    try:
        return LogitsProcessorList(rest), Warp(**found)
    except ValueError:  # a value only transformers' own classes allow
        return processors, Warp()


def _keeps_one(processor: Any) -> bool:
    """Whether a truncation keeps no token that its threshold would not: a `Warp` knows no minimum number."""
    return int(getattr(processor, "min_tokens_to_keep", 1)) == 1


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

    Nobody is asked about a text that cannot be: behind a stop id, or behind a draft that does not count or that a
    processor of the list has forbidden. So a grammar that has ended, or was left, is not asked to go on.

    Args:
        processors: what `generate` prepared; functions of the ids and scores they are given.
        texts: shared with the criteria.
        stop_ids: ids that end a row.
        lossless: a draft that the processors forbid is never accepted.

    Raises:
        ValueError: a processor that keeps state between calls.
    """

    def __init__(
        self, processors: LogitsProcessorList, texts: Texts, stop_ids: Sequence[int] = (), lossless: bool = True
    ) -> None:
        for one in processors:
            if isinstance(one, STATEFUL):
                raise ValueError(
                    f"{type(one).__name__} remembers its last call and cannot be asked about drafts that may be taken "
                    f"back; leave its option out or call generate() without custom_generate"
                )
        self.texts, self.stop_ids, self.lossless = texts, frozenset(stop_ids), lossless
        self.parts: list[tuple[bool, Any]] = []
        for one in processors:
            free = type(one) in FREE
            if not self.parts or self.parts[-1][0] != free:
                self.parts.append((free, LogitsProcessorList()))
            self.parts[-1][1].append(one)

    @property
    def reads_texts(self) -> bool:
        """Whether any processor looks at the ids."""
        return any(not free for free, _ in self.parts)

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
        """Level by level, so that what a node's parent forbids is known before the node is asked about."""
        texts, paths = self.texts, _paths(draft, scores.shape[1])
        texts.update(state, rows)
        parents = [0] * len(paths) if draft is None else [0, *_parents(draft)]
        drafted, reach = ([], [0] * len(rows)) if draft is None else (draft.tokens.tolist(), draft.lengths.tolist())
        started = state.host_lengths[0] > 0
        open_ = [[not started or last not in self.stop_ids] for last in state.last_token.tolist()]
        done = scores.clone()
        node = 0
        while node < len(paths):
            level = [node]
            while level[-1] + 1 < len(paths) and len(paths[level[-1] + 1][0]) == len(paths[node][0]):
                level.append(level[-1] + 1)
            # (columns of the text, rank) -> node -> rows; at one place and node the path's columns are the same
            groups: dict[tuple[int, int], dict[int, list[int]]] = {}
            for one in level:
                path, rank = paths[one]
                if path:
                    above = parents[one]
                    allowed = self._allowed(done[:, above], draft.tokens[:, one - 1]) if draft else []
                    for live, row in enumerate(drafted):
                        open_[live].append(open_[live][above] and allowed[live] and row[one - 1] not in self.stop_ids)
                for live, length in enumerate(state.host_lengths):
                    if open_[live][one] and len(path) <= reach[live] and length + len(path) < texts.horizon:
                        place = texts.starts[rows[live]] + length + len(path)
                        groups.setdefault((place, rank), {}).setdefault(one, []).append(live)
            for (place, _), nodes in sorted(groups.items()):
                self._ask(part, done, scores, draft, rows, place, nodes, paths)
            node = level[-1] + 1
        return done

    def _allowed(self, scores: Tensor, tokens: Tensor) -> list[bool]:
        """Per row, whether a draft token may stand there: scores [b, V] and tokens [b]. A row in which nothing may
        forbids nothing, since a later processor can still repair it."""
        if not self.lossless:
            return [True] * len(tokens)
        never = float("-inf")
        here = scores.gather(1, tokens[:, None])[:, 0] > never
        return (here | ~(scores > never).any(1)).tolist()  # type: ignore[no-any-return]

    def _ask(
        self,
        part: Any,
        done: Tensor,
        scores: Tensor,
        draft: Draft | None,
        rows: list[int],
        place: int,
        nodes: dict[int, list[int]],
        paths: list[tuple[list[int], int]],
    ) -> None:
        """One call for texts of one length: fills `done` at the given nodes and rows."""
        ids = self.texts.upto(place)
        whole = scores.new_zeros(len(ids), scores.shape[2])
        asked: list[int] = []
        at: list[int] = []
        lives: list[int] = []
        for node, members in nodes.items():
            path, here = paths[node][0], [rows[live] for live in members]
            if path and draft is not None:
                ids[here, place - len(path) :] = draft.tokens[members][:, path]
            whole[here] = scores[members, node]
            asked, at, lives = asked + here, at + [node] * len(members), lives + members
        processed = part(ids, whole)[asked] if self.texts.together else part(ids[asked], whole[asked])
        done[lives, at] = processed


def _parents(draft: Draft) -> Sequence[int]:
    """The scored position before every draft token."""
    return range(draft.tokens.shape[1]) if draft.tree is None else draft.tree.parents


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
