"""Train the draft head of emoji-64 on the hidden states of its finished transformer (EAGLE, arXiv:2401.15077).

The loss is what decides the speed: the total-variation distance between the head's law and the target's guided law,
since one minus it is the chance that a draft is accepted (arXiv:2211.17192, theorem 3.5), plus a little
cross-entropy and hidden-state regression that give a gradient where the laws do not overlap. Passes two and three
read the head's own predictions, as drafting does.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 tools/emoji64/train_eagle.py --out emoji64-run --minutes 12
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import T5EncoderModel

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

from captions import MAX_LENGTH  # noqa: E402
from common import Log, agree, average_gradients, save_checkpoint, schedule, start_workers  # noqa: E402
from examples import Examples  # noqa: E402
from muon import Muon  # noqa: E402
from nets import Trainer  # noqa: E402

from mediaspec.models.eagle import EagleHead, EagleHeadConfig, guided_hidden  # noqa: E402
from mediaspec.models.llamagen.gpt import LlamaGenGPT  # noqa: E402
from mediaspec.targets.llamagen import LlamaGenTarget, TextCondition  # noqa: E402

DEPTH_WEIGHTS = (1.0, 0.8, 0.6)
REGRESSION = 0.1
CROSS_ENTROPY = 0.1


class Target:
    """The frozen transformer and its caption encoder.

    Args:
        folder: export folder with `transformer` and `text_encoder`.
        scale: guidance scale the head is trained for.
    """

    def __init__(self, folder: Path, scale: float) -> None:
        self.net = Trainer.__new__(Trainer)
        self.gpt = self.net.gpt = LlamaGenGPT.from_pretrained(folder / "transformer").float().eval()
        self.net.text = T5EncoderModel.from_pretrained(folder / "text_encoder").float().eval()
        for m in (self.gpt, self.net.text):
            m.requires_grad_(False)
        self.scale = scale

    @torch.no_grad()
    def hidden(self, tokens: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        """Hidden states that predicted every token, branch fastest: [2 B, 256, D] bf16."""
        tokens, ids, mask = (t.repeat_interleave(2, 0) for t in (tokens, ids, mask))
        drop = torch.arange(len(tokens)) % 2 == 1
        return self.net.run(tokens, ids, mask, drop)[:, MAX_LENGTH - 1 : -1].bfloat16()

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(self.gpt.norm(hidden.float()).bfloat16(), self.gpt.output.weight.bfloat16()).float()

    def combine(self, logits: Tensor) -> Tensor:
        """Guided logits [B, N, V] of both branches' [2 B, N, V]."""
        return torch.lerp(logits[1::2], logits[0::2], self.scale)


def passes(
    head: EagleHead, target: Target, tokens: Tensor, hidden: Tensor, steps: int
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Run the head as drafting does.

    Args:
        tokens: [B, 256] int64.
        hidden: [2 B, 256, D] the target's, branch fastest.
        steps: depth of the unrolled draft.

    Returns:
        Per depth: guided log-probabilities of the head [B, 255, V], predicted and true hidden states.
    """
    embeds = target.gpt.tok_embeddings(tokens[:, :-1])
    h = hidden.float()
    scale = torch.full((len(tokens),), target.scale)
    if head.config.guided:
        h = guided_hidden(h, scale)
    else:
        embeds = embeds.repeat_interleave(2, 0)
    cos, sin = head.rotary(embeds.shape[1])
    with torch.autocast("cpu", torch.bfloat16):
        outputs = head.unroll(embeds, h[:, :-1], cos, sin, steps)
    result = []
    for out in outputs:
        logits = head.logit_scale * target.logits(out)
        logits = logits if head.config.guided else target.combine(logits)
        result.append((logits.log_softmax(-1), out.float(), h[:, 1:]))
    return result


def losses(head: EagleHead, target: Target, tokens: Tensor, hidden: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Training loss and the acceptance 1 - TV of every depth [steps]."""
    with torch.no_grad():
        p = target.combine(target.logits(hidden[:, 1:])).softmax(-1)
    total, accepted = torch.zeros(()), []
    unit = head.config.hidden_scale
    for k, (logq, out, true) in enumerate(passes(head, target, tokens, hidden, steps)):
        logq, p_k = logq[:, k:], p[:, k:]
        overlap = torch.minimum(logq.exp(), p_k).sum(-1).mean()
        entropy = -(p_k * logq).sum(-1).mean()
        regression = F.smooth_l1_loss(out[:, k:] / unit, true[:, k:] / unit)
        weight = DEPTH_WEIGHTS[min(k, len(DEPTH_WEIGHTS) - 1)]
        total = total + weight * (1 - overlap + CROSS_ENTROPY * entropy + REGRESSION * regression)
        accepted.append(overlap.detach())
    return total, torch.stack(accepted)


def draw_own(target: Target, examples: Examples, indices: Tensor, seed: int, batch: int = 32) -> tuple[Tensor, Tensor]:
    """What the target itself writes for the captions of some examples, at the trained guidance.

    Returns:
        Codes [M, 256] and the hidden states that predicted them [M, 2, 256, D] bf16.
    """
    generator = torch.Generator().manual_seed(seed)
    fast = LlamaGenTarget(target.gpt)
    length, width = fast.num_tokens, fast.hidden_size
    tokens = torch.empty(len(indices), length, dtype=torch.long)
    hidden = torch.empty(len(indices), 2, length, width, dtype=torch.bfloat16)
    for part in torch.arange(len(indices)).split(batch):
        _, ids, mask = examples.batch(indices[part], generator)
        with torch.no_grad():
            feats = target.net.features(ids, mask)
        cache = fast.new_cache(2 * len(part), 1)
        out = fast.prefill(TextCondition.build(feats, mask, guided=True), cache)
        for at in range(length):
            assert out.hidden is not None
            hidden[part, :, at] = out.hidden.view(-1, 2, width).bfloat16()
            token = target.combine(out.logits)[:, 0].softmax(-1).multinomial(1, generator=generator)
            tokens[part, at] = token[:, 0]
            out = fast.score(token.repeat_interleave(2, 0), cache)
            cache.advance(torch.ones_like(cache.lengths), [1] * cache.rows)
    return tokens, hidden


def collect(target: Target, examples: Examples, indices: Tensor, batch: int = 8) -> tuple[Tensor, Tensor]:
    """Tokens [M, 256] and hidden states [M, 2, 256, D] bf16 of some examples."""
    generator = torch.Generator().manual_seed(0)
    tokens, hidden = [], []
    for start in range(0, len(indices), batch):
        t, ids, mask = examples.batch(indices[start : start + batch], generator)
        tokens.append(t)
        hidden.append(target.hidden(t, ids, mask).unflatten(0, (-1, 2)))
    return torch.cat(tokens), torch.cat(hidden)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("emoji64-run"))
    parser.add_argument("--minutes", type=float, default=12.0, help="training time after the features are cached")
    parser.add_argument("--drawn", type=int, default=1024, help="pictures of the target's own to learn from")
    parser.add_argument("--examples", type=int, default=3072, help="rendered pictures to learn from")
    parser.add_argument("--tinted", type=float, default=0.5, help="share of captions with a background")
    parser.add_argument("--plain-share", type=float, default=0.1, help="share of plain shaded pictures as rendered")
    parser.add_argument("--intermediate", type=int, default=768, help="width of the head's feed-forward layer")
    parser.add_argument("--guidance", type=float, default=1.5)
    parser.add_argument(
        "--guided", action="store_true", help="one row per picture: the head reads combined hidden states"
    )
    parser.add_argument("--steps", type=int, default=3, help="draft depth unrolled in training")
    parser.add_argument("--batch", type=int, default=6, help="pictures per process and step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--muon-lr", type=float, default=4e-3)
    parser.add_argument("--name", default="drafter", help="folder of the result inside export/")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    rank, world = start_workers()
    torch.manual_seed(args.seed)
    log = Log(args.out / f"{args.name}.jsonl", rank)
    target = Target(args.out / "export", args.guidance)
    sets = Examples.load(args.out / "ar-examples.pt")
    train_set = sets["train"]
    began = time.time()
    features = args.out / f"{args.name}-features-{rank}.pt"
    if args.resume and features.exists():
        tokens, hidden, *held = torch.load(features, weights_only=True)
    else:
        pick = torch.Generator().manual_seed(args.seed + 10 + rank)
        mine = torch.randint(len(train_set.picture), ((args.drawn + args.examples) // world,), generator=pick)
        tinted = train_set.pool("tinted")
        mine = torch.where(torch.rand(len(mine), generator=pick) < args.tinted, tinted[mine % len(tinted)], mine)
        held = list(draw_own(target, sets["held_out"], torch.arange(48), 99))
        own = draw_own(target, train_set, mine[: args.drawn // world], args.seed + 10 + rank)
        log(event="drawn", seconds=time.time() - began, pictures=args.drawn)
        rendered = collect(target, train_set, mine[args.drawn // world :])
        tokens, hidden = (torch.cat(pair) for pair in zip(own, rendered, strict=True))
        save_checkpoint(features, [tokens, hidden, *held])
    plain = train_set.distinct("unsaid") if args.plain_share else torch.empty(0, dtype=torch.long)
    plain_tokens, plain_hidden = collect(target, train_set, plain[rank::world]) if len(plain) else (tokens, hidden)
    guided = guided_hidden(held[1].flatten(0, 1), torch.full((len(held[0]),), args.guidance))
    unit = float((guided if args.guided else held[1]).float().pow(2).mean().sqrt())
    log(event="cached", seconds=time.time() - began, examples=args.examples, hidden_scale=unit)

    c = target.gpt.config
    head = EagleHead(
        EagleHeadConfig(
            hidden_size=c.dim, vocab_size=c.vocab_size, num_attention_heads=c.n_head, grid=(c.grid, c.grid),
            hidden_scale=unit, guided=args.guided, intermediate_size=args.intermediate,
        )
    )  # fmt: skip
    matrices = [p for p in head.parameters() if p.dim() == 2]
    muon = Muon(matrices, c.dim)
    adam = torch.optim.AdamW(
        [p for p in head.parameters() if p.dim() != 2], lr=args.lr, betas=(0.9, 0.97), weight_decay=0.0
    )
    step, used, path = 0, 0.0, args.out / f"{args.name}.pt"
    if args.resume and path.exists():
        state = torch.load(path, weights_only=True)
        head.load_state_dict(state["head"])
        adam.load_state_dict(state["adam"])
        for a, b in zip(muon.buffers, state["muon"], strict=True):
            a.copy_(b)
        step, used = state["step"], state["seconds"]
    elif world > 1:
        for p in head.parameters():
            dist.broadcast(p.data, 0)
    generator = torch.Generator().manual_seed(args.seed * 1000 + step * world + rank)
    began = saved = time.time()
    running = torch.zeros(args.steps)
    while True:
        seconds = agree(used + time.time() - began, world)
        progress = seconds / (60 * args.minutes)
        if progress >= 1:
            break
        factor = schedule(progress, warmup=0.03, hold=0.3)
        index = torch.randint(len(tokens), (args.batch,), generator=generator)
        some = torch.rand(args.batch, generator=generator) < args.plain_share
        read, seen = tokens[index], hidden[index]
        index = index[some] % len(plain_tokens)
        read[some], seen[some] = plain_tokens[index], plain_hidden[index]
        loss, accepted = losses(head, target, read, seen.flatten(0, 1), args.steps)
        loss.backward()
        average_gradients(head, world)
        for group in adam.param_groups:
            group["lr"] = args.lr * factor
        adam.step()
        muon.step(args.muon_lr * factor, rank, world)
        head.zero_grad()
        step += 1
        running = running.lerp(accepted, 0.05) if step > 1 else accepted
        if step % 50 == 0:
            log(step=step, minutes=seconds / 60, loss=float(loss), acceptance=[round(float(a), 4) for a in running],
                images_per_s=args.batch * world * step / max(seconds, 1))  # fmt: skip
        if rank == 0 and time.time() - saved > 120:
            saved = time.time()
            report(head, target, held, log, step)
            save_checkpoint(
                path,
                dict(head=head.state_dict(), adam=adam.state_dict(), muon=muon.buffers, step=step, seconds=seconds),
            )
    if rank == 0:
        report(head, target, held, log, step)
        final = args.out / "export" / args.name
        beside = final.with_name(final.name + ".new")
        head.half().save_pretrained(beside)
        if final.exists():
            final.rename(final.with_name(f"{final.name}.{int(time.time())}"))
        beside.rename(final)
        log(event="end", step=step)


@torch.no_grad()
def report(head: EagleHead, target: Target, held: list[Tensor], log: Log, step: int) -> None:
    """Log the acceptance 1 - TV on held-out pictures for draft depths 1 to 5."""
    values = []
    for t, h in zip(held[0].split(8), held[1].split(8), strict=True):
        values.append(losses(head, target, t, h.flatten(0, 1), 5)[1])
    log(step=step, held_out_acceptance=[round(float(v), 4) for v in torch.stack(values).mean(0)])


if __name__ == "__main__":
    main()
