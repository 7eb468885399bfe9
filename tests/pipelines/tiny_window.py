"""Carriers of the window kind around diffusers' own classes at toy size: 4 x 4 latent cells of 4 channels."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from diffusers import (
    AutoencoderKLLTXVideo,
    FlowMatchEulerDiscreteScheduler,
    LTXPipeline,
    LTXVideoTransformer3DModel,
    SkyReelsV2DiffusionForcingPipeline,
    SkyReelsV2Transformer3DModel,
    UniPCMultistepScheduler,
)
from torch import Tensor
from transformers import T5Config, T5EncoderModel

from mediaspec.memory.base import FrameGroup, MemoryRead
from mediaspec.pipelines.carriers import carrier_for

from .tiny import tokenizer
from .tiny_video import WIDTH, wan

__all__ = [
    "CELLS", "FAMILIES", "NOTHING", "Seen", "asked", "carrier_of", "ltx_transformer", "ltx_vae", "normal", "past",
    "pipe_of", "skyreels_transformer", "told", "window",
]  # fmt: skip

FAMILIES = ("wan", "skyreels", "ltx")
CELLS = 4  # latent cells along a side
NOTHING = MemoryRead()


def skyreels_transformer(**more: Any) -> SkyReelsV2Transformer3DModel:
    torch.manual_seed(0)
    model = SkyReelsV2Transformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4,
        text_dim=WIDTH, freq_dim=16, ffn_dim=32, num_layers=2, cross_attn_norm=True, rope_max_seq_len=64, **more,
    ).eval()  # fmt: skip
    torch.nn.init.normal_(model.proj_out.weight, std=0.2)
    return model


def ltx_transformer(patch_size: int = 1) -> LTXVideoTransformer3DModel:
    torch.manual_seed(0)
    return LTXVideoTransformer3DModel(
        in_channels=4 * patch_size**2, out_channels=4 * patch_size**2, patch_size=patch_size, num_attention_heads=2,
        attention_head_dim=12, cross_attention_dim=24, num_layers=2, caption_channels=WIDTH,
    ).eval()  # fmt: skip


def ltx_vae(**more: Any) -> AutoencoderKLLTXVideo:
    torch.manual_seed(1)
    side, twice, once = (8, 8, 8, 8), (True, True, False, False), (1, 1, 1, 1, 1)
    return AutoencoderKLLTXVideo(
        latent_channels=4, block_out_channels=side, decoder_block_out_channels=side, layers_per_block=once,
        decoder_layers_per_block=once, spatio_temporal_scaling=twice, decoder_spatio_temporal_scaling=twice,
        patch_size=1, timestep_conditioning=True, **more,
    ).eval()  # fmt: skip


@cache
def pipe_of(family: str) -> Any:
    torch.manual_seed(1)
    if family == "wan":
        return wan()
    if family == "skyreels":
        made: Any = SkyReelsV2DiffusionForcingPipeline(
            tokenizer=tokenizer(), text_encoder=wan().text_encoder, transformer=skyreels_transformer(), vae=wan().vae,
            scheduler=UniPCMultistepScheduler(use_flow_sigmas=True, flow_shift=8.0, prediction_type="flow_prediction"),
        )  # fmt: skip
        return made
    # a pipeline reads the length of its texts from the tokenizer
    words: Any = tokenizer()
    words.model_max_length = 16
    text = T5Config(vocab_size=32, d_model=WIDTH, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    vae = ltx_vae()
    vae.latents_mean += torch.tensor([0.5, -0.5, 0.0, 1.0])
    vae.latents_std *= torch.tensor([2.0, 1.0, 0.5, 1.0])
    return LTXPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(), vae=vae, text_encoder=T5EncoderModel(text).eval(),
        tokenizer=words, transformer=ltx_transformer(),
    )  # fmt: skip


def carrier_of(family: str, guidance_scale: float = 1.0, batch: int = 1, **settings: Any) -> Any:
    if family != "ltx":
        settings = {"max_sequence_length": 8, **settings}
    carrier = carrier_for(pipe_of(family), family, **settings)
    told(carrier, "a red apple", "blue", guidance_scale, batch)
    return carrier


def told(carrier: Any, text: str, negative: str = "", guidance_scale: float = 1.0, batch: int = 1) -> None:
    if carrier.name != "skyreels":
        carrier.condition(text, negative, guidance_scale, batch=batch)
        return
    # the same text encoder without the pipeline's ftfy
    one, other = (
        pipe_of("wan").encode_prompt(words, None, False, max_sequence_length=8)[0] for words in (text, negative)
    )
    carrier.condition(prompt_embeds=one, negative_prompt_embeds=other, guidance_scale=guidance_scale, batch=batch)


def normal(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def window(count: int = 3, batch: int = 1, seed: int = 3) -> Tensor:
    return normal(batch, 4, count, CELLS, CELLS, seed=seed)


def past(ids: list[int], batch: int = 1, level: float = 0.0, seed: int = 9) -> MemoryRead:
    frames = window(len(ids), batch, seed)
    return MemoryRead((FrameGroup(frames, torch.tensor(ids).expand(batch, -1)),), level=level)


def asked(carrier: Any, x: Tensor, level: float | list[float], first: int = 0, read: MemoryRead = NOTHING) -> Tensor:
    levels = torch.tensor(level, dtype=torch.float64).expand(x.shape[2])
    with torch.no_grad():
        return carrier(x, levels, torch.arange(first, first + x.shape[2]), read, None)


class Seen:
    """Inputs of the real network, by a hook of torch."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.calls: list[dict[str, Any]] = []
        self.handle = model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = ("hidden_states", "timestep", "encoder_hidden_states")
        self.calls.append({**dict(zip(names, args)), **kwargs})

    def __enter__(self) -> list[dict[str, Any]]:
        return self.calls

    def __exit__(self, *_: object) -> None:
        self.handle.remove()
