"""Attention of a few new positions over a long cache and over each other: plain decoding, draft chains, draft trees.

B rows, H query heads, Hkv key heads, G = H / Hkv, M new positions (a tree's root and nodes), D head size, C slots,
n cached positions of a row. The keys and values of the new positions stand in slots n .. n+M-1 already:

    position i sees   slots j < n                                   the cached prefix
                      slots n + j with bit j of words[i] set        its ancestors in the draft (chain: all j <= i)
                      slot  n + i                                   itself, always
    O_i = softmax(scale q_i K^T) V over what it sees                (arXiv:2502.17421, hybrid tree attention)

One kernel serves all three: a chain has no words, plain decoding is a chain of M = 1. Slots are cut into pieces at
multiples of `SPLIT` (trees: `TREE_SPLIT`), whatever M, B and the lengths are, new positions included; the pieces are
merged in their order. Therefore, with the same kernel, to the last bit:

* a position's output does not depend on the positions behind it, on the other rows, or on how many slots C has;
* a chain's outputs are those of plain decoding, one position at a time;
* a tree node's output does not depend on the keys and values of nodes that are not its ancestors, which may be any
  finite numbers. (A node that is taken out before it moves it to another slot: then equal up to rounding.)

On a CUDA device this holds because tiles and pieces are functions of G, D and the dtype; on the CPU for float32 with
MKL, under the conditions of `reference.py`, where a cache with 15 slots to spare is one of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..backend import choose, launching_on

__all__ = ["MOST", "SPLIT", "TREE_SPLIT", "Attended", "ancestor_words", "tree_attention"]

SPLIT, TREE_SPLIT = 256, 1024
"""Slots of one piece. With D = 128 and 16 bits, 256 slots are 128 KB to read, for partial results of 2 KB (plain, 4
heads for each key head) to 18 KB (9 positions). A tree of 69 positions leaves 138 KB for every piece, so its pieces
are longer; it has more rows to keep a device busy."""

MOST = 1024
"""New positions of one call: partial outputs take M x H x D floats for every piece."""


@dataclass(frozen=True)
class Attended:
    """What attention gave.

    Args:
        out: [B, H, M, D] in the dtype of the queries.
        lse: [B, H, M] natural logarithm of the sum of exp(scaled logit), sink included, in float32 (float64 where the
            queries are); None unless asked for.
    """

    out: Tensor
    lse: Tensor | None = None


def ancestor_words(mask: Tensor) -> Tensor:
    """Packs who sees whom in a draft into 64-bit words.

    Args:
        mask: [..., M, M] bool, entry i, j: position i sees position j (`TreeSpec.ancestor_tensor`).

    Returns:
        [..., M, ceil(M / 64)] int64: bit j % 64 of word j // 64 of row i is entry i, j. Bit 63 is the sign.

    Raises:
        ValueError: the mask is not bool or not square.

    Example:
        >>> ancestor_words(torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()).tolist()
        [[1], [3], [5]]
    """
    if mask.dtype != torch.bool or mask.dim() < 2 or mask.shape[-1] != mask.shape[-2]:
        raise ValueError(f"the mask is {mask.dtype} {tuple(mask.shape)}; give bool [..., M, M], ancestors and itself.")
    count = mask.shape[-1]
    wide = torch.nn.functional.pad(mask, (0, -count % 64)).unflatten(-1, (-1, 64)).long()
    return torch.bitwise_left_shift(wide, torch.arange(64, device=mask.device)).sum(-1)


def tree_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    words: Tensor | None = None,
    *,
    depths: Tensor | None = None,
    hidden: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    need_lse: bool = False,
    impl: str | None = None,
) -> Attended:
    """Attention of M new positions per row, without a host sync.

    Args:
        queries: [B, H, M, D] float32, bfloat16 or float16 (the reference also takes float64), rotated; M <= 1024.
        keys, values: [B, Hkv, C, D] views of a cache with the new positions written; query heads g * G .. g * G + G-1
            read key head g. C bounds the launch: hand over the live slots, `store.keys[layer][:, :, :live]`. Slots
            behind n + M are never used but have to hold finite numbers.
        lengths: [B] int64 or int32, n of every row, before the new positions; n + M <= C.
        words: [B or 1, M, ceil(M / 64)] int64 or uint64 from `ancestor_words`; None is a chain. Rows that fill M up to
            a round number need no bit: every position sees itself.
        depths: [B or 1, M] int64 or int32, positions of the new entries counted from n; needed for a tree with a
            window.
        hidden: [B, C or more] bool, prefix slots that nobody sees (left padding, `KVStore.hidden_slots`).
        scale: factor on the products, 1 / sqrt(D) by default.
        softcap: c of c tanh(x / c) on the scaled products.
        window: W; a position sees only those less than W positions back, counted from slots and depths.
        sinks: [H] logits of a slot without a value.
        need_lse: fill `lse` of the result.
        impl: see `mediaspec.kernels.backend`.

    Raises:
        ValueError: shapes do not fit together, or a tree has a window and no depths.

    Example:
        >>> keys = torch.zeros(1, 1, 8, 4); values = torch.arange(8.0)[:, None].expand(1, 1, 8, 4)
        >>> tree_attention(torch.zeros(1, 1, 2, 4), keys, values, torch.tensor([3])).out[0, 0, :, 0].tolist()
        [1.5, 2.0]
        >>> words = ancestor_words(torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool())
        >>> found = tree_attention(torch.zeros(1, 1, 3, 4), keys, values, torch.tensor([2]), words[None])
        >>> found.out[0, 0, :, 0].tolist()          # (0 + 1 + 2) / 3, (0 + 1 + 2 + 3) / 4, (0 + 1 + 2 + 4) / 4
        [1.0, 1.5, 1.75]
    """
    check(queries, keys, values, lengths, softcap, window, sinks)
    batch, _, count, _ = queries.shape
    if words is not None:
        wanted = (count, -(-count // 64))
        if words.dtype == torch.uint64:
            words = words.view(torch.int64)
        if words.dim() != 3 or words.shape[1:] != wanted or words.shape[0] not in (1, batch):
            raise ValueError(f"words have shape {tuple(words.shape)}; give [{batch} or 1, {wanted[0]}, {wanted[1]}].")
        if words.dtype != torch.int64:
            raise ValueError(f"words are {words.dtype}; give int64 or uint64, as `ancestor_words` makes them.")
        if window is not None and depths is None:
            raise ValueError("a tree with a window needs depths [B or 1, M]: siblings share a position, not a slot.")
    if depths is not None and (depths.dim() != 2 or depths.shape[1] != count or depths.shape[0] not in (1, batch)):
        raise ValueError(f"depths have shape {tuple(depths.shape)}; give [{batch} or 1, {count}].")
    if hidden is not None and (hidden.dim() != 2 or hidden.shape[0] != batch or hidden.shape[1] < keys.shape[2]):
        raise ValueError(f"hidden has shape {tuple(hidden.shape)}; give bool [{batch}, {keys.shape[2]} or more].")
    scale = queries.shape[-1] ** -0.5 if scale is None else scale
    if words is None or window is None:
        depths = None
    arguments = (
        queries, keys, values, lengths, words, depths, hidden, scale, softcap, window, sinks, need_lse,
    )  # fmt: skip
    if choose("tree_attention", queries, impl) == "triton":
        from .triton import tree_attention as run

        with launching_on(queries):
            return run(*arguments)
    from . import reference

    return reference.tree_attention(*arguments)


def check(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    softcap: float | None,
    window: int | None,
    sinks: Tensor | None,
) -> None:
    """What every attention over a cache asks of its arguments."""
    fits = queries.dim() == keys.dim() == 4 and keys.shape == values.shape
    fits = fits and queries.shape[0] == keys.shape[0] and queries.shape[3] == keys.shape[3]
    if not fits or queries.shape[1] % keys.shape[1]:
        raise ValueError(
            f"queries have shape {tuple(queries.shape)}, keys {tuple(keys.shape)}, values {tuple(values.shape)}; give "
            "[B, H, M, D] and twice [B, Hkv, C, D] with H a multiple of Hkv."
        )
    if keys.dtype != queries.dtype or values.dtype != queries.dtype:
        raise ValueError(f"queries are {queries.dtype}, keys {keys.dtype}, values {values.dtype}; give one dtype.")
    count, capacity = queries.shape[2], keys.shape[2]
    if not 1 <= count <= MOST:
        raise ValueError(
            f"{count} new positions are not allowed: give 1 to {MOST}; a prefill goes through "
            "torch.nn.functional.scaled_dot_product_attention."
        )
    if lengths.shape != queries.shape[:1]:
        raise ValueError(f"lengths have shape {tuple(lengths.shape)}; give {[queries.shape[0]]}, one for every row.")
    if not lengths.is_cuda and lengths.numel() and int(lengths.max()) + count > capacity:
        raise ValueError(
            f"{int(lengths.max())} cached and {count} new positions do not fit into {capacity} slots: hand over at "
            "least lengths + M slots of keys and values."
        )
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap={softcap!r} is not allowed: write a number > 0, or None for no cap.")
    if window is not None and window < 1:
        raise ValueError(f"window={window!r} is not allowed: write a number >= 1, or None for no window.")
    if sinks is not None and sinks.shape != queries.shape[1:2]:
        heads = queries.shape[1]
        raise ValueError(f"sinks have shape {tuple(sinks.shape)}; give one logit per query head, {[heads]}.")
