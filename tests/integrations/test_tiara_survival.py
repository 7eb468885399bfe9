"""What others do to a model while TiARA is enabled on it, and what is left afterwards: real classes, tiny."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from diffusers import UNetMotionModel
from diffusers.hooks import HookRegistry, ModelHook
from diffusers.models.attention_processor import AttnProcessor2_0, IPAdapterAttnProcessor2_0
from diffusers.models.unets.unet_motion_model import AnimateDiffTransformer3D
from diffusers.pipelines.free_noise_utils import SplitInferenceModule

import mediaspec
from mediaspec.attention.tiara import TiARA
from mediaspec.integrations.tiara_temporal import TiaraAttnProcessor, temporal_attentions

from .tiny_temporal import FRAMES, Custom, Manual, animatediff, generate, motion, run


@pytest.fixture(scope="module")
def unet():
    torch.manual_seed(3)
    return motion()


@pytest.fixture(scope="module")
def pipe():
    return animatediff()


def test_free_noise_before_and_after(pipe):
    pipe.enable_free_noise(context_length=8, context_stride=4)
    try:
        plain = generate(pipe, 16)
        handle = mediaspec.enable(pipe, attention=TiARA())
        edited, found = generate(pipe, 16), handle.summary()
        assert not torch.equal(edited, plain)
        assert found["modules"] == 14 and found["calls"] == 14 * 2 * 3  # two steps, three windows
        handle.remove()
        assert torch.equal(generate(pipe, 16), plain)
    finally:
        pipe.disable_free_noise()
    short = generate(pipe)
    with mediaspec.enable(pipe, attention=TiARA()) as handle:
        edited_short = generate(pipe)
        pipe.enable_free_noise(context_length=8, context_stride=4)  # new blocks behind the handle's back
        assert torch.equal(generate(pipe, 16), edited)
        assert handle.summary()["calls"] == 14 * 2 + 14 * 2 * 3
        pipe.disable_free_noise()
        assert torch.equal(generate(pipe), edited_short)
    assert torch.equal(generate(pipe), short)


def test_split_inference():
    """Renamed paths, and parts of the rows at a time."""
    model = motion()
    with mediaspec.enable(model, attention=TiARA()):
        wanted = run(model)
    for module in model.modules():
        if isinstance(module, AnimateDiffTransformer3D):
            blocks = module.transformer_blocks
            blocks[0] = SplitInferenceModule(blocks[0], 8, 0, ["hidden_states", "encoder_hidden_states"])
    with mediaspec.enable(model, attention=TiARA()) as handle:
        torch.testing.assert_close(run(model), wanted, rtol=1e-4, atol=1e-5)
        assert handle.summary()["modules"] == 14
    with pytest.raises(ValueError, match="split inference"):
        mediaspec.enable(model, attention=TiARA(pool="space"))


def test_fused_projections(pipe):
    """Fusing puts other processors in; the edit comes back by itself, also after unfusing puts old ones back."""
    model = motion()
    plain = run(model)
    with mediaspec.enable(model, attention=TiARA()) as handle:
        edited = run(model)
        with torch.no_grad():
            model.fuse_qkv_projections()
        torch.testing.assert_close(run(model), edited, rtol=1e-4, atol=1e-5)
        assert handle.summary()["calls"] == 2 * 14
        model.unfuse_qkv_projections()  # brings processors of the first installation
        torch.testing.assert_close(run(model), edited, rtol=1e-4, atol=1e-5)
        with torch.no_grad():
            model.fuse_qkv_projections()
        run(model)
    model.unfuse_qkv_projections()  # and brings them once more after the handle is gone
    torch.testing.assert_close(run(model), plain, rtol=1e-5, atol=1e-6)


def test_default_processors_put_in_meanwhile(unet):
    with mediaspec.enable(unet, attention=TiARA()) as handle:
        edited = run(unet)
        unet.set_attn_processor(AttnProcessor2_0())
        assert torch.equal(run(unet), edited) and handle.summary()["calls"] == 28
        copied = copy.deepcopy(unet)
    with mediaspec.enable(unet, attention=TiARA(route="hook")) as handle:
        edited = run(unet)
        unet.set_attn_processor(AttnProcessor2_0())
        assert torch.equal(run(unet), edited)
    with mediaspec.enable(copied, attention=TiARA()) as handle:
        copied.set_default_attn_processor()  # refuses models that have processors it does not know
        torch.testing.assert_close(run(copied), edited, rtol=1e-4, atol=1e-5)
        assert handle.summary()["calls"] == 14


def image_prompt(unet: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Weights of an image adapter with four tokens, random."""
    g = torch.Generator().manual_seed(6)
    projection = {"proj.weight": (4 * 32, 8), "proj.bias": (4 * 32,), "norm.weight": (32,), "norm.bias": (32,)}
    looks = [
        unet.get_submodule(name.removesuffix(".processor"))
        for name in unet.attn_processors
        if name.endswith("attn2.processor") and "motion_modules" not in name
    ]
    keys = {
        f"{2 * index + 1}.to_{one}_ip.weight": attn.to_k.weight.shape
        for index, attn in enumerate(looks)
        for one in "kv"
    }
    return {
        part: {key: torch.randn(shape, generator=g) for key, shape in shapes.items()}
        for part, shapes in (("image_proj", projection), ("ip_adapter", keys))
    }


def test_image_prompts_loaded_and_unloaded_meanwhile():
    """diffusers makes a new processor of every module's class; the edit comes back, and goes as it came."""
    pipe = animatediff()
    unet, g = pipe.unet, torch.Generator().manual_seed(1)
    sample, text = torch.randn(1, 4, FRAMES, 4, 4, generator=g), torch.randn(FRAMES, 5, 32, generator=g)

    @torch.no_grad()
    def out(*images: torch.Tensor) -> torch.Tensor:
        more = {"added_cond_kwargs": {"image_embeds": list(images)}} if images else {}
        return unet(sample, 500.0, text, **more).sample

    def kinds() -> list[type]:
        return [type(attn.processor) for _, attn in temporal_attentions(unet)]

    plain, picture = out(), torch.randn(FRAMES, 1, 8, generator=g)
    with mediaspec.enable(pipe, attention=TiARA()) as handle:
        edited = out()
        unet._load_ip_adapter_weights([image_prompt(unet)], low_cpu_mem_usage=False)
        assert any(isinstance(one, IPAdapterAttnProcessor2_0) for one in unet.attn_processors.values())
        prompted = out(picture)
        assert kinds() == [TiaraAttnProcessor] * 14 and handle.summary()["calls"] == 28
    without = out(picture)
    assert kinds() == [AttnProcessor2_0] * 14 and not torch.equal(without, prompted)
    with mediaspec.enable(pipe, attention=TiARA()):
        assert torch.equal(out(picture), prompted)
        pipe.unload_ip_adapter()
        assert torch.equal(out(), edited)
    assert torch.equal(out(), plain)


@pytest.mark.parametrize("route", ["processor", "hook"])
def test_a_refused_processor_is_refused_every_time(route):
    """Put in while enabled. No forward pass goes through unedited after the first error."""
    model = motion()
    name, attn = temporal_attentions(model)[3]
    plain = run(model)
    with mediaspec.enable(model, attention=TiARA(route=route)) as handle:
        edited = run(model)
        if route == "hook":
            for _, one in temporal_attentions(model):
                one.set_processor(Manual())
            del attn.forward  # and one of the hooks is gone, so that they are put on again
            kind, words = RuntimeError, "set AttnProcessor2_0"
        else:
            attn.set_processor(Custom())
            kind, words = ValueError, f"{name} has a Custom"
        for _ in range(2):
            with pytest.raises(kind, match=words):
                run(model)
        model.set_attn_processor(AttnProcessor2_0())
        assert torch.equal(run(model), edited) and handle.summary()["installed"] == 14
    assert torch.equal(run(model), plain)


def test_saving_while_enabled_saves_the_model(unet, tmp_path):
    plain = run(unet)
    for route in ("processor", "hook"):
        with mediaspec.enable(unet, attention=TiARA(route=route)):
            unet.save_pretrained(tmp_path / route)
        again = UNetMotionModel.from_pretrained(tmp_path / route).eval()
        assert again.state_dict().keys() == unet.state_dict().keys()
        assert torch.equal(run(again), plain)


def test_a_copy_is_the_plain_model(unet):
    plain = run(unet)
    with mediaspec.enable(unet, attention=TiARA()) as handle:
        run(unet)
        copied = copy.deepcopy(unet)
        assert torch.equal(run(copied), plain) and handle.summary()["calls"] == 14
        assert not any(isinstance(attn.processor, TiaraAttnProcessor) for _, attn in temporal_attentions(copied))


@pytest.mark.parametrize("route", ["processor", "hook"])
def test_offload_hooks_survive(route):
    """accelerate wraps `forward` too; whatever the order, its hooks stay and the model is the same afterwards."""
    model = motion()
    plain = run(model)
    attn = temporal_attentions(model)[0][1]
    for first in (True, False):
        if first:
            for one in (model, attn):
                add_hook_to_module(one, AlignDevicesHook(execution_device="cpu"))
        handle = mediaspec.enable(model, attention=TiARA(route=route))
        if not first:
            for one in (model, attn):
                add_hook_to_module(one, AlignDevicesHook(execution_device="cpu"))
        assert not torch.equal(run(model), plain)
        handle.remove()
        assert hasattr(model, "_hf_hook") and hasattr(attn, "_hf_hook")
        assert torch.equal(run(model), plain)
        for one in (model, attn):
            remove_hook_from_module(one)
        assert torch.equal(run(model), plain)
        with mediaspec.enable(model, attention=TiARA(route=route)) as handle:
            run(model)
            assert handle.summary()["modules"] == 14
        assert torch.equal(run(model), plain)


def test_hooks_that_others_take_away_come_back():
    """Offloading enabled before and disabled after: accelerate puts the forward of before its own time back."""
    model = motion()
    plain = run(model)
    attn = temporal_attentions(model)[0][1]
    add_hook_to_module(attn, AlignDevicesHook(execution_device="cpu"))
    with mediaspec.enable(model, attention=TiARA(route="hook")) as handle:
        edited = run(model)
        remove_hook_from_module(attn)
        assert torch.equal(run(model), edited) and handle.summary()["calls"] == 28
    assert torch.equal(run(model), plain)


class Doubled(ModelHook):
    """Stands for a feature cache, which replaces the forward of a module too."""

    def new_forward(self, module, *args, **kwargs):
        return 2 * self.fn_ref.original_forward(*args, **kwargs)


def test_a_hook_above_ours_survives_removal():
    model = motion()
    attn = temporal_attentions(model)[0][1]
    registry = HookRegistry.check_if_exists_or_initialize(attn)
    registry.register_hook(Doubled(), "doubled")
    doubled = run(model)
    registry.remove_hook("doubled")
    handle = mediaspec.enable(model, attention=TiARA(route="hook"))
    HookRegistry.check_if_exists_or_initialize(attn).register_hook(Doubled(), "doubled")
    edited = run(model)
    handle.remove()
    assert torch.equal(run(model), doubled) and not torch.equal(edited, doubled)
    with mediaspec.enable(model, attention=TiARA(route="hook")):  # the one that had to stay serves again
        assert torch.equal(run(model), edited)


def test_an_enabled_model_can_be_forgotten():
    model = motion()
    mediaspec.enable(model, attention=TiARA())
    gone = weakref.ref(model)
    run(model)
    del model
    gc.collect()
    assert gone() is None
