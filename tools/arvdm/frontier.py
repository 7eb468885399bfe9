"""Forgetting against drift over methods, and along two knobs of one trained model.

    python tools/arvdm/frontier.py --weights arvdm-run --memories window,full,pack_k2,retrieve \\
        --protocols needle,palindrome --noise 0,0.05,0.1,0.15 --keep 8,16,32 --rooms 20 --out frontier
    python tools/arvdm/frontier.py --rows memory-eval frontier --out frontier          (draws what there is)

The second phenomenon of arXiv:2503.10704: what remembers better tends to drift more. Points are the rooms of every
rows.jsonl of `mediaspec eval memory` under --rows and --out; with --weights what is missing is measured first.

forgetting  dB that revisit frames made on real history stay below the codec's own limit; with `--forgetting nats` the
            denoising error on them beyond that of the point that leaves least
drift       real-history minus own-history PSNR of all made frames (`--drift last_gap_db`: of the last step)
noise       level of the noise on everything the model is shown of the past, which it is told
keep        newest past frames that it is shown
steps       network calls per chunk

Intervals are of 95 % over rooms and trainings. Points that no other of their protocol beats in both are the frontier
(star, filled). Writes frontier.png, frontier.md and frontier.json; the last line of stdout is the same JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mediaspec.eval.memory_metrics import bootstrap_mean, spearman
from mediaspec.eval.memory_plots import plot_frontier
from mediaspec.eval.memory_run import evaluate_memories, parse_memories
from mediaspec.eval.report import markdown
from mediaspec.eval.worlds import find_world

FORGETTING = {"db": "forgetting on real history, dB", "nats": "forgetting, nats per revisit frame"}
DRIFT = {
    "drift_db": "drift: real minus own history, dB",
    "last_gap_db": "drift of the last step, dB",
    "slope_db": "drift per AR step, dB",
}
Row = dict[str, Any]


def read_rows(folders: Iterable[Path]) -> dict[str, list[Row]]:
    """Measured rooms under folders: protocol -> groups of one memory under one setting.

    A group holds memory, setting (a name), knob ("", "noise", "keep" or "both"), value (of the knob) and rows. A
    protocol's name tells its own settings and the world where these are not the usual ones.

    Raises:
        ValueError: no rooms, or rooms of one protocol with other steps or noise seeds.
    """
    groups: dict[str, dict[tuple[str, str], Row]] = {}
    common: dict[str, tuple[Any, Path]] = {}
    files = sorted({path.resolve() for folder in folders for path in Path(folder).rglob("rows.jsonl")})
    for path in files:
        lines = []
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(line))
            except ValueError:  # cut short by a kill
                continue
        if not lines or "settings" not in lines[0]:
            continue
        told = dict(lines[0]["settings"])
        world, protocol = told.pop("world"), told.pop("protocol")
        alike = {name: told.pop(name, None) for name in ("steps", "seed")}
        noise, keep = told.pop("history_noise", 0.0) or 0.0, told.pop("keep", None)
        told.pop("nats", None)
        label = " ".join([world, protocol, *(f"{name}={value}" for name, value in sorted(told.items()))])
        if common.setdefault(label, (alike, path))[0] != alike:
            raise ValueError(f"{path} was measured with {alike}, {common[label][1]} with {common[label][0]}; keep one")
        knob = "both" if noise and keep else "noise" if noise else "keep" if keep else ""
        setting = ", ".join(([f"noise {noise:g}"] if noise else []) + ([f"keep {keep}"] if keep else []))
        rows = [row for row in lines[1:] if row.get("real_recall_psnr") is not None]
        newest = {(row["memory"], row["training"]): row["weights"] for row in rows}
        for row in rows:
            if row["weights"] != newest[row["memory"], row["training"]]:
                continue  # of weights that were trained on since
            group = groups.setdefault(label, {}).setdefault(
                (row["memory"], setting),
                {"memory": row["memory"], "setting": setting or "all, clean", "knob": knob,
                 "value": noise or keep or 0, "rows": {}},
            )  # fmt: skip
            group["rows"][row["training"], row["room"]] = row  # a room measured twice counts once
    if not groups:
        raise ValueError(
            "no rows.jsonl with rooms that recall; measure some with --weights, or with `mediaspec eval memory --out`"
        )
    return {label: list(own.values()) for label, own in groups.items()}


def forgetting_of(groups: Sequence[Row], kind: str) -> list[dict[tuple[int, int], float]]:
    """Forgetting of every room of every group: (training, room) -> dB or nats.

    Nats are counted from the group of the same protocol whose mean is least, room by room.
    """
    if kind == "db":
        return [
            {key: row["ceiling_psnr"] - row["real_recall_psnr"] for key, row in group["rows"].items()}
            for group in groups
        ]
    known = [
        {key: row["denoising_nats"] for key, row in group["rows"].items() if row.get("denoising_nats") is not None}
        for group in groups
    ]
    if not any(known):
        return known
    best = min((one for one in known if one), key=lambda one: float(np.mean(list(one.values()))))
    rooms: dict[int, list[float]] = {}
    for (_, room), value in best.items():
        rooms.setdefault(room, []).append(value)
    least = {room: float(np.mean(values)) for room, values in rooms.items()}
    return [{key: value - least[key[1]] for key, value in one.items() if key[1] in least} for one in known]


def _interval(values: dict[tuple[int, int], float]) -> Row:
    one = bootstrap_mean(list(values.values()), [training for training, _ in values])
    return {"mean": one.mean, "interval": [one.low, one.high]}


def frontier_points(groups: Sequence[Row], forgetting: str = "db", drift: str = "drift_db") -> list[Row]:
    """Points of one protocol, those that no other beats in both marked `front`.

    Args:
        groups: of `read_rows`.
        forgetting: of `FORGETTING`; drift: of `DRIFT`.

    Returns:
        memory, setting, knob, value, rooms, trainings, memory_tokens, kv_bytes, forgetting and drift as mean with
        interval, and recall_psnr (own history).
    """
    points = []
    for group, forgot in zip(groups, forgetting_of(groups, forgetting)):
        if not forgot:
            continue
        rows = group["rows"]
        points.append(
            {
                **{name: group[name] for name in ("memory", "setting", "knob", "value")},
                "rooms": len({room for _, room in forgot}),
                "trainings": len({training for training, _ in forgot}),
                "memory_tokens": max(row["memory_tokens"] for row in rows.values()),
                "kv_bytes": max(row["kv_bytes"] for row in rows.values()),
                "forgetting": _interval(forgot),
                "drift": _interval({key: row[drift] for key, row in rows.items()}),
                "recall_psnr": float(np.mean([row["recall_psnr"] for row in rows.values()])),
            }
        )
    places = [(point["forgetting"]["mean"], point["drift"]["mean"]) for point in points]
    for point, place in zip(points, places):
        point["front"] = not any(o != place and o[0] <= place[0] and o[1] <= place[1] for o in places)
    return points


def knob_steps(groups: Sequence[Row], forgetting: str = "db", drift: str = "drift_db") -> list[Row]:
    """What each turn of a knob does to forgetting and drift, paired by room; from clean and all to the harshest.

    Returns:
        memory, knob, old and new setting, and forgetting and drift: the change, its interval and a verdict "rises",
        "falls" or "level" (the interval holds 0).
    """
    forgot = forgetting_of(groups, forgetting)
    steps = []
    for memory in dict.fromkeys(group["memory"] for group in groups):
        for knob in ("noise", "keep"):
            own = [
                (group, values)
                for group, values in zip(groups, forgot)
                if group["memory"] == memory and group["knob"] in ("", knob) and values
            ]
            # clean and all first, then more noise, or fewer frames
            own.sort(key=lambda one: (one[0]["knob"] != "", one[0]["value"] * (-1 if knob == "keep" else 1)))
            for (before, a), (after, b) in zip(own, own[1:]):
                shared = [key for key in b if key in a]
                if not shared:
                    continue
                step: Row = {"memory": memory, "knob": knob, "old": before["setting"], "new": after["setting"]}
                for name, change in (
                    ("forgetting", {key: b[key] - a[key] for key in shared}),
                    ("drift", {key: after["rows"][key][drift] - before["rows"][key][drift] for key in shared}),
                ):
                    one = _interval(change)
                    low, high = one["interval"]
                    step[name] = {**one, "verdict": "rises" if low > 0 else "falls" if high < 0 else "level"}
                steps.append(step)
    return steps


def agreement(points: Sequence[Row]) -> float | None:
    """Spearman's correlation of forgetting with drift over methods, knobs at rest; -1 is a pure trade-off."""
    plain = [point for point in points if not point["knob"]]
    return spearman([one["forgetting"]["mean"] for one in plain], [one["drift"]["mean"] for one in plain])


def frontier_table(points: Sequence[Row], forgetting: str, drift: str) -> str:
    """Points as markdown, least forgetting first; those on the frontier bear a star."""

    def cell(one: Row) -> str:
        return f"{one['mean']:.2f} ({one['interval'][0]:.2f} - {one['interval'][1]:.2f})"

    header = ["memory", "shown", FORGETTING[forgetting], DRIFT[drift], "recall dB", "tokens", "KV kB", "rooms"]
    ordered = sorted(points, key=lambda point: point["forgetting"]["mean"])
    return markdown(
        header,
        [
            [f"`{p['memory']}`" + (" *" if p["front"] else ""), p["setting"], cell(p["forgetting"]), cell(p["drift"]),
             f"{p['recall_psnr']:.2f}", str(p["memory_tokens"]), f"{p['kv_bytes'] / 1024:.0f}", str(p["rooms"])]
            for p in ordered
        ],
    )  # fmt: skip


def say_step(step: Row) -> str:
    parts = [
        f"{name} {step[name]['verdict']} ({step[name]['mean']:+.3g}, {step[name]['interval'][0]:+.3g} to "
        f"{step[name]['interval'][1]:+.3g})"
        for name in ("forgetting", "drift")
    ]
    return f"{step['memory']}, {step['old']} -> {step['new']}: {', '.join(parts)}"


def measure(args: argparse.Namespace) -> None:
    """Evaluates every memory under every setting of the knobs; rooms that are there are not measured again."""
    memories = parse_memories(args.memories)
    noises = [float(one) for one in args.noise.split(",")]
    keeps = [int(one) for one in args.keep.split(",")] if args.keep else []
    settings = [(noise, None) for noise in noises] + [(0.0, keep) for keep in keeps]
    protocols = args.protocols.split(",") if args.protocols else list(find_world(args.world).protocols)
    for protocol in protocols:
        for noise, keep in settings:
            name = f"noise-{noise:g}" if noise else f"keep-{keep}" if keep else "plain"
            print(f"{protocol}, {name}", file=sys.stderr, flush=True)
            evaluate_memories(
                args.world, protocol, memories, rooms=args.rooms, steps=args.steps, seed=args.seed, root=args.weights,
                out=args.out / args.world / protocol / name, nats=not args.no_nats, history_noise=noise, keep=keep,
                batch=args.batch,
            )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, nargs="*", default=[], help="folders with rows.jsonl, at any depth")
    parser.add_argument("--out", type=Path, default=Path("frontier"))
    parser.add_argument("--forgetting", choices=list(FORGETTING), default="db")
    parser.add_argument("--drift", choices=list(DRIFT), default="drift_db")
    parser.add_argument("--weights", type=Path, help="measure first, with the models of this folder")
    parser.add_argument("--world", default="panoroom")
    parser.add_argument("--protocols", help="default: all of the world's")
    parser.add_argument("--memories", default="window,full,pack_k2,retrieve")
    parser.add_argument("--noise", default="0,0.05,0.1,0.15", help="levels on the history; training knows 0 to 0.15")
    parser.add_argument("--keep", default="8,16,32", help="frames kept, empty for none of these")
    parser.add_argument("--rooms", type=int, default=20)
    parser.add_argument("--batch", type=int, default=10, help="rooms that the network makes together")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-nats", action="store_true", help="do not measure denoising errors")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    try:
        if args.weights is not None:
            measure(args)
        found = read_rows([*args.rows, args.out])
        result: Row = {"forgetting": args.forgetting, "drift": args.drift, "protocols": {}}
        text = []
        for label, groups in found.items():
            points = frontier_points(groups, args.forgetting, args.drift)
            if not points:
                raise ValueError(f"{label} was measured without nats; write --forgetting db")
            steps, rank = knob_steps(groups, args.forgetting, args.drift), agreement(points)
            result["protocols"][label] = {"points": points, "knob_steps": steps, "spearman": rank}
            text += [f"## {label}", "", frontier_table(points, args.forgetting, args.drift), ""]
            if rank is not None:
                text += [f"Spearman of forgetting with drift over memories: {rank:.2f} (-1 is a pure trade-off)", ""]
            text += [*(f"- {say_step(step)}" for step in steps), ""]
    except ValueError as error:
        parser.error(str(error))
    args.out.mkdir(parents=True, exist_ok=True)
    print("\n".join(text))
    (args.out / "frontier.md").write_text("\n".join(text), encoding="utf-8")
    (args.out / "frontier.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    try:
        drawn = {label: one["points"] for label, one in result["protocols"].items()}
        picture = plot_frontier(drawn, FORGETTING[args.forgetting], DRIFT[args.drift])
        (args.out / "frontier.png").write_bytes(picture)
        print(f"plot: {args.out / 'frontier.png'}")
    except ImportError as error:  # matplotlib: the numbers stand without it
        print(f"no plot: {error}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
