"""A prompt as five ordered fields: subject, action, time, place, quality (PromptBlend, arXiv:2412.17254).

Two prompts can only be mixed token by token when the same position means the same thing in both. The paper lets a
language model rewrite every prompt into five fields; here the fields are given by the caller, returned by a callback,
or found by the small rules of this file, which read plain English captions:

    >>> PromptFields.parse("a yellow taxi moves left on a grey road").place
    'on a grey road'
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from .keywords import nearest

__all__ = ["FIELDS", "INSTRUCTION", "Organiser", "Prompt", "PromptFields", "organise"]

FIELDS = ("subject", "action", "time", "place", "quality")

INSTRUCTION = (
    "Rewrite every prompt of the list into the fields subject, action, time, place, quality. Use the same words in "
    "all prompts for what they share, leave a field empty when the prompt does not tell, add nothing. Answer with a "
    "JSON list that holds one object with these five keys per prompt."
)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Verbs by stem. In the form "moves" they start the action wherever they stand; several are nouns as well ("waves"), so
# a verb of MOTION wins over one of OTHER, and a later one over an earlier one of the same kind.
MOTION = _words(
    "move spin rotate pulse bounce slide drift float grow shrink roll jump turn fall rise walk run fly swim dance "
    "sway wobble zoom glide tumble swing shake circle crawl hop march race speed sail stand sit lie stay rest "
    "sleep wait"
)
OTHER = _words(
    "play eat drink drive ride look watch hold wear carry read write sing talk cook climb throw catch chase wave "
    "open close burn glow shine melt bloom blow cross enter leave smile laugh cry dive explode flicker follow "
    "gallop kick lean lift paint perform pour pull push sip ski skate stretch surf travel wander work start begin "
    "become show hang perch stare gaze hunt bark purr graze cast crash spread flow rain snow land launch hover "
    "vanish appear"
)
BE = ("is", "are", "was", "were")
PLACE_WORDS = _words(
    "on in at under over above below beneath inside outside near beside behind between among across through along "
    "around against within upon atop amid by into onto past"
)
TIME_PREPOSITIONS = ("during", "before", "after", "until", "while", "throughout")
TIME_NOUNS = _words(
    "morning noon afternoon evening night midnight dawn dusk sunrise sunset twilight daytime nighttime day "
    "daylight winter spring summer autumn fall today tonight yesterday tomorrow season january february march "
    "april may june july august september october november december monday tuesday wednesday thursday friday "
    "saturday sunday christmas halloween hour moonlight weekend century"
)
QUALITY_WORDS = _words(
    "4k 8k 2k hd uhd hdr 1080p 720p quality cinematic photorealistic photorealism realistic realism "
    "hyperrealistic detailed masterpiece resolution sharp focus bokeh blurry style rendering render animation "
    "aesthetic artstation lighting lens grainy footage vivid colors colours monochrome photography award-winning "
    "professional fps shot"
)
# words that end in -ing and are no verbs
NOT_VERBS = _words(
    "morning evening building ceiling king ring string spring wing thing something nothing anything everything "
    "clothing wedding duckling pudding sibling painting drawing string swing sling earring"
)
ARTICLES = ("a", "an", "the", "his", "her", "its", "their", "some", "two", "three", "four", "five", "many", "several")
PARTICLES = ("left", "right", "up", "down", "away", "back", "forward", "forwards", "backwards", "around", "round")


@dataclass(frozen=True)
class PromptFields:
    """The five fields of one prompt; an empty string where the prompt does not tell.

    Args:
        subject: who or what, "a yellow taxi".
        action: what it does, "moves left".
        time: when, "at dawn".
        place: where, "on a grey road".
        quality: how it is filmed, "4k, cinematic".

    Raises:
        TypeError: a field is no string. ValueError: all five are empty.
    """

    subject: str = ""
    action: str = ""
    time: str = ""
    place: str = ""
    quality: str = ""

    def __post_init__(self) -> None:
        for name in FIELDS:
            value = getattr(self, name)
            if not isinstance(value, str):
                raise TypeError(f"field {name} is {value!r}; write text, or '' for nothing")
            object.__setattr__(self, name, " ".join(value.split()))
        if not any(self):
            raise ValueError(f"all five fields are empty; fill at least one of {', '.join(FIELDS)}")

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(getattr(self, field.name) for field in fields(self)))

    @property
    def text(self) -> str:
        """The fields in order as one prompt; the quality follows a comma."""
        said = " ".join(part for part in tuple(self)[:4] if part)
        return ", ".join(part for part in (said, self.quality) if part)

    @classmethod
    def of(cls, prompt: Prompt) -> PromptFields:
        """Fields from fields, a mapping of them, five strings in order, or a plain text (see `parse`).

        Raises:
            ValueError: an unknown field (the nearest one is named), or not five strings. TypeError: anything else.
        """
        if isinstance(prompt, PromptFields):
            return prompt
        if isinstance(prompt, str):
            return cls.parse(prompt)
        if isinstance(prompt, Mapping):
            for key in prompt:
                if key not in FIELDS:
                    raise ValueError(f"there is no prompt field {key!r}; {nearest(str(key), FIELDS)}")
            return cls(**{key: "" if value is None else value for key, value in prompt.items()})
        if isinstance(prompt, Sequence):
            if len(prompt) != len(FIELDS):
                raise ValueError(f"{len(prompt)} fields were given; write five strings: {', '.join(FIELDS)}")
            return cls(*prompt)
        raise TypeError(f"prompt is {prompt!r}; give text, PromptFields, a mapping of fields, or five strings")

    @classmethod
    def parse(cls, text: str) -> PromptFields:
        """Finds the fields of a plain English caption by rules: a list of verbs, prepositions, nouns of time.

        The rules are for captions of one sentence, "<subject> <verb ...> <where> <when>, <quality>". What they do not
        recognise stays with its neighbour, so no word is lost; give the fields yourself where that matters.

        Args:
            text: the caption.

        Raises:
            ValueError: no words in it. TypeError: no string.

        Example:
            >>> tuple(PromptFields.parse("a brown bear walking slowly on a snowy path at night, 4k"))
            ('a brown bear', 'walking slowly', 'at night', 'on a snowy path', '4k')
        """
        if not isinstance(text, str):
            raise TypeError(f"prompt is {text!r}; give text")
        clauses = [" ".join(part.split()) for part in re.split(r"[,;.!]\s+|[,;.!]$", text.strip())]
        clauses = [part for part in clauses if part]
        if not clauses:
            raise ValueError(f"the prompt {text!r} has no words; write a caption, for instance 'a red apple spins'")
        found: dict[str, list[str]] = {name: [] for name in FIELDS}
        for number, clause in enumerate(clauses):
            words = clause.split()
            if number and any(_bare(word) in QUALITY_WORDS for word in words):
                found["quality"].append(clause)
            else:
                _read_clause(words, found, first=not found["subject"])
        said = {name: ", ".join(parts) if name == "quality" else " ".join(parts) for name, parts in found.items()}
        return cls(**said)


Prompt = str | PromptFields | Mapping[str, str] | Sequence[str]
Organiser = Callable[[str, list[str]], str | Sequence[Mapping[str, str]]]


def organise(prompts: Sequence[Prompt], llm: Organiser | None = None) -> list[PromptFields]:
    """The fields of several prompts; plain texts go to `llm` when there is one, else through `PromptFields.parse`.

    Args:
        prompts: texts or fields.
        llm: called once as llm(INSTRUCTION, texts); returns a JSON list (as text, or decoded) of objects with the five
            keys, one per text.

    Raises:
        ValueError: the answer is no such list.

    Example:
        >>> answer = '[{"subject": "a cat", "action": "sleeps", "time": "", "place": "", "quality": ""}]'
        >>> organise(["cat asleep"], llm=lambda instruction, texts: answer)[0].action
        'sleeps'
    """
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if llm is None or not texts:
        return [PromptFields.of(prompt) for prompt in prompts]
    for text in texts:
        if not text.strip():
            raise ValueError("a prompt is empty; write a caption, for instance 'a red apple spins'")
    answer = llm(INSTRUCTION, list(texts))
    rows: Any = answer
    if isinstance(answer, str):
        start, stop = answer.find("["), answer.rfind("]")  # models like to wrap JSON in prose and code fences
        try:
            rows = json.loads(answer[start : stop + 1])
        except ValueError as error:
            raise ValueError(f"the llm callback returned no JSON list ({error}): {answer[:200]!r}") from error
    if not isinstance(rows, Sequence) or len(rows) != len(texts) or not all(isinstance(r, Mapping) for r in rows):
        raise ValueError(
            f"the llm callback must return a list of {len(texts)} objects with the keys {', '.join(FIELDS)}, got "
            f"{str(rows)[:200]}"
        )
    answers = iter(rows)
    return [PromptFields.of(next(answers) if isinstance(prompt, str) else prompt) for prompt in prompts]


def _bare(word: str) -> str:
    return word.lower().strip("\"'()[]:")


def _is_verb(word: str, stems: Sequence[str], before: str = "") -> bool:
    """Third person or -ing form of a stem, or the stem itself after a plural ("two dogs play")."""
    for stem in stems:
        short = stem[:-1] if stem.endswith("e") else stem
        if word in (f"{stem}s", f"{stem}es", f"{short}ing", f"{stem}{stem[-1]}ing", f"{stem[:-1]}ies"):
            return True
        if word == stem and before.endswith("s") and not before.endswith(("ss", "us")):
            return True
    return False


def _find_verb(words: list[str]) -> int | None:
    """Index of the word at which the action starts."""
    bare = [_bare(word) for word in words]
    for index, word in enumerate(bare[:-1]):
        if index and word in BE:
            return index
    for stems in (MOTION, OTHER):
        hits = [
            i for i, word in enumerate(bare)
            if i and _is_verb(word, stems, bare[i - 1]) and bare[i - 1] not in ARTICLES and not _is_adjective(bare, i)
        ]  # fmt: skip
        finite = [i for i in hits if not bare[i].endswith("ing")]
        if finite or hits:
            return (finite or hits)[-1]
    for index, word in enumerate(bare):
        if (
            index
            and word.endswith("ing")
            and len(word) > 4
            and word not in NOT_VERBS
            and bare[index - 1] not in ARTICLES
        ):
            follower = bare[index + 1] if index + 1 < len(bare) else ""
            starts = (*PLACE_WORDS, *TIME_PREPOSITIONS, *ARTICLES, *PARTICLES, "", "to", "from", "with")
            if follower in starts or follower.endswith("ly"):
                return index
    return None


def _is_adjective(bare: list[str], index: int) -> bool:
    """Whether an -ing form stands before the noun of the subject ("a yellow smiling face moves")."""
    later = bare[index + 1 :]
    return bare[index].endswith("ing") and any(_is_verb(w, (*MOTION, *OTHER)) and not w.endswith("ing") for w in later)


def _phrases(words: list[str]) -> list[list[str]]:
    """Cuts words before every preposition of place or time that has an object."""
    parts: list[list[str]] = [[]]
    for index, word in enumerate(words):
        bare = _bare(word)
        last = index + 1 == len(words)
        particle = bare in PARTICLES and (last or _bare(words[index + 1]) in PLACE_WORDS)
        if bare in TIME_PREPOSITIONS or (bare in PLACE_WORDS and not last and not particle):
            parts.append([])
        parts[-1].append(word)
    return parts


def _is_time(phrase: list[str]) -> bool:
    """A phrase tells when if it begins like one or its head noun is one ("at night", not "in the night sky")."""
    bare = [_bare(word) for word in phrase]
    head = bare[: bare.index("of")] if "of" in bare else bare
    return bare[0] in TIME_PREPOSITIONS or (bool(head) and head[-1] in TIME_NOUNS)


def _read_clause(words: list[str], found: dict[str, list[str]], first: bool) -> None:
    verb = _find_verb(words)
    if verb is None and not first:
        # "at dawn", "a grey road": an addition without a verb tells where or when
        for phrase in _phrases(words):
            if phrase:
                found["time" if _is_time(phrase) else "place"].append(" ".join(phrase))
        return
    before, after = (words, []) if verb is None else (words[:verb], words[verb:])
    for name, part in (("subject", before), ("action", after)):
        for phrase in _phrases(part):
            if phrase:
                adjunct = _bare(phrase[0]) in (*PLACE_WORDS, *TIME_PREPOSITIONS)
                home = name if not adjunct else "time" if _is_time(phrase) else "place"
                found[home].append(" ".join(phrase))
