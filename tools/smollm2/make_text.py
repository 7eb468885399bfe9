"""Lets a causal language model write the text its draft heads learn from (self-distillation).

    python tools/smollm2/make_text.py --model smollm2 --out work/text --minutes 25

Every batch is appended to one JSON-lines file as {"prompt": ids, "answer": ids, "kind": name}; a run that was killed
goes on with the next batch. Edits and questions take their texts from earlier answers and from Python's documentation.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

import torch
from prompts import USER_TURN, Request, chat, documents, edits, questions
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from mediaspec.core.prompt import TokenPrompt
from mediaspec.models.smollm2 import resolve
from mediaspec.targets.causal_lm import CausalLMTarget

KINDS = ("chat", "own", "chat", "edit", "chat", "question")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int, default=0, help="0 leaves torch's default")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


@torch.inference_mode()
def write(
    model: torch.nn.Module, prompts: list[list[int]], temperatures: list[float], limit: int, stop: int, enough: float
) -> list[list[int]]:
    """Answers to a batch of prompts; ends early once a share `enough` of the rows has stopped.

    Args:
        temperatures: one per prompt, 0 is greedy; sampling keeps the likeliest 95 % of the law.
        limit: new tokens at most.
    """
    target = CausalLMTarget(model, limit)
    longest, rows = max(map(len, prompts)), len(prompts)
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in prompts])
    lengths = [len(row) for row in prompts]
    heat = torch.tensor(temperatures)[:, None]
    with target.attached():
        cache = target.new_cache(rows, 1)
        logits = target.prefill(TokenPrompt(ids, torch.tensor(lengths), tuple(lengths)), cache).logits
        written, done = [], torch.zeros(rows, dtype=torch.bool)
        one, host_one = torch.ones(rows, dtype=torch.int64), [1] * rows
        for _ in range(limit):
            token = draw(logits[:, 0], heat)
            written.append(token)
            done |= token == stop
            if float(done.float().mean()) >= enough:
                break
            logits = target.score(token[:, None], cache).logits
            cache.advance(one, host_one)
    answers = torch.stack(written, 1).tolist()
    return [row[: row.index(stop) + 1] if stop in row else row for row in answers]


def draw(logits: Tensor, heat: Tensor) -> Tensor:
    """One token per row from logits [B, V] at temperatures [B, 1]."""
    best, choice = logits.topk(64, dim=-1)
    law = (best / heat.clamp(min=1e-6)).softmax(-1)
    law = torch.where(law.cumsum(-1) - law < 0.95, law, 0.0)
    at = torch.multinomial(law, 1)
    return choice.gather(1, torch.where(heat > 0, at, 0))[:, 0]


def main() -> None:
    options = arguments()
    if options.threads:
        torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "text.jsonl"
    known = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    rng = random.Random(options.seed + len(known))
    torch.manual_seed(options.seed + len(known))
    tokenizer = AutoTokenizer.from_pretrained(resolve(options.model))
    model = AutoModelForCausalLM.from_pretrained(resolve(options.model), dtype=torch.float32).eval()
    stop = tokenizer.eos_token_id
    paragraphs = [tokenizer.decode(row["answer"][:-1]) for row in known if row["kind"] in ("own", "chat")][-500:]
    texts = documents(rng)
    until, made, began = time.time() + 60 * options.minutes, 0, time.time()
    turn = len(known) // options.batch
    while time.time() < until:
        kind = KINDS[turn % len(KINDS)]
        turn += 1
        if kind == "edit" and len(paragraphs) < options.batch:
            kind = "chat"
        requests: list[Request] = []
        if kind == "own":
            opening = tokenizer(USER_TURN, add_special_tokens=False)["input_ids"]
            system = tokenizer.apply_chat_template([{"role": "user", "content": ""}], return_dict=True)["input_ids"]
            head = system[: _find(system, opening) + len(opening)]
            turns = write(model, [head] * options.batch, [1.0] * options.batch, 64, stop, 0.9)
            asked = [tokenizer.decode(row, skip_special_tokens=True).strip() for row in turns if row[-1] == stop]
            requests = [Request(text, rng.choice((0.0, 0.0, 0.7)), 192) for text in asked if text]
        while len(requests) < options.batch:
            if kind == "edit":
                requests.append(edits(rng, rng.choice(paragraphs)[: rng.randint(150, 700)]))
            elif kind == "question":
                text = next(texts, None)
                if text is None:
                    texts = documents(rng)
                    continue
                start = rng.randint(0, max(0, len(text) - 1200))
                requests.append(questions(rng, text[start : start + rng.randint(1500, 4500)]))
                if len(requests) == options.batch // 2:
                    break
            else:
                requests.append(chat(rng))
        chats = [[{"role": "user", "content": request.text}] for request in requests]
        prompts = [tokenizer.apply_chat_template(one, add_generation_prompt=True, return_dict=True) for one in chats]
        ids = [list(one["input_ids"]) for one in prompts]
        heat = [request.temperature for request in requests]
        answers = write(model, ids, heat, max(request.limit for request in requests), stop, 0.8)
        with file.open("a") as out:
            for prompt, answer in zip(ids, answers):
                out.write(json.dumps({"prompt": prompt, "answer": answer, "kind": kind}) + "\n")
        if kind in ("own", "chat"):
            paragraphs = (paragraphs + [tokenizer.decode(row[:-1]) for row in answers if len(row) > 40])[-500:]
        made += sum(map(len, answers))
        rate = made / (time.time() - began)
        print(f"{kind}: {len(answers)} answers, {made} tokens, {rate:.0f} a second", flush=True)


def _find(row: list[int], part: list[int]) -> int:
    return next(i for i in range(len(row)) if row[i : i + len(part)] == part)


if __name__ == "__main__":
    main()
