"""Inputs that the tests and the benchmark of sparse attention share. Every case is a function of its seed alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..tree_attention import Attended
from ..tree_attention.cases import make_case as make_dense
from . import key_list, sparse_attention

__all__ = ["Case", "cases", "make_case", "run"]


@dataclass(frozen=True)
class Case:
    """Arguments of one call of `sparse_attention`, under a name."""

    name: str
    queries: Tensor
    keys: Tensor
    values: Tensor
    lengths: Tensor
    index: Tensor
    newer: Tensor
    scale: float | None = None
    softcap: float | None = None
    window: int | None = None
    sinks: Tensor | None = None


def run(case: Case, impl: str | None = None, need_lse: bool = True) -> Attended:
    """Calls the operation on a case."""
    values = {name: value for name, value in vars(case).items() if name != "name"}
    return sparse_attention(**values, need_lse=need_lse, impl=impl)


def make_case(
    count: int,
    lengths: list[int],
    listed: int,
    group: int,
    kv_heads: int = 1,
    size: int = 16,
    drafted: int = 3,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> Case:
    """Random lists of at most `listed` slots; the last `drafted` cached positions of a row are newer than its list."""
    dense = make_dense(count, lengths, group, kv_heads, size, dtype=dtype, device=device, seed=seed)
    g = torch.Generator().manual_seed(seed + 1)
    newer = (torch.tensor(lengths) - drafted).clamp(min=0)
    chosen = (torch.rand(len(lengths), kv_heads, listed, generator=g) * newer[:, None, None]).long()
    index = key_list(chosen.masked_fill(newer[:, None, None] == 0, -1)).to(device)
    return Case("plain", dense.queries, dense.keys, dense.values, dense.lengths, index, newer.to(device))


def cases(size: int = 8, device: str = "cpu", seed: int = 0) -> list[Case]:
    """Every switch alone, and together, on ragged rows."""
    plain = make_case(2, [70, 400, 2], 12, 2, 2, size, device=device, seed=seed)
    long = make_case(1, [900, 610], 300, 4, 1, size, drafted=90, device=device, seed=seed + 1)
    sinks = torch.tensor([0.5, -1.0, 3.0, 8.0], device=device)
    twice = torch.cat([plain.index, plain.lengths[:, None, None].expand(3, 2, 1)], -1)
    return [
        plain,
        replace(long, name="several-pieces"),
        replace(long, name="peaked", queries=12 * long.queries),
        replace(plain, name="short-integers", index=plain.index.int(), newer=plain.newer.int()),
        replace(plain, name="nothing-listed", index=torch.full_like(plain.index, -1)),
        replace(plain, name="no-list", index=plain.index[:, :, :0]),
        replace(plain, name="listed-twice", index=twice),
        replace(plain, name="nothing-newer", newer=plain.lengths + 5),
        replace(plain, name="scale", scale=0.1),
        replace(plain, name="softcap", softcap=0.8),
        replace(plain, name="window", window=60),
        replace(plain, name="sinks", sinks=sinks),
        replace(long, name="all", window=300, softcap=4.0, scale=0.7, sinks=sinks),
    ]
