"""Trains a LongSpec draft head on the shards of collect.py (arXiv:2502.17421, section 4).

    python tools/smollm2/train_longspec.py --model smollm2 --data work/shards --out work/longspec --minutes 70

Inputs are tokens only, so teacher forcing needs no unrolling: a draft at depth d differs from the root in how old the
target's cache is. Each sequence therefore gets a lag from 1 to --gamma, counted from the query's own token ("flash
noisy" training; the root's lag is 1). Sequences whose positions jump (anchor-offset indices) come like that from the
shards. The loss mixes the cross-entropy to the next token with the one to the target's own law over the draft
vocabulary; --hard is the paper's, next tokens alone.

Checkpoints are atomic; --resume goes on with the very next step. --steps replaces --minutes where a run has to be
repeatable. The log has one JSON object per line: the loss, and on held-out answers how often the head's likeliest
token is the target's, at lags 1 to 5.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from mediaspec.models.longspec import LongSpecHead, last_full_layer
from mediaspec.models.smollm2 import resolve

HELD_OUT_EVERY = 40  # one sequence in so many is never trained on
LAGS = (1, 2, 3, 4, 5)
CHUNK = 1024  # rows of logits at a time
STALL = 60.0  # seconds a step counts at most: a process that was paused does not lose its schedule


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the target")
    parser.add_argument("--data", type=Path, required=True, help="folder with shard_*.safetensors")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=70.0, help="training time, the cosine's length")
    parser.add_argument("--steps", type=int, default=0, help="train so many steps instead of --minutes")
    parser.add_argument("--tokens", type=int, default=2048, help="positions with a loss per step")
    parser.add_argument("--gamma", type=int, default=5, help="largest lag, the draft length to train for")
    parser.add_argument("--draft-vocab", type=int, default=8192, help="size of the draft vocabulary")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--soft", type=float, default=0.7, help="share of the loss on the target's law")
    parser.add_argument("--hard", action="store_true", help="next tokens alone, as in the paper (--soft 0)")
    parser.add_argument("--text-share", type=float, default=0.3, help="share of sequences trained on their prompt too")
    parser.add_argument("--text-weight", type=float, default=0.3, help="weight of tokens the target did not write")
    parser.add_argument(
        "--no-final-norm", action="store_true", help="no norm before the output matrix, as in the paper"
    )
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--weight-decay", type=float, default=0.02)
    parser.add_argument("--held-out", type=int, default=32, help="sequences of the report")
    parser.add_argument("--every", type=float, default=120.0, help="seconds between checkpoints and reports")
    parser.add_argument("--threads", type=int, default=0, help="0 leaves torch's default")
    parser.add_argument("--precision", choices=("auto", "bf16", "fp32"), default="auto")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args(given)
    if options.hard:
        options.soft = 0.0
    if not 0 <= options.soft <= 1:
        parser.error(f"--soft {options.soft} is a share; give a number from 0 to 1")
    return options


@dataclass(frozen=True)
class Text:
    """One sequence of n tokens: tokens, positions, answer [n]; key, value [n, Hkv, D]; hidden [n, C]."""

    tokens: Tensor
    positions: Tensor
    answer: Tensor
    key: Tensor
    value: Tensor
    hidden: Tensor

    @property
    def first_answer(self) -> int:
        """The token that predicts the first answer token; 0 where the target wrote nothing."""
        written = self.answer.nonzero()
        return max(int(written[0]) - 1, 0) if len(written) else 0


class Shards:
    """Shards on disk, read one sequence at a time.

    Args:
        files: what collect.py wrote.
        width: C; the last C columns of `features` are the last layer's outputs.
    """

    def __init__(self, files: list[Path], width: int) -> None:
        self.files, self.width = files, width
        self.open = [safe_open(file, "pt") for file in files]
        borders = [one.get_tensor("starts").tolist() for one in self.open]
        self.index = [
            (shard, a, b)
            for shard, starts in enumerate(borders)
            for a, b in zip(starts[:-1], starts[1:], strict=True)
            if b - a >= 8
        ]

    @property
    def trained(self) -> list[int]:
        return [number for number in range(len(self.index)) if number % HELD_OUT_EVERY]

    @property
    def held_out(self) -> list[int]:
        return list(range(0, len(self.index), HELD_OUT_EVERY))

    def __getitem__(self, number: int) -> Text:
        shard, a, b = self.index[number]
        file = self.open[shard]
        part = {name: file.get_slice(name)[a:b] for name in ("tokens", "positions", "answer", "key", "value")}
        columns = file.get_slice("features").get_shape()[1]
        hidden = file.get_slice("features")[a:b, columns - self.width :]
        return Text(
            part["tokens"].long(), part["positions"].long(), part["answer"], part["key"], part["value"], hidden
        )

    def frequent(self, vocab: int, size: int) -> Tensor:
        """[size] the ids that answers use most, ascending; prompts count a fifth, unseen ids by their number."""
        counts = torch.zeros(vocab, dtype=torch.float64)
        for file in self.open:
            weight = torch.where(file.get_tensor("answer") > 0, 1.0, 0.2).double()
            counts.index_add_(0, file.get_tensor("tokens").long(), weight)
        return counts.argsort(descending=True, stable=True)[:size].sort().values


@dataclass(frozen=True)
class Batch:
    """Texts with their lags and first positions, `count` positions in all; `behind`: where the next batch starts."""

    texts: list[Text]
    lags: list[int]
    firsts: list[int]
    count: int
    behind: tuple[int, int, list[Path]]


@dataclass
class Teacher:
    """What of the target is needed: embedding table, final norm, output rows of the draft vocabulary."""

    embedding: Tensor
    norm: torch.nn.Module
    head: Tensor
    rows: Tensor
    place: Tensor

    @classmethod
    def of(cls, model: Any, draft_ids: Tensor, dtype: torch.dtype) -> Teacher:
        head = model.get_output_embeddings().weight.detach().float()
        place = torch.full((len(head),), -1)
        place[draft_ids] = torch.arange(len(draft_ids))
        norm = model.get_decoder().norm.float().requires_grad_(False)
        table = model.get_input_embeddings().weight.detach().float()
        return cls(table, norm, head, head[draft_ids].to(dtype).contiguous(), place)

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, C] last layer's outputs -> [n, Vd] float32."""
        return F.linear(self.norm(hidden.float()).to(self.rows.dtype), self.rows).float()

    def likeliest(self, hidden: Tensor) -> Tensor:
        """[n] the target's likeliest token, over the whole vocabulary."""
        return torch.cat([F.linear(self.norm(h.float()), self.head).argmax(-1) for h in hidden.split(256)])


def run(head: LongSpecHead, teacher: Teacher, texts: list[Text], lags: list[int], firsts: list[int]) -> Tensor:
    """Hidden states [n, C] behind tokens firsts.. of every text but its last, which predicts nothing known."""
    starts = [0]
    for text in texts:
        starts.append(starts[-1] + len(text.tokens) - 1)
    tokens, positions, key, value = (
        torch.cat([getattr(text, name)[:-1] for text in texts]) for name in ("tokens", "positions", "key", "value")
    )
    embeds = F.embedding(tokens, teacher.embedding)
    with torch.autocast("cpu", torch.bfloat16, enabled=teacher.rows.dtype == torch.bfloat16):
        result: Tensor = head(embeds, positions, key, value, starts, lags, firsts)
    return result


@torch.no_grad()
def fused_loss(
    hidden: Tensor, labels: Tensor, seen: Tensor, weights: Tensor, teacher: Teacher, soft: float
) -> tuple[float, Tensor]:
    """The loss and its gradient, without keeping logits of all rows.

    The gradient of a cross-entropy is q - p, so that no graph is needed. A row whose token lies outside the draft
    vocabulary can never be accepted and teaches nothing.

    Args:
        hidden: [n, C] of the head; seen: [n, C] of the target.
        labels: [n] the next tokens.
        weights: [n].
        soft: share of the target's law in the goal.

    Returns:
        Mean loss, and its gradient with respect to `hidden`.
    """
    goal = teacher.place[labels]
    weights = torch.where(goal >= 0, weights, 0.0)
    weights = weights / weights.sum().clamp(min=1e-6)
    total, gradients = 0.0, []
    for h, s, y, w in zip(hidden.split(CHUNK), seen.split(CHUNK), goal.split(CHUNK), weights.split(CHUNK)):
        logq = F.linear(h.to(teacher.rows.dtype), teacher.rows).float().log_softmax(-1)
        y = y.clamp(min=0)[:, None]
        loss = -logq.gather(1, y)[:, 0] * (1 - soft)
        step = logq.exp()
        if soft:
            law = teacher.logits(s).softmax(-1)
            loss -= soft * torch.linalg.vecdot(law, logq)
            step.sub_(law, alpha=soft)
        step.scatter_add_(1, y, torch.full_like(y, soft - 1.0, dtype=step.dtype))
        step.mul_(w[:, None])
        total += float((loss * w).sum())
        gradients.append((step.to(teacher.rows.dtype) @ teacher.rows).to(h.dtype))
    return total, torch.cat(gradients)


@torch.no_grad()
def report(head: LongSpecHead, teacher: Teacher, texts: list[Text]) -> dict[str, Any]:
    """Held-out answers: agreement of the likeliest tokens at every lag, and what a greedy chain would give."""
    agreed: dict[int, list[Tensor]] = {lag: [] for lag in LAGS}
    for text in texts:
        first = text.first_answer
        goal = teacher.likeliest(text.hidden[first:-1])
        for lag in LAGS:
            out = run(head, teacher, [text], [lag], [first])
            best = F.linear(out.to(teacher.rows.dtype), teacher.rows).argmax(-1)
            agreed[lag].append((head.draft_ids[best] == goal).float())
    rates = [float(torch.cat(agreed[lag]).mean()) for lag in LAGS]
    # a chain from position i is followed to depth d if all its depths 0..d agree; depth d has lag d + 1
    lengths = []
    for rows in zip(*(agreed[lag] for lag in LAGS), strict=True):
        count = len(rows[0]) - len(LAGS) + 1
        if count > 0:
            chain = torch.stack([row[depth : depth + count] for depth, row in enumerate(rows)])
            lengths.append(chain.cumprod(0).sum(0))
    tokens = 1 + float(torch.cat(lengths).mean()) if lengths else math.nan
    return {"agreement": [round(rate, 4) for rate in rates], "tokens_per_call": round(tokens, 3)}


def rate(progress: float) -> float:
    """Learning-rate factor: 3 % linear rise, then a cosine to 0."""
    if progress < 0.03:
        return max(progress, 1e-3) / 0.03
    return 0.5 * (1 + math.cos(math.pi * min((progress - 0.03) / 0.97, 1.0)))


def faster() -> torch.dtype:
    """What this machine multiplies faster: bfloat16 with tile instructions, on most others float32."""
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        left, right = torch.ones(1024, 512, dtype=dtype), torch.ones(512, 1024, dtype=dtype)
        left @ right
        began = time.process_time()
        for _ in range(4):
            left @ right
        seconds[dtype] = time.process_time() - began
    return min(seconds, key=lambda dtype: seconds[dtype])


class Trainer:
    """One training run; everything `--resume` needs is in `state`.

    Args:
        options: see `arguments`.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        torch.manual_seed(options.seed)
        self.path = options.out / "checkpoint.pt"
        saved = torch.load(self.path, weights_only=True) if options.resume and self.path.exists() else None
        model = AutoModelForCausalLM.from_pretrained(resolve(options.model), dtype=torch.float32).eval()
        model.requires_grad_(False)
        text = model.config.get_text_config(decoder=True)
        if last_full_layer(text) != text.num_hidden_layers - 1:
            raise ValueError("the shards hold the last layer's keys, which in this target has a sliding window")
        self.width = text.hidden_size
        shards = Shards(self.names(), self.width)
        ids = shards.frequent(len(model.get_output_embeddings().weight), options.draft_vocab)
        ids = saved["head"]["draft_ids"] if saved is not None else ids
        sample = torch.cat([shards[number].hidden for number in shards.held_out[:8]]).float()
        scale = float(sample.pow(2).mean(-1).sqrt().median())
        self.head = LongSpecHead.from_target(
            model, ids, window=options.window, final_norm=not options.no_final_norm, hidden_scale=scale
        )
        named = {"bf16": torch.bfloat16, "fp32": torch.float32}
        precision = options.precision if saved is None else saved["precision"]
        self.dtype = named[precision] if precision in named else faster()
        self.teacher = Teacher.of(model, self.head.draft_ids, self.dtype)
        held = [shards[number] for number in shards.held_out]
        self.held = [one for one in held if bool(one.answer.any())][: options.held_out]
        decayed = [p for p in self.head.parameters() if p.dim() == 2]
        others = [p for p in self.head.parameters() if p.dim() != 2]
        groups = [{"params": decayed, "weight_decay": options.weight_decay}, {"params": others, "weight_decay": 0.0}]
        self.adam = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95), fused=True)
        self.step, self.seconds, self.turn, self.place = 0, 0.0, 0, 0
        self.files: list[Path] = []
        if saved is not None:
            self.head.load_state_dict(saved["head"])
            self.head.config.embed_scale = saved.get("embed_scale", self.head.config.embed_scale)
            self.adam.load_state_dict(saved["adam"])
            self.step, self.seconds, self.turn = saved["step"], saved["seconds"], saved["turn"]
            self.place, self.files = saved["place"], [options.data / name for name in saved["files"]]
        written = torch.cat([one.tokens[one.answer > 0] for one in self.held]) if self.held else ids[:1]
        self.log(
            event="resume" if saved else "start", step=self.step, shards=len(shards.files), texts=len(shards.index),
            tokens=sum(b - a for _, a, b in shards.index), draft_vocab=len(ids), hidden_scale=scale,
            coverage=float((self.teacher.place[written] >= 0).float().mean()),
            megabytes_fp16=sum(p.numel() for p in self.head.parameters()) * 2e-6, dtype=str(self.dtype),
        )  # fmt: skip

    def names(self) -> list[Path]:
        files = sorted(self.options.data.glob("shard_*.safetensors"))
        if not files:
            raise ValueError(f"{self.options.data} holds no shard_*.safetensors; run collect.py first")
        return files

    def log(self, **values: Any) -> None:
        values = {key: round(v, 5) if isinstance(v, float) else v for key, v in values.items()}
        line = json.dumps({"time": round(time.time(), 1)} | values)
        self.options.out.mkdir(parents=True, exist_ok=True)
        with (self.options.out / "log.jsonl").open("a") as file:
            file.write(line + "\n")
        print(line, flush=True)

    def batches(self) -> Iterator[Batch]:
        """Packed batches for ever, from the checkpoint's place on. Each turn over the data looks for new shards."""
        options, turn, place, files = self.options, self.turn, self.place, self.files
        while True:
            if not files:
                files = self.names()
            shards = Shards(files, self.width)
            key = options.seed * 1_000_003 + turn
            order = torch.randperm(len(shards.trained), generator=torch.Generator().manual_seed(key))
            trained = torch.tensor(shards.trained)[order].tolist()
            while place < len(trained):
                random = torch.Generator().manual_seed(key * 1_000_003 + place)
                texts: list[Text] = []
                firsts: list[int] = []
                count = 0
                while place < len(trained):
                    text = shards[trained[place]]
                    whole = float(torch.rand((), generator=random)) < options.text_share
                    first = 0 if whole else text.first_answer
                    size = len(text.tokens) - 1 - first
                    if texts and count + size > options.tokens:
                        break
                    texts.append(text)
                    firsts.append(first)
                    count += size
                    place += 1
                lags = torch.randint(1, options.gamma + 1, (len(texts),), generator=random).tolist()
                yield Batch(texts, lags, firsts, count, (turn, place, files))
            turn, place, files = turn + 1, 0, []

    def train_on(self, batch: Batch) -> float:
        """One step; returns the loss."""
        hidden = run(self.head, self.teacher, batch.texts, batch.lags, batch.firsts)
        spans = list(zip(batch.texts, batch.firsts, strict=True))
        labels = torch.cat([text.tokens[first + 1 :] for text, first in spans])
        seen = torch.cat([text.hidden[first:-1] for text, first in spans])
        written = torch.cat([text.answer[first + 1 :] for text, first in spans]) > 0
        weights = torch.where(written, 1.0, self.options.text_weight)
        loss, gradient = fused_loss(hidden, labels, seen, weights, self.teacher, self.options.soft)
        hidden.backward(gradient)
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        self.adam.step()
        self.head.zero_grad(set_to_none=True)
        return loss

    def save(self) -> None:
        """What --resume reads, written beside its place and renamed there."""
        state = {
            "head": self.head.state_dict(), "adam": self.adam.state_dict(), "step": self.step,
            "seconds": self.seconds, "turn": self.turn, "place": self.place,
            "files": [file.name for file in self.files],
            "precision": "bf16" if self.dtype == torch.bfloat16 else "fp32",
            "embed_scale": self.head.config.embed_scale,
        }  # fmt: skip
        self.options.out.mkdir(parents=True, exist_ok=True)
        beside = self.path.with_suffix(".tmp")
        torch.save(state, beside)
        beside.replace(self.path)

    def export(self) -> None:
        """The folder `head` that a drafter loads: configuration and fp16 weights."""
        folder = self.options.out / "head"
        beside, before = folder.with_name("head.new"), folder.with_name("head.old")
        half = LongSpecHead(self.head.config)
        half.load_state_dict(self.head.state_dict())
        half.half().save_pretrained(beside)
        for path in before.glob("*"):
            path.unlink()
        if folder.exists():
            folder.replace(before)
        beside.replace(folder)

    def train(self) -> None:
        options = self.options
        running, tokens = math.nan, 0
        began = reported = last = time.time()
        for batch in self.batches():
            now = time.time()
            self.seconds, last = self.seconds + min(now - last, STALL), now
            progress = self.step / options.steps if options.steps else self.seconds / (60 * options.minutes)
            if progress >= 1:
                break
            for group in self.adam.param_groups:
                group["lr"] = options.lr * rate(progress)
            loss = self.train_on(batch)
            self.step += 1
            self.turn, self.place, self.files = batch.behind
            tokens += batch.count
            running = loss if math.isnan(running) else 0.95 * running + 0.05 * loss
            if self.step % 20 == 0:
                self.log(step=self.step, turn=self.turn, loss=running, lr=options.lr * rate(progress),
                         minutes=self.seconds / 60, tokens_per_second=tokens / (time.time() - began))  # fmt: skip
            if time.time() - reported > options.every:
                self.log(step=self.step, **report(self.head, self.teacher, self.held))
                self.save()
                self.export()
                reported = time.time()
        self.log(event="end", step=self.step, **report(self.head, self.teacher, self.held))
        self.save()
        self.export()


def main(given: list[str] | None = None) -> None:
    options = arguments(given)
    logging.disable_progress_bar()
    if options.threads:
        torch.set_num_threads(options.threads)
    Trainer(options).train()


if __name__ == "__main__":
    main()
