"""The samplers: windows, noise and weights of FreeNoise, the queue of FIFO, spectra of FreeLong, noise levels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from diffusers.models.attention import FreeNoiseTransformerBlock

from mediaspec.pipelines.noise_levels import NoiseLevels
from mediaspec.pipelines.samplers import SAMPLERS, Fifo, FreeLong, FreeNoise, Outpaint, Plain
from mediaspec.pipelines.samplers.fifo import queue_calls, queue_levels
from mediaspec.pipelines.samplers.freelong import low_pass, spectral_blend, spread_positions
from mediaspec.pipelines.samplers.freenoise import blend_weights, frame_windows, pyramid, shuffled_blocks
from mediaspec.pipelines.samplers.temporal import hooked, temporal_sites

from .tiny_video import motion_unet

CASES = json.loads((Path(__file__).parents[1] / "data" / "long_video_cases.json").read_text())
SHAPE = (2, 4, 4)


class Echo:
    """A denoiser that knows the truth: every frame's clean latents are 1 + its number / 100."""

    def __init__(self, levels: NoiseLevels, window: int = 4) -> None:
        self.levels, self.window, self.device, self.model = levels, window, torch.device("cpu"), torch.nn.Identity()
        self.seen: list[dict[str, Any]] = []
        self.has_temporal_attention = False

    def truth(self, frames: torch.Tensor) -> torch.Tensor:
        return (1 + frames.double() / 100).float()[None, :, None, None].expand(SHAPE[0], -1, *SHAPE[1:])

    def __call__(self, latents, times, frames, fraction):
        self.seen.append({"times": times, "frames": frames, "fraction": fraction, "latents": latents.clone()})
        index = torch.tensor([self.levels.times.tolist().index(t) for t in times.expand(len(frames)).tolist()])
        law = self.levels
        signal, noise = (law._at(table, index, latents) for table in (law.signal, law.noise))
        truth = self.truth(frames)
        error = (latents - signal * truth) / noise
        return {"epsilon": error, "v_prediction": signal * error - noise * truth, "flow_prediction": error - truth}[
            self.levels.prediction
        ]

    def frame_times(self):
        from contextlib import nullcontext

        return nullcontext()


def levels(steps: int, prediction_type: str = "epsilon") -> NoiseLevels:
    if prediction_type == "flow":
        return NoiseLevels.of(FlowMatchEulerDiscreteScheduler(shift=3.0), steps)
    return NoiseLevels.of(DDIMScheduler(clip_sample=False, prediction_type=prediction_type), steps)


def run(sampler: Any) -> tuple[torch.Tensor, list[Any]]:
    steps, frames = [], []
    with sampler.installed():
        while not sampler.done:
            steps.append(sampler.step())
            if steps[-1].frames is not None:
                frames.append(steps[-1].frames)
    assert len(steps) == sampler.total
    return torch.cat(frames, 1), steps


# --------------------------------------------------------------------------------------------------------- FreeNoise


def test_freenoise_windows_and_pyramids() -> None:
    cases = CASES["freenoise"]
    assert [list(w) for w in frame_windows(64)] == cases["windows_64"]
    assert [list(w) for w in frame_windows(26)] == cases["windows_26"]
    assert pyramid(16) == cases["pyramid_16"]
    assert pyramid(5) == cases["pyramid_5"]


def test_freenoise_weights() -> None:
    cases = CASES["freenoise"]
    torch.testing.assert_close(
        blend_weights(20), torch.tensor(cases["blend_20"], dtype=torch.float64), atol=1e-9, rtol=0
    )
    tail = torch.tensor(cases["blend_26_tail"], dtype=torch.float64)
    torch.testing.assert_close(blend_weights(26)[:, 20:], tail, atol=1e-9, rtol=0)


@pytest.mark.parametrize("num_frames", [16, 17, 25, 26, 27, 28, 64])
@pytest.mark.parametrize(("window", "stride"), [(16, 4), (16, 16), (5, 2), (16, 7)])
def test_every_frame_has_weights_that_sum_to_one(num_frames: int, window: int, stride: int) -> None:
    weights = blend_weights(num_frames, window, stride)
    assert len(weights) == len(frame_windows(num_frames, window, stride))
    torch.testing.assert_close(weights.sum(0), torch.ones(num_frames, dtype=torch.float64))
    assert (weights >= 0).all()


def test_freenoise_shuffles_blocks_of_its_own_noise() -> None:
    order = shuffled_blocks(26, 16, 4, torch.Generator().manual_seed(0)).tolist()
    assert order[:16] == list(range(16))
    for start in range(16, 24, 4):
        assert sorted(order[start : start + 4]) == sorted(order[start - 16 : start - 12])
    assert set(order[24:26]) <= set(order[8:12]) and len(set(order[24:26])) == 2
    assert order != shuffled_blocks(26, 16, 4, torch.Generator().manual_seed(1)).tolist()


def test_diffusers_scales_a_ragged_tail_and_ours_does_not() -> None:
    """With attention and feed-forward silenced a block must hand its input on."""
    block = FreeNoiseTransformerBlock(
        8, 2, 4, double_self_attention=True, activation_fn="geglu", positional_embeddings="sinusoidal",
        num_positional_embeddings=32,
    )  # fmt: skip
    for layer in (block.attn1.to_out[0], block.attn2.to_out[0], block.ff.net[2]):
        torch.nn.init.zeros_(layer.weight)
        torch.nn.init.zeros_(layer.bias)
    ones = torch.ones(3, 26, 8)
    with torch.no_grad():
        fault = block(ones)[0, -2:, 0]
        whole = block(torch.ones(3, 28, 8))  # what implementation="diffusers" asks for, and cuts
    if not torch.equal(fault, torch.ones(2)):  # diffusers 0.42; a later one may have mended it
        assert fault.tolist() == CASES["freenoise"]["tail_scale_if_denominator_uses_one_weight"]
    torch.testing.assert_close(whole, torch.ones(3, 28, 8))

    unet = motion_unet()
    echo = Echo(levels(2), window=16)
    echo.model, echo.has_temporal_attention = unet, True
    sampler = FreeNoise(echo, echo.levels, 26, SHAPE, torch.Generator())
    for site in temporal_sites(unet):
        torch.nn.init.zeros_(site.attention.to_out[0].weight)
        torch.nn.init.ones_(site.attention.to_out[0].bias)
    seen = []
    handles = [s.attention.register_forward_hook(lambda m, a, out: seen.append(out)) for s in temporal_sites(unet)]
    with sampler.installed(), torch.no_grad():
        unet(torch.randn(1, 4, 26, 8, 8), 5, encoder_hidden_states=torch.randn(26, 8, 16))
    assert len(seen) == len(handles)
    for out in seen:  # every window says 1, so every fused frame must be 1
        assert out.shape[1] == 26
        torch.testing.assert_close(out, torch.ones_like(out))


def test_processors_see_windows_that_begin_at_position_zero() -> None:
    unet = motion_unet()
    sites = temporal_sites(unet)
    assert {site.name.rsplit(".", 1)[1] for site in sites} == {"attn1", "attn2"}
    seen: list[tuple[str, torch.Tensor]] = []
    inner = {}
    for site in sites:
        inner[site.name] = site.attention.processor

        class Record(torch.nn.Module):
            def __init__(self, name: str) -> None:
                super().__init__()
                self.name = name

            def forward(self, attn, hidden_states, *args, **kwargs):
                seen.append((self.name, hidden_states))
                return inner[self.name](attn, hidden_states, *args, **kwargs)

        site.attention.set_processor(Record(site.name))
    echo = Echo(levels(2), window=16)
    echo.model, echo.has_temporal_attention = unet, True
    sampler = FreeNoise(echo, echo.levels, 26, SHAPE, torch.Generator())
    latents = torch.randn(1, 4, 1, 8, 8).expand(-1, -1, 26, -1, -1)
    text = torch.randn(1, 8, 16).expand(26, -1, -1)
    with sampler.installed(), torch.no_grad():
        unet(latents, 5, encoder_hidden_states=text)
    windows = len(frame_windows(26))
    assert len(seen) == windows * len(sites)
    assert {hidden.shape[1] for _, hidden in seen} == {16}
    first = [hidden for name, hidden in seen if name == sites[0].name]
    for hidden in first[1:]:  # equal frames: windows differ by nothing but their place, and places start anew
        torch.testing.assert_close(hidden, first[0])


def test_hooks_leave_the_model_bit_equal() -> None:
    unet = motion_unet()
    latents, text = torch.randn(1, 4, 16, 8, 8), torch.randn(16, 8, 16)
    with torch.no_grad():
        before = unet(latents, 5, encoder_hidden_states=text).sample
        with hooked(unet, lambda site, attend, hidden: attend(hidden)):
            inside = unet(latents, 5, encoder_hidden_states=text).sample
        with pytest.raises(RuntimeError, match="stop"), hooked(unet, lambda site, attend, hidden: attend(hidden)):
            raise RuntimeError("stop")
        after = unet(latents, 5, encoder_hidden_states=text).sample
    assert torch.equal(before, inside) and torch.equal(before, after)


def test_freenoise_fused_at_the_prediction_finds_the_truth() -> None:
    echo = Echo(levels(5))
    sampler = FreeNoise(echo, echo.levels, 11, SHAPE, torch.Generator().manual_seed(0), stride=3, fuse="prediction")
    frames, _ = run(sampler)
    torch.testing.assert_close(frames, echo.truth(torch.arange(11)), atol=1e-4, rtol=0)
    assert {len(call["frames"]) for call in echo.seen} == {4}


# -------------------------------------------------------------------------------------------------------------- FIFO


@pytest.mark.parametrize("name", sorted(CASES["fifo"]))
def test_fifo_queue(name: str) -> None:
    case, lookahead = CASES["fifo"][name], name.endswith("lookahead")
    window, parts = (int(part[1:]) for part in name.split("_")[:2])
    calls = queue_calls(window, parts, lookahead)
    assert [[a, end, kept, end] for a, kept, end in calls] == case["calls"]
    slots = queue_levels(window, parts, lookahead)
    assert slots.tolist() == case["step_index"] and len(slots) == case["queue_length"]
    assert len(calls) == case["model_calls_per_output_frame"]
    law = levels(window * parts)
    sampler = Fifo(Echo(law, window), law, 100, SHAPE, torch.Generator(), lookahead=lookahead)
    assert sampler.front == case["output_slot"]
    assert sampler.total - window * parts == case["queue_steps_for_100"]


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction", "flow"])
@pytest.mark.parametrize("lookahead", [True, False])
def test_fifo_finds_the_truth_of_every_frame(prediction_type: str, lookahead: bool) -> None:
    law = levels(8, prediction_type)
    echo = Echo(law)
    sampler = Fifo(echo, law, 9, SHAPE, torch.Generator().manual_seed(0), lookahead=lookahead)
    frames, steps = run(sampler)
    torch.testing.assert_close(frames, echo.truth(torch.arange(9)), atol=1e-3, rtol=0)
    assert [step.frames.shape[1] for step in steps if step.frames is not None] == [1] * 9
    queue = echo.seen[8:]
    assert len(queue) == len(sampler.calls) * (9 + 8 - 4)
    # a frame at noise level i has made T-1-i of T steps, and frames count up from the clean end
    for call in queue:
        level = [law.times.tolist().index(t) for t in call["times"].tolist()]
        assert call["fraction"].tolist() == pytest.approx([(7 - i) / 8 for i in level])
        assert (call["frames"].diff() >= 0).all()


def test_fifo_moves_only_the_noisier_half_with_lookahead() -> None:
    law = levels(4)
    echo = Echo(law)
    sampler = Fifo(echo, law, 3, SHAPE, torch.Generator().manual_seed(0))
    with sampler.installed():
        for _ in range(4):
            sampler.step()
        before = sampler.latents.clone()
        sampler._move(2, 4, 6, 0)
    assert torch.equal(sampler.latents[:, :4], before[:, :4])
    assert not torch.equal(sampler.latents[:, 4:6], before[:, 4:6])


def test_fifo_refuses_what_the_queue_cannot_hold() -> None:
    law = levels(10)
    with pytest.raises(ValueError, match="write 8 or 12"):
        Fifo(Echo(law), law, 9, SHAPE, torch.Generator())
    law = levels(9)
    with pytest.raises(ValueError, match="even"):
        Fifo(Echo(law, 3), law, 9, SHAPE, torch.Generator())


# ---------------------------------------------------------------------------------------------------------- Outpaint


@pytest.mark.parametrize("conditioning", ["replace", "clean"])
@pytest.mark.parametrize("num_frames", [5, 8, 11])
def test_outpaint_continues_with_the_frames_it_knows(conditioning: str, num_frames: int) -> None:
    law = levels(6)
    echo = Echo(law)
    sampler = Outpaint(
        echo, law, num_frames, SHAPE, torch.Generator().manual_seed(0), conditioning=conditioning, repeats=2
    )
    frames, steps = run(sampler)
    torch.testing.assert_close(frames, echo.truth(torch.arange(num_frames)), atol=1e-3, rtol=0)
    handed = [step.frames.shape[1] for step in steps if step.frames is not None]
    assert handed[0] == 4 and all(count <= 2 for count in handed[1:])
    call = echo.seen[-1]
    known = echo.truth(call["frames"])[:, :2]
    times = call["times"].expand(4)
    if conditioning == "clean":
        assert times[:2].tolist() == [law.times[0]] * 2
        torch.testing.assert_close(call["latents"][:, :2], known, atol=1e-3, rtol=0)
    else:
        assert len(set(times.tolist())) == 1
        torch.testing.assert_close(
            call["latents"][:, :2].mean(), known.mean() * law.signal[1].float(), atol=0.2, rtol=0
        )


# ---------------------------------------------------------------------------------------------------------- FreeLong


def test_freelong_takes_slow_from_the_wide_and_fast_from_the_near_branch() -> None:
    time = torch.arange(32).float()
    slow, fast = torch.cos(2 * torch.pi * time / 32), torch.cos(torch.pi * time)
    wide = (slow + fast).view(1, 1, 1, 32, 1)
    near = torch.zeros_like(wide)
    low = spectral_blend(wide, near)[0, 0, 0, :, 0]
    torch.testing.assert_close(low, slow * torch.tensor(-0.5 * (0.0625 / 0.25) ** 2).exp(), atol=1e-3, rtol=0)
    high = spectral_blend(near, wide)[0, 0, 0, :, 0]
    torch.testing.assert_close(low + high, slow + fast, atol=1e-5, rtol=0)


def test_freelong_low_pass_is_the_gaussian_of_the_paper() -> None:
    mask = low_pass((8, 4, 4))
    assert mask[0, 0, 0] == 1
    assert mask[1, 0, 0].item() == pytest.approx(float(torch.tensor(-0.5 * (0.25 / 0.25) ** 2).exp()))
    assert mask[0, 1, 1].item() == pytest.approx(float(torch.tensor(-0.5 * 2 * (0.5 / 0.25) ** 2).exp()))


def test_spread_positions_stay_inside_the_window() -> None:
    table = torch.arange(32.0).view(1, 32, 1)
    spread = spread_positions(table, 31, 16)[0, :, 0]
    torch.testing.assert_close(spread, torch.linspace(0, 15, 31))


# ------------------------------------------------------------------------------------------------- levels and states


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction", "sample"])
@pytest.mark.parametrize("spacing", ["leading", "trailing"])
@pytest.mark.parametrize("eta", [0.0, 1.0])
def test_a_step_is_the_schedulers_own(prediction_type: str, spacing: str, eta: float) -> None:
    scheduler = DDIMScheduler(prediction_type=prediction_type, timestep_spacing=spacing, steps_offset=1)
    scheduler.set_timesteps(10)
    law = NoiseLevels.of(scheduler, 10)
    assert torch.equal(law.times.flip(0), scheduler.timesteps)
    latents, output, noise = torch.randn(3, 2, 4, 4, 4)
    for i, t in enumerate(scheduler.timesteps):
        wanted = scheduler.step(output, t, latents, eta=eta, variance_noise=noise).prev_sample
        index = torch.full((4,), 9 - i)
        torch.testing.assert_close(law.step(latents, output, index, eta, noise), wanted, atol=2e-5, rtol=1e-4)


def test_a_step_of_mixed_levels_is_each_frames_own() -> None:
    law = levels(10)
    latents, output = torch.randn(2, 2, 4, 4, 4)
    index = torch.tensor([0, 3, 9, 5])
    together = law.step(latents, output, index)
    for n, i in enumerate(index.tolist()):
        alone = law.step(latents[:, n : n + 1], output[:, n : n + 1], torch.tensor([i]))
        assert torch.equal(together[:, n : n + 1], alone)


def test_flow_levels_step_like_euler() -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(6)
    law = NoiseLevels.of(scheduler, 6)
    latents, output = torch.randn(2, 2, 3, 4, 4)
    for i, t in enumerate(scheduler.timesteps):
        wanted = scheduler.step(output, t, latents).prev_sample
        torch.testing.assert_close(law.step(latents, output, torch.full((3,), 5 - i)), wanted, atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="eta=0"):
        law.step(latents, output, torch.zeros(3, dtype=torch.int64), 0.5, latents)
    unipc = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    law = NoiseLevels.of(unipc, 6)
    assert law.prediction == "flow_prediction" and law.noise[0] == 0 and len(law.noise) == 7


@pytest.mark.parametrize("name", sorted(SAMPLERS))
@pytest.mark.parametrize("stop", [1, 5, 9])
def test_a_sampler_put_away_and_taken_up_goes_on_exactly(name: str, stop: int) -> None:
    law = levels(8)
    options: dict[str, Any] = {"freenoise": {"fuse": "prediction"}, "fifo": {"eta": 1.0}}.get(name, {})
    frames = 4 if name == "freelong" else 7

    def make() -> Any:
        return SAMPLERS[name](Echo(law), law, frames, SHAPE, torch.Generator().manual_seed(3), **options)

    whole, _ = run(make())
    first = make()
    handed = []
    with first.installed():
        for _ in range(min(stop, first.total)):
            handed.append(first.step().frames)
    second = make()
    second.load(first.state())
    with second.installed():
        while not second.done:
            handed.append(second.step().frames)
    assert torch.equal(torch.cat([part for part in handed if part is not None], 1), whole)


def test_settings_are_known_by_name() -> None:
    assert {"window", "eta", "stride", "fuse", "implementation"} <= set(FreeNoise.settings())
    assert {"lookahead", "window"} <= set(Fifo.settings())
    assert "overlap" in Outpaint.settings() and "cutoff" in FreeLong.settings() and "window" in Plain.settings()
    with pytest.raises(ValueError, match="did you mean 'stride'"):
        FreeNoise.check_settings({"strid": 4})


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (FreeNoise, {"stride": 0}, "stride=0"),
        (FreeNoise, {"stride": 5}, "stride=5"),
        (FreeNoise, {"eta": 1.0}, "eta=0"),
        (FreeNoise, {"fuse": "all"}, "fuse="),
        (FreeNoise, {"implementation": "theirs"}, "implementation="),
        (FreeLong, {"blend_steps": 2.0}, "blend_steps"),
        (FreeLong, {"cutoff": 0.0}, "cutoff"),
        (Outpaint, {"overlap": 4}, "overlap=4"),
        (Outpaint, {"repeats": 0}, "repeats=0"),
        (Outpaint, {"conditioning": "x"}, "conditioning="),
        (Plain, {"eta": -1.0}, "eta=-1"),
        (Plain, {"window": 1}, "window=1"),
    ],
)
def test_bad_settings_are_refused(kind: Any, settings: dict[str, Any], message: str) -> None:
    law = levels(4)
    with pytest.raises(ValueError, match=message):
        kind(Echo(law), law, 9, SHAPE, torch.Generator(), **settings)
