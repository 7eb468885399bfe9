"""Train an EAGLE-3 head (arXiv:2503.01840) on features of its target that were written to disk before.

The head is unrolled on its own states as drafting will do, and learns the target's law over the draft vocabulary: the
law is remade from the stored last feature, which costs less than storing it. What the target wrote itself counts in
full, other text with a smaller share of its positions. The schedule follows the clock, so `--minutes` is what a run
takes; it can be interrupted and resumed.

    OMP_NUM_THREADS=2 python tools/smollm2/train_eagle3.py --model smollm2 --shards features --out run --minutes 60

Shards are `shard_%04d.safetensors` files of packed texts: tokens [N] int32, starts [S + 1] int64 (borders of the
texts), positions [N] int32, features [N, F * D] fp16, answer [N] uint8 (1: the target wrote this token).
"""

from __future__ import annotations

import argparse
import copy
import random
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
sys.path.append(str(Path(__file__).parents[1] / "emoji64"))

from common import Log, save_checkpoint, schedule  # noqa: E402
from muon import Muon  # noqa: E402
from shards import Shards, Slots, pack, pieces  # noqa: E402

from mediaspec.models.eagle3 import Eagle3Head, default_feature_layers, unit  # noqa: E402
from mediaspec.models.smollm2 import resolve  # noqa: E402

DECAY = 0.8  # weight of every further pass
CHUNK = 256  # slots whose laws are in memory at once
HELD_OUT = 40  # every 40th text of a shard is never trained on


class Teacher:
    """What the head shares with its target: embeddings, final norm, output rows.

    Args:
        model: the target.
        draft_ids: [W] int64.
    """

    def __init__(self, model: Any, draft_ids: Tensor) -> None:
        self.table = model.get_input_embeddings().weight.detach().float()
        self.rows = model.get_output_embeddings().weight.detach().float()
        self.gain = model.get_decoder().norm.weight.detach().float()
        self.eps = float(model.config.rms_norm_eps)
        self.size = self.table.shape[1]
        self.draft_ids = draft_ids
        self.draft_rows = self.rows[draft_ids].contiguous()
        self.draft_of = torch.full((len(self.rows),), -1).scatter_(0, draft_ids, torch.arange(len(draft_ids)))

    def hidden(self, features: Tensor) -> Tensor:
        """[.., F * D] features -> [.., D] float32 what the output rows are multiplied with."""
        return unit(features[..., -self.size :].float(), self.eps) * self.gain

    def argmax(self, hidden: Tensor) -> Tensor:
        """[M, D] -> [M] int64 the target's own greedy token, over its whole vocabulary."""
        return torch.cat([(part @ self.rows.T).argmax(-1) for part in hidden.split(CHUNK)])


def loss_and_gradients(
    reads: list[Tensor], slots: Slots, teacher: Teacher, chosen: Tensor, hard: float
) -> tuple[float, list[Tensor], list[float]]:
    """Cross-entropy to the target's law over the draft vocabulary, sharpened towards its likeliest token.

    Done by hand and in chunks: the output rows are frozen, so the gradient of a read state is (q - p) times the rows,
    and no [slots, W] tensor outlives its chunk.

    Args:
        reads: per pass [R, N, D], what the output rows are multiplied with.
        slots: the batch.
        teacher: the target's part.
        chosen: [M] int64 flat slots that count.
        hard: weight of the likeliest token, which is what a greedy target writes.

    Returns:
        The mean Kullback-Leibler divergence of all passes (weighted), the gradients of `reads`, and per pass how often
        the head's likeliest draft token is the target's.
    """
    size, rows = teacher.size, teacher.draft_rows
    flat = [read.detach().reshape(-1, size) for read in reads]
    gradients = [torch.zeros_like(x) for x in flat]
    local, features = slots.local.flatten(), slots.following.flatten(0, 1)
    counts = [max(int((local[chosen] >= k).sum()), 1) for k in range(len(reads))]
    weights = [DECAY**k / counts[k] / sum(DECAY**j for j in range(len(reads))) for k in range(len(reads))]
    total, hits = 0.0, [0.0] * len(reads)
    for part in chosen.split(CHUNK):
        p = (teacher.hidden(features[part]) @ rows.T).softmax(-1)
        best = p.argmax(-1)
        entropy = -(p * p.clamp(min=1e-30).log()).sum(-1)
        if hard:
            p.mul_(1 - hard).scatter_add_(1, best[:, None], torch.full((len(p), 1), hard))
        for k, x in enumerate(flat):
            live = (local[part] >= k).float()
            z = x[part] @ rows.T
            hits[k] += float(((z.argmax(-1) == best) * live).sum()) / counts[k]
            logq = z.log_softmax(-1)
            total += weights[k] * float(((-(p * logq).sum(-1) - entropy) * live).sum())
            gradients[k][part] = (logq.exp_().sub_(p).mul_((weights[k] * live)[:, None])) @ rows
    return total, [g.view_as(read) for g, read in zip(gradients, reads, strict=True)], hits


@dataclass
class Settings:
    """What decides the course of a run; the rest is the data."""

    steps: int = 3
    rows: int = 4
    length: int = 512
    lr: float = 1e-3
    muon_lr: float = 2e-3
    hard: float = 0.2
    text_share: float = 0.25
    seed: int = 0


class Training:
    """A head, its optimizers and its place in the data: everything a resume needs.

    Args:
        head: the head to train.
        teacher: its target's part.
        shards: the data; `rescan` is called at every epoch.
        settings: see there.
    """

    def __init__(self, head: Eagle3Head, teacher: Teacher, shards: Shards, settings: Settings) -> None:
        self.head, self.teacher, self.shards, self.settings = head, teacher, shards, settings
        matrices = [p for p in head.parameters() if p.dim() == 2 and min(p.shape) > 8]
        held = {id(p) for p in matrices}
        others = [p for p in head.parameters() if id(p) not in held]
        self.muon = Muon(matrices, unit=0, dtype=torch.float32)
        self.adam = torch.optim.AdamW(others, lr=settings.lr, betas=(0.9, 0.95), weight_decay=0.0, foreach=True)
        self.epoch, self.batch, self.step, self.seconds = 0, 0, 0, 0.0
        self.names: list[str] = []
        self._plan: list[list[Any]] = []

    def state_dict(self) -> dict[str, Any]:
        return {
            "head": self.head.state_dict(), "adam": self.adam.state_dict(), "muon": self.muon.buffers,
            "epoch": self.epoch, "batch": self.batch, "step": self.step, "seconds": self.seconds, "names": self.names,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        weights = {key: value for key, value in state["head"].items() if key != "draft_ids"}
        self.head.load_state_dict(weights | {"draft_ids": self.head.draft_ids})
        self.adam.load_state_dict(state["adam"])
        for mine, saved in zip(self.muon.buffers, state["muon"], strict=True):
            mine.copy_(saved)
        self.epoch, self.batch, self.step = state["epoch"], state["batch"], state["step"]
        self.seconds, self.names, self._plan = state["seconds"], state["names"], []

    def passes(self, progress: float) -> int:
        """Passes unrolled: one more at a time, since a head that cannot yet predict once learns nothing from twice."""
        return min(self.settings.steps, 1 if progress < 0.1 else 2 if progress < 0.3 else self.settings.steps)

    def _next(self) -> Slots:
        """The next batch; which one depends on seed, epoch, place and the shards of the epoch alone."""
        s = self.settings
        if not self._plan:
            if self.batch == 0:  # new shards join at the beginning of an epoch only
                self.shards.rescan()
                self.names = self.shards.names()
            order = pieces(self.shards, self.names, s.length, lambda text: text % HELD_OUT != 0)
            random.Random(f"{s.seed} {self.epoch}").shuffle(order)
            rows = pack(order, s.length)
            self._plan = [rows[i : i + s.rows] for i in range(0, len(rows) - s.rows + 1, s.rows)] or [rows]
        slots = self.shards.read(self._plan[self.batch], s.length)
        self.batch += 1
        if self.batch == len(self._plan):
            self.epoch, self.batch, self._plan = self.epoch + 1, 0, []
        return slots

    def update(self, progress: float) -> tuple[float, list[float], int]:
        """One step. Returns loss, agreement per pass, and the slots read."""
        s = self.settings
        generator = torch.Generator().manual_seed((s.seed << 40) + (self.epoch << 20) + self.batch)
        slots = self._next()
        share = torch.where(slots.own, 1.0, s.text_share)
        known = slots.label < 0
        known |= self.teacher.draft_of[slots.label.clamp(min=0)] >= 0
        counted = slots.real & known & (torch.rand(share.shape, generator=generator) < share)
        chosen = counted.flatten().nonzero()[:, 0]
        states = self.head.unroll(
            F.embedding(slots.tokens, self.teacher.table), slots.features.float(), slots.positions,
            self.passes(progress), slots.local,
        )  # fmt: skip
        reads = [self.head.read(state) for state in states]
        loss, gradients, hits = loss_and_gradients(reads, slots, self.teacher, chosen, s.hard)
        torch.autograd.backward(reads, gradients)
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        factor = schedule(progress, warmup=0.02, hold=0.2, floor=0.02)
        for group in self.adam.param_groups:
            group["lr"] = s.lr * factor
        self.adam.step()
        self.muon.step(s.muon_lr * factor)
        self.head.zero_grad()
        self.step += 1
        return loss, hits, int(slots.real.sum())

    def held_out(self, limit: int) -> Iterator[Slots]:
        """Batches of held-out texts, at most `limit` slots."""
        s = self.settings
        rows = pack(pieces(self.shards, self.shards.names(), s.length, lambda text: text % HELD_OUT == 0), s.length)
        for i in range(0, min(len(rows), max(limit // s.length, 1)), s.rows):
            yield self.shards.read(rows[i : i + s.rows], s.length)


class Report:
    """Agreement with the target's greedy tokens on held-out texts; the batches are read once."""

    def __init__(self, training: Training, limit: int) -> None:
        self.training = training
        self.batches = []
        for slots in training.held_out(limit):
            hidden = training.teacher.hidden(slots.following.flatten(0, 1))
            self.batches.append((slots, training.teacher.argmax(hidden).view(slots.label.shape)))

    @torch.no_grad()
    def __call__(self, depth: int = 5) -> dict[str, Any]:
        """Per draft depth: how often the head's token is the target's where all before it were right, for text the
        target wrote (`own`) and for other text; and the tokens a call would give with greedy chains of `depth`."""
        head, teacher = self.training.head, self.training.teacher
        tried, passed = torch.zeros(2, depth), torch.zeros(2, depth)
        for slots, wanted in self.batches:
            states = head.unroll(
                F.embedding(slots.tokens, teacher.table), slots.features.float(), slots.positions, depth, slots.local
            )
            n, alive = slots.tokens.shape[1], slots.real
            for k, state in enumerate(states):
                picked = [(x @ teacher.draft_rows.T).argmax(-1) for x in head.read(state).flatten(0, 1).split(CHUNK)]
                hit = teacher.draft_ids[torch.cat(picked)].view(wanted.shape) == wanted
                # the draft that starts in slot s meets depth k (from 0) in slot s + k, unless the text ends before
                alive = alive & F.pad(slots.real[:, k:] & (slots.local[:, k:] == slots.local[:, : n - k] + k), (0, k))
                after = alive & F.pad(hit[:, k:], (0, k))
                for group, members in enumerate((slots.own, ~slots.own)):
                    tried[group, k] += (alive & members).sum()
                    passed[group, k] += (after & members).sum()
                alive = after
        result: dict[str, Any] = {}
        for name, rates in zip(("own", "text"), passed / tried.clamp(min=1), strict=True):
            result[f"held_out_{name}"] = [round(rate, 4) for rate in rates.tolist()]
            result[f"tokens_per_call_{name}"] = round(1 + float(rates.cumprod(0).sum()), 3)
        return result


def export(head: Eagle3Head, folder: Path) -> None:
    """Write the head in half precision beside its place and move it there."""
    beside = folder.with_name(folder.name + ".new")
    copy.deepcopy(head).half().save_pretrained(beside)
    if folder.exists():
        shutil.rmtree(folder)
    beside.rename(folder)


def load_target(folder: str) -> Any:
    """The float32 model; only its last layer, norms and embeddings are read."""
    return AutoModelForCausalLM.from_pretrained(resolve(folder), dtype=torch.float32).eval().requires_grad_(False)


def draft_vocabulary(shards: Shards, vocab_size: int, size: int, text_share: float, log: Log) -> Tensor:
    """[W] int64 the most frequent tokens.

    A head's weights do not depend on them, so they are chosen anew at every start, from all shards there are.
    """
    counts = shards.frequencies(vocab_size, text_share)
    draft_ids = counts.topk(min(size, vocab_size)).indices.sort().values
    covered, seen = float(counts[draft_ids].sum() / counts.sum()), int((counts > 1e-3).sum())
    log(event="draft vocabulary", size=len(draft_ids), covered=covered, seen=seen)
    return draft_ids


def train(
    target: Any, shards: Shards, out: Path, settings: Settings, minutes: float, *, draft_vocab: int = 8192,
    resume: bool = False, save_every: float = 180.0, held_out: int = 16384, max_steps: int | None = None,
) -> Eagle3Head:  # fmt: skip
    """Train for some minutes of the clock, or to `max_steps`; writes `eagle3.pt`, `eagle3.jsonl` and `eagle3/`.

    Args:
        target: the language model the shards come from.
        shards: its features.
        out: folder of the run.
        settings: see there.
        minutes: of training in total; a resumed run counts what it had used.
        draft_vocab: W.
        resume: go on from the checkpoint in `out`, where there is one.
        save_every: seconds between checkpoints.
        held_out: slots of held-out text to report on.
        max_steps: stop there (the schedule still follows the clock).
    """
    torch.manual_seed(settings.seed)
    log, path = Log(out / "eagle3.jsonl", 0), out / "eagle3.pt"
    state = torch.load(path, weights_only=True) if resume and path.exists() else None
    size = target.config.hidden_size
    draft_ids = draft_vocabulary(shards, target.config.vocab_size, draft_vocab, settings.text_share, log)
    head = Eagle3Head.from_target(
        target, draft_ids, feature_layers=default_feature_layers(target.config.num_hidden_layers),
        feature_scale=shards.scale(size),
    ).train()  # fmt: skip
    training = Training(head, Teacher(target, draft_ids), shards, settings)
    if state is not None:
        training.load_state_dict(state)
        log(event="resumed", step=training.step, minutes=training.seconds / 60)
    report, before, best = Report(training, held_out), training.seconds, float(state["best"]) if state else 0.0

    def save() -> None:
        """Checkpoint and report; the exported head is the best so far, since little text is soon learned by heart."""
        nonlocal best
        found = report()
        log(step=training.step, epoch=training.epoch, minutes=training.seconds / 60, **found)
        if found["tokens_per_call_own"] >= best or not (out / "eagle3").exists():
            best = found["tokens_per_call_own"]
            export(head, out / "eagle3")
        save_checkpoint(path, training.state_dict() | {"best": best})

    log(step=training.step, **report())
    began = saved = time.time()
    running, read = torch.zeros(settings.steps), 0
    while True:
        training.seconds = before + time.time() - began
        progress = training.seconds / (60 * minutes)
        if progress >= 1 or (max_steps is not None and training.step >= max_steps):
            break
        loss, hits, slots = training.update(progress)
        read += slots
        running[: len(hits)].lerp_(torch.tensor(hits), 0.05)
        if training.step % 25 == 0:
            log(
                step=training.step, epoch=training.epoch, minutes=training.seconds / 60, loss=loss,
                agreement=[round(x, 4) for x in running.tolist()], slots_per_s=read / (time.time() - began),
            )  # fmt: skip
        if time.time() - saved > save_every:
            training.seconds = before + time.time() - began
            save()
            saved = time.time()
    save()
    log(event="end", step=training.step, best=best)
    return head


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the target")
    parser.add_argument("--shards", type=Path, required=True, help="folder of feature shards")
    parser.add_argument("--out", type=Path, default=Path("eagle3-run"))
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--draft-vocab", type=int, default=8192, help="tokens the head can draft")
    parser.add_argument("--save-every", type=float, default=180.0, help="seconds between checkpoints")
    parser.add_argument("--held-out", type=int, default=16384, help="slots of held-out text to report on")
    parser.add_argument("--max-steps", type=int, help="stop after so many steps")
    parser.add_argument("--threads", type=int, help="threads of torch; OMP_NUM_THREADS where omitted")
    parser.add_argument("--resume", action="store_true")
    defaults = Settings()
    for name, value in vars(defaults).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    settings = Settings(**{name: getattr(args, name) for name in vars(defaults)})
    train(
        load_target(args.model), Shards(args.shards), args.out, settings, args.minutes, draft_vocab=args.draft_vocab,
        resume=args.resume, save_every=args.save_every, held_out=args.held_out, max_steps=args.max_steps,
    )  # fmt: skip


if __name__ == "__main__":
    main()
