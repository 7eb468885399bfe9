"""Makes tests/data/policy_traces.json: what two drafters would have got right at every position of three tasks.

    python tests/policies/make_traces.py

Texts are this project's own. `ngram` is real prompt lookup over them (longest of 3- to 1-token suffixes, latest match,
at most 16 tokens); a run of 0 with an offer of 0 is "no match". `head` is synthetic in the way one-block heads are: a
token is drafted right with a chance that falls with its rarity, drifts over the text and falls with the draft depth.

- chat: prose that was never seen before. copy: a source file rewritten with some names changed. long: a page that is
  summarised, half of the sentences quoted, at contexts from 2,000 tokens on.
"""

from __future__ import annotations

import json
import math
import random
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEEP = 16


def tokens_of(text: str) -> list[str]:
    return re.findall(r"\w{1,5}|[^\w\s]|\s+", text)


def lookup(context: list[str]) -> list[str]:
    """The continuation of the latest earlier place where the longest suffix stands."""
    for width in (3, 2, 1):
        suffix = context[-width:]
        for start in range(len(context) - width - 1, max(-1, len(context) - 4000), -1):
            if context[start : start + width] == suffix:
                return context[start + width : start + width + DEEP]
    return []


def ngram_trace(prompt: list[str], answer: list[str]) -> tuple[list[int], list[int]]:
    runs, offers = [], []
    for place in range(len(answer)):
        draft = lookup(prompt + answer[:place]) if place else []
        right = 0
        while right < len(draft) and place + right < len(answer) and draft[right] == answer[place + right]:
            right += 1
        runs.append(right)
        offers.append(len(draft))
    return runs, offers


def head_trace(answer: list[str], counts: Counter, level: float, dice: random.Random) -> list[int]:
    mood, ease = 0.0, []
    for token in answer:
        mood = 0.97 * mood + 0.25 * dice.gauss(0.0, 1.0)
        ease.append(level + mood + 0.35 * math.log(counts[token] / 5.0))
    runs = []
    for place in range(len(answer)):
        right = 0
        while right < DEEP and place + right < len(answer):
            if dice.random() > 1.0 / (1.0 + math.exp(-(ease[place + right] - 0.12 * right))):
                break
            right += 1
        runs.append(right)
    return runs


def renamed(text: str, dice: random.Random) -> str:
    """A file after an edit: three names changed everywhere, one line in twelve reworded."""
    names = sorted(set(re.findall(r"\b[a-z_]{5,}\b", text)))
    for name in dice.sample(names, 3):
        text = re.sub(rf"\b{name}\b", f"new_{name}", text)
    lines = text.splitlines(keepends=True)
    return "".join(line.upper() if dice.random() < 1 / 12 else line for line in lines)


def summarised(text: str, dice: random.Random) -> str:
    """Half of the sentences quoted, the others with their words in another order."""
    out = []
    for sentence in re.split(r"(?<=[.:])\s+", text):
        words = sentence.split()
        if len(words) < 4:
            continue
        if dice.random() < 0.5:
            dice.shuffle(words)
        out.append(" ".join(words))
    return " ".join(out)


def main() -> None:
    dice = random.Random(7)
    code = sorted((ROOT / "mediaspec" / "rules").glob("*.py"))
    prose = (ROOT / "README.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    plain = re.sub(r"```.*?```", " ", prose, flags=re.S)
    sources: dict[str, list[tuple[int, list[str], list[str]]]] = {"chat": [], "copy": [], "long": []}
    pieces = tokens_of(plain)
    for number in range(8):
        start = number * 420
        sources["chat"].append((40, pieces[start : start + 20], pieces[start + 20 : start + 420]))
    for path in code[:8]:
        text = path.read_text()[:1600]
        sources["copy"].append((0, tokens_of(text), tokens_of(renamed(text, dice))[:400]))
    for number in range(6):
        page = plain[number * 1500 : number * 1500 + 2600]
        sources["long"].append((2000 + 900 * number, tokens_of(page), tokens_of(summarised(page, dice))[:360]))
    levels = {"chat": 0.9, "copy": 0.9, "long": 0.2}
    tasks = {}
    for task, answers in sources.items():
        rows = []
        for base, prompt, answer in answers:
            runs, offers = ngram_trace(prompt, answer)
            head = head_trace(answer, Counter(prompt + answer), levels[task], dice)
            rows.append({"context": base + len(prompt), "ngram": runs, "offer": offers, "head": head})
        tasks[task] = rows
        total = sum(len(row["head"]) for row in rows)
        print(task, total, "tokens; mean run", {k: sum(sum(r[k]) for r in rows) / total for k in ("ngram", "head")})
    text = json.dumps({"made_by": "python tests/policies/make_traces.py", "tasks": tasks}, separators=(",", ":"))
    (ROOT / "tests" / "data" / "policy_traces.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
