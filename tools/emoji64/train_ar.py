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
import re
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

from captions import MAX_LENGTH, build_tokenizer, without_article  # noqa: E402
from codes import Composer  # noqa: E402
from common import Log, agree, average_gradients, save_checkpoint, schedule, start_workers  # noqa: E402
from muon import Muon  # noqa: E402
from render import Renderer, caption, sample_spec, sheet  # noqa: E402

from mediaspec.models.llamagen.gpt import LlamaGenConfig, LlamaGenGPT, attention_mask  # noqa: E402
from mediaspec.models.llamagen.vq import LlamaGenVQ  # noqa: E402

WIDTH = 192
ENCODER_RATE = 0.1
KINDS = {
    "unsaid": r"(?!.*(background|beside|small|mirrored|style))",
    "styled": r"(?!.*(background|beside|small|mirrored)).*style",
    "coloured": r"(?!.*(beside|small|mirrored|flat|fluent)).*background",
}
"""Kinds of captions that training can boost: plain shaded, plain with a named style, shaded on a colour."""
SHOWN = (
    "a red apple", "a cat", "a car", "a rocket", "a pizza, flat style", "a dog, fluent style",
    "a sunflower on a blue background", "a small star on a red background", "a house beside a tree", "a green apple",
    "an owl on a yellow background, flat style", "a purple heart",
)  # fmt: skip


def build_gpt(depth: int) -> LlamaGenGPT:
    """The transformer with its first `depth` layers."""
    return LlamaGenGPT(
        LlamaGenConfig(
            dim=WIDTH, n_layer=depth, n_head=6, vocab_size=1024, block_size=256, multiple_of=64, condition="text",
            cls_token_num=MAX_LENGTH, caption_dim=WIDTH, class_dropout_prob=0.1, prefix_rotation="identity",
            token_dropout_p=0.0, resid_dropout_p=0.0, ffn_dropout_p=0.0,
        )
    )  # fmt: skip


def build_text_encoder(vocabulary: int) -> T5EncoderModel:
    """A two-layer T5 encoder."""
    config = T5Config(
        vocab_size=vocabulary, d_model=WIDTH, d_kv=48, d_ff=512, num_layers=2, num_heads=4, dropout_rate=0.0,
        feed_forward_proj="gated-gelu", pad_token_id=0, eos_token_id=1, relative_attention_max_distance=16,
    )  # fmt: skip
    encoder = T5EncoderModel(config)
    with torch.no_grad():
        # Small word vectors move far in a few steps, and layers that start as the identity do not drown them: without
        # this the transformer ignores its captions for the first 20,000 pictures.
        encoder.shared.weight.mul_(0.05)
        for name, p in encoder.named_parameters():
            if name.endswith((".o.weight", ".wo.weight")):
                p.zero_()
    return encoder


class Attend(torch.autograd.Function):
    """Masked attention by batched products; on a CPU in bf16 about twice as fast as the fused kernel at this size."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """q (scaled), k, v [B, H, N, D] bf16; mask [B, 1, N, N] additive."""
        b, h, n, d = q.shape
        q, k, v = (t.reshape(b * h, n, d) for t in (q, k, v))
        s = torch.bmm(q, k.transpose(1, 2))
        s.view(b, h, n, n).add_(mask)
        p = torch.softmax(s, -1)
        ctx.save_for_backward(q, k, v, p)
        return torch.bmm(p, v).view(b, h, n, d)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, p = ctx.saved_tensors
        shape = g.shape
        g = g.reshape(q.shape)
        dv = torch.bmm(p.transpose(1, 2), g)
        ds = torch._softmax_backward_data(torch.bmm(g, v.transpose(1, 2)), p, -1, p.dtype)
        return torch.bmm(ds, k).view(shape), torch.bmm(ds.transpose(1, 2), q).view(shape), dv.view(shape), None


class CrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of bf16 logits in fp32, with its gradient made in the same pass."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
        """logits [M, V] bf16, labels [M], weight [M] of mean 1."""
        p = torch.softmax(logits.float(), -1)
        hit = p.gather(1, labels[:, None])
        p.scatter_(1, labels[:, None], hit - 1).mul_(weight[:, None] / len(p))
        ctx.save_for_backward(p.to(logits.dtype))
        return -(hit[:, 0].clamp(min=1e-30).log() * weight).mean()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return ctx.saved_tensors[0] * g.to(ctx.saved_tensors[0].dtype), None, None


def block(
    x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor,
    norm1: Tensor, wqkv: Tensor, wo: Tensor, norm2: Tensor, w1: Tensor, w3: Tensor, w2: Tensor,
) -> Tensor:  # fmt: skip
    """One layer as a function of its weights, so that one compiled graph serves every layer.

    Args:
        x: [B, N, WIDTH] fp32 residual stream.
        cos, sin: [N, D / 2] fp32.
        mask: [B, 1, N, N] additive bf16.
    """
    b, n, d = x.shape
    h = F.rms_norm(x, (d,), norm1, 1e-5).bfloat16()
    qkv = F.linear(h, wqkv).view(b, n, 3, 6, d // 6)
    pairs = qkv[:, :, :2].float().unflatten(-1, (-1, 2))
    even, odd = pairs[..., 0], pairs[..., 1]
    c, s = cos[:, None, None, :], sin[:, None, None, :]
    turned = torch.stack([even * c - odd * s, odd * c + even * s], -1).flatten(-2).bfloat16()
    q, k, v = turned[:, :, 0].transpose(1, 2), turned[:, :, 1].transpose(1, 2), qkv[:, :, 2].transpose(1, 2)
    a = Attend.apply(q * (d // 6) ** -0.5, k, v, mask).transpose(1, 2).reshape(b, n, d)
    x = x + F.linear(a, wo).float()
    h = F.rms_norm(x, (d,), norm2, 1e-5).bfloat16()
    return x + F.linear(F.silu(F.linear(h, w1)) * F.linear(h, w3), w2).float()


class Trainer:
    """Models, optimisers and growth. Matrices reach the layers as bf16 copies of fp32 parameters."""

    block = staticmethod(block)

    def __init__(self, depth: int, vocabulary: int, compiled: bool) -> None:
        self.gpt, self.text = build_gpt(depth), build_text_encoder(vocabulary)
        for fc in (self.gpt.cls_embedding.cap_proj.fc1, self.gpt.cls_embedding.cap_proj.fc2):
            nn.init.orthogonal_(fc.weight)
        if compiled:
            self.block = torch.compile(block, dynamic=False)
        self.optimisers()

    def optimisers(self) -> None:
        # A text encoder that moves at the rate of the image embeddings outgrows its own word vectors within minutes
        # and then tells captions apart no more, so its matrices go at a tenth of that rate.
        projection = self.gpt.cls_embedding.cap_proj
        hidden = [p for p in (*self.gpt.layers.parameters(), *projection.parameters()) if p.dim() == 2]
        encoder = [p for n, p in self.text.named_parameters() if p.dim() == 2 and not n.startswith("shared")]
        ids = {id(p) for p in (*hidden, *encoder)}
        rest = [p for m in (self.gpt, self.text) for p in m.parameters() if id(p) not in ids]
        self.muon = Muon(hidden, WIDTH, weight_decay=0.01)
        old = getattr(self, "adam", None)
        groups = [{"params": rest, "scale": 1.0}, {"params": encoder, "scale": ENCODER_RATE}]
        self.adam = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.97), weight_decay=0.0, eps=1e-10)
        if old is not None:
            for p in (*rest, *encoder):
                if p in old.state:
                    self.adam.state[p] = old.state[p]

    def grow(self, depth: int) -> None:
        """Insert copies after every layer until the net has `depth` layers; the function stays the same."""
        old = list(self.gpt.layers)
        times, rest = divmod(depth, len(old))
        if rest:
            raise ValueError(f"cannot grow {len(old)} layers to {depth}; write a multiple of {len(old)}")
        layers = []
        for layer in old:
            layers.append(layer)
            for _ in range(times - 1):
                new = copy.deepcopy(layer)
                nn.init.zeros_(new.attention.wo.weight)
                nn.init.zeros_(new.feed_forward.w2.weight)
                layers.append(new)
        for i, layer in enumerate(layers):
            layer.attention.layer = i
        self.gpt.layers = nn.ModuleList(layers)
        self.gpt.config.n_layer = depth
        self.optimisers()

    def features(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.text(input_ids=ids, attention_mask=mask).last_hidden_state

    def run(self, tokens: Tensor, ids: Tensor, mask: Tensor, drop: Tensor, seen: Tensor | None = None) -> Tensor:
        """Output of the last layer [B, 16 + 256, WIDTH] before the final norm; arguments as for `loss`."""
        gpt = self.gpt
        image = gpt.tok_embeddings(tokens)
        if seen is not None:
            image = image * seen[..., None]
        h = torch.cat([gpt.embed_condition(self.features(ids, mask), mask, drop), image], 1)
        cos, sin = (t[: h.shape[1]] for t in gpt.rope_table())
        allowed = attention_mask(mask, 0, h.shape[1])
        bias = torch.zeros(allowed.shape, dtype=torch.bfloat16).masked_fill_(~allowed, -30000.0)
        for layer in gpt.layers:
            a, f = layer.attention, layer.feed_forward
            matrices = [w.weight.bfloat16() for w in (a.wqkv, a.wo, f.w1, f.w3, f.w2)]
            h = self.block(
                h,
                cos,
                sin,
                bias,
                layer.attention_norm.weight,
                matrices[0],
                matrices[1],
                layer.ffn_norm.weight,
                *matrices[2:],
            )
        return h

    def loss(
        self, tokens: Tensor, ids: Tensor, mask: Tensor, drop: Tensor, seen: Tensor | None = None, first: float = 0.0
    ) -> Tensor:  # fmt: skip
        """Mean cross-entropy per image token.

        Args:
            tokens: [B, 256] int64.
            ids, mask: [B, 16] caption tokens and their validity.
            drop: [B] bool, rows trained without condition.
            seen: [B, 256] 0 or 1; image tokens at 0 are hidden from the transformer but still to be predicted.
            first: extra weight of the first rows of a picture, where the caption decides.
        """
        h = self.run(tokens, ids, mask, drop, seen)
        gpt = self.gpt
        h = gpt.norm(h[:, MAX_LENGTH - 1 : -1]).bfloat16()  # the last token is run for even shapes only
        logits = F.linear(h, gpt.output.weight.bfloat16())
        weight = 1 + first * torch.exp(-torch.arange(256).div(16, rounding_mode="floor") / 3)
        return CrossEntropy.apply(logits.flatten(0, 1), tokens.flatten(), (weight / weight.mean()).repeat(len(tokens)))

    def step(self, lr: float, muon_lr: float, rank: int, world: int) -> None:
        for m in (self.gpt, self.text):
            average_gradients(m, world)
        for group in self.adam.param_groups:
            group["lr"] = lr * group["scale"]
        self.adam.step()
        self.muon.step(muon_lr, rank, world)
        self.gpt.zero_grad(), self.text.zero_grad()


class Examples:
    """Tokenised pictures and captions, drawn once and kept.

    Args:
        renderer: draws the pictures.
        vq: tokenizer of pictures.
        tokenizer: tokenizer of captions.
        count: number of sampled specs; equal pictures are tokenised once.
        split: "train" or "held_out".
    """

    def __init__(
        self, renderer: Renderer, vq: LlamaGenVQ, tokenizer: PreTrainedTokenizerFast, count: int, split: str, seed: int
    ) -> None:  # fmt: skip
        specs = [sample_spec(i, seed, split) for i in range(count)]
        place: dict[tuple[str, ...], int] = {}
        drawings = []
        self.picture = torch.empty(count, dtype=torch.long)
        for i, s in enumerate(specs):
            key = (s.concept, s.style, s.background, s.size, s.other)
            if key not in place:
                place[key] = len(drawings)
                drawings.append(s)
            self.picture[i] = place[key]
        self.codes = Composer(renderer, lambda x: vq.encode(x)[1]).codes(drawings).short()
        self.captions = [caption(s) for s in specs]
        self.ids = self._encode(tokenizer, self.captions)
        self.short_ids = self._encode(tokenizer, [without_article(c) for c in self.captions])

    @staticmethod
    def _encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Tensor:
        return torch.tensor(tokenizer(texts, padding="max_length", max_length=MAX_LENGTH).input_ids, dtype=torch.short)

    def pool(self, kind: str) -> Tensor:
        """Indices of all examples of a kind of caption, a key of `KINDS`."""
        if kind not in KINDS:
            raise ValueError(f"unknown kind of caption {kind!r}; allowed are {', '.join(KINDS)}")
        return torch.tensor([i for i, c in enumerate(self.captions) if re.match(KINDS[kind], c)])

    def batch(self, index: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [B, 256], caption ids [B, 16] (every tenth without its first article) and their mask."""
        hasty = torch.rand(len(index), 1, generator=generator) < 0.1
        ids = torch.where(hasty, self.short_ids[index], self.ids[index]).long()
        return self.codes[self.picture[index]].long(), ids, ids != 0


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
    """Pictures [64, 64, 3] uint8 for captions, by plain guided sampling at temperature 1 with a key-value cache."""
    gpt, b = trainer.gpt, len(texts)
    enc = tokenizer(list(texts), padding="max_length", max_length=MAX_LENGTH, return_tensors="pt")
    mask = enc.attention_mask.bool()
    feats = trainer.features(enc.input_ids, mask)
    drop = torch.arange(2 * b) >= b
    mask2 = torch.cat([mask, mask])
    h = gpt.embed_condition(torch.cat([feats, feats]), mask2, drop)
    cos, sin = gpt.rope_table()
    total = MAX_LENGTH + 256
    cache = torch.zeros(len(gpt.layers), 2, 2 * b, 6, total, WIDTH // 6)
    generator = torch.Generator().manual_seed(seed)
    tokens, at = [], 0
    for _ in range(256):
        n = h.shape[1]
        visible = attention_mask(mask2, at, n)

        def attend(
            layer: int, q: Tensor, k: Tensor, v: Tensor, at: int = at, n: int = n, visible: Tensor = visible
        ) -> Tensor:
            cache[layer, 0, :, :, at : at + n], cache[layer, 1, :, :, at : at + n] = k, v
            return F.scaled_dot_product_attention(
                q, cache[layer, 0, :, :, : at + n], cache[layer, 1, :, :, : at + n], visible
            )

        logits = gpt.head(gpt.run_layers(h, cos[at : at + n], sin[at : at + n], attend)[:, -1])
        at += n
        guided = logits[b:] + scale * (logits[:b] - logits[b:])
        token = torch.multinomial(guided.softmax(-1), 1, generator=generator)
        tokens.append(token)
        h = gpt.tok_embeddings(torch.cat([token, token]))
    pixels = vq.decode_code(torch.cat(tokens, 1))
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
    parser.add_argument("--first", type=float, default=2.0, help="extra loss weight of the first rows")
    parser.add_argument("--sheet-minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--resume", action="store_true")
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
    loaded = torch.load(kept, weights_only=True)
    sets = {}
    for split, values in loaded.items():
        sets[split] = Examples.__new__(Examples)
        sets[split].__dict__.update(values)
    train, held = sets["train"], sets["held_out"]
    boosts = [
        (float(share), train.pool(name)) for name, share in (part.split("=") for part in args.boost.split(",") if part)
    ]

    trainer = Trainer(args.depth, len(tokenizer), not args.no_compile)
    growth = [(float(a), int(b)) for a, b in (part.split(":") for part in args.grow.split(",") if part)]
    step, used, path = 0, 0.0, args.out / "ar.pt"
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
        loss = trainer.loss(tokens, ids, mask, drop, seen, args.first)
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
