"""Inputs that the tests and the benchmark of tree attention share. Every case is a function of its seed alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import Attended, ancestor_words, tree_attention

__all__ = ["Case", "cases", "make_case", "make_tree", "run"]


@dataclass(frozen=True)
class Case:
    """Arguments of one call of `tree_attention`, under a name."""

    name: str
    queries: Tensor
    keys: Tensor
    values: Tensor
    lengths: Tensor
    words: Tensor | None = None
    depths: Tensor | None = None
    hidden: Tensor | None = None
    scale: float | None = None
    softcap: float | None = None
    window: int | None = None
    sinks: Tensor | None = None


def run(case: Case, impl: str | None = None, need_lse: bool = True) -> Attended:
    """Calls the operation on a case."""
    values = {name: value for name, value in vars(case).items() if name != "name"}
    return tree_attention(**values, need_lse=need_lse, impl=impl)


def make_tree(generator: torch.Generator, rows: int, count: int) -> tuple[Tensor, Tensor]:
    """Random trees in level order: [rows, M, M] bool who sees whom, [rows, M] depths."""
    mask = torch.zeros(rows, count, count, dtype=torch.bool)
    for b in range(rows):
        parent = torch.tensor([0] + [int(torch.randint(i, (), generator=generator)) for i in range(1, count)])
        for i, p in enumerate(parent.sort().values.tolist()):
            mask[b, i] = mask[b, p]
            mask[b, i, i] = True
    return mask, mask.sum(-1) - 1


def make_case(
    count: int,
    lengths: list[int],
    group: int,
    kv_heads: int = 1,
    size: int = 16,
    tree: bool = False,
    spare: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> Case:
    """Random queries over one layer of a cache: a view of the live slots and `spare` more, of a store with 25 more.

    Args:
        count: M.
        lengths: n of every row.
        group: G.
        tree: True gives every row a random tree of its own, False a chain.
    """
    g = torch.Generator().manual_seed(seed)
    batch, live = len(lengths), max(lengths) + count + spare
    store = torch.randn(2, 2, batch, kv_heads, live + 25, size, generator=g).to(device, dtype)
    keys, values = store[:, 1, :, :, :live].unbind(0)
    queries = torch.randn(batch, count, group * kv_heads, size, generator=g).to(device, dtype).transpose(1, 2)
    words = depths = None
    if tree:
        mask, depths = make_tree(g, batch, count)
        words, depths = ancestor_words(mask).to(device), depths.to(device)
    name = "tree" if tree else "chain"
    return Case(name, queries, keys, values, torch.tensor(lengths, device=device), words, depths)


def cases(size: int = 8, device: str = "cpu", seed: int = 0) -> list[Case]:
    """Every switch alone, and together, on ragged rows."""
    chain = make_case(3, [5, 290, 0], 2, 2, size, device=device, seed=seed)
    tree = make_case(11, [40, 1020], 2, 1, size, tree=True, device=device, seed=seed + 1)
    shared = make_case(70, [3, 60], 1, 1, size, tree=True, device=device, seed=seed + 2)
    assert shared.words is not None and shared.depths is not None
    shared = replace(shared, words=shared.words[:1], depths=shared.depths[:1])
    padding = torch.zeros(3, 300, dtype=torch.bool, device=device)
    padding[0, :4] = padding[1, :260] = True
    sinks = torch.tensor([0.5, -1.0, 3.0, 8.0], device=device)
    wide = replace(chain, queries=12 * chain.queries)
    return [
        chain,
        tree,
        replace(chain, name="plain", queries=chain.queries[:, :, :1]),
        replace(chain, name="scale", scale=0.1),
        replace(wide, name="softcap", softcap=2.5),
        replace(wide, name="peaked"),
        replace(chain, name="window", window=2),
        replace(chain, name="window-across-pieces", window=40),
        replace(shared, name="shared-tree-window", window=9),
        replace(chain, name="hidden", hidden=padding),
        replace(chain, name="sinks", sinks=sinks),
        replace(tree, name="tree-all", window=30, softcap=4.0, scale=0.7, sinks=sinks[:2]),
    ]
