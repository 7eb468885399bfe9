"""What one layer's attention logits are: scale, soft cap, window and learned sink, the same for all readers.

A strip is the last w queries of every row. Probabilities recomputed from queries, keys and row sums equal those of the
forward pass only if every term of the logits is there; this file holds the terms once.

Letters: B rows, H query heads, G query heads per key head, w strip rows, n keys, t keys of one tile, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["LogitForm", "strip_positions"]


@dataclass(frozen=True)
class LogitForm:
    """How products of queries and keys become logits.

    Args:
        scaling: factor on the products (YaRN's temperature included).
        softcap: c of c tanh(x / c), applied to the scaled products; None for none.
        window: a query sees the last `window` positions up to its own; None for all.
        sinks: [H] logits of a slot that has no value (it only takes mass); None for none.

    Raises:
        ValueError: a scale, cap or window that is not positive.

    Example:
        >>> form = LogitForm(0.5)
        >>> q, k = torch.ones(1, 1, 1, 2), torch.ones(1, 1, 3, 2)
        >>> form.tile(q, k, torch.tensor([[1]]), torch.arange(3)).tolist()
        [[[[1.0, 1.0, -inf]]]]
    """

    scaling: float
    softcap: float | None = None
    window: int | None = None
    sinks: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("scaling", "softcap", "window"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name}={value}; give a positive number, or None where the layer has none")

    def tile(self, queries: Tensor, keys: Tensor, query_at: Tensor, key_at: Tensor) -> Tensor:
        """Float32 logits [B, H, w, t], -inf where a query does not see a key.

        Args:
            queries: [B, H, w, D]; keys: [B, H / G, t, D], both after rotation.
            query_at: [B, w] int64 positions of the queries, negative where a row has no such query.
            key_at: [t] int64 positions of the keys.
        """
        rows, heads, count, size = queries.shape
        grouped = queries.float().reshape(rows, keys.shape[1], -1, size)
        logits = (grouped @ keys.float().transpose(2, 3) * self.scaling).view(rows, heads, count, -1)
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        seen = key_at <= query_at[:, :, None]
        if self.window is not None:
            seen = seen & (key_at > query_at[:, :, None] - self.window)
        return logits.masked_fill(~seen[:, None], float("-inf"))

    def with_sinks(self, lse: Tensor) -> Tensor:
        """Row sums [B, H, w] with the learned sink's term, if the layer has one."""
        if self.sinks is None:
            return lse
        return torch.logaddexp(lse, self.sinks.to(lse.dtype)[:, None])


def strip_positions(lengths: Tensor, count: int) -> Tensor:
    """[B, w] positions of the last `count` queries of rows with `lengths` [B] keys; negative where there is none."""
    return lengths[:, None] - count + torch.arange(count, device=lengths.device)
