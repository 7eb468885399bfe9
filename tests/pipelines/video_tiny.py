"""Tiny video pipelines and denoisers of diffusers' own classes; weights are random but not trivial."""

from __future__ import annotations

import string

import torch
from diffusers import (
    AnimateDiffPipeline,
    AutoencoderKL,
    CogVideoXTransformer3DModel,
    DDIMScheduler,
    HunyuanVideoTransformer3DModel,
    MotionAdapter,
    UNet2DConditionModel,
    UNetMotionModel,
    WanTransformer3DModel,
)
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

WIDTH = 16


def clip_tokenizer(length: int = 77) -> CLIPTokenizer:
    """One token per letter."""
    letters = string.ascii_lowercase + string.digits + ",.'-"
    words = [*letters, *(f"{one}</w>" for one in letters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={word: n for n, word in enumerate(words)}, merges=[], model_max_length=length)


def text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    torch.manual_seed(0)
    config = CLIPTextConfig(
        vocab_size=len(tokenizer), hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=tokenizer.model_max_length, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return CLIPTextModel(config).eval()


def _unet_parts() -> tuple[UNet2DConditionModel, MotionAdapter]:
    torch.manual_seed(1)
    unet = UNet2DConditionModel(
        block_out_channels=(8, 8), layers_per_block=1, sample_size=8, in_channels=4, out_channels=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=WIDTH, norm_num_groups=2, attention_head_dim=4,
    )  # fmt: skip
    adapter = MotionAdapter(block_out_channels=(8, 8), motion_layers_per_block=1, motion_norm_num_groups=2,
                            motion_num_attention_heads=2)  # fmt: skip
    for part in (unet, adapter):
        for value in part.parameters():
            torch.nn.init.normal_(value, std=0.3)
    return unet, adapter


def motion_unet() -> UNetMotionModel:
    return UNetMotionModel.from_unet2d(*_unet_parts()).eval()


def animatediff() -> AnimateDiffPipeline:
    unet, adapter = _unet_parts()
    torch.manual_seed(2)
    vae = AutoencoderKL(
        block_out_channels=(8, 8), in_channels=3, out_channels=3, latent_channels=4, norm_num_groups=2,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    tokenizer = clip_tokenizer()
    pipe = AnimateDiffPipeline(
        vae=vae.eval(), text_encoder=text_encoder(tokenizer), tokenizer=tokenizer, unet=unet, motion_adapter=adapter,
        scheduler=DDIMScheduler(beta_schedule="linear", clip_sample=False),
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    return pipe


def wan(**more: object) -> WanTransformer3DModel:
    torch.manual_seed(3)
    return WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=WIDTH, freq_dim=16,
        ffn_dim=32, num_layers=2, rope_max_seq_len=32, **more,
    ).eval()  # fmt: skip


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
