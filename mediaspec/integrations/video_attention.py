"""`mediaspec.enable(pipe, attention=TiARA(...))`: the handle, and what it shares with the attention of the model.

    handle = mediaspec.enable(pipe, attention=TiARA.safe())
    frames = pipe("a taxi moves left", num_frames=32).frames[0]
    print(handle.summary()["modules"], handle.summary()["mean_delta"])
    handle.remove()                                        # bit for bit the model it was

A hook before the denoiser keeps the `VideoContext` that all attention modules read. It also looks whether the modules
are still the ones that were hooked: `enable_free_noise` builds new ones and `fuse_qkv_projections` puts other
processors in; then the edit is installed again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import TracebackType
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from diffusers import DiffusionPipeline
from diffusers.hooks import HookRegistry, ModelHook
from diffusers.hooks.hooks import BaseState, HookFunctionReference, StateManager
from torch import Tensor, nn

from ..attention.tiara import TiARA
from .video_context import KEYS, VideoContext, clock

__all__ = ["TiaraHandle", "denoisers", "enabled_on", "put_hook_on", "take_hook_off"]

WATCH = "mediaspec_cache_context"


class _Nothing(BaseState):
    def reset(self, *args: Any, **kwargs: Any) -> None:
        pass


class _ContextWatch(ModelHook):
    """Learns the name of the cache context that a pipeline calls its denoiser in.

    It stands in the registry, where contexts are handed out, and leaves `forward` alone: wrappers around it need no
    regard, and a deep copy of the model stays one (a copied wrapper would run the forward of the first model).
    """

    _is_stateful = True

    def __init__(self) -> None:
        super().__init__()
        self.manager = StateManager(_Nothing)  # type: ignore[arg-type]

    @classmethod
    def of(cls, model: nn.Module) -> _ContextWatch:
        registry: Any = HookRegistry.check_if_exists_or_initialize(model)
        watch = cls()
        registry.hooks[WATCH] = watch
        registry._hook_order.insert(0, WATCH)
        registry._fn_refs.insert(0, HookFunctionReference())
        return watch

    @staticmethod
    def off(model: nn.Module) -> None:
        registry: Any = getattr(model, "_diffusers_hook", None)
        if registry is not None and WATCH in registry.hooks:
            _forget(registry, WATCH)
            if not registry.hooks:
                del model._diffusers_hook

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


def denoisers(target: Any) -> dict[str, nn.Module]:
    """The models of a pipeline that predict noise, by component; a model itself has no name.

    Raises:
        TypeError: neither a diffusers pipeline nor a module.
    """
    target = getattr(target, "_orig_mod", target)  # of torch.compile
    if isinstance(target, nn.Module):
        return {"": target}
    if isinstance(target, DiffusionPipeline) or hasattr(target, "components"):
        models: dict[str, nn.Module] = {}
        for name in ("unet", "transformer", "transformer_2"):
            found = getattr(target, name, None)
            found = getattr(found, "_orig_mod", found)
            if isinstance(found, nn.Module) and not any(found is one for one in models.values()):
                models[name] = found
        if models:
            return models
    raise TypeError(
        f"TiARA takes a diffusers video pipeline with a unet or transformer, or such a model, and got a "
        f"{type(target).__name__}"
    )


class _Site:
    """An installed module and how to take the edit out of it."""

    def __init__(self, model: nn.Module, name: str, undo: Callable[[], None], context: VideoContext) -> None:
        self.name, self.undo, self.meter = name, undo, context.meter(name)
        self.module = model.get_submodule(name)
        processor = getattr(self.module, "processor", None)
        self.processor = processor if getattr(processor, "context", None) is context else None
        self.forward = self.module.__dict__.get("forward") if self.processor is None else None

    def intact(self, model: nn.Module) -> bool:
        """Whether the module is still the model's and still runs the edit."""
        try:
            same = model.get_submodule(self.name) is self.module
        except AttributeError:
            return False
        if self.processor is not None:
            return same and self.module.processor is self.processor
        return same and _runs(self.module, self.forward)


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
        for model in models.values():
            if enabled_on(model) is not None:
                raise ValueError(
                    f"TiARA is already enabled on this {type(model).__name__}; call remove() on its handle first"
                )
        self.context = VideoContext(config, None if isinstance(target, nn.Module) else target, measure)
        several = len(models) > 1  # their modules have the same names
        self._scopes = {model: f"{name}." if several else "" for name, model in models.items()}
        self._sites: dict[nn.Module, list[_Site]] = {}
        self._hooks: list[Any] = []
        self._watches: dict[nn.Module, _ContextWatch] = {}
        try:
            for model in self._scopes:
                self._install(model)
                self._listen(model)
        except BaseException:
            self.remove()
            raise

    def __deepcopy__(self, memo: dict[int, Any]) -> TiaraHandle:
        return self  # hooks of a copied model ask the one handle, which knows only its own models

    def set_step(self, index: int | None, total: int | None = None) -> None:
        """Says which denoising step comes next; loops of one's own call it, pipelines need not.

        Args:
            index: from 0, a lower one than before begins another video; None: from the timesteps again, as pipelines
                have it.
            total: number of steps, for `steps` given as fractions.

        Raises:
            ValueError: an index that no step has.
        """
        self.context.pin(index, total)

    def summary(self) -> dict[str, Any]:
        """What is enabled and what it did; reads numbers from the device.

        Returns:
            "attention", "settings", "enabled", "modules" (how many were hit), "installed", "calls"; averages over all
            calls or None before the first: "mean_delta", "mean_rho", "own_frame_mass" (attention of a frame on
            itself), "own_frame_mass_after"; the same with "calls" in "by_module" (by name, after the component's
            where a pipeline has two denoisers) and "by_step" (by number); "time_share" of the edited attention in the
            denoiser, None unless measured.
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
        for model in self._watches:
            _ContextWatch.off(model)
        self._watches.clear()
        for model in self._scopes:
            if enabled_on(model) is self:
                del _enabled[model]

    def __enter__(self) -> TiaraHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def _install(self, model: nn.Module) -> None:
        """A refusal leaves the former sites in the list, undone, so that the next forward pass is refused as well."""
        for site in self._sites.get(model, []):
            site.undo()
        self.context.scope = self._scopes[model]
        found = _installer(model)(model, self.context.config, self.context)
        self._sites[model] = [_Site(model, name, undo, self.context) for name, undo in found]
        for site in self._sites[model]:
            site.meter.seen = False

    def _listen(self, model: nn.Module) -> None:
        names = list(inspect.signature(type(model).forward).parameters)[1:]
        if hasattr(model, "cache_context"):
            self._watches[model] = _ContextWatch.of(model)
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
            self._since = clock(sample)

    @torch.compiler.disable
    def _after(self, model: nn.Module, output: Any) -> None:
        context = self.context
        if context.measure:
            first = output[0] if isinstance(output, tuple) else getattr(output, "sample", output)
            context.seconds += clock(first) - self._since
        if context.active and not any(site.meter.seen for site in self._sites[model]):
            advice = "Enable TiARA after it, or try TiARA(route='hook')"
            if context.config.route == "hook":
                advice = "The hooks act on torch's scaled_dot_product_attention: set AttnProcessor2_0 on these modules"
            raise RuntimeError(
                f"TiARA is enabled on {len(self._sites[model])} modules of this {type(model).__name__} and the first "
                f"forward pass reached none of them; other code computes its attention. {advice}"
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


def _runs(module: nn.Module, forward: Any) -> bool:
    """Whether a hooked `forward` is the module's still, or is inside of one that somebody has wrapped around it."""
    outer = module.__dict__.get("forward")
    while outer is not None and outer is not forward:
        outer = getattr(outer, "__wrapped__", None)
    return outer is not None


def put_hook_on(module: nn.Module, name: str, hook: ModelHook) -> ModelHook:
    """Registers a diffusers hook; one of this name that `take_hook_off` had to leave serves again and is returned."""
    registry: Any = HookRegistry.check_if_exists_or_initialize(module)
    left: Any = registry.get_hook(name)
    if left is not None and _runs(module, left.forward_with_it):
        return left
    if left is not None:  # somebody put the forward of before it back
        _forget(registry, name)
    registry.register_hook(hook, name)
    hook.forward_with_it = module.__dict__["forward"]  # type: ignore[attr-defined]
    return hook


def _forget(registry: Any, name: str) -> None:
    place = registry._hook_order.index(name)
    del registry.hooks[name], registry._hook_order[place], registry._fn_refs[place]


def take_hook_off(module: nn.Module, name: str, hook: ModelHook) -> None:
    """Removes a diffusers hook, unless something else has wrapped `forward` since: removal would cut that off.

    A hook that stays does nothing more once its context is not enabled. One below another hook of the same registry
    stays too: diffusers links a removed hook's neighbours without regard to a `new_forward` of the upper one.
    """
    registry: Any = getattr(module, "_diffusers_hook", None)
    if registry is None or registry.get_hook(name) is not hook or registry._hook_order[-1] != name:
        return
    outermost = getattr(module.__dict__.get("forward"), "func", None)
    if getattr(outermost, "__qualname__", "").startswith("HookRegistry."):
        registry.remove_hook(name, recurse=False)
        if not registry.hooks and getattr(module.__dict__["forward"], "__func__", None) is type(module).forward:
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
