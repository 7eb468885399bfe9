"""Train the clip reader that scores moving-emoji clips: mediaspec.models.clip_reader.

    python tools/moving_emoji/train_reader.py --data emoji-data --latents run/latents.pt --minutes 4 \
        --out mediaspec/models/moving_emoji/reader

It sees rendered clips of all captions, held-out ones too (it judges, it does not generate), blurred, noisy and with
shifted colours, and some of them through the autoencoder with noise on the latents, so that it forgives what a decoder
does to a picture. Every fourth clip starts as one caption and ends as another, for two-prompt videos.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from optimiser import Optimiser  # isort: skip
from scene import MOTIONS, PLACES, SUBJECTS, Clip, Renderer, sample_clip  # isort: skip
from train_vae import new_vae  # isort: skip

sys.path.append(str(Path(__file__).parents[2]))
sys.path.append(str(Path(__file__).parent.parent / "emoji64"))
from common import Log, schedule

from mediaspec.models.clip_reader import ATTRIBUTES, ClipReader

WORDS = {"subject": list(SUBJECTS), "motion": list(MOTIONS), "place": list(PLACES)}


def labels(clip: Clip) -> list[int]:
    """Class index per attribute, in the order of `ATTRIBUTES`."""
    return [WORDS[name].index(getattr(clip, name)) for name in ATTRIBUTES]


def draw(renderer: Renderer, rng: np.random.Generator, clips: int, frames: int = 16) -> tuple[Tensor, Tensor]:
    """Clips [B, N, 3, 64, 64] float32 in 0..1 and class indices [B, N, 3] int64."""
    pictures, classes = [], []
    for _ in range(clips):
        a, b = (sample_clip(rng, "held_out" if rng.random() < 0.12 else "train") for _ in range(2))
        cut = int(rng.integers(5, frames - 4)) if rng.random() < 0.25 else frames
        parts = [renderer.clip(a, cut)] + ([renderer.clip(b, frames - cut)] if cut < frames else [])
        pictures.append(np.concatenate(parts))
        classes.append([labels(a)] * cut + [labels(b)] * (frames - cut))
    x = torch.from_numpy(np.stack(pictures)).permute(0, 1, 4, 2, 3).float() / 255
    return x, torch.tensor(classes)


def spoil(x: Tensor, rng: np.random.Generator, vae: AutoencoderKL | None) -> Tensor:
    """Blur, noise and colour shifts per clip; the first clip of a batch goes through the autoencoder."""
    out = []
    for i, clip in enumerate(x):
        if i == 0 and vae is not None:
            with torch.no_grad():
                z = vae.encode(clip * 2 - 1).latent_dist.mean
                z = z + rng.uniform(0, 0.3) * torch.randn_like(z)
                clip = (vae.decode(z).sample + 1) / 2
        elif rng.random() < 0.6:
            side = int(rng.integers(16, 60))
            small = functional.interpolate(clip, size=(side, side), mode="bilinear", antialias=True)
            clip = functional.interpolate(small, size=(64, 64), mode="bilinear")
        clip = clip * rng.uniform(0.9, 1.1) + torch.from_numpy(rng.normal(0, 0.03, (1, 3, 1, 1))).float()
        out.append(clip + rng.uniform(0, 0.06) * torch.randn_like(clip))
    return torch.stack(out).clamp(0, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("emoji-data"))
    parser.add_argument("--latents", type=Path, help="file with the trained autoencoder")
    parser.add_argument("--out", type=Path, default=Path("mediaspec/models/moving_emoji/reader"))
    parser.add_argument("--log", type=Path, default=Path("run/reader.jsonl"))
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--clips", type=int, default=8)
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    vae = None
    if args.latents:
        vae = new_vae().eval()
        vae.load_state_dict(torch.load(args.latents)["vae"])
    renderer, rng, log = Renderer(args.data), np.random.default_rng(5), Log(args.log, 0)
    reader = ClipReader(WORDS["subject"], WORDS["motion"], WORDS["place"])
    optimiser = Optimiser(reader, args.lr, 2 * args.lr)
    start, step, said = time.process_time(), 0, 0.0
    test_rng = np.random.default_rng(6)
    test, test_classes = draw(renderer, test_rng, 24)
    test = spoil(test, test_rng, None)

    def accuracy() -> dict[str, float]:
        reader.eval()
        with torch.no_grad():
            found = reader(test)
        reader.train()
        return {
            name: float((found[name].argmax(-1) == test_classes[..., i]).float().mean())
            for i, name in enumerate(ATTRIBUTES)
        }

    while (used := (time.process_time() - start) / 60) < args.minutes:
        x, classes = draw(renderer, rng, args.clips)
        logits = reader(spoil(x, rng, vae if step % 2 else None))
        losses = [
            functional.cross_entropy(logits[name].flatten(0, 1), classes[..., i].flatten(), label_smoothing=0.02)
            for i, name in enumerate(ATTRIBUTES)
        ]
        torch.stack(losses).sum().backward()
        optimiser.step(schedule(used / args.minutes, 0.03, 0.3, 0.01))
        step += 1
        if used - said >= 0.5:
            said = used
            log(step=step, minutes=used, loss=sum(v.item() for v in losses), **accuracy())
    log(step=step, minutes=args.minutes, **accuracy())
    args.out.mkdir(parents=True, exist_ok=True)
    words = {"subjects": WORDS["subject"], "motions": WORDS["motion"], "places": WORDS["place"], "width": 128}
    (args.out / "config.json").write_text(json.dumps(words, indent=1) + "\n", encoding="utf-8")
    save_file({n: p.half().contiguous() for n, p in reader.state_dict().items()}, args.out / "model.safetensors")
    (args.out / "model.safetensors").chmod(0o644)


if __name__ == "__main__":
    main()
