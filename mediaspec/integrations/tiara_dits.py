"""TiARA in diffusers models with one attention over space and time: where it stands, and how the edit gets there.

| model | attention that is edited | sequence |
|---|---|---|
| WanTransformer3DModel | blocks.i.attn1 | video |
| CogVideoXTransformer3DModel | transformer_blocks.i.attn1 | text, video |
| LTXVideoTransformer3DModel | transformer_blocks.i.attn1 | video |
| HunyuanVideoTransformer3DModel | transformer_blocks.i.attn, single_transformer_blocks.i.attn | video, padded text |

Attention over text or an image alone (attn2, the token refiner) is left as it is. Frames are read from the latent's
shape before each forward pass.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from diffusers import (
    CogVideoXTransformer3DModel,
    HunyuanVideoTransformer3DModel,
    LTXVideoTransformer3DModel,
    WanTransformer3DModel,
)
from diffusers.models.attention_processor import CogVideoXAttnProcessor2_0, FusedCogVideoXAttnProcessor2_0
from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoAttnProcessor2_0
from diffusers.models.transformers.transformer_ltx import LTXVideoAttnProcessor
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from torch import nn

from ..attention.tiara import TiARA
from ..kernels.tiara_bias import ROUTES
from .tiara_dit_processors import (
    CogVideoXTiaraProcessor,
    Grid,
    HunyuanVideoTiaraProcessor,
    JointEdit,
    JointProcessor,
    LTXTiaraProcessor,
    WanTiaraProcessor,
    unwrapped,
)
from .video_context import VideoContext

__all__ = ["FAMILIES", "install", "joint_attentions"]


@dataclass(frozen=True)
class _Family:
    """What is known of a model class.

    Args:
        places: regular expression of the names of its edited attentions.
        processor: ours; own: those of diffusers that it stands for.
        grid: the latent in tokens, from the model's config and the forward pass.
    """

    places: str
    processor: type[JointProcessor]
    own: tuple[type, ...]
    grid: Callable[[Any, VideoContext], Grid]


def _wan_grid(config: Any, context: VideoContext) -> Grid:
    (_, _, frames, height, width), (t, y, x) = context.sample_shape, config.patch_size
    return Grid(frames // t, height // y, width // x)


def _cogvideox_grid(config: Any, context: VideoContext) -> Grid:
    _, frames, _, height, width = context.sample_shape
    t, p = config.patch_size_t or 1, config.patch_size
    return Grid(-(-frames // t), height // p, width // p)


def _hunyuan_grid(config: Any, context: VideoContext) -> Grid:
    _, _, frames, height, width = context.sample_shape
    p = config.patch_size
    return Grid(frames // config.patch_size_t, height // p, width // p)


def _ltx_grid(config: Any, context: VideoContext) -> Grid:
    """LTX's latents come as [B, L, C], and their shape as arguments of the forward pass."""
    try:
        return Grid(context.call["num_frames"], context.call["height"], context.call["width"])
    except KeyError:
        raise ValueError(
            "this LTXVideoTransformer3DModel was called without num_frames, height and width (pipelines that take "
            "condition frames pass video_coords in their place); TiARA needs them to find the frames"
        ) from None


FAMILIES: dict[type, _Family] = {
    WanTransformer3DModel: _Family(r"^blocks\.\d+\.attn1$", WanTiaraProcessor, (WanAttnProcessor,), _wan_grid),
    CogVideoXTransformer3DModel: _Family(
        r"^transformer_blocks\.\d+\.attn1$",
        CogVideoXTiaraProcessor,
        (CogVideoXAttnProcessor2_0, FusedCogVideoXAttnProcessor2_0),
        _cogvideox_grid,
    ),
    LTXVideoTransformer3DModel: _Family(
        r"^transformer_blocks\.\d+\.attn1$", LTXTiaraProcessor, (LTXVideoAttnProcessor,), _ltx_grid
    ),
    HunyuanVideoTransformer3DModel: _Family(
        r"^(single_)?transformer_blocks\.\d+\.attn$",
        HunyuanVideoTiaraProcessor,
        (HunyuanVideoAttnProcessor2_0,),
        _hunyuan_grid,
    ),
}


def _family(model: nn.Module) -> _Family:
    for kind, family in FAMILIES.items():
        if isinstance(model, kind):
            return family
    raise ValueError(
        f"TiARA knows no attention of a {type(model).__name__}; it edits U-Nets with temporal attention "
        f"(UNetMotionModel, UNet3DConditionModel, ...) and {', '.join(kind.__name__ for kind in FAMILIES)}"
    )


def joint_attentions(model: nn.Module, config: TiARA) -> list[tuple[str, Any]]:
    """The attentions of a model over space and time that `layers` names, in order of execution.

    Raises:
        ValueError: an unknown model, an index beyond the last, or a pattern that matches none.
    """
    family = _family(model)
    found = {name: module for name, module in model.named_modules() if re.search(family.places, name)}
    kind = f"space-time attentions of {type(model).__name__}"
    return [(name, found[name]) for name in config.pick(list(found), kind)]


def install(model: nn.Module, config: TiARA, context: VideoContext) -> list[tuple[str, Callable[[], None]]]:
    """Puts the edit into every chosen attention over space and time.

    Args:
        model: a transformer of one of `FAMILIES`.
        config: settings; `route` is "auto" or one of `kernels.tiara_bias.ROUTES`. alpha = 0 stands for joint_alpha =
            0 too: whoever writes it wants no edit.
        context: of the handle.

    Returns:
        Name of each module and what takes the edit out of it again.

    Raises:
        ValueError: an unknown model, route or layer, corners, or a processor that ours cannot stand in for.
    """
    family = _family(model)
    if config.route not in ("auto", *ROUTES):
        raise ValueError(
            f"TiARA route={config.route!r} is not for joint space-time attention; {type(model).__name__} takes 'auto' "
            f"or one of {ROUTES}"
        )
    if config.route in ("columns", "split") and config.mode != "frame":
        raise ValueError(f"TiARA route={config.route!r} knows whole frames only; mode={config.mode!r} takes 'auto'")
    if config.corner_frames and config.corner_strength:
        raise ValueError(
            f"TiARA corner_frames={config.corner_frames} is for temporal attention; the joint attention of "
            f"{type(model).__name__} has no bias between frames: leave it out"
        )
    if config.alpha == 0:
        config = replace(config, joint_alpha=0.0)
    settings: Any = model.config
    sites = joint_attentions(model, config)
    for name, attn in sites:
        former = unwrapped(attn.processor)
        if type(former) not in family.own:
            raise ValueError(
                f"{name} has a {type(former).__name__}, which TiARA's processor cannot stand in for; set "
                f"{family.own[0].__name__} first"
            )

    def put(name: str, attn: Any) -> Callable[[], None]:
        former = unwrapped(attn.processor)
        edit = JointEdit(name, config, context, context.meter(name), lambda now: family.grid(settings, now))
        ours = family.processor(former, edit)
        attn.set_processor(ours)

        def undo() -> None:
            if attn.processor is ours:
                attn.set_processor(former)

        return undo

    return [(name, put(name, attn)) for name, attn in sites]
