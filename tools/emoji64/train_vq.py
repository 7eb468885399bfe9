"""Train the picture tokenizer of emoji-64: 64 x 64 pixels <-> 16 x 16 codes out of 1024.

First a plain auto-encoder on the unit sphere, then a k-means codebook, then straight-through quantisation with an
exponential moving average codebook and restarts of unused codes. ``--stage decoder`` polishes the decoder alone (the
codes of a picture stay what they were, so nothing trained on them changes): half of its pictures come with the
encoder's codes, half with the canonical ones that the transformer writes (`codes.py`, kept in `ar-examples.pt`).

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 tools/emoji64/train_vq.py --data emoji64-data --out emoji64-run
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

from common import Log, agree, average, average_gradients, save_checkpoint, schedule, start_workers  # noqa: E402
from render import Renderer, sample, sample_spec, sheet  # noqa: E402

from mediaspec.models.llamagen.vq import LlamaGenVQ, LlamaGenVQConfig  # noqa: E402

CONFIG = dict(
    ch=16, ch_mult=(1, 2, 4), num_res_blocks=1, z_channels=64, codebook_size=1024, codebook_embed_dim=8, norm_groups=4
)
COMMITMENT = 0.1
L1 = 0.05
EMA = 0.98
DEAD = 0.02  # a code whose running count per step falls below this is restarted


def pictures(renderer: Renderer, first: int, count: int, seed: int, split: str) -> Tensor:
    """[count, 3, 64, 64] in -1..1."""
    x = np.stack([sample(renderer, first + i, seed, split)[0] for i in range(count)])
    return torch.from_numpy(x).permute(0, 3, 1, 2).float() / 127.5 - 1


def features(vq: LlamaGenVQ, x: Tensor) -> Tensor:
    """The encoder's unit vectors [B, D, h, w], fp32, before quantisation."""
    with torch.autocast("cpu", torch.bfloat16):
        z = vq.quant_conv(vq.encoder(x))
    return F.normalize(z.float(), dim=1)


def decode(vq: LlamaGenVQ, z: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return vq.decoder(vq.post_quant_conv(z)).float()


def rows(z: Tensor) -> Tensor:
    """[B, D, h, w] -> [B * h * w, D]."""
    return z.permute(0, 2, 3, 1).reshape(-1, z.shape[1])


def kmeans(points: Tensor, k: int, steps: int, generator: torch.Generator) -> Tensor:
    """Spherical k-means. Returns [k, D] unit centres."""
    centres = points[torch.randperm(len(points), generator=generator)[:k]].clone()
    for _ in range(steps):
        index = (points @ centres.t()).argmax(1)
        sums = torch.zeros_like(centres).index_add_(0, index, points)
        empty = sums.norm(dim=1) < 1e-6
        sums[empty] = points[torch.randint(len(points), (int(empty.sum()),), generator=generator)]
        centres = F.normalize(sums, dim=1)
    return centres


def psnr(a: Tensor, b: Tensor) -> float:
    """Mean of the pictures' PSNR in dB, for values in -1..1 clamped there."""
    mse = ((a.clamp(-1, 1) - b) / 2).pow(2).mean((1, 2, 3)).clamp(min=1e-7)
    return float((-10 * mse.log10()).mean())


def canonical_batch(
    vq: LlamaGenVQ, renderer: Renderer, examples: dict[str, Any], some: range, split: str = "train"
) -> tuple[Tensor, Tensor]:
    """Pictures [n, 3, 64, 64] of the transformer's examples and the vectors [n, D, 16, 16] of their codes."""
    count = len(examples["picture"])
    x = np.stack([renderer.draw(sample_spec(i % count, examples["seed"], split)) for i in some])
    codes = examples["codes"][examples["picture"][[i % count for i in some]]].long()
    z = vq.quantize.codebook()[codes.view(-1, 16, 16)].permute(0, 3, 1, 2)
    return torch.from_numpy(x).permute(0, 3, 1, 2).float() / 127.5 - 1, z


@torch.no_grad()
def evaluate(vq: LlamaGenVQ, x: Tensor, quantised: bool) -> tuple[float, int, Tensor]:
    """Held-out PSNR, number of codes used and reconstructions, in fp32 as users run it."""
    vq.eval()
    out, used = [], set()
    for part in x.split(32):
        z = F.normalize(vq.quant_conv(vq.encoder(part)), dim=1)
        if quantised:
            index = (rows(z) @ vq.quantize.codebook().t()).argmax(1).view(part.shape[0], z.shape[2], z.shape[3])
            used |= set(index.unique().tolist())
            out.append(vq.decode_code(index))
        else:
            out.append(vq.decode(z))
    vq.train()
    y = torch.cat(out)
    return psnr(y, x), len(used), y


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("emoji64-data"))
    parser.add_argument("--out", type=Path, default=Path("emoji64-run"))
    parser.add_argument("--stage", choices=("all", "decoder"), default="all")
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--plain-minutes", type=float, default=3.0, help="auto-encoder without codes at the start")
    parser.add_argument("--batch", type=int, default=8, help="pictures per process and step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    rank, world = start_workers()
    torch.manual_seed(args.seed)
    log = Log(args.out / f"vq-{args.stage}.jsonl", rank)
    renderer = Renderer(args.data)
    vq = LlamaGenVQ(LlamaGenVQConfig(**CONFIG))
    if args.stage == "decoder":
        vq = LlamaGenVQ.from_pretrained(args.out / "vq").float()
        for p in [*vq.encoder.parameters(), *vq.quant_conv.parameters(), *vq.quantize.parameters()]:
            p.requires_grad_(False)
    codebook = vq.quantize.embedding.weight
    codebook.requires_grad_(False)
    trained = [p for p in vq.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.lr, betas=(0.9, 0.98), weight_decay=0.0)
    sums, counts = torch.zeros_like(codebook), torch.zeros(len(codebook))
    average_model = {n: p.detach().clone() for n, p in vq.named_parameters()} if args.stage == "decoder" else {}
    step, used_seconds, quantised = 0, 0.0, args.stage == "decoder"
    path = args.out / f"vq-{args.stage}.pt"
    if args.resume and path.exists():
        state = torch.load(path, weights_only=True)
        vq.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        sums, counts = state["sums"], state["counts"]
        average_model = state["average"]
        step, used_seconds, quantised = state["step"], state["seconds"], state["quantised"]
    examples: dict[str, Any] = {}
    if args.stage == "decoder":
        examples = torch.load(args.out / "ar-examples.pt", weights_only=True)
        for split in examples.values():
            split["seed"] = args.seed + 1
    canonical = examples.get("train", {})
    held = pictures(renderer, 0, 96, args.seed, "held_out") if rank == 0 else torch.empty(0)
    generator = torch.Generator().manual_seed(args.seed + step)
    began = saved = time.time()
    running = 0.0
    log(
        event="start",
        stage=args.stage,
        parameters=sum(p.numel() for p in vq.parameters()),
        world=world,
        batch=args.batch,
    )
    while True:
        seconds = agree(used_seconds + time.time() - began, world)
        progress = seconds / (60 * args.minutes)
        if progress >= 1:
            break
        if not quantised and seconds > 60 * args.plain_minutes:
            with torch.no_grad():
                z = torch.cat(
                    [rows(features(vq, pictures(renderer, i * 32, 32, args.seed + 7, "train"))) for i in range(8)]
                )
                codebook.copy_(kmeans(z.unique(dim=0), len(codebook), 8, generator))
                if world > 1:
                    dist.broadcast(codebook, 0)
                sums.copy_(codebook), counts.fill_(1.0)
            quantised = True
            log(event="codebook", step=step)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * schedule(progress)
        x = pictures(renderer, (step * world + rank) * args.batch, args.batch, args.seed + 1, "train")
        with torch.set_grad_enabled(args.stage == "all"):
            z = features(vq, x)
        if canonical:
            half = args.batch // 2
            some = range((step * world + rank) * half, (step * world + rank + 1) * half)
            x[:half], z[:half] = canonical_batch(vq, renderer, canonical, some)
        loss = torch.zeros(())
        if quantised:
            with torch.no_grad():
                flat = rows(z)
                index = (flat @ vq.quantize.codebook().t()).argmax(1)
                z_q = vq.quantize.codebook()[index].view(z.shape[0], z.shape[2], z.shape[3], -1).permute(0, 3, 1, 2)
            if args.stage == "all":
                loss = COMMITMENT * (z_q - z).pow(2).mean()
                with torch.no_grad():
                    new_sums = torch.zeros_like(codebook).index_add_(0, index, flat)
                    new_counts = torch.bincount(index, minlength=len(codebook)).float()
                    average([new_sums, new_counts], world)
                    sums.lerp_(new_sums, 1 - EMA), counts.lerp_(new_counts, 1 - EMA)
                    dead = counts < DEAD
                    if bool(dead.any()) and progress < 0.8:
                        fresh = flat[torch.randint(len(flat), (int(dead.sum()),), generator=generator)]
                        if world > 1:
                            dist.broadcast(fresh, 0)
                        sums[dead], counts[dead] = fresh, 1.0
                    codebook.copy_(F.normalize(sums, dim=1))
            decoded = decode(vq, z + (z_q - z).detach())
        else:
            decoded = decode(vq, z)
        error = decoded - x
        mse = error.pow(2).mean()
        loss = loss + mse + L1 * error.abs().mean()
        optimizer.zero_grad()
        loss.backward()
        average_gradients(vq, world)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        step += 1
        running = 0.98 * running + 0.02 * float(mse) if running else float(mse)
        if average_model:
            for n, p in vq.named_parameters():
                average_model[n].lerp_(p.detach(), 0.005)
        if step % 200 == 0:
            log(step=step, minutes=seconds / 60, mse=running, images_per_s=args.batch * world * step / max(seconds, 1))
        if time.time() - saved > 120 and rank == 0:
            saved = time.time()
            store(args.out, vq, held, quantised, log, step, args.stage)
            if canonical:
                canonical_report(vq, renderer, examples["held_out"], log, step)
            save_checkpoint(
                path,
                dict(
                    model=vq.state_dict(),
                    optimizer=optimizer.state_dict(),
                    sums=sums,
                    counts=counts,
                    average=average_model,
                    step=step,
                    seconds=seconds,
                    quantised=quantised,
                ),
            )
    if average_model:
        vq.load_state_dict(average_model, strict=False)
    if rank == 0:
        store(args.out, vq, held, quantised, log, step, args.stage)
        if canonical:
            canonical_report(vq, renderer, examples["held_out"], log, step)
        beside = args.out / ("vq.new" if args.stage == "all" else "vq-decoder.new")
        vq.save_pretrained(beside)
        final = args.out / ("vq" if args.stage == "all" else "vq-decoder")
        if final.exists():
            final.rename(final.with_suffix(f".{int(time.time())}"))
        beside.rename(final)
        log(event="end", step=step)


@torch.no_grad()
def canonical_report(vq: LlamaGenVQ, renderer: Renderer, examples: dict[str, Any], log: Log, step: int) -> None:
    """Log the PSNR of held-out pictures decoded from canonical codes."""
    x, z = canonical_batch(vq, renderer, examples, range(96), "held_out")
    y = torch.cat([vq.decode(part) for part in z.split(32)])
    log(step=step, held_out_canonical_psnr=psnr(y, x))


def store(run: Path, vq: LlamaGenVQ, held: Tensor, quantised: bool, log: Log, step: int, stage: str) -> None:
    """Log the held-out PSNR and write a sheet of originals above their reconstructions."""
    value, used, y = evaluate(vq, held, quantised)
    log(step=step, held_out_psnr=value, codes_used=used, quantised=quantised)
    both = torch.stack([held[:48].view(4, 12, 3, 64, 64), y[:48].clamp(-1, 1).view(4, 12, 3, 64, 64)], 1)
    tiles = ((both.reshape(-1, 3, 64, 64) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()
    sheet(list(tiles), 12, 2).save(run / f"vq-{stage}.png")


if __name__ == "__main__":
    main()
