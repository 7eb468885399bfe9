"""Video pipelines of diffusers' own classes at toy size: 16 x 16 pixels, 8 x 8 latents, 4 channels."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import (
    AnimateDiffPipeline,
    AutoencoderKL,
    AutoencoderKLWan,
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    MotionAdapter,
    UNet2DConditionModel,
    UNetMotionModel,
    WanPipeline,
    WanTransformer3DModel,
)
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, UMT5EncoderModel

from .tiny import tokenizer

__all__ = ["animatediff", "motion_unet", "wan", "wan_transformer"]


def motion_unet(seed: int = 0, **changes: Any) -> UNetMotionModel:
    torch.manual_seed(seed)
    config: dict[str, Any] = {
        "sample_size": 8, "in_channels": 4, "out_channels": 4, "block_out_channels": (8, 16), "layers_per_block": 1,
        "down_block_types": ("CrossAttnDownBlockMotion", "DownBlockMotion"),
        "up_block_types": ("UpBlockMotion", "CrossAttnUpBlockMotion"), "norm_num_groups": 4, "num_attention_heads": 2,
        "cross_attention_dim": 16, "motion_num_attention_heads": 2, "motion_max_seq_length": 32,
    }  # fmt: skip
    unet = UNetMotionModel(**{**config, **changes}).eval()
    for name, weight in unet.named_parameters():  # outputs that start at zero would hide what time does
        if "proj_out" in name or "conv_out" in name:
            torch.nn.init.normal_(weight, std=0.2)
    return unet


def animatediff(
    seed: int = 0, prediction_type: str = "epsilon", adapter: bool = False, **changes: Any
) -> AnimateDiffPipeline:
    """With `adapter`, the pipeline also holds a motion adapter, which diffusers' FreeNoise asks for its length."""
    unet: Any = motion_unet(seed, **changes)
    words = tokenizer()
    words.model_max_length = 8
    torch.manual_seed(1)
    text = CLIPTextConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=8, bos_token_id=1, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    vae = AutoencoderKL(
        block_out_channels=(8, 8), latent_channels=4, norm_num_groups=4, sample_size=16,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    motion = None
    if adapter:
        flat = UNet2DConditionModel(
            sample_size=8, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, cross_attention_dim=16,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), attention_head_dim=2,
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        )  # fmt: skip
        motion = MotionAdapter(
            block_out_channels=(8, 16), motion_layers_per_block=1, motion_num_attention_heads=2,
            motion_norm_num_groups=4, motion_max_seq_length=32,
        )  # fmt: skip
        for name, weight in motion.named_parameters():
            if "proj_out" in name:
                torch.nn.init.normal_(weight, std=0.2)
        unet = flat.eval()
    pipe = AnimateDiffPipeline(
        vae=vae.eval(),
        text_encoder=CLIPTextModel(text).eval(),
        tokenizer=words,
        unet=unet,
        motion_adapter=motion,
        scheduler=DDIMScheduler(
            beta_schedule="linear", clip_sample=False, steps_offset=1, prediction_type=prediction_type
        ),
    )
    pipe.unet.eval()
    pipe.set_progress_bar_config(disable=True)
    return pipe


def wan_transformer(seed: int = 0) -> WanTransformer3DModel:
    torch.manual_seed(seed)
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=16, ffn_dim=32, num_layers=2, cross_attn_norm=True, rope_max_seq_len=64,
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
