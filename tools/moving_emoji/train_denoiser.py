"""Train the denoiser and text encoder of moving-emoji together on the encoded grid.

    python tools/moving_emoji/train_denoiser.py --latents run/latents.pt --out run --minutes 76

v-prediction on unit-variance latents. The learning rate is constant after the warm-up and falls to zero during the
last `--finish` of `--minutes`. A file `<out>/finish` that holds a number ends the run in so many minutes: the fall
begins at once, or becomes steeper where it has begun. Minutes count while the process runs, not while it is stopped.
Five kinds of batches:

    clips      one timestep for all 16 frames
    diagonal   timestep t0 + k * slope at frame k, what a first-in-first-out sampler feeds (arXiv:2405.11473)
    history    one frame (now and then up to four) at a low timestep, the rest at one, mostly high, timestep: then
               where the subject is can be seen in one frame, and where it goes is in the caption alone
    pictures   single frames of many clips: four times as many subjects per second as clips
    directions history batches of clips that move across or up and down, each also under the caption of the opposite
               way, whose error has to be larger. Left and right differ in their effect only together with the sign of
               a frame distance; the plain loss leaves them equal for tens of thousands of clips

One caption in eight is empty for classifier-free guidance. Checkpoints (with running average) are renamed into place;
`--resume` continues one. A sheet of sampled clips is drawn every ten minutes.

The shipped weights: 97 minutes of one core with the defaults (every clip starts at phase 0), 59 with `--phase-step 4`,
and after these, `--from` them, in 69 minutes the directions: `--apart`, 22 minutes of mostly history batches, in
variants not kept here (which taught none: the gap to the opposite caption stayed below 0.01), 13 with
`--directions 0.93 --contrast 3` (gap 0.34), 27 with `--directions 0.3 --contrast 0.5 --history 0.12`, 7 with
`--directions 0.05 --history 0.14 --diagonal 0.18`. The rate fell during the last 22; the last 25 ran on two threads.
In the first 15 minutes of the direction batches a held-out caption could stand as the opposite one of a clip.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AnimateDiffPipeline
from torch import Tensor, nn
from transformers import CLIPTokenizer

from export import build_pipeline  # isort: skip
from parts import FrameTimes, build_tokenizer, new_scheduler, new_text_encoder, new_unet, token_table  # isort: skip
from optimiser import Optimiser  # isort: skip
from scene import PERIOD, PLACES, STATE_INDEX, SUBJECTS, Clip, caption, held_out, sample_clip, sheet, states  # isort: skip

sys.path.append(str(Path(__file__).parent.parent / "emoji64"))
from common import Log, save_checkpoint

SHOWN = (
    "a yellow taxi moves left on a grey road",
    "a red apple spins on green grass",
    "a rocket moves up in the night sky",
    "a sailboat moves right slowly in a blue sky",
    "a green frog bounces on white snow",
    "a penguin pulses on a sandy beach",
    "a butterfly moves down in a blue sky",
    "a soccer ball moves up slowly on green grass",
)
EMPTY_SHARE = 0.125
LONGEST_STEP = 10.0
"""Seconds; more than that between two steps means that the process was stopped."""
CLEAN = 20.0
"""Signal-to-noise ratio from which on a frame weighs less."""
WAYS = (("left", "right"), ("up", "down"))
OPPOSITE = dict([*WAYS, *(pair[::-1] for pair in WAYS)])
MARGIN = 0.4
"""By so much the error under the opposite caption has to exceed the error under the right one."""
KINDS = ("clips", "diagonal", "history", "pictures", "directions")
_SUBJECT_INDEX = {s: i for i, s in enumerate(SUBJECTS)}
_PLACE_INDEX = {p: i for i, p in enumerate(PLACES)}


def clip_latents(grid: Tensor, clip: Clip, frames: int = PERIOD) -> Tensor:
    """Latents of a clip: [frames, 8, 8, 8] float16."""
    rows = [STATE_INDEX[s] for s in states(clip, frames)]
    return grid[_SUBJECT_INDEX[clip.subject], _PLACE_INDEX[clip.place], rows]


def draw_batch(
    grid: Tensor,
    tokens: dict[str, Tensor],
    rng: np.random.Generator,
    clips: int,
    frames: int,
    phase_step: int = 1,
) -> tuple[Tensor, Tensor]:
    """Random training clips, all in the middle lane: then only the phase of a clip is open once its caption is read.

    Args:
        grid: latents [subjects, places, states, 8, 8, 8] float16.
        tokens: token ids [16] of every caption.
        rng: draws clips and empty captions.
        clips: how many.
        frames: of each.
        phase_step: phases are multiples of this. 32 starts every clip at phase 0, so caption and frame number tell
            where the subject is; 4 leaves 4 or 8 trajectories, and windows that overlap by a stride of 4 can agree.

    Returns:
        Latents [clips, 8, frames, 8, 8] float32 and token ids [clips, 16] int64.
    """
    drawn = [sample_clip(rng, lanes=(1,)) for _ in range(clips)]
    drawn = [replace(c, phase=c.phase // phase_step * phase_step) for c in drawn]
    x = torch.stack([clip_latents(grid, c, frames) for c in drawn]).float().permute(0, 2, 1, 3, 4)
    ids = torch.stack([tokens["" if rng.random() < EMPTY_SHARE else caption(c)] for c in drawn])
    return x.contiguous(), ids


def draw_pairs(
    grid: Tensor, tokens: dict[str, Tensor], rng: np.random.Generator, clips: int, frames: int
) -> tuple[Tensor, Tensor]:
    """Random clips that move, each twice: under its caption, then under the caption of the opposite way.

    Args:
        grid: latents [subjects, places, states, 8, 8, 8] float16.
        tokens: token ids [16] of every caption.
        rng: draws the clips.
        clips: how many different ones.
        frames: of each.

    Returns:
        Latents [2 clips, 8, frames, 8, 8] float32 and token ids [2 clips, 16] int64, the opposite captions last.
    """
    drawn: list[Clip] = []
    other: list[Clip] = []
    while len(drawn) < clips:
        clip = sample_clip(rng, lanes=(1,))
        back = replace(clip, motion=" ".join(OPPOSITE.get(w, w) for w in clip.motion.split()))
        if clip.motion.startswith("moves") and not held_out(back.subject, back.motion, back.place):
            drawn.append(clip)
            other.append(back)
    x = torch.stack([clip_latents(grid, c, frames) for c in drawn]).float().permute(0, 2, 1, 3, 4)
    ids = torch.stack([tokens[caption(c)] for c in [*drawn, *other]])
    return x.repeat(2, 1, 1, 1, 1), ids


def draw_times(kind: str, rng: np.random.Generator, clips: int, frames: int, shift: float = 2.0) -> Tensor:
    """Timesteps [clips, frames] int64 in 0..999.

    Clips and pictures are drawn with a shift towards noise, t = s u / (1 + (s - 1) u), because 16 nearly equal frames
    tell more than one, and because which way they go is settled there.
    """
    u = (np.arange(clips) + rng.random(clips)) / clips
    t = 1000 * (shift * u / (1 + (shift - 1) * u))
    rows = np.repeat(rng.permutation(t)[:, None], frames, 1)
    if kind == "diagonal":
        slope = rng.uniform(8, 70, (clips, 1))
        rows = rng.uniform(-8 * slope, 1000) + slope * np.arange(frames)
    elif kind == "history":
        first, count = rng.integers(0, frames, (clips, 1)), rng.choice(4, (clips, 1), p=(0.7, 0.1, 0.1, 0.1)) + 1
        rows = 1000 * (1 - rng.random((clips, 1)) ** 1.5 * 0.9) * np.ones((1, frames))
        seen = rows * np.maximum(rng.uniform(-0.6, 0.6, (clips, 1)), 0)
        rows = np.where((np.arange(frames) >= first) & (np.arange(frames) < first + count), seen, rows)
    elif kind == "directions":  # half of them know the first frame: then every distance has one sign
        first = rng.integers(0, frames, (clips, 1)) * (rng.random((clips, 1)) < 0.5)
        rows = rng.uniform(300, 1000, (clips, 1)) * np.ones((1, frames))
        rows = np.where(np.arange(frames) == first, 0, rows)
    return torch.from_numpy(rows.clip(0, 999).astype(np.int64))


@dataclass
class Fall:
    """The final fall of the learning rate, a straight line.

    Args:
        start: minute it begins.
        length: minutes it takes.
        peak: factor it begins at.
    """

    start: float
    length: float
    peak: float = 1.0

    def factor(self, minutes: float) -> float:
        """Learning-rate factor at a time."""
        return self.peak * min(1.0, max(0.0, 1 - (minutes - self.start) / self.length))

    def end_in(self, length: float, minutes: float) -> None:
        """Reach zero in `length` minutes from now."""
        self.peak, self.start, self.length = self.factor(minutes), minutes, length


def ema_update(average: nn.Module, model: nn.Module, decay: float) -> None:
    """Move a running average of the weights towards a model, in place."""
    with torch.no_grad():
        a, b = list(average.parameters()), list(model.parameters())
        torch._foreach_lerp_(a, b, 1 - decay)


def set_apart(text_encoder: nn.Module, tokenizer: CLIPTokenizer, size: float = 1.5) -> None:
    """Move the embeddings of opposite directions apart, in place.

    While nothing in a clip depends on the direction (phases free, no frame known) left and right give the same loss,
    so their embeddings drift together; from nearly equal ones neither the text nor the temporal attention gets a
    gradient that tells them apart again.

    Args:
        text_encoder: CLIPTextModel.
        tokenizer: of `build_tokenizer`; every word is one token.
        size: length of the step to either side of the mean of a pair; embeddings have length 1.
    """
    table = text_encoder.get_input_embeddings().weight
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for pair in WAYS:
            rows = [tokenizer(word).input_ids[1] for word in pair]
            middle = table[rows].mean(0)
            step = nn.functional.normalize(torch.randn(table.shape[1], generator=draw), dim=0) * size
            table[rows] = torch.stack([middle + step, middle - step])


def draw_sheet(ema: nn.ModuleDict, vae: dict[str, Any], path: Path) -> None:
    """Sample the captions of `SHOWN` (20 steps, guidance 4) and write 8 frames of each."""
    pipe = build_pipeline(ema["unet"].state_dict(), ema["text_encoder"].state_dict(), vae)
    pipe.set_progress_bar_config(disable=True)
    made = pipe(
        list(SHOWN),
        num_frames=PERIOD,
        num_inference_steps=20,
        guidance_scale=4.0,
        generator=torch.Generator().manual_seed(1),
        output_type="np",
    ).frames
    frames = (np.asarray(made) * 255 + 0.5).astype(np.uint8)
    sheet([f[::2] for f in frames], 2).save(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latents", type=Path, default=Path("run/latents.pt"))
    parser.add_argument("--out", type=Path, default=Path("run"))
    parser.add_argument("--minutes", type=float, default=76.0)
    parser.add_argument("--finish", type=float, default=15.0, help="minutes of the final decay")
    parser.add_argument("--clips", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--hidden-lr", type=float, default=3e-3)
    parser.add_argument("--sheet-minutes", type=float, default=10.0)
    parser.add_argument("--phase-step", type=int, default=32, help="clips start at multiples of this; 32: always at 0")
    parser.add_argument("--diagonal", type=float, default=0.12, help="share of such batches after 15 minutes")
    parser.add_argument("--history", type=float, default=0.06, help="share of such batches after 15 minutes")
    parser.add_argument("--directions", type=float, default=0.0, help="share of such batches after 15 minutes")
    parser.add_argument("--contrast", type=float, default=3.0, help="weight of the opposite caption's hinge")
    parser.add_argument("--apart", action="store_true", help="begin with opposite directions moved apart")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--from", dest="start", type=Path, help="an exported pipeline to begin with")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    stored = torch.load(args.latents)
    grid, vae = stored["latents"], stored["vae"]
    tokenizer = build_tokenizer(args.out / "tokenizer")
    tokens = token_table(tokenizer)
    model = nn.ModuleDict({"unet": new_unet(), "text_encoder": new_text_encoder(tokenizer)})
    if args.start is not None:
        known = AnimateDiffPipeline.from_pretrained(args.start, torch_dtype=torch.float32)
        for name, part in model.items():
            part.load_state_dict(getattr(known, name).state_dict())
    if args.apart:
        set_apart(model["text_encoder"], tokenizer)
    ema = copy.deepcopy(model).requires_grad_(False)
    unet, text_encoder = model["unet"], model["text_encoder"]
    times = FrameTimes(unet)
    optimiser = Optimiser(model, args.lr, args.hidden_lr)
    signal = new_scheduler().alphas_cumprod.sqrt()
    noise_level = (1 - new_scheduler().alphas_cumprod).sqrt()
    log, checkpoint = Log(args.out / "denoiser.jsonl", 0), args.out / "denoiser.pt"
    step, before, seen = 0, 0.0, 0
    if args.resume and checkpoint.exists():
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        optimiser.load_state_dict(state["optimiser"])
        for name, part in ema.items():
            part.load_state_dict(state["ema"][name])
        step, before, seen = state["step"], state["minutes"], state["clips"]
    rng = np.random.default_rng([3, step])
    minutes, clock = before, time.time()
    fall = Fall(args.minutes - args.finish, args.finish)
    said, saved, drawn = before, before, before or 6 - args.sheet_minutes
    mean: dict[str, float] = {}

    def save(minutes: float) -> None:
        save_checkpoint(
            checkpoint,
            {
                "model": model.state_dict(),
                "ema": {n: p.state_dict() for n, p in ema.items()},
                "optimiser": optimiser.state_dict(),
                "step": step,
                "minutes": minutes,
                "clips": seen,
            },
        )

    while True:
        now = time.time()
        minutes, clock = minutes + min(now - clock, LONGEST_STEP) / 60, now
        if (args.out / "finish").exists():
            fall.end_in(float((args.out / "finish").read_text() or args.finish), minutes)
            (args.out / "finish").rename(args.out / "finish.taken")
        if minutes >= fall.start + fall.length:
            break
        factor = min(1.0, (step + 1) / 100) * fall.factor(minutes)
        young = minutes < 15 and args.start is None
        later = (args.diagonal, args.history, 0.02, args.directions)
        shares = (0.40, 0.20, 0.05, 0.35, 0.0) if young else (1 - sum(later), *later)
        kind = KINDS[rng.choice(len(KINDS), p=shares)]
        clips, frames = (8 * args.clips, 1) if kind == "pictures" else (args.clips, PERIOD)
        if kind == "directions":
            x, ids = draw_pairs(grid, tokens, rng, clips // 2, frames)
            t = draw_times(kind, rng, clips // 2, frames).repeat(2, 1)
            noise = torch.randn_like(x[: clips // 2]).repeat(2, 1, 1, 1, 1)
        else:
            x, ids = draw_batch(grid, tokens, rng, clips, frames, args.phase_step if kind == "clips" else 1)
            t = draw_times(kind, rng, clips, frames)
            noise = torch.randn_like(x)
        a, s = (table[t][:, None, :, None, None] for table in (signal, noise_level))
        text = text_encoder(ids)[0].repeat_interleave(frames, 0)
        if kind in ("diagonal", "history", "directions"):
            times.set(t)
        out = unet(a * x + s * noise, t[:, 0], text).sample
        times.clear()
        # an almost clean frame's velocity is its noise, which nothing predicts: its error counts less
        weight = ((CLEAN + 1) / (a.square() / s.square() + 1)).clamp(max=1)
        error = (weight * (out - (a * noise - s * x)).square()).mean((1, 2, 3, 4)) / weight.mean()
        loss = error.mean()
        if kind == "directions":
            right, opposite = error.chunk(2)
            gap = opposite - right
            loss = right.mean() + args.contrast * (MARGIN - gap).clamp(min=0).mean()
            mean["gap"] = 0.97 * mean.get("gap", 0.0) + 0.03 * gap.mean().item()
        loss.backward()
        norm = optimiser.step(factor)
        step, seen = step + 1, seen + (clips * frames) // PERIOD
        ema_update(ema, model, min(0.997, (1 + step) / (10 + step)))
        value = (right.mean() if kind == "directions" else loss).item()
        mean[kind] = value if kind not in mean else 0.97 * mean[kind] + 0.03 * value
        if minutes - said >= 0.5:
            said = minutes
            log(
                step=step,
                minutes=minutes,
                clips=seen,
                factor=factor,
                norm=norm,
                **{f"loss_{k}" if k in KINDS else k: v for k, v in mean.items()},
            )
        if minutes - saved >= 2:
            saved = minutes
            save(minutes)
        if minutes - drawn >= args.sheet_minutes:
            drawn = minutes
            draw_sheet(ema, vae, args.out / f"sheet_{minutes:03.0f}.png")
    save(minutes)
    log(
        step=step,
        minutes=minutes,
        clips=seen,
        factor=0.0,
        **{f"loss_{k}" if k in KINDS else k: v for k, v in mean.items()},
    )
    draw_sheet(ema, vae, args.out / "sheet_last.png")


if __name__ == "__main__":
    main()
