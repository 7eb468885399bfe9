"""Encode every frame of the moving-emoji grid once, normalised per channel.

    python tools/moving_emoji/make_latents.py --data emoji-data --vae run/vae/vae.pt --out run/latents.pt

AnimateDiffPipeline knows one scalar `scaling_factor` only, so the per-channel mean and scale go into the
autoencoder's own 1 x 1 convolutions: afterwards its latents have mean 0 and variance 1 and `scaling_factor` is 1.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL
from torch import Tensor

from scene import PLACES, STATES, SUBJECTS, Renderer  # isort: skip
from train_vae import new_vae, to_tensor  # isort: skip


@torch.no_grad()
def encode_grid(vae: AutoencoderKL, renderer: Renderer, chunk: int = 36) -> Tensor:
    """Latent means of all frames: [subjects, places, states, 8, 8, 8] float16."""
    out = torch.empty(len(SUBJECTS), len(PLACES), len(STATES), 8, 8, 8, dtype=torch.float16)
    for i, subject in enumerate(SUBJECTS):
        for j, place in enumerate(PLACES):
            for k in range(0, len(STATES), chunk):
                frames = to_tensor(np.stack([renderer.frame(subject, place, s) for s in STATES[k : k + chunk]]))
                out[i, j, k : k + chunk] = vae.encode(frames).latent_dist.mean.half()
    return out


@torch.no_grad()
def normalise(vae: AutoencoderKL, mean: Tensor, std: Tensor) -> None:
    """Fold latent mean and standard deviation [8] into the autoencoder's 1 x 1 convolutions, in place."""
    before, after = vae.quant_conv, vae.post_quant_conv
    assert before is not None and before.bias is not None and after is not None and after.bias is not None
    n = len(mean)
    before.weight[:n] /= std.view(-1, 1, 1, 1)
    before.bias[:n] = (before.bias[:n] - mean) / std
    before.bias[n:] -= 2 * std.log()
    after.bias += (after.weight[:, :, 0, 0] * mean).sum(1)
    after.weight *= std.view(1, -1, 1, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("emoji-data"))
    parser.add_argument("--vae", type=Path, default=Path("run/vae/vae.pt"))
    parser.add_argument("--out", type=Path, default=Path("run/latents.pt"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    start = time.time()
    vae = new_vae()
    vae.load_state_dict(torch.load(args.vae)["vae"])
    latents = encode_grid(vae, Renderer(args.data))
    flat = latents.float().permute(3, 0, 1, 2, 4, 5).flatten(1)
    mean, std = flat.mean(1), flat.std(1)
    normalise(vae, mean, std)
    shape = (1, 1, 1, -1, 1, 1)
    latents = ((latents.float() - mean.view(shape)) / std.view(shape)).half()
    torch.save({"latents": latents, "vae": vae.state_dict(), "mean": mean, "std": std}, args.out)
    print(f"mean {mean.tolist()}\nstd {std.tolist()}\nlargest {latents.abs().max():.2f}, {time.time() - start:.0f} s")


if __name__ == "__main__":
    main()
