"""What the attention modules of an enabled video model know and count: step, branch, sums of what the edit did.

Attention modules get no step number from diffusers, so a hook before the denoiser writes it into a `VideoContext` that
all of them read.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from ..attention.tiara import TiARA
from ..kernels.tiara_temporal import MEANS

__all__ = ["KEYS", "Meter", "VideoContext", "clock"]

KEYS = ("mean_delta", "mean_rho", "own_frame_mass", "own_frame_mass_after")  # of MEANS, in its order
assert len(KEYS) == len(MEANS)


class Meter:
    """Running sums of one attention module, kept on its device so that no call waits for a number.

    Args:
        name: of the module.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.sums: Tensor | None = None  # [4] MEANS since the last fold
        self.calls: Tensor | None = None  # [1] since the last fold
        self.totals: Tensor | None = None  # [5] until the last fold, calls last
        self.seen = False
        self.seconds = 0.0

    def add(self, means: Tensor) -> None:
        """Adds one call.

        Args:
            means: [4] as `MEANS` of `kernels.tiara_temporal`.
        """
        if self.sums is None or self.sums.device != means.device:
            self.renew(means.device)
        assert self.sums is not None and self.calls is not None
        self.sums.add_(means)
        self.calls.add_(1.0)

    @torch.compiler.disable
    def renew(self, device: torch.device) -> None:
        """Moves the sums; normal tensors even in inference mode, where others could not be changed outside of it."""
        before = self.fold()
        with torch.inference_mode(False):
            self.sums = torch.zeros(len(MEANS), device=device)
            self.calls = torch.zeros(1, device=device)
            totals = torch.zeros(len(MEANS) + 1, device=device)
        self.totals = totals if before is None or self.totals is None else totals.add_(self.totals.to(device))

    def fold(self) -> Tensor | None:
        """Moves what was summed since the last fold into the totals; returns it [5], or None before the first call."""
        if self.sums is None or self.calls is None or self.totals is None:
            return None
        fresh = torch.cat([self.sums, self.calls])
        self.totals.add_(fresh)
        self.sums.zero_()
        self.calls.zero_()
        return fresh


class VideoContext:
    """What the attention modules of one enabled model or pipeline know beside their inputs.

    Args:
        config: settings.
        pipe: whose schedule tells the number of steps; None for a bare model.
        measure: also take times (waits for the device at every call).
    """

    def __init__(self, config: TiARA, pipe: Any = None, measure: bool = False) -> None:
        self.config, self.pipe, self.measure = config, pipe, measure
        self.enabled = True  # False for good once the handle is removed: processors somebody kept then pass through
        self.active = True  # whether the current step is edited
        self.step, self.run = 0, 0
        self.total: int | None = None
        self.branch: str | None = None  # name of the cache context: "cond", "uncond", ...
        self.videos = 1  # rows of the denoiser's input, both halves of guidance counted
        self.sample_shape: tuple[int, ...] = ()
        self.call: dict[str, int] = {}  # num_frames, height, width where the denoiser is called with them
        self.scope = ""  # before the names of modules: a pipeline may have two models with the same names
        self.meters: dict[str, Meter] = {}
        self.by_step: dict[int, Tensor] = {}
        self.plans: dict[Any, Any] = {}  # tables of the modules, by what they depend on
        self.seconds = 0.0
        self._pinned = False
        self._last: tuple[str, float] | None = None
        self._schedule: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> VideoContext:
        """Of a copied model, which nobody holds a handle to: not enabled, and without a copy of the pipeline."""
        copied = VideoContext(self.config)
        copied.enabled = copied.active = False
        return copied

    def meter(self, name: str) -> Meter:
        """The meter of a module, the same one when it is installed again."""
        name = self.scope + name
        return self.meters.setdefault(name, Meter(name))

    def pin(self, step: int | None, total: int | None) -> None:
        """Takes the step from a caller, a fall being a new run; None: from the timesteps again."""
        if step is None:
            self._pinned, self._last = False, None
            return
        if step < 0 or (total is not None and step >= total):
            allowed = "0 or more" if total is None else f"0 to {total - 1}"
            raise ValueError(f"set_step(index={step}, total={total}): steps count from 0; write an index of {allowed}")
        self._pinned, self.total = True, total
        self.run += step < self.step
        self._move(step)

    def watch(self, timestep: Any, branch: Any) -> None:
        """Finds the step of a forward pass and whether it is edited.

        Args:
            timestep: of the denoiser; the next place of the pipeline's schedule, or a fall of its value, is the next
                step; another schedule, or a rise, a new run.
            branch: diffusers' `CacheContext`, or None.
        """
        self.branch = getattr(branch, "name", None)
        if not self._pinned:
            self._follow(timestep, getattr(branch, "num_inference_steps", None))
        self.active = self.enabled and self.config.at_step(self.step, self.total)

    def _follow(self, timestep: Any, told: int | None) -> None:
        schedule = getattr(getattr(self.pipe, "scheduler", None), "timesteps", None)
        level = _level(timestep, schedule)
        if level is None:
            return
        fresh = self._last is None or level[0] != self._last[0] or level[1] > self._last[1]
        if fresh or schedule is not self._schedule:  # every run of a pipeline makes a schedule of its own
            self._last, self._schedule = level, schedule
            self.run += 1
            self.total = told or _run_length(self.pipe, schedule, level)
            self._move(0)
        elif level != self._last:
            self._last = level
            self._move(self.step + 1)

    def _move(self, step: int) -> None:
        if step != self.step:
            self.fold()
        self.step = step

    def fold(self) -> None:
        """Books what was summed since the last fold under the current step."""
        fresh = [one for one in (meter.fold() for meter in self.meters.values()) if one is not None]
        if fresh:
            home = fresh[0].device
            sums = torch.stack([one.to(home) for one in fresh]).sum(0)
            before = self.by_step.get(self.step)
            self.by_step[self.step] = sums if before is None else before.to(home) + sums


def _run_length(pipe: Any, schedule: Any, first: tuple[str, float]) -> int | None:
    """Steps of a run that begins at a place of the schedule; a run that starts from a video begins inside of it.

    A pipeline's own number is that of another run where a second pipeline shares its model and scheduler. A scheduler
    that nobody has set has its training's timesteps, a thousand, and somebody else's loop is running.
    """
    told: int | None = getattr(pipe, "_num_timesteps", None)
    unset = schedule is not None and getattr(pipe.scheduler, "num_inference_steps", 0) is None
    if schedule is None or unset or (told is not None and first[0] != "place"):
        return told
    left = len(schedule) + (int(first[1]) if first[0] == "place" else 0)
    return left if told is None else min(left, told)


def _level(timestep: Any, schedule: Any) -> tuple[str, float] | None:
    """A number that falls from step to step, with its kind: minus the place in the schedule, or the timestep.

    A loop `for t in scheduler.timesteps` hands out views, whose place is known without reading a number, which would
    wait for a device. Schedulers of second order have every timestep twice and only the place tells the two apart.
    """
    if not isinstance(timestep, Tensor):
        return None if timestep is None else ("value", float(timestep))
    if timestep.numel() == 0 or timestep.is_meta:
        return None
    if not any(timestep.stride()) and timestep.untyped_storage().nbytes() > timestep.element_size():
        if isinstance(schedule, Tensor) and _one_storage(timestep, schedule):
            return "place", float(schedule.storage_offset() - timestep.storage_offset())
        if timestep.device.type != "cpu":
            return "offset", -float(timestep.storage_offset())
    return "value", float(timestep.detach().amax())


def _one_storage(a: Tensor, b: Tensor) -> bool:
    return a.device == b.device and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def clock(tensor: Any) -> float:
    """Seconds, once the tensor's device is done."""
    if isinstance(tensor, Tensor) and tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter()
