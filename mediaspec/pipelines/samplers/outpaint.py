"""Clip after clip, each continuing the last frames of the one before.

The first clip has `window` frames. Every further one repeats the last `overlap` frames of the video and adds
`window - overlap` new ones: at each noise level the repeated frames are put back, noised to that level (the
replacement of RePaint, arXiv:2201.09865), or, for models trained with a level per frame, given clean at the lowest
level. Memory does not depend on N.
N frames, U = window, T noise levels.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .base import Sampler, Step

__all__ = ["Outpaint"]


class Outpaint(Sampler):
    """Continues a video clip by clip.

    Args:
        overlap: frames of a clip that are taken from the one before.
        conditioning: "replace" puts the known frames back at each level; "clean" hands them to the model clean, with
            the timestep of the lowest level, which suits models that were trained with a timestep per frame.
        repeats: with "replace", how often each level is gone through (noised back up in between); more lets new
            frames settle to the known ones and costs as many model calls.

    Raises:
        ValueError: an overlap that leaves no new frame, or an unknown conditioning.

    Example:
        >>> pipe("a red ball", num_frames=512, sampler="outpaint", output_path="ball.mp4")  # doctest: +SKIP
    """

    name = "outpaint"

    def __init__(
        self,
        *args: Any,
        overlap: int | None = None,
        conditioning: str = "replace",
        repeats: int = 1,
        **settings: Any,
    ) -> None:
        super().__init__(*args, **settings)
        self.overlap = self.window // 2 if overlap is None else overlap
        if not 1 <= self.overlap < self.window:
            raise ValueError(
                f"overlap={self.overlap}; allowed is 1 to {self.window - 1} for a window of {self.window}"
            )
        if conditioning not in ("replace", "clean"):
            raise ValueError(f"conditioning={conditioning!r}; allowed are 'replace' and 'clean'")
        if repeats < 1:
            raise ValueError(f"repeats={repeats}; at least 1 is needed")
        self.conditioning, self.repeats = conditioning, repeats
        fresh = self.window - self.overlap
        self.clips = 1 + max(0, -(-(self.num_frames - self.window) // fresh))
        self.total = self.clips * len(self.levels)
        self.latents = self.noise(self.window)
        self.known: Tensor | None = None
        self.known_noise: Tensor | None = None

    @contextmanager
    def installed(self) -> Any:
        with self.denoiser.frame_times() if self.conditioning == "clean" else nullcontext():
            yield

    def step(self) -> Step:
        clip, done = divmod(self.index, len(self.levels))
        level = len(self.levels) - 1 - done
        start = clip * (self.window - self.overlap)
        for repeat in range(self.repeats if self.known is not None and self.conditioning == "replace" else 1):
            if repeat:
                self.latents = self.levels.renoise(self.latents, self.noise(self.window), level)
            self._denoise(level, start)
        self.index += 1
        ready = self._finish(start) if level == 0 else None
        return Step(self.index - 1, self.levels.times[level], ready)

    def _denoise(self, level: int, start: int) -> None:
        """Moves the clip from `level` one down, with its known frames put in."""
        index = torch.full((self.window,), level)
        latents, time = self.latents, self.levels.times[level]
        if self.known is not None and self.known_noise is not None:
            if self.conditioning == "clean":
                index[: self.overlap] = 0
                head, time = self.known, self.levels.times[index]
            else:
                head = self.levels.add_noise(self.known, self.known_noise, index[: self.overlap])
            latents = torch.cat([head, latents[:, self.overlap :]], dim=1)
        frames = (start + torch.arange(self.window)).clamp_max(self.num_frames - 1)
        count = len(self.levels)
        fraction: float | Tensor = (count - 1 - index) / count if time.ndim else (count - 1 - level) / count
        output = self.denoiser(latents, time, frames, fraction)
        self.latents = self.move(latents, output, index)

    def _finish(self, start: int) -> Tensor:
        """Frames of the finished clip that are new; then the next clip begins."""
        clip = self.latents
        if self.known is not None:
            clip = torch.cat([self.known, clip[:, self.overlap :]], dim=1)
        fresh = clip[:, self.overlap :] if self.known is not None else clip
        begin = start + self.overlap if self.known is not None else 0
        ready = fresh[:, : self.num_frames - begin].clone()
        if self.index < self.total:
            self.known = clip[:, -self.overlap :].clone()
            self.known_noise = self.noise(self.overlap)
            self.latents = self.noise(self.window)
        return ready

    def state(self) -> dict[str, Any]:
        known = {} if self.known is None else {"known": self.known, "known_noise": self.known_noise}
        return {**super().state(), **known}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        device = self.denoiser.device
        self.known = state["known"].to(device) if "known" in state else None
        self.known_noise = state["known_noise"].to(device) if "known_noise" in state else None
