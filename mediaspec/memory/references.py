"""Which finished frames the network sees while it makes new ones: a reference rule.

A rule is a choice of frames (and of the memory that keeps them); what the network reads comes from that memory. The
rules of the methods in the literature are combinations of two lists, anchors that stay forever and the most recent
frames, and of three ways to hold more: packed at falling resolution, retrieved by likeness, or all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

__all__ = ["NO_REFERENCES", "ReferenceRule"]

Kind = Literal["none", "last", "sink_last", "packed", "retrieve", "all_kv"]
KINDS = ("none", "last", "sink_last", "packed", "retrieve", "all_kv")


@dataclass(frozen=True)
class ReferenceRule:
    """A choice among the finished frames.

    Args:
        kind: "none", "last" (recent frames), "sink_last" (anchors and recent frames), "packed" (groups at falling
            resolution, newest group last), "retrieve" (recent frames and the most similar older ones), "all_kv".
        last: recent frames at full resolution.
        anchors: ids of frames that stay forever, usually (0,).
        groups: "packed": (frames, kernel name or (kt, kh, kw)) per group, oldest first.
        count: "retrieve": how many older frames.
        score: "retrieve": "cosine" or "pose".
        level: noise level at which the frames are shown; the network is told so. 0 shows them as they are.
        reverse: the video is made from its end, and the references are the future.

    Raises:
        ValueError: an unknown kind, or numbers that do not fit it.

    Example:
        >>> ReferenceRule.sink_last(1, 3).frame_ids(range(10))
        [0, 7, 8, 9]
    """

    kind: Kind = "none"
    last: int = 0
    anchors: tuple[int, ...] = ()
    groups: tuple[tuple[int, str | tuple[int, int, int]], ...] = ()
    count: int = 0
    score: Literal["cosine", "pose"] = "cosine"
    level: float = 0.0
    reverse: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r}; allowed are {', '.join(KINDS)}")
        if self.last < 0 or self.count < 0 or any(a < 0 for a in self.anchors):
            raise ValueError(f"last={self.last}, count={self.count}, anchors={self.anchors}; none may be negative")
        if not 0.0 <= self.level < 1.0:
            raise ValueError(f"level={self.level}; references are shown at a level from 0 to below 1")
        if self.kind == "packed" and not self.groups:
            raise ValueError("packed references need groups, e.g. ((16, 'k4'), (2, 'k2'), (1, 'k1'))")

    @classmethod
    def recent(cls, count: int, level: float = 0.0) -> ReferenceRule:
        """The last `count` frames."""
        return cls("last", last=count, level=level) if count else cls()

    @classmethod
    def sink_last(cls, sink: int, last: int) -> ReferenceRule:
        """The first `sink` frames and the `last` most recent ones."""
        return cls("sink_last", last=last, anchors=tuple(range(sink)))

    @classmethod
    def packed(
        cls, groups: Sequence[tuple[int, str | tuple[int, int, int]]], sink: int = 1, reverse: bool = False
    ) -> ReferenceRule:
        """The first `sink` frames and recent ones at falling resolution."""
        return cls("packed", anchors=tuple(range(sink)), groups=tuple(groups), reverse=reverse)

    @classmethod
    def retrieve(cls, count: int, last: int = 0, score: Literal["cosine", "pose"] = "cosine") -> ReferenceRule:
        """The `last` most recent frames and the `count` most similar older ones."""
        return cls("retrieve", last=last, count=count, score=score)

    @classmethod
    def all_kv(cls) -> ReferenceRule:
        """Every finished frame."""
        return cls("all_kv")

    def reversed_(self) -> ReferenceRule:
        """The same rule for a video that is made from its end."""
        return replace(self, reverse=True)

    def frame_ids(self, finished: Sequence[int]) -> list[int]:
        """Ids that the rule may show, rising; `finished` are ids in the order in which they were finished.

        "retrieve" gives its recent frames only: the rest depends on contents.
        """
        done = list(finished)
        if self.kind == "all_kv":
            chosen = set(done)
        else:
            recent = sum(frames for frames, _ in self.groups) if self.kind == "packed" else self.last
            chosen = set(done[len(done) - min(recent, len(done)) :])
            chosen |= set(self.anchors) & set(done)
        return sorted(chosen)


NO_REFERENCES = ReferenceRule()
