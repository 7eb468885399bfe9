"""VideoContinuationPipeline with every carrier of diffusers' classes at toy size: several chunks from a picture."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from mediaspec.memory.sink_window import SinkWindowMemory
from mediaspec.pipelines.carriers import carrier_for
from mediaspec.pipelines.continuation_inputs import describe_memory
from mediaspec.pipelines.video_continuation import VideoContinuationPipeline
from mediaspec.pipelines.video_history import VideoHistory

from .tiny_packed import far, framepack, helios, randn
from .tiny_video import WIDTH, wan
from .tiny_window import pipe_of

SETTINGS: dict[str, dict[str, Any]] = {
    "wan": {},
    "skyreels": {"trained_frames": 5},
    "ltx": {"trained_frames": 5},
    "framepack": {"latent_window_size": 2, "history_sizes": (4, 2, 1)},
    "inverted": {"latent_window_size": 2, "history_sizes": (4, 2, 1), "sampling_type": "inverted_anti_drifting"},
    "helios": {"num_latent_frames_per_chunk": 2, "history_sizes": (4, 2, 1)},
    "far": {"chunk": 2, "old": 4},
}  # fmt: skip
SCHEDULES: dict[str, dict[str, Any]] = {
    "wan": {"name": "outpainting", "delta": 2, "last": 2, "steps": 2},
    "skyreels": {"base": 4, "overlap": 2, "steps": 2},
    "ltx": {"name": "outpainting", "delta": 2, "last": 2, "steps": 2},
}
FAMILIES = tuple(SETTINGS)
DELTA, PICTURES = 2, 18
"""Latent frames of a chunk; pictures, which are 5 latent frames after the first: 3 chunks, the last cut."""


@cache
def base(family: str) -> Any:
    made = {"wan": wan, "framepack": framepack, "inverted": framepack, "helios": helios, "far": far}.get(family)
    return pipe_of(family) if made is None else made()


@cache
def pipe(family: str) -> VideoContinuationPipeline:
    found = VideoContinuationPipeline(base(family), **SETTINGS[family])
    found.set_progress_bar_config(disable=True)
    return found


def call(family: str, **changes: Any) -> dict[str, Any]:
    side = 4 * pipe(family).carrier.spatial_ratio
    told: dict[str, Any] = {
        "image": np.random.default_rng(0).random((side, side, 3)), "num_frames": PICTURES, "seeds": 3,
        "schedule": SCHEDULES.get(family, {"steps": 2}), "output_type": "pt", "guidance_scale": 2.0,
        "prompt_embeds": randn(1, 5, WIDTH, seed=7), "negative_prompt_embeds": randn(1, 5, WIDTH, seed=6),
    }  # fmt: skip
    if family in ("framepack", "inverted"):
        told["conditioning"] = {"pooled_prompt_embeds": randn(1, 8, seed=8)}
    return {**told, **changes}


@pytest.mark.parametrize("family", FAMILIES)
def test_three_chunks_from_a_picture(family: str) -> None:
    made = pipe(family)(**call(family))
    assert made.frames.shape[:2] == (1, PICTURES) and bool(torch.isfinite(made.frames).all())
    assert made.stats["ar_steps"] == 3 and made.stats["model_calls"] == 6
    again = pipe(family)(**call(family))
    assert torch.equal(made.frames, again.frames)
    assert not torch.equal(made.frames, pipe(family)(**call(family, seeds=4)).frames)
    account = made.stats["memory"][0]
    assert account["most_tokens"] > 0 and account["nbytes"] > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_frames_come_in_the_order_of_time(family: str) -> None:
    """The callback puts a number in place of every frame: step of the window and slot."""

    def number(_: Any, step: int, levels: Tensor, values: dict[str, Tensor]) -> dict[str, Tensor]:
        latents = values["latents"].clone()
        for slot in range(latents.shape[2]):
            latents[:, :, slot] = 0.01 * (10 * (step // 2) + slot)
        return {"latents": latents}

    told = call(family, callback_on_step_end=number)
    latents = pipe(family)(**{**told, "output_type": "latent"}).frames
    found = (100 * latents[0, 0, :, 0, 0]).round().int().tolist()
    # the inverted one makes the end first, and of the chunk at the beginning what is missing
    assert found == ([20, 10, 11, 0, 1] if family == "inverted" else [0, 1, 10, 11, 20])
    carrier = pipe(family).carrier
    picture = torch.as_tensor(told["image"]).permute(2, 0, 1)[None, :, None].float() * 2 - 1
    whole = torch.cat([carrier.encode(picture), latents], 2)
    pixels = pipe(family)(**told).frames[0]
    wanted = (carrier.decode(whole)[0].clamp(-1, 1) / 2 + 0.5).transpose(0, 1)[1 : 1 + PICTURES]
    assert pixels.shape == wanted.shape
    if family not in ("ltx", "framepack", "inverted"):  # their codecs look ahead, and hear of the next chunk too late
        torch.testing.assert_close(pixels, wanted, rtol=1e-3, atol=2e-3)


def test_a_video_from_its_end_is_decoded_a_window_at_a_time() -> None:
    latents, carrier = 0.1 * randn(4, 6, 4, 4, seed=1), pipe("inverted").carrier
    lengths: list[int] = []
    handle = carrier.vae.post_quant_conv.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[2]))
    with torch.no_grad():
        first, *others = [one.clone() for one in carrier.decoder()(latents)]
        by_hand = carrier.decoder()
        apart = [one for part in latents.split(2, 1) for one in by_hand(part)]
    handle.remove()
    assert [len(first), *map(len, others)] == [5, 8, 8] and lengths[:3] == [2, 4, 4]
    assert torch.equal(torch.cat([first, *others]), torch.cat(apart))


@pytest.mark.parametrize("family", [one for one in FAMILIES if one != "inverted"])
def test_a_chain_is_one_long_run(family: str, tmp_path: Any) -> None:
    told = call(family, output_type="latent")
    whole = pipe(family)(**told).frames
    first = pipe(family)(**{**told, "num_frames": 7, "return_history": True})
    first.history[0].save(tmp_path / "a.history")
    del told["image"], told["seeds"]
    rest = pipe(family)(**{**told, "num_frames": PICTURES - 7, "history": VideoHistory.load(tmp_path / "a.history")})
    assert torch.equal(torch.cat([first.frames, rest.frames], 2), whole)


@pytest.mark.parametrize("family", ["ltx", "inverted", "far"])
def test_a_stopped_video_goes_on_to_the_same_files(family: str, tmp_path: Any) -> None:
    def stop(pipe: Any, step: int, levels: Tensor, values: dict[str, Tensor]) -> None:
        pipe._interrupt = step == 3

    told = call(family)
    pipe(family)(output_path=tmp_path / "whole", **told)
    assert pipe(family)(output_path=tmp_path / "cut", callback_on_step_end=stop, **told).stats["interrupted"]
    assert pipe(family)(output_path=tmp_path / "cut", **told).stats["resumed"] == [1]
    files = [[one.read_bytes() for one in sorted((tmp_path / name).glob("*.png"))] for name in ("whole", "cut")]
    assert files[0] == files[1] and len(files[0]) == PICTURES


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_in_bfloat16(family: str, tmp_path: Any) -> None:
    """As `from_pretrained` loads them: some parameters stay in float32, at first place or not."""
    whole = pipe(family).base.transformer
    whole.save_pretrained(tmp_path)
    model = type(whole).from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    carrier = carrier_for(model, pipe(family).carrier.name, **SETTINGS[family])
    assert carrier.dtype == torch.bfloat16
    told = call(family, output_type="latent", num_frames=12)
    del told["image"]
    size = {"height": 32, "width": 32}
    half = VideoContinuationPipeline(model, carrier.name, **SETTINGS[family])
    half.set_progress_bar_config(disable=True)
    made = half(**told, **size).frames
    assert made.dtype == torch.float32 and bool(torch.isfinite(made).all())
    mixed = any(one.dtype == torch.float32 for one in model.parameters())
    assert mixed == (family not in ("ltx", "framepack", "inverted"))


@pytest.mark.parametrize(
    ("family", "scale", "asked"),
    [
        ("wan", 5.0, 2), ("skyreels", 6.0, 2), ("ltx", 3.0, 2), ("framepack", 6.0, 1), ("helios", 5.0, 2),
        ("far", 1.0, 1),
    ],
)  # fmt: skip
def test_guidance_is_that_of_the_pipeline_where_none_is_named(family: str, scale: float, asked: int) -> None:
    ours = pipe(family)
    told = call(family, num_frames=4, output_type="latent")
    named = ours(**{**told, "guidance_scale": scale}).frames
    del told["guidance_scale"]
    made = ours(**told)
    assert made.stats["settings"]["guidance_scale"] == scale and torch.equal(made.frames, named)
    assert ours.carrier.calls_of(scale) == asked
    once = ours.estimate(8, schedule=told["schedule"], guidance_scale=1.0, height=64, width=64)["total_flops"]
    assert ours.estimate(8, schedule=told["schedule"], height=64, width=64)["total_flops"] == asked * once


def test_a_bare_network_guides_only_when_told() -> None:
    carrier = carrier_for(base("wan").transformer)
    assert carrier.default_guidance == 1.0
    with pytest.raises(ValueError, match="negative_prompt_embeds too; or write guidance_scale=1"):
        carrier.condition(prompt_embeds=randn(1, 5, WIDTH), guidance_scale=2.0)


def test_framepack_goes_on_looking_at_its_picture() -> None:
    """The chain above is equal because the picture is part of the history."""
    told = call("framepack", output_type="latent", num_frames=8, return_history=True)
    history = pipe("framepack")(**told).history[0]
    assert history.image is not None and history.image.shape == (1, 3, 32, 32)
    del told["image"], told["seeds"]
    seen = pipe("framepack")(**told, history=history).frames
    history.image = None
    assert not torch.equal(seen, pipe("framepack")(**told, history=history).frames)
    told = call("far", output_type="latent", num_frames=8, return_history=True)
    assert pipe("far")(**told).history[0].image is None
    assert pipe("far").carrier.cache_bytes == 0  # nothing stays behind a call


def test_all_that_makes_a_memory_is_compared_when_a_run_goes_on() -> None:
    assert describe_memory(SinkWindowMemory(1, 2, anchors=[3, 0]))["anchors"] == [0, 3]
    memory = SinkWindowMemory(1, 2)
    memory.packers = [torch.nn.Linear(2, 2), None]
    one = describe_memory(memory)
    torch.nn.init.ones_(memory.packers[0].weight)
    assert one["packers"][1] is None and describe_memory(memory)["packers"] != one["packers"]


@pytest.mark.parametrize("schedule", ["fifo", "rolling_diffusion"])
def test_pictures_that_nothing_would_show_are_refused(schedule: str) -> None:
    with pytest.raises(ValueError, match="comes without a memory; write for instance memory="):
        pipe("wan")(**call("wan", schedule=schedule))


def test_a_carrier_with_other_settings_does_not_go_on(tmp_path: Any) -> None:
    def stop(pipe: Any, step: int, levels: Tensor, values: dict[str, Tensor]) -> None:
        pipe._interrupt = step == 3

    told = call("wan", output_path=tmp_path / "film")
    pipe("wan")(**told, callback_on_step_end=stop)
    other = VideoContinuationPipeline(base("wan"), history_guidance_scale=1.5)
    with pytest.raises(ValueError, match="history_guidance_scale"):
        other(**told)
    told = call("wan", num_frames=7, return_history=True, output_type="latent")
    history = pipe("wan")(**told).history
    del told["image"], told["seeds"]
    with pytest.raises(ValueError, match="carrier_settings.history_guidance_scale="):
        other(**told, history=history)
