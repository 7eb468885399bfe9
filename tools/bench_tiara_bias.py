"""Times TiARA's frame bias against plain attention, for the kernel alone and for a whole layer of a Wan model.

    python tools/bench_tiara_bias.py --out bias.json                    on a CUDA device: Wan 480p, 21 x 30 x 52 tokens
    python tools/bench_tiara_bias.py --device cpu --out bias.json       21 x 15 x 26 tokens, 3 heads, minutes on a core

attention: every route that runs on the device against `F.scaled_dot_product_attention` on the same tensors, each once
per repeat and in turns; the overhead is the median of the ratios within a repeat, minus one.

layer: a `WanTransformer3DModel` of one layer through `mediaspec.enable`, measured rows included. One repeat is
`refresh` denoising steps, in the first of which the rows are measured, with the edit on and off in turns. 3 heads at
8190 tokens on the CPU keep the proportion of attention to linear layers that Wan 1.3B has at 32760 tokens with 12.

`products` is the number of multiply-adds relative to plain attention, from the shapes alone.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from bench_kernels import clock, revision
from diffusers import WanTransformer3DModel

import mediaspec
from mediaspec.attention.tiara import TiARA
from mediaspec.kernels.backend import describe
from mediaspec.kernels.tiara_bias import FrameLayout, choose_route
from mediaspec.kernels.tiara_bias.cases import make_case, run

Call = Callable[[], object]
WANTED = ("subtract", "split", "columns", "triton", "flex")


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    part: str
    route: str
    mode: str
    milliseconds: float
    overhead: float
    products: float
    repeats: int


def overheads(plain: Call, calls: dict[str, Call], device: str, repeats: int) -> dict[str, tuple[float, float]]:
    """Median seconds of each call, plain among them, and the median over repeats of its ratio to plain, minus one."""
    calls = {"plain": plain, **calls}
    for call in calls.values():
        call()
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats):
        names = list(calls)
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            taken[name].append(clock(calls[name], device))
    return {
        name: (
            statistics.median(seconds),
            statistics.median(mine / base for mine, base in zip(seconds, taken["plain"])) - 1,
        )
        for name, seconds in taken.items()
    }


def products(route: str, mode: str, layout: FrameLayout, size: int) -> float:
    """Multiply-adds of a route relative to 2 L^2 D of plain attention."""
    if route == "columns":
        return (-(-(size + layout.frames) // 8) * 8) / size
    if route == "subtract" and mode == "frame":
        return 1 + 1 / layout.frames
    if route == "subtract":
        return 1 + (1 if mode == "self_token" else 9) / layout.stop
    return 1.0


def attention_rows(given: argparse.Namespace, layout: FrameLayout) -> list[Row]:
    """Every route on random tensors."""
    dtype = getattr(torch, given.dtype)
    case = make_case(layout, 0, given.batch, given.heads, given.size, 0.7, dtype=dtype, device=given.device)
    calls: dict[str, tuple[str, str]] = {}
    for mode in ("frame", "self_token"):
        for route in WANTED:
            try:
                choose_route(case.q, layout, mode=mode, route=route, delta_limit=0.7)
            except ValueError:
                continue
            if route not in given.skip and not (mode == "self_token" and route in ("triton", "flex")):
                calls[f"{route} {mode}"] = (route, mode)
    bound: dict[str, Call] = {
        name: (lambda route=route, mode=mode: run(replace(case, mode=mode), route, 0.7))
        for name, (route, mode) in calls.items()
    }
    found = overheads(
        lambda: F.scaled_dot_product_attention(case.q, case.k, case.v), bound, given.device, given.repeats
    )
    return [
        Row("attention", *(calls.get(name, ("plain", "-"))), 1e3 * seconds, over,
            products(*calls.get(name, ("plain", "-")), layout, given.size), given.repeats)
        for name, (seconds, over) in found.items()
    ]  # fmt: skip


def layer_rows(given: argparse.Namespace, layout: FrameLayout) -> list[Row]:
    """One layer of Wan, measured rows included."""
    width = given.heads * given.size
    torch.manual_seed(0)
    model = WanTransformer3DModel(
        num_attention_heads=given.heads, attention_head_dim=given.size, num_layers=1, ffn_dim=width * 35 // 6,
        text_dim=64, freq_dim=64,
    )  # fmt: skip
    model = model.to(given.device, getattr(torch, given.dtype)).eval()
    g = torch.Generator().manual_seed(1)
    y, x = layout.tokens // (layout.width or 1), layout.width or 1
    latent = torch.randn(given.batch, 16, layout.frames, 2 * y, 2 * x, generator=g).to(model.device, model.dtype)
    text = torch.randn(given.batch, 512, 64, generator=g).to(model.device, model.dtype)
    times = [torch.full((given.batch,), 900 - 100 * step, device=model.device) for step in range(given.refresh)]

    def steps(handle: object = None) -> None:
        for step, t in enumerate(times):
            if handle is not None:
                handle.set_step(step)  # type: ignore[attr-defined]
            model(latent, t, text, return_dict=False)

    def edited(config: TiARA) -> Call:
        def call() -> None:
            with mediaspec.enable(model, attention=config) as handle:
                steps(handle)

        return call

    modes = ("frame", "self_token")
    calls = {mode: edited(TiARA.safe(mode=mode, route="subtract", refresh=given.refresh)) for mode in modes}
    found = overheads(steps, calls, given.device, given.repeats)
    return [
        Row("layer", "plain" if name == "plain" else "subtract", name, 1e3 * seconds / given.refresh, over,
            products("plain" if name == "plain" else "subtract", name, layout, given.size), given.repeats)
        for name, (seconds, over) in found.items()
    ]  # fmt: skip


def main() -> None:
    """Parses the command line, measures, prints the table and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default=None)
    parser.add_argument("--frames", type=int, default=21, help="latent frames")
    parser.add_argument("--grid", type=int, nargs=2, default=None, help="rows and columns of tokens of a frame")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=None)
    parser.add_argument("--size", type=int, default=128, help="head size")
    parser.add_argument("--refresh", type=int, default=4, help="steps between two measurements of the rows")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--skip", nargs="*", default=[], help="routes to leave out")
    parser.add_argument("--only", choices=["attention", "layer"], default=None)
    parser.add_argument("--out", type=Path, default=None, help="JSON file")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a CUDA device; write --device cpu")
    on_cpu = given.device == "cpu"
    given.dtype = given.dtype or ("float32" if on_cpu else "bfloat16")
    given.heads = given.heads or (3 if on_cpu else 12)
    rows_, columns = given.grid or ((15, 26) if on_cpu else (30, 52))
    layout = FrameLayout(given.frames, rows_ * columns, 0, columns)

    label = platform.processor() or platform.machine() if on_cpu else torch.cuda.get_device_name()
    print(f"{label}, {torch.get_num_threads()} threads; {layout.frames} frames of {rows_} x {columns} tokens, "
          f"{given.heads} heads of {given.size}, {given.dtype}")  # fmt: skip
    print(f"{'part':12}{'route':11}{'mode':12}{'ms':>12}{'overhead':>11}{'products':>10}")
    rows: list[Row] = []
    with torch.inference_mode():
        for part in (attention_rows, layer_rows):
            if given.only is None or part.__name__.startswith(given.only):
                for r in part(given, layout):
                    rows.append(r)
                    print(
                        f"{r.part:12}{r.route:11}{r.mode:12}{r.milliseconds:12.2f}{r.overhead:11.1%}{r.products:10.3f}"
                    )
    if given.out is not None:
        report = {
            "device": label,
            "threads": torch.get_num_threads(),
            "dtype": given.dtype,
            "frames": layout.frames,
            "grid": [rows_, columns],
            "batch": given.batch,
            "heads": given.heads,
            "head_size": given.size,
            "refresh": given.refresh,
            "seed": 0,
            "revision": revision(),
            "versions": {"torch": torch.__version__, "python": platform.python_version(), **describe()},
            "rows": [asdict(row) for row in rows],
        }
        given.out.write_text(json.dumps(report, indent=1) + "\n")
        print(f"written: {given.out}")


if __name__ == "__main__":
    main()
