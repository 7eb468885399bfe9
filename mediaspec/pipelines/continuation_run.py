"""One video of a `VideoContinuationPipeline` in the making: the rollout, step by step, and its pictures.

C channels, n frames of a step, h x w latent cells.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..memory.arvdm import Finished, Rollout
from ..memory.base import MemoryRead
from .samplers import Step

__all__ = ["ContinuationRun", "CountedDecoder", "MemoryAccount"]


@dataclass
class MemoryAccount:
    """What a video's memory came to; it does not grow with the video.

    Args:
        steps: autoregressive steps; calls: of the network (with guidance, each asks it twice).
        tokens, frames, nbytes: read or held at the last step; most_tokens, most_frames, most_bytes: at any.
    """

    steps: int = 0
    calls: int = 0
    tokens: int = 0
    frames: int = 0
    nbytes: int = 0
    most_tokens: int = 0
    most_frames: int = 0
    most_bytes: int = 0

    def add(self, calls: int, tokens: int, frames: int, nbytes: int) -> None:
        self.steps += 1
        self.calls, self.tokens, self.frames, self.nbytes = calls, tokens, frames, nbytes
        self.most_tokens = max(self.most_tokens, tokens)
        self.most_frames = max(self.most_frames, frames)
        self.most_bytes = max(self.most_bytes, nbytes)


class ContinuationRun(Rollout):
    """A rollout that reports every sub-step, counts what its memory costs, and hands its steps to `Frames`.

    Args:
        carrier: the network.
        num_frames: latent frames of the video in all, those of earlier calls included.
        on_sub_step: called as (number, levels [n], x [1, C, n, h, w]) after every sub-step; returns the x to go on
            with, or raises `video_stream.Interrupted`.
        settings: of `Rollout`.
    """

    def __init__(
        self,
        carrier: Any,
        *args: Any,
        num_frames: int,
        on_sub_step: Callable[[int, Tensor, Tensor], Tensor] | None = None,
        **settings: Any,
    ) -> None:
        self.carrier, self.on_sub_step = carrier, on_sub_step
        self.account = MemoryAccount()
        self._tokens = 0
        self._pieces: list[Finished] = []
        super().__init__(carrier, *args, num_frames=num_frames, callback_on_step_end=self._count, **settings)

    @property
    def done(self) -> bool:
        assert self.num_frames is not None
        return self.emitted >= self.num_frames

    @property
    def total(self) -> int:
        """Autoregressive steps that the whole video takes."""
        assert self.num_frames is not None
        room = self.schedule.w - self.schedule.delta
        return math.ceil((self.num_frames + self.discard + room) / self.schedule.delta)

    def advance(self) -> Step:
        """One autoregressive step.

        Raises:
            Interrupted: from `on_sub_step`; nothing has changed then.
        """
        done = self.step() if self.spare is None else self._hand_on()
        step = Step(self.index - 1, torch.tensor(self.schedule.t_out, dtype=torch.float64))
        if done is None:
            return step
        if not self.reverse:
            step.frames = done.frames[0]
            return step
        self._pieces.append(done)  # a video made from its end is decoded when its beginning is there
        if self.done:
            step.frames = torch.cat([one.frames[0] for one in sorted(self._pieces, key=lambda p: p.frame_ids[0])], 1)
        return step

    def _sub_step(self, m: int, x: Tensor, ids: list[int], read: MemoryRead) -> Tensor:
        moved = super()._sub_step(m, x, ids, read)
        if self.on_sub_step is None:
            return moved
        levels = torch.tensor(self.schedule.level(m + 1)[self.schedule.w - len(ids) :], dtype=torch.float64)
        return self.on_sub_step(self.index * self.schedule.m_ar + m, levels, moved)

    def _read(self, shown: list[int]) -> MemoryRead:
        read = super()._read(shown)
        self._tokens = self.carrier.memory_tokens(read)
        return read

    def _count(self, run: Rollout, step: int, info: dict[str, Any]) -> None:
        held = 0 if self.memory is None else self.memory.frames_held
        self.account.add(self.calls, self._tokens, held, info["memory_bytes"])

    # ---- as `Frames` saves and restores it

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = {"rollout": self.state_dict(), "account": vars(self.account)}
        kept = self.carrier.state_dict()
        if kept:
            state["carrier"] = kept
        if self._pieces:
            state["pieces"] = [(one.frames, one.frame_ids) for one in self._pieces]
        return state

    def load(self, state: dict[str, Any]) -> None:
        self.resume({key: self._placed(value) for key, value in state["rollout"].items()})
        self.account = MemoryAccount(**state["account"])
        self.carrier.load_state_dict({key: self._placed(value) for key, value in state.get("carrier", {}).items()})
        self._pieces = [Finished(self._placed(frames), ids) for frames, ids in state.get("pieces", [])]

    def resume(self, state: dict[str, Tensor]) -> None:
        """Takes a rollout's state, on this device."""
        self.load_state_dict({key: self._placed(value) for key, value in state.items()})

    def _placed(self, value: Tensor) -> Tensor:
        return value.to(self.carrier.device) if value.is_floating_point() else value


class CountedDecoder:
    """A decoder that hands out so many pictures and keeps those beyond, for a call that goes on.

    Args:
        decoder: of a carrier; wanted: pictures of this call.
        network: the codec; what offloading has put away is fetched before it works.
    """

    def __init__(self, decoder: Any, wanted: int, network: Any = None) -> None:
        self.decoder, self.wanted, self.network = decoder, wanted, network
        self.given = 0
        self.left: Tensor | None = None

    def __call__(self, latents: Tensor) -> Iterator[Tensor]:
        """[C, n, h, w] to pictures [m, 3, H, W] in 0..1; n may be 0, for pictures that are still there."""
        before, self.left = self.left, None
        if before is not None:
            yield from self._take(before)
        if not latents.shape[1]:
            return
        self._fetch()
        for some in self.decoder(latents):
            yield from self._take(some)

    def skip(self, latents: Tensor) -> None:
        """Decodes [C, n, h, w] that lie before the video; what the codec remembers of them is kept, no picture is."""
        self._fetch()
        for _ in self.decoder(latents):
            pass

    def _fetch(self) -> None:
        hook = getattr(self.network, "_hf_hook", None)
        if hook is not None and hasattr(hook, "pre_forward"):
            hook.pre_forward(self.network)

    def _take(self, pictures: Tensor) -> Iterator[Tensor]:
        room = self.wanted - self.given
        if len(pictures) > room:
            rest = pictures[room:].clone()
            self.left = rest if self.left is None else torch.cat([self.left.to(rest), rest])
            pictures = pictures[:room]
        self.given += len(pictures)
        if len(pictures):
            yield pictures

    def state(self) -> dict[str, Any]:
        state = {"given": self.given, "inner": self.decoder.state()}
        return state if self.left is None else {**state, "left": self.left}

    def load(self, state: dict[str, Any], given: int | None = None) -> None:
        """Args: given: pictures of this call so far; None are those of the state."""
        self.given = int(state["given"]) if given is None else given
        self.left = state.get("left")
        self.decoder.load(state["inner"])
