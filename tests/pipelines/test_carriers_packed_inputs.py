"""Carriers of networks that pack their history: codecs, texts, which network is whose, wrong inputs."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch

from mediaspec.memory.base import FrameGroup, MemoryRead
from mediaspec.memory.full import FullMemory
from mediaspec.pipelines.carriers import carrier_for
from mediaspec.pipelines.carriers.base import Carrier
from mediaspec.pipelines.carriers.far import FARCarrier
from mediaspec.pipelines.carriers.framepack import FramePackCarrier
from mediaspec.pipelines.carriers.helios import HeliosCarrier
from mediaspec.pipelines.carriers.packed import dynamic_shift

from . import tiny_packed
from .tiny_packed import NAMES, frames_of, randn, told, written
from .tiny_video import WIDTH

pytestmark = pytest.mark.filterwarnings("ignore")


# ---- pictures and texts


@pytest.mark.parametrize("name", NAMES)
def test_pictures_to_latents_and_back(carriers: Any, name: str) -> None:
    carrier = carriers[name]()
    assert carrier.latent_shape(32, 32) == (4, 4, 4) and carrier.frame_tokens(32, 32) == 4
    video = randn(1, 3, 5, 32, 32).clamp(-1, 1)
    with torch.no_grad():
        latents = carrier.encode(video)
        assert latents.shape == (1, 4, 2, 4, 4) and torch.equal(latents, carrier.encode(video))
        assert carrier.decode(latents).shape == (1, 3, 5, 32, 32)
        vae = carrier.vae
        plain = vae.encode(video).latent_dist.mode()
    if name == "framepack":
        torch.testing.assert_close(latents, plain * vae.config.scaling_factor)
    else:
        torch.testing.assert_close(latents[:, 1], plain[:, 1] / 2)  # mean 0, deviation 2
    for bad, message in (
        (video[:, :, :4], "write 1 or 5"),
        (video[..., :30], "multiples of 16"),
        (video * float("nan"), "NaN"),
        (video * 200, "colours reach"),
        (video[:, :2], r"\[B, 3, T, H, W\]"),
    ):
        with pytest.raises(ValueError, match=message):
            carrier.encode(bad)
    with pytest.raises(ValueError, match="latents have shape"):
        carrier.decode(latents[:, :3])


def test_texts_and_pictures_are_encoded(framepack: Any, far: Any) -> None:
    carrier = FramePackCarrier(framepack)
    picture = randn(1, 3, 32, 32).clamp(-1, 1)
    carrier.condition("a red ball", "blue", 9.0, batch=2, image=picture, true_cfg_scale=2.0)
    extra, other = carrier.conditioning.extra, carrier.conditioning.negative_extra
    assert carrier.conditioning.embeds.shape == (2, 256, WIDTH) and extra["image_embeds"].shape == (2, 4, 8)
    assert extra["guidance"].tolist() == [9000.0, 9000.0] and carrier.conditioning.guidance_scale == 2.0
    assert not torch.equal(extra["pooled_projections"], other["pooled_projections"])
    carrier.condition("a red ball")
    assert carrier.conditioning.extra["image_embeds"].shape == (1, 0, 8)
    with torch.no_grad():
        out = carrier(frames_of(2), torch.ones(2).double(), torch.arange(2), MemoryRead(), None)
    assert bool(torch.isfinite(out).all())
    causal = FARCarrier(far, max_sequence_length=12)
    causal.condition("a red apple")
    assert causal.conditioning.embeds.shape == (1, 12, WIDTH)


def test_signatures_tell_all_arguments() -> None:
    """Also those that a class hands on to its base."""
    shared, told, far = (
        inspect.signature(kind.condition).parameters for kind in (Carrier, FramePackCarrier, FARCarrier)
    )
    assert set(told) - set(shared) == {
        "true_cfg_scale", "image_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds",
        "prompt_attention_mask", "negative_prompt_attention_mask",
    }  # fmt: skip
    assert not set(shared) - set(told) and list(told)[:4] == list(shared)[:4]
    assert told["guidance_scale"].default == 6.0 and dict(far) == dict(shared)


# ---- which network, wrong inputs


def test_networks_are_known_by_class_name(carriers: Any) -> None:
    for name, model in zip(
        NAMES,
        (tiny_packed.framepack_transformer(), tiny_packed.helios_transformer(), tiny_packed.far_transformer()),
    ):
        assert carriers[name]().name == name and carrier_for(model).name == name
        assert told(carrier_for(model)).schedule(steps=2).shift == 1.0
        with pytest.raises(ValueError, match="no codec"):
            carrier_for(model).encode(torch.zeros(1, 3, 1, 32, 32))
        with pytest.raises(ValueError, match="no text encoder"):
            carrier_for(model).condition("a red ball")


def test_networks_that_lack_the_history() -> None:
    with pytest.raises(ValueError, match="has_clean_x_embedder=True"):
        FramePackCarrier(tiny_packed.framepack_transformer(has_clean_x_embedder=False))
    with pytest.raises(ValueError, match="has_multi_term_memory_patch=True"):
        HeliosCarrier(tiny_packed.helios_transformer(has_multi_term_memory_patch=False))
    with pytest.raises(ValueError, match="AnyFlowFARTransformer3DModel"):
        FARCarrier(tiny_packed.helios_transformer())


def test_the_pyramid_pipeline_is_refused(helios: Any) -> None:
    from diffusers import HeliosPyramidPipeline

    pyramid = HeliosPyramidPipeline(**helios.components)
    with pytest.raises(ValueError, match="growing sizes"):
        carrier_for(pyramid)


@pytest.mark.parametrize("name", NAMES)
def test_wrong_inputs(carriers: Any, name: str) -> None:
    make = carriers[name]
    with pytest.raises(ValueError, match="did you mean"):
        make(**{"framepack": {"historysizes": 1}, "helios": {"keep_firstframe": 1}, "far": {"use_kvcache": 1}}[name])
    carrier, x, ids = make(), frames_of(2), torch.tensor([4, 5])
    ones = torch.ones(2).double()
    with pytest.raises(ValueError, match="no text yet"):
        carrier(x, ones, ids, MemoryRead(), None)
    told(carrier)
    with pytest.raises(ValueError, match="no actions"):
        carrier(x, ones, ids, MemoryRead(), torch.zeros(1, 2, 1))
    with pytest.raises(ValueError, match="batch=1 and the window has 2"):
        carrier(x.expand(2, -1, -1, -1, -1), ones, ids, MemoryRead(), None)
    with pytest.raises(ValueError, match="multiples of 2 x 2"):
        carrier(x[..., :3], ones, ids, MemoryRead(), None)
    with pytest.raises(ValueError, match="fractions of the noisiest"):
        carrier(x, ones * 700, ids, MemoryRead(), None)
    with pytest.raises(ValueError, match="one size"):
        small = FrameGroup(randn(1, 4, 2, 2, 2), torch.arange(2)[None])
        carrier(x, ones, ids, MemoryRead((small,)), None)
    with pytest.raises(ValueError, match="after the window|the window makes"):
        carrier(x, ones, ids, MemoryRead((FrameGroup(frames_of(2), torch.tensor([[7, 8]])),)), None)
    with pytest.raises(ValueError, match="the window makes"):
        carrier(x, ones, ids, MemoryRead((FrameGroup(frames_of(1), torch.tensor([[5]])),)), None)
    with pytest.raises(ValueError, match="several levels"):
        carrier.schedule(name="fifo")
    if name != "far":
        with pytest.raises(ValueError, match="one timestep for a window"):
            carrier(x, torch.tensor([0.5, 1.0]).double(), ids, MemoryRead(), None)
        for bad in ((16, 2), (16, 2, 0), (-1, 2, 1)):
            with pytest.raises(ValueError, match=r"for instance \[16, 2, 1\]"):
                make(history_sizes=bad)


def test_framepack_wrong_inputs(framepack: Any) -> None:
    carrier = FramePackCarrier(framepack)
    with pytest.raises(ValueError, match="vanilla, inverted"):
        FramePackCarrier(framepack, sampling_type="forward")
    with pytest.raises(ValueError, match="pooled embeddings of None"):
        carrier.condition(prompt_embeds=randn(1, 5, WIDTH))
    with pytest.raises(ValueError, match="a mask of shape"):
        told(carrier, prompt_attention_mask=torch.ones(1, 3))
    with pytest.raises(ValueError, match="image_embeds has shape"):
        told(carrier, image_embeds=randn(1, 2, 7))
    with pytest.raises(ValueError, match="takes no 'camera'"):
        told(carrier, camera=3)
    inverted = told(FramePackCarrier(framepack, sampling_type="inverted_anti_drifting"))
    with pytest.raises(ValueError, match=r"history\[:, :, -1:\]"):
        inverted(frames_of(2), torch.ones(2).double(), torch.tensor([7, 8]), written(FullMemory(), 4), None)


def test_shift_of_the_window_size(framepack: Any) -> None:
    from diffusers.pipelines.helios.pipeline_helios import calculate_shift

    config = {"use_dynamic_shifting": True, "shift": 1.0}
    for tokens in (16, 2000):
        assert dynamic_shift(config, tokens) == pytest.approx(np.exp(calculate_shift(tokens)))
        assert dynamic_shift(config | {"time_shift_type": "linear"}, tokens) == pytest.approx(calculate_shift(tokens))
    assert dynamic_shift(config, 10**6, most=7.0) == pytest.approx(7.0)
    carrier = FramePackCarrier(framepack)
    assert carrier.schedule_for(32, 32).shift == pytest.approx(np.exp(calculate_shift(9 * 4)))
    assert carrier.schedule_for(1280, 1280).shift == pytest.approx(7.0)
    assert carrier.schedule(shift=3.0).shift == 3.0


def test_cost_figures(framepack: Any) -> None:
    assert FramePackCarrier(framepack).dimensions() == {"dim": 20, "ffn": 80, "layers": 2}
    assert FARCarrier(tiny_packed.far_transformer()).memory_tokens(MemoryRead()) == 0
