"""Text as it grows: pieces for a listener, and stop strings. Both work on text, which tokens cut anywhere.

B rows, K draft length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.ending import StopAt
from ..core.engine import Round
from ..core.types import DecodeState

__all__ = ["StopStrings", "TextStream", "cut_text", "stop_strings"]

BROKEN = "\ufffd"
"""What a decoder writes for bytes that are no character yet."""
BEFORE = 4
"""Tokens decoded again in front of new ones: what a token looks like may depend on the one before it."""
SLACK = 8
"""Tokens of a window beyond one per byte of the longest stop string; some tokens, such as special ones, have none."""


def stop_strings(given: str | Sequence[str] | None) -> tuple[str, ...]:
    """Stop strings as a tuple.

    Raises:
        ValueError: something else, or an empty string.
    """
    if given is None:
        return ()
    found = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Sequence) else (None,)
    if not all(isinstance(one, str) and one for one in found):
        raise ValueError(f"stop={given!r}; write a text that ends the answer, or a list of such texts")
    return tuple(str(one) for one in found)


def cut_text(text: str, stops: Sequence[str]) -> str:
    """`text` up to where the first stop string begins."""
    places = [place for place in (text.find(one) for one in stops) if place >= 0]
    return text[: min(places)] if places else text


class StopStrings:
    """Ends a row at the token that completes a stop string in its new text; ids and lengths as `StopAt` does.

    The text is checked token by token, so a stop string may straddle blocks, or end inside of an accepted one.

    Args:
        tokenizer: of the model.
        strings: what ends a row; special tokens are part of the text that is searched.
        ids: stop ids and lengths.
    """

    def __init__(self, tokenizer: Any, strings: Sequence[str], ids: StopAt) -> None:
        self.tokenizer, self.strings, self.ids = tokenizer, tuple(strings), ids
        self.window = SLACK + max(len(one.encode()) for one in strings)
        self.hit: set[int] = set()

    def limits(self, batch: int, horizon: int, device: torch.device) -> Tensor:
        return self.ids.limits(batch, horizon, device)

    def cut(self, state: DecodeState, counts: Tensor, width: int, rows: list[int]) -> tuple[Tensor, Tensor]:
        counts, stopped = self.ids.cut(state, counts, width, rows)
        kept, tokens = [int(count) for count in counts.tolist()], state.tokens.cpu()
        found = [False] * len(kept)
        for live, row in enumerate(rows):
            begin = state.host_lengths[live]
            for count in range(1, kept[live] + 1):
                end = begin + count
                text = self.tokenizer.decode(tokens[live, max(0, end - self.window) : end].tolist())
                if any(one in text for one in self.strings):
                    kept[live], found[live] = count, True
                    self.hit.add(row)
                    break
        return torch.tensor(kept, device=counts.device), stopped | torch.tensor(found, device=counts.device)


class TextStream:
    """Tells the new text of every row after each round. Joined, the pieces of a row are its final text.

    A piece is held back while it ends in an incomplete character or in what may become a stop string.

    Args:
        tokenizer: of the model.
        tell: gets a row's number and its new piece of text.
        count: B.
        strings: stop strings, of which no part is told.
    """

    def __init__(self, tokenizer: Any, tell: Callable[[int, str], Any], count: int, strings: Sequence[str]) -> None:
        self.tokenizer, self.tell, self.strings = tokenizer, tell, tuple(strings)
        self.read, self.texts, self.told = [0] * count, [""] * count, [0] * count

    def add(self, step: Round) -> None:
        """Takes a round."""
        tokens = step.state.tokens.cpu()
        for live, row in enumerate(step.rows):
            now, first = step.lengths[row], max(0, self.read[row] - BEFORE)
            if now > self.read[row]:
                self._grow(row, tokens[live, first:now].tolist(), self.read[row] - first, now)

    def finish(self, texts: Sequence[str]) -> None:
        """Tells what was held back and belongs to the final texts."""
        for row, text in enumerate(texts):
            if text[: self.told[row]] == self.texts[row][: self.told[row]] and len(text) > self.told[row]:
                self.tell(row, text[self.told[row] :])

    def _grow(self, row: int, tokens: list[int], known: int, now: int) -> None:
        """`tokens` of a row, of which the first `known` are part of its text already; `now` is its length."""
        old, new = (self.tokenizer.decode(part, skip_special_tokens=True) for part in (tokens[:known], tokens))
        if new.endswith(BROKEN) or not new.startswith(old):
            return
        self.read[row] = now
        self.texts[row] += new[len(old) :]
        text = self.texts[row]
        safe = len(cut_text(text, self.strings))
        if safe == len(text):
            safe -= self._pending(text)
        if safe > self.told[row]:
            self.tell(row, text[self.told[row] : safe])
            self.told[row] = safe

    def _pending(self, text: str) -> int:
        """Characters at the end that may begin a stop string."""
        longest = 0
        for one in self.strings:
            for size in range(min(len(one) - 1, len(text)), longest, -1):
                if text.endswith(one[:size]):
                    longest = size
                    break
        return longest
