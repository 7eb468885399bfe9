"""Attention over a list of cached positions and everything newer: drafting with a sparse key set.

B rows, H query heads, Hkv key heads, G = H / Hkv, M new positions (a chain), D head size, C slots, K listed slots,
n cached positions of a row. The keys and values of the new positions stand in slots n .. n+M-1 already. Position i of
row b, in the query heads of key head g, sees

    the slots in index[b, g, :] below newer[b]                  chosen by the last verification or by a static pattern
    slots newer[b] .. n + i                                     the tokens drafted this round, and itself

`newer` draws the line between the two, so an entry at or above it counts once, not twice. This is the draft's side of
verification-guided selection: what stays out of the list is not read at all.

The newer slots are one piece, the list is cut into more by place in the list; pieces are merged in this order. A
position's output therefore does not depend on M, on the other rows or on how many -1 end the list, to the last bit and
under the conditions that `tree_attention` names.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..backend import choose, launching_on
from ..tree_attention import Attended, check

__all__ = ["key_list", "sparse_attention"]


def key_list(positions: Tensor, least: int = 1) -> Tensor:
    """Joined selections (sinks, recent, slashes, columns) as the list that `sparse_attention` reads.

    Args:
        positions: [..., K] int64 or int32 slots in any order, repeated ones too, negative ones ignored.
        least: a multiple that the width of the list is rounded up to.

    Returns:
        [..., K'] of the same dtype, K' >= 1: every slot once, ascending, then -1.

    Raises:
        ValueError: the positions are not integers.

    Example:
        >>> key_list(torch.tensor([[7, 0, -1, 7], [2, 1, 0, 5]])).tolist()
        [[0, 7, -1, -1], [0, 1, 2, 5]]
    """
    if positions.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"positions are {positions.dtype}; give int64 or int32 slots.")
    absent = torch.iinfo(positions.dtype).max
    ordered = positions.masked_fill(positions < 0, absent).sort(-1).values
    twice = torch.zeros_like(ordered, dtype=torch.bool)
    twice[..., 1:] = ordered[..., 1:] == ordered[..., :-1]
    ordered = ordered.masked_fill(twice, absent).sort(-1).values
    ordered = ordered.masked_fill(ordered == absent, -1)
    width = max(1, ordered.shape[-1])
    return torch.nn.functional.pad(ordered, (0, -(-width // least) * least - ordered.shape[-1]), value=-1)


def sparse_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    index: Tensor,
    newer: Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    need_lse: bool = False,
    impl: str | None = None,
) -> Attended:
    """Attention of M new positions per row over a key set, without a host sync.

    Args:
        queries, keys, values, lengths: as in `tree_attention`.
        index: [B, Hkv, K] int64 or int32 slots, none twice (softmax would count it twice), -1 where the list has
            ended; `key_list` makes one. Entries at or above `newer` are ignored.
        newer: [B] int64 or int32, the first slot that is seen without being listed; above n it reads as n.
        scale, softcap, window, sinks, need_lse, impl: as in `tree_attention`; the window counts slots.

    Raises:
        ValueError: shapes do not fit together.

    Example:
        >>> keys = torch.zeros(1, 1, 8, 4); values = torch.arange(8.0)[:, None].expand(1, 1, 8, 4)
        >>> index, newer = torch.tensor([[[0, 2, -1]]]), torch.tensor([5])
        >>> found = sparse_attention(torch.zeros(1, 1, 2, 4), keys, values, torch.tensor([6]), index, newer)
        >>> found.out[0, 0, :, 0].tolist()          # (0 + 2 + 5 + 6) / 4 and (0 + 2 + 5 + 6 + 7) / 5
        [3.25, 4.0]
    """
    check(queries, keys, values, lengths, softcap, window, sinks)
    if index.dim() != 3 or index.shape[:2] != keys.shape[:2] or index.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"index is {index.dtype} {tuple(index.shape)}; give int64 or int32 [{keys.shape[0]}, {keys.shape[1]}, K], "
            "-1 where a list has ended."
        )
    if newer.shape != lengths.shape:
        raise ValueError(f"newer has shape {tuple(newer.shape)}; give {list(lengths.shape)}, one slot for every row.")
    scale = queries.shape[-1] ** -0.5 if scale is None else scale
    arguments = (queries, keys, values, lengths, index, newer, scale, softcap, window, sinks, need_lse)
    if choose("sparse_attention", queries, impl) == "triton":
        from .triton import sparse_attention as run

        with launching_on(queries):
            return run(*arguments)
    from . import reference

    return reference.sparse_attention(*arguments)
