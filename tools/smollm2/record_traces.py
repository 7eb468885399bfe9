"""Records what look-ups and the shipped EAGLE-3 head would have got right at every position of SmolLM2's own answers.

    python tools/smollm2/record_traces.py --out tests/data/policy_traces_smollm2.json

The answers are greedy ones to the prompts of `mediaspec bench text`. At every position both drafters propose, and a
draft of length 0 is verified, so that the text is plain decoding's and every position is seen once. Tests replay
policies on the counts (tests/policies/traces.py).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from mediaspec import TextGenerationPipeline
from mediaspec.core.tree import TreeSpec
from mediaspec.core.types import DecodeState, Draft, TargetOutput, Verdict
from mediaspec.drafters.eagle3 import Eagle3Drafter
from mediaspec.drafters.ngram import NgramDrafter
from mediaspec.eval.text_tasks import TASKS, task_prompts
from mediaspec.models.heads import shipped_head
from mediaspec.targets.causal_lm import CausalLMTarget

DEEP = 8


class Recorder:
    """A drafter that lets others propose, keeps what they said by position, and offers nothing itself (one row)."""

    name = "recorder"
    chains_only = True

    def __init__(self, inner: dict[str, Any]) -> None:
        self.inner = inner
        self.feature_layers = next(one.feature_layers for one in inner.values() if hasattr(one, "feature_layers"))
        self.needs = frozenset().union(*(one.needs for one in inner.values()))
        self.said: dict[str, dict[int, list[int]]] = {}  # shared with the copy that a run makes of a drafter

    def check(self, target: Any) -> None:
        for one in self.inner.values():
            if hasattr(one, "check"):
                one.check(target)

    def begin(self, state: DecodeState, output: TargetOutput, extra: int) -> None:
        self.said.update({name: {} for name in self.inner})
        for one in self.inner.values():
            one.begin(state, output, extra)

    def propose(self, state: DecodeState, budget: int, tree: TreeSpec | None = None) -> Draft:
        for name, one in self.inner.items():
            draft = one.propose(state, budget, None)
            self.said[name][state.host_lengths[0]] = draft.tokens[0, : int(draft.lengths[0])].tolist()
        return Draft(torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))

    def observe(self, state: DecodeState, draft: Draft | None, verdict: Verdict, output: TargetOutput) -> None:
        for one in self.inner.values():
            one.observe(state, draft, verdict, output)

    def select(self, rows: torch.Tensor) -> None:
        for one in self.inner.values():
            one.select(rows)


def right(draft: list[int], text: list[int]) -> int:
    """Leading tokens of a draft that the text has."""
    count = 0
    for ours, theirs in zip(draft, text, strict=False):
        if ours != theirs:
            break
        count += 1
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--prompts", default="8,8,3", help="of chat, copy and long")
    args = parser.parse_args()
    pipe = TextGenerationPipeline.from_pretrained(args.model)
    pipe.set_progress_bar_config(disable=True)
    head = shipped_head("eagle3", CausalLMTarget(pipe.model, 1))
    tasks = {}
    for task, count in zip(TASKS, map(int, args.prompts.split(",")), strict=True):
        rows = []
        for prompt in task_prompts(task, count):
            recorder = Recorder({"ngram": NgramDrafter(6, 2), "head": Eagle3Drafter(head)})
            settings: dict[str, Any] = dict(max_new_tokens=args.tokens, temperature=0.0)
            text = pipe(prompt.chat, drafter=recorder, num_draft_tokens=DEEP, **settings).tokens[0]
            first = min(recorder.said["head"])
            row: dict[str, Any] = {"context": len(pipe.tokenizer.apply_chat_template(prompt.chat)["input_ids"])}
            places = [place for place in sorted(recorder.said["head"]) if place - first < len(text) - 1]
            row["offer"] = [len(recorder.said["ngram"][place]) for place in places]
            for name, said in recorder.said.items():
                row[name] = [right(said[place], text[place - first + 1 :]) for place in places]
            rows.append(row)
            means = {name: round(sum(row[name]) / len(places), 2) for name in recorder.said}
            print(task, len(places), "positions; mean right tokens", means, flush=True)
        tasks[task] = rows
    text_out = json.dumps({"made_by": "python tools/smollm2/record_traces.py", "tasks": tasks}, separators=(",", ":"))
    args.out.write_text(text_out + "\n")


if __name__ == "__main__":
    main()
