"""Where a 2D+1D model attends along time, and hooks that run those attentions over windows or bands of frames.

`AnimateDiffTransformer3D` adds a position to every frame, then calls `attn1` (and `attn2`) on [M, N, C] rows. The
hooks here take the positions out of that call and give them back inside each attention, so that a sampler may cut the
row into clips that each begin at position 0. Processors set on the attentions see the clips: TiARA with N = window
works on top. Hooks go through diffusers' `HookRegistry` on instances; closing restores bit-equal output.
M rows (guidance halves times positions), N frames, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from diffusers.hooks import HookRegistry, ModelHook
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.attention_processor import Attention
from diffusers.models.unets.unet_motion_model import AnimateDiffTransformer3D
from torch import Tensor, nn

__all__ = ["TemporalSite", "hooked", "temporal_sites"]

HOOK = "mediaspec_long_video"


@dataclass
class TemporalSite:
    """One attention along time.

    Args:
        name: module path inside the model.
        attention: the `Attention` module.
        block: its transformer block. motion: the motion module around it.
        size: (h, w) of the rows in the running call.
        positions: adds the positions of frames 0..n-1 to a clip [M, n, C]; None where the block has none.
    """

    name: str
    attention: Attention
    block: BasicTransformerBlock
    motion: AnimateDiffTransformer3D
    size: tuple[int, int] = (0, 0)
    positions: Callable[[Tensor], Tensor] | None = None


def temporal_sites(model: nn.Module) -> list[TemporalSite]:
    """All self-attentions along time of a `UNetMotionModel`.

    Raises:
        ValueError: none is there, or diffusers' own FreeNoise is switched on and has replaced the blocks.
    """
    sites = []
    for path, motion in model.named_modules():
        if not isinstance(motion, AnimateDiffTransformer3D):
            continue
        for i, block in enumerate(motion.transformer_blocks):
            if not isinstance(block, BasicTransformerBlock):
                raise ValueError(
                    f"{path}.transformer_blocks.{i} is a {type(block).__name__}; call disable_free_noise() on the "
                    "pipeline first (or take implementation='diffusers', which runs on diffusers' own FreeNoise)"
                )
            for name in ("attn1", "attn2"):
                attention = getattr(block, name, None)
                if attention is not None and not attention.is_cross_attention:
                    sites.append(TemporalSite(f"{path}.transformer_blocks.{i}.{name}", attention, block, motion))
    if not sites:
        raise ValueError(f"{type(model).__name__} has no attention along time that could be cut into windows")
    return sites


class _Around(ModelHook):
    """Runs a function around a module's forward."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.fn_ref.original_forward, *args, **kwargs)


# (site, attend, hidden [M, N, C] without positions) -> [M, N, C];
# attend(clip [M, n, C]) runs the attention on a clip at positions 0..n-1
Run = Callable[[TemporalSite, Callable[..., Tensor], Tensor], Tensor]


@contextmanager
def hooked(model: nn.Module, run: Run) -> Iterator[list[TemporalSite]]:
    """While it is open, `run` replaces every attention along time.

    Args:
        model: a `UNetMotionModel`.
        run: gets the site, a function that runs the attention on one clip, and the whole row of frames.
    """
    sites = temporal_sites(model)
    touched: list[nn.Module] = []
    handles = []

    def put(module: nn.Module, function: Callable[..., Any]) -> Callable[..., Any]:
        hook = _Around(function)
        HookRegistry.check_if_exists_or_initialize(module).register_hook(hook, HOOK)
        touched.append(module)
        original: Any = hook.fn_ref.original_forward  # loads offloaded weights, as the forward does
        return original  # type: ignore[no-any-return]

    def without_positions(_forward: Callable[..., Tensor], hidden: Tensor) -> Tensor:
        return hidden

    def around(site: TemporalSite) -> Callable[..., Tensor]:
        def forward(original: Callable[..., Tensor], hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            def attend(clip: Tensor) -> Tensor:
                placed: Tensor = original(clip if site.positions is None else site.positions(clip), *args, **kwargs)
                return placed

            return run(site, attend, hidden_states)

        return forward

    def note_size(motion: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        for site in sites:
            if site.motion is motion:
                site.size = tuple(hidden.shape[-2:])

    try:
        for motion in {id(site.motion): site.motion for site in sites}.values():
            handles.append(motion.register_forward_pre_hook(note_size, with_kwargs=True))
        for block in {id(site.block): site.block for site in sites}.values():
            if block.pos_embed is not None:
                positions = put(block.pos_embed, without_positions)
                for site in sites:
                    if site.block is block:
                        site.positions = positions
        for site in sites:
            put(site.attention, around(site))
        yield sites
    finally:
        for handle in handles:
            handle.remove()
        for module in touched:
            HookRegistry.check_if_exists_or_initialize(module).remove_hook(HOOK, recurse=False)
