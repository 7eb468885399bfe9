"""One pass over the keys with the last w queries: everything the diagnostics know, without an attention matrix.

Exact probabilities come back from queries, keys and the row sums as exp(logit - lse). They are summed tile by tile in
float32 along columns (a key's mass: sinks, vertical lines, votes) and along diagonals (a distance's mass: slashes,
recent windows). Nothing of size [H, w, n] is ever held. arXiv:2601.08297 (slash scores), arXiv:2407.02490 (the strip),
arXiv:2410.13846 (lazy ratio).

Letters: B rows, H query heads, G query heads per key head, w strip rows, n keys, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .logits import LogitForm, strip_positions

__all__ = ["LazyWindow", "StripSums", "strip_lse", "strip_pass"]

TILE = 128  # keys per step: 300 kB of probabilities at 9 heads and 64 rows, which stays in cache
LEADING = 4  # first keys whose mass is kept per row, to take sinks out of the diagonals


@dataclass(frozen=True)
class LazyWindow:
    """What a streaming layer would keep, and by which queries it is judged (arXiv:2410.13846).

    Args:
        last: number of last queries that judge; sink, recent: first and last keys that would stay.
    """

    last: int = 32
    sink: int = 4
    recent: int = 1020


@dataclass(frozen=True)
class StripSums:
    """Sums over the strip, float32.

    Args:
        columns: [B, H, n] mass that every key got, summed over the strip's rows.
        offsets: [B, H, n] mass at every distance between query and key, summed over the strip's rows.
        leading: [B, H, w, 4] mass of the first four keys, per row.
        entropy: [B, H] entropy in nats, summed over rows.
        lazy: [B, H] share of mass on first and last keys, mean over the judging queries.
        lse: [B, H, w] row sums; 0 in rows a short prompt does not have.
        lengths: [B] int64 keys per row.
    """

    columns: Tensor
    offsets: Tensor
    leading: Tensor
    entropy: Tensor
    lazy: Tensor
    lse: Tensor
    lengths: Tensor

    @property
    def rows(self) -> Tensor:
        """[B] int64, how many strip rows every row really has."""
        return self.lengths.clamp(max=self.lse.shape[2])

    @property
    def effective_keys(self) -> Tensor:
        """[B, H] exp of the mean entropy: over how many keys attention spreads."""
        return (self.entropy / self.rows[:, None]).exp()

    def recent_mass(self, window: int) -> Tensor:
        """[B, H] mean mass on the last `window` keys up to a query's own."""
        return self.offsets[..., :window].sum(-1) / self.rows[:, None]

    def sink_mass(self) -> Tensor:
        """[B, H] mean mass on the first four keys."""
        return self.leading.sum((2, 3)) / self.rows[:, None]


def strip_lse(queries: Tensor, keys: Tensor, lengths: Tensor, form: LogitForm, tile: int = TILE) -> Tensor:
    """[B, H, w] natural-log row sums of the last w queries, tile by tile; 0 in rows that do not exist.

    Arguments as in `strip_pass`.
    """
    at = strip_positions(lengths, queries.shape[2])
    lse = queries.new_full(queries.shape[:3], float("-inf"), dtype=torch.float32)
    for _, logits in _tiles(queries, keys, at, form, tile):
        lse = torch.logaddexp(lse, logits.logsumexp(-1))
    return form.with_sinks(lse).masked_fill((at < 0)[:, None], 0.0)


def strip_pass(
    queries: Tensor,
    keys: Tensor,
    lengths: Tensor,
    form: LogitForm,
    lse: Tensor | None = None,
    lazy: LazyWindow | None = None,
    tile: int = TILE,
) -> StripSums:
    """Sums of the last w queries' attention.

    Args:
        queries: [B, H, w, D], the last w positions of every row (right-aligned: the last one is at lengths - 1).
        keys: [B, H / G, n, D], position 0 of every row first; what lies behind a row's length is never read.
        lengths: [B] int64.
        form: scale and the other terms of the layer's logits.
        lse: [B, H, w] row sums from a fused kernel that used the same `form`; None computes them.
        lazy: which keys count as kept in `StripSums.lazy`; default 4 + 1020, judged by 32 queries.
        tile: keys per step.

    Raises:
        ValueError: shapes that do not fit each other.

    Example:
        >>> q, k = torch.zeros(1, 2, 3, 4), torch.zeros(1, 1, 5, 4)
        >>> sums = strip_pass(q, k, torch.tensor([5]), LogitForm(0.5))
        >>> [round(x, 3) for x in sums.columns[0, 0].tolist()]  # 1/3 + 1/4 + 1/5 where all three rows see the key
        [0.783, 0.783, 0.783, 0.45, 0.2]
    """
    rows, heads, count, _ = queries.shape
    if keys.shape[0] != rows or heads % keys.shape[1] or lengths.shape != (rows,):
        raise ValueError(
            f"queries {list(queries.shape)}, keys {list(keys.shape)} and lengths {list(lengths.shape)}: the rows must "
            f"be equal and the query heads a multiple of the key heads"
        )
    if int(lengths.max()) > keys.shape[2]:
        raise ValueError(f"lengths reach {int(lengths.max())} but there are {keys.shape[2]} keys; pass all keys")
    lazy = lazy if lazy is not None else LazyWindow()
    at = strip_positions(lengths, count)
    if lse is None:
        lse = strip_lse(queries, keys, lengths, form, tile)
    total = keys.shape[2]
    columns = lse.new_zeros(rows, heads, total)
    # diagonal u = key + (w - 1 - row) is distance lengths - 1 - u, so every row shares one buffer
    diagonals = lse.new_zeros(rows, heads, total + count - 1)
    leading = lse.new_zeros(rows, heads, count, LEADING)
    entropy, kept = lse.new_zeros(rows, heads), lse.new_zeros(rows, heads)
    judges = min(lazy.last, count)
    for start, logits in _tiles(queries, keys, at, form, tile):
        log_mass = logits - lse[..., None]
        mass = log_mass.exp()
        stop = start + mass.shape[3]
        columns[:, :, start:stop] = mass.sum(2)
        diagonals[:, :, start : stop + count - 1] += diagonal_sums(mass)
        entropy -= (mass * log_mass.clamp(min=-1e4)).sum((2, 3))  # 0 log 0 = 0
        if start < LEADING:
            first = mass[..., : LEADING - start]
            leading[..., start : start + first.shape[3]] = first
        key_at = torch.arange(start, stop, device=keys.device)
        stays = (key_at < lazy.sink) | (key_at >= lengths[:, None] - lazy.recent)
        kept += torch.einsum("bhrt,bt->bh", mass[:, :, count - judges :], stays.to(mass.dtype))
    distance = torch.arange(total, device=keys.device)
    source = (lengths[:, None] - 1 - distance).clamp(min=0)
    offsets = diagonals.gather(2, source[:, None].expand(-1, heads, -1))
    offsets = offsets * (distance < lengths[:, None])[:, None]
    judged = lengths.clamp(max=judges)[:, None]
    return StripSums(columns, offsets, leading, entropy, kept / judged, lse, lengths)


def diagonal_sums(mass: Tensor) -> Tensor:
    """[..., w, t] -> [..., w + t - 1]: sums along u = column + (w - 1 - row), by shearing rows with a pad and a view.

    Example:
        >>> diagonal_sums(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).tolist()
        [3.0, 5.0, 2.0]
    """
    count, width = mass.shape[-2:]
    sheared = F.pad(mass.flip(-2), (0, count)).flatten(-2)[..., : count * (width + count - 1)]
    return sheared.unflatten(-1, (count, width + count - 1)).sum(-2)


def _tiles(queries: Tensor, keys: Tensor, at: Tensor, form: LogitForm, tile: int) -> Iterator[tuple[int, Tensor]]:
    """First key and logits [B, H, w, t] of every tile of `keys`."""
    for start in range(0, keys.shape[2], tile):
        part = keys[:, :, start : start + tile]
        key_at = torch.arange(start, start + part.shape[2], device=keys.device)
        yield start, form.tile(queries, part, at, key_at)
