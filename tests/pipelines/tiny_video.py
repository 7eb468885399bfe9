"""Video models and pipelines of diffusers' own classes at toy size: 16 x 16 pixels, 8 x 8 latents, 4 channels.

`tests/integrations/tiny_temporal.py` builds its AnimateDiff of the same parts, wider.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import torch
from diffusers import (
    AnimateDiffPipeline,
    AutoencoderKL,
    AutoencoderKLWan,
    CogVideoXTransformer3DModel,
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideoTransformer3DModel,
    MotionAdapter,
    UNet2DConditionModel,
    UNetMotionModel,
    WanPipeline,
    WanTransformer3DModel,
)
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, UMT5EncoderModel

from .tiny import tokenizer

__all__ = [
    "MOTION", "WIDTH", "animatediff", "assembled", "clip_text", "clip_tokenizer", "codec", "cogvideox", "hunyuan",
    "motion_adapter", "motion_unet", "wan", "wan_transformer",
]  # fmt: skip

WIDTH = 16  # of the text features
MOTION: dict[str, Any] = {
    "sample_size": 8, "in_channels": 4, "out_channels": 4, "block_out_channels": (8, 16), "layers_per_block": 1,
    "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"),
    "up_block_types": ("UpBlockMotion", "CrossAttnUpBlockMotion"), "norm_num_groups": 4, "num_attention_heads": 2,
    "cross_attention_dim": WIDTH, "motion_num_attention_heads": 2, "motion_max_seq_length": 32,
}  # fmt: skip


def clip_tokenizer(length: int = 77, words: Sequence[str] = ()) -> CLIPTokenizer:
    """One token per letter; `words` in another order than ours."""
    letters = string.ascii_lowercase + string.digits + ",.'-"
    words = words or [*letters, *(f"{one}</w>" for one in letters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={word: n for n, word in enumerate(words)}, merges=[], model_max_length=length)


def motion_unet(seed: int = 0, **changes: Any) -> UNetMotionModel:
    torch.manual_seed(seed)
    unet = UNetMotionModel(**{**MOTION, **changes}).eval()
    for name, weight in unet.named_parameters():  # outputs that start at zero would hide what time does
        if "proj_out" in name or "conv_out" in name:
            torch.nn.init.normal_(weight, std=0.2)
    return unet


def codec(side: int = 16) -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(8, 8), latent_channels=4, norm_num_groups=4, sample_size=side,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    ).eval()  # fmt: skip


def motion_adapter(channels: tuple[int, ...] = (8, 16), heads: int = 2) -> MotionAdapter:
    return MotionAdapter(
        block_out_channels=channels, motion_layers_per_block=1, motion_num_attention_heads=heads,
        motion_norm_num_groups=4, motion_max_seq_length=32,
    )  # fmt: skip


def clip_text(words: Any, size: int, width: int = WIDTH, heads: int = 2) -> CLIPTextModel:
    """Reads the ids 0..size - 1 of a tokenizer."""
    end = words.eos_token_id
    config = CLIPTextConfig(
        vocab_size=size, hidden_size=width, intermediate_size=32, num_hidden_layers=1, num_attention_heads=heads,
        max_position_embeddings=words.model_max_length, eos_token_id=end, pad_token_id=words.pad_token_id,
        bos_token_id=end if words.bos_token_id is None else words.bos_token_id,
    )  # fmt: skip
    return CLIPTextModel(config).eval()


def assembled(**parts: Any) -> AnimateDiffPipeline:
    """A quiet pipeline of its parts."""
    pipe = AnimateDiffPipeline(**parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def animatediff(
    seed: int = 0, prediction_type: str = "epsilon", adapter: bool = False, letters: bool = False, **changes: Any
) -> AnimateDiffPipeline:
    """With `adapter`, the pipeline also holds a motion adapter, which diffusers' FreeNoise asks for its length; with
    `letters`, it reads any text, as far as 77 letters."""
    unet: Any = motion_unet(seed, **changes)
    words: Any = clip_tokenizer() if letters else tokenizer()
    if not letters:
        words.model_max_length = 8
    torch.manual_seed(1)
    vae, motion = codec(), None
    if adapter:
        flat = UNet2DConditionModel(
            sample_size=8, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, attention_head_dim=2,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), cross_attention_dim=WIDTH,
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        )  # fmt: skip
        motion = motion_adapter()
        for name, weight in motion.named_parameters():
            if "proj_out" in name:
                torch.nn.init.normal_(weight, std=0.2)
        unet = flat.eval()
    pipe = assembled(
        vae=vae,
        text_encoder=clip_text(words, len(words) if letters else 32),
        tokenizer=words,
        unet=unet,
        motion_adapter=motion,
        scheduler=DDIMScheduler(
            beta_schedule="linear", clip_sample=False, steps_offset=1, prediction_type=prediction_type
        ),
    )
    pipe.unet.eval()
    return pipe


def wan_transformer(seed: int = 0, **more: Any) -> WanTransformer3DModel:
    torch.manual_seed(seed)
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4,
        text_dim=WIDTH, freq_dim=16, ffn_dim=32, num_layers=2, cross_attn_norm=True, rope_max_seq_len=64, **more,
    ).eval()  # fmt: skip
    torch.nn.init.normal_(model.proj_out.weight, std=0.2)
    return model


def wan(seed: int = 0) -> WanPipeline:
    torch.manual_seed(2)
    vae = AutoencoderKLWan(
        base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
    )  # fmt: skip
    text = T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    pipe = WanPipeline(
        tokenizer=tokenizer(),
        text_encoder=UMT5EncoderModel(text).eval(),
        vae=vae.eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer=wan_transformer(seed),
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def cogvideox(rotary: bool = False) -> CogVideoXTransformer3DModel:
    torch.manual_seed(4)
    return CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=8,
        text_embed_dim=WIDTH, num_layers=2, sample_width=8, sample_height=8, sample_frames=17, patch_size=2,
        temporal_compression_ratio=4, max_text_seq_length=6, use_rotary_positional_embeddings=rotary,
    ).eval()  # fmt: skip


def hunyuan() -> HunyuanVideoTransformer3DModel:
    torch.manual_seed(5)
    return HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16, num_layers=1,
        num_single_layers=1, num_refiner_layers=1, patch_size=2, patch_size_t=1, guidance_embeds=False,
        text_embed_dim=WIDTH, pooled_projection_dim=8, rope_axes_dim=(4, 6, 6),
    ).eval()  # fmt: skip
