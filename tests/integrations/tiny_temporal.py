"""Tiny video denoisers with temporal attention, diffusers' own classes with random weights, and inputs for them."""

from __future__ import annotations

import string
from collections.abc import Callable
from typing import Any

import torch
from diffusers import (
    AnimateDiffPipeline,
    DDIMScheduler,
    LatteTransformer3DModel,
    UNet3DConditionModel,
    UNetMotionModel,
    UNetSpatioTemporalConditionModel,
)
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from diffusers.models.unets.unet_i2vgen_xl import I2VGenXLUNet
from torch import Tensor, nn

from tests.pipelines.tiny_video import MOTION, assembled, clip_text, clip_tokenizer, codec, motion_adapter

FRAMES = 8
CHANNELS, HEADS, WIDTH = (32, 64), 4, 32


def motion() -> UNetMotionModel:
    wider: dict[str, Any] = {
        "sample_size": 4, "block_out_channels": CHANNELS, "cross_attention_dim": WIDTH, "num_attention_heads": HEADS,
        "motion_num_attention_heads": HEADS,
    }  # fmt: skip
    return _awake(UNetMotionModel(**{**MOTION, **wider}))


def unet3d() -> UNet3DConditionModel:
    return _awake(
        UNet3DConditionModel(
            sample_size=8,
            block_out_channels=(32, 64),
            down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
            up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
            cross_attention_dim=32,
            attention_head_dim=8,
            layers_per_block=1,
            norm_num_groups=8,
        )
    )


def i2vgen() -> I2VGenXLUNet:
    return _awake(
        I2VGenXLUNet(
            sample_size=8,
            block_out_channels=(8, 16),
            down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
            up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
            cross_attention_dim=8,
            attention_head_dim=4,
            layers_per_block=1,
            norm_num_groups=2,
        )
    )


def svd() -> UNetSpatioTemporalConditionModel:
    return _awake(
        UNetSpatioTemporalConditionModel(
            sample_size=8,
            block_out_channels=(32, 64),
            down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
            up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
            num_attention_heads=(2, 4),
            cross_attention_dim=32,
            projection_class_embeddings_input_dim=96,
            addition_time_embed_dim=32,
            layers_per_block=1,
        )
    )


def latte() -> LatteTransformer3DModel:
    return _awake(
        LatteTransformer3DModel(
            sample_size=4,
            video_length=FRAMES,
            num_layers=2,
            patch_size=2,
            attention_head_dim=8,
            num_attention_heads=3,
            caption_channels=32,
            in_channels=4,
            out_channels=8,
            cross_attention_dim=24,
            attention_bias=True,
            activation_fn="gelu-approximate",
            num_embeds_ada_norm=1000,
            norm_type="ada_norm_single",
            norm_elementwise_affine=False,
        )
    )


def _awake(model: nn.Module) -> Any:
    """New layers that start at zero would hide what happens in them."""
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1 and not weight.any():
                weight.copy_(0.1 * torch.randn(weight.shape, generator=g))
    return model.eval()


def run(model: nn.Module, timestep: float = 500.0, frames: int = FRAMES, videos: int = 2) -> Tensor:
    """One forward pass on inputs that depend on the class, the frames and the videos alone."""
    g = torch.Generator().manual_seed(1)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g)

    kind = type(getattr(model, "_orig_mod", model))
    with torch.no_grad():
        if kind is UNetMotionModel:
            return model(noise(videos, 4, frames, 4, 4), timestep, noise(videos * frames, 5, 32)).sample
        if kind is UNet3DConditionModel:
            return model(noise(videos, 4, frames, 8, 8), timestep, noise(videos, 5, 32)).sample
        if kind is I2VGenXLUNet:
            image, fps = noise(videos, 4, frames, 8, 8), torch.full((videos,), 8)
            sample, pooled, text = noise(videos, 4, frames, 8, 8), noise(videos, 8), noise(videos, 5, 8)
            return model(sample, timestep, fps, image, pooled, text).sample
        if kind is UNetSpatioTemporalConditionModel:
            return model(noise(videos, frames, 8, 8, 8), timestep, noise(videos, 1, 32), noise(videos, 3)).sample
        times = torch.full((videos,), timestep)
        return model(noise(videos, 4, frames, 4, 4), times, noise(videos, 5, 32)).sample


BUILDERS: dict[str, Callable[[], Any]] = {
    "motion": motion,
    "unet3d": unet3d,
    "i2vgen": i2vgen,
    "svd": svd,
    "latte": latte,
}


def animatediff() -> AnimateDiffPipeline:
    """A whole pipeline."""
    letters = string.ascii_lowercase
    words = clip_tokenizer(16, ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{one}</w>" for one in letters)])
    torch.manual_seed(2)
    return assembled(
        vae=codec(8),
        motion_adapter=motion_adapter(CHANNELS, HEADS),
        text_encoder=clip_text(words, len(words), WIDTH, HEADS),
        tokenizer=words,
        unet=motion(),
        scheduler=DDIMScheduler(clip_sample=False),
    )


def generate(pipe: AnimateDiffPipeline, frames: int = FRAMES, steps: int = 2) -> Tensor:
    """Latents [1, C, F, h, w] of one video with guidance."""
    return pipe(
        "a taxi",
        negative_prompt="b",
        num_frames=frames,
        num_inference_steps=steps,
        guidance_scale=3.0,
        height=8,
        width=8,
        generator=torch.Generator().manual_seed(5),
        output_type="latent",
    ).frames


class Custom:
    """A processor of somebody's own."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, temb=None):
        return 2 * AttnProcessor2_0()(attn, hidden_states, encoder_hidden_states, attention_mask, temb)


class Manual(Custom):
    """One that calls no attention of torch's."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, temb=None):
        return AttnProcessor()(attn, hidden_states, encoder_hidden_states, attention_mask, temb)
