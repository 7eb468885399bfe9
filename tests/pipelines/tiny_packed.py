"""Video pipelines that pack their history, of diffusers' own classes at toy size: 32 x 32 pixels, 4 x 4 latents.

And what their tests share: watching the calls of a network, rolling out, frames and texts of random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import (
    AnyFlowFARPipeline,
    AnyFlowFARTransformer3DModel,
    AutoencoderKLHunyuanVideo,
    AutoencoderKLWan,
    FlowMapEulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    HeliosPipeline,
    HeliosScheduler,
    HeliosTransformer3DModel,
    HunyuanVideoFramepackPipeline,
    HunyuanVideoFramepackTransformer3DModel,
)
from torch import Tensor
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    LlamaConfig,
    LlamaModel,
    SiglipImageProcessor,
    SiglipVisionConfig,
    SiglipVisionModel,
    T5Config,
    UMT5EncoderModel,
)

from mediaspec.memory.arvdm import generate
from mediaspec.memory.base import FrameMemory, MemoryRead
from mediaspec.memory.frame_noise import FRESH
from mediaspec.memory.window_schedule import WindowSchedule
from mediaspec.pipelines.carriers.base import Carrier

from .tiny import tokenizer
from .tiny_video import WIDTH, clip_tokenizer

__all__ = [
    "CELLS", "CLOSE", "NAMES", "GivenNoise", "far", "far_transformer", "framepack", "framepack_transformer",
    "frames_of", "helios", "helios_transformer", "noise_of", "randn", "rollout", "same_call", "told", "watched",
    "written",
]  # fmt: skip


CLOSE = {"rtol": 1e-4, "atol": 2e-5}  # float32, the pipelines' schedulers round levels otherwise
CELLS = (4, 4)
NAMES = ("framepack", "helios", "far")


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@contextmanager
def watched(model: torch.nn.Module) -> Iterator[list[dict[str, Any]]]:
    """Keyword arguments of every call of a network."""
    calls: list[dict[str, Any]] = []
    handle = model.register_forward_pre_hook(lambda _, args, kwargs: calls.append(dict(kwargs)), with_kwargs=True)
    try:
        yield calls
    finally:
        handle.remove()


def same_call(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """All that a pipeline tells its network, and nothing else."""
    given = {key for key, value in theirs.items() if value is not None}
    assert {key for key, value in ours.items() if value is not None} == given
    for key in given - {"return_dict", "kv_cache", "kv_cache_flag", "attention_mask"}:
        if isinstance(theirs[key], Tensor):
            torch.testing.assert_close(ours[key].double(), theirs[key].double(), **CLOSE, msg=key)
        else:
            assert ours[key] == theirs[key]


class GivenNoise:
    """Noise by frame id, taken from a run of a pipeline."""

    def __init__(self, frames: dict[int, Tensor]) -> None:
        self.frames = frames

    def __call__(self, frame_ids: Sequence[int], purpose: int, step: int = 0) -> Tensor:
        assert purpose == FRESH
        return torch.stack([self.frames[i] for i in frame_ids], 2)


def noise_of(chunks: Sequence[Tensor], first: int, reverse: bool = False) -> GivenNoise:
    order = list(reversed(chunks)) if reverse else list(chunks)
    return GivenNoise(dict(enumerate(torch.cat(order, 2).unbind(2), start=first)))


def rollout(carrier: Carrier, schedule: WindowSchedule, noise: Any, **settings: Any) -> Tensor:
    """All frames of a run in the order of time."""
    made = {}
    for done in generate(carrier, schedule, carrier.sampler(), noise, **settings):
        made.update(zip(done.frame_ids, done.frames.unbind(2)))
    return torch.stack([made[i] for i in sorted(made)], 2)


def frames_of(count: int, seed: int = 5, rows: int = 1) -> Tensor:
    return randn(rows, 4, count, *CELLS, seed=seed)


def written(memory: FrameMemory, count: int, seed: int = 5) -> MemoryRead:
    memory.write(frames_of(count, seed))
    return memory.read([count])


def told(carrier: Carrier, batch: int = 1, **more: Any) -> Carrier:
    """With random text, in place of a prompt."""
    if carrier.name == "framepack":
        more.setdefault("pooled_prompt_embeds", randn(1, 8, seed=8))
        more.setdefault("image_embeds", randn(1, 2, 8, seed=9))
    carrier.condition(batch=batch, prompt_embeds=randn(1, 5, WIDTH, seed=7), **more)
    return carrier


def _wan_vae() -> AutoencoderKLWan:
    torch.manual_seed(2)
    return AutoencoderKLWan(
        base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True],
        latents_mean=[0.1, 0.0, -0.1, 0.2], latents_std=[1.0, 2.0, 0.5, 1.5],
    ).eval()  # fmt: skip


def _umt5() -> UMT5EncoderModel:
    return UMT5EncoderModel(T5Config(vocab_size=32, d_model=WIDTH, d_kv=8, d_ff=32, num_layers=1, num_heads=2)).eval()


def framepack_transformer(**more: Any) -> HunyuanVideoFramepackTransformer3DModel:
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 10, "num_layers": 1,
        "num_single_layers": 1, "num_refiner_layers": 1, "text_embed_dim": WIDTH, "pooled_projection_dim": 8,
        "rope_axes_dim": (2, 4, 4), "has_image_proj": True, "image_proj_dim": 8, "has_clean_x_embedder": True,
    }  # fmt: skip
    model = HunyuanVideoFramepackTransformer3DModel(**{**config, **more}).eval()
    torch.nn.init.normal_(model.proj_out.weight, std=0.2)
    return model


def framepack() -> HunyuanVideoFramepackPipeline:
    torch.manual_seed(1)
    vae = AutoencoderKLHunyuanVideo(
        latent_channels=4, block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4
    )
    llama = LlamaConfig(
        vocab_size=32, hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2
    )
    letters = clip_tokenizer()
    clip = CLIPTextConfig(
        vocab_size=len(letters), hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        bos_token_id=letters.bos_token_id, eos_token_id=letters.eos_token_id, pad_token_id=letters.pad_token_id,
    )  # fmt: skip
    eye = SiglipVisionConfig(
        hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
    )
    pipe = HunyuanVideoFramepackPipeline(
        text_encoder=LlamaModel(llama).eval(),
        tokenizer=tokenizer(),
        transformer=framepack_transformer(),
        vae=vae.eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        text_encoder_2=CLIPTextModel(clip).eval(),
        tokenizer_2=letters,
        image_encoder=SiglipVisionModel(eye).eval(),
        feature_extractor=SiglipImageProcessor(size={"height": 16, "width": 16}),
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def helios_transformer(**more: Any) -> HeliosTransformer3DModel:
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": WIDTH,
        "freq_dim": 16, "ffn_dim": 32, "num_layers": 2, "rope_dim": (4, 4, 4), "is_amplify_history": True,
    }  # fmt: skip
    model = HeliosTransformer3DModel(**{**config, **more}).eval()
    torch.nn.init.normal_(model.proj_out.weight, std=0.2)
    return model


def helios() -> HeliosPipeline:
    pipe = HeliosPipeline(
        tokenizer=tokenizer(),
        text_encoder=_umt5(),
        vae=_wan_vae(),
        scheduler=HeliosScheduler(stages=1, stage_range=[0, 1], scheduler_type="euler", use_dynamic_shifting=True),
        transformer=helios_transformer(),
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def far_transformer(**more: Any) -> AnyFlowFARTransformer3DModel:
    torch.manual_seed(0)
    config: dict[str, Any] = {
        "num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "text_dim": WIDTH,
        "freq_dim": 16, "ffn_dim": 32, "num_layers": 2, "rope_max_seq_len": 64, "chunk_partition": (1, 2, 2, 2),
        "full_chunk_limit": 2,
    }  # fmt: skip
    model = AnyFlowFARTransformer3DModel(**{**config, **more}).eval()
    torch.nn.init.normal_(model.proj_out.weight, std=0.2)
    return model


def far() -> AnyFlowFARPipeline:
    pipe = AnyFlowFARPipeline(
        tokenizer=tokenizer(),
        text_encoder=_umt5(),
        transformer=far_transformer(),
        vae=_wan_vae(),
        scheduler=FlowMapEulerDiscreteScheduler(shift=5.0),
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe
