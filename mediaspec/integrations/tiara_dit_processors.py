"""Processors that put TiARA's bias into the joint attention of Wan, CogVideoX, LTX-Video and HunyuanVideo.

Each makes queries, keys and values as the model's own processor does, and puts `kernels.tiara_bias` in the middle;
wherever TiARA is not to act, the model's own processor runs.

Attention backends: "native" and torch's own are served by the routes of `kernels.tiara_bias`. With another backend
("flash", "xformers", ...) and with `TiARA(route="columns")` the backend itself runs, on queries and keys with frame
codes. Sage kernels quantise keys and so the codes; there the own routes run.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_ltx import apply_rotary_emb as apply_ltx_rotary_emb
from torch import Tensor

from ..attention.frame_row import FrameRows
from ..attention.tiara import FEWEST_FRAMES, TiARA
from ..kernels.tiara_bias import FrameLayout, frame_columns, framed_attention
from ..pipelines.joint_projection import cogvideox_qkv, hunyuan_qkv, is_fused
from .video_context import Meter, VideoContext, clock

__all__ = [
    "CogVideoXTiaraProcessor",
    "Grid",
    "HunyuanVideoTiaraProcessor",
    "JointEdit",
    "JointProcessor",
    "LTXTiaraProcessor",
    "WanTiaraProcessor",
    "is_foreign",
    "unwrapped",
]


class Grid(NamedTuple):
    """A latent in tokens."""

    frames: int
    height: int
    width: int


class JointEdit:
    """The edited attention of one module: its measured rows, its meter, its settings.

    Args:
        name: of the module, for messages.
        config: settings; context: of the handle; meter: of the module.
        grid: the latent in tokens of the forward pass that is running.
    """

    def __init__(
        self, name: str, config: TiARA, context: VideoContext, meter: Meter, grid: Callable[[VideoContext], Grid]
    ) -> None:
        self.name, self.config, self.context, self.meter, self._grid = name, config, context, meter, grid
        self.rows = FrameRows(config)

    def layout(self, tokens: int, start: int = 0) -> FrameLayout | None:
        """Where the frames of this call stand; None where it is not edited (short clips count as reached).

        Args:
            tokens: video tokens of the sequence; start: text tokens before them.

        Raises:
            ValueError: the sequence is not the whole video.
        """
        if not self.context.active:
            return None
        grid = self._grid(self.context)
        if grid.frames * grid.height * grid.width != tokens:
            raise ValueError(
                f"{self.name} sees {tokens} video tokens and the latent has {grid.frames} x {grid.height} x "
                f"{grid.width}; TiARA needs the whole video in one sequence, without condition tokens beside it and "
                "not split over devices"
            )
        if grid.frames < FEWEST_FRAMES:
            self.meter.seen = True
            return None
        return FrameLayout(grid.frames, grid.height * grid.width, start, grid.width)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, layout: FrameLayout, key_mask: Tensor | None, backend: Any
    ) -> Tensor | None:
        """[B, H, L, D] three times to [B, H, L, D]; None where joint_alpha = 0 and the row was only measured."""
        context, config = self.context, self.config
        q, k = q.to(v.dtype), k.to(v.dtype)  # under autocast norms and rotation give float32
        started = clock(q) if context.measure else 0.0
        found = self.rows.edit(
            q, k, layout, step=context.step, run=context.run, branch=context.branch, key_mask=key_mask
        )
        self.meter.add(found.means)
        if not self.meter.seen:  # written once: a compiled model would be compiled again for every change
            self.meter.seen = True
        out: Tensor | None = None
        if config.joint_alpha > 0:
            out = self._attend(q, k, v, found.delta, layout, key_mask, backend, found.limit)
        if context.measure:
            self.meter.seconds += clock(q) - started
        return out

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        delta: Tensor,
        layout: FrameLayout,
        key_mask: Tensor | None,
        backend: Any,
        limit: float,
    ) -> Tensor:
        config = self.config
        foreign = config.route == "auto" and config.mode == "frame" and is_foreign(backend)
        if backend is not None and (foreign or config.route == "columns"):
            scale = q.shape[-1] ** -0.5
            wide = frame_columns(q, k, v, delta, layout, scale, key_mask)
            wide_q, wide_k, wide_v = (one.transpose(1, 2) for one in wide)
            out = dispatch_attention_fn(wide_q, wide_k, wide_v, scale=scale, backend=backend)
            return out[..., : q.shape[-1]].transpose(1, 2)
        return framed_attention(
            q,
            k,
            v,
            delta,
            layout,
            mode=config.mode,
            radius=config.radius,
            key_mask=key_mask,
            delta_limit=limit,
            route=config.route,
        )


def is_foreign(backend: Any) -> bool:
    """A backend outside of torch that does not quantise its keys."""
    name = str(getattr(backend, "value", backend) or "native").lower()
    return not (name.startswith(("native", "_native")) or "sage" in name)


class JointProcessor:
    """What the four processors share. Backend and parallel settings are those of the processor it stands for.

    Args:
        former: the model's own processor, run whenever a call is not edited.
        edit: the attention.
    """

    def __init__(self, former: Any, edit: JointEdit) -> None:
        self.former, self.edit = former, edit
        self.context = edit.context

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copied model is the plain one: nobody holds a handle to it."""
        return copy.deepcopy(self.former, memo)

    def __getattr__(self, name: str) -> Any:
        if name in ("_attention_backend", "_parallel_config"):  # CogVideoX's processor has neither
            return getattr(self.former, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("_attention_backend", "_parallel_config"):
            setattr(self.former, name, value)
        else:
            super().__setattr__(name, value)

    def _layout(self, tokens: int, start: int = 0) -> FrameLayout | None:
        layout = self.edit.layout(tokens, start)
        if layout is not None and getattr(self.former, "_parallel_config", None) is not None:
            raise ValueError(
                f"{self.edit.name} runs with context parallelism, which shows a part of the video to each device; "
                "TiARA needs all of it: disable it, or remove TiARA"
            )
        return layout

    def _run(
        self, q: Tensor, k: Tensor, v: Tensor, layout: FrameLayout, key_mask: Tensor | None = None
    ) -> Tensor | None:
        """[B, H, L, D] to [B, L, H * D]; None where the model's own attention has to run."""
        out = self.edit(q, k, v, layout, key_mask, getattr(self.former, "_attention_backend", None))
        return None if out is None else out.transpose(1, 2).flatten(2).to(q.dtype)


def _heads(attn: Any, *projected: Tensor) -> list[Tensor]:
    """[B, L, H * D] to [B, L, H, D]."""
    return [one.unflatten(2, (attn.heads, -1)) for one in projected]


class WanTiaraProcessor(JointProcessor):
    """Self-attention of Wan: norms over all heads, rotation of neighbouring channels."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """See `WanAttnProcessor`; hidden_states [B, L, C]."""

        def plain() -> Tensor:
            return self.former(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)

        if encoder_hidden_states is not None or attention_mask is not None or attn.add_k_proj is not None:
            return plain()
        layout = self._layout(hidden_states.shape[1])
        if layout is None:
            return plain()
        if attn.fused_projections:
            q, k, v = attn.to_qkv(hidden_states).chunk(3, -1)
        else:
            q, k, v = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
        q, k, v = _heads(attn, attn.norm_q(q), attn.norm_k(k), v)
        if rotary_emb is not None:
            q, k = _rotated_pairs(q, *rotary_emb), _rotated_pairs(k, *rotary_emb)
        out = self._run(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), layout)
        return plain() if out is None else attn.to_out[1](attn.to_out[0](out))


def _rotated_pairs(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Channels 2i and 2i + 1 of x [B, L, H, D] as one complex number, turned; tables hold every entry twice."""
    real, imaginary = x[..., 0::2], x[..., 1::2]
    cosine, sine = cosine[..., 0::2], sine[..., 1::2]
    turned = (real * cosine - imaginary * sine, real * sine + imaginary * cosine)
    return torch.stack(turned, -1).flatten(-2).type_as(x)


class LTXTiaraProcessor(JointProcessor):
    """Self-attention of LTX-Video: norms and rotation over all heads at once."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """See `LTXVideoAttnProcessor`; hidden_states [B, L, C]."""

        def plain() -> Tensor:
            return self.former(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)

        layout = None
        if encoder_hidden_states is None and attention_mask is None:
            layout = self._layout(hidden_states.shape[1])
        if layout is None:
            return plain()
        q, k = attn.norm_q(attn.to_q(hidden_states)), attn.norm_k(attn.to_k(hidden_states))
        if image_rotary_emb is not None:
            q, k = apply_ltx_rotary_emb(q, image_rotary_emb), apply_ltx_rotary_emb(k, image_rotary_emb)
        q, k, v = (one.transpose(1, 2) for one in _heads(attn, q, k, attn.to_v(hidden_states)))
        out = self._run(q, k, v, layout)
        return plain() if out is None else attn.to_out[1](attn.to_out[0](out))


class CogVideoXTiaraProcessor(JointProcessor):
    """Joint attention of CogVideoX: text first, projected by the same weights, not rotated."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> tuple[Tensor, Tensor]:
        """See `CogVideoXAttnProcessor2_0`; hidden_states [B, F P, C], encoder_hidden_states [B, S, C]."""

        def plain() -> tuple[Tensor, Tensor]:
            return self.former(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)

        text = encoder_hidden_states.shape[1]
        layout = None if attention_mask is not None else self._layout(hidden_states.shape[1], text)
        if layout is None:
            return plain()
        fused = is_fused(self.former)
        q, k, v = cogvideox_qkv(attn, encoder_hidden_states, hidden_states, image_rotary_emb, fused=fused)
        out = self._run(q, k, v, layout)
        if out is None:
            return plain()
        out = attn.to_out[1](attn.to_out[0](out))
        return out[:, text:], out[:, :text]


class HunyuanVideoTiaraProcessor(JointProcessor):
    """Joint attention of HunyuanVideo: video first, text last and padded, own or shared projections."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> tuple[Tensor, Tensor | None]:
        """See `HunyuanVideoAttnProcessor2_0`; hidden_states [B, F P, C], attention_mask bool [B, 1, 1, L]."""

        def plain() -> tuple[Tensor, Tensor | None]:
            return self.former(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)

        count = hidden_states.shape[1]
        masked = attention_mask is not None
        if encoder_hidden_states is None or (masked and not _is_key_mask(attention_mask)):
            return plain()
        layout = self._layout(count)
        if layout is None:
            return plain()
        shared = attn.add_q_proj is None
        stream = torch.cat([hidden_states, encoder_hidden_states], 1) if shared else hidden_states
        q, k, v = hunyuan_qkv(attn, stream, image_rotary_emb, video=count if shared else None)
        if not shared:
            own = hunyuan_qkv(attn, encoder_hidden_states, added=True)
            q, k, v = (torch.cat(pair, 1) for pair in zip((q, k, v), own))
        key_mask = attention_mask[:, 0, 0] if attention_mask is not None else None
        out = self._run(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), layout, key_mask)
        if out is None:
            return plain()
        video, text = out[:, :count], out[:, count:]
        if getattr(attn, "to_out", None) is not None:
            video = attn.to_out[1](attn.to_out[0](video))
        if getattr(attn, "to_add_out", None) is not None:
            text = attn.to_add_out(text)
        return video, text


def _is_key_mask(mask: Tensor | None) -> bool:
    """Whether a mask hides keys from everybody alike."""
    return mask is not None and mask.dtype == torch.bool and mask.dim() == 4 and mask.shape[1:3] == (1, 1)


def unwrapped(processor: Any) -> Any:
    """Somebody may have kept a processor of an earlier installation and put it back."""
    while isinstance(processor, JointProcessor):
        processor = processor.former
    return processor
