"""`mediaspec eval memory`: what a frame model remembers under each memory, how it drifts, and what that costs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from .errors import plain_errors, set_threads

__all__ = ["memory"]

NAMED = ("memory", "recall_psnr", "recall_ssim", "needle_accuracy", "drift_db", "loss_gap_nats", "memory_tokens",
         "kv_bytes", "seconds_per_frame")  # fmt: skip


def memory(
    world: Annotated[str, typer.Option(help="panoroom, raymaze or vizdoom (needs the extra `worlds`).")] = "panoroom",
    protocol: Annotated[
        str | None, typer.Option(help="palindrome or needle (panoroom), loop or turn_back (raymaze).")
    ] = None,
    memories: Annotated[
        str, typer.Option(help="Of none, window, prepend (full), channel, cross, pack_k2, pack_k4, retrieve.")
    ] = "window,full,pack_k2,retrieve",
    rooms: Annotated[int, typer.Option(help="Held-out rooms.")] = 50,
    steps: Annotated[int, typer.Option(help="Network calls per chunk of frames.")] = 10,
    seed: Annotated[int, typer.Option(help="Of the noise; all memories get the same.")] = 0,
    weights: Annotated[
        Path | None, typer.Option(help="Folder of <world>/<memory>/ models; default: those of the package.")
    ] = None,
    frames: Annotated[int | None, typer.Option(help="Palindrome: frames of the sweep.")] = None,
    nats: Annotated[bool, typer.Option(help="Also the loss gap of the memory bottleneck.")] = True,
    history_noise: Annotated[
        float, typer.Option(help="Level of noise on the past that models are shown, 0 to 0.15 as in training.")
    ] = 0.0,
    keep: Annotated[int | None, typer.Option(help="Newest past frames that models are shown; default: all.")] = None,
    batch: Annotated[int, typer.Option(help="Rooms of equal length that the network makes together.")] = 10,
    out: Annotated[Path, typer.Option(help="Folder of rows and plots; run again to go on.")] = Path("memory-eval"),
    plots: Annotated[
        bool, typer.Option(help="Write pareto.png, by_step.png, and sheet.png with four rooms as they are recalled.")
    ] = True,
    threads: Annotated[int | None, typer.Option(help="CPU threads of torch.")] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Last line of stdout is a JSON list of rows; `rank_agreement`, equal in all, is Spearman's "
            "correlation of recall with minus the loss gap over the list.",
        ),
    ] = False,
) -> None:
    """Measure memories: recall on revisit frames only, needles, drift, nats forgotten, tokens, bytes and seconds."""
    with plain_errors("Run the same command again to go on."):
        from ..eval.worlds import find_world

        name = protocol or next(iter(find_world(world).protocols))
        set_threads(threads)
        rows = evaluate(
            world, name, memories, rooms=rooms, steps=steps, seed=seed, weights=weights, frames=frames, nats=nats,
            out=out, history_noise=history_noise, keep=keep, batch=batch,
        )  # fmt: skip
        from ..eval.memory_plots import memory_table

        typer.echo(memory_table(rows))
        if rows[0]["rank_agreement"] is not None:
            typer.echo(f"\nSpearman of recall with minus the loss gap: {rows[0]['rank_agreement']:.2f}")
        if plots:
            folder = out / world / name
            for path in [
                *write_plots(rows, folder),
                write_sheet(
                    world, name, memories, folder / "sheet.png", rooms=min(rooms, 4), steps=steps, seed=seed,
                    weights=weights, frames=frames, history_noise=history_noise, keep=keep,
                ),
            ]:  # fmt: skip
                typer.echo(f"plot: {path}")
        if as_json:
            typer.echo(json.dumps([{**{key: row[key] for key in NAMED}, **row} for row in rows]))


def evaluate(
    world: str, protocol: str, memories: str, *, rooms: int, steps: int, seed: int, weights: Path | None,
    frames: int | None, nats: bool, out: Path, history_noise: float = 0.0, keep: int | None = None, batch: int = 10,
) -> list[dict[str, Any]]:  # fmt: skip
    """Rows of all memories; arguments as on the command line. They are also written to result.json."""
    from ..eval.memory_run import WEIGHTS, evaluate_memories, parse_memories
    from ..models.frame_history import ALIASES

    if frames is not None and protocol != "palindrome":
        raise ValueError(f"--frames belongs to the palindrome protocol, not to {protocol}; leave it out")

    def told(row: dict[str, Any]) -> None:
        print(f"room {row['room']} {row['memory']}: {row.get('recall_psnr', float('nan')):.2f} dB", file=sys.stderr)

    folder = out / world / protocol
    names = parse_memories(memories)
    result = evaluate_memories(
        world, protocol, names, rooms=rooms, steps=steps, seed=seed,
        root=WEIGHTS if weights is None else weights, out=folder,
        settings={} if frames is None else {"frames": frames}, nats=nats,
        history_noise=history_noise, keep=keep, on_row=told, batch=batch,
    )  # fmt: skip
    # rows bear the names that were asked for
    asked = {ALIASES.get(name.strip(), name.strip()): name.strip() for name in memories.split(",")}
    for row in result:
        row["memory"] = asked[row["memory"]]
    (folder / "result.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    return result


def write_plots(rows: list[dict[str, Any]], folder: Path) -> list[Path]:
    """Pareto plot and quality by AR step."""
    from ..eval.memory_plots import plot_by_step, plot_pareto

    paths = []
    for name, draw in (("pareto.png", plot_pareto), ("by_step.png", plot_by_step)):
        path = folder / name
        path.write_bytes(draw(rows))
        paths.append(path)
    return paths


def write_sheet(
    world: str, protocol: str, memories: str, path: Path, *, rooms: int, steps: int, seed: int, weights: Path | None,
    frames: int | None, history_noise: float, keep: int | None,
) -> Path:  # fmt: skip
    """What each memory recalls of the first rooms, beside the truth; arguments as on the command line."""
    from ..eval.memory_run import WEIGHTS
    from ..eval.memory_sheet import memory_sheet
    from ..models.frame_history import ALIASES

    names = {name.strip(): ALIASES.get(name.strip(), name.strip()) for name in memories.split(",") if name.strip()}
    memory_sheet(
        world, protocol, names, rooms=rooms, steps=steps, seed=seed, root=WEIGHTS if weights is None else weights,
        settings={} if frames is None else {"frames": frames}, history_noise=history_noise, keep=keep,
    ).save(path)  # fmt: skip
    return path
