"""TiARA in diffusers models whose attention runs over time alone (2D+1D): processors, and hooks as the other route.

Temporal attention stands, by module name, in

    UNetMotionModel (AnimateDiff, PIA)  *.motion_modules.j.transformer_blocks.k.attn1, attn2
    UNet3DConditionModel, I2VGenXLUNet  transformer_in and *.temp_attentions.j, attn1 and attn2
    UNetSpatioTemporalConditionModel    *.temporal_transformer_blocks.k.attn1 (attn2 there looks at the image)
    LatteTransformer3DModel             temporal_transformer_blocks.k.attn1

and sees [B * P, N, C]. The processor does what diffusers' own does for such a module, with another attention in the
middle; wherever TiARA is not to act, the module's former processor runs, so those calls are the model's own.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import torch
from diffusers.hooks import ModelHook
from diffusers.models import attention_processor as known
from diffusers.models.attention_processor import Attention
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..attention.tiara import FEWEST_FRAMES, TiARA, temporal_plan
from ..kernels.tiara_temporal import TemporalPlan, tiara_temporal
from .video_attention import put_hook_on, take_hook_off
from .video_context import Meter, VideoContext, clock

__all__ = ["TiaraAttnProcessor", "TiaraHook", "install", "temporal_attentions"]

HOOK = "mediaspec_tiara"
PLACES = re.compile(
    r"(^|\.)(motion_modules|temp_attentions|transformer_in|temporal_transformer_blocks)\.(.*\.)?attn[12]$"
)
OWN_SCALE = (known.AttnProcessor, known.SlicedAttnProcessor, known.XFormersAttnProcessor)
"""Processors that scale with `attn.scale`, 1 with scale_qk=False; torch's attention always takes D ** -0.5."""
PLAIN = (*OWN_SCALE, known.AttnProcessor2_0, known.FusedAttnProcessor2_0)
"""Processors that compute one attention over one sequence and nothing else, which ours does as well."""


def temporal_attentions(model: nn.Module) -> list[tuple[str, Attention]]:
    """The temporal self-attentions of a model by name, in order of registration."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, Attention) and PLACES.search(name) and not module.is_cross_attention
    ]


def chosen(model: nn.Module, config: TiARA) -> list[tuple[str, Attention]]:
    """Those that `layers` names, in order of execution.

    Raises:
        ValueError: none, or an index beyond the last.
    """
    found = dict(_in_order_of_execution(temporal_attentions(model)))
    return [(name, found[name]) for name in config.pick(list(found), f"temporal attentions of {type(model).__name__}")]


def _in_order_of_execution(found: list[tuple[str, Attention]]) -> list[tuple[str, Attention]]:
    """U-Nets register up blocks before the middle one and run them after it."""

    def stage(name: str) -> int:
        return 2 if name.startswith("up_blocks") else 1 if name.startswith("mid_block") else 0

    return sorted(found, key=lambda one: stage(one[0]))


def install(model: nn.Module, config: TiARA, context: VideoContext) -> list[tuple[str, Callable[[], None]]]:
    """Puts the edit into every chosen temporal attention.

    Args:
        model: a denoiser of diffusers.
        config: settings.
        context: of the handle.

    Returns:
        Name of each module and what takes the edit out of it again.

    Raises:
        ValueError: no temporal attention, a route that it does not know, or a processor that it cannot stand in for.
    """
    if config.route not in ("auto", "processor", "hook"):
        raise ValueError(
            f"TiARA route={config.route!r} is for joint space-time attention; the temporal attention of "
            f"{type(model).__name__} takes 'auto', 'processor' or 'hook'"
        )
    sites = chosen(model, config)
    if config.pool == "space" and any(".module." in name for name, _ in sites):
        raise ValueError(
            "TiARA pool='space' averages over all positions and FreeNoise's split inference shows a part of them at a "
            "time; write pool='heads' or None"
        )
    if config.route != "hook":
        for name, attn in sites:
            former = _unwrapped(attn.processor)
            if type(former) not in PLAIN:
                raise ValueError(
                    f"{name} has a {type(former).__name__}, which TiARA's processor cannot stand in for; write "
                    "TiARA(route='hook') to edit the attention inside of it"
                )
    put = _put_hook if config.route == "hook" else _put_processor
    return [(name, put(attn, _Edit(config, context, context.meter(name)))) for name, attn in sites]


class _Edit:
    """The edited attention of one module with the plan at hand."""

    def __init__(self, config: TiARA, context: VideoContext, meter: Meter) -> None:
        self.config, self.context, self.meter = config, context, meter
        self.plan: TemporalPlan | None = None

    def wanted(self, frames: int) -> bool:
        """Whether this call is edited; short clips count as reached."""
        if not self.context.active:
            return False
        if frames < FEWEST_FRAMES:
            self.meter.seen = True
            return False
        return True

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        """[R, H, N, D] three times to [R, H, N, D]."""
        plan = self.plan
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        if plan is None or plan.frames != q.shape[2] or plan.basis.device != q.device or plan.basis.dtype != wide:
            plan = self.plan = _plan(self.context, q.shape[2], q.device, wide)
        started = clock(q) if self.context.measure else 0.0
        pool, videos = self.config.pool, self.context.videos if self.config.pool == "space" else 1
        out, means = tiara_temporal(q, k, v, plan, scale=scale, pool=pool, videos=videos, means=True)
        assert means is not None
        self.meter.add(means)
        if not self.meter.seen:  # written once: a compiled model would be compiled again for every change
            self.meter.seen = True
        if self.context.measure:
            self.meter.seconds += clock(out) - started
        return out


@torch.compiler.disable
def _plan(context: VideoContext, frames: int, device: torch.device, dtype: torch.dtype) -> TemporalPlan:
    """One plan for all modules of a handle."""
    key = (frames, device, dtype)
    if key not in context.plans:
        context.plans[key] = temporal_plan(context.config, frames, device, dtype)
    return context.plans[key]


class TiaraAttnProcessor:
    """Stands in for a plain processor of `diffusers.models.attention_processor.Attention`.

    Norms of queries and keys, group and spatial norms, fused projections, residual and output scale are the module's.

    Args:
        former: the processor in whose place it stands, run whenever a call is not edited.
        edit: the attention.
    """

    def __init__(self, former: Any, edit: _Edit) -> None:
        self.former, self.edit = former, edit
        self.context = edit.context

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The former's, as for a proxy: `load_ip_adapter`, `unload_ip_adapter` and `UNetMotionModel.from_unet2d` make
        new processors of this class without arguments, `set_default_attn_processor` looks it up in a list."""
        return type(self.former)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copied model is the plain one: nobody holds a handle to it."""
        return copy.deepcopy(self.former, memo)

    def __call__(
        self,
        attn: Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
        **more: Any,
    ) -> Tensor:
        """See `AttnProcessor2_0`; hidden_states [B * P, N, C]."""
        if temb is not None:  # SlicedAttnProcessor knows none
            more["temb"] = temb
        ours = hidden_states.dim() == 3 and encoder_hidden_states is None and attention_mask is None
        if not ours or not self.edit.wanted(hidden_states.shape[1]):
            return self.former(attn, hidden_states, encoder_hidden_states, attention_mask, **more)
        config = self.edit.config
        changes = config.alpha > 0 or (config.corner_frames > 0 and config.corner_strength > 0)
        entry = hidden_states
        if attn.spatial_norm is not None:
            hidden_states = attn.spatial_norm(hidden_states, temb)
        if attn.group_norm is not None:
            hidden_states = attn.group_norm(hidden_states.transpose(1, 2)).transpose(1, 2)
        if attn.fused_projections:
            q, k, v = attn.to_qkv(hidden_states).chunk(3, -1)
        else:
            q, k, v = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
        q, k, v = (one.unflatten(-1, (attn.heads, -1)).transpose(1, 2) for one in (q, k, v))
        if attn.norm_q is not None:
            q = attn.norm_q(q)
        if attn.norm_k is not None:
            k = attn.norm_k(k)
        scale = attn.scale if isinstance(self.former, OWN_SCALE) else None
        out = self.edit(q, k, v, scale)
        if not changes:  # measured only: the model's own attention has another order of sums
            return self.former(attn, entry, **more)
        out = out.transpose(1, 2).flatten(2).to(q.dtype)
        out = attn.to_out[1](attn.to_out[0](out))
        if attn.residual_connection:
            out = out + entry
        return out / attn.rescale_output_factor if attn.rescale_output_factor != 1.0 else out


def _unwrapped(processor: Any) -> Any:
    """Somebody may have kept a processor of an earlier installation and put it back."""
    while isinstance(processor, TiaraAttnProcessor):
        processor = processor.former
    return processor


def _put_processor(attn: Attention, edit: _Edit) -> Callable[[], None]:
    former = _unwrapped(attn.processor)
    ours = TiaraAttnProcessor(former, edit)
    attn.set_processor(ours)  # type: ignore[arg-type]

    def undo() -> None:
        if attn.processor is ours:
            attn.set_processor(former)

    return undo


class _Catch(TorchFunctionMode):
    """Sends the self-attention of one module through the edit."""

    def __init__(self, edit: _Edit) -> None:
        super().__init__()
        self.edit = edit

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")
        given = {**dict(zip(names, args)), **kwargs}
        q, k, v = given["query"], given["key"], given["value"]
        plain = given.get("attn_mask") is None and not given.get("dropout_p") and not given.get("is_causal")
        if not plain or q.dim() != 4 or q.shape != k.shape or q.shape != v.shape or not self.edit.wanted(q.shape[2]):
            return func(*args, **kwargs)
        out = self.edit(q, k, v, given.get("scale"))
        config = self.edit.config
        changes = config.alpha > 0 or (config.corner_frames > 0 and config.corner_strength > 0)
        return out if changes else func(*args, **kwargs)


class TiaraHook(ModelHook):
    """Edits the attention inside whatever processor a module has, as long as that calls torch's attention.

    Args:
        edit: the attention.
    """

    def __init__(self, edit: _Edit) -> None:
        super().__init__()
        self.edit = edit

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        forward: Any = self.fn_ref.original_forward
        if not self.edit.context.active:
            return forward(*args, **kwargs)
        with _Catch(self.edit):
            return forward(*args, **kwargs)


def _put_hook(attn: Attention, edit: _Edit) -> Callable[[], None]:
    hook: Any = put_hook_on(attn, HOOK, TiaraHook(edit))
    hook.edit = edit
    return lambda: take_hook_off(attn, HOOK, hook)
