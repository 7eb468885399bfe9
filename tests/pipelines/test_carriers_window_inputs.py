"""Wan, SkyReels-V2 and LTX as carriers: pictures and latents, what is special to a family, and bad input."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from diffusers import (
    LTXPipeline,
    WanTransformer3DModel,
)

from mediaspec.memory.base import FrameGroup, MemoryRead, MemoryTokens
from mediaspec.pipelines.carriers import carrier_for
from mediaspec.pipelines.carriers.ltx import LTXCarrier
from mediaspec.pipelines.carriers.skyreels import SkyReelsCarrier
from mediaspec.pipelines.carriers.wan import WanCarrier

from .tiny_video import WIDTH, wan, wan_transformer
from .tiny_window import (
    CELLS,
    FAMILIES,
    NOTHING,
    Seen,
    asked,
    carrier_of,
    ltx_transformer,
    ltx_vae,
    normal,
    past,
    pipe_of,
    skyreels_transformer,
    window,
)

# ---- pictures


@pytest.mark.parametrize("family", FAMILIES)
def test_pictures_become_latents_and_come_back_in_shape(family):
    carrier = carrier_of(family)
    size = carrier.spatial_ratio * CELLS
    video = normal(1, 3, 2 * carrier.temporal_ratio + 1, size, size).clamp(-1, 1)
    with torch.no_grad():
        latents = carrier.encode(video)
        back = carrier.decode(latents)
    assert latents.shape == (1, *carrier.latent_shape(size, size)[:1], 3, CELLS, CELLS)
    assert back.shape == video.shape and float(back.abs().max()) <= 1
    with torch.no_grad():
        assert torch.equal(carrier.decode(latents), back)


def test_latents_have_the_scale_of_the_pipelines():
    carrier = carrier_of("ltx", decode_timestep=0.05)
    vae, video = carrier.vae, normal(1, 3, 5, 16, 16).clamp(-1, 1)
    with torch.no_grad():
        raw = vae.encode(video).latent_dist.mode()
        latents = carrier.encode(video)
        own = LTXPipeline._normalize_latents(raw, vae.latents_mean, vae.latents_std, vae.config.scaling_factor)
        torch.testing.assert_close(latents, own)
        noise = torch.randn(raw.shape, generator=torch.Generator().manual_seed(0))
        shown = vae.decode(0.95 * raw + 0.05 * noise, torch.tensor([0.05]), return_dict=False)[0].clamp(-1, 1)
        torch.testing.assert_close(carrier.decode(latents), shown, atol=1e-5, rtol=1e-5)
    carrier = carrier_of("wan")
    vae = carrier.vae
    before = {key: list(vae.config[key]) for key in ("latents_mean", "latents_std")}
    vae.register_to_config(latents_mean=[1.0, 0.0, -1.0, 0.5], latents_std=[2.0, 1.0, 0.5, 4.0])
    try:
        video = normal(1, 3, 5, 32, 32).clamp(-1, 1)
        with torch.no_grad():
            raw, latents = vae.encode(video).latent_dist.mode(), carrier.encode(video)
            back = carrier.decode(latents)
            torch.testing.assert_close(back, vae.decode(raw, return_dict=False)[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(latents[:, 0], (raw[:, 0] - 1) / 2)
    finally:
        vae.register_to_config(**before)


def test_codecs_that_draw_noise_repeat_and_leave_the_global_generator_alone():
    pipe = pipe_of("ltx")
    noisy = LTXPipeline(
        scheduler=pipe.scheduler, vae=ltx_vae(decoder_inject_noise=(True,) * 5), text_encoder=pipe.text_encoder,
        tokenizer=pipe.tokenizer, transformer=pipe.transformer,
    )  # fmt: skip
    for name, weight in noisy.vae.named_parameters():
        if "per_channel_scale" in name:  # zero would hide the noise
            torch.nn.init.ones_(weight)
    first, other = (carrier_for(noisy, "ltx", decode_seed=seed) for seed in (0, 1))
    state = torch.get_rng_state()
    with torch.no_grad():
        pictures = first.decode(window(2))
        assert torch.equal(first.decode(window(2)), pictures)
        assert not torch.allclose(other.decode(window(2)), pictures)
    assert torch.equal(torch.get_rng_state(), state)


# ---- one family each


def test_skyreels_texts_are_read_or_the_missing_package_is_named():
    carrier = carrier_of("skyreels")
    expected = carrier.conditioning.embeds
    if find_spec("ftfy") is None:
        with pytest.raises(ImportError, match="ftfy: pip install"):
            carrier.condition("a red apple")
    else:
        carrier.condition("a red apple")
        torch.testing.assert_close(carrier.conditioning.embeds, expected)


def test_causal_blocks_are_set_for_a_call_and_taken_back():
    carrier = carrier_of("skyreels", causal_block=2)
    read, x = past([0, 1]), window(4)
    out = asked(carrier, x, 0.5, 2, read)
    assert carrier.model.config.num_frame_per_block == 1
    later = x.clone()
    later[:, :, 2:] += 1
    changed = asked(carrier, later, 0.5, 2, read)
    torch.testing.assert_close(changed[:, :, :2], out[:, :, :2], atol=1e-5, rtol=1e-5)  # the past does not see it
    assert not torch.allclose(changed[:, :, 2:], out[:, :, 2:], atol=1e-3)
    broken = carrier.model.proj_out.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        asked(carrier, x, 0.5, 2, read)
    broken.remove()
    assert carrier.model.config.num_frame_per_block == 1


def test_references_of_causal_networks_fill_whole_blocks():
    carrier, x, read = carrier_of("skyreels", causal_block=2), window(2), past([1, 2, 3])
    with Seen(carrier.model) as calls:
        asked(carrier, x, 0.5, 4, read)
        asked(carrier, x, 0.5, 4, past([3]))
    assert torch.equal(calls[0]["hidden_states"][:, :, :2], read.frames[:, :, 1:])
    filled = calls[1]["hidden_states"]
    assert filled.shape[2] == 4 and torch.equal(filled[:, :, 0], filled[:, :, 1])
    with pytest.raises(ValueError, match="attention blocks of 2"):
        asked(carrier, window(3), 0.5)
    with pytest.raises(ValueError, match="behind the window"):
        asked(carrier, x, 0.5, 4, past([6, 7]))


def test_weights_that_are_told_the_frame_rate_take_batches_and_guidance():
    carrier = SkyReelsCarrier(skyreels_transformer(inject_sample_info=True), fps=16)
    text, none = normal(2, 3, WIDTH), normal(2, 3, WIDTH, seed=4)
    carrier.condition(prompt_embeds=text, negative_prompt_embeds=none, guidance_scale=2.0, batch=2)
    x = window(2, 2)
    out = asked(carrier, x, [0.25, 0.5])
    carrier.condition(prompt_embeds=text[1:], negative_prompt_embeds=none[1:], guidance_scale=2.0)
    torch.testing.assert_close(out[1:], asked(carrier, x[1:], [0.25, 0.5]), atol=1e-5, rtol=1e-5)
    carrier.fps = 24
    assert not torch.allclose(out[1:], asked(carrier, x[1:], [0.25, 0.5]), atol=1e-4)


def test_the_two_networks_of_wan_share_the_levels():
    pipe = wan()
    pipe.register_modules(transformer_2=wan_transformer(7))
    pipe.register_to_config(boundary_ratio=0.6)
    carrier = carrier_for(pipe, "wan", max_sequence_length=8)
    carrier.condition("a red apple")
    x, levels = window(2), [0.5, 0.75]
    first, second = WanCarrier(pipe.transformer), WanCarrier(pipe.transformer_2)
    for one in (first, second):
        one.conditioning = carrier.conditioning
    out = asked(carrier, x, levels, 5, past([4]))
    assert torch.equal(out[:, :, 0], asked(second, x, levels, 5, past([4]))[:, :, 0])
    assert torch.equal(out[:, :, 1], asked(first, x, levels, 5, past([4]))[:, :, 1])
    with Seen(pipe.transformer_2) as calls:
        asked(carrier, x, 0.75, 5, past([4]))  # a clean reference does not call the second network
    assert not calls


def test_given_text_masks_are_used():
    carrier = LTXCarrier(ltx_transformer())
    embeds, x = normal(1, 3, WIDTH), window(2)
    carrier.condition(prompt_embeds=embeds[:, :2])
    short = asked(carrier, x, 0.5)
    carrier.condition(prompt_embeds=embeds, prompt_attention_mask=torch.tensor([[1, 1, 0]]))
    torch.testing.assert_close(asked(carrier, x, 0.5), short, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match=r"prompt_attention_mask has shape \(1, 2\)"):
        carrier.condition(prompt_embeds=embeds, prompt_attention_mask=torch.ones(1, 2))


# ---- bad input


@pytest.mark.parametrize("family", FAMILIES)
def test_windows_that_do_not_fit_are_clear_errors(family):
    carrier = carrier_of(family)
    with pytest.raises(ValueError, match=r"\[B, 4, n, h, w\]"):
        asked(carrier, normal(1, 5, 2, CELLS, CELLS), 0.5)
    with pytest.raises(ValueError, match="at least one frame"):
        asked(carrier, normal(1, 4, 0, CELLS, CELLS), 0.5)
    with pytest.raises(ValueError, match=r"levels \[1.5"):
        asked(carrier, window(2), 1.5)
    with pytest.raises(ValueError, match="batch=2"):
        asked(carrier, window(2, 2), 0.5)
    with pytest.raises(ValueError, match="one size"):
        asked(carrier, window(2), 0.5, 5, MemoryRead((FrameGroup(normal(1, 4, 1, 2, 2), torch.tensor([[1]])),)))
    tokens = MemoryTokens(*[torch.zeros(1, 2, 3)] * 3, torch.ones(2, 2), torch.ones(2))
    with pytest.raises(ValueError, match="tokens only"):
        asked(carrier, window(2), 0.5, 5, MemoryRead(tokens=tokens))
    with pytest.raises(ValueError, match="takes no actions"):
        carrier(window(2), torch.ones(2).double(), torch.arange(2), NOTHING, torch.zeros(1, 2, 1))
    size = carrier.spatial_ratio * CELLS
    with pytest.raises(ValueError, match="write 1 or"):
        carrier.encode(torch.zeros(1, 3, 2, size, size))
    with pytest.raises(ValueError, match="needs multiples of"):
        carrier.encode(torch.zeros(1, 3, 1, size + 1, size))
    with pytest.raises(ValueError, match="NaN"):
        carrier.encode(torch.full((1, 3, 1, size, size), float("nan")))
    with pytest.raises(ValueError, match=r"give \[B, 4, t, h, w\]"):
        carrier.decode(torch.zeros(1, 3, 1, CELLS, CELLS))
    if family != "ltx":
        with pytest.raises(ValueError, match="multiples of 2 x 2"):
            asked(carrier, normal(1, 4, 2, 3, CELLS), 0.5)


BARE = {
    "wan": lambda: WanCarrier(wan_transformer()),
    "skyreels": lambda: SkyReelsCarrier(skyreels_transformer()),
    "ltx": lambda: LTXCarrier(ltx_transformer()),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_bare_network_needs_embeddings_and_has_no_codec(family):
    carrier = BARE[family]()
    with pytest.raises(ValueError, match="has no text yet"):
        asked(carrier, window(2), 0.5)
    with pytest.raises(ValueError, match="has no text encoder"):
        carrier.condition("a red apple")
    with pytest.raises(ValueError, match="needs negative_prompt_embeds"):
        carrier.condition(prompt_embeds=normal(1, 3, WIDTH), guidance_scale=2.0)
    with pytest.raises(ValueError, match="bare network, which has no codec"):
        carrier.decode(window(1))
    carrier.condition(prompt_embeds=normal(1, 3, WIDTH))
    assert bool(torch.isfinite(asked(carrier, window(2), 0.5)).all())


def test_networks_and_settings_of_another_kind_are_clear_errors():
    channels = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=12, out_channels=4,
        text_dim=WIDTH, freq_dim=16, ffn_dim=32, num_layers=1,
    )  # fmt: skip
    with pytest.raises(ValueError, match="extra channels"):
        carrier_for(channels, "wan")
    with pytest.raises(ValueError, match="did you mean 'trained_frames'"):
        WanCarrier(wan_transformer(), trained_frame=8)
    with pytest.raises(ValueError, match="rotary positions for 64"):
        WanCarrier(wan_transformer(), trained_frames=65)
    with pytest.raises(ValueError, match="history_guidance_scale=nan"):
        WanCarrier(wan_transformer(), history_guidance_scale=float("nan"))
    with pytest.raises(ValueError, match="causal_block=0"):
        carrier_of("skyreels", causal_block=0)
    with pytest.raises(ValueError, match="frame_rate=0"):
        carrier_of("ltx", frame_rate=0)
    with pytest.raises(ValueError, match="number in all"):
        ids = torch.tensor([[0, 1], [0, 9]])
        asked(carrier_of("wan", batch=2), window(1, 2), 0.5, 5, MemoryRead((FrameGroup(window(2, 2), ids),)))


@pytest.mark.parametrize("family", FAMILIES)
def test_carriers_are_found_by_class_name(family):
    assert carrier_for(pipe_of(family)).name == family
    assert carrier_for(pipe_of(family).transformer).name == family
