"""Wan, SkyReels-V2 and LTX as carriers: the calls of diffusers' own classes, with references beside the window."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    LTXConditionPipeline,
    LTXPipeline,
)
from diffusers.pipelines.ltx.pipeline_ltx import calculate_shift
from torch import Tensor

from mediaspec.memory.arvdm import generate
from mediaspec.memory.base import FrameGroup, MemoryRead
from mediaspec.memory.frame_noise import FrameNoise
from mediaspec.memory.schedule_presets import make_schedule
from mediaspec.memory.schedule_tables import block_lag_table, block_lag_updates
from mediaspec.pipelines.carriers import carrier_for
from mediaspec.pipelines.carriers.ltx import LTXCarrier
from mediaspec.pipelines.carriers.wan import WanCarrier

from .tiny_video import WIDTH, wan_transformer
from .tiny_window import (
    CELLS,
    FAMILIES,
    NOTHING,
    Seen,
    asked,
    carrier_of,
    ltx_transformer,
    normal,
    past,
    pipe_of,
    told,
    window,
)


def own_call(family: str, carrier: Any, x: Tensor, level: float) -> Tensor:
    """The class's own call with one timestep per video."""
    text, model, time = carrier.conditioning, carrier.model, torch.full((len(x),), 1000 * level)
    scale = carrier.temporal_ratio / 25, carrier.spatial_ratio, carrier.spatial_ratio
    with torch.no_grad():
        if family != "ltx":
            return model(x, time, text.embeds, return_dict=False)[0]
        frames, rows, columns = x.shape[2:]
        out = model(
            hidden_states=LTXPipeline._pack_latents(x), encoder_hidden_states=text.embeds, timestep=time,
            num_frames=frames, height=rows, width=columns, return_dict=False,
            rope_interpolation_scale=scale, **text.extra,
        )[0]  # fmt: skip
        return LTXPipeline._unpack_latents(out, frames, rows, columns)


# ---- a call


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_levels_without_references_are_the_classs_own_call(family):
    carrier = carrier_of(family, batch=2)
    x = window(batch=2)
    torch.testing.assert_close(asked(carrier, x, 0.7), own_call(family, carrier, x, 0.7), atol=1e-5, rtol=1e-5)


def test_timesteps_per_token_or_frame_equal_one_per_video():
    x = window(batch=2)
    carrier = carrier_of("wan", batch=2, per_token=True)
    with Seen(carrier.model) as calls:
        out = asked(carrier, x, 0.7)
    assert calls[0]["timestep"].shape == (2, 12)
    torch.testing.assert_close(out, own_call("wan", carrier, x, 0.7), atol=1e-5, rtol=1e-5)
    carrier = carrier_of("skyreels", batch=2, per_frame=False)
    with Seen(carrier.model) as calls:
        out = asked(carrier, x, 0.7)
    assert calls[0]["timestep"].shape == (2,)
    torch.testing.assert_close(out, asked(carrier_of("skyreels", batch=2), x, 0.7), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_references_stand_clean_in_front_and_are_cut_off(family):
    carrier, x, read = carrier_of(family), window(2), past([3, 4])
    kept = read.frames.clone()
    with Seen(carrier.model) as calls:
        out = asked(carrier, x, [0.25, 0.5], 5, read)
    assert out.shape == x.shape and out.dtype == x.dtype
    assert torch.equal(read.frames, kept)
    shown = calls[0]["hidden_states"]
    shown = LTXPipeline._unpack_latents(shown, 4, CELLS, CELLS) if family == "ltx" else shown
    assert torch.equal(shown, torch.cat([kept, x], 2))
    steps = calls[0]["timestep"].view(1, 4, -1)
    assert torch.equal(steps[..., 0], torch.tensor([[0.0, 0.0, 250.0, 500.0]])) and bool(
        (steps == steps[..., :1]).all()
    )
    assert not torch.allclose(out, asked(carrier, x, [0.25, 0.5], 5), atol=1e-3)
    assert not torch.allclose(out, asked(carrier, x, [0.25, 0.5], 5, past([3, 4], seed=8)), atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_noised_memory_is_told_its_level(family):
    carrier = carrier_of(family)
    with Seen(carrier.model) as calls:
        asked(carrier, window(2), 0.5, 5, past([4], level=0.02))
    assert calls[0]["timestep"].view(1, 3, -1)[0, :, 0].tolist() == pytest.approx([20.0, 500.0, 500.0])


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_a_batch_do_not_touch_each_other(family):
    both, one = carrier_of(family, 3.0, batch=2), carrier_of(family, 3.0)
    x, read = window(2, 2), past([3, 4], 2)
    out = asked(both, x, [0.25, 0.5], 5, read)
    group = FrameGroup(read.frames[1:], read.frame_ids[1:])
    torch.testing.assert_close(out[1:], asked(one, x[1:], [0.25, 0.5], 5, MemoryRead((group,))), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_guidance_makes_two_rows_in_one_pass_and_none_makes_one(family):
    x, read = window(2), past([4])
    one = carrier_of(family)
    with Seen(one.model) as calls:
        plain = asked(one, x, 0.5, 5, read)
    assert [len(call["hidden_states"]) for call in calls] == [1]
    with Seen(one.model) as calls:
        guided = asked(carrier_of(family, 3.0), x, 0.5, 5, read)
    assert [len(call["hidden_states"]) for call in calls] == [2]
    with Seen(one.model) as calls:
        apart = asked(carrier_of(family, 3.0, one_call=False), x, 0.5, 5, read)
    assert [len(call["hidden_states"]) for call in calls] == [1, 1]
    torch.testing.assert_close(guided, apart, atol=1e-5, rtol=1e-5)
    untold = carrier_of(family)
    told(untold, "blue")
    expected = asked(untold, x, 0.5, 5, read)
    torch.testing.assert_close(guided, expected + 3 * (plain - expected), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_history_guidance_leads_away_from_the_call_without_references(family):
    x, read = window(2), past([4])
    seen, null = asked(carrier_of(family), x, 0.5, 5, read), asked(carrier_of(family), x, 0.5, 5)
    strong = carrier_of(family, history_guidance_scale=2.0)
    torch.testing.assert_close(asked(strong, x, 0.5, 5, read), 2 * seen - null, atol=1e-5, rtol=1e-5)
    with Seen(strong.model) as calls:
        assert torch.equal(asked(strong, x, 0.5, 5), null)
    assert len(calls) == 1


def test_half_precision_networks_take_and_give_the_windows_dtype():
    model = wan_transformer().to(torch.bfloat16)
    carrier = WanCarrier(model)
    carrier.condition(prompt_embeds=normal(1, 3, WIDTH))
    assert asked(carrier, window(2), [0.1, 0.5], 5, past([4])).dtype == torch.float32


# ---- places in time


@pytest.mark.parametrize("family", FAMILIES)
def test_the_place_in_the_video_does_not_matter_only_that_in_the_clip(family):
    carrier, x = carrier_of(family), window(2)
    near, far = asked(carrier, x, 0.5, 2, past([0, 1])), asked(carrier, x, 0.5, 100_002, past([100_000, 100_001]))
    assert torch.equal(near, far)
    apart = asked(carrier, x, 0.5, 10, past([0, 9]))
    assert torch.equal(near, apart) == (family != "ltx")  # LTX keeps distances, the others close gaps


@pytest.mark.parametrize("family", FAMILIES)
def test_references_behind_the_window_stand_behind_it(family):
    carrier, x = carrier_of(family), window(2)
    read = past([0, 7])
    whole = torch.cat([read.frames[:, :, :1], x, read.frames[:, :, 1:]], 2)
    out = asked(carrier, x, 0.5, 5, read)
    levels = torch.tensor([0.0, 0.5, 0.5, 0.0], dtype=torch.float64)
    with torch.no_grad():
        expected = carrier(whole, levels, torch.tensor([0, 5, 6, 7]), NOTHING, None)[:, :, 1:3]
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_frames_that_the_window_holds_are_not_shown_twice(family):
    carrier, x = carrier_of(family), window(2)
    read = past([3, 4, 5])
    short = MemoryRead((FrameGroup(read.frames[:, :, :1], read.frame_ids[:, :1]),))
    assert torch.equal(asked(carrier, x, 0.5, 4, read), asked(carrier, x, 0.5, 4, short))


def test_ltx_places_are_those_of_its_pipelines():
    carrier = carrier_of("ltx", causal_times=True)
    with Seen(carrier.model) as calls:
        asked(carrier, window(2), 0.5, 4, past([0, 3]))
    own = LTXConditionPipeline
    coords = own._scale_video_ids(own._prepare_video_ids(1, 6, CELLS, CELLS), 4, 4).float()
    coords[:, 0] /= 25
    shown = coords.view(1, 3, 6, -1)[:, :, [0, 3, 4, 5]].flatten(2)
    torch.testing.assert_close(calls[0]["video_coords"], shown)


def test_ltx_packs_patches_as_its_pipeline_does():
    carrier = LTXCarrier(ltx_transformer(patch_size=2))
    carrier.condition(prompt_embeds=normal(1, 3, WIDTH))
    assert carrier.latent_channels == 4 and carrier.latent_shape(128, 128) == (4, 4, 4)
    x = window(2)
    with Seen(carrier.model) as calls:
        out = asked(carrier, x, 0.5)
    assert torch.equal(calls[0]["hidden_states"], LTXPipeline._pack_latents(x, 2))
    with torch.no_grad():
        raw = carrier.model(**{**calls[0], "hidden_states": LTXPipeline._pack_latents(x, 2)})[0]
    assert torch.equal(out, LTXPipeline._unpack_latents(raw, 2, 2, 2, 2))


@pytest.mark.parametrize("family", FAMILIES)
def test_clips_beyond_the_trained_length_are_an_error_or_lose_references(family):
    x, read = window(2), past([0, 1, 2, 3, 4])
    with pytest.raises(ValueError, match="was trained on 4"):
        asked(carrier_of(family, trained_frames=4), x, 0.5, 5, read)
    with pytest.raises(ValueError, match="trained on 4"):
        asked(carrier_of(family, trained_frames=4), window(5), 0.5)
    for beyond, kept in (("crop", [3, 4]), ("reindex", [0, 4])):
        group = FrameGroup(read.frames[:, :, kept], torch.tensor([[3, 4]]))
        out = asked(carrier_of(family, trained_frames=4, beyond=beyond), x, 0.5, 5, read)
        assert torch.equal(out, asked(carrier_of(family), x, 0.5, 5, MemoryRead((group,))))


# ---- rolling out


def rolled(carrier: Any, schedule: Any, num_frames: int, **settings: Any) -> Tensor:
    noise = FrameNoise(torch.tensor([5]), (4, CELLS, CELLS))
    parts = list(generate(carrier, schedule, carrier.sampler(), noise, num_frames=num_frames, **settings))
    assert [i for part in parts for i in part.frame_ids] == list(range(num_frames))
    return torch.cat([part.frames for part in parts], 2)


SCHEDULES = {
    "fifo": {"frames": 4, "parts": 2},
    "outpainting": {"delta": 2, "last": 2, "steps": 2},
    "skyreels_streaming": {"block": 2, "blocks": 2, "steps": 4},
}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("family", FAMILIES)
def test_rollouts_have_the_asked_length_and_repeat(family, name):
    carrier, schedule = carrier_of(family), make_schedule(name, **SCHEDULES[name])
    video = rolled(carrier, schedule, 5)
    assert video.shape == (1, 4, 5, CELLS, CELLS) and bool(torch.isfinite(video).all())
    assert torch.equal(video, rolled(carrier_of(family), schedule, 5))


def test_references_change_what_follows_them():
    schedule = make_schedule("outpainting", **SCHEDULES["outpainting"])
    with_, without = rolled(carrier_of("wan"), schedule, 4), rolled(carrier_of("wan"), schedule, 4, memory=None)
    assert torch.equal(with_[:, :, :2], without[:, :, :2]) and not torch.allclose(with_[:, :, 2:], without[:, :, 2:])


def test_streaming_by_blocks_follows_skyreels_lag_table():
    """Levels of blocks in work, call by call: step index i of N is level 1 - (i - 1) / N."""
    blocks, steps, lag = 4, 4, 2
    carrier = carrier_of("skyreels", causal_block=2)
    schedule = make_schedule("skyreels_streaming", block=2, blocks=steps // lag, steps=steps)
    with Seen(carrier.model) as calls:
        rolled(carrier, schedule, 2 * blocks, memory=None)
    table = block_lag_table(blocks, steps, lag)
    moved = block_lag_updates(table, steps)
    wanted = [[1000 * (1 - (int(i) - 1) / steps) for i in row[at]] for row, at in zip(table, moved)]
    found = [call["timestep"][0, ::2].tolist() for call in calls]
    assert found[: len(wanted) - lag] == [pytest.approx(row) for row in wanted[: len(wanted) - lag]]


def test_default_schedules_and_memories_fit_the_trained_length():
    for family in FAMILIES:
        carrier = carrier_of(family)
        schedule, memory = carrier.schedule(), carrier.memory()
        assert memory is not None
        assert schedule.w + schedule.references.last == carrier.guard.frames
    assert carrier_of("wan").schedule().shift == 3.0
    streaming = carrier_of("skyreels", causal_block=5).schedule(steps=20)
    assert (streaming.name, streaming.w, streaming.m_ar) == ("skyreels_streaming", 20, 5)
    assert streaming.w + streaming.references.last == 25
    assert carrier_of("wan").schedule(name="fifo", frames=2, parts=2, shift=5.0).t_in[0] == pytest.approx(0.625)


def test_ltx_shifts_its_timesteps_by_size_as_its_scheduler_does():
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, base_shift=0.95, max_shift=2.05)
    parts = {name: pipe_of("ltx").components[name] for name in ("vae", "text_encoder", "tokenizer", "transformer")}
    carrier = carrier_for(LTXPipeline(scheduler=scheduler, **parts), "ltx", trained_frames=8)
    schedule = carrier.schedule_for(64, 128, delta=6, last=2, steps=4)
    mu = calculate_shift(8 * 16 * 32, base_shift=0.95, max_shift=2.05)
    scheduler.set_timesteps(sigmas=[1.0, 0.75, 0.5, 0.25], mu=mu)
    levels = [schedule.level(m)[0] for m in range(4)]
    assert levels == pytest.approx(scheduler.sigmas[:-1].tolist(), abs=1e-6)
    assert carrier.schedule_for(64, 128, shift=3.0).shift == 3.0
