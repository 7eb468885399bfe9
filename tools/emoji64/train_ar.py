"""Train the transformer of emoji-64 together with its small T5 caption encoder.

Growth: the net starts shallow and is doubled while it trains. A new layer is a copy of the one below with its two
output matrices at zero, so the function does not jump; most of the learning is done at a fraction of the cost of the
full depth. Hidden matrices use Muon, everything else AdamW. The schedule follows the wall clock and reaches zero at
the end of ``--minutes`` whatever the speed.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 tools/emoji64/train_ar.py --data emoji64-data --out emoji64-run
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

from captions import MAX_LENGTH, build_tokenizer  # noqa: E402
from common import Log, agree, save_checkpoint, schedule, start_workers  # noqa: E402
from examples import Examples  # noqa: E402
from nets import Trainer, block, draw_tokens  # noqa: E402
from render import Renderer, sheet  # noqa: E402

from mediaspec.models.llamagen.vq import LlamaGenVQ  # noqa: E402

SHOWN = (
    "a red apple", "a cat", "a car", "a rocket", "a pizza, flat style", "a dog, fluent style",
    "a sunflower on a blue background", "a small star on a red background", "a house beside a tree", "a green apple",
    "an owl on a yellow background, flat style", "a purple heart",
)  # fmt: skip


@torch.no_grad()
def evaluate(trainer: Trainer, examples: Examples, count: int, batch: int) -> float:
    """Loss on the first examples, with condition."""
    generator = torch.Generator().manual_seed(0)
    total, fast = 0.0, trainer.block
    trainer.block = block  # the compiled graph is one with gradients
    for index in torch.arange(count).split(batch):
        tokens, ids, mask = examples.batch(index, generator)
        total += float(trainer.loss(tokens, ids, mask, torch.zeros(len(index), dtype=torch.bool))) * len(index)
    trainer.block = fast
    return total / count


@torch.no_grad()
def draw(
    trainer: Trainer,
    vq: LlamaGenVQ,
    tokenizer: PreTrainedTokenizerFast,
    texts: tuple[str, ...],
    scale: float,
    seed: int,
) -> list[np.ndarray]:
    """Pictures [64, 64, 3] uint8 for captions at temperature 1."""
    enc = tokenizer(list(texts), padding="max_length", max_length=MAX_LENGTH, return_tensors="pt")
    mask = enc.attention_mask.bool()
    feats = trainer.features(enc.input_ids, mask)
    generator = torch.Generator().manual_seed(seed)
    pixels = vq.decode_code(draw_tokens(trainer.gpt, feats, mask, scale, 1.0, generator))
    return list(((pixels.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy())


def export(trainer: Trainer, vq: LlamaGenVQ, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write all parts in fp16, each beside its place and then renamed."""
    parts = {"transformer": trainer.gpt, "text_encoder": trainer.text, "vq": vq}
    for name, part in parts.items():
        half = copy.deepcopy(part).half()
        if hasattr(half.config, "dtype"):
            half.config.dtype = "float16"
        _replace(folder / name, half.save_pretrained)
    _replace(folder / "tokenizer", tokenizer.save_pretrained)


def _replace(final: Path, write: object) -> None:
    beside = final.with_name(final.name + ".new")
    old = final.with_name(final.name + ".old")
    write(beside)  # type: ignore[operator]
    if final.exists():
        final.rename(old)
    beside.rename(final)
    if old.exists():
        for f in old.iterdir():
            f.unlink()
        old.rmdir()


def thinned(weights: dict[str, Tensor], every: int) -> dict[str, Tensor]:
    """Weights of a transformer with only every `every`-th layer left."""
    out = {}
    for name, w in weights.items():
        if name.startswith("layers."):
            _, number, rest = name.split(".", 2)
            if int(number) % every:
                continue
            name = f"layers.{int(number) // every}.{rest}"
        out[name] = w
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("emoji64-data"))
    parser.add_argument("--out", type=Path, default=Path("emoji64-run"))
    parser.add_argument("--minutes", type=float, default=70.0)
    parser.add_argument("--depth", type=int, default=5, help="layers at the start")
    parser.add_argument("--grow", type=str, default="0.5:10,0.72:20", help="fraction of the time : layers")
    parser.add_argument("--batch", type=int, default=16, help="pictures per process and step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--muon-lr", type=float, default=5e-3)
    parser.add_argument("--hold", type=float, default=0.3, help="fraction of the time at the peak rate")
    parser.add_argument("--examples", type=int, default=60000)
    parser.add_argument("--boost", type=str, default="unsaid=0.3", help="kind of caption=extra share of it, ...")
    parser.add_argument("--hide", type=float, default=0.5, help="share of pictures with hidden input tokens")
    parser.add_argument("--wrong", type=float, default=0.2, help="highest share of false input tokens in a picture")
    parser.add_argument("--first", type=float, default=2.0, help="extra loss weight of the first rows")
    parser.add_argument("--sheet-minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--from", dest="start", type=Path, help="begin with the weights of this ar-final.pt")
    parser.add_argument(
        "--thin", type=int, default=1, help="with --from: keep every n-th layer, undoing a late growth"
    )
    args = parser.parse_args()

    rank, world = start_workers()
    torch.manual_seed(args.seed)
    log = Log(args.out / "ar.jsonl", rank)
    tokenizer = build_tokenizer()
    vq = LlamaGenVQ.from_pretrained(args.out / "vq").float().eval()
    kept = args.out / "ar-examples.pt"
    if rank == 0 and not kept.exists():
        renderer = Renderer(args.data)
        made = {split: Examples(renderer, vq, tokenizer, count, split, args.seed + 1)
                for split, count in (("train", args.examples), ("held_out", 1024))}  # fmt: skip
        save_checkpoint(kept, {k: v.__dict__ for k, v in made.items()})
    agree(0.0, world)
    sets = Examples.load(kept)
    train, held = sets["train"], sets["held_out"]
    boosts = [
        (float(share), train.pool(name)) for name, share in (part.split("=") for part in args.boost.split(",") if part)
    ]

    trainer = Trainer(args.depth, len(tokenizer), not args.no_compile)
    growth = [(float(a), int(b)) for a, b in (part.split(":") for part in args.grow.split(",") if part)]
    step, used, path = 0, 0.0, args.out / "ar.pt"
    if args.start is not None and not (args.resume and path.exists()):
        state = torch.load(args.start, weights_only=True)
        trainer.gpt.load_state_dict(thinned(state["gpt"], args.thin))
        trainer.text.load_state_dict(state["text"])
    if args.resume and path.exists():
        state = torch.load(path, weights_only=True)
        if state["depth"] != args.depth:
            trainer.grow(state["depth"])
        trainer.gpt.load_state_dict(state["gpt"])
        trainer.text.load_state_dict(state["text"])
        trainer.adam.load_state_dict(state["adam"])
        for a, b in zip(trainer.muon.buffers, state["muon"], strict=True):
            a.copy_(b)
        step, used = state["step"], state["seconds"]
    generator = torch.Generator().manual_seed(args.seed * 1000 + step * world + rank)
    log(event="start", world=world, batch=args.batch, pictures=len(train.codes), depth=trainer.gpt.config.n_layer,
        parameters=sum(p.numel() for m in (trainer.gpt, trainer.text) for p in m.parameters()))  # fmt: skip
    began = saved = shown = time.time()
    running, since, done = 0.0, time.time(), 0
    while True:
        seconds = agree(used + time.time() - began, world)
        progress = seconds / (60 * args.minutes)
        if progress >= 1:
            break
        for at, depth in growth:
            if progress >= at and len(trainer.gpt.layers) < depth:
                trainer.grow(depth)
                log(event="grow", step=step, depth=depth)
        factor = schedule(progress, warmup=0.015, hold=args.hold)
        index = torch.randint(len(train.picture), (args.batch,), generator=generator)
        place = torch.rand(args.batch, generator=generator)
        for share, pool in boosts:
            index = torch.where((place >= 0) & (place < share), pool[index % len(pool)], index)
            place = torch.where(place < share, -1.0, place - share)
        tokens, ids, mask = train.batch(index, generator)
        drop = torch.rand(args.batch, generator=generator) < 0.1
        hidden = torch.rand(args.batch, 1, generator=generator) < args.hide
        rate = torch.rand(args.batch, 1, generator=generator) * hidden
        seen = (torch.rand(tokens.shape, generator=generator) >= rate).float()
        # A net that never saw a wrong token loses the thread after its first own mistake.
        wrong = args.wrong * torch.rand(args.batch, 1, generator=generator)
        others = tokens.flatten()[torch.randperm(tokens.numel(), generator=generator)].view_as(tokens)
        written = torch.where(torch.rand(tokens.shape, generator=generator) < wrong, others, tokens)
        loss = trainer.loss(tokens, ids, mask, drop, seen, args.first, written)
        loss.backward()
        trainer.step(args.lr * factor, args.muon_lr * factor, rank, world)
        step, done = step + 1, done + args.batch * world
        value = float(loss.detach())
        running = 0.95 * running + 0.05 * value if running else value
        if step % 25 == 0:
            log(
                step=step,
                minutes=seconds / 60,
                loss=running,
                lr=factor,
                depth=len(trainer.gpt.layers),
                images_per_s=done / (time.time() - since),
            )
            since, done = time.time(), 0
        if rank == 0 and time.time() - saved > 180:
            saved = time.time()
            save_checkpoint(
                path,
                dict(
                    gpt=trainer.gpt.state_dict(),
                    text=trainer.text.state_dict(),
                    adam=trainer.adam.state_dict(),
                    muon=trainer.muon.buffers,
                    step=step,
                    seconds=seconds,
                    depth=len(trainer.gpt.layers),
                ),
            )
        if rank == 0 and time.time() - shown > 60 * args.sheet_minutes:
            shown = time.time()
            log(
                step=step,
                held_out_loss=evaluate(trainer, held, 96, args.batch),
                train_loss=evaluate(trainer, train, 96, args.batch),
            )
            sheet(draw(trainer, vq, tokenizer, SHOWN, 3.0, 0), 6, 2).save(args.out / f"ar-{step:06d}.png")
            export(trainer, vq, tokenizer, args.out / "export")
            since, done = time.time(), 0
    if rank == 0:
        for _, depth in growth:
            if len(trainer.gpt.layers) < depth:
                trainer.grow(depth)
        save_checkpoint(
            args.out / "ar-final.pt", dict(gpt=trainer.gpt.state_dict(), text=trainer.text.state_dict(), step=step)
        )
        export(trainer, vq, tokenizer, args.out / "export")
        log(
            step=step,
            held_out_loss=evaluate(trainer, held, 192, args.batch),
            train_loss=evaluate(trainer, train, 192, args.batch),
        )
        sheet(draw(trainer, vq, tokenizer, SHOWN, 3.0, 0), 6, 2).save(args.out / f"ar-{step:06d}.png")
        log(event="end", step=step)


if __name__ == "__main__":
    main()
