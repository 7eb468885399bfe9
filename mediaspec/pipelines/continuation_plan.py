"""What a continued video comes to before anything runs: its schedule, memory and size, and what they cost.

N pictures, L latent frames, C channels, h x w latent cells.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..memory.base import FrameMemory, MemoryRead
from ..memory.budget import TrainedLength, step_cost
from ..memory.window_schedule import WindowSchedule
from .carriers.base import Carrier
from .continuation_inputs import pick_memory, pick_schedule

__all__ = ["Plan", "check_window", "expected_cost", "make_plan"]


@dataclass(frozen=True)
class Plan:
    """Args: height, width: pixels; shape: (C, h, w)."""

    schedule: WindowSchedule
    memory: FrameMemory | None
    height: int
    width: int
    shape: tuple[int, ...]


def make_plan(
    carrier: Carrier, schedule: Any, memory: Any, steps: int | None, height: int | None, width: int | None
) -> Plan:
    """The plan of a call; arguments as in `VideoContinuationPipeline`.

    Raises:
        ValueError: something that does not fit.
    """
    tall, wide = carrier.default_size
    tall, wide = tall if height is None else height, wide if width is None else width
    shape = carrier.latent_shape(tall, wide)
    line = pick_schedule(carrier, schedule, steps, tall, wide)
    return Plan(line, pick_memory(carrier, memory, line, own=schedule is None), tall, wide, shape)


def check_window(carrier: Carrier, plan: Plan, guard: TrainedLength | None) -> None:
    """Raises ValueError where the full window alone has more frames than the network was trained to see.

    A window that grows from one frame would come to it after some steps only. What a memory adds shows in the run.
    """
    line, own = plan.schedule, getattr(carrier, "guard", None)
    if guard is not None and plan.memory is not None:
        guard.fit(MemoryRead(), range(line.w))
    if own is not None:
        own.fit(MemoryRead(), range(max(end - start for start, _, end in line.pieces())))


def expected_cost(
    carrier: Carrier, plan: Plan, num_frames: int, given_frames: int, guidance_scale: float
) -> dict[str, Any]:
    """See `VideoContinuationPipeline.estimate`."""
    line = plan.schedule
    given = carrier.latent_frames(given_frames) if given_frames else 0
    frames = carrier.latent_frames(num_frames, after=given > 0)
    room = line.w - line.delta
    steps = math.ceil((frames + room) / line.delta)
    read, written = (given + max(made * line.delta - room, 0) for made in (steps - 1, steps))
    tokens = carrier.expected_memory(plan.memory, read, plan.height, plan.width)[0]
    held = carrier.expected_memory(plan.memory, written, plan.height, plan.width)[1]
    per_frame = carrier.frame_tokens(plan.height, plan.width)
    told: dict[str, Any] = {
        "latent_frames": frames, "ar_steps": steps, "model_calls": steps * line.calls_per_step,
        "frame_tokens": per_frame, "memory_tokens": tokens, "memory_bytes": held,
        "tokens_per_call": (line.net_frames or line.w) * per_frame + tokens,
    }  # fmt: skip
    sizes = carrier.dimensions()
    if sizes is not None:
        cost = step_cost(line, per_frame, tokens, **sizes, mode=carrier.cost_mode)
        asked = carrier.calls_of(guidance_scale)
        told["flops_per_step"] = asked * cost["flops"]
        told["flops_per_frame"] = asked * cost["flops_per_frame"]
        told["total_flops"] = asked * cost["flops"] * steps
        told["kv_bytes"] = cost["kv_bytes"]
    return told
