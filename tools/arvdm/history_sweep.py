"""More past frames, less forgetting? Trained models are shown the last h frames of real history and asked to recall.

    python tools/arvdm/history_sweep.py --weights arvdm-run --memories prepend,retrieve,pack_k2,window \\
        --protocols needle,palindrome --rooms 50 --out history-sweep

The first phenomenon of arXiv:2503.10704: forgetting falls monotonically with the number of past frames. Every chunk is
made on real history, so that drift has no part in it, and only chunks that hold revisit frames are made. Measured on
revisit frames: recall PSNR, needle accuracy, and the denoising error in nats, whose differences are the nats that the
longer history is worth. Noise is the same for all h, so that steps from one h to the next are paired by room.

Rooms are kept in <out>/<world>/<protocol>/sweep.jsonl; run the same command again to go on, or to add rooms, memories
or trainings. Writes history_sweep.png (bands are 95 % intervals over rooms and trainings) and history_sweep.json; the
last line of stdout is the same JSON. A step from one h to the next counts where its interval leaves 0 out; a curve is
monotone within the intervals where no such step makes it worse.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mediaspec.eval.memory_metrics import bootstrap_mean, needle_accuracy, psnr_rows
from mediaspec.eval.memory_plots import SWEEP_METRICS, plot_history_sweep
from mediaspec.eval.memory_rollout import batch_history, chunk_nats, group_rooms, make_chunk, part, room_noise
from mediaspec.eval.memory_run import WEIGHTS, MemoryRows, Trained, find_trained, parse_memories
from mediaspec.eval.report import markdown
from mediaspec.eval.worlds import TEST_SEED, Episode, find_world, make_episode, recall_frames
from mediaspec.models.frame_cache import FrameCache
from mediaspec.models.frame_dit import History

HISTORIES = (1, 2, 4, 8, 16, 32, 64, 0)
"""Frames that are shown; 0 is all."""

Row = dict[str, Any]


def name_history(frames: int) -> str:
    return str(frames) if frames else "all"


def sweep_room(
    trained: Trained, episode: Episode, histories: Sequence[int] = HISTORIES, *, steps: int = 10, seed: int = 0,
    points: int = 10,
) -> Row | None:  # fmt: skip
    """Recall of one room under every length of history, see `sweep_rooms`; None where nothing is asked."""
    rows = sweep_rooms(trained, [episode], histories, steps=steps, seed=seed, points=points)
    return rows[0] if rows else None


def sweep_rooms(
    trained: Trained, episodes: Sequence[Episode], histories: Sequence[int] = HISTORIES, *, steps: int = 10,
    seed: int = 0, points: int = 10,
) -> list[Row]:  # fmt: skip
    """Recall of several rooms at once under every length of history.

    Args:
        trained: the model.
        episodes: walks of equal length and context, see `group_rooms`.
        histories: frames shown, 0 for all.
        steps: network calls per chunk.
        seed: of the noise.
        points: noise levels of the denoising error, 0 leaves it out.

    Returns:
        For every room a row with a list per metric, in the order of `histories`; a metric that a room does not have is
        left out. Rooms where nothing is asked have no row.
    """
    model, codec = trained.model, trained.codec
    reach = model.config.window + model.config.num_frames
    episodes = [episode for episode in episodes if recall_frames(episode, reach).any()]
    if not episodes:
        return []
    asked = np.stack([recall_frames(episode, reach) for episode in episodes])
    truth, w = batch_history(codec, episodes), model.config.num_frames
    made = [{h: episode.frames.copy() for h in histories} for episode in episodes]
    nats: list[dict[int, list[float]]] = [{h: [] for h in histories} for _ in episodes]
    tokens: list[dict[int, int]] = [{} for _ in episodes]
    total = asked.shape[1]
    for start in range(episodes[0].context, total, w):
        stop = min(start + w, total)
        rooms = np.flatnonzero(asked[:, start:stop].any(1)).tolist()
        if not rooms:
            continue
        own = History(*(value[rooms] for value in vars(truth).values()))
        index = torch.arange(start, start + w).clamp(max=total - 1)
        clean, poses, actions = own.latents[:, index], own.poses[:, index], own.actions[:, index]
        found: dict[int, tuple[list[np.ndarray], np.ndarray, int]] = {}
        for h in histories:
            shown = min(h or start, start)
            if shown not in found:
                cache = FrameCache(model)
                cache.write(part(own, start - shown, start))
                memory = cache.read(poses)
                noise = [room_noise(seed, episodes[room], start) for room in rooms]
                frames = make_chunk(model, memory, poses, actions, noise, steps)[:, : stop - start]
                noise = [room_noise(seed, episodes[room], start) for room in rooms]
                lost = np.zeros(actions.shape)
                if points:
                    lost = chunk_nats(model, memory, clean, poses, actions, noise, points)
                found[shown] = [codec.decode(one).numpy() for one in frames], lost[:, : stop - start], memory.tokens
            pictures, lost, count = found[shown]
            for place, room in enumerate(rooms):
                made[room][h][start:stop] = pictures[place]
                nats[room][h] += lost[place][asked[room, start:stop]].tolist()
                tokens[room][h] = count
    rows = []
    for room, episode in enumerate(episodes):
        at = np.flatnonzero(asked[room])
        row: Row = {
            "memory": trained.memory, "training": trained.seed, "weights": trained.digest, "room": episode.seed,
            "recall_frames": len(at), "memory_tokens": [tokens[room][h] for h in histories],
            "recall_psnr": [float(psnr_rows(made[room][h][at], episode.frames[at]).mean()) for h in histories],
        }  # fmt: skip
        if points:
            row["denoising_nats"] = [float(np.mean(nats[room][h])) for h in histories]
        shares = [needle_accuracy(made[room][h], episode.frames, at.tolist(), episode.needles) for h in histories]
        if None not in shares:
            row["needle_accuracy"] = shares
        rows.append(row)
    return rows


def _interval(values: Sequence[float], rows: Sequence[Row]) -> dict[str, Any]:
    one = bootstrap_mean(values, [row["training"] for row in rows])
    return {"mean": one.mean, "interval": [one.low, one.high]}


def summarise_sweep(rows: Sequence[Row], histories: Sequence[int]) -> list[Row]:
    """One line per memory and length of history, with the step from the length before it.

    Args:
        rows: of one protocol, from `sweep_room`.
        histories: as they were measured.

    Returns:
        Lines of memory, history (0 for all), rooms, trainings, memory_tokens, and per metric its mean, its interval
        over rooms and trainings, and `step`: how much better (positive) it is than at the length before, paired by
        room, with an interval and a verdict "better", "worse" or "level".
    """
    lines = []
    for memory in dict.fromkeys(row["memory"] for row in rows):
        own = [row for row in rows if row["memory"] == memory]
        for place, h in enumerate(histories):
            line: Row = {
                "memory": memory, "history": h, "rooms": len({row["room"] for row in own}),
                "trainings": len({row["training"] for row in own}),
                "memory_tokens": max(row["memory_tokens"][place] for row in own),
            }  # fmt: skip
            for metric, (_, sign) in SWEEP_METRICS.items():
                some = [row for row in own if metric in row]
                if not some:
                    continue
                line[metric] = _interval([row[metric][place] for row in some], some)
                if place:
                    gains = [sign * (row[metric][place] - row[metric][place - 1]) for row in some]
                    step = _interval(gains, some)
                    low, high = step["interval"]
                    verdict = "better" if low > 0 else "worse" if high < 0 else "level"
                    line[metric]["step"] = {**step, "verdict": verdict}
            lines.append(line)
    return lines


def verdicts(lines: Sequence[Row]) -> list[str]:
    """A sentence per memory and metric: whether more history never makes it worse, and where it does."""
    said = []
    for memory in dict.fromkeys(line["memory"] for line in lines):
        own = [line for line in lines if line["memory"] == memory]
        for metric, (title, _) in SWEEP_METRICS.items():
            if any(metric not in line for line in own):
                continue
            falls, dips, rises = [], [], 0
            for before, line in zip(own, own[1:]):
                step = line[metric]["step"]
                at = f"{name_history(before['history'])} -> {name_history(line['history'])}"
                text = f"{at} ({step['mean']:+.3g}, {step['interval'][0]:+.3g} to {step['interval'][1]:+.3g})"
                rises += step["verdict"] == "better"
                if step["verdict"] == "worse":
                    falls.append(text)
                elif step["mean"] < -1e-9:
                    dips.append(text)
            steps = len(own) - 1
            if falls:
                end = f"NOT monotone, worse at {'; '.join(falls)}"
            else:
                end = f"monotone within the intervals, better in {rises} of {steps} steps"
            if dips:
                end += f"; dips inside the interval at {'; '.join(dips)}"
            said.append(f"{memory}, {title}: {end}")
    return said


def sweep_table(lines: Sequence[Row]) -> str:
    """Lines of one protocol as markdown: histories down, memories and metrics across."""
    header, cells = ["memory", "history", "tokens", *(title for title, _ in SWEEP_METRICS.values())], []
    for line in lines:
        row = [f"`{line['memory']}`", name_history(line["history"]), str(line["memory_tokens"])]
        for metric in SWEEP_METRICS:
            one = line.get(metric)
            row.append(
                f"{one['mean']:.4g} ({one['interval'][0]:.4g} - {one['interval'][1]:.4g})" if one is not None else "-"
            )
        cells.append(row)
    return markdown(header, cells)


def sweep(
    world: str, protocol: str, memories: Sequence[str], *, rooms: int, steps: int = 10, seed: int = 0,
    points: int = 10, histories: Sequence[int] = HISTORIES, root: Path = WEIGHTS, out: Path | None = None,
    batch: int = 10,
) -> list[Row]:  # fmt: skip
    """Rows of all rooms; those that <out>/<world>/<protocol>/sweep.jsonl has are not measured again.

    `batch` rooms of equal length and context go through the network together, which changes rows only by rounding.
    """
    trained = [one for name in memories for one in find_trained(world, name, root)]
    store = MemoryRows(
        None if out is None else out / world / protocol / "sweep.jsonl",
        {"world": world, "protocol": protocol, "steps": steps, "seed": seed, "points": points,
         "histories": list(histories)},
    )  # fmt: skip
    numbers = range(TEST_SEED, TEST_SEED + rooms)
    missing = (
        make_episode(world, protocol, room)
        for room in numbers
        if any(store.find(one, room) is None for one in trained)
    )
    for group in group_rooms(missing, batch):
        for one in trained:
            left = [episode for episode in group if store.find(one, episode.seed) is None]
            for row in sweep_rooms(one, left, histories, steps=steps, seed=seed, points=points):
                store.add(row)
                print(f"{protocol} room {row['room']} {one.memory}-{one.seed}: {row['recall_psnr'][-1]:.2f} dB with "
                      "all", file=sys.stderr, flush=True)  # fmt: skip
    found = (store.find(one, room) for room in numbers for one in trained)
    rows = [row for row in found if row is not None]
    if not rows:
        raise ValueError(f"no room of {world} {protocol} asks for anything that was seen before; give more rooms")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", default="panoroom")
    parser.add_argument("--protocols", help="default: all of the world's")
    parser.add_argument("--memories", default="prepend,retrieve,pack_k2,window")
    parser.add_argument("--rooms", type=int, default=50)
    parser.add_argument("--batch", type=int, default=10, help="rooms that the network makes together")
    parser.add_argument("--steps", type=int, default=10, help="network calls per chunk")
    parser.add_argument("--points", type=int, default=10, help="noise levels of the denoising error, 0 for none")
    parser.add_argument("--histories", default=",".join(map(str, HISTORIES)), help="frames shown, 0 for all, rising")
    parser.add_argument("--seed", type=int, default=0, help="of the noise")
    parser.add_argument("--weights", type=Path, default=WEIGHTS)
    parser.add_argument("--out", type=Path, default=Path("history-sweep"))
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    histories = [int(h) for h in args.histories.split(",")]
    rising = [h or math.inf for h in histories]
    if len(histories) < 2 or min(histories) < 0 or any(a >= b for a, b in zip(rising, rising[1:])):
        parser.error(f"--histories {args.histories}; give rising numbers of frames, 0 (all) last, as in 1,4,16,0")
    try:
        protocols = args.protocols.split(",") if args.protocols else list(find_world(args.world).protocols)
        memories = parse_memories(args.memories)
        result: Row = {"world": args.world, "seed": args.seed, "steps": args.steps, "protocols": {}}
        for protocol in protocols:
            rows = sweep(
                args.world, protocol, memories, rooms=args.rooms, steps=args.steps, seed=args.seed, points=args.points,
                histories=histories, root=args.weights, out=args.out, batch=args.batch,
            )  # fmt: skip
            lines = summarise_sweep(rows, histories)
            result["protocols"][protocol] = {"rows": lines, "verdicts": verdicts(lines)}
            print(f"\n{args.world}, {protocol}\n\n{sweep_table(lines)}\n")
            print("\n".join(result["protocols"][protocol]["verdicts"]))
    except ValueError as error:
        parser.error(str(error))
    folder = args.out / args.world
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "history_sweep.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    try:
        picture = plot_history_sweep({name: one["rows"] for name, one in result["protocols"].items()})
        (folder / "history_sweep.png").write_bytes(picture)
        print(f"\nplot: {folder / 'history_sweep.png'}")
    except ImportError as error:  # matplotlib: the numbers stand without it
        print(f"\nno plot: {error}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
