"""Attention over a cache and a draft in plain torch.

On the CPU this is the implementation, so the cache is read where it lies: no head is repeated, nothing is copied, and
only the columns that some position does not see are masked. For float32 its products keep the conditions under which
MKL rounds every row alike, so that chains agree with plain decoding to the last bit:

    enough rows              products with transposed keys of D = 64, 96, 128, 192, 256 equal those of 80 rows from 3,
                             5, 6, 9, 12 rows on: fewer than max(4, D / 16) are filled up with zeros
    at most 128 summands     values are added up in chunks of 128 slots
    sums a multiple of 16    the slots read are rounded up where the cache has more, and the surplus is masked

16-bit caches are computed in float32, `STRIP` slots at a time: a strip's copy stays in the core's own cache.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from . import Attended

__all__ = ["attend", "tree_attention"]

CHUNK, STEP, STRIP = 128, 16, 512


def tree_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    words: Tensor | None,
    depths: Tensor | None,
    hidden: Tensor | None,
    scale: float,
    softcap: float | None,
    window: int | None,
    sinks: Tensor | None,
    need_lse: bool,
) -> Attended:
    """See `mediaspec.kernels.tree_attention.tree_attention`."""
    count, capacity = queries.shape[2], keys.shape[2]
    first, masked, live = 0, 0, capacity
    if not lengths.is_cuda:
        # the host knows the lengths for free: less is read, and the common prefix is not masked
        known = lengths.tolist()
        masked = min(known)
        live = min(-(-(max(known) + count) // STEP) * STEP, capacity)
        if min(known) == max(known):
            lengths = lengths[:1]
        if window is not None:
            first = max(0, masked - window + 1) // CHUNK * CHUNK
    if window is not None or hidden is not None:
        masked = first
    columns = torch.arange(masked, live, device=queries.device)
    seen = _seen(columns, lengths, count, words, depths, window)
    if hidden is not None:
        cached = columns < lengths[:, None]
        seen = seen & ~(hidden[:, masked:live] & cached)[:, None]
    return attend(
        queries, keys[:, :, first:live], values[:, :, first:live], seen[:, None], scale, softcap, sinks, need_lse
    )


def _seen(
    columns: Tensor, lengths: Tensor, count: int, words: Tensor | None, depths: Tensor | None, window: int | None
) -> Tensor:
    """[B or 1, M, F] bool: which of F slots a new position sees."""
    order = torch.arange(count, device=columns.device)
    offset = columns - lengths[:, None]
    if words is None:
        seen = offset[:, None] <= order[:, None]
        if window is not None:
            seen = seen & (offset[:, None] > order[:, None] - window)
        return seen
    new = (offset >= 0) & (offset < count)
    place = offset.clamp(0, count - 1)
    bits = (words[..., None] >> torch.arange(64, device=words.device)) & 1
    related = bits.flatten(2)[..., :count].bool() | torch.eye(count, dtype=torch.bool, device=words.device)
    rows = max(len(lengths), len(words))
    related = related.expand(rows, -1, -1).gather(2, place[:, None].expand(rows, count, -1))
    seen = (offset < 0)[:, None] | (related & new[:, None])
    if window is not None:
        assert depths is not None
        depth = depths.long().expand(rows, -1)
        position = torch.where(new, depth.gather(1, place.expand(rows, -1)), offset)
        seen = seen & (position[:, None] > depth[..., None] - window)
    return seen


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    seen: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    need_lse: bool,
) -> Attended:
    """Attention of [B, H, M, D] queries over [B, Hkv, T, D] keys and values.

    Args:
        seen: [B or 1, Hkv or 1, M, F] bool about the last F keys; those before are seen by all. Every query sees at
            least one key.
        The others as in `tree_attention`.
    """
    batch, heads, count, size = queries.shape
    kv_heads, total = keys.shape[1:3]
    rows = heads // kv_heads * count
    dtype = torch.promote_types(queries.dtype, torch.float32)
    cast = keys.dtype != dtype
    step = STRIP if cast else max(total, 1)
    q = (queries.to(dtype) * scale).reshape(batch * kv_heads, rows, size)
    q = F.pad(q, (0, 0, 0, max(0, max(4, size // 16) - rows)))
    k, v = keys.flatten(0, 1), values.flatten(0, 1)
    strips = [torch.bmm(q, k[:, at : at + step].to(dtype).transpose(1, 2)) for at in range(0, total, step)]
    scores = strips[0] if len(strips) == 1 else torch.cat(strips, -1)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    tail = scores[:, :rows, total - seen.shape[-1] :].unflatten(1, (-1, count)).unflatten(0, (batch, kv_heads))
    tail.masked_fill_(~seen[:, :, None], -torch.inf)

    law = scores.softmax(-1)
    out: Tensor | None = None
    for at in range(0, total, CHUNK):
        part = law[:, :, at : at + CHUNK], v[:, at : at + CHUNK].to(dtype)
        out = torch.bmm(*part) if out is None else out.baddbmm_(*part)
    assert out is not None
    out = out[:, :rows].reshape(batch, heads, count, size)
    lse: Tensor | None = None
    if need_lse or sinks is not None:
        # the largest weight is exp(top - lse); a sum of its own would depend on the number of columns
        lse = (scores.amax(-1) - law.amax(-1).log_())[:, :rows].reshape(batch, heads, count)
        if sinks is not None:
            sink = sinks.to(dtype)[:, None]
            out = out * (lse - sink).sigmoid_()[..., None]
            lse = torch.logaddexp(lse, sink)
    return Attended(out.to(queries.dtype), lse if need_lse else None)
