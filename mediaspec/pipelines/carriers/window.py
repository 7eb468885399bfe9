"""Carriers of the window kind: the memory's frames stand beside the window in one call, at levels of their own.

    [ references | window ]          the usual order, references at the memory's level (0 is clean)
    [ anchors | window | future ]    for videos that are made from their end

The network sees one clip with one level per frame; what it says of the references is cut off. Nothing is cached, so
that a call costs the references in full.

Rotary positions are those of this clip alone, never those of the video: frame 10,000 stands where a short video would
have it. Gaps between ids are closed, or kept where the network takes any position (`gaps`). Clips that are longer than
the network was trained on are an error or lose references, as `beyond` says.

B videos, C channels, n frames of the window, r references, F = r + n, h x w latent cells, S text tokens.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ...memory.base import FrameGroup, MemoryRead
from ...memory.budget import TrainedLength
from ...memory.packers import token_count
from ...memory.schedule_presets import make_schedule
from ...memory.window_schedule import WindowSchedule, warp
from ..keywords import nearest
from .conditioning import guide
from .prefix import prefix_frames
from .text_carrier import TextCarrier

__all__ = ["Clip", "WindowCarrier", "clip_of", "picked", "shifted"]


@dataclass(frozen=True)
class Clip:
    """A call: references and window in the order of time.

    Args:
        x: [B, C, F, h, w].
        levels: [B, F] float64 in 0..1.
        frame_ids: [B, F] int64.
        start: first frame of the window; count: n.
    """

    x: Tensor
    levels: Tensor
    frame_ids: Tensor
    start: int
    count: int

    @property
    def one_level(self) -> bool:
        """Whether all frames stand at one level, so that the network needs one timestep only."""
        return bool((self.levels == self.levels[:1, :1]).all())

    @property
    def window(self) -> slice:
        """Places of the window's frames."""
        return slice(self.start, self.start + self.count)

    def twice(self) -> Clip:
        """All rows two times, for guidance in one call."""
        x, levels, ids = (torch.cat([one, one]) for one in (self.x, self.levels, self.frame_ids))
        return Clip(x, levels, ids, self.start, self.count)


def clip_of(x: Tensor, levels: Tensor, frame_ids: Tensor, read: MemoryRead) -> Clip:
    """The window with its references: those with lower ids in front, those with higher ids behind.

    Args:
        x: [B, C, n, h, w]; levels: [n]; frame_ids: [n].
        read: of the memory, without frames that the window holds.

    Raises:
        ValueError: frames of another size, a memory of tokens alone, or rows whose references do not stand alike.

    Example:
        >>> past = FrameGroup(torch.zeros(1, 4, 2, 2, 2), torch.tensor([[0, 9]]))
        >>> clip = clip_of(torch.ones(1, 4, 1, 2, 2), torch.ones(1), torch.tensor([5]), MemoryRead((past,)))
        >>> clip.frame_ids.tolist(), clip.start
        ([[0, 5, 9]], 1)
    """
    held, count = prefix_frames(x, levels, frame_ids, read), x.shape[2]
    if not held.count:
        return Clip(held.x, held.levels, held.frame_ids, 0, count)
    earlier = (held.frame_ids[:, : held.count] < frame_ids.min().to(x.device)).sum(1)
    before = int(earlier[0])
    if bool((earlier != before).any()):
        raise ValueError(
            f"the videos of this batch have {earlier.tolist()} references before the window; one call needs the same "
            "number in all, run them one by one"
        )
    if before == held.count:
        return Clip(held.x, held.levels, held.frame_ids, before, count)
    places = torch.arange(held.count + count, device=x.device)
    order = torch.cat([places[:before], places[held.count :], places[before : held.count]])
    return Clip(held.x[:, :, order], held.levels[:, order], held.frame_ids[:, order], before, count)


class WindowCarrier(TextCarrier):
    """What the carriers of this kind share: text, guidance, references, trained length.

    Args:
        pipe_or_model: a diffusers pipeline or its transformer.
        trained_frames: latent frames of a clip that the network was trained on; None is what its family was.
        beyond: what happens to longer clips: "error", "crop" or "reindex", see `TrainedLength`.
        keep: "reindex": oldest references that are never dropped.
        one_call: guidance asks the network once with 2 B rows; False asks twice with B rows, in half the memory.
        history_guidance_scale: 1 is off. w asks once more without references and returns null + w (seen - null)
            (history guidance, arXiv:2502.06764, "vanilla", with the history left out instead of shown as noise). Right
            for networks that were trained with and without history.

    Raises:
        ValueError: unknown settings, with the nearest one.
    """

    trained: ClassVar[int]
    gaps: ClassVar[Literal["close", "keep"]] = "close"
    num_train_timesteps: ClassVar[int] = 1000
    """Timestep of level 1."""

    def __init__(
        self,
        pipe_or_model: Any,
        *,
        trained_frames: int | None = None,
        beyond: Literal["error", "crop", "reindex"] = "error",
        keep: int = 1,
        one_call: bool = True,
        history_guidance_scale: float = 1.0,
        **unknown: Any,
    ) -> None:
        if unknown:
            allowed = {
                known.name
                for base in type(self).__mro__
                for known in inspect.signature(base.__init__).parameters.values()  # type: ignore[misc]
                if known.kind is known.KEYWORD_ONLY
            }
            name = next(iter(unknown))
            raise ValueError(f"the carrier {self.name!r} has no setting {name!r}; {nearest(name, allowed)}")
        super().__init__(pipe_or_model)
        self.guard = TrainedLength(self.trained if trained_frames is None else trained_frames, beyond, keep)
        if not math.isfinite(history_guidance_scale):
            raise ValueError(f"history_guidance_scale={history_guidance_scale}; write a finite number, 1 is off")
        self.one_call, self.history_guidance_scale = one_call, float(history_guidance_scale)

    # ---- a call

    def __call__(
        self, x: Tensor, levels: Tensor, frame_ids: Tensor, read: MemoryRead, actions: Tensor | None
    ) -> Tensor:
        self.check_actions(actions)
        self.check_call(x, levels, frame_ids)
        read = self.fit(_without(read, frame_ids), frame_ids)
        out = self._seen(x, levels, frame_ids, read)
        if self.history_guidance_scale != 1 and not read.is_empty:
            out = guide(out, self._seen(x, levels, frame_ids, MemoryRead()), self.history_guidance_scale)
        return out.to(x.dtype)

    def fit(self, read: MemoryRead, frame_ids: Tensor) -> MemoryRead:
        """What of a read stays within the trained length.

        Raises:
            ValueError: it is too long and beyond="error", or the window alone is.
        """
        targets, most = frame_ids.tolist(), self.guard.frames
        held = sum(group.frames.shape[2] for group in read.groups)
        if self.gaps == "close" and held + len(targets) <= most:
            return read
        if self.gaps == "close" and held and len(targets) <= most and self.guard.beyond == "error":
            raise ValueError(
                f"{held} references and {len(targets)} window frames in one call, {self.name} was trained on {most}; "
                "take a smaller memory or window, or beyond='crop' or 'reindex', or trained_frames= if your weights "
                "know more"
            )
        read = self.guard.fit(read, targets)
        held = sum(group.frames.shape[2] for group in read.groups)
        if held + len(targets) > most:
            raise ValueError(f"{held} references and {len(targets)} window frames; {self.name} was trained on {most}")
        return read

    def _seen(self, x: Tensor, levels: Tensor, frame_ids: Tensor, read: MemoryRead) -> Tensor:
        """The guided prediction of the window's frames, in float32."""
        clip, told = clip_of(x, levels, frame_ids, read), self.conditioning
        embeds, negative = told.embeds, told.negative
        assert embeds is not None  # check_call
        if self.one_call and told.guides and negative is not None and embeds.shape == negative.shape:
            extra = {key: torch.cat([told.negative_extra[key], one]) for key, one in told.extra.items()}
            both = self.predict(clip.twice(), torch.cat([negative, embeds]), extra)
            untold, seen = both[:, :, clip.window].chunk(2)
            return guide(seen, untold, told.guidance_scale)

        def predict(text: Tensor | None, more: dict[str, Any]) -> Tensor:
            assert text is not None
            return self.predict(clip, text, more)[:, :, clip.window]

        return told.guided(predict)

    def predict(self, clip: Clip, embeds: Tensor, extra: dict[str, Any]) -> Tensor:
        """[B, C, F, h, w] float32: one call of the network."""
        raise NotImplementedError

    def cached(self, model: Any, embeds: Tensor | None) -> AbstractContextManager[Any]:
        """The context that diffusers' block caches want around a call."""
        told, make = self.conditioning, getattr(model, "cache_context", None)
        name = "cond" if embeds is told.embeds else "uncond" if embeds is told.negative else "cond_uncond"
        return nullcontext() if make is None else make(name)

    def times(self, clip: Clip) -> Tensor:
        """[B, F] float32 timesteps."""
        return (clip.levels * self.num_train_timesteps).float()

    def positions(self, clip: Clip) -> Tensor:
        """[B, F] place in time of every frame, counted from the first one of the clip."""
        ids = clip.frame_ids
        if self.gaps == "close" or bool((ids.diff(dim=1) <= 0).any()):  # frames that are thrown away share an id
            return torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        return ids - ids[:, :1]

    def memory_tokens(self, read: MemoryRead) -> int:
        """Tokens of the references; this network reads all of them whole."""
        shapes = [group.frames.shape for group in read.groups]
        return sum(token_count(shape[2], shape[3], shape[4], self.patch) for shape in shapes)

    # ---- levels

    def shift(self) -> float:
        """Timestep shift of the pipeline's scheduler, 1 where there is none."""
        config = getattr(getattr(self.pipe, "scheduler", None), "config", {})
        return float(config.get("flow_shift", config.get("shift")) or 1.0)

    def schedule(self, **settings: Any) -> WindowSchedule:
        """The schedule that suits this network, or another one by name.

        Args:
            settings: `name` of `make_schedule` with its numbers, and `shift` of the timesteps (None is that of the
                pipeline's scheduler).

        Raises:
            ValueError: see `make_schedule`.
        """
        shift = settings.pop("shift", None)
        name = settings.pop("name", None)
        own, numbers = self.default_schedule()
        made = make_schedule(name or own, **{**(numbers if name in (None, own) else {}), **settings})
        return shifted(made, self.shift() if shift is None else shift)

    def default_schedule(self) -> tuple[str, dict[str, Any]]:
        """Name and numbers: chunks that fill the trained length together with the frames before them."""
        last = max(min(5, self.guard.frames // 4), 1)
        return "outpainting", {"delta": max(self.guard.frames - last, 1), "last": last, "steps": 50}


def shifted(schedule: WindowSchedule, shift: float) -> WindowSchedule:
    """The schedule with warped timesteps.

    Chunks (w = delta) are warped in their sub-steps, which is exact. Windows of many levels are warped where a step
    starts and ends, and straight in between.

    Example:
        >>> shifted(make_schedule("fifo", frames=2, parts=2, lookahead=False), 5.0).t_in[0]
        0.625
    """
    if shift == 1.0:
        return schedule
    if schedule.w == schedule.delta:
        return schedule.with_(shift=schedule.shift * shift)
    return schedule.with_(t_in=tuple(warp(t, shift) for t in schedule.t_in)).validate()


def _without(read: MemoryRead, frame_ids: Tensor) -> MemoryRead:
    """The read without frames that the window holds itself (FIFO shows its last finished frames in the window)."""
    ids, frames = read.frame_ids, read.frames
    if ids is None or frames is None:
        return read
    inside = ((ids >= frame_ids.min().to(ids.device)) & (ids <= frame_ids.max().to(ids.device))).any(0)
    return picked(read, torch.nonzero(~inside)[:, 0].tolist()) if bool(inside.any()) else read


def picked(read: MemoryRead, places: Sequence[int]) -> MemoryRead:
    """The frames at these places of a read, in the order of time, as one group; a place may come twice."""
    ids, frames = read.frame_ids, read.frames
    if ids is None or frames is None or not len(places):
        return MemoryRead(level=read.level)
    group = FrameGroup(frames[:, :, list(places)], ids[:, list(places)], read.groups[0].kernel)
    return replace(read, groups=(group,), tokens=None)
