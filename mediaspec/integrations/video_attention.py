"""`mediaspec.enable(pipe, attention=TiARA(...))`: the handle, and what it shares with the attention of the model.

    handle = mediaspec.enable(pipe, attention=TiARA.safe())
    frames = pipe("a taxi moves left", num_frames=32).frames[0]
    print(handle.summary()["modules"], handle.summary()["mean_delta"])
    handle.remove()                                        # bit for bit the model it was

Attention modules get no step number from diffusers, so a hook before the denoiser writes it into a `VideoContext`
that all of them read. The same hook looks whether the modules are still the ones that were hooked: `enable_free_noise`
builds new ones and `fuse_qkv_projections` puts other processors in; then the edit is installed again.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from diffusers import DiffusionPipeline
from diffusers.hooks import HookRegistry, ModelHook
from diffusers.hooks.hooks import BaseState, StateManager
from torch import Tensor, nn

from ..attention.tiara import TiARA
from ..kernels.tiara_temporal import MEANS

__all__ = ["Meter", "TiaraHandle", "VideoContext", "denoisers", "enabled_on"]

WATCH = "mediaspec_cache_context"
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
        self.meters: dict[str, Meter] = {}
        self.by_step: dict[int, Tensor] = {}
        self.plans: dict[Any, Any] = {}  # tables of the modules, by what they depend on
        self.seconds = 0.0
        self._pinned = False
        self._last: float | None = None

    def meter(self, name: str) -> Meter:
        """The meter of a module, the same one when it is installed again."""
        return self.meters.setdefault(name, Meter(name))

    def pin(self, step: int, total: int | None) -> None:
        """Takes the step from a caller; timesteps are not watched any more."""
        self._pinned, self.total = True, total
        self._move(step)

    def watch(self, timestep: Any, branch: Any) -> None:
        """Finds the step from the denoiser's timestep: a fall is the next step, a rise a new run."""
        self.branch = getattr(branch, "name", None)
        if not self._pinned:
            told = getattr(branch, "num_inference_steps", None)
            self.total = told or _schedule_length(self.pipe)
            value = _level(timestep)
            if value is not None and value != self._last:
                fresh = self._last is None or value > self._last
                self.run += fresh
                self._move(0 if fresh else self.step + 1)
                self._last = value
        self.active = self.enabled and self.config.at_step(self.step, self.total)

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


def _schedule_length(pipe: Any) -> int | None:
    length = getattr(pipe, "_num_timesteps", None)
    if length is None:
        timesteps = getattr(getattr(pipe, "scheduler", None), "timesteps", None)
        length = None if timesteps is None else len(timesteps)
    return length


def _level(timestep: Any) -> float | None:
    """A number that falls from step to step: the timestep, or minus its place in the schedule it is a view of.

    Reading a number from a device waits for it; a loop `for t in scheduler.timesteps` hands out views, whose offset is
    known without.
    """
    if not isinstance(timestep, Tensor):
        return None if timestep is None else float(timestep)
    if timestep.numel() == 0 or timestep.is_meta:
        return None
    view = not any(timestep.stride()) and timestep.untyped_storage().nbytes() > timestep.element_size()
    if view and timestep.device.type != "cpu":
        return -float(timestep.storage_offset())
    return float(timestep.detach().amax())


class _Nothing(BaseState):
    def reset(self, *args: Any, **kwargs: Any) -> None:
        pass


class _ContextWatch(ModelHook):
    """Learns the name of the cache context that a pipeline calls its denoiser in."""

    _is_stateful = True

    def __init__(self) -> None:
        super().__init__()
        self.manager = StateManager(_Nothing)  # type: ignore[arg-type]

    @property
    def current(self) -> Any:
        return self.manager._context  # the property raises where there is none; having none is normal here

    def reset_state(self, module: nn.Module) -> nn.Module:
        self.manager.reset()
        return module


# Weak on both sides: the model's hooks keep the handle, and the handle keeps the model.
_enabled: WeakKeyDictionary[nn.Module, ReferenceType[TiaraHandle]] = WeakKeyDictionary()


def enabled_on(model: nn.Module) -> TiaraHandle | None:
    """The handle that is enabled on this very model, if any."""
    found = _enabled.get(model)
    return None if found is None else found()


def denoisers(target: Any) -> list[nn.Module]:
    """The models of a pipeline that predict noise, or the model itself.

    Raises:
        TypeError: neither a diffusers pipeline nor a module.
    """
    target = getattr(target, "_orig_mod", target)  # of torch.compile
    if isinstance(target, nn.Module):
        return [target]
    if isinstance(target, DiffusionPipeline) or hasattr(target, "components"):
        found = [getattr(target, name, None) for name in ("unet", "transformer", "transformer_2")]
        models = [getattr(one, "_orig_mod", one) for one in found if isinstance(one, nn.Module)]
        if models:
            return models
    raise TypeError(
        f"TiARA takes a diffusers video pipeline with a unet or transformer, or such a model, and got a "
        f"{type(target).__name__}"
    )


class _Site:
    """An installed module and how to take the edit out of it."""

    def __init__(self, model: nn.Module, name: str, undo: Callable[[], None], context: VideoContext) -> None:
        self.name, self.undo = name, undo
        self.module = model.get_submodule(name)
        processor = getattr(self.module, "processor", None)
        self.processor = processor if getattr(processor, "context", None) is context else None

    def intact(self, model: nn.Module) -> bool:
        try:
            same = model.get_submodule(self.name) is self.module
        except AttributeError:
            return False
        return same and (self.processor is None or self.module.processor is self.processor)


class TiaraHandle:
    """Enabled TiARA. Made by `mediaspec.enable`; as a context manager it is removed at the end.

    Args:
        target: a diffusers pipeline or its denoiser.
        config: settings.
        measure: also take times, for `time_share`.

    Raises:
        ValueError: no attention of the model is one that TiARA edits, or it is enabled already.
    """

    def __init__(self, target: Any, config: TiARA, measure: bool = False) -> None:
        models = denoisers(target)
        for model in models:
            if enabled_on(model) is not None:
                raise ValueError(
                    f"TiARA is already enabled on this {type(model).__name__}; call remove() on its handle first"
                )
        self.context = VideoContext(config, None if isinstance(target, nn.Module) else target, measure)
        self._models = models
        self._sites: dict[nn.Module, list[_Site]] = {}
        self._hooks: list[Any] = []
        self._watches: dict[nn.Module, _ContextWatch] = {}
        try:
            for model in models:
                self._install(model)
                self._listen(model)
        except BaseException:
            self.remove()
            raise

    def __deepcopy__(self, memo: dict[int, Any]) -> TiaraHandle:
        return self  # hooks of a copied model ask the one handle, which knows only its own models

    def set_step(self, index: int, total: int | None = None) -> None:
        """Says which denoising step comes next; loops of one's own call it, pipelines need not.

        Args:
            index: from 0; total: number of steps, for `steps` given as fractions.
        """
        self.context.pin(index, total)

    def summary(self) -> dict[str, Any]:
        """What is enabled and what it did; reads numbers from the device.

        Returns:
            "attention", "settings", "enabled", "modules" (how many were hit), "installed", "calls"; averages over all
            calls or None before the first: "mean_delta", "mean_rho", "own_frame_mass" (attention of a frame on
            itself), "own_frame_mass_after"; the same with "calls" in "by_module" (by name) and "by_step" (by number);
            "time_share" of the edited attention in the denoiser, None unless measured.
        """
        context = self.context
        context.fold()
        totals = {name: one.totals for name, one in context.meters.items() if one.totals is not None}
        by_module = {name: _averages(one.tolist()) for name, one in totals.items()}
        everything = [sum(column) for column in zip(*(one.tolist() for one in totals.values()))]
        spent = sum(one.seconds for one in context.meters.values())
        return {
            "attention": "tiara",
            "settings": context.config.settings(),
            "enabled": context.enabled,
            "modules": sum(one["calls"] > 0 for one in by_module.values()),
            "installed": sum(map(len, self._sites.values())),
            **_averages(everything or [0.0] * (len(KEYS) + 1)),
            "by_module": by_module,
            "by_step": {step: _averages(one.tolist()) for step, one in sorted(context.by_step.items())},
            "time_share": spent / context.seconds if context.measure and context.seconds else None,
        }

    def remove(self) -> None:
        """Gives the model back as it was; a second call does nothing."""
        self.context.enabled = self.context.active = False
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for sites in self._sites.values():
            for site in sites:
                site.undo()
        self._sites.clear()
        for model, watch in self._watches.items():
            take_hook_off(model, WATCH, watch)
        self._watches.clear()
        for model in self._models:
            if enabled_on(model) is self:
                del _enabled[model]

    def __enter__(self) -> TiaraHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def _install(self, model: nn.Module) -> None:
        for site in self._sites.pop(model, []):
            site.undo()
        found = _installer(model)(model, self.context.config, self.context)
        self._sites[model] = [_Site(model, name, undo, self.context) for name, undo in found]
        for site in self._sites[model]:
            self.context.meter(site.name).seen = False

    def _listen(self, model: nn.Module) -> None:
        names = list(inspect.signature(type(model).forward).parameters)[1:]
        if hasattr(model, "cache_context"):
            registry = HookRegistry.check_if_exists_or_initialize(model)
            left: Any = registry.get_hook(WATCH)  # one that could not be taken off serves again
            watch = self._watches[model] = _ContextWatch() if left is None else left
            if left is None:
                registry.register_hook(watch, WATCH)
        self._hooks.append(model.register_forward_pre_hook(_Before(self, names), with_kwargs=True, prepend=True))
        self._hooks.append(model.register_forward_hook(_After(self), with_kwargs=True))
        _enabled[model] = ref(self)

    @torch.compiler.disable
    def _before(self, model: nn.Module, given: dict[str, Any]) -> None:
        context = self.context
        sample = given.get("sample", given.get("hidden_states"))
        if isinstance(sample, Tensor):
            context.videos, context.sample_shape = sample.shape[0], tuple(sample.shape)
        context.call = {
            key: given[key] for key in ("num_frames", "height", "width") if isinstance(given.get(key), int)
        }
        watch = self._watches.get(model)
        context.watch(given.get("timestep"), None if watch is None else watch.current)
        if not all(site.intact(model) for site in self._sites[model]):
            self._install(model)
        if context.measure:
            self._since = _now(sample)

    @torch.compiler.disable
    def _after(self, model: nn.Module, output: Any) -> None:
        context = self.context
        if context.measure:
            first = output[0] if isinstance(output, tuple) else getattr(output, "sample", output)
            context.seconds += _now(first) - self._since
        if context.active and not any(context.meter(site.name).seen for site in self._sites[model]):
            raise RuntimeError(
                f"TiARA is enabled on {len(self._sites[model])} modules of this {type(model).__name__} and the first "
                "forward pass reached none of them; other code computes its attention. Enable TiARA after it, or try "
                "TiARA(route='hook')"
            )


class _Before:
    """Forward pre-hook. A copy of the model brings it along; it sees that this is another model and does nothing."""

    def __init__(self, handle: TiaraHandle, names: list[str]) -> None:
        self.handle, self.names = handle, names

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if model in self.handle._sites:
            self.handle._before(model, {**dict(zip(self.names, args)), **kwargs})


class _After:
    def __init__(self, handle: TiaraHandle) -> None:
        self.handle = handle

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if model in self.handle._sites:
            self.handle._after(model, output)


def take_hook_off(module: nn.Module, name: str, hook: ModelHook) -> None:
    """Removes a diffusers hook, unless something else has wrapped `forward` since: removal would cut that off.

    A hook that stays does nothing more once its context is not enabled.
    """
    registry = getattr(module, "_diffusers_hook", None)
    if registry is None or registry.get_hook(name) is not hook:
        return
    outermost = getattr(module.__dict__.get("forward"), "func", None)
    if getattr(outermost, "__qualname__", "").startswith("HookRegistry."):
        registry.remove_hook(name, recurse=False)
        if not registry.hooks and inspect.ismethod(module.__dict__.get("forward")):
            del module.__dict__["forward"], module._diffusers_hook  # as before the first hook


def _installer(model: nn.Module) -> Callable[[nn.Module, TiARA, VideoContext], list[tuple[str, Callable[[], None]]]]:
    from . import tiara_temporal

    if tiara_temporal.temporal_attentions(model):
        return tiara_temporal.install
    from . import tiara_dits

    return tiara_dits.install


def _averages(sums: list[float]) -> dict[str, Any]:
    calls = round(sums[-1])
    means = {key: (total / calls if calls else None) for key, total in zip(KEYS, sums)}
    return {"calls": calls, **means}


def _now(tensor: Any) -> float:
    if isinstance(tensor, Tensor) and tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)
    return time.perf_counter()
