"""FIFO-Diffusion: a queue of frames at rising noise levels, one finished frame per step (arXiv:2405.11473).

The queue holds T = f * n frames, slot i at noise level i. A queue step moves every frame one level down, hands out
slot 0, shifts, and appends fresh noise. With lookahead, f/2 frames that were handed out stay in front of the queue and
windows of f frames overlap by half: each call moves only its noisier half, which then always sees cleaner frames. The
queue starts from one clip of f frames; slot i takes frame max(0, i - (T - f)) of it, noised to level i. So N + T - f
queue steps are made and the last N frames kept. Memory does not depend on N.

Frames of one call stand at different levels; the model needs per-frame timesteps (`frame_times`). Attention edits that
wrap around the window (TiARA's circular boundary) would join its cleanest frame to its noisiest: take
`boundary="reflect"` there.
f = window, n = parts of the queue, T levels, N frames handed out, C channels, h x w latents.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .base import Sampler, Step
from .plain import Plain

__all__ = ["Fifo", "queue_calls", "queue_levels"]


def queue_calls(window: int, parts: int, lookahead: bool = True) -> list[tuple[int, int, int]]:
    """Model calls of one queue step, from the noisy end to the clean one.

    Returns:
        (start, kept, end) per call: slots [start, end) go in, the outputs of [kept, end) are kept.

    Example:
        >>> queue_calls(4, 2)
        [(6, 8, 10), (4, 6, 8), (2, 4, 6), (0, 2, 4)]
    """
    stride = window // 2 if lookahead else window
    skip = window // 2 if lookahead else 0
    count = 2 * parts if lookahead else parts
    return [(r * stride, r * stride + skip, r * stride + window) for r in reversed(range(count))]


def queue_levels(window: int, parts: int, lookahead: bool = True) -> Tensor:
    """[slots] int64 noise level of every slot; frames that were handed out count as level 0."""
    front = window // 2 if lookahead else 0
    return torch.cat([torch.zeros(front, dtype=torch.int64), torch.arange(window * parts)])


class Fifo(Sampler):
    """FIFO-Diffusion; `num_inference_steps` is the length of the queue, a multiple of the window.

    Args:
        lookahead: overlapping windows (twice the calls, steadier frames); needs an even window.
        eta: share of fresh noise per step; the authors take 1. Flow matching models take 0.

    Raises:
        ValueError: steps that the window does not divide, an odd window with lookahead.

    Example:
        >>> pipe("a red ball", num_frames=512, sampler="fifo", output_path="ball.mp4")  # doctest: +SKIP
    """

    name = "fifo"

    def __init__(self, *args: Any, lookahead: bool = True, eta: float | None = None, **settings: Any) -> None:
        levels = args[1] if len(args) > 1 else settings["levels"]
        if eta is None:
            eta = 0.0 if levels.prediction == "flow_prediction" else 1.0
        super().__init__(*args, eta=eta, **settings)
        window, count = self.window, len(self.levels)
        if count % window:
            below = max(count // window, 1) * window
            raise ValueError(
                f"num_inference_steps={count} is the length of the queue and must be a multiple of the window, "
                f"{window}; write {below} or {below + window}"
            )
        if lookahead and window % 2:
            raise ValueError(f"lookahead moves half a window at a time, and window={window} is odd; take an even one")
        self.lookahead = lookahead
        self.calls = queue_calls(window, count // window, lookahead)
        self.slots = queue_levels(window, count // window, lookahead)
        self.front = len(self.slots) - count  # slots before the queue; the one that is handed out has this index
        self.clip = Plain(self.denoiser, self.levels, window, self.shape, self.generator, window=window, eta=self.eta)
        self.discarded = count - window
        self.total = count + self.num_frames + self.discarded
        self.latents = self.clip.latents

    @classmethod
    def default_steps(cls, window: int) -> int:
        return 4 * window

    @contextmanager
    def installed(self) -> Any:
        with self.denoiser.frame_times():
            yield

    def step(self) -> Step:
        if not self.clip.done:
            return self._clip_step()
        queue_step = self.index - self.clip.total
        for start, kept, end in self.calls:
            self._move(start, kept, end, queue_step)
        ready = self.latents[:, self.front : self.front + 1].clone() if queue_step >= self.discarded else None
        self.latents = torch.cat([self.latents[:, 1:], self.noise(1)], dim=1)
        self.index += 1
        return Step(self.index - 1, self.levels.times, ready)

    def _clip_step(self) -> Step:
        self.clip.latents = self.latents
        made = self.clip.step()
        self.latents = self.clip.latents
        self.index += 1
        if self.clip.done:
            self.latents = self._fill(self.latents)
        return Step(self.index - 1, made.timestep)

    def _fill(self, clip: Tensor) -> Tensor:
        """The first queue: frames of the clip [C, f, h, w], noised to the level of their slot."""
        level = self.slots.clone()
        place = torch.arange(len(level)) - self.front
        source = (place - self.discarded).clamp_min(0)
        return self.levels.add_noise(clip[:, source.to(clip.device)], self.noise(len(level)), level)

    def _move(self, start: int, kept: int, end: int, queue_step: int) -> None:
        """One model call: slots [start, end) go in, [kept, end) move one level down."""
        level = self.slots[start:end]
        frames = queue_step + torch.arange(start, end) - self.front - self.discarded
        frames = frames.clamp(0, self.num_frames - 1)
        fraction = (len(self.levels) - 1 - level) / len(self.levels)
        clip = self.latents[:, start:end]
        output = self.denoiser(clip, self.levels.times[level], frames, fraction)
        moved = self.latents.clone()
        moved[:, kept:end] = self.move(clip[:, kept - start :], output[:, kept - start :], level[kept - start :])
        self.latents = moved

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self.clip.index = min(self.index, self.clip.total)
