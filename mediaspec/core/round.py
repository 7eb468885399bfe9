"""What the loop shows its caller: a round, a change of the logits, a row that cannot go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from .types import DecodeState, Draft, Verdict

__all__ = ["DecodingError", "Process", "Round"]

Process = Callable[[DecodeState, Tensor, Draft | None, list[int]], Tensor]
"""Logits [B, 1, N, V] of the scored positions (of a draft, or None) and the rows' original indices -> logits changed
by the text before each position, of the same shape."""


class DecodingError(ValueError):
    """A row cannot go on. `rows` are indices into the batch, `position` the first token that could not be drawn."""

    def __init__(self, rows: Sequence[int], position: int) -> None:
        self.rows, self.position = list(rows), position
        super().__init__(
            f"row(s) {self.rows}: no token can be drawn at position {position}: the target's logits are NaN or "
            f"infinite, or every admissible token has zero probability; check the weights, the dtype (float16 "
            f"overflows where bfloat16 and float32 do not), the guidance scale and the token mask"
        )


@dataclass(frozen=True)
class Round:
    """What happened in one round.

    Args:
        index: 0 for the prefill, then 1, 2, ...
        rows: indices of the rows that took part, into the original batch.
        lengths: committed tokens of every original row.
        state: the live state (do not write); verdict: of this round, None for the prefill.
    """

    index: int
    rows: list[int]
    lengths: list[int]
    state: DecodeState
    verdict: Verdict | None
