"""Train the picture autoencoder of moving-emoji: diffusers' AutoencoderKL, 64 x 64 x 3 -> 8 x 8 x 8.

    python tools/moving_emoji/train_vae.py --data emoji-data --out run/vae --minutes 7

The loss is a weighted L1 plus L1 on horizontal and vertical differences (edges) and a tiny KL term. Pixels of the
subject weigh more than the scene, because the scene is one of six and is learned within the first minute.

    python tools/moving_emoji/train_vae.py --data emoji-data --out run/decoder --decoder run/latents.pt --minutes 8

`--decoder` goes on with the decoder alone, from the encoded grid (make_latents.py), so latents that exist stay valid;
a little noise on them makes the decoder forgive small errors of a denoiser.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL
from torch import Tensor

from optimiser import Optimiser  # isort: skip
from scene import PLACES, STATES, SUBJECTS, Renderer, sample_clip, sheet  # isort: skip

sys.path.append(str(Path(__file__).parent.parent / "emoji64"))
from common import Log, save_checkpoint, schedule


def new_vae() -> AutoencoderKL:
    """The untrained autoencoder: 3 halvings, 8 latent channels, no attention.

    Two norm groups: one group per channel would take the mean colour away just before the last convolution. The
    latents start with little noise (log-variance -6).
    """
    vae = AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(16, 24, 48, 64),
        layers_per_block=1,
        latent_channels=8,
        norm_num_groups=2,
        sample_size=64,
        scaling_factor=1.0,
        force_upcast=False,
        mid_block_add_attention=False,
    )
    assert vae.quant_conv is not None and vae.quant_conv.bias is not None
    with torch.no_grad():
        vae.quant_conv.weight[8:].mul_(0.1)
        vae.quant_conv.bias[8:].fill_(-6.0)
    return vae


def to_tensor(frames: np.ndarray) -> Tensor:
    """Frames [N, H, W, 3] uint8 -> [N, 3, H, W] float32 in -1..1, channels last."""
    return torch.from_numpy(frames).permute(0, 3, 1, 2).float().div(127.5).sub(1)


def batch(
    renderer: Renderer, rng: np.random.Generator, size: int, grid: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Random frames [N, 3, 64, 64] in -1..1, pixel weights [N, 1, 64, 64] (1, or 4 on the subject), their latents."""
    subjects, frames, weights = list(SUBJECTS), [], []
    picks = [tuple(int(rng.integers(len(n))) for n in (subjects, PLACES, STATES)) for _ in range(size)]
    for i, k, m in picks:
        subject, place, at = subjects[i], PLACES[k], STATES[m]
        frames.append(renderer.frame(subject, place, at))
        weights.append(np.roll(renderer.sprite(subject, at[2], at[3])[..., 3], (at[1], at[0]), (0, 1)))
    latents = None if grid is None else torch.stack([grid[pick] for pick in picks]).float()
    return to_tensor(np.stack(frames)), 1 + 3 * torch.from_numpy(np.stack(weights)).unsqueeze(1), latents


def edges(x: Tensor) -> tuple[Tensor, Tensor]:
    """Differences of neighbouring pixels along both axes."""
    return x[..., :, 1:] - x[..., :, :-1], x[..., 1:, :] - x[..., :-1, :]


@torch.no_grad()
def psnr(vae: AutoencoderKL, frames: np.ndarray) -> tuple[float, np.ndarray]:
    """PSNR in dB over 8-bit frames [N, H, W, 3] and the reconstruction."""
    x = to_tensor(frames)
    y = vae.decode(vae.encode(x).latent_dist.mode()).sample
    back = ((y + 1) * 127.5 + 0.5).clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).numpy()
    error = ((back.astype(np.float64) - frames) ** 2).mean()
    return float(10 * np.log10(255**2 / error)), back


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("emoji-data"))
    parser.add_argument("--out", type=Path, default=Path("run/vae"))
    parser.add_argument("--minutes", type=float, default=7.0)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--decoder", type=Path, help="encoded grid; trains its decoder only")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    renderer, rng, log = Renderer(args.data), np.random.default_rng(0), Log(args.out / "vae.jsonl", 0)
    held = [sample_clip(np.random.default_rng([1, i]), "held_out") for i in range(12)]
    held_frames = np.concatenate([renderer.clip(c)[::4] for c in held])
    vae, grid = new_vae(), None
    if args.decoder:
        stored = torch.load(args.decoder)
        grid = stored["latents"]
        vae.load_state_dict(stored["vae"])
        vae.encoder.requires_grad_(False)
        vae.quant_conv.requires_grad_(False)
    optimiser = Optimiser(vae, lr=args.lr, hidden_lr=2 * args.lr)
    start, step, said = time.time(), 0, 0.0
    mean_loss = 0.0
    while (used := (time.time() - start) / 60) < args.minutes:
        x, weight, known = batch(renderer, rng, args.batch, grid)
        x = x.contiguous(memory_format=torch.channels_last)
        kl = torch.zeros(())
        if known is None:
            mean, log_variance = vae.quant_conv(vae.encoder(x)).clamp(-20, 10).chunk(2, 1)
            z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
            kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
        else:
            z = known + 0.06 * torch.randn_like(known)
        z = z.contiguous(memory_format=torch.channels_last)
        y = vae.decoder(vae.post_quant_conv(z))
        loss = ((y - x).abs() * weight).mean()
        for a, b in zip(edges(y), edges(x), strict=True):
            loss = loss + 0.5 * (a - b).abs().mean()
        loss = loss + 2e-3 * kl
        loss.backward()
        norm = optimiser.step(schedule(used / args.minutes, 0.02, 0.3, 0.01))
        step += 1
        mean_loss = loss.item() if step == 1 else 0.98 * mean_loss + 0.02 * loss.item()
        if used - said >= 0.5:
            said = used
            db, back = psnr(vae, held_frames)
            log(step=step, minutes=used, loss=mean_loss, kl=kl.item(), norm=norm, psnr_held_out=db)
            save_checkpoint(args.out / "vae.pt", {"vae": vae.state_dict(), "step": step})
            rows = [np.stack(list(held_frames[i : i + 8])) for i in range(0, 32, 8)]
            mirrored = [np.stack(list(back[i : i + 8])) for i in range(0, 32, 8)]
            sheet([r for pair in zip(rows, mirrored, strict=True) for r in pair], 2).save(args.out / "vae.png")
    db, _ = psnr(vae, held_frames)
    log(step=step, minutes=args.minutes, loss=mean_loss, psnr_held_out=db)
    save_checkpoint(args.out / "vae.pt", {"vae": vae.state_dict(), "step": step, "psnr": db})


if __name__ == "__main__":
    main()
