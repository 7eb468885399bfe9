"""A diffusers text-to-video pipeline as the samplers see it: text in, one guided model call, latents to pictures.

One class per family: `UNetMotionDenoiser` for AnimateDiff pipelines (UNetMotionModel), `WanDenoiser` for Wan
pipelines. Both use the pipeline's own components and methods; nothing is copied or changed.
C channels, n frames of a call, h x w latents, S text tokens, D text channels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import AnimateDiffPipeline, UNetMotionModel, WanPipeline
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d
from torch import Tensor

from .frame_times import frame_times, token_timesteps
from .samplers.base import FrameText

__all__ = ["OneText", "UNetMotionDenoiser", "WanDenoiser", "denoiser_for"]


@dataclass(frozen=True)
class OneText:
    """The same text [1, S, D] for every frame."""

    text: Tensor

    def embeddings(self, frames: Tensor, step_fraction: float | Tensor) -> Tensor:
        return self.text.expand(len(frames), -1, -1)


class _Denoiser:
    """What both families share.

    Args:
        base: the pipeline.
        guidance_scale: classifier-free guidance; 1 or less makes one model row per frame instead of two.
    """

    has_temporal_attention = False
    model: Any  # UNetMotionModel or WanTransformer3DModel
    window: int
    text: FrameText
    negative: Tensor | None

    def __init__(self, base: Any, guidance_scale: float) -> None:
        self.base, self.guidance_scale = base, guidance_scale
        self.device: torch.device = base._execution_device
        self.calls = 0
        self.attention: Any = None
        self.num_steps = 0

    @property
    def guides(self) -> bool:
        return self.guidance_scale > 1

    def begin_call(self, fraction: float | Tensor) -> None:
        """Counts a call and tells `attention`, what `mediaspec.enable` returned, the step of the noisiest frame."""
        self.calls += 1
        if self.attention is not None:
            done = float(fraction.min()) if isinstance(fraction, Tensor) else fraction
            self.attention.set_step(min(int(done * self.num_steps + 1e-6), self.num_steps - 1), self.num_steps)

    def fingerprint(self) -> str:
        """Short hash of the networks' dtypes and first weights, and of the attention processors and hooks on the
        denoiser, in some milliseconds: two runs that share a folder must agree on it."""
        digest = hashlib.sha256(type(self.model).__name__.encode())
        for part, network in sorted(self.base.components.items()):
            for name, weight in network.named_parameters() if isinstance(network, torch.nn.Module) else ():
                digest.update(f"{part}.{name}{tuple(weight.shape)}{weight.dtype}".encode())
                if weight.device.type != "meta":
                    digest.update(str(weight.detach().flatten()[:4].float().tolist()).encode())
        for name, module in self.model.named_modules():
            hooks = getattr(getattr(module, "_diffusers_hook", None), "hooks", {})
            for part in (getattr(module, "processor", None), *hooks.values()):
                if part is not None:
                    config = getattr(getattr(part, "edit", part), "config", None)
                    told = getattr(config, "settings", None)
                    settings = told() if callable(told) else {}
                    digest.update(f"{name}{type(part).__name__}{settings}".encode())
        return digest.hexdigest()[:16]


class UNetMotionDenoiser(_Denoiser):
    """AnimateDiff: `UNetMotionModel`, text per frame, `AutoencoderKL` per frame."""

    has_temporal_attention = True
    default_window = 16

    def __init__(self, base: Any, guidance_scale: float) -> None:
        super().__init__(base, guidance_scale)
        self.model = base.unet
        longest = base.unet.config.motion_max_seq_length
        self.window = min(self.default_window, longest)
        self.longest: int = longest

    def check(self, height: int, width: int, prompt: str, negative_prompt: str | None, num_frames: int) -> None:
        """Raises ValueError for sizes and texts that the pipeline refuses."""
        self.base.check_inputs(prompt, height, width, None, negative_prompt)

    def default_size(self) -> tuple[int, int]:
        side = self.model.config.sample_size * self.base.vae_scale_factor
        return side, side

    def latent_frames(self, num_frames: int) -> int:
        return num_frames

    def latent_shape(self, height: int, width: int) -> tuple[int, int, int]:
        scale = self.base.vae_scale_factor
        return self.model.config.in_channels, height // scale, width // scale

    def read(self, prompt: str, negative_prompt: str | None, bank: FrameText | None, clip_skip: int | None) -> None:
        """Encodes the texts of one video."""
        positive, negative = self.base.encode_prompt(
            prompt, self.device, 1, self.guides, negative_prompt, clip_skip=clip_skip
        )
        self.text, self.negative = OneText(positive) if bank is None else bank, negative

    def frame_times(self) -> AbstractContextManager[Any]:
        return frame_times(self.model)

    def __call__(self, latents: Tensor, times: Tensor, frames: Tensor, fraction: float | Tensor) -> Tensor:
        self.begin_call(fraction)
        dtype = self.model.dtype
        positive = self.text.embeddings(frames, fraction).to(self.device, dtype)
        sample = latents[None].to(dtype)
        if self.guides and self.negative is not None:
            negative = self.negative.to(self.device, dtype).expand(len(frames), -1, -1)
            positive, sample = torch.cat([negative, positive]), torch.cat([sample, sample])
        times = times.to(self.device)[None] if times.ndim else times.to(self.device)
        output = self.model(sample, times, encoder_hidden_states=positive, return_dict=False)[0].float()
        if output.shape[0] == 2:
            output = output[:1] + self.guidance_scale * (output[1:] - output[:1])
        return output[0]

    def decoder(self, chunk: int) -> FrameDecoder:
        return FrameDecoder(self.base, chunk)


class FrameDecoder:
    """Latents to pictures, frame by frame, `chunk` frames per call of the VAE.

    Args:
        base: pipeline with `decode_latents`.
    """

    def __init__(self, base: Any, chunk: int) -> None:
        self.base, self.chunk = base, chunk

    def __call__(self, latents: Tensor) -> Iterator[Tensor]:
        """[C, n, h, w] to pictures [m, 3, H, W] in [0, 1], in order."""
        dtype = self.base.vae.dtype
        for part in latents.split(self.chunk, dim=1):
            video = self.base.decode_latents(part[None].to(dtype), self.chunk)[0]
            yield (video / 2 + 0.5).clamp(0, 1).transpose(0, 1)

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: dict[str, Any]) -> None:
        """Nothing is carried from frame to frame."""


class WanDenoiser(_Denoiser):
    """Wan: `WanTransformer3DModel`, one text per call (that of its middle frame), causal VAE with 4 frames per latent.

    A call whose frames stand at different levels hands the model one timestep per token.
    """

    default_window = 21  # latent frames of the 81 pictures it was trained on

    def __init__(self, base: Any, guidance_scale: float) -> None:
        super().__init__(base, guidance_scale)
        self.model = base.transformer if base.transformer is not None else base.transformer_2
        self.window = self.default_window
        self.longest: int = self.model.config.rope_max_seq_len
        ratio = base.config.boundary_ratio
        self.boundary = None if ratio is None else ratio * base.scheduler.config.num_train_timesteps

    def check(self, height: int, width: int, prompt: str, negative_prompt: str | None, num_frames: int) -> None:
        self.base.check_inputs(prompt, negative_prompt, height, width)
        _, rows, columns = self.model.config.patch_size
        space = self.base.vae_scale_factor_spatial
        if height % (space * rows) or width % (space * columns):
            raise ValueError(
                f"height={height} and width={width} must be multiples of {space * rows} and {space * columns}"
            )
        ratio = self.base.vae_scale_factor_temporal
        if num_frames % ratio != 1 % ratio:
            below = max(num_frames - 1, 0) // ratio * ratio + 1
            raise ValueError(
                f"num_frames={num_frames}: Wan makes {ratio}k + 1 frames; write {below} or {below + ratio}"
            )

    def default_size(self) -> tuple[int, int]:
        return 480, 832

    def latent_frames(self, num_frames: int) -> int:
        return (num_frames - 1) // int(self.base.vae_scale_factor_temporal) + 1

    def latent_shape(self, height: int, width: int) -> tuple[int, int, int]:
        scale = self.base.vae_scale_factor_spatial
        return self.model.config.in_channels, height // scale, width // scale

    def read(self, prompt: str, negative_prompt: str | None, bank: FrameText | None, clip_skip: int | None) -> None:
        """Encodes the texts of one video."""
        if clip_skip is not None:
            raise ValueError("clip_skip is for pipelines with a CLIP text encoder; leave it out for Wan")
        positive, negative = self.base.encode_prompt(
            prompt, negative_prompt, self.guides, max_sequence_length=512, device=self.device
        )
        self.text, self.negative = OneText(positive) if bank is None else bank, negative

    def frame_times(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def __call__(self, latents: Tensor, times: Tensor, frames: Tensor, fraction: float | Tensor) -> Tensor:
        self.begin_call(fraction)
        model: Any = self.model
        if self.boundary is not None and self.base.transformer_2 is not None:
            model = self.base.transformer if float(times.max()) >= self.boundary else self.base.transformer_2
        dtype = model.dtype
        pictures = frames * int(self.base.vae_scale_factor_temporal)
        middle = len(frames) // 2
        positive = self.text.embeddings(pictures, fraction)[middle : middle + 1]
        # an installed PromptBank knows its anchor and puts the text of every frame in its place
        positive = getattr(self.text, "anchor", positive).to(self.device, dtype)
        times = times.to(self.device)
        if times.ndim or self.base.config.expand_timesteps:
            per_frame = times[None] if times.ndim else times.expand(1, len(frames))
            height, width = latents.shape[-2:]
            times = token_timesteps(per_frame, height, width, model.config.patch_size)
        else:
            times = times[None]
        sample = latents[None].to(dtype)
        with model.cache_context("cond"):
            output = model(sample, times, positive, return_dict=False)[0].float()
        if self.guides and self.negative is not None:
            with model.cache_context("uncond"):
                plain = model(sample, times, self.negative.to(self.device, dtype), return_dict=False)[0].float()
            output = plain + self.guidance_scale * (output - plain)
        return output[0]

    def decoder(self, chunk: int) -> WanDecoder:
        return WanDecoder(self.base)


class WanDecoder:
    """Decodes latents of a causal Wan VAE one by one, as `vae.decode` does for a whole video, and keeps its caches in
    between: the pictures are the same, the memory does not grow."""

    def __init__(self, base: Any) -> None:
        self.base, self.vae = base, base.vae
        self.first = True
        layers = sum(isinstance(module, WanCausalConv3d) for module in self.vae.decoder.modules())
        self.cache: list[Any] = [None] * layers

    def __call__(self, latents: Tensor) -> Iterator[Tensor]:
        """[C, n, h, w] to pictures [m, 3, H, W] in [0, 1]: 1 for the video's first latent frame, then 4 each."""
        config = self.vae.config
        if config.patch_size is not None:
            raise ValueError("a Wan VAE with patches (Wan 2.2 5B) is not supported yet; use output_type='latent'")
        shape = (1, config.z_dim, 1, 1, 1)
        mean = torch.tensor(config.latents_mean).view(shape).to(self.base._execution_device, self.vae.dtype)
        deviation = torch.tensor(config.latents_std).view(shape).to(mean)
        for part in latents.split(1, dim=1):
            latent = self.vae.post_quant_conv(part[None].to(mean) * deviation + mean)
            video = self.vae.decoder(latent, feat_cache=self.cache, feat_idx=[0], first_chunk=self.first)[0]
            self.first = False
            yield (video.float().clamp(-1, 1) / 2 + 0.5).transpose(0, 1)

    def state(self) -> dict[str, Any]:
        return {"first": self.first, "cache": list(self.cache)}

    def load(self, state: dict[str, Any]) -> None:
        self.first = bool(state["first"])
        device = self.base._execution_device
        self.cache = [one.to(device) if isinstance(one, Tensor) else one for one in state["cache"]]


def denoiser_for(base: Any, guidance_scale: float) -> UNetMotionDenoiser | WanDenoiser:
    """The denoiser of a pipeline.

    Raises:
        ValueError: a pipeline of another family.
    """
    unet: Any = getattr(base, "unet", None)
    if isinstance(base, AnimateDiffPipeline) and isinstance(unet, UNetMotionModel):
        config: Any = unet.config  # type: ignore[attr-defined]
        if config.addition_embed_type is not None:
            raise ValueError(
                "AnimateDiff on SDXL is not supported: its UNet wants pooled texts and image sizes as well"
            )
        return UNetMotionDenoiser(base, guidance_scale)
    if isinstance(base, WanPipeline):
        return WanDenoiser(base, guidance_scale)
    raise ValueError(
        f"{type(base).__name__} is no base for long videos; allowed are AnimateDiffPipeline (build one "
        "from the components of a relative) and WanPipeline"
    )
