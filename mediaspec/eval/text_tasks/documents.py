"""Long texts with facts in them, the same on every machine: minutes, stories, handbooks and logs of any length.

Each kind writes paragraph after paragraph until a number of words is reached. A paragraph may state a fact: a question
that only this paragraph answers. Names and numbers are drawn so that no two paragraphs of a text state the same fact.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from . import words

__all__ = ["KINDS", "Document", "Fact", "document", "prose"]


@dataclass(frozen=True)
class Fact:
    """What one paragraph tells.

    Args:
        question: answered by this paragraph alone.
        answer: the words in it that answer.
        about: how to name the paragraph, for "copy the paragraph about ...".
    """

    question: str
    answer: str
    about: str


@dataclass(frozen=True)
class Document:
    """Args: title; paragraphs; facts, number of a paragraph -> its fact."""

    title: str
    paragraphs: tuple[str, ...]
    facts: dict[int, Fact]

    @property
    def text(self) -> str:
        return "\n\n".join([self.title, *self.paragraphs])


Paragraphs = Iterator[tuple[str, Fact | None]]


class _Draw:
    """Choices from one seed. Only `Random.random` is used, which gives the same numbers in every Python."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def number(self, low: int, high: int) -> int:
        """An integer in [low, high]."""
        return low + int(self._random.random() * (high - low + 1))

    def one(self, choices: Sequence[str]) -> str:
        return choices[self.number(0, len(choices) - 1)]

    def order(self, choices: Sequence[str]) -> list[str]:
        return sorted(choices, key=lambda _: self._random.random())

    def pairs(self, left: Sequence[str], right: Sequence[str]) -> Iterator[tuple[str, str]]:
        """All pairs in a random order in which neighbours differ on both sides; starts over at the end."""
        first, second = self.order(left), self.order(right)
        for step in count():
            turn, place = divmod(step, len(first))
            yield first[place], second[(place + turn) % len(second)]


def _minutes(draw: _Draw) -> Paragraphs:
    people = [f"{draw.one(words.FIRST_NAMES)} {last}" for last in draw.order(words.LAST_NAMES)]
    topics = draw.pairs(words.PLACES, words.ITEMS)
    for meeting in count(1):
        date = f"{draw.number(2, 27)} {words.MONTHS[(meeting - 1) % len(words.MONTHS)]}"
        chair, clerk, late, absent = draw.order(people)[:4]
        text = (
            f"Meeting {meeting}, {date}. {chair} takes the chair and {clerk} keeps the minutes. {late} arrives "
            f"{draw.number(5, 40)} minutes late, {absent} has sent an excuse. The minutes of the last meeting are "
            f"accepted without changes."
        )
        yield text, None
        for item in range(1, draw.number(4, 7)):
            place, what = next(topics)
            speaker, other, keeper = draw.order(people)[:3]
            opening = draw.one(words.OPENINGS).format(who=speaker, what=what, place=place)
            text = (
                f"Item {meeting}.{item}. {opening} The cost is put at {10 * draw.number(21, 989)} crowns. "
                f"{draw.one(words.WORRIES).format(who=other)} {draw.one(words.DECISIONS)} {keeper} will see to it "
                f"until {draw.number(2, 27)} {draw.one(words.MONTHS)}."
            )
            yield text, Fact(f"Who will see to {what} at the {place}?", keeper, f"{what} at the {place}")


def _story(draw: _Draw) -> Paragraphs:
    hero = draw.one(words.FIRST_NAMES)
    stops = draw.pairs(words.VILLAGES, words.CRAFTS)
    gifts = draw.pairs(words.GIFTS, [name for name in words.FIRST_NAMES if name != hero])
    last = "the sea"
    for day in count(1):
        village, craft = next(stops)
        gift, giver = next(gifts)
        text = (
            f"{draw.one(words.WEATHER)} {hero} left {last} behind and {draw.one(words.TRAVEL)} until the houses of "
            f"{village} came in sight. In {village} the people {craft}. They had done so for {draw.number(3, 19)} "
            f"generations, and they were surprised that anybody could live otherwise."
        )
        yield text, None
        text = (
            f"That night {hero} stayed with {giver} of {village}, who had {draw.number(2, 11)} geese and a "
            f'{draw.one(words.COLOURS)} door. They ate soup and talked about the winter. "{draw.one(words.ADVICE)}," '
            f"said {giver}, and gave {hero} {gift}. {draw.one(words.THANKS).format(who=hero)}"
        )
        yield (
            text,
            Fact(f"What did {giver} of {village} give to {hero}?", gift, f"the night with {giver} of {village}"),
        )
        if day % 2 == 0:
            yield draw.one(words.EPISODES).format(who=hero), None
        last = village


def _handbook(draw: _Draw) -> Paragraphs:
    parts = draw.pairs(words.DEVICES, words.COLOURS)
    for chapter in count(1):
        device, colour = next(parts)
        code = f"{device[0].upper()}{colour[0].upper()}-{chapter}{draw.number(10, 99)}"
        pressure, hours, torque = draw.number(11, 95), 50 * draw.number(3, 60), draw.number(4, 48)
        text = (
            f"Chapter {chapter}. The {colour} {device}, type {code}. The {colour} {device} stands in hall "
            f"{draw.number(1, 9)} next to the {draw.one(words.DEVICES)} of the same line. It was built in "
            f"{draw.number(1988, 2019)} and weighs {5 * draw.number(8, 160)} kg. Before work on it, switch it off, "
            f"lock the switch and hang up the sign. Wait {draw.number(2, 15)} minutes until the housing is cold."
        )
        yield text, None
        text = (
            f"Settings of type {code}. The working pressure of the {colour} {device} is {pressure / 10} bar; above "
            f"{(pressure + 12) / 10} bar the safety valve opens with a loud noise. Tighten the bolts of the cover "
            f"crosswise with {torque} newton metres. Change the oil after {hours} hours, and the seal at every second "
            f"change. Use only oil of class {draw.number(2, 9)}."
        )
        question = f"After how many hours is the oil of type {code} changed?"
        yield text, Fact(question, f"{hours} hours", f"the settings of type {code}")
        text = (
            f"Faults of type {code}. If the {colour} {device} does not start, look at the fuse in cabinet "
            f"{draw.number(1, 24)}. If it starts and stops again, the {draw.one(words.DEVICES)} before it is usually "
            f"blocked. If it is louder than usual, measure the play of the bearing: more than 0.{draw.number(2, 9)} "
            f"mm means that it must be replaced. Write every fault into the {draw.one(words.COLOURS)} book, with the "
            f"date and your name."
        )
        yield text, None


def _log(draw: _Draw) -> Paragraphs:
    devices = [f"{device}-{number}" for device in words.DEVICES for number in (1, 2, 3)]
    second = 6 * 3600
    for block in count(1):
        lines = []
        fact = None
        special = draw.number(3, 8)
        for line in range(10):
            second += draw.number(3, 90)
            stamp = f"{second // 3600 % 24:02d}:{second // 60 % 60:02d}:{second % 60:02d}"
            device = draw.one(devices)
            if line == special:
                code, value = f"E{block:03d}", draw.number(100, 999)
                lines.append(f"{stamp} {device} stopped with error {code}, last reading {value}, restarted by hand")
                fact = Fact(f"Which device stopped with error {code}?", device, f"error {code}")
            else:
                lines.append(f"{stamp} {device} {draw.one(words.STATES)}")
        yield "\n".join(lines), fact


_WRITERS: dict[str, tuple[str, Callable[[_Draw], Paragraphs]]] = {
    "minutes": ("Minutes of the town's building committee", _minutes),
    "story": ("The road to the other sea", _story),
    "handbook": ("Handbook of the machines in the paper works", _handbook),
    "log": ("Log of the water works", _log),
}
KINDS = tuple(_WRITERS)


def document(kind: str, seed: int, num_words: int) -> Document:
    """A text.

    Args:
        kind: one of `KINDS`.
        seed: other seeds give other names, numbers and orders.
        num_words: its paragraphs end with the first that reaches so many words.

    Raises:
        ValueError: unknown kind, or no words wanted.

    Example:
        >>> text = document("story", 1, 300)
        >>> len(text.text.split()) >= 300, text == document("story", 1, 300)
        (True, True)
    """
    if kind not in _WRITERS:
        raise ValueError(f"there is no kind {kind!r} of long text; write one of {', '.join(KINDS)}")
    if num_words < 1:
        raise ValueError(f"num_words={num_words}; write an integer >= 1")
    title, write = _WRITERS[kind]
    paragraphs: list[str] = []
    facts: dict[int, Fact] = {}
    written = 0
    for paragraph, fact in write(_Draw(seed)):
        if fact is not None:
            facts[len(paragraphs)] = fact
        paragraphs.append(paragraph)
        written += len(paragraph.split())
        if written >= num_words and facts:
            return Document(title, tuple(paragraphs), facts)
    raise AssertionError("writers never end")


def prose(seed: int, num_words: int) -> str:
    """Held-out text for perplexity and needles: chapters of stories and minutes in turn, about `num_words` words."""
    parts, written = [], 0
    for chapter in count():
        kind = ("story", "minutes")[chapter % 2]
        part = document(kind, 1000 * (seed + 1) + chapter, min(600, max(1, num_words - written))).text
        parts.append(part)
        written += len(part.split())
        if written >= num_words:
            return "\n\n".join(parts)
    raise AssertionError("chapters never end")
