"""Which videos a comparison makes: prompts or timelines, samplers, attention settings or blends, seeds.

    attention = none | tiara[:preset][:key=value{,key=value}]        preset = paper | safe

Lists are written with commas, as in `none,tiara:paper,tiara:safe,tiara:alpha=3,window_length=9`; a piece key=value
after a comma belongs to the entry before it. The same prompt has the same seed under every setting, and jobs are
ordered prompt by prompt, so that a run that was stopped holds whole pairs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..pipelines.keywords import nearest
from ..pipelines.timeline import BLENDS, Timeline

__all__ = [
    "NONE",
    "AttentionSpec",
    "Job",
    "parse_attention",
    "parse_names",
    "parse_sampler_settings",
    "plan_jobs",
    "read_prompts",
    "read_timelines",
    "slug",
]

NONE = "none"
PRESETS = ("paper", "safe")
_SETTING = re.compile(r"^[a-z_][a-z0-9_]*=")


@dataclass(frozen=True)
class AttentionSpec:
    """One attention setting.

    Args:
        text: canonical writing, the label of its rows.
        preset: of TiARA; None for "none" and for TiARA's own defaults.
        settings: of TiARA on top of the preset.
    """

    text: str
    preset: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def plain(self) -> bool:
        """Whether the model's own attention is meant."""
        return self.text == NONE

    def build(self, boundary: str | None = None) -> Any:
        """The `TiARA` configuration; None for "none".

        Args:
            boundary: taken where the settings name none.

        Raises:
            ValueError: an unknown setting or a value out of range.
        """
        if self.plain:
            return None
        from dataclasses import fields

        from ..attention.tiara import TiARA

        known = [one.name for one in fields(TiARA)]
        for key in self.settings:
            if key not in known:
                raise ValueError(f"TiARA has no setting {key!r}; {nearest(key, known)}")
        make: Any = {None: TiARA, "paper": TiARA.paper, "safe": TiARA.safe}[self.preset]
        return make(**({} if boundary is None else {"boundary": boundary}) | self.settings)


def parse_attention(text: str) -> list[AttentionSpec]:
    """Reads a list of attention settings.

    Args:
        text: see the module's head.

    Raises:
        ValueError: an empty list, an unknown name or preset, a malformed or unknown setting, or an entry twice.

    Example: `[one.text for one in parse_attention("none,tiara:safe")]` is ["none", "tiara:safe"].
    """
    entries: list[str] = []
    for piece in (one.strip() for one in text.split(",")):
        if not piece:
            raise ValueError(f"{text!r} has an empty entry; write attention settings as 'none,tiara:paper,tiara:safe'")
        if _SETTING.match(piece) and entries and entries[-1] != NONE:
            entries[-1] += ("," if "=" in entries[-1] else ":") + piece
        else:
            entries.append(piece)
    found: list[AttentionSpec] = []
    for entry in entries:
        name, *parts = entry.split(":")
        if name not in (NONE, "tiara"):
            raise ValueError(f"there is no attention {name!r}; {nearest(name, (NONE, 'tiara'))}")
        if name == NONE and parts:
            raise ValueError(f"{entry!r}: none takes no settings; write none")
        preset, settings = None, {}
        for part in parts:
            if "=" not in part:
                if part not in PRESETS or preset is not None:
                    raise ValueError(
                        f"{entry!r}: {part!r} is no preset; {nearest(part, PRESETS)}, at most one of them"
                    )
                preset = part
                continue
            for pair in part.split(","):
                key, sign, value = pair.partition("=")
                if not sign or not value or key in settings:
                    raise ValueError(f"{entry!r}: write each setting once as key=value, not {pair!r}")
                settings[key] = _value(value)
        written = ",".join(f"{key}={value}" for key, value in settings.items())
        label = ":".join(filter(None, [name, preset, written]))
        if label in [one.text for one in found]:
            raise ValueError(f"{label!r} is listed twice; list each attention setting once")
        found.append(AttentionSpec(label, preset, settings))
        found[-1].build()  # wrong settings are refused before hours of work
    return found


def _value(text: str) -> Any:
    lowered = text.lower()
    if lowered in ("true", "false", "none"):
        return {"true": True, "false": False, "none": None}[lowered]
    if ".." in text:  # steps=0..7
        low, high = text.split("..", 1)
        return _value(low), _value(high)
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def parse_names(text: str, allowed: Sequence[str], option: str) -> list[str]:
    """Reads names with commas.

    Raises:
        ValueError: unknown, empty or repeated names.
    """
    names = [one.strip() for one in text.split(",")]
    for name in names:
        if name not in allowed:
            raise ValueError(f"{option} has {name!r}; {nearest(name, allowed)}")
    if len(set(names)) != len(names):
        raise ValueError(f"{option} is {text!r}; list each name once")
    return names


def slug(text: str) -> str:
    """A label as a file name."""
    return re.sub(r"[^A-Za-z0-9.=_-]+", "_", text)


@dataclass(frozen=True)
class Job:
    """One video to make.

    Args:
        number: of its prompt or timeline.
        seed: of its noise.
        sampler: name of the long sampler.
        attention: setting.
        prompt: caption; None where a timeline is given.
        timeline: prompts over time; None for one prompt.
        blend: how the timeline's prompts are joined; None for one prompt.
    """

    number: int
    seed: int
    sampler: str
    attention: AttentionSpec
    prompt: str | None = None
    timeline: Timeline | None = None
    blend: str | None = None

    @property
    def group(self) -> str:
        """What is compared: sampler, attention, and blend where there is one."""
        return " / ".join(filter(None, [self.sampler, self.attention.text, self.blend]))

    @property
    def item(self) -> str:
        """What is held equal within a pair: prompt and seed."""
        return f"{self.number:04d}-{self.seed}"

    @property
    def stem(self) -> str:
        """Path below a folder, without ending."""
        return f"{slug(self.group)}/{self.item}"

    def record(self) -> dict[str, Any]:
        """For the row of the video."""
        return {
            "id": self.stem,
            "group": self.group,
            "item": self.item,
            "number": self.number,
            "seed": self.seed,
            "sampler": self.sampler,
            "attention": self.attention.text,
            "prompt": self.prompt,
            "timeline": None if self.timeline is None else self.timeline.record(),
            "blend": self.blend,
        }


def parse_sampler_settings(texts: Sequence[str], samplers: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Keywords of samplers from entries as "fifo:lookahead=false,eta=0.5".

    Raises:
        ValueError: a malformed entry, or a sampler that is not among `samplers`.

    Example: `parse_sampler_settings(["fifo:lookahead=false"], ["fifo"])` is {"fifo": {"lookahead": False}}.
    """
    found: dict[str, dict[str, Any]] = {}
    for text in texts:
        name, colon, rest = text.partition(":")
        if name not in samplers or not colon:
            raise ValueError(
                f"sampler settings {text!r}; write one of {', '.join(samplers)}, as in fifo:lookahead=false"
            )
        for pair in rest.split(","):
            key, sign, value = pair.partition("=")
            if not sign or not value or key in found.get(name, {}):
                raise ValueError(f"{text!r}: write each setting once as key=value, not {pair!r}")
            found.setdefault(name, {})[key] = _value(value)
    return found


def plan_jobs(
    content: Sequence[str] | Sequence[Timeline],
    samplers: Sequence[str],
    attentions: Sequence[AttentionSpec],
    *,
    blends: Sequence[str] | None = None,
    seeds: int = 1,
    seed: int = 0,
) -> list[Job]:
    """All videos, prompt by prompt.

    Args:
        content: captions, or timelines with `blends`.
        samplers: names.
        attentions: settings.
        blends: for timelines.
        seeds: videos per prompt and setting.
        seed: prompt i gets the seeds from seed + i * seeds on.

    Raises:
        ValueError: nothing to make.
    """
    if not content or not samplers or not attentions or seeds < 1:
        raise ValueError(
            f"{len(content)} prompts, {len(samplers)} samplers, {len(attentions)} attention settings and {seeds} "
            "seeds make no video; give at least 1 of each"
        )
    jobs = []
    one: Any
    for number, one in enumerate(content):
        for extra in range(seeds):
            own = seed + number * seeds + extra
            for sampler in samplers:
                for attention in attentions:
                    if isinstance(one, str):
                        jobs.append(Job(number, own, sampler, attention, prompt=one))
                        continue
                    for blend in blends or BLENDS:
                        jobs.append(Job(number, own, sampler, attention, timeline=one, blend=blend))
    return jobs


def read_prompts(path: Path, limit: int | None = None) -> list[str]:
    """Captions of a text file (one a line), of a .jsonl (strings or objects with "prompt"), or of a .json (a list, or
    an object with the list under "prompts").

    Raises:
        ValueError: no such file, no text, or no prompts.
    """
    text = _text(path)
    entries: list[Any]
    if path.suffix == ".json":
        entries = _json(path, text, "prompts")
    elif path.suffix == ".jsonl":
        entries = [_line(path, number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    else:
        entries = [line.strip() for line in text.split("\n") if line.strip()]
    found = []
    for number, entry in enumerate(entries):
        caption = entry.get("prompt") if isinstance(entry, dict) else entry
        if not isinstance(caption, str) or not caption.strip():
            raise ValueError(f"{path}, prompt {number} is {entry!r}; write a caption, or an object with prompt")
        found.append(caption.strip())
    return _limited(found, limit, path, "prompts")


def read_timelines(path: Path, num_frames: int, limit: int | None = None) -> list[Timeline]:
    """Timelines of a comparison.

    Args:
        path: a timeline file (YAML or JSON), a folder of them, or a .json of many under "timelines" or "pairs". An
            entry is a list of (text, first frame, last frame), or a list of texts, which are spread evenly.
        num_frames: length of every video.
        limit: at most so many, the first ones.

    Raises:
        ValueError: no such file, or an entry that is no timeline of that length.
    """
    path = Path(path)
    if path.is_dir():
        files = sorted(one for one in path.iterdir() if one.suffix in (".yaml", ".yml", ".json"))
        return _limited([Timeline.load(one, num_frames) for one in files], limit, path, "timelines")
    text = _text(path)
    document: Any = _parsed(path, text) if path.suffix == ".json" else None
    key = next((one for one in ("timelines", "pairs") if isinstance(document, dict) and one in document), None)
    if key is None:
        return [Timeline.load(path, num_frames)]
    if not isinstance(document[key], list):
        raise ValueError(f"{path}: {key!r} is {str(document[key])[:60]!r}; write a list of timelines")
    found = []
    for number, entry in enumerate(document[key]):
        try:
            if isinstance(entry, list) and entry and all(isinstance(one, str) for one in entry):
                found.append(Timeline.even(entry, num_frames))
            else:
                found.append(Timeline.of(entry, num_frames))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}, {key} {number}: {error}") from error
    return _limited(found, limit, path, key)


def _limited(found: list[Any], limit: int | None, path: Path, what: str) -> list[Any]:
    if not found:
        raise ValueError(f"{path} holds no {what}")
    if limit is not None and limit < 1:
        raise ValueError(f"--limit is {limit}; give at least 1, or leave it out")
    if limit is not None and limit > len(found):
        raise ValueError(f"--limit is {limit} and {path} holds {len(found)} {what}; write at most that")
    return found[:limit]


def _text(path: Path) -> str:
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is no file")
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text ({error}); save it as UTF-8") from error


def _parsed(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error


def _json(path: Path, text: str, key: str) -> list[Any]:
    document = _parsed(path, text)
    entries = document.get(key) if isinstance(document, dict) else document
    if not isinstance(entries, list):
        raise ValueError(f"{path} holds no list; write a list of captions, or an object with them under {key!r}")
    return entries


def _line(path: Path, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path}, line {number} is no JSON: {error}") from error
