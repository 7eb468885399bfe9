"""All frames in one clip, as the base pipeline does: for videos that are no longer than the model's window."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .base import Sampler, Step

__all__ = ["Plain"]


class Plain(Sampler):
    """Denoises N frames together, T steps.

    Example:
        >>> pipe("a red ball", num_frames=16, sampler="plain")  # doctest: +SKIP
    """

    name = "plain"

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.total = len(self.levels)
        self.latents = self.start()

    def start(self) -> Tensor:
        """The noise that sampling begins with."""
        return self.noise(self.num_frames)

    def predict(self, latents: Tensor, time: Tensor, fraction: float) -> Tensor:
        """Model output [C, N, h, w] for all frames at one timestep."""
        return self.denoiser(latents, time, torch.arange(latents.shape[1]), fraction)

    def step(self) -> Step:
        level = len(self.levels) - 1 - self.index
        time = self.levels.times[level]
        output = self.predict(self.latents, time, self.index / len(self.levels))
        self.latents = self.move(self.latents, output, torch.full((self.latents.shape[1],), level))
        self.index += 1
        return Step(self.index - 1, time, self.latents if self.done else None)
