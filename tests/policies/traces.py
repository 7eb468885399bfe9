"""Replays traces of three tasks: what a drafter would have given at every position is known, so any policy can be run
on them, and the best fixed arm in hindsight is exact."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mediaspec.policies import Arm, DraftPolicy, Outcome

DATA = Path(__file__).parents[1] / "data"
RECORDED = json.loads((DATA / "policy_traces_smollm2.json").read_text())["tasks"]
"""Counts at every position of a real model's answers; the others stand for a better head and longer answers."""
TASKS = json.loads((DATA / "policy_traces.json").read_text())["tasks"] | {
    f"{task} of SmolLM2": 3 * rows for task, rows in RECORDED.items()  # a dozen rounds of measuring are few of 300
}
DRAFTERS = ["ngram", "head"]


@dataclass
class Machine:
    """Cost of a round: a pass of 1 + K positions, a draft of K steps. Seconds are noisy, the score counts `cost`."""

    plain: float = 0.02
    verify: float = 0.02
    draft: dict[str, float] = field(default_factory=lambda: {"ngram": 0.002, "head": 0.08, "hostile": 0.08})
    fixed: float = 0.01
    noise: float = 0.05

    def cost(self, arm: Arm, offered: int, context: int) -> float:
        base = self.plain * (1.0 + context / 16000)
        if arm.off:
            return base
        length = min(arm.num_draft_tokens, offered) if arm.drafter == "ngram" else arm.num_draft_tokens
        return base * (1.0 + self.fixed + self.verify * length + self.draft[str(arm.drafter)] * length)


@dataclass
class Run:
    tokens: int = 0
    cost: float = 0.0
    rounds: int = 0
    arms: list[Arm] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    gains: list[int] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.tokens / self.cost


def shown(row: dict, arm: Arm, place: int) -> tuple[int, int]:
    """Tokens the arm's draft has right at a place of an answer, and tokens it offers."""
    if arm.off or arm.drafter == "hostile":
        return 0, arm.num_draft_tokens
    offered = row["offer"][place] if arm.drafter == "ngram" else arm.num_draft_tokens
    return min(row[arm.drafter][place], arm.num_draft_tokens), offered


def agreed(row: dict, drafter: str, place: int, room: int) -> list[float]:
    """Agreement of a drafter with the text, level by level, up to its first wrong token."""
    right = 0 if drafter == "hostile" else min(row[drafter][place], room)
    return [1.0] * right + [0.0]


def fixed_rate(task: str, machine: Machine, arm: Arm) -> float:
    """Tokens per cost of one arm throughout."""
    tokens, cost = 0, 0.0
    for row in TASKS[task]:
        place, length = 0, len(row["head"])
        while place < length:
            right, offered = shown(row, arm, place)
            cost += machine.cost(arm, offered, row["context"] + place)
            gained = min(right, length - place - 1) + 1
            place, tokens = place + gained, tokens + gained
    return tokens / cost


def best_fixed(task: str, machine: Machine) -> float:
    """Tokens per cost of the best drafter and length, plain decoding included, known only in hindsight."""
    arms = [Arm(), *(Arm(name, length) for name in DRAFTERS for length in range(1, 9))]
    return max(fixed_rate(task, machine, arm) for arm in arms)


def replay(
    policy: DraftPolicy,
    task: str,
    machine: Machine,
    *,
    drafters: Sequence[str] = ("ngram", "head"),
    seed: int = 0,
    scored: bool = False,
) -> Run:
    """All answers of a task one after the other, batch 1; one `begin` per answer as in a real decode.

    `scored` gives the agreement of every drafter, as `hedge` reads it.
    """
    dice, run = random.Random(seed), Run()
    for row in TASKS[task]:
        policy.begin(drafters, model="tiny")
        place, length = 0, len(row["head"])
        while place < length:
            ready = [name for name in drafters if name != "ngram" or row["offer"][place]]
            choice = policy.choose([0], row["context"] + place, ready)
            right, offered = shown(row, choice.arm, place)
            cost = machine.cost(choice.arm, offered, row["context"] + place)
            room = length - place - 1
            limit = [min(room, choice.arm.num_draft_tokens)]
            seconds = cost * max(0.2, 1.0 + machine.noise * dice.gauss(0.0, 1.0))
            agreement = {d: [agreed(row, d, place, room)] for d in drafters} if scored else None
            policy.observe(choice, Outcome([min(right, room)], seconds, limit, agreement))
            gained = min(right, room) + 1
            place += gained
            run.tokens, run.cost, run.rounds = run.tokens + gained, run.cost + cost, run.rounds + 1
            run.arms.append(choice.arm)
            run.costs.append(cost)
            run.gains.append(gained)
    return run
