"""Token prompts of different lengths, without padding slots: what language targets and lookup drafters read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["TokenPrompt"]


@dataclass(frozen=True)
class TokenPrompt:
    """The prompts of P rows, each from column 0 on.

    A padded position of a prompt has no key, no value and no position of its own, so a row's slots are its sequence
    positions and nothing in a batch depends on the longest prompt.

    Args:
        ids: [P, C] int64; what stands behind a row's length is some valid id and never seen.
        lengths: [P] int64, at least 1.
        host_lengths: the same numbers on the host.

    Raises:
        ValueError: shapes differ, or a prompt is empty.

    Example:
        >>> ids, mask = torch.tensor([[0, 0, 7], [4, 5, 6]]), torch.tensor([[0, 0, 1], [1, 1, 1]])
        >>> prompt = TokenPrompt.from_padded(ids, mask)
        >>> prompt.ids.tolist(), prompt.host_lengths
        ([[7, 0, 0], [4, 5, 6]], (1, 3))
    """

    ids: Tensor
    lengths: Tensor
    host_lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.ids.dim() != 2 or self.ids.dtype != torch.int64:
            raise ValueError(f"prompt ids are {self.ids.dtype} of shape {list(self.ids.shape)}; give int64 [P, C]")
        if self.lengths.shape != self.ids.shape[:1] or len(self.host_lengths) != len(self.ids):
            raise ValueError(f"{len(self.ids)} prompts and {list(self.lengths.shape)} lengths; give one per prompt")
        if min(self.host_lengths) < 1 or max(self.host_lengths) > self.ids.shape[1]:
            raise ValueError(
                f"prompt lengths are {list(self.host_lengths)} with {self.ids.shape[1]} columns; every prompt needs "
                f"at least one token (a beginning-of-sequence id where there is no text)"
            )

    def __len__(self) -> int:
        return self.ids.shape[0]

    @classmethod
    def from_padded(cls, ids: Tensor, mask: Tensor | None = None) -> TokenPrompt:
        """Prompts padded on either side to one length, as tokenizers give them.

        Args:
            ids: [P, C] int64.
            mask: [P, C], 0 at positions that do not exist; None where all do.
        """
        if mask is None:
            return cls(ids, torch.full_like(ids[:, 0], ids.shape[1]), (ids.shape[1],) * len(ids))
        if mask.shape != ids.shape:
            raise ValueError(f"the mask has shape {list(mask.shape)} and the ids {list(ids.shape)}; make both equal")
        there = mask != 0
        order = (~there).to(torch.int8).argsort(dim=1, stable=True)
        lengths = there.sum(1)
        host = tuple(int(n) for n in lengths.tolist())  # once per prefill
        return cls(ids.gather(1, order)[:, : max(max(host), 1)], lengths, host)

    def select(self, rows: Tensor) -> TokenPrompt:
        """Keeps or repeats prompts ([n] int64)."""
        host = tuple(self.host_lengths[row] for row in rows.tolist())
        return TokenPrompt(self.ids.index_select(0, rows), self.lengths.index_select(0, rows), host)

    def aligned_right(self, fill: int = -1) -> Tensor:
        """[P, C] the prompts moved to the right end, `fill` in front of shorter ones."""
        columns = torch.arange(self.ids.shape[1], device=self.ids.device)
        source = columns - (self.ids.shape[1] - self.lengths[:, None])
        return torch.where(source >= 0, self.ids.gather(1, source.clamp(min=0)), fill)
