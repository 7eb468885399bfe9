"""Seconds per frame of memories against each other, by length of history.

    python tools/arvdm/bench_memory.py                              untrained models: times depend on sizes alone
    python tools/arvdm/bench_memory.py --weights arvdm-run          trained ones

A history is written once, a random walk of a PanoRoom with random latents. Timed is what an AR step of 4 frames costs
a rollout: reading the memory, --steps network calls, writing the new frames (an untimed restore puts the cache back
before each). Memories and lengths take turns, in another order in every repeat; ratios to the windowed model are taken
within a repeat, and their median over repeats is reported, with quartiles. One thread unless --threads says otherwise.

Prints a markdown table, the time at the longest history over that at `--flat-from` frames, and as the last line JSON.
Measure on an idle machine: other jobs move single repeats, not the order.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from train_frame_dit import Plan, new_model

from mediaspec.eval.memory_metrics import kv_bytes
from mediaspec.eval.memory_rollout import make_chunk, part
from mediaspec.eval.memory_run import find_trained, parse_memories
from mediaspec.eval.report import markdown
from mediaspec.models.frame_cache import FrameCache
from mediaspec.models.frame_dit import FrameDiT, History
from mediaspec.models.patch_codec import PatchCodec

Row = dict[str, Any]


def random_walk(model: FrameDiT, frames: int, seed: int = 0) -> History:
    """A turning camera in a room of 1024 columns, and random latents."""
    c, rng = model.config, np.random.default_rng(seed)
    actions: list[int] = []
    while len(actions) < frames:
        actions += [int(rng.integers(-1, 2))] * int(rng.integers(2, 14))
    actions = actions[:frames]
    yaws = torch.from_numpy(8 * np.cumsum(actions) % 1024).float()
    poses = torch.stack([yaws, torch.full((frames,), 1024.0)], dim=-1)[None]
    latents = torch.randn(1, frames, c.channels, c.grid, c.grid, generator=torch.Generator().manual_seed(seed))
    return History(latents, poses, torch.tensor(actions)[None] + 1, torch.zeros(1, frames))


class Step:
    """One memory at one length of history, ready to be timed.

    Args:
        model: in evaluation mode.
        frames: of history.
        calls: of the network per chunk.
    """

    def __init__(self, model: FrameDiT, frames: int, calls: int) -> None:
        w = model.config.num_frames
        walk = random_walk(model, frames + w)
        self.model, self.calls, self.next = model, calls, part(walk, frames, frames + w)
        self.cache = FrameCache(model)
        self.cache.write(part(walk, 0, frames))
        self.state = self.cache.state_dict()
        self.kept_bytes = self.cache.nbytes
        read = self.cache.read(self.next.poses)
        self.tokens, self.attended = read.tokens, read.attended

    def seconds(self) -> float:
        """Per frame, of one AR step from the same history each time."""
        self.cache.load_state_dict(self.state)
        noise = torch.Generator().manual_seed(0)
        begin = time.perf_counter()
        memory = self.cache.read(self.next.poses)
        frames = make_chunk(self.model, memory, self.next.poses, self.next.actions, noise, self.calls)
        self.cache.write(History(frames, self.next.poses, self.next.actions, self.next.levels))
        return (time.perf_counter() - begin) / self.model.config.num_frames


def bench(
    models: Mapping[str, FrameDiT], histories: Sequence[int], *, calls: int = 10, repeats: int = 7,
    baseline: str = "window",
) -> list[Row]:  # fmt: skip
    """A row per memory and length of history.

    Args:
        models: name -> model in evaluation mode.
        histories: frames.
        calls: of the network per AR step; repeats: of every measurement.
        baseline: name of the model that ratios are taken to, at the same length.

    Returns:
        memory, history, milliseconds_per_frame (median), ratio (median, None without the baseline), ratio_quartiles,
        memory_tokens, kv_bytes and kept_bytes.

    Raises:
        ValueError: no models, histories or repeats.
    """
    if not models or not histories or min(histories) < 1 or repeats < 1 or calls < 1:
        raise ValueError(
            f"{len(models)} models, histories {list(histories)}, {calls} calls, {repeats} repeats; give at least one "
            "of each, and histories of at least one frame"
        )
    steps = {(name, h): Step(model, h, calls) for h in histories for name, model in models.items()}
    taken: dict[tuple[str, int], list[float]] = {key: [] for key in steps}
    for step in steps.values():  # allocations and kernels' first use
        step.seconds()
    names = list(models)
    for repeat in range(repeats):
        turn = repeat % len(names)
        for h in histories:
            for name in names[turn:] + names[:turn]:
                taken[name, h].append(steps[name, h].seconds())
    rows = []
    for (name, h), step in steps.items():
        c, seconds = step.model.config, taken[name, h]
        ratios = [a / b for a, b in zip(seconds, taken[baseline, h])] if baseline in models else None
        rows.append(
            {
                "memory": name, "history": h, "milliseconds_per_frame": 1e3 * statistics.median(seconds),
                "ratio": statistics.median(ratios) if ratios else None,
                "ratio_quartiles": np.quantile(ratios, [0.25, 0.75]).tolist() if ratios else None,
                "memory_tokens": step.tokens,
                "kv_bytes": kv_bytes(step.attended, c.hidden_size, c.num_hidden_layers),
                "kept_bytes": step.kept_bytes, "seconds": seconds,
            }
        )  # fmt: skip
    return rows


def growth(rows: Sequence[Row], start: int, stop: int) -> dict[str, float]:
    """Time at `stop` frames of history over that at `start`: median over repeats of the ratios, by memory."""
    at = {(row["memory"], row["history"]): row["seconds"] for row in rows}
    return {
        name: statistics.median(b / a for a, b in zip(at[name, start], at[name, stop]))
        for name in dict.fromkeys(row["memory"] for row in rows)
        if (name, start) in at and (name, stop) in at
    }


def bench_table(rows: Sequence[Row], full: str = "prepend") -> str:
    """Rows as markdown; `of all tokens` is the share of the tokens that the uncompressed memory reads of the same."""
    every = {row["history"]: row["memory_tokens"] for row in rows if row["memory"] == full}
    cells = []
    for row in rows:
        ratio = "-"
        if row["ratio"] is not None:
            ratio = "{:.3f} ({:.3f} - {:.3f})".format(row["ratio"], *row["ratio_quartiles"])
        whole, mine = every.get(row["history"], 0), row["memory_tokens"]
        share = f"1/{whole / mine:.1f}" if whole and mine else "-"
        cells.append(
            [f"`{row['memory']}`", str(row["history"]), f"{row['milliseconds_per_frame']:.2f}", ratio,
             str(row["memory_tokens"]), share, f"{row['kv_bytes'] / 1024:.0f}", f"{row['kept_bytes'] / 1024:.0f}"]
        )  # fmt: skip
    header = ["memory", "history", "ms/frame", "to window", "tokens", "of all tokens", "KV read kB", "kept kB"]
    return markdown(header, cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memories", default="window,pack_k2,pack_k4,retrieve,channel,cross,prepend")
    parser.add_argument("--histories", default="28,112,224,448")
    parser.add_argument("--steps", type=int, default=10, help="network calls per AR step")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--weights", type=Path, help="folder of trained panoroom models")
    parser.add_argument("--hidden-size", type=int, default=128, help="of untrained models")
    parser.add_argument("--layers", type=int, default=4, help="of untrained models")
    parser.add_argument("--flat-from", type=int, default=112)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="also write the JSON here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    try:
        names, histories = parse_memories(args.memories), [int(h) for h in args.histories.split(",")]
        models = {}
        for name in names:
            if args.weights is None:
                plan = Plan("panoroom", name, hidden_size=args.hidden_size, layers=args.layers)
                models[name] = new_model(plan, PatchCodec()).eval()
            else:
                models[name] = find_trained("panoroom", name, args.weights)[0].model
        rows = bench(models, histories, calls=args.steps, repeats=args.repeats)
    except ValueError as error:
        parser.error(str(error))
    result: Row = {
        "threads": args.threads, "calls": args.steps, "repeats": args.repeats, "trained": args.weights is not None,
        "rows": rows,
    }  # fmt: skip
    print(bench_table(rows))
    start, stop = args.flat_from, max(histories)
    if start in histories and start < stop:
        result["growth"] = {"from": start, "to": stop, "ratio": growth(rows, start, stop)}
        found = ", ".join(f"{name} {ratio:.3f}" for name, ratio in result["growth"]["ratio"].items())
        print(f"\ntime at {stop} frames over that at {start}: {found}")
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
