"""Which keys a sparse draft reads: top keys of a verification, SnapKV votes, Quest bounds, retrieved chunks, lines.

Scores come from queries the model really asked; index lists come out sorted, unique and padded with -1, so that a
softmax over them counts no key twice. Sources: arXiv:2602.07223 and arXiv:2512.01278 (verification-guided),
arXiv:2404.14469 (SnapKV), arXiv:2406.10774 (Quest), arXiv:2404.11912 (TriForce), arXiv:2407.02490 (MInference),
arXiv:2505.19155 (group sums).

Letters: B rows, H query heads, G query heads per key head, w strip rows, n keys, D head size, K kept keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "budget_of",
    "chunk_scores",
    "group_scores",
    "keys_of_pages",
    "page_bounds",
    "snapkv_scores",
    "top_keys",
    "union",
    "verification_logits",
    "verification_weights",
    "vertical_slash",
]

FAR = torch.iinfo(torch.int64).max  # sorts behind every position


def verification_weights(logits: Tensor, lse: Tensor | None = None) -> Tensor:
    """Mean probability of every key over heads and rows; arXiv:2602.07223.

    Args:
        logits: [..., H, w, n] scaled logits of the verified rows, -inf where hidden.
        lse: [..., H, w] their row sums, if known.

    Returns:
        [..., n] float32. Give the query heads of one key head as H for a set per key head.

    Example:
        >>> verification_weights(torch.zeros(1, 1, 4)).tolist()
        [0.25, 0.25, 0.25, 0.25]
    """
    logits = logits.float()
    lse = logits.logsumexp(-1) if lse is None else lse.float()
    return (logits - lse[..., None]).exp().mean((-3, -2))


def verification_logits(logits: Tensor) -> Tensor:
    """[..., n] mean raw logit over heads and rows, the cheaper score of arXiv:2602.07223."""
    return logits.float().mean((-3, -2))


def group_scores(columns: Tensor, heads: int) -> Tensor:
    """[..., H, n] scores of query heads summed inside the groups of `heads` key heads: [..., heads, n]."""
    return columns.unflatten(-2, (heads, -1)).sum(-2)


def budget_of(lengths: Tensor, ratio: float, least: int, most: int | None = None) -> Tensor:
    """[B] int64 keys to keep out of `lengths` [B]: ceil(ratio n), at least `least`, at most `most`, never more than n.

    Example:
        >>> budget_of(torch.tensor([10, 1000, 100000]), 0.05, 64, 1024).tolist()
        [10, 64, 1024]
    """
    count = torch.ceil(lengths.double() * ratio).long().clamp(min=least, max=most)
    return torch.minimum(count, lengths)


def top_keys(
    scores: Tensor, counts: Tensor | int, lengths: Tensor | None = None, keep: Sequence[int] = (), width: int = 0
) -> Tensor:
    """The best keys of every list, sorted by position.

    Args:
        scores: [..., B, heads, n] finite.
        counts: [B] int64 or one number, how many keys each row keeps (those of `keep` included, which may be more).
        lengths: [B] int64 keys that exist; None: all n.
        keep: positions that are always in, sinks for instance.
        width: K of the result where the host knows it; 0 reads the largest count back.

    Returns:
        [..., B, heads, K] int64, ascending, -1 behind each row's count.

    Example:
        >>> top_keys(torch.tensor([[[0.1, 0.5, 0.2, 0.4]]]), 2, keep=[0]).tolist()
        [[[0, 1]]]
    """
    rows, total = scores.shape[-3], scores.shape[-1]
    device = scores.device
    counts = torch.as_tensor(counts, device=device).expand(rows)
    order = torch.arange(total, device=device)
    lengths = torch.full((rows,), total, device=device) if lengths is None else lengths
    counts = torch.minimum(counts.clamp(min=len(keep)), lengths)
    width = min(width, total) if width else int(counts.max())
    there = (order < lengths[:, None])[:, None]
    scores = scores.float().masked_fill(~there, float("-inf"))
    if keep:
        sinks = torch.zeros(total, dtype=torch.bool, device=device)
        sinks[[key for key in keep if key < total]] = True
        scores = torch.where(there & sinks, float("inf"), scores)
    index = scores.topk(width, -1).indices
    taken = (torch.arange(width, device=device) < counts[:, None])[:, None]
    index = torch.where(taken, index, FAR).sort(-1).values
    return torch.where(index == FAR, -1, index)


def union(parts: Sequence[Tensor]) -> Tensor:
    """Joins index lists [..., K_i] (padded with -1 anywhere) into one: ascending, unique, -1 behind.

    Example:
        >>> union([torch.tensor([4, -1, 2]), torch.tensor([2, 7])]).tolist()
        [2, 4, 7, -1, -1]
    """
    joined = torch.cat(list(parts), -1)
    joined = torch.where(joined < 0, FAR, joined).sort(-1).values
    again = torch.zeros_like(joined, dtype=torch.bool)
    again[..., 1:] = joined[..., 1:] == joined[..., :-1]
    joined = torch.where(again, FAR, joined).sort(-1).values
    return torch.where(joined == FAR, -1, joined)


def snapkv_scores(columns: Tensor, kernel: int = 5, pooling: str = "average") -> Tensor:
    """Votes of the prompt's last queries, smoothed over neighbouring keys; arXiv:2404.14469.

    Args:
        columns: [..., n] column sums of a strip; leave the window's own keys out, they always stay.
        kernel: odd number of keys pooled, stride 1, zeros outside (an average divides by `kernel` there too).
        pooling: "average" or "max".

    Raises:
        ValueError: an even kernel or another pooling.

    Example:
        >>> snapkv_scores(torch.tensor([0.0, 3.0, 0.0, 0.0]), kernel=3).tolist()
        [1.0, 1.0, 1.0, 0.0]
    """
    if kernel < 1 or kernel % 2 == 0:
        raise ValueError(f"kernel={kernel}; pooling is centred, give an odd number such as {kernel + 1}")
    if pooling not in ("average", "max"):
        raise ValueError(f"pooling={pooling!r}; write 'average' or 'max'")
    flat = columns.reshape(1, -1, columns.shape[-1])
    pool = F.avg_pool1d if pooling == "average" else F.max_pool1d
    return pool(flat, kernel, stride=1, padding=kernel // 2).reshape(columns.shape)


def page_bounds(queries: Tensor, keys: Tensor, page: int = 16) -> Tensor:
    """Upper bounds on each page's best product, from channel-wise extremes alone; arXiv:2406.10774.

    Args:
        queries: [..., D]; keys: [..., n, D] with n a multiple of `page`.

    Returns:
        [..., n / page]. Each is at least the largest q.k of the page.

    Raises:
        ValueError: n is no multiple of `page`.

    Example:
        >>> page_bounds(torch.tensor([1.0, -1.0]), torch.tensor([[1.0, 0.0], [0.0, 2.0]]), page=2).tolist()
        [1.0]
    """
    paged = _paged(keys, page)
    high, low = paged.amax(-2), paged.amin(-2)
    query = queries[..., None, :]
    return torch.maximum(query * high, query * low).sum(-1)


def chunk_scores(queries: Tensor, keys: Tensor, chunk: int = 8) -> Tensor:
    """Product of the query with each chunk's mean key, the retrieval score of arXiv:2404.11912; [..., n / chunk].

    Chunk 0 holds the sinks and should always be kept. Arguments as in `page_bounds`.
    """
    return (queries[..., None, :] * _paged(keys, chunk).mean(-2)).sum(-1)


def keys_of_pages(pages: Tensor, page: int) -> Tensor:
    """[..., P] page numbers (ascending, -1 behind) to their keys [..., P * page].

    Example:
        >>> keys_of_pages(torch.tensor([0, 2, -1]), 2).tolist()
        [0, 1, 4, 5, -1, -1]
    """
    inside = pages[..., None] * page + torch.arange(page, device=pages.device)
    return torch.where(pages[..., None] < 0, -1, inside).flatten(-2)


def vertical_slash(
    columns: Tensor, offsets: Tensor, num_columns: int, num_offsets: int, forced_columns: int = 30, forced: int = 30
) -> tuple[Tensor, Tensor]:
    """The columns and distances with the most mass, arXiv:2407.02490.

    Args:
        columns, offsets: [..., n] sums of a strip.
        num_columns, num_offsets: how many to keep, forced ones included.
        forced_columns, forced: first columns and smallest distances that are always in.

    Returns:
        [..., num_columns] columns and [..., num_offsets] distances, ascending.
    """
    found = []
    for sums, count, first in ((columns, num_columns, forced_columns), (offsets, num_offsets, forced)):
        sums = sums.clone()
        sums[..., :first] = float("inf")
        found.append(sums.topk(min(count, sums.shape[-1]), -1).indices.sort(-1).values)
    return found[0], found[1]


def _paged(keys: Tensor, page: int) -> Tensor:
    if keys.shape[-2] % page:
        raise ValueError(f"{keys.shape[-2]} keys are no multiple of page={page}; pad them or cut the last page off")
    return keys.unflatten(-2, (-1, page))
