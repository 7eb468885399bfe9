"""Verifies a tree of drafted tokens: walks from the root, tries the children of every visited node in draw order.

B rows, G guidance branches, N drafted nodes, V vocabulary, W most children of a node, L levels. Scored row 0 is the
root (the last committed token), row r >= 1 is node r - 1 of `tokens`; the law P of row r is that of the children of r.

mode="ratio" with sampled children (drawn from q without replacement, in draw order), arXiv:2601.09212 generalised:

    p_1 = P, q_1 = q
    child k with token x:  a = min(q_k, s_k p_k + o_k q_k)
                           accept iff u q_k(x) < s_k p_k(x) + o_k q_k(x)  and  q_k(x) > 0
    on rejection:          p_{k+1} = Norm([p_k - a]_+)   ("band": [c p_k - a]_+),   q_{k+1} = Norm(q_k with x removed)
    all rejected:          emit from the last p and stop; a leaf is left by a bonus draw from its P
    drift_d = sum over the children tried at level d of [a - p_k]_+

A scale given per level relaxes only the last sibling of a node (s = 1, o = 0 before it): acceptance spent on an early
sibling is partly wasted on tokens that a later one would have accepted. `draft_probs=None` reads every child as a
point mass (q_k(x) = 1), for children that are a function of the prefix alone.

mode="match" (shared noise): `choices_r = argmax(P_r / E)`; follow the child that equals it; emit the choice where none
does.

Forced rows (`forced[b, r] >= 0`) accept exactly the forced id, without a draw and with drift 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..backend import choose, launching_on
from ..sample import Warp, _check
from ..verify_chain import Mode, Residual

__all__ = ["TreeTables", "TreeVerdict", "verify_tree"]


@dataclass(frozen=True)
class TreeTables:
    """A tree's topology as tensors on the device of the logits.

    Args:
        parents: [N] int64 scored row of each node's parent, 0 for the root.
        children: [N+1, W] int64 scored rows of each row's children in draw order, padded behind with -1.
        depth: [N+1] int64, 0 for the root.
        internal: [N+1] int64, which row of `draft_probs` a row's children were drawn from, -1 for leaves.
        levels: depth of the deepest node; 0 reads it from `depth`, which syncs with the device once per topology.
    """

    parents: Tensor
    children: Tensor
    depth: Tensor
    internal: Tensor
    levels: int = 0

    def __post_init__(self) -> None:
        if self.levels == 0:
            object.__setattr__(self, "levels", int(self.depth.max()))


@dataclass(frozen=True)
class TreeVerdict:
    """What `verify_tree` decided.

    Args:
        num_accepted: [B] int64 accepted depth.
        next_token: [B] int64, the token after the accepted path; -1 where its law is undefined.
        path: [B, levels] int64 scored rows of the accepted nodes, -1 beyond them.
        drift: [B, levels] float32, 0 at untested levels.
        choices: [B, N+1] int64; None unless asked for or mode "match".
        target_probs: [B, N+1, V] float32; None unless asked for.
    """

    num_accepted: Tensor
    next_token: Tensor
    path: Tensor
    drift: Tensor
    choices: Tensor | None = None
    target_probs: Tensor | None = None


def verify_tree(
    target_logits: Tensor,
    tokens: Tensor,
    depth_limit: Tensor,
    tree: TreeTables,
    warp: Warp,
    *,
    draft_probs: Tensor | None,
    seeds: Tensor,
    start: Tensor,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    residual: Residual = "gstar",
    guidance: Tensor | None = None,
    allowed: Tensor | None = None,
    forced: Tensor | None = None,
    noise: Tensor | None = None,
    uniforms: Tensor | None = None,
    mode: Mode = "ratio",
    need_choices: bool = False,
    need_probs: bool = False,
    impl: str | None = None,
) -> TreeVerdict:
    """Verifies one tree per row, without a host sync.

    Args:
        target_logits: [B, G, N+1, V] float32, bfloat16 or float16.
        tokens: [B, N] int64.
        depth_limit: [B] int64, levels of the row that count; 0 emits from the root.
        tree: the topology, shared by all rows.
        warp, guidance, allowed: as in `kernels.sample.probabilities`.
        draft_probs: [B, P, V] float32, one row per internal node; None is point masses. Unused in mode "match".
        seeds: [B] int64.
        start: [B] int64 absolute position of level-1 tokens. E of a row at depth d stands at position start + d,
            purpose TARGET; u of sibling k at level d (from 1) at position start + d - 1, purpose ACCEPT, sibling k.
        scale: [levels] float32 (last sibling only), [levels, W] (per sibling), or None for 1.
        offset: likewise, None for 0.
        residual, mode, need_choices, need_probs, impl: as in `verify_chain`.
        forced: [B, N+1] int64, -1 where free.
        noise: [B, levels+1, V] float32 exponentials of the positions start + 0..levels; None computes what is needed.
        uniforms: [B, levels, W] float32; None computes them.

    Returns:
        TreeVerdict. A row that reaches an undefined law has next_token -1, num_accepted 0, path -1 and drift 0.

    Raises:
        ValueError: shapes do not fit, or an unknown mode or residual.
    """
    _check(target_logits, guidance, allowed, forced)
    batch, _, rows, vocab = target_logits.shape
    width = tree.children.shape[1]
    if tokens.shape != (batch, rows - 1) or tree.children.shape[0] != rows:
        raise ValueError(
            f"tokens have shape {tuple(tokens.shape)}, target_logits {tuple(target_logits.shape)} and the tree "
            f"{tree.children.shape[0]} rows; give [B, N] tokens, [B, G, N+1, V] logits and a tree of N+1 rows."
        )
    if draft_probs is not None and (draft_probs.dim() != 3 or draft_probs.shape[::2] != (batch, vocab)):
        raise ValueError(f"draft_probs has shape {tuple(draft_probs.shape)}; give [{batch}, P, {vocab}] or None.")
    for name, value in (("scale", scale), ("offset", offset)):
        if value is not None and value.shape not in ((tree.levels,), (tree.levels, width)):
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}; give {[tree.levels]}, {[tree.levels, width]} or None."
            )
    if mode not in ("ratio", "match"):
        raise ValueError(f"mode={mode!r} is unknown; write 'ratio' or 'match'.")
    if residual not in ("gstar", "band"):
        raise ValueError(f"residual={residual!r} is unknown; write 'gstar' or 'band'.")
    arguments = (
        target_logits, tokens, depth_limit, tree, warp, draft_probs, seeds, start, scale, offset, residual, guidance,
        allowed, forced, noise, uniforms, mode, need_choices, need_probs,
    )  # fmt: skip
    if choose("verify_tree", target_logits, impl) == "triton":
        from .triton import verify_tree as run

        with launching_on(target_logits):
            return run(*arguments)
    from . import reference

    return reference.verify_tree(*arguments)
