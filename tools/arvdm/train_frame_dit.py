"""Train the frame transformer of one world with one memory.

    python tools/arvdm/train_frame_dit.py --world panoroom --memory pack_k2 --out arvdm-run --minutes 60

Flow path and clean prediction. A chunk of four frames has one level, in three batches of ten every frame its own. Half
the past frames are slightly noised, and the model is told. Now and then the old past, or all of it, is left out. The
learning rate follows a cosine over `--minutes` (or over `--steps`). Run the same command again to go on: weights,
their running average and the optimiser are saved every two minutes and at the end, under a temporary name first;
batches depend on their number alone. `--start FOLDER` begins with the weights of another memory's model as far as they
fit: what a past frame says is learnt once. Packed memories keep blocks as wide tokens that are unpacked when they are
read (`mediaspec.models.block_codec`), fitted before the first step and trained on. Progress is one JSON line per half
minute, with a short test on rooms that are neither trained on nor tested later.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from batches import CHUNK, Batch, new_batches, new_codec

from mediaspec.eval.memory_metrics import needle_accuracy, recall_scores
from mediaspec.eval.memory_rollout import roll_out
from mediaspec.eval.worlds import WORLDS, make_episode, recall_frames
from mediaspec.models.frame_dit import FrameDiT, FrameDiTConfig, History
from mediaspec.models.frame_history import pack_length
from mediaspec.models.patch_codec import PatchCodec

WATCHED_SEED = 190_000
WATCHED = {"panoroom": "needle", "raymaze": "loop", "vizdoom": "palindrome"}
LIMITS = {"pack_k2": 4, "pack_k4": 4}
"""Blocks that packed memories read, those nearest in pose: a step costs the same however long the past is."""
UNPACKED = 0.5
"""Weight of the error of unpacked blocks."""


@dataclass(frozen=True)
class Plan:
    """Args: as on the command line. Exactly one of minutes and steps is positive; memory_limit None is `LIMITS`."""

    world: str
    memory: str
    minutes: float = 0.0
    steps: int = 0
    batch: int = 16
    lr: float = 2e-3
    seed: int = 0
    hidden_size: int = 128
    layers: int = 4
    pool: int = 256
    memory_limit: int | None = None
    start: str = ""
    packed_size: int = 512
    watch_minutes: float = 5.0


def new_model(plan: Plan, codec: PatchCodec) -> FrameDiT:
    """An untrained model that knows the spread of the codec's latents."""
    torch.manual_seed(plan.seed)
    known = WORLDS[plan.world]
    limit = LIMITS.get(plan.memory, 0) if plan.memory_limit is None else plan.memory_limit
    config = FrameDiTConfig(
        hidden_size=plan.hidden_size, memory_size=3 * plan.hidden_size // 2, num_hidden_layers=plan.layers,
        channels=codec.components, memory=plan.memory, position=known.position, num_actions=known.num_actions,
        field_of_view=known.field_of_view, memory_limit=limit,
        packed_size=plan.packed_size if pack_length(plan.memory) else 0,
    )  # fmt: skip
    model = FrameDiT(config)
    # floors keep components that hardly vary from being trusted to the last digit
    model.latent_deviation.copy_(codec.deviation.T.clamp(min=0.05))
    return model


def begin_with(model: FrameDiT, folder: str) -> list[str]:
    """Loads what fits of saved models, and returns the names of the weights that stay as they were.

    Args:
        model: to be trained.
        folder: of a saved model, or several with commas: each overwrites what the ones before it gave.

    Raises:
        ValueError: no saved model, or sizes differ, so that next to nothing fits.
    """
    own, taken = model.state_dict(), set[str]()
    for one in folder.split(","):
        if not (Path(one) / "config.json").is_file():
            raise ValueError(f"--start {one} is no folder of a saved model; a finished training writes one")
        known = FrameDiT.from_pretrained(one, dtype=torch.float32).state_dict()
        fits = {name: value for name, value in known.items() if name in own and own[name].shape == value.shape}
        if not {"embed.weight", "out.weight", "blocks.0.qkv.weight"} <= fits.keys():
            raise ValueError(f"--start {one}: its sizes differ from those of this training")
        model.load_state_dict(fits, strict=False)
        taken |= fits.keys()
    return sorted(own.keys() - taken)


def random_blocks(past: History, length: int, blocks: int, rng: np.random.Generator) -> History:
    """Frames of `blocks` random blocks of every row."""
    first = torch.from_numpy(rng.integers(0, past.frames - length + 1, (len(past.poses), blocks)))
    return past.pick((first[:, :, None] + torch.arange(length)).flatten(1))


def unpacking_loss(model: FrameDiT, past: History, rng: np.random.Generator, blocks: int) -> torch.Tensor | None:
    """Squared error of unpacked frames of random blocks, as part of their variance; None for a short past.

    A packer that is told directly what to keep learns it long before the gradients that come through attention.
    """
    length = pack_length(model.config.memory)
    if past.frames < length or model.block_codec is None:
        return None
    frames, motion = model.block_frames(random_blocks(past, length, blocks, rng), length)
    found = model.block_codec.unpack(model.block_codec.pack(frames, motion), motion)
    known = frames.flatten(3, 4).detach()
    return (found - known).square().mean() / known.var()


@torch.no_grad()
def fit_block_codec(model: FrameDiT, batches: Any, seed: int) -> None:
    """Begins a block codec with the principal components of what the model keeps of past frames."""
    assert model.block_codec is not None
    length, rng, found = pack_length(model.config.memory), np.random.default_rng([seed, 13]), []
    tokens = 16 * model.config.packed_size
    for number in itertools.count():
        past = batches.batch(number, 16).past
        if past.frames >= length:
            frames, motion = model.block_frames(random_blocks(past, length, 8, rng), length)
            found.append((frames.flatten(0, 1)[None], motion.flatten(0, 1)[None]))
        if len(found) * 128 * (model.config.tokens // length**2) >= tokens:
            break
    model.block_codec.fit(*(torch.cat(column, dim=1) for column in zip(*found)))


def batch_loss(
    model: FrameDiT, batch: Batch, rng: np.random.Generator, noise: torch.Generator, unpacked: float = 0.0
) -> torch.Tensor:
    """Squared error of the clean frames, weighted so that every level counts about alike; with the weight `unpacked`,
    also of unpacked blocks."""
    size, w = batch.actions.shape
    shape = (size, w) if rng.random() < 0.3 else (size, 1)
    u = torch.rand(shape, generator=noise).expand(size, w)
    u = (2 * u / (1 + u)).clamp(0.01, 1)
    level = u[:, :, None, None, None]
    x = (1 - level) * batch.latents + level * torch.randn(batch.latents.shape, generator=noise)
    past = batch.past
    if rng.random() < 0.5:
        told = 0.15 * torch.rand(past.levels.shape, generator=noise)
        own = told[:, :, None, None, None]
        past = History(
            (1 - own) * past.latents + own * torch.randn(past.latents.shape, generator=noise), past.poses,
            past.actions, told,
        )  # fmt: skip
    dropped = rng.random()
    if dropped < 0.1:
        past = past.last(0 if dropped < 0.03 else model.config.window)
    found = model(x, u, batch.poses, batch.actions, model.read(past, batch.poses))
    weight = (((1 - level) ** 2 + level**2) / level**2).clamp(max=10)
    loss = (weight * (found - batch.latents).square()).mean()
    blocks = unpacking_loss(model, past, rng, 8) if unpacked else None
    return loss if blocks is None else loss + unpacked * blocks


def watch(model: FrameDiT, codec: PatchCodec, world: str, rooms: int = 6) -> dict[str, float]:
    """A short test on rooms of their own."""
    psnr, right = [], []
    for seed in range(WATCHED_SEED, WATCHED_SEED + rooms):
        episode = make_episode(world, WATCHED[world], seed)
        asked = recall_frames(episode, model.config.window + CHUNK)
        made = roll_out(model, codec, episode, real=False).own
        scores = recall_scores(made, episode.frames, asked)
        share = needle_accuracy(made, episode.frames, np.flatnonzero(asked).tolist(), episode.needles)
        if scores is not None:
            psnr.append(scores["psnr"])
        if share is not None:
            right.append(share)
    return {"recall_psnr": float(np.mean(psnr)) if psnr else 0.0, "needle": float(np.mean(right)) if right else 0.0}


def save(path: Path, state: dict[str, Any]) -> None:
    part = path.with_suffix(".part")
    torch.save(state, part)
    os.replace(part, path)


def train(plan: Plan, out: Path, until: float | None = None) -> dict[str, float]:
    """Trains, or goes on training, and returns the last line of the log.

    Args:
        plan: what to train.
        out: folder; this model's files go to <out>/<world>/<memory>[-seed].
        until: stop at this minute of training, with the learning rate of the whole plan.
    """
    if (plan.minutes > 0) == (plan.steps > 0):
        raise ValueError(f"minutes={plan.minutes} and steps={plan.steps}: give one of them")
    if plan.world not in WORLDS:
        raise ValueError(f"world {plan.world!r} is none of {', '.join(WORLDS)}")
    folder = out / plan.world / (plan.memory + (f"-{plan.seed}" if plan.seed else ""))
    folder.mkdir(parents=True, exist_ok=True)
    codec_path = out / plan.world / "codec.safetensors"
    if not codec_path.exists():
        new_codec(plan.world).save(codec_path)
    codec = PatchCodec.load(codec_path)
    model = new_model(plan, codec)
    checkpoint = folder / "checkpoint.pt"
    batches = new_batches(plan.world, codec, plan.seed, plan.pool)
    if not checkpoint.exists():
        if plan.start:
            begin_with(model, plan.start)
        if model.block_codec is not None:
            fit_block_codec(model, batches, plan.seed)
    average = copy.deepcopy(model).eval().requires_grad_(False)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.02}, {"params": rest, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=plan.lr, betas=(0.9, 0.98))
    step, before = 0, 0.0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        if state["plan"] != _kept(plan):
            raise ValueError(f"{checkpoint} was trained with {state['plan']}; give another --out or the same settings")
        model.load_state_dict(state["model"])
        average.load_state_dict(state["average"])
        optimiser.load_state_dict(state["optimiser"])
        step, before = state["step"], state["minutes"]
    start = time.monotonic()
    said = saved = watched = before
    mean, row = math.nan, {"step": float(step), "minutes": before}

    def minutes() -> float:
        return before + (time.monotonic() - start) / 60

    def keep() -> None:
        save(
            checkpoint,
            {"plan": _kept(plan), "model": model.state_dict(), "average": average.state_dict(),
             "optimiser": optimiser.state_dict(), "step": step, "minutes": minutes()},
        )  # fmt: skip

    def say(**more: float) -> dict[str, float]:
        line = {"step": step, "minutes": round(minutes(), 3), "loss": mean, **more}
        with (folder / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        return line

    limit = plan.minutes if until is None else min(until, plan.minutes)
    while (step < plan.steps) if plan.steps else (minutes() < limit):
        done = step / plan.steps if plan.steps else minutes() / plan.minutes
        factor = min(1.0, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
        for group in optimiser.param_groups:
            group["lr"] = plan.lr * factor
        rng = np.random.default_rng([plan.seed, 12, step])
        noise = torch.Generator().manual_seed(plan.seed * 1_000_003 + step)
        loss = batch_loss(model, batches.batch(step, plan.batch), rng, noise, UNPACKED)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        step += 1
        with torch.no_grad():
            decay = min(0.999, (1 + step) / (10 + step))
            torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - decay)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise RuntimeError(f"the loss is {value} at step {step}; go on from {checkpoint} with a smaller --lr")
        mean = value if math.isnan(mean) else 0.98 * mean + 0.02 * value
        now = minutes()
        if now - watched >= plan.watch_minutes:
            watched = now
            say(factor=factor, **watch(average, codec, plan.world))
        elif now - said >= 0.5:
            said = now
            row = say(factor=factor)
        if now - saved >= 2:
            saved = now
            keep()
    keep()
    finished = step >= plan.steps if plan.steps else minutes() >= plan.minutes
    if finished and plan.watch_minutes > 0:
        row = say(factor=0.0, **watch(average, codec, plan.world))
    else:
        row = say(factor=0.0)
    if finished:
        average.save_pretrained(folder)
        codec.save(folder / "codec.safetensors")
    return row


def _kept(plan: Plan) -> dict[str, Any]:
    """What may not change between two runs of one training."""
    return {name: value for name, value in asdict(plan).items() if name != "watch_minutes"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", default="panoroom", choices=list(WORLDS))
    parser.add_argument("--memory", default="window")
    parser.add_argument("--out", type=Path, default=Path("arvdm-run"))
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--pool", type=int, default=256)
    parser.add_argument("--start", default="", help="folders of trained models to begin with, with commas")
    parser.add_argument("--packed-size", type=int, default=512, help="numbers of a packed token, 0 for no unpacking")
    parser.add_argument("--memory-limit", type=int, help="old frames or blocks that are read, 0 for all")
    parser.add_argument("--watch-minutes", type=float, default=5.0)
    parser.add_argument("--threads", type=int, default=1)
    args = vars(parser.parse_args())
    torch.set_num_threads(args.pop("threads"))
    out = args.pop("out")
    print(json.dumps(train(Plan(**args), out)))


if __name__ == "__main__":
    main()
