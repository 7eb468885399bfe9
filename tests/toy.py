"""A tiny exact target: the toy AR models of the COOL-SD specification, section 13, behind a real key/value store.

With h = sum_{j=1..len} j (x_j + 1) over the image tokens before a position (plus the condition's offset) and v = 1..V:

    target logits  1.2 sin(1.7 v + 0.9 h)
    draft logits   target logits + gap cos(2.3 v + 0.5 h)        (gap 0.8 in the specification)

A position's contribution j (x_j + 1) lies in the cache as its key; a score sums the visible ones. So the cache, its
mask, rollback and tree attention are used for real, all sums are small integers (exact in float32), and the law at any
prefix can be written down. The hidden state holds sines and cosines of h, in which the logits are linear.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mediaspec.core.kv import KVStore
from mediaspec.core.tree import TreeSpec
from mediaspec.core.types import TargetOutput


class ToyTarget:
    """Implements `mediaspec.core.types.Target`.

    Args:
        vocab_size: V.
        num_tokens: T; a grid of T must be given by `grid` where it is not a square.
        gap: 0 is the specification's target model, 0.8 its draft model.
        prefix: C, condition positions (all but the first hold nothing).
        grid: rows and columns, or None for the square (no grid where T is no square).
        sharpness: factor on the logits, to make laws steeper than the specification's.
    """

    hidden_size = 8

    def __init__(
        self,
        vocab_size: int = 5,
        num_tokens: int = 16,
        gap: float = 0.0,
        prefix: int = 1,
        grid: tuple[int, int] | None = None,
        sharpness: float = 1.0,
    ) -> None:
        side = round(num_tokens**0.5)
        self.vocab_size, self.num_tokens, self.prefix = vocab_size, num_tokens, prefix
        self.grid = grid if grid is not None else ((side, side) if side * side == num_tokens else None)
        self.gap, self.sharpness = gap, sharpness
        v = torch.arange(1, vocab_size + 1, dtype=torch.float64)
        # columns: cos .9h, sin .9h, cos .5h, sin .5h, four unused
        weight = torch.zeros(self.hidden_size, vocab_size, dtype=torch.float64)
        weight[0], weight[1] = 1.2 * (1.7 * v).sin(), 1.2 * (1.7 * v).cos()
        weight[2], weight[3] = gap * (2.3 * v).cos(), -gap * (2.3 * v).sin()
        self.weight = sharpness * weight
        ids = torch.arange(vocab_size, dtype=torch.float32)[:, None]
        self.table = torch.sin((ids + 1) * torch.arange(1, self.hidden_size + 1))

    @property
    def device(self) -> torch.device:
        return self.weight.device

    def new_cache(self, rows: int, extra: int) -> KVStore:
        return KVStore(1, rows, 1, 1, self.prefix + self.num_tokens + extra, dtype=torch.float32)

    def prefill(self, condition: Tensor | None, cache: KVStore) -> TargetOutput:
        """`condition`: [R] integers added to h (0 is the specification's model), or None for zeros."""
        keys = torch.zeros(cache.rows, 1, self.prefix, 1)
        if condition is not None:
            keys[:, 0, 0, 0] = condition.float()
        slots = cache.plan(self.prefix)
        keys, values = cache.write(0, slots, keys, keys)
        cache.advance(torch.full((cache.rows,), self.prefix), [self.prefix] * cache.rows)
        return self._output(keys[:, 0, :, 0].sum(1, keepdim=True))

    def score(self, tokens: Tensor, cache: KVStore, tree: TreeSpec | None = None) -> TargetOutput:
        slots = cache.plan(tokens.shape[1], tree)
        order = slots.positions - self.prefix + 1
        contribution = (order * (tokens + 1)).float()[:, None, :, None]
        keys, _ = cache.write(0, slots, contribution, contribution)
        keys = keys[:, 0, :, 0]
        if slots.mask is None:
            return self._output(keys.sum(1, keepdim=True))
        visible = (slots.mask[:, 0] == 0).float()
        return self._output((visible @ keys[:, :, None])[:, :, 0])

    def _output(self, h: Tensor) -> TargetOutput:
        """h [R, N]."""
        h = h.double()
        hidden = torch.zeros(*h.shape, self.hidden_size)
        for column, angle in ((0, 0.9 * h), (2, 0.5 * h)):
            hidden[..., column], hidden[..., column + 1] = angle.cos(), angle.sin()
        return TargetOutput(self.head(hidden), hidden)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.table[tokens]

    def head(self, hidden: Tensor) -> Tensor:
        return (hidden.double() @ self.weight).float()

    def logits(self, prefix: list[int], offset: int = 0) -> Tensor:
        """[V] float64 logits after the image tokens `prefix`, written down directly."""
        h = offset + sum(j * (x + 1) for j, x in enumerate(prefix, start=1))
        v = torch.arange(1, self.vocab_size + 1, dtype=torch.float64)
        return self.sharpness * (1.2 * (1.7 * v + 0.9 * h).sin() + self.gap * (2.3 * v + 0.5 * h).cos())
