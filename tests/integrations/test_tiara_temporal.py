"""TiARA in diffusers models with temporal attention: real classes, tiny."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel, UNetMotionModel
from diffusers.models.attention_processor import Attention, AttnProcessor, SlicedAttnProcessor
from torch import nn

import mediaspec
from mediaspec.attention.tiara import TiARA, adaptive_bias, corner_bias, edit_rows
from mediaspec.integrations.tiara_temporal import TiaraAttnProcessor, install, temporal_attentions
from mediaspec.integrations.video_context import VideoContext

from .tiny_temporal import BUILDERS, FRAMES, Custom, Manual, animatediff, generate, motion, run

# one layer per level. motion: 1 + 1 down, 1 mid, 2 + 2 up modules of two attentions. unet3d, i2vgen: transformer_in, 1
# down, 1 mid and 2 up of two. svd: 1 down, 1 mid and 2 up of one. latte: two layers of one
ATTENTIONS = {"motion": 14, "unet3d": 10, "i2vgen": 10, "svd": 4, "latte": 2}

SETTINGS = [{}, {"cap": True, "corner_frames": 2, "corner_strength": 1.0}, {"pool": "heads"}]

models: dict[str, Any] = {}


@pytest.fixture(params=ATTENTIONS)
def name(request):
    return request.param


@pytest.fixture
def model(name):
    if name not in models:
        torch.manual_seed(3)
        models[name] = BUILDERS[name]()
    return models[name]


@pytest.fixture
def unet():
    if "motion" not in models:
        torch.manual_seed(3)
        models["motion"] = motion()
    return models["motion"]


@pytest.fixture(scope="module")
def pipe():
    return animatediff()


@pytest.mark.parametrize("route", ["processor", "hook"])
def test_every_family(model, name, route):
    before, weights = run(model), {key: value.clone() for key, value in model.state_dict().items()}
    handle = mediaspec.enable(model, attention=TiARA.safe(route=route))
    during, found = run(model), handle.summary()
    assert (during - before).abs().max() > 1e-4
    assert found["modules"] == found["installed"] == found["calls"] == ATTENTIONS[name]
    assert 0 < found["mean_delta"] <= 6 and 0 < found["mean_rho"] < 1
    assert found["own_frame_mass_after"] < found["own_frame_mass"] < 1
    assert set(found["by_module"]) == {one for one, _ in temporal_attentions(model)} and set(found["by_step"]) == {0}
    assert found["settings"]["cap"] is True and found["time_share"] is None
    handle.remove()
    handle.remove()
    assert torch.equal(run(model), before) and not handle.summary()["enabled"]
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert not any(isinstance(attn.processor, TiaraAttnProcessor) for _, attn in temporal_attentions(model))
    assert not any("forward" in vars(attn) for _, attn in temporal_attentions(model))


def test_without_strength_nothing_changes(model):
    """Bit for bit: only measured, the model's own attention gives the output."""
    before = run(model)
    for route in ("processor", "hook"):
        with mediaspec.enable(model, attention="tiara", alpha=0.0, route=route) as handle:
            assert torch.equal(run(model), before)
            found = handle.summary()
            assert found["mean_delta"] == 0 and found["own_frame_mass"] == pytest.approx(found["own_frame_mass_after"])
    with mediaspec.enable(model, attention="tiara", alpha=1e-7) as handle:  # edited, by next to nothing
        torch.testing.assert_close(run(model), before, rtol=1e-4, atol=1e-5)
        assert handle.summary()["calls"] == handle.summary()["installed"]


def test_routes_agree(unet):
    with mediaspec.enable(unet, attention=TiARA()):
        one = run(unet)
    with mediaspec.enable(unet, attention=TiARA(route="hook")):
        torch.testing.assert_close(run(unet), one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"qk_norm": "layer_norm"},
        {"norm_num_groups": 4, "residual_connection": True, "rescale_output_factor": 2.0},
        {"fused": True},
        {"scale_qk": False, "processor": AttnProcessor()},
        {"scale_qk": False, "processor": SlicedAttnProcessor(2)},
    ],
    ids=str,
)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_processor_is_the_algorithm(more, settings):
    torch.manual_seed(4)
    more = dict(more)
    fused = more.pop("fused", False)
    attn = Attention(query_dim=16, heads=2, dim_head=12, **more).eval()
    x = torch.randn(5, FRAMES, 16)
    with torch.no_grad():
        if fused:
            attn.fuse_projections()
        hidden = x if attn.group_norm is None else attn.group_norm(x.mT).mT
        q, k, v = (to(hidden).view(5, FRAMES, 2, 12).transpose(1, 2) for to in (attn.to_q, attn.to_k, attn.to_v))
        if attn.norm_q is not None:
            q, k = attn.norm_q(q), attn.norm_k(k)
        config = TiARA(**settings)
        rows = (q @ k.mT * attn.scale).softmax(-1)
        out = edit_rows(rows, adaptive_bias(rows, config), corner_bias(FRAMES, config)) @ v
        wanted = attn.to_out[0](out.transpose(1, 2).flatten(2))
        wanted = (wanted + x if attn.residual_connection else wanted) / attn.rescale_output_factor
        holder = nn.ModuleDict({"temp_attentions": nn.ModuleDict({"attn1": attn})})
        plain, cross = attn(x), attn(x, encoder_hidden_states=x)
        ((where, undo),) = install(holder, config, VideoContext(config))
        assert where == "temp_attentions.attn1"
        torch.testing.assert_close(attn(x), wanted, rtol=1e-5, atol=1e-5)
        assert torch.equal(attn(x, encoder_hidden_states=x), cross)  # not self-attention: the module's own
        undo()
        assert torch.equal(attn(x), plain)


def test_half_precision_inputs():
    attn = Attention(query_dim=16, heads=2, dim_head=8).eval().bfloat16()
    x = torch.randn(3, FRAMES, 16, generator=torch.Generator().manual_seed(5)).bfloat16()
    holder = nn.ModuleDict({"temp_attentions": nn.ModuleDict({"attn1": attn})})
    with torch.no_grad():
        install(holder, TiARA(), VideoContext(TiARA()))
        low = attn(x)
        high = attn.float()(x.float())
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), high, rtol=0.05, atol=0.02)


def test_pooling_over_space_keeps_videos_apart(unet):
    with mediaspec.enable(unet, attention="tiara", pool="space"):
        both = run(unet, videos=2)
        g = torch.Generator().manual_seed(1)
        sample, text = torch.randn(2, 4, FRAMES, 4, 4, generator=g), torch.randn(2 * FRAMES, 5, 32, generator=g)
        with torch.no_grad():
            second = unet(sample[1:], 500.0, text[FRAMES:]).sample
    torch.testing.assert_close(second, both[1:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("layers", "count"), [("mid_block", 2), (r"attn1$", 7), ([0, 1], 2), ([4, 5], 2)])
def test_layers(unet, layers, count):
    with mediaspec.enable(unet, attention=TiARA(layers=layers)) as handle:
        run(unet)
        found = handle.summary()
    assert found["modules"] == count
    if layers == [4, 5]:  # in order of execution: two down modules come before the middle
        assert all(one.startswith("mid_block") for one in found["by_module"])


def test_short_clips_are_left_alone(unet):
    before = run(unet, frames=4), run(unet, frames=1)
    with mediaspec.enable(unet, attention=TiARA()) as handle:
        assert torch.equal(run(unet, frames=4), before[0]) and torch.equal(run(unet, frames=1), before[1])
        assert handle.summary()["calls"] == 0 and handle.summary()["mean_delta"] is None
        run(unet)
        assert handle.summary()["calls"] == 14


def test_pipeline_and_steps(pipe):
    plain = generate(pipe, steps=3)
    for steps, wanted in ((None, {0, 1, 2}), ((1, 1), {1}), ((0.0, 0.5), {0, 1}), ((7, 9), set())):
        with mediaspec.enable(pipe, attention=TiARA(steps=steps)) as handle:
            edited = generate(pipe, steps=3)
            assert torch.equal(edited, plain) == (not wanted)
            if steps is None:  # a second run begins at step 0 again
                assert torch.equal(generate(pipe, steps=3), edited)
            found = handle.summary()
            assert {step for step, one in found["by_step"].items() if one["calls"]} == wanted
            assert found["calls"] == 14 * len(wanted) * (2 if steps is None else 1)
    assert torch.equal(generate(pipe, steps=3), plain)


def test_steps_of_a_loop_of_ones_own(unet):
    plain = run(unet)
    with mediaspec.enable(unet, attention=TiARA(steps=(0.5, 1.0))) as handle:
        with pytest.raises(ValueError, match="set_step"):
            run(unet)
        handle.set_step(1, 10)
        assert torch.equal(run(unet, 500.0), plain)
        handle.set_step(9, 10)
        assert not torch.equal(run(unet, 500.0), plain)
        assert set(handle.summary()["by_step"]) >= {9}


def test_inference_mode_and_gradients(unet):
    with mediaspec.enable(unet, attention=TiARA()) as handle:
        with torch.inference_mode():
            run(unet)
        run(unet)
        x = torch.randn(1, 4, FRAMES, 4, 4, requires_grad=True)
        unet(x, 10, torch.randn(FRAMES, 5, 32)).sample.sum().backward()
        assert x.grad is not None and x.grad.isfinite().all()
        assert handle.summary()["calls"] == 3 * 14
    unet.zero_grad()


def test_measure(unet):
    with mediaspec.enable(unet, attention="tiara", measure=True) as handle:
        run(unet)
        assert 0 < handle.summary()["time_share"] < 1


def test_stable_diffusion_with_a_motion_adapter_has_42():
    with torch.device("meta"):
        model = UNetMotionModel(cross_attention_dim=768, num_attention_heads=8)
    assert len(temporal_attentions(model)) == 42


def test_what_it_refuses(unet, pipe):
    kinds = {"down_block_types": ("DownBlock2D",), "up_block_types": ("UpBlock2D",)}
    with torch.device("meta"):
        image = UNet2DConditionModel(block_out_channels=(32,), **kinds)
    with pytest.raises(ValueError, match="UNet2DConditionModel"):
        mediaspec.enable(image, attention="tiara")
    with pytest.raises(ValueError, match="did you mean 'alpha'"):
        mediaspec.enable(unet, attention="tiara", alfa=3)
    with pytest.raises(ValueError, match="write them into it: TiARA"):
        mediaspec.enable(unet, attention=TiARA(), alpha=3)
    with pytest.raises(ValueError, match="write 'tiara'"):
        mediaspec.enable(unet, attention="tiera")
    with pytest.raises(TypeError, match="for video models of diffusers"):
        mediaspec.enable(nn.Linear(2, 2), attention="tiara")
    with pytest.raises(ValueError, match="takes 'auto', 'processor' or 'hook'"):
        mediaspec.enable(unet, attention=TiARA(route="flex"))
    with pytest.raises(ValueError, match="matches none of the 14"):
        mediaspec.enable(unet, attention=TiARA(layers="attn9"))
    with pytest.raises(ValueError, match="0 to 13"):
        mediaspec.enable(unet, attention=TiARA(layers=[14]))
    with mediaspec.enable(unet, attention=TiARA()), pytest.raises(ValueError, match="already enabled"):
        mediaspec.enable(unet, attention=TiARA())
    mediaspec.enable(unet, attention=TiARA()).remove()  # a refused attempt leaves nothing behind
    attn = temporal_attentions(unet)[0][1]
    former = attn.processor
    try:
        attn.set_processor(Custom())
        with pytest.raises(ValueError, match=r"Custom.*route='hook'"):
            mediaspec.enable(unet, attention=TiARA())
        plain = run(unet)
        with mediaspec.enable(unet, attention=TiARA(route="hook")) as handle:
            assert not torch.equal(run(unet), plain)
            assert handle.summary()["modules"] == 14
    finally:
        attn.set_processor(former)


def test_nothing_reached_is_an_error():
    model = motion()
    for _, attn in temporal_attentions(model):
        attn.set_processor(Manual())
    with mediaspec.enable(model, attention=TiARA(route="hook")), pytest.raises(RuntimeError, match="reached none"):
        run(model)


@pytest.mark.slow
def test_compiled_blocks():
    """One graph, no break in it, and no second one for other steps."""
    model = motion()
    plain = run(model)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with mediaspec.enable(model, attention=TiARA.safe()) as handle:
        edited = run(model)
        model.mid_block.motion_modules[0].compile(backend="eager", fullgraph=True)
        for timestep in (400.0, 300.0, 200.0, 500.0):
            out = run(model, timestep)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
        assert handle.summary()["calls"] == 5 * 14
        torch.testing.assert_close(out, edited)
    torch.testing.assert_close(run(model), plain)
    torch._dynamo.reset()


@pytest.mark.slow
def test_compiled_model():
    model = motion()
    plain = run(model)
    torch._dynamo.reset()
    with mediaspec.enable(model, attention=TiARA.safe()) as handle:
        edited = run(model)
        compiled = torch.compile(model, backend="eager")
        for timestep in (400.0, 500.0):
            out = run(compiled, timestep)
        assert handle.summary()["calls"] == 3 * 14
        torch.testing.assert_close(out, edited)
    torch.testing.assert_close(run(compiled), plain)
    torch._dynamo.reset()
