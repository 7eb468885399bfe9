"""Times TiARA on temporal attention: its share of a denoising step, and of one attention layer.

    python tools/bench_tiara.py                    on a CUDA device: a step of AnimateDiff's size, both kernels
    python tools/bench_tiara.py --device cpu       moving-emoji's own denoiser, the shape it is sampled with

A step is one forward pass of the denoiser with guidance (two videos). `share` is what a step takes longer than without
TiARA, in units of the step without. Calls take turns in one run and medians are compared. On the CPU the table also
has processor time, which other processes disturb less than the clock. Joint space-time attention has a benchmark of
its own, `bench_tiara_bias.py`.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
import torch.nn.functional as F
from bench_kernels import clock, interleaved, revision
from diffusers import UNetMotionModel

import mediaspec
from mediaspec.attention.tiara import TiARA, temporal_plan
from mediaspec.kernels.backend import describe
from mediaspec.kernels.tiara_temporal import tiara_temporal

PRESETS = {"paper": TiARA.paper(), "safe": TiARA.safe(), "heads": TiARA(pool="heads")}


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Args:
        share: time beyond "plain" in units of "plain", by the wall clock and by processor time (None on a device).
    """

    what: str
    milliseconds: float
    share: float
    processor_milliseconds: float | None
    processor_share: float | None


def denoiser(device: str, dtype: torch.dtype) -> UNetMotionModel:
    """The shipped model on the CPU, a model of Stable Diffusion's sizes with random weights on a device."""
    if device == "cpu":
        from mediaspec.pipelines.video_models import load_moving_emoji

        return load_moving_emoji(dtype, device).unet
    torch.manual_seed(0)
    with torch.device(device):
        return UNetMotionModel(cross_attention_dim=768, num_attention_heads=8).to(dtype).eval()


def step_inputs(unet: UNetMotionModel, frames: int, size: int, device: str, dtype: torch.dtype) -> tuple[Any, ...]:
    """Sample, timestep and text of two videos."""
    g = torch.Generator().manual_seed(0)
    sample = torch.randn(2, unet.config.in_channels, frames, size, size, generator=g)
    text = torch.randn(2 * frames, 32, unet.config.cross_attention_dim, generator=g)
    return sample.to(device, dtype), torch.tensor(500, device=device), text.to(device, dtype)


def steps(unet: UNetMotionModel, given: tuple[Any, ...], device: str, repeats: int) -> tuple[list[Row], int]:
    """Table of whole steps, and how many modules were hit."""
    walls: dict[str, list[float]] = {}
    processor: dict[str, list[float]] = {}
    hit = 0
    for turn in range(repeats + 1):
        for name, config in (("plain", None), *PRESETS.items()):
            with nullcontext() if config is None else mediaspec.enable(unet, attention=config) as handle:
                unet(*given)  # a handle's first pass makes tables and counters
                before = time.process_time()
                wall = clock(lambda: unet(*given), device)
                spent = time.process_time() - before
                hit = hit if handle is None else handle.summary()["modules"]
            if turn:  # the first turn warms up
                walls.setdefault(name, []).append(wall)
                processor.setdefault(name, []).append(spent)
    return table(median(walls), median(processor) if device == "cpu" else None), hit


def median(values: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(one) for name, one in values.items()}


def table(walls: dict[str, float], processor: dict[str, float] | None) -> list[Row]:
    rows = []
    for name, wall in walls.items():
        own = None if processor is None else processor[name]
        share = None if processor is None or own is None else own / processor["plain"] - 1
        rows.append(Row(name, 1e3 * wall, wall / walls["plain"] - 1, None if own is None else 1e3 * own, share))
    return rows


def layers(rows: int, heads: int, frames: int, size: int, device: str, dtype: torch.dtype, repeats: int) -> list[Row]:
    """Table of the attention alone, as projections leave its inputs: torch's own and both implementations."""
    q, k, v = (torch.randn(rows, frames, heads, size, device=device, dtype=dtype).transpose(1, 2) for _ in range(3))
    plan = temporal_plan(TiARA.safe(), frames, q.device)
    calls: dict[str, Callable[[], object]] = {"plain": lambda: F.scaled_dot_product_attention(q, k, v)}
    for impl in ["reference"] + (["triton"] if device == "cuda" else []):
        calls[impl] = lambda impl=impl: tiara_temporal(q, k, v, plan, means=True, impl=impl)  # type: ignore[misc]
    return table(interleaved(calls, device, repeats), None)


def show(title: str, rows: list[Row]) -> None:
    print(f"\n{title}\n{'':12}{'ms':>10}{'share':>9}{'cpu ms':>10}{'share':>9}")
    for row in rows:
        end = "" if row.processor_share is None else f"{row.processor_milliseconds:10.2f}{row.processor_share:9.1%}"
        print(f"{row.what:12}{row.milliseconds:10.3f}{row.share:9.1%}{end}")


@torch.inference_mode()
def main() -> None:
    """Parses the command line, measures, prints the tables and writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--frames", type=int, default=16)
    parser.add_argument("--size", type=int, help="height and width of the latents; 8 on the CPU, 64 on a device")
    parser.add_argument("--repeats", type=int, default=7, help="turns, at least 5 for a number that is quoted")
    parser.add_argument("--out", type=Path, default=Path("bench_tiara.json"))
    given = parser.parse_args()
    if given.repeats < 1 or given.frames < 7:
        parser.error(f"--repeats {given.repeats} --frames {given.frames}: give at least 1 turn and 7 frames")
    dtype = torch.float32 if given.device == "cpu" else torch.float16
    size = given.size or (8 if given.device == "cpu" else 64)
    unet = denoiser(given.device, dtype)
    found, hit = steps(unet, step_inputs(unet, given.frames, size, given.device, dtype), given.device, given.repeats)
    show(f"a step of {sum(p.numel() for p in unet.parameters()) / 1e6:.1f} M parameters, {hit} modules", found)
    shapes = [(2 * size**2, 4, 16), (2 * size**2, 8, 40), (size**2 // 2, 8, 80)]
    attention = {}
    for rows, heads, width in shapes:
        one = layers(rows, heads, given.frames, width, given.device, dtype, max(5, given.repeats))
        attention[f"{rows} x {heads} x {given.frames} x {width}"] = [asdict(row) for row in one]
        show(f"attention, {rows} rows, {heads} heads of {width}", one)
    report = {
        "bench": "tiara",
        "device": given.device,
        "device_name": torch.cuda.get_device_name() if given.device == "cuda" else platform.processor(),
        "dtype": str(dtype),
        "frames": given.frames,
        "latents": size,
        "repeats": given.repeats,
        "modules": hit,
        "versions": {
            "torch": torch.__version__,
            "diffusers": diffusers.__version__,
            "mediaspec": mediaspec.__version__,
        },
        "revision": revision(),
        "threads": torch.get_num_threads(),
        "kernels": describe(),
        "step": [asdict(row) for row in found],
        "attention": attention,
        "share": {row.what: row.share for row in found},
    }
    given.out.write_text(json.dumps(report, indent=2) + "\n")
    print(f"\nwrote {given.out}")


if __name__ == "__main__":
    main()
