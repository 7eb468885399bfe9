"""HunyuanVideo FramePack (`HunyuanVideoFramepackTransformer3DModel`, arXiv:2504.12626): history packed at three rates.

    vanilla                   [first frame][16 at 4x][2 at 2x][1][ window ]         forwards, also the F1 weights
    inverted_anti_drifting    [first frame][ gap ][ window ][1][2 at 2x][16 at 4x]  from the end, history is the future

The gap of the second is the distance to the first frame, at most two windows (three for the last window of the video,
which is made first). Windows are chunks of 9 latent frames at one level; the network returns the velocity.

Empty slots: the class can be called with all groups only, and its pipeline feeds zeros for frames that do not exist
(empty="zeros", what the released weights see there). empty="skip" keeps attention from tokens without a real frame.

B videos, C channels, n frames of the window, p history frames, S text tokens, V picture tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ...memory.base import FrameMemory, Kernel, MemoryRead
from ...memory.packers import kernel_of
from ...memory.references import ReferenceRule
from ...memory.registry import memory_for
from ...memory.window_schedule import WindowSchedule
from .base import Carrier
from .overlap_decoder import OverlapDecoder
from .packed import PackedCarrier, dynamic_shift
from .packed_history import Slots, anchored, check_groups, check_sizes, lay_out, shown
from .signatures import extends

__all__ = ["FramePackCarrier"]

SAMPLING = ("vanilla", "inverted_anti_drifting")
POOLED, MASK = "pooled_projections", "encoder_attention_mask"
KERNELS: tuple[Kernel, ...] = (kernel_of("k4"), kernel_of("k2"), kernel_of("k1"))
"""Of the groups, oldest first; fixed in the class."""


class FramePackCarrier(PackedCarrier):
    """`HunyuanVideoFramepackPipeline` and its transformer.

    Runs are chained by the memory: give the latents of one run as `history` of the next (the oldest is the first
    frame), or keep the memory itself.

    Args:
        pipe_or_model: the pipeline or a `HunyuanVideoFramepackTransformer3DModel`.
        sampling_type: "vanilla", or "inverted_anti_drifting" with schedules that go from the end; a history of that
            one is a single frame, the one before the video.
        history_sizes: slots at 4x, 2x and full resolution. The released weights know [16, 2, 1].
        latent_window_size: latent frames of a window. The released weights know 9; users report less colour drift
            with 18.
        empty: "zeros" or "skip", see the head of this file.
        settings: of `PackedCarrier`.

    Raises:
        ValueError: a network without history or picture embedding, unknown settings.

    Example:
        >>> carrier = FramePackCarrier(pipe, sampling_type="vanilla")                        # doctest: +SKIP
        >>> carrier.condition("a red ball", guidance_scale=9.0, image=picture)               # doctest: +SKIP
        >>> noise = FrameNoise(torch.tensor([0]), carrier.latent_shape(480, 832))            # doctest: +SKIP
        >>> video = generate(carrier, carrier.schedule(), carrier.sampler(), noise,          # doctest: +SKIP
        ...                  num_frames=36, history=carrier.encode(picture[:, :, None]))
    """

    name: ClassVar[str] = "framepack"
    model_classes: ClassVar[tuple[str, ...]] = ("HunyuanVideoFramepackTransformer3DModel",)
    pipeline_classes: ClassVar[tuple[str, ...]] = ("HunyuanVideoFramepackPipeline",)
    preset: ClassVar[str] = "framepack"
    guidance_name: ClassVar[str] = "true_cfg_scale"
    reads_picture = True

    def __init__(
        self,
        pipe_or_model: Any,
        *,
        sampling_type: Literal["vanilla", "inverted_anti_drifting"] = "vanilla",
        history_sizes: Sequence[int] = (16, 2, 1),
        latent_window_size: int = 9,
        empty: Literal["zeros", "skip"] = "zeros",
        **settings: Any,
    ) -> None:
        super().__init__(pipe_or_model, **settings)
        config = self.model.config
        if any(getattr(self.model, part, None) is None for part in ("clean_x_embedder", "image_projection")):
            raise ValueError(
                f"{type(self.model).__name__} has no history or no picture embedding; FramePack needs a "
                "HunyuanVideoFramepackTransformer3DModel with has_clean_x_embedder=True and has_image_proj=True"
            )
        if sampling_type not in SAMPLING:
            raise ValueError(f"sampling_type={sampling_type!r}; allowed are {', '.join(SAMPLING)}")
        if empty not in ("zeros", "skip"):
            raise ValueError(f"empty={empty!r}; write 'zeros' or 'skip'")
        if latent_window_size < 1:
            raise ValueError(f"latent_window_size={latent_window_size}; at least 1 latent frame, usually 9")
        self.inverted, self.empty, self.window = sampling_type == SAMPLING[1], empty, latent_window_size
        self.history_sizes = check_sizes(history_sizes, (1, 1, 1))
        self.patch = (config.patch_size_t, config.patch_size, config.patch_size)
        self.latent_channels = config.in_channels
        self.temporal_ratio = int(getattr(self.pipe, "vae_scale_factor_temporal", 4))
        self.spatial_ratio = int(getattr(self.pipe, "vae_scale_factor_spatial", 8))

    # ---- texts and the picture

    @property
    def default_guidance(self) -> float:
        """6, which the network is told, also a bare one."""
        return 6.0 if self.pipe is None else super().default_guidance

    def calls_of(self, guidance_scale: float) -> int:
        """One: the network is distilled for its guidance (true_cfg_scale above 1 makes it two)."""
        return 1

    @extends(Carrier.condition)
    def condition(
        self,
        prompt: str | Sequence[str] | None = None,
        negative_prompt: str | Sequence[str] | None = None,
        guidance_scale: float = 6.0,
        *,
        true_cfg_scale: float = 1.0,
        image_embeds: Tensor | None = None,
        pooled_prompt_embeds: Tensor | None = None,
        negative_pooled_prompt_embeds: Tensor | None = None,
        prompt_attention_mask: Tensor | None = None,
        negative_prompt_attention_mask: Tensor | None = None,
        **shared: Any,
    ) -> None:
        """Encodes texts and the picture of the next calls.

        Args:
            guidance_scale: told to the network, which is distilled for it; costs nothing.
            true_cfg_scale: classifier-free guidance; above 1 asks the network twice.
            image_embeds: [B or 1, V, D] instead of `image`, which is for the picture encoder here. Without both the
                call has no picture tokens; the pipeline always gives some.
            pooled_prompt_embeds: [B or 1, P], belongs to prompt_embeds, as prompt_attention_mask [B or 1, S] does
                (None is all tokens); likewise negative ones.
            prompt, negative_prompt, shared: as in `Carrier.condition`.

        Raises:
            ValueError: see there; embeddings, masks or pictures of another shape.
        """
        for key, scale in (("guidance_scale", guidance_scale), ("true_cfg_scale", true_cfg_scale)):
            if not math.isfinite(scale):
                raise ValueError(f"{key}={scale!r}; write a finite number")
        beside = {
            "prompt": (pooled_prompt_embeds, prompt_attention_mask),
            "negative_prompt": (negative_pooled_prompt_embeds, negative_prompt_attention_mask),
        }
        super().condition(
            prompt, negative_prompt, true_cfg_scale, guidance=float(guidance_scale), image_embeds=image_embeds,
            beside=beside, **shared,
        )  # fmt: skip

    def _encode_text(
        self, texts: list[str], device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor | None, dict[str, Any]]:
        if getattr(self.pipe, "text_encoder", None) is None:
            raise ValueError(
                f"the carrier {self.name!r} has no text encoder here; give prompt_embeds and the pooled ones, or the "
                "pipeline"
            )
        embeds, pooled, mask = self.pipe.encode_prompt(texts, device=device)
        return embeds.to(device, dtype), {POOLED: pooled.to(device, dtype), MASK: mask.to(device, dtype)}

    def _condition_more(
        self, *, image: Tensor | None, guidance: float = 6.0, image_embeds: Tensor | None = None,
        beside: dict[str, tuple[Tensor | None, Tensor | None]] | None = None, **more: Any,
    ) -> None:  # fmt: skip
        """Pooled texts and masks of given embeddings, picture tokens, and the number that the network is told."""
        super()._condition_more(image=None, **more)
        told, batch, device, dtype = self.conditioning, more["batch"], more["device"], more["dtype"]
        shared: dict[str, Any] = {"image_embeds": self._picture_tokens(image, image_embeds, batch, device, dtype)}
        if self.model.config.guidance_embeds:
            shared["guidance"] = torch.full((batch,), guidance, dtype=dtype, device=device) * 1000.0
        for name, embeds, extra in (
            ("prompt", told.embeds, told.extra), ("negative_prompt", told.negative, told.negative_extra)
        ):  # fmt: skip
            if embeds is not None and not extra:
                extra |= _beside(name, embeds, *(beside or {}).get(name, (None, None)))
            extra |= shared

    def _picture_tokens(
        self, image: Tensor | None, embeds: Tensor | None, batch: int, device: torch.device, dtype: torch.dtype
    ) -> Tensor:
        """[B, V, D]; V is 0 without a picture."""
        if embeds is None and image is not None:
            if getattr(self.pipe, "image_encoder", None) is None:
                raise ValueError("image needs the pipeline's image encoder; give image_embeds, or the pipeline")
            if image.dim() != 4 or image.shape[1] != 3:
                raise ValueError(f"image has shape {tuple(image.shape)}; give [B, 3, H, W] in -1..1")
            embeds = self.pipe.encode_image(image, device=device)
        width = self.model.config.image_proj_dim
        if embeds is None:
            embeds = torch.zeros(1, 0, width)
        if embeds.dim() != 3 or embeds.shape[0] not in (1, batch) or embeds.shape[2] != width:
            raise ValueError(f"image_embeds has shape {tuple(embeds.shape)}; give [{batch} or 1, tokens, {width}]")
        return embeds.to(device, dtype).expand(batch, -1, -1)

    # ---- pictures

    def encode(self, video: Tensor) -> Tensor:
        """Latents [B, C, t, h, w] of pictures [B, 3, 4 (t - 1) + 1, H, W]; the mode of the posterior, no noise."""
        self.check_pictures(video)
        vae = self.vae
        latents: Tensor = vae.encode(video.to(self.device, vae.dtype)).latent_dist.mode().float()
        return latents * vae.config.scaling_factor

    def decode(self, latents: Tensor) -> Tensor:
        """Pictures [B, 3, 4 (t - 1) + 1, H, W]."""
        self.check_latents(latents)
        vae = self.vae
        plain = latents.float() / vae.config.scaling_factor
        pictures: Tensor = vae.decode(plain.to(self.device, vae.dtype), return_dict=False)[0]
        return pictures.float()

    def decoder(self) -> Any:
        """A window at a time, also of a video that was made from its end."""
        return OverlapDecoder(self, piece=self.window)

    # ---- how it is rolled out

    def default_schedule(self) -> tuple[str, dict[str, Any]]:
        return ("framepack_inverted" if self.inverted else self.preset), {"frames": self.window}

    def refer(self, schedule: WindowSchedule) -> WindowSchedule:
        groups = tuple(zip(self.history_sizes, KERNELS))
        return schedule.with_(references=ReferenceRule.packed(groups, reverse=self.inverted))

    def default_memory(self, **settings: Any) -> FrameMemory | None:
        """Raw frames in this carrier's history sizes.

        Args:
            settings: `sink`, frames at the beginning that are kept (1).
        """
        sink = settings.pop("sink", 1)
        if settings:
            return super().default_memory(**settings)
        return memory_for(ReferenceRule.packed(tuple(zip(self.history_sizes, KERNELS)), sink=sink))

    def shift(self, frames: int, height: int | None, width: int | None) -> float:
        scheduler = getattr(self.pipe, "scheduler", None)
        if scheduler is None:
            return 1.0
        tokens = frames * self.frame_tokens(height or self.default_size[0], width or self.default_size[1])
        return dynamic_shift(scheduler.config, tokens, most=7.0)

    def dimensions(self) -> dict[str, int] | None:
        config = self.model.config
        dim = config.num_attention_heads * config.attention_head_dim
        return {
            "dim": dim,
            "ffn": int(config.mlp_ratio * dim),
            "layers": config.num_layers + config.num_single_layers,
        }

    # ---- a call

    def __call__(
        self, x: Tensor, levels: Tensor, frame_ids: Tensor, read: MemoryRead, actions: Tensor | None
    ) -> Tensor:
        self.check_actions(actions)
        self.check_call(x, levels, frame_ids)
        timestep = self.one_timestep(levels, x.shape[0], x.device)
        clean, twice, four, window = self.slots(x, frame_ids, read)
        history = {
            "indices_latents": window,
            "latents_clean": clean.frames.to(self.dtype),
            "indices_latents_clean": clean.indices,
            "latents_history_2x": twice.frames.to(self.dtype),
            "indices_latents_history_2x": twice.indices,
            "latents_history_4x": four.frames.to(self.dtype),
            "indices_latents_history_4x": four.indices,
        }

        def predict(embeds: Tensor | None, extra: dict[str, Any]) -> Tensor:
            out: Tensor = self.model(
                hidden_states=x.to(self.dtype), timestep=timestep, encoder_hidden_states=embeds, return_dict=False,
                **extra, **history,
            )[0]  # fmt: skip
            return out

        with self._hidden((four, twice, clean)):
            return self.conditioning.guided(predict).to(x.dtype)

    def slots(self, x: Tensor, frame_ids: Tensor, read: MemoryRead) -> tuple[Slots, Slots, Slots, Tensor]:
        """What the network sees beside x: the groups at full resolution, 2x and 4x, and the window's positions [n].

        Raises:
            ValueError: frames on the wrong side of the window, or more than there are slots.
        """
        check_groups(read, self.history_sizes, KERNELS)
        beside, capacity = shown(read, x, frame_ids), sum(self.history_sizes)
        places = torch.arange(x.shape[2], device=x.device)
        if not self.inverted:
            if beside.future.shape[2]:
                raise ValueError(
                    f"the memory shows frames {beside.future_ids[0].tolist()} after the window; make the carrier with "
                    "sampling_type='inverted_anti_drifting' for videos from their end"
                )
            anchor, past = anchored(beside.past, beside.past_ids, capacity, zeros=True)
            four, twice, one = lay_out(past, self.history_sizes, 1, at_end=True, zeros=True)
            window = places + 1 + capacity
        else:
            if beside.past.shape[2] > 1:
                raise ValueError(
                    f"the memory shows frames {beside.past_ids[0].tolist()} before the window; a video from its end "
                    "has one frame before it, give the last one alone: image=, or history[:, :, -1:]"
                )
            anchor, _ = anchored(beside.past, beside.past_ids, 0, zeros=True)
            before = int(beside.past_ids[0, 0]) if beside.past.shape[2] else -1
            windows = 2 if beside.future.shape[2] else 3
            gap = min(int(frame_ids.min()) - before - 1, windows * self.window)
            window = places + 1 + gap
            first = 1 + gap + x.shape[2]
            one, twice, four = lay_out(beside.future, self.history_sizes[::-1], first, at_end=False, zeros=True)
        clean = Slots.cat((anchor, one))
        assert clean is not None and twice is not None and four is not None  # zeros stand for what is not there
        return clean, twice, four, window

    @contextmanager
    def _hidden(self, groups: tuple[Slots, ...]) -> Iterator[None]:
        """Keeps attention from tokens without a real frame while the network is called, with empty="skip".

        The class has no such argument; hooks of its blocks add the mask, and are gone afterwards.

        Args:
            groups: 4x, 2x, full resolution: the order of the network's tokens.
        """
        if self.empty == "zeros" or all(bool(group.real.all()) for group in groups):
            yield
            return
        seen = torch.cat([_token_mask(group, kernel) for group, kernel in zip(groups, KERNELS)])

        def mask(module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            tokens, text, temb, allowed, *rest = args
            if allowed is None:
                count = tokens.shape[1] + text.shape[1]
                allowed = torch.ones(tokens.shape[0], 1, 1, count, dtype=torch.bool, device=tokens.device)
            allowed = allowed.clone()
            allowed[..., : len(seen)] &= seen.to(allowed.device)
            return (tokens, text, temb, allowed, *rest)

        blocks = [*self.model.transformer_blocks, *self.model.single_transformer_blocks]
        handles = [block.register_forward_pre_hook(mask) for block in blocks]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _beside(name: str, embeds: Tensor, pooled: Tensor | None, mask: Tensor | None) -> dict[str, Tensor]:
    """Pooled text [B, P] and mask [B, S] that go with embeddings [B, S, D], by name of the network's argument."""
    batch, tokens = embeds.shape[:2]
    if pooled is None or pooled.dim() != 2 or pooled.shape[0] not in (1, batch):
        raise ValueError(
            f"{name}_embeds has shape {tuple(embeds.shape)} with pooled embeddings of "
            f"{None if pooled is None else tuple(pooled.shape)}; FramePack takes [B, tokens, channels] and [B or 1, P]"
        )
    if mask is None:
        mask = embeds.new_ones(1, tokens)
    if tuple(mask.shape) not in {(batch, tokens), (1, tokens)}:
        raise ValueError(f"a mask of shape {tuple(mask.shape)} for text tokens {(batch, tokens)}")
    return {key: value.to(embeds).expand(batch, -1) for key, value in ((POOLED, pooled), (MASK, mask))}


def _token_mask(group: Slots, kernel: Kernel) -> Tensor:
    """[L] bool: whether a token's block holds a real frame."""
    height, width = group.frames.shape[3:]
    across = -(-height // kernel[1]) * -(-width // kernel[2])
    missing = -len(group.real) % kernel[0]
    real = torch.nn.functional.pad(group.real, (0, missing)).unflatten(0, (-1, kernel[0])).any(1)
    return real.repeat_interleave(across)
