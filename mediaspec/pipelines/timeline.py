"""When which prompt holds: segments of a multi-prompt video, and the blend between them (arXiv:2412.17254).

Prompt i holds frames start..end (both included); the frames between its end and the next start blend linearly from one
to the other. A timeline is written in Python as a list of (text or fields, start, end), or as a YAML or JSON file:

    num_frames: 128
    segments:
      - text: a yellow taxi moves left on a grey road
        frames: [0, 47]
      - fields: {subject: a yellow taxi, action: spins, place: on a sandy beach}
        frames: [80, 127]
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .keywords import nearest
from .prompt_fields import Prompt, PromptFields

__all__ = ["BLENDS", "Segment", "Timeline", "blend_schedule", "is_timeline_file"]

BLENDS = ("promptblend", "linear", "cut")
TRANSITION = 100
"""Frames of a transition in the paper, where both neighbours are long enough for it."""
KEYS = ("segments", "num_frames", "transition", "blend", "align", "fill")
SEGMENT_KEYS = ("text", "fields", "frames", "start", "end")


def blend_schedule(num_frames: int, segments: Sequence[tuple[int, int]]) -> list[tuple[int, float]]:
    """Which two prompts a frame mixes, and how.

    Args:
        num_frames: length of the video.
        segments: (start, end) of every prompt in order, both included.

    Returns:
        Per frame n (i, a): (1 - a) times prompt i plus a times prompt i + 1, with
        a = (n - end_i) / (start_(i+1) - end_i) between the two and 0 elsewhere.

    Example:
        >>> blend_schedule(4, [(0, 0), (2, 3)])
        [(0, 0.0), (0, 0.5), (1, 0.0), (1, 0.0)]
    """
    schedule, i = [], 0
    for n in range(num_frames):
        while i + 1 < len(segments) and n >= segments[i + 1][0]:
            i += 1
        a = 0.0
        if i + 1 < len(segments) and n > segments[i][1]:
            a = (n - segments[i][1]) / (segments[i + 1][0] - segments[i][1])
        schedule.append((i, a))
    return schedule


@dataclass(frozen=True)
class Segment:
    """One prompt and the frames it holds in full.

    Args:
        prompt: text, or fields.
        start, end: first and last frame, both included.

    Raises:
        ValueError: a negative start, or an end before the start. TypeError: frames that are no whole numbers.
    """

    prompt: str | PromptFields
    start: int
    end: int

    def __post_init__(self) -> None:
        for name in ("start", "end"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name}={value!r} of {self._name()} is no frame number; write a whole number")
        if self.start < 0:
            raise ValueError(f"{self._name()} starts at frame {self.start}; frames count from 0")
        if self.end < self.start:
            raise ValueError(
                f"{self._name()} ends at frame {self.end}, before it starts at {self.start}; write the first frame "
                "first"
            )

    def _name(self) -> str:
        return f"the segment {self.text!r}"

    @property
    def text(self) -> str:
        """The prompt as one text."""
        return self.prompt if isinstance(self.prompt, str) else self.prompt.text


@dataclass(frozen=True)
class Timeline:
    """Segments in order, checked.

    Args:
        segments: at least one, ordered, without overlap. Frames before the first and after the last hold its prompt;
            frames between two segments are their transition.
        num_frames: length of the video; None: one more than the last end.

    Raises:
        ValueError: no segments, an overlap, a wrong order, or frames beyond num_frames; the message names the two
            segments and says which number to change.

    Example:
        >>> line = Timeline.of([("a cat sleeps", 0, 3), ("a cat runs", 8, 11)])
        >>> line.num_frames, line.schedule()[6]
        (12, (0, 0.6))
    """

    segments: tuple[Segment, ...]
    num_frames: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "segments", tuple(self.segments))
        if not self.segments:
            raise ValueError("the timeline has no segments; give at least one (text, start, end)")
        for number, (one, two) in enumerate(zip(self.segments, self.segments[1:])):
            if two.start <= one.end:
                order = "overlap" if two.end >= one.start else "are in the wrong order"
                raise ValueError(
                    f"segments {number} ({one.text!r}, frames {one.start}-{one.end}) and {number + 1} ({two.text!r}, "
                    f"frames {two.start}-{two.end}) {order}; start segment {number + 1} at frame {one.end + 1} or "
                    "later, and leave a gap where they shall blend"
                )
        last = self.segments[-1].end
        if self.num_frames is None:
            object.__setattr__(self, "num_frames", last + 1)
        elif not isinstance(self.num_frames, int) or isinstance(self.num_frames, bool) or self.num_frames < 1:
            raise ValueError(f"num_frames={self.num_frames!r}; write a whole number of frames, at least 1")
        elif last >= self.num_frames:
            late = next(s for s in self.segments if s.end >= self.num_frames)
            raise ValueError(
                f"the segment {late.text!r} ends at frame {late.end}, but the video has {self.num_frames} frames "
                f"(0 to {self.num_frames - 1}); end it at {self.num_frames - 1}, or write num_frames={last + 1}"
            )

    @property
    def length(self) -> int:
        """Number of frames of the video."""
        assert self.num_frames is not None  # set in __post_init__
        return self.num_frames

    @property
    def prompts(self) -> list[str | PromptFields]:
        """The prompts in order."""
        return [segment.prompt for segment in self.segments]

    @property
    def texts(self) -> list[str]:
        """The prompts as texts, in order."""
        return [segment.text for segment in self.segments]

    def schedule(self, blend: str = "promptblend") -> list[tuple[int, float]]:
        """Per frame (i, a), see `blend_schedule`; with blend="cut" a transition switches in its middle.

        Raises:
            ValueError: an unknown blend.
        """
        if blend not in BLENDS:
            raise ValueError(f"blend={blend!r} is not known; {nearest(str(blend), BLENDS)}")
        plan = blend_schedule(self.length, [(s.start, s.end) for s in self.segments])
        if blend == "cut":
            plan = [(i + (a > 0.5), 0.0) for i, a in plan]
        return plan

    def with_num_frames(self, num_frames: int) -> Timeline:
        """The same segments in a video of another length."""
        return Timeline(self.segments, num_frames)

    @classmethod
    def of(cls, timeline: Any, num_frames: int | None = None) -> Timeline:
        """A timeline from a timeline, a path, or a list of (text or fields, start, end).

        Args:
            timeline: as said; a single text or fields hold the whole video.
            num_frames: length of the video; None keeps the timeline's own.

        Raises:
            ValueError, TypeError: see `Segment` and `Timeline`.
        """
        if isinstance(timeline, Timeline):
            return timeline if num_frames in (None, timeline.num_frames) else timeline.with_num_frames(num_frames)  # type: ignore[arg-type]
        if is_timeline_file(timeline):
            return cls.load(timeline, num_frames)
        if isinstance(timeline, (str, PromptFields)):
            if num_frames is None:
                raise ValueError("one prompt holds all frames, but how many? write num_frames=...")
            return cls.even([timeline], num_frames)
        if not isinstance(timeline, Sequence):
            raise TypeError(f"timeline is {timeline!r}; give a list of (text or fields, start, end), or a file")
        segments = []
        for number, entry in enumerate(timeline):
            if isinstance(entry, Segment):
                segments.append(entry)
                continue
            if not isinstance(entry, (tuple, list)) or len(entry) != 3:
                raise ValueError(f"segment {number} is {entry!r}; write (text or fields, start_frame, end_frame)")
            segments.append(Segment(_prompt(entry[0]), entry[1], entry[2]))
        return cls(tuple(segments), num_frames)

    @classmethod
    def even(cls, prompts: Sequence[Prompt], num_frames: int, transition: int | None = None) -> Timeline:
        """Prompts spread evenly over a video.

        Args:
            prompts: texts or fields in order.
            num_frames: length of the video.
            transition: frames that blend between two prompts; None: 100 as in the paper, at most 40 % of a prompt's
                share of the video.

        Raises:
            ValueError: too many prompts or too long transitions for the video.
        """
        count = len(prompts)
        for name, value in (("num_frames", num_frames), ("transition", transition)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise TypeError(f"{name}={value!r}; write a whole number of frames")
        if count < 1 or num_frames < count:
            raise ValueError(f"{count} prompts do not fit into {num_frames} frames; each holds at least one frame")
        if transition is None:
            transition = min(TRANSITION, int(0.4 * num_frames / count)) if count > 1 else 0
        held = num_frames - transition * (count - 1)
        if transition < 0 or held < count:
            raise ValueError(
                f"transition={transition} leaves {held} of {num_frames} frames to hold {count} prompts; write at most "
                f"{(num_frames - count) // max(count - 1, 1)}"
            )
        segments, start = [], 0
        for number, prompt in enumerate(prompts):
            share = held * (number + 1) // count - held * number // count
            segments.append(Segment(_prompt(prompt), start, start + share - 1))
            start += share + transition
        return cls(tuple(segments), num_frames)

    @classmethod
    def load(cls, path: str | os.PathLike[str], num_frames: int | None = None) -> Timeline:
        """Reads a YAML or JSON file; see the head of this module, and `read_options` for its further keys.

        Args:
            path: the file. A mapping with "segments", or the list of segments alone. A segment has "text" or "fields",
                and "frames: [first, last]" or "start" and "end"; where no segment has frames they are spread evenly.
            num_frames: overrides the file's own.

        Raises:
            ValueError: no such file, no YAML, an unknown key (the nearest one is named), or frames that do not fit.
        """
        document = _read(path)
        length = document.get("num_frames") if num_frames is None else num_frames
        entries = document["segments"]
        if not isinstance(entries, list) or not entries:
            raise ValueError(f"{path}: 'segments' must list at least one segment, got {entries!r}")
        prompts, ranges = [], []
        for number, entry in enumerate(entries):
            where = f"{path}, segment {number}"
            entry = {"text": entry} if isinstance(entry, str) else entry
            if not isinstance(entry, Mapping):
                raise ValueError(f"{where} is {entry!r}; write text: ... (or fields: ...) and frames: [first, last]")
            for key in entry:
                if key not in SEGMENT_KEYS:
                    raise ValueError(f"{where} has an unknown key {key!r}; {nearest(str(key), SEGMENT_KEYS)}")
            try:
                prompts.append(_prompt_of(entry))
                ranges.append(_range_of(entry))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{where}: {error}") from error
        try:
            if all(pair is None for pair in ranges):
                if length is None:
                    raise ValueError("no segment has frames; write frames: [first, last] for each, or num_frames")
                return cls.even(prompts, length, document.get("transition"))
            missing = [number for number, pair in enumerate(ranges) if pair is None]
            if missing:
                raise ValueError(f"segment {missing[0]} has no frames but others have; write frames: [first, last]")
            if "transition" in document:
                raise ValueError(
                    "transition belongs to segments without frames; leave gaps between the frames instead"
                )
            pairs = [pair for pair in ranges if pair is not None]
            return cls(tuple(Segment(p, a, b) for p, (a, b) in zip(prompts, pairs, strict=True)), length)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: {error}") from error

    @staticmethod
    def read_options(path: str | os.PathLike[str]) -> dict[str, str]:
        """The keys blend, align and fill of a timeline file, those that are there."""
        document = _read(path)
        return {key: document[key] for key in ("blend", "align", "fill") if key in document}

    def record(self) -> dict[str, Any]:
        """JSON-ready form, which `load` reads again."""
        return {
            "num_frames": self.num_frames,
            "segments": [
                {
                    **({"text": s.prompt} if isinstance(s.prompt, str) else {"fields": _as_mapping(s.prompt)}),
                    "frames": [s.start, s.end],
                }
                for s in self.segments
            ],
        }


def is_timeline_file(timeline: Any) -> bool:
    """Whether a timeline is given as the path of a YAML or JSON file."""
    return isinstance(timeline, (str, os.PathLike)) and Path(timeline).suffix in (".yaml", ".yml", ".json")


def _as_mapping(prompt: PromptFields) -> dict[str, str]:
    return {name: value for name, value in zip(("subject", "action", "time", "place", "quality"), prompt) if value}


def _prompt(prompt: Prompt) -> str | PromptFields:
    if isinstance(prompt, str):
        if not prompt.strip():
            raise ValueError("a prompt of the timeline is empty; write a caption, for instance 'a red apple spins'")
        return prompt
    return PromptFields.of(prompt)


def _prompt_of(entry: Mapping[str, Any]) -> str | PromptFields:
    if ("text" in entry) == ("fields" in entry):
        raise ValueError("write either text: or fields:, one of the two")
    prompt = entry.get("text", entry.get("fields"))
    if "text" in entry and not isinstance(prompt, str):
        raise ValueError(f"text is {prompt!r}; write a caption")
    return _prompt(prompt)


def _range_of(entry: Mapping[str, Any]) -> tuple[int, int] | None:
    if "frames" in entry:
        if "start" in entry or "end" in entry:
            raise ValueError("frames and start/end were both given; write one of them")
        pair = entry["frames"]
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise ValueError(f"frames is {pair!r}; write [first, last]")
        return pair[0], pair[1]
    if ("start" in entry) != ("end" in entry):
        raise ValueError("start and end belong together; write both, or frames: [first, last]")
    return (entry["start"], entry["end"]) if "start" in entry else None


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    import yaml

    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"timeline {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"timeline {path} is no UTF-8 text ({error}); save it as UTF-8") from error
    try:
        document = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"timeline {path} is no {'JSON' if file.suffix == '.json' else 'YAML'}: {error}") from error
    if isinstance(document, list):
        document = {"segments": document}
    if not isinstance(document, dict) or "segments" not in document:
        raise ValueError(
            f"timeline {path} must hold 'segments: [...]' or a list of segments, got {str(document)[:80]}"
        )
    for key in document:
        if key not in KEYS:
            raise ValueError(f"timeline {path} has an unknown key {key!r}; {nearest(str(key), KEYS)}")
    return document
