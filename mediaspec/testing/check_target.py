"""Conformance suite for targets: does scoring many positions at once give what scoring them one by one gives?

Letters as in `core.types`. No random numbers: test tokens are a fixed function of row, position and stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.kv import KVStore
from ..core.tree import TreeSpec
from ..core.types import Target, TargetOutput

__all__ = ["check_target"]

ROWS = 3
TREE = TreeSpec.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])


@dataclass(frozen=True)
class _Case:
    target: Target
    condition: Callable[[int], Any]
    ids: Tensor
    atol: float
    length: int

    def tokens(self, count: int, stream: int = 0, rows: int = ROWS) -> Tensor:
        """[rows, count] admissible ids."""
        row, place = torch.arange(rows)[:, None], torch.arange(count)
        mixed = (7919 * (row + 3) + 104729 * place + 15485863 * stream + (row + 1) * (place + 2) ** 2) // 7
        return self.ids[mixed % len(self.ids)].to(self.target.device)

    def started(self, extra: int = 16) -> tuple[KVStore, TargetOutput]:
        cache = self.target.new_cache(ROWS, extra)
        return cache, self.target.prefill(self.condition(ROWS), cache)

    def one_by_one(self, cache: KVStore, tokens: Tensor) -> Tensor:
        """Scores tokens [R, N] in N passes; [R, N, V]."""
        rows = []
        for place in range(tokens.shape[1]):
            rows.append(self.target.score(tokens[:, place : place + 1], cache).logits)
            self.commit(cache, 1)
        return torch.cat(rows, 1).float()

    @staticmethod
    def commit(cache: KVStore, count: int) -> None:
        cache.advance(torch.full_like(cache.lengths, count), [count] * cache.rows)

    def same(self, name: str, got: Tensor, wanted: Tensor) -> None:
        if got.shape != wanted.shape:
            raise AssertionError(f"{name}: shape {tuple(got.shape)} instead of {tuple(wanted.shape)}")
        gap = (got.float() - wanted.float()).abs().amax(-1)
        worst = float(gap.max())
        if not worst <= self.atol:
            where = torch.nonzero(~(gap <= self.atol))[0].tolist()
            raise AssertionError(f"{name}: logits differ by {worst:.3g} (allowed {self.atol:g}), first at {where}")


def check_target(
    target: Target,
    condition: Callable[[int], Any],
    *,
    token_ids: Sequence[int] | None = None,
    atol: float = 1e-4,
    trees: bool = True,
) -> None:
    """Checks a target's cache, shapes and hidden states.

    Args:
        target: the model behind the `Target` contract, in evaluation mode.
        condition: called with a number of target rows R, returns what `prefill` takes for that many rows, the same
            first rows for every R, best with different rows.
        token_ids: ids that may be fed; default the whole vocabulary.
        atol: largest difference between logits of equal meaning; 1e-4 suits float32, about 0.1 bfloat16.
        trees: also check tree attention.

    Raises:
        AssertionError: naming the contract that is broken and where.

    Example:
        >>> check_target(target, lambda rows: torch.zeros(rows, dtype=torch.long))  # doctest: +SKIP
    """
    ids = torch.arange(target.vocab_size) if token_ids is None else torch.as_tensor(list(token_ids))
    length = min(7, target.num_tokens - 1)
    if length < 4:
        raise ValueError(f"a target of {target.num_tokens} tokens is too short to check; make it at least 5")
    case = _Case(target, condition, ids, atol, length)
    with torch.inference_mode():
        _shapes(case)
        truth = case.one_by_one(case.started()[0], case.tokens(length))
        _blocks(case, truth)
        _rows(case, truth)
        _ragged(case, truth)
        _hidden(case)
        _whole_image(case)
        if trees:
            _tree(case)


def _shapes(case: _Case) -> None:
    target = case.target
    if target.grid is not None and target.grid[0] * target.grid[1] > target.num_tokens:
        raise AssertionError(f"grid {target.grid} has more cells than num_tokens={target.num_tokens}")
    cache, output = case.started()
    vocab, size = target.vocab_size, target.hidden_size
    if output.logits.shape != (ROWS, 1, vocab):
        raise AssertionError(f"prefill: logits {tuple(output.logits.shape)} instead of {(ROWS, 1, vocab)}")
    if min(cache.host_lengths) < 1 or cache.lengths.tolist() != cache.host_lengths:
        raise AssertionError(
            f"prefill must commit the prefix: cache.lengths are {cache.lengths.tolist()} and cache.host_lengths "
            f"{cache.host_lengths}; end it with cache.advance(counts, host_counts)"
        )
    before = cache.lengths.tolist()
    output = target.score(case.tokens(3), cache)
    if output.logits.shape != (ROWS, 3, vocab):
        raise AssertionError(f"score: logits {tuple(output.logits.shape)} instead of {(ROWS, 3, vocab)}")
    if cache.lengths.tolist() != before or cache.host_lengths != before:
        raise AssertionError("score moved the cache's lengths; committing is the engine's business")
    if output.hidden is not None and output.hidden.shape != (ROWS, 3, size):
        raise AssertionError(f"score: hidden {tuple(output.hidden.shape)} instead of {(ROWS, 3, size)}")
    embedded = target.embed(case.tokens(3))
    if embedded.shape != (ROWS, 3, size):
        raise AssertionError(f"embed: {tuple(embedded.shape)} instead of {(ROWS, 3, size)}")


def _blocks(case: _Case, truth: Tensor) -> None:
    """One block, two blocks, and a block whose end is rejected and written again."""
    cache, _ = case.started()
    case.same("scoring in one block", case.target.score(case.tokens(case.length), cache).logits, truth)
    wrong = torch.cat([case.tokens(case.length)[:, :2], case.tokens(case.length - 2, stream=1)], 1)
    case.target.score(wrong, cache)
    case.commit(cache, 2)
    rest = case.tokens(case.length)[:, 2:]
    case.same("scoring behind a rejected block", case.target.score(rest, cache).logits, truth[:, 2:])


def _ragged(case: _Case, truth: Tensor) -> None:
    """Rows of different lengths in one cache, after a rollback."""
    cache, _ = case.started()
    start, host = cache.lengths.clone(), list(cache.host_lengths)
    counts = [min(row + 1, case.length - 2) for row in range(ROWS)]
    case.target.score(case.tokens(case.length), cache)
    case.commit(cache, case.length)
    lengths = start + torch.tensor(counts, device=start.device)
    cache.rollback(lengths, [n + count for n, count in zip(host, counts, strict=True)])
    tokens = torch.stack([row[count : count + 2] for row, count in zip(case.tokens(case.length), counts, strict=True)])
    wanted = torch.stack([row[count : count + 2] for row, count in zip(truth, counts, strict=True)])
    case.same("scoring rows of different lengths", case.target.score(tokens, cache).logits, wanted)


def _rows(case: _Case, truth: Tensor) -> None:
    """Rows do not see each other, and survive selection and repetition."""
    tokens = case.tokens(case.length)
    cache = case.target.new_cache(1, 16)
    case.target.prefill(case.condition(1), cache)
    case.same("row 0 alone", case.target.score(tokens[:1], cache).logits, truth[:1])
    cache, _ = case.started()
    case.target.score(tokens[:, :3], cache)
    case.commit(cache, 3)
    order = torch.tensor([ROWS - 1, 0, 0, 1], device=cache.lengths.device)
    cache.select(order)
    got = case.target.score(tokens[order, 3:], cache).logits
    case.same("rows selected and repeated", got, truth[order.to(truth.device), 3:])


def _hidden(case: _Case) -> None:
    cache, first = case.started()
    output = case.target.score(case.tokens(4), cache)
    if first.hidden is None or output.hidden is None:
        return
    case.same("head(hidden) of the prefill", case.target.head(first.hidden), first.logits)
    case.same("head(hidden) of a score", case.target.head(output.hidden), output.logits)


def _whole_image(case: _Case) -> None:
    """The last round of an image: a draft that reaches beyond num_tokens must fit, its surplus is never used."""
    target, extra = case.target, 6
    cache, _ = case.started(extra)
    total = target.num_tokens - 1
    target.score(case.tokens(total), cache)
    case.commit(cache, total)
    try:
        output = target.score(case.tokens(extra), cache)
    except (IndexError, RuntimeError, ValueError) as error:
        raise AssertionError(
            f"a draft of {extra} tokens behind position {total} of {target.num_tokens} does not fit a cache with "
            f"extra={extra}: {error}"
        ) from error
    if not bool(output.logits[:, :1].isfinite().any()):
        raise AssertionError("the last position of the image has no finite logit")


def _tree(case: _Case) -> None:
    """Every node of a scored tree equals the end of a chain along its path, also on ragged rows and when committed."""
    target, root = case.target, case.tokens(2)
    nodes = case.tokens(TREE.num_nodes, stream=2)
    for ragged in (False, True):
        cache, _ = case.started()
        target.score(root[:, :1], cache)
        case.commit(cache, 1)
        if ragged:
            lengths = cache.lengths - torch.tensor([0, 1, 0], device=cache.lengths.device)
            cache.rollback(lengths, lengths.tolist())
        begin, start = cache.lengths.clone(), list(cache.host_lengths)
        inputs = torch.cat([root[:, 1:], nodes], 1)
        scored = target.score(inputs, cache, TREE).logits
        label = "rows of different lengths" if ragged else "equal rows"
        for leaf in range(TREE.num_nodes + 1):
            path = _path(leaf)
            cache.rollback(begin, start)
            chain = target.score(inputs[:, path], cache).logits[:, -1]
            case.same(f"tree node {leaf} ({label}) against the chain along its path", scored[:, leaf], chain)
        cache.rollback(begin, start)
        target.score(inputs, cache, TREE)
        path = _path(TREE.num_nodes)
        moved = torch.tensor(path, device=begin.device).expand(ROWS, -1)
        cache.commit(moved, torch.full_like(begin, len(path)))
        cache.set_host_lengths([n + len(path) for n in start])
        after = target.score(case.tokens(1, stream=3), cache).logits
        cache.rollback(begin, start)
        follow = torch.cat([inputs[:, path], case.tokens(1, stream=3)], 1)
        case.same(f"a token behind a committed tree path ({label})", after, target.score(follow, cache).logits[:, -1:])


def _path(row: int) -> list[int]:
    """Rows from the root to `row`."""
    path = [row]
    while path[0]:
        path.insert(0, TREE.parents[path[0] - 1])
    return path
