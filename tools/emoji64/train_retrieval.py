"""Trains the caption reader of emoji-64: a small classifier that says what a 64 x 64 picture shows.

It judges generated pictures (`mediaspec eval image`), so it sees everything the grammar can say, combinations held out
from the picture model included; its own test pictures come from another stream of specs. Pictures are damaged during
training (shift, blur, lost resolution, noise, colour) to keep it honest on the soft edges of a tokenizer.

    python tools/emoji64/train_retrieval.py --data emoji64-data --steps 3000
    python tools/emoji64/train_retrieval.py --data emoji64-data --reference pictures --count 2048

The second form writes rendered training-split pictures to a folder, for `mediaspec eval image --reference pictures`.
Runs again from its checkpoint when interrupted.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from mediaspec.eval.retrieval import ATTRIBUTES, FOLDER, ReaderNet, Vocabulary

from concepts import BACKGROUNDS, SIZES, STYLES, concepts  # isort: skip
from render import Renderer, Spec, caption, sample_spec  # isort: skip

TEST_PICTURES = 2048


def vocabulary() -> Vocabulary:
    return Vocabulary.of(concepts(), STYLES, BACKGROUNDS, SIZES)


def any_spec(rng: np.random.Generator, names: list[str]) -> Spec:
    """A spec from the whole grammar: 40 % on white, 40 % on a colour, a third small or mirrored, 20 % pairs."""
    concept, style = names[rng.integers(len(names))], list(STYLES)[rng.integers(len(STYLES))]
    if rng.random() < 0.2:
        return Spec(concept, style, other=names[rng.integers(len(names))])
    background = list(BACKGROUNDS)[rng.integers(len(BACKGROUNDS))] if rng.random() < 0.58 else "white"
    return Spec(concept, style, background, SIZES[rng.choice(3, p=[0.66, 0.17, 0.17])])


def target(spec: Spec, words: Vocabulary) -> list[int]:
    return [getattr(words, name).index(getattr(spec, name)) for name in ATTRIBUTES]


def damage(images: Tensor, rng: np.random.Generator) -> Tensor:
    """Shift, blur, lost resolution, noise and colour; one strength per batch, [n, 3, 64, 64] in -1..1 both ways."""
    dy, dx = (int(v) for v in rng.integers(-2, 3, size=2))
    x = F.pad(images, (2, 2, 2, 2), mode="replicate")[:, :, 2 + dy : 66 + dy, 2 + dx : 66 + dx]
    kind = rng.random()
    if kind < 0.3:
        side = int(rng.integers(20, 56))
        x = F.interpolate(F.interpolate(x, (side, side), mode="bilinear", antialias=True), (64, 64), mode="bicubic")
    elif kind < 0.6:
        x = F.avg_pool2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), 3, 1)
    noise = torch.from_numpy(rng.standard_normal(x.shape, np.float32)) * float(rng.uniform(0, 0.08))
    gain = torch.from_numpy(rng.uniform(0.92, 1.08, (len(x), 3, 1, 1)).astype(np.float32))
    return (x * gain + noise).clamp(-1, 1)


def learning_rate(step: int, steps: int, peak: float) -> float:
    return peak * min(1.0, step / 100) * max(0.02, 0.5 * (1 + float(np.cos(np.pi * step / steps))))


def evaluate(net: ReaderNet, renderer: Renderer, words: Vocabulary) -> dict[str, float]:
    """Accuracy per attribute on rendered held-out pictures (`sample_spec(..., split="held_out")`)."""
    net.eval()
    specs = [sample_spec(i, seed=9, split="held_out") for i in range(TEST_PICTURES)]
    images = torch.from_numpy(np.stack([renderer.draw(s) for s in specs])).permute(0, 3, 1, 2)
    truth = torch.tensor([target(s, words) for s in specs])
    with torch.inference_mode():
        parts = [net(chunk.float() / 127.5 - 1) for chunk in images.split(256)]
    right = torch.stack([torch.cat(c).argmax(1) == truth[:, a] for a, c in enumerate(zip(*parts, strict=True))], 1)
    net.train()
    return {name: round(float(right[:, a].float().mean()), 4) for a, name in enumerate(ATTRIBUTES)} | {
        "all": round(float(right.all(1).float().mean()), 4)
    }


def train(args: argparse.Namespace, renderer: Renderer) -> None:
    words, names = vocabulary(), list(concepts())
    torch.manual_seed(args.seed)
    net = ReaderNet(words.sizes())
    optimiser = torch.optim.AdamW(net.parameters(), lr=args.lr, weight_decay=0.01)
    first, log = 0, []
    if args.checkpoint.is_file():
        saved = torch.load(args.checkpoint, weights_only=True)
        net.load_state_dict(saved["net"])
        optimiser.load_state_dict(saved["optimiser"])
        first, log = saved["step"], saved["log"]
    net.train()
    start = time.time()
    for step in range(first, args.steps):
        rng = np.random.default_rng([args.seed, step])
        specs = [any_spec(rng, names) for _ in range(args.batch)]
        images = torch.from_numpy(np.stack([renderer.draw(s) for s in specs])).permute(0, 3, 1, 2).float() / 127.5 - 1
        truth = torch.tensor([target(s, words) for s in specs])
        logits = net(damage(images, rng))
        loss = sum((F.cross_entropy(head, truth[:, a]) for a, head in enumerate(logits)), torch.zeros(()))
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(step, args.steps, args.lr)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if (step + 1) % 250 == 0 or step + 1 == args.steps:
            accuracy = evaluate(net, renderer, words) if (step + 1) % 1000 == 0 or step + 1 == args.steps else {}
            log.append({"step": step + 1, "loss": round(float(loss.detach()), 4), **accuracy})
            print(json.dumps({**log[-1], "seconds": round(time.time() - start, 1)}), flush=True)
            torch.save(
                {"net": net.state_dict(), "optimiser": optimiser.state_dict(), "step": step + 1, "log": log},
                args.checkpoint,
            )
    write(net, words, args, log, evaluate(net, renderer, words))


def write(
    net: ReaderNet, words: Vocabulary, args: argparse.Namespace, log: list[dict[str, float]], test: dict[str, float]
) -> None:
    """fp16 weights, and the vocabulary with the training record."""
    args.out.mkdir(parents=True, exist_ok=True)
    state = {k: v.half().contiguous() if v.is_floating_point() else v for k, v in net.state_dict().items()}
    save_file(state, args.out / "model.safetensors")
    facts = {
        "what": "attribute classifier for emoji-64 pictures, trained on rendered pictures only",
        "rendered_held_out_accuracy": test,
        "steps": args.steps,
        "batch": args.batch,
        "seed": args.seed,
        "log": log,
        "vocabulary": {name: list(getattr(words, name)) for name in ("concept", "style", "background", "size")},
    }
    (args.out / "labels.json").write_text(json.dumps(facts, indent=1) + "\n")
    print(json.dumps(test))


def write_reference(folder: Path, count: int, renderer: Renderer) -> None:
    """Rendered pictures of the training split as PNG, and their captions."""
    folder.mkdir(parents=True, exist_ok=True)
    specs = [sample_spec(i, seed=7) for i in range(count)]
    for i, spec in enumerate(specs):
        Image.fromarray(renderer.draw(spec)).save(folder / f"{i:06d}.png")
    (folder / "captions.json").write_text(json.dumps([caption(s) for s in specs], indent=0) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("emoji64-data"))
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--checkpoint", type=Path, default=Path("retrieval.pt"))
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reference", type=Path, help="write rendered pictures to this folder instead of training")
    parser.add_argument("--count", type=int, default=2048)
    args = parser.parse_args()
    renderer = Renderer(args.data)
    if args.reference is not None:
        write_reference(args.reference, args.count, renderer)
    else:
        train(args, renderer)


if __name__ == "__main__":
    main()
