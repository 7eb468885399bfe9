"""Carriers of the packed kind: the network takes the memory's raw frames beside the window and packs them itself.

One timestep holds for the whole window, so that schedules are chunks (w = delta). What the memory shows is told to the
network in groups (`packed_history`, or the chunks of `far`); no token of ours enters.

B videos, C channels, n frames of the window, t latent frames, T pictures, S text tokens.
"""

from __future__ import annotations

import inspect
import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...memory.schedule_presets import make_schedule
from ...memory.window_schedule import WindowSchedule
from ..keywords import nearest
from .text_carrier import TextCarrier
from .wan_codec import WanPictures
from .window import shifted

__all__ = ["PackedCarrier", "PackedWanCarrier", "dynamic_shift"]


def dynamic_shift(config: Any, tokens: int, most: float | None = None) -> float:
    """The timestep shift that a pipeline takes from the size of its window.

    mu is linear in the tokens (`base_shift` at `base_image_seq_len`, `max_shift` at `max_image_seq_len`), and the
    levels are warped by e^mu, or by mu itself with time_shift_type="linear".

    Args:
        config: of the scheduler; without use_dynamic_shifting its own `shift` holds.
        tokens: of the window.
        most: largest shift e^mu.

    Example:
        >>> dynamic_shift({"use_dynamic_shifting": False, "shift": 5.0}, 14040)
        5.0
    """
    if not config.get("use_dynamic_shifting"):
        return float(config.get("shift") or 1.0)
    low, high = config.get("base_image_seq_len") or 256, config.get("max_image_seq_len") or 4096
    least, largest = config.get("base_shift") or 0.5, config.get("max_shift") or 1.15
    slope = (largest - least) / (high - low)
    mu = tokens * slope + least - slope * low
    if most is not None:
        mu = min(mu, math.log(most))
    return mu if config.get("time_shift_type") == "linear" else math.exp(mu)


class PackedCarrier(TextCarrier):
    """What these carriers share: checks, the codec's lengths, schedules.

    Args:
        pipe_or_model: a diffusers pipeline or its transformer.
        unknown: settings that no class has are errors.

    Raises:
        ValueError: unknown settings, with the nearest one.
    """

    preset: ClassVar[str]
    """Of `make_schedule`."""
    num_train_timesteps: ClassVar[int] = 1000
    """Timestep of level 1."""

    def __init__(self, pipe_or_model: Any, **unknown: Any) -> None:
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

    def one_timestep(self, levels: Tensor, batch: int, device: torch.device) -> Tensor:
        """[B] float32 timestep of a window at one level.

        Raises:
            ValueError: frames at several levels.
        """
        if bool((levels != levels[0]).any()):
            raise ValueError(
                f"frames at levels {levels.tolist()}, and {self.name} has one timestep for a window; take a schedule "
                f"of chunks (w = delta), as {self.preset!r} or 'outpainting'"
            )
        return (levels[:1] * self.num_train_timesteps).to(device, torch.float32).expand(batch)

    # ---- levels

    def shift(self, frames: int, height: int | None, width: int | None) -> float:
        """Timestep shift of the pipeline's scheduler for a window, 1 for a bare network."""
        scheduler = getattr(self.pipe, "scheduler", None)
        if scheduler is None:
            return 1.0
        tokens = self.frame_tokens(height or self.default_size[0], width or self.default_size[1])
        return dynamic_shift(scheduler.config, frames * tokens)

    def schedule(self, **settings: Any) -> WindowSchedule:
        """The schedule that suits this network, or another one of chunks by name.

        Args:
            settings: `name` of `make_schedule` with its numbers; `shift` of the timesteps, None is that of the
                pipeline's scheduler, for a window of `height` x `width` pixels where it depends on the size.

        Raises:
            ValueError: see `make_schedule`; a schedule whose frames stand at several levels.
        """
        shift, height, width = (settings.pop(key, None) for key in ("shift", "height", "width"))
        own, numbers = self.default_schedule()
        name = settings.pop("name", None) or own
        made = make_schedule(name, **{**(numbers if name == own else {}), **settings})
        if made.w != made.delta:
            raise ValueError(
                f"schedule {name!r} has w={made.w}, delta={made.delta}: frames at several levels, and {self.name} has "
                f"one timestep for a window; take {own!r} or 'outpainting'"
            )
        made = self.refer(made) if name == own else made
        return shifted(made, self.shift(made.w, height, width) if shift is None else float(shift))

    def schedule_for(self, height: int, width: int, **settings: Any) -> WindowSchedule:
        return self.schedule(height=height, width=width, **settings)

    def default_schedule(self) -> tuple[str, dict[str, Any]]:
        """Name and numbers."""
        return self.preset, {}

    def refer(self, schedule: WindowSchedule) -> WindowSchedule:
        """The network's own schedule with references that fit its settings."""
        return schedule


class PackedWanCarrier(WanPictures, PackedCarrier):
    """Those with Wan's codec (`AutoencoderKLWan`) and UMT5 texts.

    Args:
        pipe_or_model: a diffusers pipeline or its transformer.
        max_sequence_length: text tokens, 512 where diffusers' pipelines are called.
        settings: of `PackedCarrier`.
    """

    def __init__(self, pipe_or_model: Any, *, max_sequence_length: int = 512, **settings: Any) -> None:
        super().__init__(pipe_or_model, **settings)
        self.read_codec(max_sequence_length)
