"""What a user writes for schedule, memory, actions and lengths becomes what a rollout takes."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..memory.base import FrameMemory
from ..memory.budget import TrainedLength
from ..memory.references import ReferenceRule
from ..memory.registry import memory_for
from ..memory.schedule_presets import available_schedules, make_schedule, schedule_settings
from ..memory.slot_steps import SlotSampler
from ..memory.window_schedule import WindowSchedule
from .carriers.base import Carrier
from .keywords import nearest

__all__ = [
    "check_count", "describe_carrier", "describe_memory", "describe_schedule", "digest", "fingerprint", "frame_table",
    "make_guard", "pick_memory", "pick_sampler", "pick_schedule", "texts_of",
]  # fmt: skip

AUTO = "auto"


def pick_schedule(carrier: Carrier, schedule: Any, steps: int | None, height: int, width: int) -> WindowSchedule:
    """The schedule of a call, checked.

    Args:
        carrier: whose own one None stands for.
        schedule: a `WindowSchedule`, the name of a preset, a dict(name=..., ...), a dict of numbers of the carrier's
            own schedule, or None.
        steps: `num_inference_steps`, or None for what the schedule says.
        height, width: pixels.

    Raises:
        ValueError: an unknown name or setting, or steps for a schedule that fixes them.
    """
    if isinstance(schedule, WindowSchedule):
        if steps is None or steps == schedule.m_ar:
            return schedule.validate()
        if schedule.w != schedule.delta:
            raise ValueError(
                f"num_inference_steps={steps} with a schedule whose window moves through levels; its steps are w, "
                "delta and m_ar, write num_inference_steps=None"
            )
        return schedule.with_(m_ar=steps, progress=None).validate()
    settings: dict[str, Any]
    if schedule is None:
        name, settings = None, {}
    elif isinstance(schedule, str):
        name, settings = schedule, {}
    elif isinstance(schedule, Mapping):
        settings = dict(schedule)
        name = settings.pop("name", None)
    else:
        raise ValueError(
            f"schedule={schedule!r}; give a WindowSchedule, one of {available_schedules()}, or dict(name=..., ...)"
        )
    if steps is not None:
        if "steps" in settings and settings["steps"] != steps:
            raise ValueError(f"num_inference_steps={steps} and steps={settings['steps']} in the schedule; give one")
        if name is not None and "steps" not in schedule_settings(name):
            raise ValueError(
                f"num_inference_steps={steps}, and the steps of schedule {name!r} follow from its settings "
                f"({', '.join(schedule_settings(name))}); leave num_inference_steps out"
            )
        settings["steps"] = steps
    if name is None or hasattr(carrier, "default_schedule"):
        if name is not None:
            settings["name"] = name
        try:
            return carrier.schedule_for(height, width, **settings).validate()
        except TypeError as error:
            allowed = list(inspect.signature(carrier.schedule).parameters)
            raise ValueError(f"the schedule of {carrier.name!r} takes {', '.join(allowed)} ({error})") from error
    return make_schedule(name, **settings)


def pick_memory(carrier: Carrier, memory: Any, schedule: WindowSchedule, own: bool) -> FrameMemory | None:
    """The memory of a call, empty.

    Args:
        carrier: whose own one "auto" stands for.
        memory: a `FrameMemory`, a name, a dict(name=..., ...), None, or "auto".
        schedule: whose references "auto" follows if it is not the carrier's own.
        own: whether it is.

    Raises:
        ValueError: an unknown name or setting, or a memory that holds frames.
    """
    if memory is None:
        return None
    if isinstance(memory, FrameMemory):
        if memory.written:
            raise ValueError(
                f"the memory {memory.name!r} holds {memory.written} frames; call reset(), or go on with history="
            )
        return memory
    if memory == AUTO:
        return carrier.memory() if own or carrier.owns_memory else memory_for(schedule.references)
    if isinstance(memory, ReferenceRule):
        return memory_for(memory)
    if isinstance(memory, str):
        return carrier.memory(memory)
    if isinstance(memory, Mapping):
        settings = dict(memory)
        return carrier.memory(settings.pop("name", None), **settings)
    raise ValueError(
        f"memory={memory!r}; give a FrameMemory, a name, dict(name=..., ...), None for no memory, or 'auto'"
    )


def pick_sampler(carrier: Carrier, sampler: Any) -> SlotSampler:
    """Steps between levels: a `SlotSampler`, a kind, a dict(kind=..., ...), or None for the carrier's own."""
    if isinstance(sampler, SlotSampler):
        return sampler
    if sampler is None:
        return carrier.sampler()
    if isinstance(sampler, Mapping):
        return carrier.sampler(**sampler)
    return carrier.sampler(sampler)


def make_guard(trained_length: Any) -> TrainedLength | None:
    """What happens beyond the trained length: a number of latent frames, a dict of `TrainedLength`, or None."""
    if trained_length is None or isinstance(trained_length, TrainedLength):
        return trained_length
    if isinstance(trained_length, Mapping):
        allowed = [one.name for one in dataclasses.fields(TrainedLength)]
        for name in trained_length:
            if name not in allowed:
                raise ValueError(f"trained_length has no setting {name!r}; {nearest(name, allowed)}")
        return TrainedLength(**trained_length)
    return TrainedLength(int(trained_length))


def check_count(name: str, value: Any) -> None:
    """Raises ValueError unless it is a whole number above 0."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r}; write a whole number from 1 on")


def texts_of(prompt: Any, embeds: Tensor | None, count: int, chained: int | None) -> list[str | None]:
    """One text per video, None where there is none.

    Args:
        prompt: text, texts or None; embeds: [B, S, D] instead; count: videos of each.
        chained: videos that go on, or None.

    Raises:
        ValueError: something else, or another number of texts than videos.
    """
    if isinstance(prompt, str) or prompt is None:
        prompt = [prompt] * (1 if embeds is None or prompt is not None else len(embeds))
    if not prompt or not all(one is None or isinstance(one, str) for one in prompt):
        raise ValueError(f"prompt={prompt!r}; write a text or a list of texts, one per video")
    texts = [one for one in prompt for _ in range(count)]
    if chained is None:
        return texts
    texts = texts * chained if len(texts) == 1 else texts
    if len(texts) != chained:
        raise ValueError(f"{len(texts)} prompts for {chained} histories; give one, or one per history")
    return texts


def frame_table(
    values: Any, name: str, needed: int, before: Tensor | None = None, start: int = 0, given: int = 0
) -> Tensor | None:
    """A table [1, N, ...] by frame id of values per frame.

    Args:
        values: list, array or tensor [n] or [n, X], the first one of frame `start`; None is no table.
        name: of the argument, for errors.
        needed: frames it must reach to, N >= needed.
        before: table of an earlier call, whose rows below `start` go on.
        start: id of the first value.
        given: how many of the frames are those of `video`, for the error.

    Raises:
        ValueError: too few values, or another shape.
    """
    if values is None:
        if before is not None:
            raise ValueError(f"the video that goes on was made with {name}; give those of the new frames")
        return None
    table = torch.as_tensor(np.asarray(values) if isinstance(values, (list, tuple)) else values).detach().cpu()
    if table.dim() == 1:
        table = table[:, None]
    if table.dim() != 2:
        raise ValueError(f"{name} has shape {tuple(table.shape)}; give one row per frame, [n] or [n, numbers]")
    if len(table) < needed - start:
        told = f" (the {given} given ones first)" if given and not start else ""
        raise ValueError(
            f"{name} has {len(table)} rows for {needed - start} frames{told}; give one per frame. More are allowed, "
            "and used by chunks that reach beyond the end"
        )
    table = table[None]
    if start:
        if before is None:
            raise ValueError(f"the video that goes on was made without {name}; leave them out")
        if before.shape[2] != table.shape[2]:
            raise ValueError(f"{name} has {table.shape[2]} numbers per frame, before it were {before.shape[2]}")
        table = torch.cat([before[:, :start].cpu().to(table.dtype), table], 1)
    return table


# ---- what a run that goes on must share, JSON-ready


def describe_schedule(schedule: WindowSchedule) -> dict[str, Any]:
    """All numbers of a schedule, without its note."""
    told = dataclasses.asdict(schedule)
    told.pop("note")
    return _plain(told)  # type: ignore[no-any-return]


def describe_carrier(carrier: Carrier) -> dict[str, Any]:
    """Settings of a carrier: its public numbers and texts."""
    told = {key: value for key, value in vars(carrier).items() if not key.startswith("_")}
    told |= {"guard": vars(told["guard"])} if "guard" in told else {}
    own = ("actions", "poses", "pipe")
    return {key: _plain(value) for key, value in told.items() if key not in own and _is_plain(value)}


def describe_memory(memory: FrameMemory | None) -> dict[str, Any] | None:
    """Name and settings of a memory."""
    if memory is None:
        return None
    told: dict[str, Any] = {"name": memory.name}
    for key, value in vars(memory).items():
        if key.startswith("_") or key == "written":
            continue
        value = sorted(value) if isinstance(value, (set, frozenset)) else value
        parts = list(value) if isinstance(value, (list, tuple, torch.nn.ModuleList)) else [value]
        if _is_plain(value):
            told[key] = _plain(value)
        elif any(isinstance(part, (Tensor, torch.nn.Module)) for part in parts):
            told[key] = [_weights(part) for part in parts]
    return told


def _weights(value: Any) -> Any:
    """Short hash of a tensor or of a network's weights; numbers as they are."""
    if isinstance(value, torch.nn.Module):
        return digest(*value.state_dict().values())
    return digest(value) if isinstance(value, Tensor) else value if _is_plain(value) else None


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple, dict)):
        return all(_is_plain(one) for one in (value.values() if isinstance(value, dict) else value))
    return value is None or isinstance(value, (bool, int, float, str))


def _plain(value: Any) -> Any:
    """Tuples as lists, as JSON has them."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value


def digest(*values: Tensor | None) -> str | None:
    """Short hash of tensors; None when there is none."""
    if all(value is None for value in values):
        return None
    found = hashlib.sha256()
    for value in values:
        if value is not None:
            flat = value.detach().cpu().contiguous()
            found.update(
                f"{tuple(flat.shape)}{flat.dtype}".encode() + flat.flatten().view(torch.uint8).numpy().tobytes()
            )
    return found.hexdigest()[:16]


def fingerprint(carrier: Carrier) -> str:
    """Short hash of the networks' dtypes, shapes and first weights, in some milliseconds."""
    parts = getattr(carrier.pipe, "components", None) or {"transformer": carrier.model}
    found = hashlib.sha256(f"{carrier.name}{type(carrier.model).__name__}".encode())
    for part, network in sorted(parts.items()):
        if isinstance(network, torch.nn.Module):
            for name, weight in network.state_dict().items():
                found.update(f"{part}.{name}{tuple(weight.shape)}{weight.dtype}".encode())
                if weight.device.type != "meta":
                    found.update(str(weight.detach().flatten()[:4].float().tolist()).encode())
    return found.hexdigest()[:16]
