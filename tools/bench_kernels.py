"""Times the sampling and verification kernels and compares the memory traffic they need with a measured device copy.

    python tools/bench_kernels.py                  on a CUDA device: compiled Triton kernels against the reference
    python tools/bench_kernels.py --device cpu     smoke run of the torch reference: no kernel is measured

The bytes of an operation are those its contract cannot avoid: every target logit once and, where the rule reads it,
every draft probability once, plus one second reading of the emitted position. GB/s is these bytes over the median
time of interleaved repeats; the last column is its share of the copy speed measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from mediaspec.kernels import philox
from mediaspec.kernels.backend import describe
from mediaspec.kernels.sample import Warp, sample
from mediaspec.kernels.sample.cases import make_logits
from mediaspec.kernels.verify_chain import verify_chain
from mediaspec.kernels.verify_tree import verify_tree
from mediaspec.kernels.verify_tree.cases import PARENTS, make_tree


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    operation: str
    implementation: str
    batch: int
    positions: int
    vocab: int
    microseconds: float
    megabytes: float
    gigabytes_per_second: float
    share_of_copy: float


def clock(call: Callable[[], object], device: str) -> float:
    """Seconds of one call: CUDA events on a device, the wall clock on the CPU."""
    if device == "cuda":
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        call()
        after.record()
        torch.cuda.synchronize()
        return before.elapsed_time(after) / 1e3
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def interleaved(calls: dict[str, Callable[[], object]], device: str, repeats: int) -> dict[str, float]:
    """Median seconds of each call, measured in turns so that drift of the clock hits all alike."""
    for call in calls.values():
        for _ in range(3):
            call()
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            seconds[name].append(clock(call, device))
    return {name: statistics.median(values) for name, values in seconds.items()}


def copy_speed(device: str, megabytes: int, repeats: int) -> float:
    """Bytes per second of a copy, reading and writing counted."""
    source = torch.empty(megabytes << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = interleaved({"copy": lambda: target.copy_(source)}, device, repeats)["copy"]
    return 2 * source.numel() / seconds


def inputs(batch: int, positions: int, vocab: int, device: str, dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    """Guided logits, a draft near them and the row state, on the device."""
    g = torch.Generator().manual_seed(seed)
    logits = make_logits(g, batch, 2, positions, vocab)
    draft = (logits[:, 0, :-1] + 0.3 * torch.randn(batch, positions - 1, vocab, generator=g)).softmax(-1)
    made = {
        "logits": logits.to(dtype),
        "draft": draft,
        "tokens": draft.argmax(-1),
        "lengths": torch.full((batch,), positions - 1),
        "seeds": torch.arange(batch),
        "start": torch.full((batch,), 5),
        "positions": torch.arange(positions).expand(batch, -1).contiguous(),
        "guidance": torch.full((batch,), 3.0),
        "scale": torch.linspace(2.5, 1.0, positions - 1),
    }
    return {name: value.to(device) for name, value in made.items()}


def operations(v: dict[str, Tensor], warp: Warp, impl: str) -> dict[str, tuple[Callable[[], object], int]]:
    """Calls and the bytes each has to move."""
    batch, branches, positions, vocab = v["logits"].shape
    row = branches * vocab * v["logits"].element_size()
    shared = {"seeds": v["seeds"], "guidance": v["guidance"], "impl": impl}
    chain = dict(draft_probs=v["draft"], start=v["start"], **shared)
    arguments = (v["logits"], v["tokens"], v["lengths"], warp)
    all_rows, all_draft = batch * positions * row, batch * (positions - 1) * vocab * 4
    emitted = batch * (row + vocab * 4)
    found: dict[str, tuple[Callable[[], object], int]] = {
        "sample": (
            lambda: sample(v["logits"], warp, positions=v["positions"], purpose=philox.TARGET, **shared),
            all_rows,
        ),
        "chain-exact": (lambda: verify_chain(*arguments, **chain), all_rows + emitted),
        "chain-omega": (lambda: verify_chain(*arguments, scale=v["scale"], **chain), all_rows + all_draft + emitted),
        "chain-match": (lambda: verify_chain(*arguments, mode="match", **chain), all_rows),
    }
    if positions == len(PARENTS) + 1:
        tree = make_tree(PARENTS, device=str(v["logits"].device))
        inner = int(tree.internal.max()) + 1
        visited = batch * ((tree.levels + 1) * row + tree.levels * vocab * 4)
        found["tree-exact (at most)"] = (
            lambda: verify_tree(
                v["logits"], v["tokens"], v["lengths"], tree, warp, draft_probs=v["draft"][:, :inner],
                start=v["start"], **shared,
            ),
            visited,
        )  # fmt: skip
    return found


def revision() -> str:
    """The git revision of the working tree, "unknown" outside one."""
    try:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def main() -> None:
    """Parses the command line, measures, prints the table and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="dtype of the target logits"
    )
    parser.add_argument("--vocab", type=int, nargs="+", default=None, help="vocabulary sizes")
    parser.add_argument("--batch", type=int, nargs="+", default=None, help="rows")
    parser.add_argument("--positions", type=int, nargs="+", default=[6, len(PARENTS) + 1], help="scored positions")
    parser.add_argument("--top-k", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help="JSON file")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a CUDA device; write --device cpu for the smoke run")

    smoke = given.device == "cpu"
    vocabs = given.vocab or ([256] if smoke else [1024, 16384, 65536])
    batches = given.batch or ([1] if smoke else [1, 8, 32])
    repeats = given.repeats or (5 if smoke else 30)
    label = "CPU SMOKE RUN: torch reference only, no kernel is measured" if smoke else torch.cuda.get_device_name()
    copied = copy_speed(given.device, 8 if smoke else 1024, repeats)
    print(f"{label}; copy {copied / 1e9:.1f} GB/s; logits {given.dtype}, guidance on, top-k {given.top_k}")
    print(f"{'operation':22}{'impl':11}{'B':>4}{'N':>4}{'V':>8}{'us':>11}{'MB':>9}{'GB/s':>9}{'of copy':>9}")

    rows = []
    for vocab in vocabs:
        for batch in batches:
            for positions in given.positions:
                values = inputs(batch, positions, vocab, given.device, getattr(torch, given.dtype), given.seed)
                warp = Warp(top_k=given.top_k)
                impls = ["reference"] if smoke else ["triton", "reference"]
                found = {impl: operations(values, warp, impl) for impl in impls}
                for name in found[impls[0]]:
                    seconds = interleaved({impl: found[impl][name][0] for impl in impls}, given.device, repeats)
                    for impl in impls:
                        moved = found[impl][name][1]
                        speed = moved / seconds[impl]
                        rows.append(
                            Row(name, impl, batch, positions, vocab, seconds[impl] * 1e6, moved / 1e6, speed / 1e9,
                                speed / copied)
                        )  # fmt: skip
                        r = rows[-1]
                        print(
                            f"{r.operation:22}{r.implementation:11}{r.batch:4}{r.positions:4}{r.vocab:8}"
                            f"{r.microseconds:11.1f}{r.megabytes:9.2f}{r.gigabytes_per_second:9.1f}{r.share_of_copy:9.1%}"
                        )
    if given.out is not None:
        report = {
            "label": label,
            "smoke": smoke,
            "device": label if not smoke else platform.processor() or platform.machine(),
            "dtype": given.dtype,
            "seed": given.seed,
            "top_k": given.top_k,
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
