"""Autoregressive video diffusion, one algorithm for all methods (Meta-ARVDM, arXiv:2503.10704).

A window of w frames stands at rising noise levels. A step

    appends `delta` frames of pure noise, reads the memory, moves every slot from t_in to t_out in `m_ar` sub-steps,
    hands the first `delta` frames out, writes them to the memory, and slides on.

FIFO, rolling diffusion, diffusion forcing, outpainting and the causal few-step models are settings of it
(`schedule_presets`). The network is any callable; how it looks at the memory is its own affair.

B rows, C channels, w slots of the window, n slots in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from .base import FrameMemory, MemoryRead, below, gather_frames, prefixed
from .budget import TrainedLength
from .frame_noise import FRESH, INIT, STEP, NoiseSource
from .registry import memory_for
from .slot_steps import SlotSampler
from .window_schedule import WindowSchedule

__all__ = ["Denoiser", "Finished", "Prediction", "Rollout", "generate"]

REFERENCE = 3
"""Purpose of the noise on references that are shown at a level above 0."""


@dataclass(frozen=True)
class Prediction:
    """A network output with the mean squared error that it expects of its clean frames, for "tracked" steps.

    Args:
        output: [B, C, n, ...]; variance: [n], or anything that spreads to `output`.
    """

    output: Tensor
    variance: Tensor | None = None


@dataclass(frozen=True)
class Finished:
    """Frames that are done: [B, C, n, ...] and their ids, rising."""

    frames: Tensor
    frame_ids: list[int]


class Denoiser(Protocol):
    """What `generate` asks of a network."""

    def __call__(
        self, x: Tensor, levels: Tensor, frame_ids: Tensor, read: MemoryRead, actions: Tensor | None
    ) -> Tensor | Prediction:
        """The prediction that the sampler was made for.

        Args:
            x: [B, C, n, ...] frames of the window.
            levels: [n] float64 noise level of each in [0, 1].
            frame_ids: [n] int64.
            read: what the memory shows; `read.is_empty` at the beginning, or without a memory.
            actions: [B, n, A] of these frames, or None.
        """
        ...


Callback = Callable[["Rollout", int, dict[str, Any]], None]


def generate(
    net: Denoiser, schedule: WindowSchedule, sampler: SlotSampler, noise: NoiseSource, **settings: Any
) -> Rollout:
    """Makes a video, frame by frame, for as long as it is asked.

    Args:
        net: the network.
        schedule: levels of the window, checked here.
        sampler: steps between levels.
        noise: where random numbers come from, addressed by frame and step (`FrameNoise`).
        settings: of `Rollout`.

    Returns:
        An iterator over `Finished` frames, whose `state_dict` holds all that is needed to go on later.

    Example:
        >>> from mediaspec.memory.frame_noise import FrameNoise
        >>> from mediaspec.memory.schedule_presets import make_schedule
        >>> from mediaspec.memory.slot_steps import FlowPath
        >>> net = lambda x, levels, frame_ids, read, actions: x  # velocity towards 0
        >>> noise = FrameNoise(torch.tensor([1]), (4, 8, 8))
        >>> schedule = make_schedule("outpainting", delta=2, last=2, steps=3)
        >>> video = generate(net, schedule, SlotSampler(FlowPath()), noise, num_frames=5)
        >>> [done.frame_ids for done in video]
        [[0, 1], [2, 3], [4]]
    """
    return Rollout(net, schedule, sampler, noise, **settings)


class Rollout(Iterator[Finished]):
    """A video in the making.

    Args:
        net, schedule, sampler, noise: see `generate`.
        num_frames: frames to hand out; None never ends.
        memory: any `FrameMemory`; "rule" makes the one of `schedule.references`, None is no memory.
        init: [B, C, w - delta, ...] clean frames that fill the window first (they are noised to their levels and
            come out as the first frames). Without them the window grows from its last slots.
        history: [B, C, h, ...] clean frames before the video: written to the memory, not handed out; ids go on after.
        discard: frames at the beginning that are made but not handed out (FIFO starts from copies of one frame).
        actions: [B, N, A] one per frame id (the last one repeats), or None.
        poses: [B, N, P] likewise, for memories that choose by pose.
        guard: what happens when history and window exceed the trained length, see `TrainedLength`.
        callback_on_step_end: called as (rollout, step, info) after every autoregressive step; info has frame_ids,
            memory_frames, memory_tokens, memory_bytes and calls.

    Raises:
        ValueError: the schedule breaks a condition, or a setting does not fit it.
    """

    def __init__(
        self,
        net: Denoiser,
        schedule: WindowSchedule,
        sampler: SlotSampler,
        noise: NoiseSource,
        *,
        num_frames: int | None = None,
        memory: FrameMemory | str | None = "rule",
        init: Tensor | None = None,
        history: Tensor | None = None,
        discard: int = 0,
        actions: Tensor | None = None,
        poses: Tensor | None = None,
        guard: TrainedLength | None = None,
        callback_on_step_end: Callback | None = None,
    ) -> None:
        self.net, self.schedule, self.sampler, self.noise = net, schedule.validate(), sampler, noise
        if isinstance(memory, str):
            if memory != "rule":
                raise ValueError(f"memory={memory!r}; give a FrameMemory, None, or 'rule' for the schedule's own")
            memory = memory_for(schedule.references)
        self.memory = memory
        self.num_frames, self.discard = num_frames, discard
        self.actions, self.poses, self.guard, self.callback = actions, poses, guard, callback_on_step_end
        self.reverse = schedule.references.reverse
        self._check(init)
        self.first = 0 if history is None else history.shape[2]
        self.index = 0
        """Autoregressive steps done."""
        self.emitted = 0
        """Frames handed out."""
        self.calls = 0
        """Network calls made."""
        self.ramp = 0 if init is not None else schedule.w - schedule.delta
        self.front: Tensor | None = None
        self.spare: Tensor | None = None
        """Frames made beyond `num_frames`, for a run that goes on with more."""
        self.window = self._start(init)
        if history is not None:
            if self.memory is None:
                raise ValueError("history needs a memory that shows it to the network; pass memory=, or no history")
            ids = list(range(self.first))
            self.memory.write(history, ids, self._of_frames(poses, ids))

    def _check(self, init: Tensor | None) -> None:
        schedule = self.schedule
        if self.num_frames is not None and self.num_frames < 1:
            raise ValueError(f"num_frames={self.num_frames}; at least 1 is needed, None never ends")
        if self.discard < 0:
            raise ValueError(f"discard={self.discard}; it cannot be negative")
        room = schedule.w - schedule.delta
        if init is not None and (init.dim() < 3 or init.shape[2] != room):
            raise ValueError(
                f"init has shape {tuple(init.shape)}; give [B, C, {room}, ...] (w - delta = {room} clean frames)"
            )
        if init is not None and not bool(torch.isfinite(init).all()):
            raise ValueError("init holds NaN or infinite values")
        if self.reverse and (schedule.w != schedule.delta or self.num_frames is None or self.discard):
            raise ValueError("a video made from its end needs w = delta, num_frames, and no discard")

    def _start(self, init: Tensor | None) -> Tensor | None:
        if init is None:
            return None
        schedule, ids = self.schedule, [self.first + i for i in range(init.shape[2])]
        if not ids:
            return None
        levels = torch.tensor(schedule.t_in[: len(ids)], dtype=torch.float64)
        if schedule.lookahead:
            copies = [self.noise([self.first], INIT, 1 + i).to(init) for i in range(schedule.lookahead)]
            clean = init[:, :, :1].expand(-1, -1, schedule.lookahead, *init.shape[3:])
            self.front = self.sampler.add_noise(clean, levels[:1].expand(schedule.lookahead), torch.cat(copies, 2))
        return self.sampler.add_noise(init, levels, self.noise(ids, INIT).to(init))

    # ---- the algorithm

    def __iter__(self) -> Rollout:
        return self

    def __next__(self) -> Finished:
        while self.num_frames is None or self.emitted < self.num_frames:
            done = self.step() if self.spare is None else self._hand_on()
            if done is not None:
                return done
        raise StopIteration

    def slot_ids(self) -> list[int]:
        """Id of the frame in every slot of the coming step; ids below `first` are slots without a frame."""
        w, delta = self.schedule.w, self.schedule.delta
        if self.reverse:
            assert self.num_frames is not None
            low = self.first + self.num_frames - (self.index + 1) * delta
        else:
            low = self.first - self.ramp + self.index * delta
        return list(range(low, low + w))

    @torch.no_grad()
    def step(self) -> Finished | None:
        """One autoregressive step; the frames it finished, or None while the window is still growing."""
        schedule, ids = self.schedule, self.slot_ids()
        empty = sum(i < self.first for i in ids)
        fresh = self.noise(ids[max(empty, schedule.w - schedule.delta) :], FRESH)
        x = fresh if self.window is None else torch.cat([self.window, fresh.to(self.window)], 2)
        shown = self._public(ids[empty:])
        read = self._read(shown)
        for m in range(schedule.m_ar):
            x = self._sub_step(m, x, ids[empty:], read)
        count = max(schedule.delta - empty, 0)
        out, self.window = x[:, :, :count].clone(), x[:, :, count:].clone() if x.shape[2] > count else None
        if schedule.lookahead and count:
            front = out if self.front is None else torch.cat([self.front.to(out), out], 2)
            self.front = front[:, :, -schedule.lookahead :]
        self.index += 1
        done = self._hand_out(out, ids[empty : empty + count])
        if self.callback is not None:
            self.callback(self, self.index - 1, self._info(read, shown))
        return done

    def _sub_step(self, m: int, x: Tensor, ids: list[int], read: MemoryRead) -> Tensor:
        """Moves all frames in work one sub-step on, call by call."""
        schedule = self.schedule
        skipped = schedule.w - len(ids)
        now = torch.tensor(schedule.level(m)[skipped:], dtype=torch.float64)
        then = torch.tensor(schedule.level(m + 1)[skipped:], dtype=torch.float64)
        noise = self.noise(ids, STEP, self.index * schedule.m_ar + m).to(x) if self.sampler.draws else None
        for start, kept, end in schedule.pieces():
            if end <= skipped:
                continue
            low, kept, end = max(start - skipped, 0), max(kept - skipped, 0), end - skipped
            ahead = self.front[:, :, start:] if start < 0 and not skipped and self.front is not None else None
            clip, levels, shown = x[:, :, low:end], now[low:end], self._public(ids[low:end])
            if ahead is not None:
                clip = torch.cat([ahead.to(x), clip], 2)
                levels = torch.cat([now[:1].expand(ahead.shape[2]), levels])
                shown = [max(shown[0] - i, self.first) for i in range(ahead.shape[2], 0, -1)] + shown
            frame_ids = torch.tensor(shown, device=clip.device)
            made = self.net(clip, levels.to(clip.device), frame_ids, read, self._of_frames(self.actions, shown))
            self.calls += 1
            output, variance = (made.output, made.variance) if isinstance(made, Prediction) else (made, None)
            if output.shape != clip.shape:
                raise ValueError(f"the network returned shape {tuple(output.shape)} for frames {tuple(clip.shape)}")
            size = end - kept
            if variance is not None and variance.dim() == 1:
                variance = variance[len(variance) - size :]
            elif variance is not None and variance.dim() > 2:
                variance = variance[:, :, variance.shape[2] - size :]
            elif variance is None and self.sampler.kind == "tracked" and self.sampler.track is not None:
                variance = self.sampler.track.read(m)[skipped:][kept:end]
            moved = self.sampler.step(
                output[:, :, output.shape[2] - size :],
                x[:, :, kept:end],
                now[kept:end],
                then[kept:end],
                None if noise is None else noise[:, :, kept:end],
                variance,
            )
            x = torch.cat([x[:, :, :kept], moved, x[:, :, end:]], 2)
        return x

    def _read(self, shown: list[int]) -> MemoryRead:
        if self.memory is None:
            return MemoryRead()
        middle = [shown[len(shown) // 2]]
        pose = self._of_frames(self.poses, middle)
        read = self.memory.read(shown, pose=None if pose is None else pose[:, 0])
        if self.guard is not None:
            read = self.guard.fit(read, shown)
        return self._noised(read) if read.level > 0 and not read.is_empty else read

    def _noised(self, read: MemoryRead) -> MemoryRead:
        """The same references at their level; the noise of a frame is new in every step."""
        if read.tokens is not None:
            raise ValueError(
                f"references at level {read.level} must be noised before they are packed; use a memory without "
                "packers, or level=0"
            )
        groups = []
        for group in read.groups:
            wanted = sorted(set(group.frame_ids.flatten().tolist()))
            place = torch.searchsorted(torch.tensor(wanted), group.frame_ids.cpu().contiguous())
            drawn = gather_frames(self.noise(wanted, REFERENCE, self.index).to(group.frames), place)
            levels = torch.full((group.frames.shape[2],), read.level, dtype=torch.float64)
            groups.append(replace(group, frames=self.sampler.add_noise(group.frames, levels, drawn)))
        return replace(read, groups=tuple(groups))

    def _hand_out(self, out: Tensor, ids: list[int]) -> Finished | None:
        """Writes finished frames to the memory and returns those that belong to the video."""
        dropped = sum(i < self.first + self.discard for i in ids)
        out, ids = out[:, :, dropped:], self._public(ids[dropped:])
        if not ids:
            return None
        if not bool(torch.isfinite(out).all()):
            raise ValueError(f"frames {ids[0]} to {ids[-1]} came out with NaN or infinite values of the network")
        if self.memory is not None:
            order = list(range(len(ids)))[::-1] if self.reverse else list(range(len(ids)))
            written = [ids[i] for i in order]
            frames = out.flip(2) if self.reverse else out  # the frames next to the coming window are written last
            self.memory.write(frames, written, self._of_frames(self.poses, written))
        if self.num_frames is not None and not self.reverse:
            left = self.num_frames - self.emitted
            self.spare = out[:, :, left:].clone() if left < len(ids) else None
            out, ids = out[:, :, :left], ids[:left]
        self.emitted += len(ids)
        return Finished(out, ids)

    def _hand_on(self) -> Finished:
        """Frames that an earlier, shorter run made and did not hand out; the memory has them already."""
        assert self.spare is not None
        count = self.spare.shape[2] if self.num_frames is None else self.num_frames - self.emitted
        out, rest = self.spare[:, :, :count], self.spare[:, :, count:]
        self.spare = rest if rest.shape[2] else None
        start = self.first + self.emitted
        self.emitted += out.shape[2]
        return Finished(out, list(range(start, self.first + self.emitted)))

    def _public(self, ids: Sequence[int]) -> list[int]:
        """Ids in the video: frames that are thrown away count as its first one."""
        return [max(i - self.discard, self.first) for i in ids] if self.discard else list(ids)

    @staticmethod
    def _of_frames(table: Tensor | None, ids: Sequence[int]) -> Tensor | None:
        """Rows of [B, N, ...] for frames; the last one goes on behind the end."""
        return None if table is None else table[:, [min(i, table.shape[1] - 1) for i in ids]]

    def _info(self, read: MemoryRead, shown: list[int]) -> dict[str, Any]:
        return {
            "frame_ids": shown,
            "memory_frames": sum(group.frames.shape[2] for group in read.groups),
            "memory_tokens": 0 if read.tokens is None else len(read.tokens),
            "memory_bytes": 0 if self.memory is None else self.memory.nbytes,
            "calls": self.calls,
        }

    # ---- stopping and going on

    def state_dict(self) -> dict[str, Tensor]:
        """All that a later process needs beside the same arguments, as a flat dict of tensors (`save_state`)."""
        state = {name: torch.tensor(getattr(self, name)) for name in ("index", "emitted", "calls", "first", "ramp")}
        for name in ("window", "front", "spare"):
            value = getattr(self, name)
            if value is not None:
                state[name] = value.clone()
        if self.memory is not None:
            state |= prefixed("memory", self.memory.state_dict())
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Goes on where `state_dict` was taken, also with a larger `num_frames`; the frames that follow are bit-equal.

        Raises:
            ValueError: it is no such state, or was saved with a memory and there is none now (or the other way round).
        """
        names = ("index", "emitted", "calls", "first", "ramp")
        missing = [name for name in names if name not in state]
        if missing:
            raise ValueError(
                f"this is no state of a rollout: {', '.join(missing)} missing; save one with state_dict()"
            )
        held = below("memory", state)
        if bool(held) != (self.memory is not None):
            raise ValueError(
                f"the state was saved {'with' if held else 'without'} a memory; make the rollout likewise"
            )
        for name in names:
            setattr(self, name, int(state[name]))
        self.window = state["window"].clone() if "window" in state else None
        self.front = state["front"].clone() if "front" in state else None
        self.spare = state["spare"].clone() if "spare" in state else None
        if self.memory is not None:
            self.memory.load_state_dict(held)
