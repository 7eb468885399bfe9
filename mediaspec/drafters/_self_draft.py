"""Drafting with the target's own weights behind the target's own keys: chains and trees under a restriction.

Keys and values of drafts go into the slots behind the committed lengths, where the verification pass writes next; no
cache is copied and the lengths are back where they were when a draft is returned.

Letters: B rows, K draft length, N nodes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from ..attention.restriction import Restriction
from ..core.kv import KVStore
from ..core.tree import TreeSpec
from ..core.types import DecodeState, Draft, TargetOutput
from ._draw import Numbers, draft_lengths, draft_steps, joined_chain
from ._levels import expand_children, tree_levels

__all__ = ["RestrictableTarget", "check_restrictable", "self_draft"]


class RestrictableTarget(Protocol):
    """A target that can read part of its keys, see `attention.restriction`; `CausalLMTarget` is one."""

    def restricted(self, cache: KVStore, restriction: Restriction) -> AbstractContextManager[None]: ...

    def retrace(self, tokens: Tensor, cache: KVStore) -> None: ...

    def score(self, tokens: Tensor, cache: KVStore, tree: TreeSpec | None = None) -> TargetOutput: ...


def check_restrictable(target: object, drafter: str) -> None:
    """Refuses targets without the seam.

    Raises:
        ValueError: naming the drafter and what to use instead.
    """
    if not (hasattr(target, "restricted") and hasattr(target, "retrace")):
        raise ValueError(
            f"{drafter} runs the target itself over fewer keys, which {type(target).__name__} does not offer "
            f"(CausalLMTarget does); use another drafter, such as 'ngram'"
        )


def self_draft(state: DecodeState, budget: int, tree: TreeSpec | None, restriction: Restriction) -> Draft:
    """A draft of the target under `restriction`, drawn as the target itself would draw.

    Args:
        state: `state.cache` holds every committed token but the newest, which is scored first.
        budget: K; tree: a topology instead.
    """
    cache = state.cache
    assert cache is not None
    target: RestrictableTarget = state.target  # type: ignore[assignment]
    lengths, host_lengths = cache.lengths, list(cache.host_lengths)
    try:
        with target.restricted(cache, restriction):
            return _chain(state, budget, target, cache) if tree is None else _grow(state, tree, target, cache)
    finally:
        cache.rollback(lengths, host_lengths)


def _chain(state: DecodeState, budget: int, target: RestrictableTarget, cache: KVStore) -> Draft:
    one, host_one = torch.ones_like(cache.lengths), [1] * cache.rows
    steps = draft_steps(state, budget)
    numbers, tokens, drawn = Numbers(state, steps), state.last_token[:, None], []
    for depth in range(steps):
        logits = target.score(tokens, cache).logits
        cache.advance(one, host_one)
        drawn.append(numbers.draw(state, logits[:, None], depth))
        tokens = drawn[-1].tokens
    return joined_chain(state, drawn)


def _grow(state: DecodeState, tree: TreeSpec, target: RestrictableTarget, cache: KVStore) -> Draft:
    """Level by level; every level is one pass over the nodes so far."""
    tokens, numbers = state.last_token[:, None], Numbers(state, tree.max_depth)
    laws: list[Tensor] = []
    for depth, level in enumerate(tree_levels(tree, tokens.device)):
        known = TreeSpec(tree.parents[: tokens.shape[1] - 1]) if depth else None
        logits = target.score(tokens, cache, known).logits
        if depth:
            logits = logits.index_select(1, level.rows)
        drawn = numbers.draw(state, logits[:, None], depth, level.width)
        tokens = torch.cat([tokens, expand_children(drawn.tokens, level)], 1)
        if drawn.probs is not None:
            laws.append(drawn.probs)
    return Draft(tokens[:, 1:], draft_lengths(state, tree.max_depth), torch.cat(laws, 1) if laws else None, tree)
