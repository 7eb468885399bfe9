"""Times the attention kernels against SDPA and flex_attention and their memory traffic against a measured device copy.

    python tools/bench_attention.py                  on a CUDA device: compiled Triton kernels, reference and peers
    python tools/bench_attention.py --device cpu     smoke run of the torch reference and SDPA: no kernel is measured

plain is one new position per row, chain and tree are M of them over the cached prefix, sparse is one position over K
listed keys, merge joins the partial outputs of a prefix. All rows are equally long and SDPA gets no mask where none is
needed, which is its best case. Masks of the peers are made before the clock starts.

The bytes of an operation are those its contract cannot avoid: the keys and values that some position sees, queries
and outputs, once each. GB/s is these bytes over the median time of interleaved repeats; the last column is its share
of the copy speed measured in the same run. SDPA and flex_attention read every key in the sparse rows, and those count.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from bench_kernels import copy_speed, interleaved, revision
from torch import Tensor

from mediaspec.kernels.backend import describe
from mediaspec.kernels.lse_merge import lse_merge
from mediaspec.kernels.sparse_attention import sparse_attention
from mediaspec.kernels.sparse_attention.cases import make_case as make_sparse
from mediaspec.kernels.tree_attention import SPLIT, ancestor_words, tree_attention
from mediaspec.kernels.tree_attention.cases import Case, make_case, make_tree

Call = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    operation: str
    implementation: str
    batch: int
    cached: int
    positions: int
    microseconds: float
    megabytes: float
    gigabytes_per_second: float
    share_of_copy: float
    fastest: bool


def flex_call(case: Case, mask: Tensor) -> Call:
    """flex_attention, compiled, over the same mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return mask[i, j]

    count, live = mask.shape
    blocks = create_block_mask(seen, None, None, count, live, device=mask.device)
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(case.queries, case.keys, case.values, block_mask=blocks, enable_gqa=True)


def dense_calls(case: Case, own: Tensor, impls: list[str]) -> dict[str, Call]:
    """Calls of tree attention and of its peers on equally long rows; `own` [M, M] says who sees whom."""
    count = len(own)
    mask = torch.cat([own.new_ones(count, case.keys.shape[2] - count), own], 1)
    needed = None if count == 1 else mask
    tensors = case.queries, case.keys, case.values
    calls: dict[str, Call] = {}
    for impl in impls:
        if impl == "sdpa":
            calls[impl] = lambda: F.scaled_dot_product_attention(*tensors, needed, enable_gqa=True)
        elif impl == "flex":
            calls[impl] = flex_call(case, mask)
        else:
            calls[impl] = lambda impl=impl: tree_attention(*tensors, case.lengths, case.words, impl=impl)
    return calls


def traffic(case: Case, keys: int) -> int:
    """Bytes of `keys` keys and values per row and key head, of queries and of outputs."""
    batch, kv_heads, _, size = case.keys.shape
    return (2 * batch * kv_heads * keys * size + 2 * case.queries.numel()) * case.keys.element_size()


def operations(
    batch: int, cached: int, given: argparse.Namespace, impls: list[str]
) -> dict[str, tuple[int, dict[str, tuple[Call, int]]]]:
    """Name -> new positions, and implementation -> call and bytes it has to move."""
    torch.compiler.reset()  # flex_attention is compiled for every shape, and a function may be compiled eight times
    group, dtype = given.heads // given.kv_heads, getattr(torch, given.dtype)
    ours = [impl for impl in impls if impl in ("triton", "reference")]
    peers = [impl for impl in impls if impl not in ours]
    found: dict[str, tuple[int, dict[str, tuple[Call, int]]]] = {}
    for name, count, tree in (("plain", 1, False), ("chain", given.chain, False), ("tree", given.tree, True)):
        case = make_case(count, [cached] * batch, group, given.kv_heads, given.size, dtype=dtype, device=given.device)
        own = torch.ones(count, count, device=given.device).tril().bool()
        if tree:
            own = make_tree(torch.Generator().manual_seed(0), 1, count)[0][0].to(given.device)
            case = replace(case, words=ancestor_words(own)[None])
        moved = traffic(case, cached + count)
        found[name] = count, {impl: (call, moved) for impl, call in dense_calls(case, own, impls).items()}

    listed = min(given.listed, cached)
    sparse = make_sparse(1, [cached] * batch, listed, group, given.kv_heads, given.size, dtype=dtype,
                         device=given.device)  # fmt: skip
    fixed = (sparse.queries, sparse.keys, sparse.values, sparse.lengths, sparse.index, sparse.newer)
    dense = Case("plain", *fixed[:4])
    calls: dict[str, tuple[Call, int]] = {
        impl: (lambda impl=impl: sparse_attention(*fixed, impl=impl), traffic(dense, sparse.index.shape[-1] + 4))
        for impl in ours
    }
    itself = torch.ones(1, 1, dtype=torch.bool, device=given.device)
    calls |= {impl: (call, traffic(dense, cached + 1)) for impl, call in dense_calls(dense, itself, peers).items()}
    found[f"sparse-{listed}"] = 1, calls

    shape = (-(-cached // SPLIT), batch, given.heads, given.chain, given.size)
    outs, lse = torch.randn(shape, device=given.device), torch.randn(shape[:-1], device=given.device)
    moved = 4 * (outs.numel() + lse.numel() + outs[0].numel() + lse[0].numel())
    found["merge"] = given.chain, {impl: (lambda impl=impl: lse_merge(outs, lse, impl=impl), moved) for impl in ours}
    return found


def main() -> None:
    """Parses the command line, measures, prints the table and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default=None)
    parser.add_argument("--batch", type=int, nargs="+", default=None, help="rows")
    parser.add_argument("--cached", type=int, nargs="+", default=None, help="cached positions of every row")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--size", type=int, default=128, help="head size")
    parser.add_argument("--chain", type=int, default=9, help="new positions of a chain")
    parser.add_argument("--tree", type=int, default=69, help="new positions of a tree")
    parser.add_argument("--listed", type=int, default=512, help="listed keys of sparse attention")
    parser.add_argument("--no-flex", action="store_true", help="leave flex_attention out: it compiles for minutes")
    parser.add_argument("--repeats", type=int, default=None)
    parser.add_argument("--out", type=Path, default=None, help="JSON file")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a CUDA device; write --device cpu for the smoke run")

    smoke = given.device == "cpu"
    given.dtype = given.dtype or ("float32" if smoke else "bfloat16")
    batches = given.batch or ([1] if smoke else [1, 8])
    cached_lengths = given.cached or ([512] if smoke else [1024, 8192, 65536])
    repeats = given.repeats or (5 if smoke else 30)
    impls = ["reference", "sdpa"] if smoke else ["triton", "reference", "sdpa"]
    if not smoke and not given.no_flex:
        impls.append("flex")
    label = "CPU SMOKE RUN: torch reference and SDPA, no kernel is measured" if smoke else torch.cuda.get_device_name()
    copied = copy_speed(given.device, 8 if smoke else 1024, repeats)
    print(f"{label}; copy {copied / 1e9:.1f} GB/s; {given.dtype}, {given.heads} heads over {given.kv_heads} of "
          f"{given.size}; * is the fastest")  # fmt: skip
    print(f"{'operation':14}{'impl':11}{'B':>4}{'n':>8}{'M':>4}{'us':>12}{'MB':>10}{'GB/s':>9}{'of copy':>9}")

    rows: list[Row] = []
    for cached in cached_lengths:
        for batch in batches:
            for name, (count, calls) in operations(batch, cached, given, impls).items():
                seconds = interleaved({impl: call for impl, (call, _) in calls.items()}, given.device, repeats)
                best = min(seconds.values())
                for impl, (_, moved) in calls.items():
                    speed = moved / seconds[impl]
                    r = Row(name, impl, batch, cached, count, seconds[impl] * 1e6, moved / 1e6, speed / 1e9,
                            speed / copied, seconds[impl] == best)  # fmt: skip
                    rows.append(r)
                    print(
                        f"{r.operation:14}{r.implementation:11}{r.batch:4}{r.cached:8}{r.positions:4}"
                        f"{r.microseconds:12.1f}{r.megabytes:10.2f}{r.gigabytes_per_second:9.1f}{r.share_of_copy:9.1%}"
                        f"{' *' if r.fastest else ''}"
                    )
    if given.out is not None:
        report = {
            "label": label,
            "smoke": smoke,
            "device": label if not smoke else platform.processor() or platform.machine(),
            "dtype": given.dtype,
            "heads": given.heads,
            "kv_heads": given.kv_heads,
            "head_size": given.size,
            "repeats": repeats,
            "revision": revision(),
            "versions": {"torch": torch.__version__, "python": platform.python_version(), **describe()},
            "copy_gigabytes_per_second": copied / 1e9,
            "rows": [asdict(row) for row in rows],
        }
        given.out.write_text(json.dumps(report, indent=1) + "\n")
        print(f"written: {given.out}")


if __name__ == "__main__":
    main()
