"""Inputs that the tests and the benchmark of tree verification share. Every case is a function of its seed alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..sample import Warp, probabilities, sample
from ..sample.cases import make_logits
from ..verify_chain import Mode, Residual
from . import TreeTables, TreeVerdict, verify_tree

__all__ = ["Case", "cases", "make_tree", "run"]


@dataclass(frozen=True)
class Case:
    """Arguments of one call of `verify_tree`, under a name."""

    name: str
    target_logits: Tensor
    tokens: Tensor
    depth_limit: Tensor
    tree: TreeTables
    warp: Warp
    draft_probs: Tensor | None
    seeds: Tensor
    start: Tensor
    scale: Tensor | None = None
    offset: Tensor | None = None
    residual: Residual = "gstar"
    guidance: Tensor | None = None
    allowed: Tensor | None = None
    forced: Tensor | None = None
    noise: Tensor | None = None
    uniforms: Tensor | None = None
    mode: Mode = "ratio"


def run(case: Case, impl: str | None = None, need_choices: bool = False, need_probs: bool = False) -> TreeVerdict:
    """Calls the operation on a case."""
    values = {name: value for name, value in vars(case).items() if name != "name"}
    return verify_tree(**values, need_choices=need_choices, need_probs=need_probs, impl=impl)


def make_tree(parents: list[int], device: str = "cpu") -> TreeTables:
    """Tables of the tree whose node r (1-based, level order) hangs below row parents[r - 1]."""
    below: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    depth = [0]
    for node, parent in enumerate(parents):
        below[parent].append(node + 1)
        depth.append(depth[parent] + 1)
    width = max(len(kids) for kids in below)
    inner = [row for row, kids in enumerate(below) if kids]
    return TreeTables(
        parents=torch.tensor(parents, device=device),
        children=torch.tensor([kids + [-1] * (width - len(kids)) for kids in below], device=device),
        depth=torch.tensor(depth, device=device),
        internal=torch.tensor([inner.index(row) if kids else -1 for row, kids in enumerate(below)], device=device),
        levels=max(depth),
    )


# Root with three children, two of them with two children, one grandchild with one: ragged in width and depth.
PARENTS = [0, 0, 0, 1, 1, 3, 3, 4]


def cases(vocab: int, batch: int = 2, device: str = "cpu", seed: int = 0) -> list[Case]:
    """The cases at one vocabulary size (>= 5): every switch alone, the usual ones together, and degenerate rows."""
    g = torch.Generator().manual_seed(seed)
    tree = make_tree(PARENTS)
    count = len(PARENTS)
    inner = [row for row in range(count + 1) if int(tree.internal[row]) >= 0]
    plain = make_logits(g, batch, 1, count + 1, vocab, spread=1.5)
    guided = make_logits(g, batch, 2, count + 1, vocab, spread=1.5)
    seeds = torch.arange(batch, dtype=torch.int64) * 31337 + seed
    start = torch.arange(batch, dtype=torch.int64) * 9 + 2

    def drafted(near: Tensor, distance: float, warp: Warp) -> tuple[Tensor, Tensor]:
        logits = near[:, :1, inner]
        logits = logits + distance * torch.randn(logits.shape, generator=g)
        positions = start[:, None] + tree.depth[inner]
        drawn = sample(
            logits, warp, seeds=seeds, positions=positions, purpose=1, width=tree.children.shape[1], impl="reference"
        ).tokens
        tokens = torch.zeros(batch, count, dtype=torch.int64)
        for row in inner:
            for rank, kid in enumerate(tree.children[row].tolist()):
                if kid > 0:
                    tokens[:, kid - 1] = drawn[:, int(tree.internal[row]), rank]
        return tokens, probabilities(logits, warp, impl="reference")

    top = Warp(top_k=max(4, vocab // 2))
    tokens, draft = drafted(plain, 0.4, Warp())
    far_tokens, far = drafted(plain, 3.0, Warp())
    top_tokens, top_draft = drafted(plain, 0.4, top)
    two_tokens, two_draft = drafted(plain, 0.4, Warp(top_k=2))
    near_tokens, near = drafted(guided, 0.4, top)
    limits = torch.full((batch,), tree.levels)
    ragged = torch.arange(batch) % (tree.levels + 1)
    guidance = torch.linspace(0.8, 1.6, batch)
    allowed = torch.rand(vocab, generator=g) < 0.8
    allowed[tokens.flatten()] = True
    forced = torch.full((batch, count + 1), -1)
    forced[0, 0] = tokens[0, 1]
    forced[-1, 2] = 1
    refused = torch.full((batch, count + 1), -1)
    refused[:, 0] = int(torch.bincount(tokens[:, :3].flatten(), minlength=vocab).argmin())
    omega = torch.linspace(3.0, 0.5, tree.levels)
    each = torch.linspace(0.5, 3.0, tree.levels * tree.children.shape[1]).view(tree.levels, -1)
    mixed = torch.full((tree.levels,), 0.6)
    noise = torch.empty(batch, tree.levels + 1, vocab).exponential_(generator=g)
    uniforms = torch.rand(batch, tree.levels, tree.children.shape[1], generator=g)
    broken = plain.clone()
    broken[0, 0, 0, vocab // 2] = float("nan")
    broken[-1, 0, 1:] = float("-inf")
    best = plain[:, 0].topk(tree.children.shape[1], -1).indices
    greedy = torch.zeros_like(tokens)
    for row in inner:
        for rank, kid in enumerate(tree.children[row].tolist()):
            if kid > 0:
                greedy[:, kid - 1] = best[:, row, -1 - rank]
    rest = (seeds, start)
    found = [
        Case("exact", plain, tokens, limits, tree, Warp(), draft, *rest),
        Case("exact-far", plain, far_tokens, limits, tree, Warp(), far, *rest),
        Case("exact-stored", plain, tokens, limits, tree, Warp(), draft, *rest, noise=noise, uniforms=uniforms),
        Case("ragged", plain, tokens, ragged, tree, Warp(), draft, *rest),
        Case("empty", plain, tokens, torch.zeros_like(limits), tree, Warp(), draft, *rest),
        Case("omega", plain, far_tokens, limits, tree, Warp(temperature=0.9), far, *rest, scale=omega),
        Case("omega-each", plain, far_tokens, limits, tree, Warp(), far, *rest, scale=each),
        Case("omega-band", plain, far_tokens, limits, tree, Warp(), far, *rest, scale=omega, residual="band"),
        Case("ensemble", plain, far_tokens, limits, tree, Warp(), far, *rest, scale=mixed, offset=1 - mixed),
        Case("top-k", plain, top_tokens, limits, tree, top, top_draft, *rest, scale=omega),
        Case("exhausted", plain, two_tokens, limits, tree, Warp(top_k=2), two_draft, *rest),
        Case("top-p", plain, tokens, limits, tree, Warp(top_p=0.8), draft, *rest),
        Case("guided", guided, near_tokens, limits, tree, top, near, *rest, guidance=guidance, scale=omega),
        Case("allowed", plain, tokens, limits, tree, Warp(), draft, *rest, allowed=allowed),
        Case("forced", plain, tokens, limits, tree, Warp(), draft, *rest, forced=forced, scale=mixed,
             offset=1 - mixed),
        Case("refused", plain, tokens, limits, tree, Warp(), draft, *rest, forced=refused, scale=omega),
        Case("point", plain, tokens, limits, tree, Warp(), None, *rest),
        Case("point-omega", plain, tokens, limits, tree, Warp(), None, *rest, scale=omega),
        Case("point-band", plain, tokens, limits, tree, Warp(), None, *rest, scale=omega, residual="band"),
        Case("greedy", plain, greedy, limits, tree, Warp(temperature=0.0), None, *rest),
        Case("match", plain, tokens, limits, tree, Warp(), None, *rest, mode="match"),
        Case("match-greedy", plain, greedy, ragged, tree, Warp(temperature=0.0), None, *rest, mode="match"),
        Case("match-all", guided, near_tokens, limits, tree, top, None, *rest, guidance=guidance, allowed=allowed,
             forced=forced, noise=noise, mode="match"),
        Case("broken", broken, tokens, limits, tree, Warp(), draft, *rest, scale=each * 99),
        Case("broken-match", broken, tokens, limits, tree, Warp(), None, *rest, mode="match"),
    ]  # fmt: skip
    return [_to(case, device) for case in found]


def _to(case: Case, device: str) -> Case:
    moved = {name: value.to(device) for name, value in vars(case).items() if isinstance(value, Tensor)}
    topology = {name: value.to(device) for name, value in vars(case.tree).items() if isinstance(value, Tensor)}
    return replace(case, tree=replace(case.tree, **topology), **moved)  # type: ignore[arg-type]
