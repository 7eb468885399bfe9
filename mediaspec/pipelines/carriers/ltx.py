"""LTX-Video (`LTXVideoTransformer3DModel`): packed tokens with a timestep and a place in time and space each.

Places are free numbers (seconds and pixels), so that references keep their true distance from the window; the clip's
oldest frame stands at 0. A distance beyond the trained length is an error, or closed by beyond="reindex".

L = F h/p w/p tokens of patch p.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ...memory.window_schedule import WindowSchedule
from ..frame_times import token_timesteps
from .window import Clip, WindowCarrier, shifted

__all__ = ["LTXCarrier"]

MASK = "encoder_attention_mask"


class LTXCarrier(WindowCarrier):
    """`LTXPipeline`, `LTXConditionPipeline` and `LTXImageToVideoPipeline` (its picture is a history frame).

    Args:
        pipe_or_model: the pipeline or a `LTXVideoTransformer3DModel`.
        frame_rate: pictures a second, which scales the places in time.
        causal_times: latent frame f begins at picture max(8 f - 7, 0), as in `LTXConditionPipeline` (weights from
            0.9.5 on); False: at picture 8 f, as in `LTXPipeline`. None is what the pipeline does.
        decode_timestep: told to codecs with timestep conditioning.
        decode_noise_scale: share of noise in what such codecs decode; None is decode_timestep.
        decode_seed: of that noise.
        settings: of `WindowCarrier`. `trained_frames` is 33 (257 pictures).

    Raises:
        ValueError: a network with more than one frame per token.

    Example:
        >>> carrier = LTXCarrier(pipe, decode_timestep=0.05, decode_noise_scale=0.025)       # doctest: +SKIP
        >>> carrier.condition("a red ball", guidance_scale=3.0)                              # doctest: +SKIP
    """

    name: ClassVar[str] = "ltx"
    model_classes: ClassVar[tuple[str, ...]] = ("LTXVideoTransformer3DModel",)
    pipeline_classes: ClassVar[tuple[str, ...]] = ("LTXPipeline", "LTXConditionPipeline", "LTXImageToVideoPipeline")
    trained: ClassVar[int] = 33
    gaps: ClassVar[Literal["close", "keep"]] = "keep"
    default_size = (512, 704)

    def __init__(
        self,
        pipe_or_model: Any,
        *,
        frame_rate: float = 25.0,
        causal_times: bool | None = None,
        decode_timestep: float = 0.0,
        decode_noise_scale: float | None = None,
        decode_seed: int = 0,
        **settings: Any,
    ) -> None:
        super().__init__(pipe_or_model, **settings)
        config = self.model.config
        if config.patch_size_t != 1:
            raise ValueError(f"patch_size_t={config.patch_size_t}; frames with levels of their own need 1")
        if not frame_rate > 0:
            raise ValueError(f"frame_rate={frame_rate}; write pictures per second, as 25")
        side = config.patch_size
        self.patch = (1, side, side)
        self.latent_channels = config.in_channels // side**2
        vae = getattr(self.pipe, "vae", None)
        self.temporal_ratio = 8 if vae is None else int(vae.temporal_compression_ratio)
        self.spatial_ratio = 32 if vae is None else int(vae.spatial_compression_ratio)
        named = type(self.pipe).__name__ == "LTXConditionPipeline"
        self.frame_rate, self.causal_times = float(frame_rate), named if causal_times is None else causal_times
        self.decode_timestep, self.decode_seed = decode_timestep, decode_seed
        self.decode_noise_scale = decode_timestep if decode_noise_scale is None else decode_noise_scale

    # ---- text, with a mask of its padding

    def _encode_text(
        self, texts: list[str], device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor | None, dict[str, Any]]:
        if getattr(self.pipe, "text_encoder", None) is None:
            raise ValueError("the carrier 'ltx' has no text encoder; give prompt_embeds, or the pipeline")
        embeds, mask, _, _ = self.pipe.encode_prompt(texts, do_classifier_free_guidance=False, device=device)
        return embeds.to(device, dtype), {MASK: mask.to(device).float()}

    def _condition_more(
        self,
        *,
        image: Tensor | None,
        prompt_attention_mask: Tensor | None = None,
        negative_prompt_attention_mask: Tensor | None = None,
        **more: Any,
    ) -> None:
        """Masks [B or 1, S] of given embeddings; without them every token counts."""
        super()._condition_more(image=image, **more)
        told = self.conditioning
        for name, mask, embeds, extra in (
            ("prompt", prompt_attention_mask, told.embeds, told.extra),
            ("negative_prompt", negative_prompt_attention_mask, told.negative, told.negative_extra),
        ):
            if mask is not None:
                if embeds is None or tuple(mask.shape) not in {tuple(embeds.shape[:2]), (1, embeds.shape[1])}:
                    wanted = "no such text" if embeds is None else f"text of shape {tuple(embeds.shape[:2])}"
                    raise ValueError(
                        f"{name}_attention_mask has shape {tuple(mask.shape)} for {wanted}; give [B, tokens]"
                    )
                extra[MASK] = mask.to(embeds.device).float().expand(len(embeds), -1)
            elif embeds is not None and MASK not in extra:
                extra[MASK] = torch.ones(embeds.shape[:2], device=embeds.device)

    # ---- a call

    def predict(self, clip: Clip, embeds: Tensor, extra: dict[str, Any]) -> Tensor:
        model, side = self.model, self.patch[1]
        rows, columns = clip.x.shape[3] // side, clip.x.shape[4] // side
        cells = clip.x.unflatten(4, (columns, side)).unflatten(3, (rows, side))  # [B, C, F, rows, p, columns, p]
        tokens = cells.permute(0, 2, 3, 5, 1, 4, 6).flatten(4).flatten(1, 3)
        times = self.times(clip)
        times = times[:, 0] if clip.one_level else token_timesteps(times, clip.x.shape[3], clip.x.shape[4], self.patch)
        with self.cached(model, embeds):
            out: Tensor = model(
                hidden_states=tokens.to(model.dtype),
                encoder_hidden_states=embeds.to(model.dtype),
                timestep=times,
                video_coords=self.coordinates(clip),
                return_dict=False,
                **extra,
            )[0]
        frames = out.float().unflatten(2, (-1, side, side)).unflatten(1, (-1, rows, columns))
        return frames.permute(0, 4, 1, 2, 5, 3, 6).flatten(5).flatten(3, 4)

    def coordinates(self, clip: Clip) -> Tensor:
        """[B, 3, L] float32 place of every token: seconds, pixel row, pixel column."""
        side, (height, width) = self.patch[1], clip.x.shape[3:]
        pictures = self.positions(clip).float() * self.temporal_ratio
        if self.causal_times:
            pictures = (pictures + 1 - self.temporal_ratio).clamp_min(0)
        seconds = pictures / self.frame_rate
        down = torch.arange(0, height, side, device=clip.x.device).float() * self.spatial_ratio
        right = torch.arange(0, width, side, device=clip.x.device).float() * self.spatial_ratio
        shape = (*seconds.shape, len(down), len(right))
        parts = (seconds[:, :, None, None], down[None, None, :, None], right[None, None, None, :])
        return torch.stack([part.expand(shape) for part in parts], 1).flatten(2)

    # ---- pictures

    def _deviation(self) -> Tensor:
        deviation: Tensor = self.vae.latents_std / self.vae.config.scaling_factor
        return deviation

    def encode(self, video: Tensor) -> Tensor:
        """Latents [B, C, t, h, w] of pictures [B, 3, 8 (t - 1) + 1, H, W]; the mode of the posterior, no noise."""
        self.check_pictures(video)
        vae = self.vae
        latents = vae.encode(video.to(self.device, vae.dtype)).latent_dist.mode().float()
        return self.scaled(latents, vae.latents_mean, self._deviation())

    def decode(self, latents: Tensor) -> Tensor:
        """Pictures [B, 3, 8 (t - 1) + 1, H, W]."""
        self.check_latents(latents)
        vae = self.vae
        plain = self.unscaled(latents.float().to(self.device), vae.latents_mean, self._deviation())
        timestep = None
        if vae.config.timestep_conditioning:
            timestep = torch.full((len(plain),), self.decode_timestep, device=plain.device, dtype=vae.dtype)
            source = torch.Generator().manual_seed(self.decode_seed)
            noise = torch.randn(plain.shape, generator=source).to(plain)
            plain = (1 - self.decode_noise_scale) * plain + self.decode_noise_scale * noise
        with self._own_noise(plain.device):
            pictures: Tensor = vae.decode(plain.to(vae.dtype), timestep, return_dict=False)[0]
        return pictures.float().clamp(-1, 1)

    def _own_noise(self, device: torch.device) -> Any:
        """Codecs that draw noise in their layers take it from the global generator, which is put back afterwards."""
        if not any(self.vae.config.decoder_inject_noise):
            return nullcontext()
        return _Seeded(self.decode_seed, device)

    # ---- levels

    def shift(self, tokens: int = 4096) -> float:
        """That of the scheduler; with shifting by size, its value for clips of that many tokens (4096 is the size at
        which the public configs have `max_shift`)."""
        config = getattr(getattr(self.pipe, "scheduler", None), "config", {})
        if not config.get("use_dynamic_shifting"):
            return super().shift()
        low, high = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
        first, last = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
        return math.exp(first + (last - first) * (tokens - low) / (high - low))

    def schedule_for(self, height: int, width: int, **settings: Any) -> WindowSchedule:
        """The schedule with the shift of its clips' size, as in `LTXPipeline` (without `shift_terminal`)."""
        if settings.get("shift") is not None:
            return self.schedule(**settings)
        made = self.schedule(**{**settings, "shift": 1.0})
        frames = (made.net_frames or made.w) + made.references.last
        _, rows, columns = self.latent_shape(height, width)
        return shifted(made, self.shift(frames * rows * columns))


class _Seeded:
    """The global generators under a seed of our own, and as they were afterwards."""

    def __init__(self, seed: int, device: torch.device) -> None:
        devices = [device] if device.type == "cuda" else []
        self.seed, self.fork = seed, torch.random.fork_rng(devices=devices)

    def __enter__(self) -> None:
        self.fork.__enter__()
        torch.manual_seed(self.seed)

    def __exit__(self, *error: Any) -> None:
        self.fork.__exit__(*error)
