"""What `mediaspec bench text` decodes: three small tasks, written for this project.

    chat   open questions and requests; little of an answer stands in the prompt
    copy   a text or code to give back with a small change; most of the answer stands in the prompt
    long   2,000 to 8,000 tokens of minutes, stories, handbooks or logs, and a request: quote, find or sum up

Prompts are chats and go through the model's template.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib import resources

from .documents import document

__all__ = ["TASKS", "TextPrompt", "task_prompts"]

TASKS = ("chat", "copy", "long")

# kind of text, words, request. SmolLM2's tokenizer makes 2,000 to 7,600 tokens of these.
LONG = (
    ("minutes", 1900, "quote"), ("story", 3300, "summarise"), ("log", 720, "find"), ("handbook", 2900, "quote"),
    ("story", 1750, "find"), ("minutes", 4700, "find"), ("handbook", 1400, "summarise"), ("story", 5900, "quote"),
    ("log", 1300, "quote"), ("minutes", 2600, "summarise"), ("handbook", 4300, "find"), ("log", 850, "summarise"),
)  # fmt: skip


@dataclass(frozen=True)
class TextPrompt:
    """One prompt.

    Args:
        name: unique within its task.
        prompt: what the user says.
        expected: the right answer, or words that it contains; None for open prompts.
    """

    name: str
    prompt: str
    expected: str | None = None

    @property
    def chat(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.prompt}]


def task_prompts(task: str, count: int | None = None) -> list[TextPrompt]:
    """The prompts of a task.

    Args:
        task: one of `TASKS`.
        count: only the first so many; None is all.

    Raises:
        ValueError: unknown task, or a count that is not there.

    Example:
        >>> task_prompts("chat", 1)[0].prompt
        'How does a fridge keep food cold?'
    """
    readers = {"chat": _chat, "copy": _copy, "long": _long}
    if task not in readers:
        raise ValueError(f"there is no task {task!r}; write one of {', '.join(TASKS)}")
    found = readers[task]()
    if count is not None and not 1 <= count <= len(found):
        raise ValueError(f"the task {task} has {len(found)} prompts; ask for 1 to {len(found)} of them, not {count}")
    return found[:count]


def _entries(name: str) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads((resources.files(__package__) / name).read_text(encoding="utf-8"))
    return found


def _chat() -> list[TextPrompt]:
    return [TextPrompt(str(entry["name"]), str(entry["prompt"])) for entry in _entries("chat.json")]


def _copy() -> list[TextPrompt]:
    out = []
    for entry in _entries("copy.json"):
        text = expected = str(entry["text"])
        edits = entry["edits"]
        assert isinstance(edits, list)
        for old, new in edits:
            expected = re.sub(old, new, expected)
        out.append(TextPrompt(str(entry["name"]), f"{entry['instruction']}\n\n{text}", expected))
    return out


def _long() -> list[TextPrompt]:
    out = []
    for number, (kind, num_words, request) in enumerate(LONG):
        text = document(kind, number, num_words)
        # a paragraph from the first two thirds, so that the answer is far from the question
        places = sorted(text.facts)
        place = places[(2 * number + 1) * len(places) // (3 * len(LONG))]
        fact = text.facts[place]
        asked, expected = {
            "quote": (f"Copy the part about {fact.about} word for word.", text.paragraphs[place]),
            "find": (f"{fact.question} Quote the place in the text that says so.", fact.answer),
            "summarise": ("Summarise the text above. Name the people and numbers that matter.", None),
        }[request]
        out.append(TextPrompt(f"{kind}-{num_words}-{request}", f"{text.text}\n\n{asked}", expected))
    return out
