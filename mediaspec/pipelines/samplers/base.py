"""What a long sampler is: an object that makes one denoising step at a time and can be put away and taken up again.

A sampler draws one video. It hands out latents of finished frames in order, keeps everything it needs to go on in
`state()`, and takes its noise from one generator, so that a video depends on its prompt, seed and settings alone.
C channels, N latent frames, h x w latents, S text tokens, D text channels, T levels of noise.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from ..keywords import nearest
from ..noise_levels import NoiseLevels

__all__ = ["Denoiser", "FrameText", "Sampler", "Step"]


class FrameText(Protocol):
    """Text that may change along the video."""

    def embeddings(self, frames: Tensor, step_fraction: float | Tensor) -> Tensor:
        """[n, S, D] text of the video's frames `frames` [n] int64 after `step_fraction` in [0, 1) of the steps: one
        number, or [n] where frames stand at different steps (FIFO)."""


class Denoiser(Protocol):
    """A video model as the samplers see it; see `mediaspec.pipelines.video_denoiser`."""

    model: torch.nn.Module
    window: int
    device: torch.device

    def __call__(self, latents: Tensor, times: Tensor, frames: Tensor, fraction: float | Tensor) -> Tensor:
        """Model output [C, n, h, w], guidance applied, for latents [C, n, h, w].

        `times` is one timestep (no dimension) or one per frame [n]; `frames` [n] int64 are their places in the video;
        `fraction` is how much of the steps is done, one number or [n].
        """

    def frame_times(self) -> AbstractContextManager[Any]:
        """While it is open, `times` may hold one timestep per frame."""


@dataclass
class Step:
    """One step that was made.

    Args:
        index: its number, from 0.
        timestep: what the model was given: no dimension, or one per frame.
        frames: latents [C, n, h, w] of frames that are finished now and follow the ones handed out before; or None.
    """

    index: int
    timestep: Tensor
    frames: Tensor | None = None


class Sampler(ABC):
    """Base of the samplers. Subclasses add their settings as keyword arguments.

    Args:
        denoiser: the model with its text.
        levels: noise levels, `num_inference_steps` of them.
        num_frames: latent frames N to hand out.
        shape: (C, h, w) of one latent frame.
        generator: CPU generator of this video's noise.
        window: frames of one clip, by default what the model was trained on.
        eta: share of fresh noise per step, where the sampler allows it.
    """

    name: ClassVar[str]
    index: int = 0
    total: int
    latents: Tensor

    def __init__(
        self,
        denoiser: Denoiser,
        levels: NoiseLevels,
        num_frames: int,
        shape: tuple[int, int, int],
        generator: torch.Generator,
        *,
        window: int | None = None,
        eta: float = 0.0,
    ) -> None:
        self.denoiser, self.levels, self.num_frames, self.shape = denoiser, levels, num_frames, shape
        self.generator, self.eta = generator, eta
        self.window = denoiser.window if window is None else window
        if self.window < 2:
            raise ValueError(f"window={window}; a clip has at least 2 frames")
        if not 0 <= eta <= 1:
            raise ValueError(f"eta={eta}; allowed is 0 (no fresh noise) to 1")

    @classmethod
    def settings(cls) -> dict[str, Any]:
        """Names and defaults of the settings that `pipe(..., sampler_settings={...})` may hold."""
        found: dict[str, Any] = {}
        for kind in reversed(cls.__mro__):
            if "__init__" in vars(kind):
                parameters = inspect.signature(vars(kind)["__init__"]).parameters.values()
                found |= {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
        return found

    @classmethod
    def check_settings(cls, given: dict[str, Any]) -> None:
        """Raises ValueError for an unknown setting, naming the nearest one."""
        for name in given:
            if name not in cls.settings():
                raise ValueError(f"{cls.name} has no setting {name!r}; {nearest(name, cls.settings())}")

    @classmethod
    def default_steps(cls, window: int) -> int:
        """Steps when the caller names none."""
        return 50

    def installed(self) -> AbstractContextManager[Any]:
        """Open while steps are made: the hooks that this sampler needs on the model."""
        return nullcontext()

    @abstractmethod
    def step(self) -> Step:
        """Makes the next step; call it `total` times."""

    @property
    def done(self) -> bool:
        return self.index >= self.total

    def state(self) -> dict[str, Any]:
        """Tensors and numbers from which `load` goes on exactly; the generator's state included."""
        return {"index": self.index, "latents": self.latents, "generator": self.generator.get_state()}

    def load(self, state: dict[str, Any]) -> None:
        """Goes on from a `state()`."""
        self.index = int(state["index"])
        self.latents = state["latents"].to(self.denoiser.device)
        self.generator.set_state(state["generator"])

    def noise(self, frames: int) -> Tensor:
        """[C, frames, h, w] float32 standard normal, drawn on the CPU so that every device gets the same."""
        drawn = torch.randn((frames, self.shape[0], *self.shape[1:]), generator=self.generator)
        return drawn.transpose(0, 1).contiguous().to(self.denoiser.device)

    def move(self, latents: Tensor, output: Tensor, index: Tensor) -> Tensor:
        """One step of `levels`, with this sampler's share of fresh noise."""
        noise = self.noise(latents.shape[1]) if self.eta else None
        return self.levels.step(latents, output, index, self.eta, noise)
