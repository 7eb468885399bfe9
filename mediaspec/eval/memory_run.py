"""`mediaspec eval memory`: what each memory of a frame model recalls, how it drifts, what it costs; over many rooms.

    rows = evaluate_memories("panoroom", "needle", ["window", "pack_k2", "retrieve"], rooms=50)

Weights are looked for in <root>/<world>/<memory>/ (config.json, model.safetensors, codec.safetensors); further
trainings of the same memory with other seeds lie beside it as <memory>-1, <memory>-2 and so on, and are averaged with
intervals over seeds and rooms.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..models.frame_dit import FrameDiT
from ..models.frame_history import ALIASES, MEMORIES
from ..models.patch_codec import PatchCodec
from .memory_metrics import (
    bootstrap_mean,
    history_drift,
    needle_accuracy,
    psnr_rows,
    recall_scores,
    spearman,
    wall_colour_accuracy,
)
from .memory_rollout import Rollout, denoising_nats_batch, group_rooms, roll_out_batch, time_frames
from .worlds import TEST_SEED, Episode, find_world, make_episode, recall_frames

__all__ = [
    "MemoryRows", "Trained", "evaluate_memories", "evaluate_room", "evaluate_rooms", "find_trained", "parse_memories",
    "rank_agreement", "summarise",
]  # fmt: skip

WEIGHTS = Path(__file__).parents[1] / "models" / "frame_worlds"
METRICS = ("recall_psnr", "recall_ssim", "recall_last_psnr", "real_recall_psnr", "ceiling_psnr", "needle_accuracy",
           "wall_accuracy", "drift_db", "last_gap_db", "slope_db", "first_last_db", "own_psnr", "real_psnr",
           "denoising_nats", "memory_gain_nats")  # fmt: skip


@dataclass(frozen=True)
class Trained:
    """Args: memory, its name; seed, of the training; model, in evaluation mode; codec; digest, of its files."""

    memory: str
    seed: int
    model: FrameDiT
    codec: PatchCodec
    digest: str


def parse_memories(text: str) -> list[str]:
    """Names of a comma-separated list; "full" is "prepend".

    Raises:
        ValueError: an unknown name, one named twice, or none.
    """
    names = [ALIASES.get(name.strip(), name.strip()) for name in text.split(",") if name.strip()]
    for name in names:
        if name not in MEMORIES:
            near = difflib.get_close_matches(name, MEMORIES, n=1, cutoff=0.0)[0]
            raise ValueError(f"memory {name!r} is none of {', '.join(MEMORIES)}; write {near!r}")
    if not names or len(set(names)) < len(names):
        raise ValueError(f"--memories {text!r}; give different names, as in window,full,pack_k2")
    return names


def find_trained(world: str, memory: str, root: str | Path = WEIGHTS) -> list[Trained]:
    """All trainings of a memory.

    Raises:
        ValueError: there is none; the message says how to train one, and what the world needs for that.
    """
    install = find_world(world).install
    base = Path(root) / world
    folders = {0: base / memory}
    for path in sorted(base.glob(f"{memory}-*")):
        ending = path.name.removeprefix(f"{memory}-")
        if ending.isdecimal():
            folders[int(ending)] = path
    found = []
    for seed, folder in sorted(folders.items()):
        if not (folder / "config.json").is_file():
            continue
        model = FrameDiT.from_pretrained(folder, dtype=torch.float32).eval()
        codec = PatchCodec.load(folder / "codec.safetensors")
        files = ("config.json", "model.safetensors", "codec.safetensors")
        digest = hashlib.sha256(b"".join((folder / name).read_bytes() for name in files)).hexdigest()[:16]
        found.append(Trained(memory, seed, model, codec, digest))
    if not found:
        before = "" if install is None else f"the world {world} is not installed, write: {install}. There is also "
        raise ValueError(
            f"{before}no trained model in {base / memory}; train it with `python tools/arvdm/train_frame_dit.py "
            f"--world {world} --memory {memory} --minutes 60 --out arvdm-run` and give --weights arvdm-run, or "
            f"bring it in with `python tools/arvdm/ship_models.py --run arvdm-run --world {world} --memories {memory}`"
        )
    return found


def evaluate_room(
    trained: Trained, episode: Episode, *, steps: int, seed: int = 0, nats: bool = True, history_noise: float = 0.0,
    keep: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Everything measured of one memory in one room, see `evaluate_rooms`."""
    return evaluate_rooms(
        trained, [episode], steps=steps, seed=seed, nats=nats, history_noise=history_noise, keep=keep
    )[0]  # fmt: skip


def evaluate_rooms(
    trained: Trained, episodes: Sequence[Episode], *, steps: int, seed: int = 0, nats: bool = True,
    history_noise: float = 0.0, keep: int | None = None, seconds_per_frame: float | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Everything measured of one memory in several rooms at once, a row per room.

    Frames count as recall where what they show was last seen more than window + chunk frames ago. `recall_psnr` is
    theirs on the model's own history, `real_recall_psnr` on the real one, where drift has no part in it, and
    `ceiling_psnr` what the codec loses of the truth.

    Args:
        trained: the memory.
        episodes: of equal length and context, see `group_rooms`; all go through the network as one batch.
        steps, seed, history_noise, keep: as of `roll_out`.
        nats: also the loss gap.
        seconds_per_frame: for the rows, as `time_frames` measures it: of AR steps of one row, never of a batch. None
            measures it now on the first room, for which a few of its chunks are made once more; a room that is
            alone needs no such extra.
    """
    model, codec = trained.model, trained.codec
    shown: dict[str, Any] = {"seed": seed, "history_noise": history_noise, "keep": keep}
    made = roll_out_batch(model, codec, episodes, steps=steps, **shown)
    if seconds_per_frame is None:
        seconds_per_frame = made[0].seconds_per_frame
    if seconds_per_frame is None:
        seconds_per_frame = time_frames(model, codec, episodes[0], steps=steps, **shown)
    asked = [recall_frames(episode, model.config.window + model.config.num_frames) for episode in episodes]
    rows = [
        {**_score_room(trained, *one), "seconds_per_frame": seconds_per_frame} for one in zip(episodes, made, asked)
    ]
    at = [place for place, one in enumerate(asked) if one.any()] if nats else []
    if at:
        chosen = [episodes[place] for place in at], [asked[place] for place in at]
        known = denoising_nats_batch(model, codec, *chosen, **shown)
        alone = denoising_nats_batch(model, codec, *chosen, seed=seed, with_memory=False)
        for place, left, blind in zip(at, known, alone):
            rows[place] |= {"denoising_nats": left, "memory_gain_nats": blind - left}
    return rows


def _score_room(trained: Trained, episode: Episode, made: Rollout, asked: np.ndarray) -> dict[str, Any]:
    """What the pictures of one rollout are worth; asked [N] bool are the recall frames."""
    model, codec = trained.model, trained.codec
    row: dict[str, Any] = {
        "memory": trained.memory, "training": trained.seed, "weights": trained.digest, "room": episode.seed,
        "recall_frames": int(asked.sum()),
        "memory_tokens": made.memory_tokens, "attended_tokens": made.attended_tokens, "kv_bytes": made.read_bytes,
        "kept_bytes": made.kept_bytes,
    }  # fmt: skip
    new = slice(episode.context, None)
    own, real = psnr_rows(made.own[new], episode.frames[new]), psnr_rows(made.real[new], episode.frames[new])
    drift = history_drift(own.tolist(), real.tolist(), model.config.num_frames)
    row |= {
        "drift_db": drift.gap_db, "last_gap_db": drift.last_gap_db, "slope_db": drift.slope_db,
        "first_last_db": drift.first_last_db, "own_psnr": float(own.mean()), "real_psnr": float(real.mean()),
        "own_by_step": drift.own_db,
        "real_by_step": drift.real_db,
    }  # fmt: skip
    scores = recall_scores(made.own, episode.frames, asked)
    if scores is None:
        return row
    row |= {"recall_psnr": scores["psnr"], "recall_ssim": scores["ssim"], "recall_last_psnr": scores["last_psnr"]}
    at = np.flatnonzero(asked)
    row["real_recall_psnr"] = float(psnr_rows(made.real[at], episode.frames[at]).mean())
    coded = codec.decode(codec.encode(torch.from_numpy(episode.frames[at]))).numpy()
    row["ceiling_psnr"] = float(psnr_rows(coded, episode.frames[at]).mean())
    share = needle_accuracy(made.own, episode.frames, at.tolist(), episode.needles)
    if share is not None:
        row["needle_accuracy"] = share
    if episode.wall_colours is not None:
        row["wall_accuracy"] = wall_colour_accuracy(
            made.own[at], episode.wall_colours[at], episode.extras["palette"], episode.extras["light"][at]
        )
    return row


class MemoryRows:
    """Measured rooms in a file, one JSON line each, so that a stopped run goes on.

    Args:
        path: of the file; None keeps rows in memory only.
        settings: what must be equal for rows to be comparable.

    Raises:
        ValueError: the file was begun with other settings.
    """

    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        self.path, self.rows = path, []
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = []
        if not path.exists():
            path.touch()
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                lines.append(json.loads(line))
            except ValueError:  # cut short by a kill; that room is measured again
                continue
        begun = lines[0].get("settings") if lines else None
        # new, killed before the first line was whole, or stopped by an error before anything was measured
        if not lines or (len(lines) == 1 and begun is not None and begun != settings):
            path.write_text("", encoding="utf-8")
            self._write({"settings": settings})
            return
        if begun != settings:
            raise ValueError(f"{path} was begun with {begun}, now {settings}; give another --out or the same settings")
        self.rows = lines[1:]
        if not path.read_text(encoding="utf-8").endswith("\n"):
            with path.open("a", encoding="utf-8") as file:
                file.write("\n")

    def find(self, trained: Trained, room: int) -> dict[str, Any] | None:
        """The row of a training in a room; None where it was not measured with these very weights."""
        key = (trained.memory, trained.seed, trained.digest, room)
        names = ("memory", "training", "weights", "room")
        return next((row for row in self.rows if tuple(row.get(name) for name in names) == key), None)

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if self.path is not None:
            self._write(row)

    def _write(self, row: dict[str, Any]) -> None:
        assert self.path is not None
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())


def evaluate_memories(
    world: str, protocol: str, memories: Sequence[str], *, rooms: int = 50, steps: int = 10, seed: int = 0,
    root: str | Path = WEIGHTS, out: Path | None = None, settings: dict[str, Any] | None = None, nats: bool = True,
    history_noise: float = 0.0, keep: int | None = None, on_row: Callable[[dict[str, Any]], None] | None = None,
    batch: int = 10,
) -> list[dict[str, Any]]:  # fmt: skip
    """Measures memories in held-out rooms and sums them up.

    Args:
        world, protocol: of `make_episode`; settings: further arguments of the protocol.
        memories: names, see `parse_memories`.
        rooms: seeds TEST_SEED .. TEST_SEED + rooms - 1.
        steps: network calls per chunk.
        seed: of the noise.
        root: folder of weights.
        out: folder for rows.jsonl; run again to go on.
        nats: also the loss gap, which takes about as long as the rollouts.
        history_noise, keep: of what models are shown of the past, see `roll_out`.
        on_row: called for every room that was measured, batch by batch.
        batch: rooms of equal length and context that go through the network together; a stopped run loses at most the
            rooms of one batch. It changes no result but by rounding. `seconds_per_frame` is measured on one row all
            the same, once per training.

    Returns:
        `summarise` of all rows.

    Raises:
        ValueError: unknown names, no rooms, no batch, or a memory without weights.
    """
    if rooms < 1:
        raise ValueError(f"rooms={rooms} is not allowed; write 1 or more")
    if protocol not in find_world(world).protocols:
        make_episode(world, protocol, TEST_SEED)  # raises, before models are loaded
    trained = [one for name in memories for one in find_trained(world, name, root)]
    knobs: dict[str, Any] = {"history_noise": history_noise, "keep": keep}
    told = {"world": world, "protocol": protocol, "steps": steps, "seed": seed, "nats": nats, **(settings or {})}
    # a knob that is not turned is not told: rows measured before there were any stay good
    told |= {name: value for name, value in knobs.items() if value}
    store = MemoryRows(None if out is None else out / "rows.jsonl", told)
    numbers = range(TEST_SEED, TEST_SEED + rooms)
    missing = (
        make_episode(world, protocol, room, **(settings or {}))
        for room in numbers
        if any(store.find(one, room) is None for one in trained)
    )
    seconds: dict[tuple[str, int], float] = {}
    for group in group_rooms(missing, batch):
        for one in trained:
            left = [episode for episode in group if store.find(one, episode.seed) is None]
            if not left:
                continue
            timed = seconds.get((one.memory, one.seed))
            for row in evaluate_rooms(
                one, left, steps=steps, seed=seed, nats=nats, seconds_per_frame=timed, **knobs
            ):  # fmt: skip
                seconds[one.memory, one.seed] = row["seconds_per_frame"]
                store.add(row)
                if on_row is not None:
                    on_row(row)
    found = (store.find(one, room) for room in numbers for one in trained)
    return summarise([row for row in found if row is not None])


def summarise(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per memory: means, intervals over trainings and rooms, cost, and the loss gap.

    `loss_gap_nats` is what a memory's model leaves in denoising error beyond the best one of the list, in nats per
    recall frame; 0 for the best. `memory_gain_nats` compares a model with itself when it is shown no past.
    `rank_agreement`, the same in every row, is Spearman's correlation of the two over the list, see below.
    """
    names = list(dict.fromkeys(row["memory"] for row in rows))
    summary = []
    for name in names:
        own = [row for row in rows if row["memory"] == name]
        line: dict[str, Any] = {"memory": name, "rooms": len({row["room"] for row in own})}
        line["trainings"] = len({row["training"] for row in own})
        for metric in METRICS:
            pairs = [(row[metric], row["training"]) for row in own if row.get(metric) is not None]
            if not pairs:
                line[metric] = None
                continue
            values, groups = zip(*pairs)
            interval = bootstrap_mean(values, groups)
            line[metric] = interval.mean
            line[f"{metric}_interval"] = [interval.low, interval.high]
        for metric in ("memory_tokens", "kv_bytes", "kept_bytes"):
            line[metric] = max(row[metric] for row in own)
        # rows measured before packed tokens could be unpacked attended to what they kept
        line["attended_tokens"] = max(row.get("attended_tokens", row["memory_tokens"]) for row in own)
        line["seconds_per_frame"] = float(np.median([row["seconds_per_frame"] for row in own]))
        for metric in ("own_by_step", "real_by_step"):
            longest = min(len(row[metric]) for row in own)
            line[metric] = np.mean([row[metric][:longest] for row in own], axis=0).tolist()
        summary.append(line)
    known = [line["denoising_nats"] for line in summary if line["denoising_nats"] is not None]
    for line in summary:
        line["loss_gap_nats"] = None if line["denoising_nats"] is None else line["denoising_nats"] - min(known)
    agreement = rank_agreement(summary)
    for line in summary:
        line["rank_agreement"] = agreement
    return summary


def rank_agreement(summary: Sequence[dict[str, Any]]) -> float | None:
    """Spearman's correlation of recall PSNR with minus the loss gap over memories."""
    pairs = [
        (line["recall_psnr"], -line["loss_gap_nats"])
        for line in summary
        if line["recall_psnr"] is not None and line["loss_gap_nats"] is not None
    ]
    return spearman([a for a, _ in pairs], [b for _, b in pairs]) if len(pairs) > 1 else None
