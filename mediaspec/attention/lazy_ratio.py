"""How much of a layer's attention streaming would keep: the lazy ratio of LightTransfer (arXiv:2410.13846, eq. 1).

    r = mean over query heads and the last w queries of  exp(lse over kept keys - lse over all keys)

Ratios are averaged, never their logarithms: the mean of logs is a geometric mean, which is smaller.

Letters: B rows, H query heads, Hkv key heads, w judging queries, C slots, K kept keys, D head size, n prompt length.
"""

from __future__ import annotations

import heapq

import torch
from torch import Tensor

from .logits import LogitForm, strip_positions

__all__ = ["LayerQueue", "kept_keys", "lazy_ratio"]

NOWHERE = 2**62  # a position no query reaches


def kept_keys(keys: Tensor, lengths: Tensor, sink: int, recent: int) -> tuple[Tensor, Tensor]:
    """The first `sink` and the last `recent` keys of every row, each once.

    Args:
        keys: [B, Hkv, C, D]; lengths: [B] int64, at most C.

    Returns:
        [B, Hkv, K, D] keys with K = sink + recent, and their [B, K] positions; a key that does not exist, or that the
        sink has already, stands at a position behind every query.
    """
    device = keys.device
    first = torch.arange(sink, device=device).expand(len(keys), -1)
    last = lengths[:, None] - recent + torch.arange(recent, device=device)
    at = torch.cat([first.masked_fill(first >= lengths[:, None], NOWHERE), last.masked_fill(last < sink, NOWHERE)], 1)
    source = at.where(at < NOWHERE, 0)[:, None, :, None]
    return keys.gather(2, source.expand(-1, keys.shape[1], -1, keys.shape[3])), at


def lazy_ratio(queries: Tensor, kept: Tensor, at: Tensor, lse: Tensor, lengths: Tensor, form: LogitForm) -> Tensor:
    """Mean share of attention on the kept keys, per key head; the layer's ratio is the mean over key heads.

    Args:
        queries: [B, H, w, D], the last w positions of every row (the last one at lengths - 1).
        kept, at: from `kept_keys`.
        lse: [B, H, w] natural-log sums over all keys a query sees, with the same `form`.
        lengths: [B] int64.
        form: scale and the other terms of the layer's logits.

    Returns:
        [B, Hkv] float32 in [0, 1]; queries before position 0 do not count.

    Example:
        >>> q, k, n = torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 8, 2), torch.tensor([8])
        >>> kept, at = kept_keys(k, n, sink=1, recent=3)
        >>> lazy_ratio(q, kept, at, torch.full((1, 1, 1), 8.0).log(), n, LogitForm(1.0)).tolist()  # 4 of 8 keys
        [[0.5]]
    """
    rows, heads, count, _ = queries.shape
    query_at = strip_positions(lengths, count)
    logits = form.tile(queries, kept, query_at, at[:, None])
    share = (form.with_sinks(logits.logsumexp(-1)) - lse).exp().clamp(max=1.0)
    there = (query_at >= 0)[:, None]
    total = share.masked_fill(~there, 0.0).sum(2).view(rows, kept.shape[1], -1).mean(2)
    return total / there.sum(2)


class LayerQueue:
    """Keeps the least lazy layers while a prefill climbs them: a max-queue of capacity P, arXiv:2410.13846, alg. 1.

    Args:
        capacity: P, how many layers stay full.

    Example:
        >>> queue = LayerQueue(1)
        >>> queue.push(0, 0.9), queue.push(1, 0.2), queue.push(2, 0.5)
        (None, 0, 2)
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._heap: list[tuple[float, int]] = []
        self._fixed = 0

    def push(self, layer: int, ratio: float, keep: bool = False) -> int | None:
        """Takes a layer; returns the one that becomes lazy, if one must: the laziest, of equals the lowest.

        Args:
            keep: this layer stays full whatever its ratio; more than P layers may then stay full.
        """
        if keep:
            self._fixed += 1
        else:
            heapq.heappush(self._heap, (-ratio, layer))
        if self._heap and len(self._heap) + self._fixed > self.capacity:
            return heapq.heappop(self._heap)[1]
        return None
