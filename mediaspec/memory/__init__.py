"""Frames that left the window: how they are kept, and the sampler that makes videos without end from them."""

from __future__ import annotations

from .base import FrameGroup, FrameMemory, MemoryRead, MemoryTokens, load_state, save_state
from .registry import available_memories, make_memory, memory_for
from .schedule_presets import available_schedules, make_schedule
from .window_schedule import WindowSchedule

__all__ = [
    "FrameGroup",
    "FrameMemory",
    "MemoryRead",
    "MemoryTokens",
    "WindowSchedule",
    "available_memories",
    "available_schedules",
    "load_state",
    "make_memory",
    "make_schedule",
    "memory_for",
    "save_state",
]
