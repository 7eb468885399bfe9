"""Memories by name, and the memory of a reference rule."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from .base import FrameMemory
from .full import FullMemory
from .modulated import ModulatedMemory
from .pack import PackMemory
from .packers import Packer
from .queries import QueryMemory
from .references import ReferenceRule
from .retrieve import RetrieveMemory
from .sink_window import SinkWindowMemory
from .window import WindowMemory

__all__ = ["MEMORIES", "available_memories", "make_memory", "memory_for"]

MEMORIES: dict[str, type[FrameMemory]] = {
    cls.name: cls
    for cls in (
        FullMemory,
        WindowMemory,
        SinkWindowMemory,
        PackMemory,
        QueryMemory,
        ModulatedMemory,
        RetrieveMemory,
    )
}


def available_memories() -> list[str]:
    """Names that `make_memory` knows."""
    return sorted(MEMORIES)


def make_memory(name: str, **settings: Any) -> FrameMemory:
    """A memory from its name and settings.

    Raises:
        ValueError: an unknown name (with the nearest one), or settings that do not fit.

    Example:
        >>> make_memory("sink_window", sink=1, last=4).name
        'sink_window'
    """
    if name not in MEMORIES:
        near = difflib.get_close_matches(str(name).lower().replace("-", "_"), MEMORIES, 1, cutoff=0.0)
        raise ValueError(
            f"there is no memory {name!r}; did you mean {near[0]!r}? The memories are {available_memories()}"
        )
    try:
        return MEMORIES[name](**settings)
    except TypeError as error:
        raise ValueError(f"memory {name!r} cannot be made with {sorted(settings)}: {error}") from error


def memory_for(rule: ReferenceRule, packers: Sequence[Packer] | None = None) -> FrameMemory | None:
    """The memory that keeps what a reference rule shows; None for the rule "none".

    Args:
        rule: of a schedule.
        packers: "packed": one per group; None hands out raw groups.
    """
    if rule.kind == "none":
        return None
    if rule.kind == "last":
        return WindowMemory(rule.last, level=rule.level)
    if rule.kind == "sink_last":
        return SinkWindowMemory(len(rule.anchors), rule.last, anchors=rule.anchors, level=rule.level)
    if rule.kind == "packed":
        return PackMemory(rule.groups, packers, sink=len(rule.anchors), level=rule.level)
    if rule.kind == "retrieve":
        return RetrieveMemory(rule.count, rule.last, score=rule.score, level=rule.level)
    return FullMemory(level=rule.level)
