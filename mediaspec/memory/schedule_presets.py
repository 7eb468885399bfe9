"""The methods of the literature as settings of one window schedule.

Numbers are those of the public code: window lengths in latent frames, sub-steps, warped levels, and which finished
frames the network sees. `net_frames` counts window frames of a call; context frames come from the references.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable
from typing import Any

from .references import ReferenceRule
from .window_schedule import WindowSchedule, staircase

__all__ = ["available_schedules", "make_schedule", "schedule_settings"]

PACKED = ((16, "k4"), (2, "k2"), (1, "k1"))
_PRESETS: dict[str, Callable[..., WindowSchedule]] = {}


def _preset(make: Callable[..., WindowSchedule]) -> Callable[..., WindowSchedule]:
    _PRESETS[make.__name__.removeprefix("_")] = make
    return make


def available_schedules() -> list[str]:
    """Names that `make_schedule` knows."""
    return sorted(_PRESETS)


def schedule_settings(name: str) -> list[str]:
    """Numbers that the schedule of a method takes.

    Raises:
        ValueError: an unknown name, with the nearest valid one.

    Example:
        >>> schedule_settings("fifo")
        ['frames', 'parts', 'lookahead']
    """
    if name not in _PRESETS:
        near = difflib.get_close_matches(str(name).lower().replace("-", "_"), _PRESETS, 1, cutoff=0.0)
        raise ValueError(
            f"there is no schedule {name!r}; did you mean {near[0]!r}? The schedules are {available_schedules()}"
        )
    return list(inspect.signature(_PRESETS[name]).parameters)


def make_schedule(name: str, **settings: Any) -> WindowSchedule:
    """The schedule of a method, checked.

    Args:
        name: one of `available_schedules()`.
        settings: numbers of that method (a wrong name is an error that lists them).

    Raises:
        ValueError: an unknown name or setting, with the nearest valid one; numbers that break a condition.

    Example:
        >>> fifo = make_schedule("fifo")
        >>> fifo.w, fifo.delta, fifo.net_frames, len(fifo.pieces())
        (64, 1, 16, 8)
        >>> make_schedule("self_forcing").level(2)[0]
        0.8333333333333334
    """
    allowed = schedule_settings(name)
    for key in settings:
        if key not in allowed:
            close = difflib.get_close_matches(key, allowed, 1, cutoff=0.0)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"schedule {name!r} has no setting {key!r}{hint} Its settings are {allowed}")
    return _PRESETS[name](**settings).with_(name=name).validate()


def _chunk(size: int, steps: int, references: ReferenceRule, **more: Any) -> WindowSchedule:
    """All frames of a chunk together, from noise to clean: w = delta."""
    return WindowSchedule(size, size, (1.0,) * size, steps, references=references, **more)


@_preset
def _staircase(stages: int = 2, delta: int = 2, steps: int = 2, last: int = 0) -> WindowSchedule:
    return WindowSchedule(
        stages * delta, delta, tuple(staircase(stages, delta)), steps, references=ReferenceRule.recent(last)
    )


@_preset
def _fifo(frames: int = 16, parts: int = 4, lookahead: bool = True) -> WindowSchedule:
    w = frames * parts
    return WindowSchedule(
        w, 1, tuple(staircase(w, 1)), 1, net_frames=frames, lookahead=frames // 2 if lookahead else 0,
        note="arXiv:2405.11473; a queue of levels, lookahead doubles the calls",
    )  # fmt: skip


@_preset
def _rolling_diffusion(w: int = 16, steps: int = 1, last: int = 0) -> WindowSchedule:
    return WindowSchedule(
        w, 1, tuple(staircase(w, 1)), steps, references=ReferenceRule.recent(last),
        note="arXiv:2402.09470; for networks trained on these levels",
    )  # fmt: skip


@_preset
def _diffusion_forcing_pyramid(
    steps: int = 50, slope: int = 10, context: int = 2, context_level: float = 0.014
) -> WindowSchedule:
    w = math.ceil(steps / slope)
    levels = tuple((steps - slope * (w - 1 - j)) / steps for j in range(w))
    return WindowSchedule(
        w, 1, levels, slope, references=ReferenceRule.recent(context, context_level),
        note="arXiv:2407.01392; context told as level 14 of 1000",
    )  # fmt: skip


@_preset
def _diffusion_forcing_autoregressive(
    steps: int = 50, context: int = 2, context_level: float = 0.014
) -> WindowSchedule:
    return _chunk(1, steps, ReferenceRule.recent(context, context_level), note="arXiv:2407.01392; one frame at a time")


@_preset
def _diffusion_forcing_full(
    frames: int = 16, steps: int = 50, context: int = 2, context_level: float = 0.0
) -> WindowSchedule:
    return _chunk(
        frames,
        steps,
        ReferenceRule.recent(context, context_level),
        note="arXiv:2407.01392, 2502.06764 (history guidance)",
    )


@_preset
def _outpainting(delta: int = 8, last: int = 8, steps: int = 50) -> WindowSchedule:
    return _chunk(
        delta, steps, ReferenceRule.recent(last), note="teacher forcing; each chunk continues the last frames"
    )


@_preset
def _repeated_image_to_video(frames: int = 16, steps: int = 50) -> WindowSchedule:
    return _chunk(frames, steps, ReferenceRule.recent(1), note="each chunk starts from the last frame")


@_preset
def _streaming_t2v(frames: int = 16, last: int = 7, anchor: int = 6, steps: int = 50) -> WindowSchedule:
    rule = ReferenceRule("sink_last", last=last, anchors=(anchor,))
    return _chunk(frames, steps, rule, note="the last 7 frames and the 7th of the first chunk")


@_preset
def _art_v(last: int = 2, steps: int = 50) -> WindowSchedule:
    return _chunk(1, steps, ReferenceRule.sink_last(1, last), note="previous frames and the first one as anchor")


@_preset
def _framepack(frames: int = 9, steps: int = 25) -> WindowSchedule:
    return _chunk(frames, steps, ReferenceRule.packed(PACKED), note="arXiv:2504.12626; first frame, packed 16/2/1")


@_preset
def _framepack_inverted(frames: int = 9, steps: int = 25) -> WindowSchedule:
    rule = ReferenceRule.packed(PACKED, reverse=True)
    return _chunk(frames, steps, rule, note="arXiv:2504.12626; from the end, packed future and first frame")


@_preset
def _helios(frames: int = 9, steps: int = 50) -> WindowSchedule:
    return _chunk(frames, steps, ReferenceRule.packed(PACKED), note="arXiv:2603.04379; history tokens at timestep 0")


@_preset
def _self_forcing(frames: int = 3) -> WindowSchedule:
    return _chunk(
        frames, 4, ReferenceRule.all_kv(), progress=(1.0, 0.75, 0.5, 0.25), shift=5.0,
        note="arXiv:2506.08009; predict and noise again, KV cache of the past",
    )  # fmt: skip


@_preset
def _causvid(frames: int = 3) -> WindowSchedule:
    return _chunk(
        frames,
        3,
        ReferenceRule.all_kv(),
        progress=(1.0, 0.757, 0.522),
        note="arXiv:2412.07772; levels used as they are",
    )


@_preset
def _longlive(frames: int = 3, window: int = 12, sink: int = 3) -> WindowSchedule:
    return _chunk(
        frames, 4, _cached(window, sink, frames), progress=(1.0, 0.75, 0.5, 0.25), shift=5.0,
        note="arXiv:2509.22622; KV window of 12 latent frames, 3 of them sink",
    )  # fmt: skip


@_preset
def _longlive2(frames: int = 8, window: int = 32, sink: int = 8) -> WindowSchedule:
    return _chunk(
        frames, 4, _cached(window, sink, frames), progress=(1.0, 0.75, 0.5, 0.25), shift=5.0,
        note="KV window of 32 latent frames, 8 of them sink",
    )  # fmt: skip


@_preset
def _rolling_forcing(block: int = 3, levels: int = 5, window: int = 21) -> WindowSchedule:
    w = block * levels
    return WindowSchedule(
        w, block, tuple(staircase(levels, block)), 1, references=_cached(window, block, w),
        note="arXiv:2509.25161; first block kept as sink, 21 latent frames in all",
    )  # fmt: skip


@_preset
def _magi1(chunk: int = 6, stages: int = 4, steps: int = 64, clean_chunks: int = 1) -> WindowSchedule:
    if steps % stages:
        raise ValueError(f"steps={steps} is no multiple of stages={stages}")
    return WindowSchedule(
        chunk * stages, chunk, tuple(staircase(stages, chunk)), steps // stages,
        references=ReferenceRule.recent(chunk * clean_chunks),
        note="arXiv:2505.13211; levels in step index, one clean chunk read",
    )  # fmt: skip


@_preset
def _skyreels_streaming(block: int = 5, blocks: int = 5, steps: int = 30) -> WindowSchedule:
    return WindowSchedule(
        block * blocks, block, tuple(staircase(blocks, block)), math.ceil(steps / blocks),
        references=ReferenceRule.recent(block), note="lag of ceil(steps / blocks) steps between blocks",
    )  # fmt: skip


@_preset
def _skyreels_long(base: int = 25, overlap: int = 5, steps: int = 30, context_level: float = 0.02) -> WindowSchedule:
    if not 0 < overlap < base:
        raise ValueError(f"overlap={overlap}, base={base}; need 0 < overlap < base")
    return _chunk(
        base - overlap, steps, ReferenceRule.recent(overlap, context_level), note="overlap shown at level 20 of 1000"
    )


@_preset
def _anyflow_far(frames: int = 3, steps: int = 4, full_chunks: int = 2, old: int = 64) -> WindowSchedule:
    rule = ReferenceRule.packed(((old, "far"), (frames * full_chunks, "k1")), sink=0)
    return _chunk(frames, steps, rule, note="arXiv:2503.19325, 2605.13724; older chunks at patch (1, 4, 4)")


@_preset
def _nova() -> WindowSchedule:
    return _chunk(
        1, 1, ReferenceRule.all_kv(), note="arXiv:2412.14169; the outer loop only, a frame is made set by set"
    )


def _cached(window: int, sink: int, new: int) -> ReferenceRule:
    """A cache of `window` frames that holds the new ones too."""
    if sink < 0 or window < sink + new:
        raise ValueError(f"window={window} has no room for {sink} sink and {new} new frames")
    return ReferenceRule.sink_last(sink, window - sink - new)
