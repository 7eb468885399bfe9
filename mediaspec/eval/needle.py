"""Needles in a haystack: one sentence with a number, somewhere in a long text, is asked for at its end.

The answer's beginning is given ("The secret number of the ... is"), so that what is tested is finding the number and
not the manner of speaking; a text counts as right where the first number of the answer is the right one.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from .text_tasks.documents import prose
from .text_tasks.words import COLOURS, PLACES

__all__ = ["ANSWER_TOKENS", "Needle", "make_needle", "needle_table", "needle_texts"]

DIGITS = 5
ANSWER_TOKENS = 12
"""Tokens written per answer: every digit may be one, and a little more."""


@dataclass(frozen=True)
class Needle:
    """Args: prompt, ready for the model; answer, the number; depth, where the sentence stands, 0 start to 1 end."""

    prompt: str
    answer: str
    depth: float


def make_needle(tokenizer: PreTrainedTokenizerBase, length: int, depth: float, seed: int) -> Needle:
    """A text of about `length` tokens with its question.

    Args:
        tokenizer: of the model; its chat template is used where it has one.
        length: tokens of the prompt and `ANSWER_TOKENS` at most.
        depth: where the sentence stands, 0 before the first paragraph, 1 behind the last.
        seed: of text, number and place.

    Raises:
        ValueError: a length that leaves no room for a text, a depth outside [0, 1].
    """
    if not 0 <= depth <= 1:
        raise ValueError(f"depth {depth} is outside [0, 1]")
    draw = random.Random(seed)
    number = str(int(10 ** (DIGITS - 1) * (1 + 9 * draw.random())))
    place = f"{COLOURS[int(draw.random() * len(COLOURS))]} {PLACES[int(draw.random() * len(PLACES))]}"
    needle = f"The secret number of the {place} is {number}."
    count = _counter(tokenizer)
    room = length - ANSWER_TOKENS - count(_prompt(tokenizer, needle, place))
    paragraphs: list[str] = []
    for paragraph in prose(1_000_000 + seed, length).split("\n\n"):
        room -= count(paragraph + "\n\n")
        if room < 0:
            break
        paragraphs.append(paragraph)
    while paragraphs:  # joined paragraphs may have a few tokens more than they have one by one
        place_of_needle = round(depth * len(paragraphs))
        whole = "\n\n".join([*paragraphs[:place_of_needle], needle, *paragraphs[place_of_needle:]])
        prompt = _prompt(tokenizer, whole, place)
        if count(prompt) + ANSWER_TOKENS <= length:
            return Needle(prompt, number, depth)
        paragraphs.pop()
    raise ValueError(f"{length} tokens leave no room for a text around the needle; write a length of at least 256")


def needle_texts(tokenizer: PreTrainedTokenizerBase, length: int, depths: Sequence[float], each: int) -> list[Needle]:
    """`each` needles at every depth."""
    return [make_needle(tokenizer, length, depth, each * k + n) for k, depth in enumerate(depths) for n in range(each)]


def needle_table(needles: Sequence[Needle], write: Callable[[str], str]) -> dict[str, Any]:
    """How many are found.

    Args:
        needles: to be asked for.
        write: `write(prompt)` goes on from the prompt, greedily, by `ANSWER_TOKENS`.

    Returns:
        right, of, by_depth: depth -> [right, of].
    """
    by_depth: dict[str, list[int]] = {}
    for needle in needles:
        entry = by_depth.setdefault(f"{needle.depth:.2f}", [0, 0])
        found = re.search(r"\d+", write(needle.prompt))
        entry[0] += found is not None and found.group() == needle.answer
        entry[1] += 1
    return {"right": _total(by_depth, 0), "of": _total(by_depth, 1), "by_depth": by_depth}


def _total(by_depth: Mapping[str, Sequence[int]], column: int) -> int:
    return sum(entry[column] for entry in by_depth.values())


def _counter(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], int]:
    def count(text: str) -> int:
        encoded: Any = tokenizer(text, add_special_tokens=False, verbose=False)
        return len(encoded["input_ids"])

    return count


def _prompt(tokenizer: PreTrainedTokenizerBase, text: str, place: str) -> str:
    asked = f"{text}\n\nWhat is the secret number of the {place}? It stands somewhere in the text above."
    begun = f"The secret number of the {place} is"
    if tokenizer.chat_template is None:
        return f"{asked}\n\n{begun}"
    framed: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": asked}], add_generation_prompt=True, tokenize=False
    )
    return f"{framed}{begun}"
