"""What the diagnostics need of a forward pass, taken on the side: the last queries, and moments before rotation.

A collector is a `Watch`: hang it on a store (`cache.watch = collector`) before the prefill. The pass computes what it
always computes; per layer the collector keeps w queries, two D x D matrices per head and nothing else. Keys stay in
the store, where the strip pass reads them afterwards.

Letters: R rows, N positions of one pass, H query heads, G query heads per key head, w strip rows, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.kv import Slots
from .logits import LogitForm
from .rope_profile import Rotary

__all__ = ["Collector", "LayerTail", "Moments"]


@dataclass
class Moments:
    """Sums over a row's tokens of vectors before rotation, float64.

    Args:
        gram: [R, heads, D, D] of x x^T; total: [R, heads, D] of x.
    """

    gram: Tensor
    total: Tensor

    @classmethod
    def empty(cls, rows: int, heads: int, size: int, device: torch.device) -> Moments:
        gram = torch.zeros(rows, heads, size, size, dtype=torch.float64, device=device)
        return cls(gram, torch.zeros_like(gram[..., 0]))

    def add(self, vectors: Tensor) -> None:
        """[R, heads, N, D], zero where a row has no token."""
        self.gram += (vectors.transpose(2, 3) @ vectors).double()
        self.total += vectors.double().sum(2)


@dataclass
class LayerTail:
    """What is kept of one layer.

    Args:
        queries: [R, H, w, D] the last w queries of every row, right-aligned; zeros where a prompt is shorter.
        form: what makes logits of the products.
        query_moments, key_moments: before rotation; None where the rotation is not known.
        seen: positions passed so far.
    """

    queries: Tensor
    form: LogitForm
    query_moments: Moments | None = None
    key_moments: Moments | None = None
    seen: int = 0


class Collector:
    """Keeps the tail of every layer while prompts of known lengths run through in parts.

    Args:
        lengths: tokens of every row's prompt.
        rows: w.
        rotary: how layer i rotates, or None where that is not known; empty: for no layer.

    Raises:
        ValueError: no rows, or a window of no queries.

    Example:
        >>> collector = Collector([100], rows=64)
        >>> cache.watch = collector; target.prefill(prompt, cache)  # doctest: +SKIP
        >>> collector.layers[0].queries.shape                       # doctest: +SKIP
        torch.Size([1, 9, 64, 64])
    """

    def __init__(self, lengths: Sequence[int], rows: int = 64, rotary: Sequence[Rotary | None] = ()) -> None:
        if not lengths or rows < 1:
            raise ValueError(f"lengths={list(lengths)}, rows={rows}; give a length per prompt and at least one row")
        self.lengths, self.rows, self.rotary = list(lengths), rows, list(rotary)
        self.layers: dict[int, LayerTail] = {}

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, slots: Slots, form: LogitForm) -> None:
        tail = self.layers.get(layer)
        rotary = self.rotary[layer] if layer < len(self.rotary) else None
        if tail is None:
            tail = self.layers[layer] = self._start(queries, keys, form, rotary)
        start, stop = tail.seen, tail.seen + queries.shape[2]
        for row, length in enumerate(self.lengths):
            first, last = max(start, length - self.rows), min(stop, length)
            if first < last:
                into = slice(first - (length - self.rows), last - (length - self.rows))
                tail.queries[row, :, into] = queries[row, :, first - start : last - start]
        if rotary is not None and tail.query_moments is not None and tail.key_moments is not None:
            at = torch.arange(start, stop, device=queries.device)
            lengths = torch.tensor(self.lengths, device=queries.device)
            there = (at < lengths[:, None])[:, None, :, None]
            tail.query_moments.add(rotary.undo(queries.float(), at) * there)
            tail.key_moments.add(rotary.undo(keys[:, :, start:stop].float(), at) * there)
        tail.seen = stop

    def _start(self, queries: Tensor, keys: Tensor, form: LogitForm, rotary: Rotary | None) -> LayerTail:
        rows, heads, _, size = queries.shape
        if rows != len(self.lengths):
            raise ValueError(
                f"the pass has {rows} rows and the collector {len(self.lengths)} lengths; make both equal"
            )
        tail = LayerTail(queries.new_zeros(rows, heads, self.rows, size), form)
        if rotary is not None:
            tail.query_moments = Moments.empty(rows, heads, size, queries.device)
            tail.key_moments = Moments.empty(rows, keys.shape[1], size, queries.device)
        return tail
