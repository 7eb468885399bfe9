"""LongVideoPipeline on diffusers' own pipelines at toy size."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

from mediaspec.pipelines.long_video import LongVideoPipeline
from mediaspec.pipelines.samplers.temporal import temporal_sites
from mediaspec.pipelines.video_denoiser import denoiser_for

from .tiny_video import animatediff, wan

ROOT = Path(__file__).parents[2]
PROMPT = "a red cat"
N = 8
SLOW = pytest.mark.slow
FIFO = {"sampler": "fifo", "num_inference_steps": 4, "sampler_settings": {"window": 4, "lookahead": False}}
RUNS: dict[str, dict[str, Any]] = {
    "freenoise": {"sampler": "freenoise", "num_inference_steps": 2, "sampler_settings": {"window": 6}},
    "fifo": FIFO,
    "freelong": {"sampler": "freelong", "num_inference_steps": 2, "sampler_settings": {"window": 6}},
    "outpaint": {"sampler": "outpaint", "num_inference_steps": 2, "sampler_settings": {"window": 4}},
}


@pytest.fixture(scope="module")
def pipe() -> LongVideoPipeline:
    return LongVideoPipeline(animatediff(adapter=True))


def frames_of(pipe: LongVideoPipeline, num_frames: int = N, **call: Any) -> torch.Tensor:
    return pipe(PROMPT, num_frames, output_type="pt", **{"seeds": 0, **call}).frames


@pytest.mark.parametrize("prediction_type", ["epsilon", "v_prediction"])
def test_a_video_within_the_window_is_the_base_pipelines(prediction_type: str) -> None:
    base = animatediff(prediction_type=prediction_type)
    noise = torch.randn((16, 4, 8, 8), generator=torch.Generator().manual_seed(7)).transpose(0, 1)[None]
    call: dict[str, Any] = {"num_frames": 16, "num_inference_steps": 3, "guidance_scale": 4.0}
    wanted = base(PROMPT, latents=noise, output_type="np", negative_prompt="blue", **call).frames
    made = LongVideoPipeline(base)(PROMPT, seeds=7, output_type="np", negative_prompt="blue", **call)
    np.testing.assert_allclose(made.frames, wanted, atol=1e-4)
    assert made.stats["sampler"] == "plain" and made.stats["model_calls"] == 3


@pytest.mark.parametrize("name", sorted(RUNS))
def test_a_video_is_the_same_alone_and_in_a_batch(pipe: LongVideoPipeline, name: str) -> None:
    both = pipe([PROMPT, "a blue dog"], N, output_type="pt", seeds=[3, 4], **RUNS[name])
    assert both.frames.shape == (2, N, 3, 16, 16) and both.stats["seeds"] == [3, 4]
    alone = pipe("a blue dog", N, output_type="pt", seeds=4, **RUNS[name]).frames
    assert torch.equal(both.frames[1:], alone)
    assert not torch.equal(both.frames[0], both.frames[1])
    other = pipe("a blue dog", N, output_type="pt", seeds=5, **RUNS[name]).frames
    assert not torch.equal(other, alone)
    assert (alone[0, 1:] - alone[0, :-1]).abs().amax((1, 2, 3)).min() > 0


def test_freenoise_has_no_damaged_tail_at_26_frames(pipe: LongVideoPipeline) -> None:
    """Equal frames in, and every attention along time hands on its input: each frame must come out alike."""
    base = animatediff()
    for site in temporal_sites(base.unet):
        torch.nn.init.zeros_(site.attention.to_out[0].weight)
        torch.nn.init.zeros_(site.attention.to_out[0].bias)

    def level(_pipe: Any, step: int, _time: Any, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        latents = values["latents"]
        return {"latents": latents[:, :1].expand_as(latents).contiguous() if step == 0 else latents}

    call: dict[str, Any] = {"num_inference_steps": 3, "callback_on_step_end": level, "output_type": "latent"}
    made = LongVideoPipeline(base)(PROMPT, 26, seeds=0, **call).frames[0]
    torch.testing.assert_close(made, made[:, :1].expand_as(made), atol=1e-4, rtol=1e-4)


def test_freenoise_through_diffusers_has_no_damaged_tail() -> None:
    base = animatediff(adapter=True)
    base.enable_free_noise(context_length=16, context_stride=4)
    seen = []
    base.unet.register_forward_pre_hook(lambda m, args, kw: seen.append(args[0].shape[2]), with_kwargs=True)
    pipe = LongVideoPipeline(base)
    call: dict[str, Any] = {"num_inference_steps": 2, "seeds": 0, "output_type": "pt"}
    settings = {"implementation": "diffusers"}
    ragged = pipe(PROMPT, 26, sampler_settings=settings, **call).frames
    assert ragged.shape[1] == 26 and set(seen) == {28}
    full = pipe(PROMPT, 28, sampler_settings=settings, **call).frames
    assert torch.equal(ragged, full[:, :26])  # the cut video is the sound one, frame for frame
    with pytest.raises(ValueError, match="disable_free_noise"):
        pipe(PROMPT, 26, **call)
    with pytest.raises(ValueError, match="stride"):
        pipe(PROMPT, 26, sampler_settings={**settings, "stride": 8}, **call)
    base.disable_free_noise()
    with pytest.raises(ValueError, match="enable_free_noise"):
        pipe(PROMPT, 26, sampler_settings=settings, **call)


@pytest.mark.parametrize(
    "name", ["freenoise", "fifo", *(pytest.param(n, marks=SLOW) for n in ("freelong", "outpaint"))]
)
def test_tiara_works_on_top(name: str) -> None:
    tiara = pytest.importorskip("mediaspec.attention.tiara")
    import mediaspec

    base = animatediff()
    settings = {**RUNS[name]["sampler_settings"], "window": 6}
    call = {**RUNS[name], "sampler_settings": settings, "num_inference_steps": 6 if name == "fifo" else 2}
    plain = frames_of(LongVideoPipeline(base), **call)
    with mediaspec.enable(base, attention=tiara.TiARA(boundary="reflect")) as handle:
        edited = frames_of(LongVideoPipeline(base, attention=handle), **call)
        summary = handle.summary()
    assert summary["modules"] == len(temporal_sites(base.unet))
    assert set(summary["by_step"]) == set(range(call["num_inference_steps"]))
    assert not torch.equal(edited, plain)
    assert torch.equal(frames_of(LongVideoPipeline(base), **call), plain)


def test_output_types(pipe: LongVideoPipeline) -> None:
    tensor = frames_of(pipe, **RUNS["freenoise"])
    array = pipe(PROMPT, N, seeds=0, output_type="np", **RUNS["freenoise"]).frames
    np.testing.assert_array_equal(array, tensor.permute(0, 1, 3, 4, 2).numpy())
    pictures = pipe(PROMPT, N, seeds=0, **RUNS["freenoise"]).frames
    assert isinstance(pictures[0][0], PIL.Image.Image) and len(pictures[0]) == N
    np.testing.assert_array_equal(np.asarray(pictures[0][N - 1]), (array[0, N - 1] * 255).round().astype(np.uint8))
    latents, stats = pipe(PROMPT, N, seeds=0, output_type="latent", return_dict=False, **RUNS["freenoise"])
    assert latents.shape == (1, 4, N, 8, 8) and stats["model_calls"] == 2
    assert json.loads(json.dumps(stats)) == stats


def test_the_prompt_bank_is_asked_for_every_frame(pipe: LongVideoPipeline) -> None:
    asked = []

    class Bank:
        def embeddings(self, frames: torch.Tensor, step_fraction: Any) -> torch.Tensor:
            asked.append((frames.tolist(), step_fraction))
            return torch.randn(len(frames), 8, 16, generator=torch.Generator().manual_seed(int(frames[0])))

    made = pipe(num_frames=N, seeds=0, prompt_bank=Bank(), output_type="pt", **FIFO)
    assert made.frames.shape == (1, N, 3, 16, 16)
    assert {n for frames, _ in asked for n in frames} == set(range(N))
    assert all(len(fraction) == len(frames) for frames, fraction in asked[4:])


def test_a_timeline_changes_frames_under_its_prompt(pipe: LongVideoPipeline) -> None:
    line = [("a red cat", 0, 3), ("a blue dog", 6, N - 1)]
    call = {**RUNS["outpaint"], "seeds": 0, "output_type": "pt"}
    mixed = pipe(num_frames=N, timeline=line, **call).frames
    assert mixed.shape == (1, N, 3, 16, 16)
    first = pipe("a red cat", N, **call).frames
    assert not torch.equal(mixed, first)
    with pytest.raises(ValueError, match="both given"):
        pipe(num_frames=N, timeline=line, prompt_bank=object(), **call)


# ------------------------------------------------------------------------------------------------- disk and resumption


class Stop(Exception):
    pass


def stop_after(step: int) -> Any:
    def callback(_pipe: Any, index: int, _time: Any, _values: Any) -> None:
        if index == step:
            raise Stop

    return callback


@pytest.mark.parametrize(
    ("name", "stop"),
    [
        ("freenoise", 1),
        ("outpaint", 4),
        ("fifo", 6),
        *(pytest.param(*case, marks=SLOW) for case in (("freelong", 1), ("outpaint", 1), ("fifo", 1))),
    ],
)
def test_a_broken_off_run_goes_on_to_the_same_file(
    pipe: LongVideoPipeline, tmp_path: Path, name: str, stop: int
) -> None:
    call: dict[str, Any] = {"seeds": 1, **RUNS[name]}
    pipe(PROMPT, N, output_path=tmp_path / "whole.gif", **call)
    target = tmp_path / "broken.gif"
    with pytest.raises(Stop):
        pipe(PROMPT, N, output_path=target, callback_on_step_end=stop_after(stop), **call)
    assert not target.exists() and (tmp_path / "broken.gif.parts").exists()
    with pytest.raises(ValueError, match="seed=1"):
        pipe(PROMPT, N, output_path=target, **{**call, "seeds": 2})
    with pytest.raises(ValueError, match="guidance_scale=7.5"):
        pipe(PROMPT, N, output_path=target, guidance_scale=3.0, **call)
    done = pipe(PROMPT, N, output_path=target, **call)
    assert target.read_bytes() == (tmp_path / "whole.gif").read_bytes()
    assert done.paths == [target] and done.frames is None
    assert not (tmp_path / "broken.gif.parts").exists()
    again = pipe(PROMPT, N, output_path=target, **call)
    assert again.stats["model_calls"] == 0 and again.paths == [target]


def test_an_interrupted_run_hands_over_what_is_finished(pipe: LongVideoPipeline, tmp_path: Path) -> None:
    def callback(running: Any, index: int, _time: Any, _values: Any) -> None:
        running._interrupt = index >= 6  # four steps of the first clip, then one frame per step

    call: dict[str, Any] = {"seeds": 0, "callback_on_step_end": callback, **FIFO}
    part = pipe(PROMPT, N, output_type="pt", **call)
    assert part.stats["interrupted"] and part.frames.shape == (1, 3, 3, 16, 16)
    whole = frames_of(pipe, **FIFO)
    assert torch.equal(part.frames, whole[:, :3])
    path = tmp_path / "frames"
    pipe(PROMPT, N, output_path=path, checkpoint_every=100, **call)
    assert not path.exists() and len(list((tmp_path / "frames.parts" / "frames").glob("*.png"))) == 3
    assert pipe(PROMPT, N, output_path=path, seeds=0, **FIFO).stats["resumed"] == [7]
    written = np.stack([np.asarray(PIL.Image.open(one)) for one in sorted(path.glob("*.png"))])
    np.testing.assert_array_equal(written, (whole[0] * 255).round().byte().permute(0, 2, 3, 1).numpy())


def test_the_fingerprint_tells_models_apart() -> None:
    def fingerprint(base: Any) -> str:
        return denoiser_for(base, 1.0).fingerprint()

    base = animatediff()
    first = fingerprint(base)
    assert fingerprint(animatediff()) == first
    for part in ("unet", "text_encoder", "vae"):
        weight = next(getattr(base, part).parameters())
        with torch.no_grad():
            weight.add_(1.0)
            assert fingerprint(base) != first, part
            weight.sub_(1.0)
    assert fingerprint(animatediff().to(dtype=torch.float64)) != first


def test_several_videos_get_a_file_each(pipe: LongVideoPipeline, tmp_path: Path) -> None:
    done = pipe([PROMPT, "a blue dog"], 4, output_path=tmp_path / "clip.gif", seeds=0, **FIFO)
    assert [path.name for path in done.paths] == ["clip-0000.gif", "clip-0001.gif"]
    assert all(path.exists() for path in done.paths)


# ----------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"sampler": "freenoises"}, "did you mean 'freenoise'"),
        ({"num_frames": 0}, "num_frames=0"),
        ({"num_frames": 2.0}, "num_frames=2.0"),
        ({"height": 15}, "divisible by 8"),
        ({"width": 0}, "width=0"),
        ({"num_inference_steps": 0}, "num_inference_steps=0"),
        ({"guidance_scale": float("nan")}, "guidance_scale=nan"),
        ({"output_type": "jpg"}, "output_type"),
        ({"sampler": "plain", "num_frames": 40}, "32 frames"),
        ({"sampler_settings": {"window": 64}}, "window=64"),
        ({"sampler_settings": {"windows": 8}}, "did you mean 'window'"),
        ({"sampler": "fifo", "num_inference_steps": 20}, "write 16 or 32"),
        ({"prompt": None}, "no prompt"),
        ({"prompt": []}, "write a text"),
        ({"output_path": "x.avi"}, "ends in '.avi'"),
        ({"output_path": "x.gif", "output_type": "latent"}, "latent"),
        ({"callback_on_step_end_tensor_inputs": ["prompt"]}, "allowed is 'latents'"),
        ({"seeds": [1, 2]}, "2 seeds"),
        ({"checkpoint_every": 0}, "checkpoint_every=0"),
        ({"sampler_settings": {"stride": 99}, "output_path": "x.gif"}, "stride=99"),
        ({"sampler": "outpaint", "sampler_settings": {"overlap": 16}, "output_path": "x.gif"}, "overlap=16"),
        ({"fps": 0}, "fps=0"),
        ({"callback_on_step_end": lambda *_: {"latents": torch.zeros(1)}}, "the callback returned latents"),
    ],
)
def test_bad_arguments_are_refused_and_leave_no_file_behind(
    pipe: LongVideoPipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        pipe(**{"prompt": PROMPT, "num_frames": 26, "num_inference_steps": 2, "output_path": "new/x.gif", **call})
    assert not list(tmp_path.iterdir())


def test_a_misspelt_keyword_names_the_nearest(pipe: LongVideoPipeline) -> None:
    with pytest.raises(TypeError, match="num_frames"):
        pipe(PROMPT, num_frame=3)
    with pytest.raises(ValueError, match="no base for long videos"):
        LongVideoPipeline(object())


@pytest.mark.parametrize("name", ["freenoise", "fifo"])
def test_numbers_that_overflow_are_named_by_frame_and_step(pipe: LongVideoPipeline, name: str) -> None:
    def spoil(_pipe: Any, step: int, _time: Any, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        latents = values["latents"].clone()
        latents[:, 2] = float("nan") if step == 0 else latents[:, 2]
        return {"latents": latents}

    with pytest.raises(ValueError, match="not finite after step 1 of"):
        frames_of(pipe, callback_on_step_end=spoil, **RUNS[name])


# ---------------------------------------------------------------------------------------------------------------- Wan


def test_wan_within_the_window_is_the_base_pipelines() -> None:
    base = wan()
    noise = torch.randn((3, 4, 2, 2), generator=torch.Generator().manual_seed(7)).transpose(0, 1)[None]
    call: dict[str, Any] = {
        "num_frames": 9,
        "num_inference_steps": 3,
        "height": 16,
        "width": 16,
        "guidance_scale": 4.0,
    }
    wanted = base(PROMPT, latents=noise, output_type="np", negative_prompt="blue", **call).frames
    made = LongVideoPipeline(base)(PROMPT, seeds=7, output_type="np", negative_prompt="blue", **call)
    np.testing.assert_allclose(made.frames, wanted, atol=1e-4)


@pytest.mark.parametrize("sampler", ["freenoise", "fifo", "outpaint"])
def test_wan_makes_long_videos_and_resumes(sampler: str, tmp_path: Path) -> None:
    pipe = LongVideoPipeline(wan())
    call: dict[str, Any] = {
        "num_frames": 29, "num_inference_steps": 4, "height": 16, "width": 16, "seeds": 0, "sampler": sampler,
        "sampler_settings": {"window": 4},
    }  # fmt: skip
    frames = pipe(PROMPT, output_type="pt", **call).frames
    assert frames.shape == (1, 29, 3, 16, 16) and torch.isfinite(frames).all()
    path = tmp_path / "frames"
    with pytest.raises(Stop):
        pipe(PROMPT, output_path=path, callback_on_step_end=stop_after(5 if sampler != "freenoise" else 2), **call)
    pipe(PROMPT, output_path=path, **call)
    written = np.stack([np.asarray(PIL.Image.open(one)) for one in sorted(path.glob("*.png"))])
    np.testing.assert_array_equal(written, (frames[0] * 255).round().byte().permute(0, 2, 3, 1).numpy())


def test_wan_refusals() -> None:
    pipe = LongVideoPipeline(wan())
    call: dict[str, Any] = {"height": 16, "width": 16, "num_inference_steps": 2}
    with pytest.raises(ValueError, match="write 25 or 29"):
        pipe(PROMPT, 26, **call)
    with pytest.raises(ValueError, match="16"):
        pipe(PROMPT, 29, **{**call, "height": 24})
    with pytest.raises(ValueError, match="freelong mixes"):
        pipe(PROMPT, 29, sampler="freelong", **call)


# -------------------------------------------------------------------------------------------------- separate processes

CHILD = """
import json, os, resource, signal, sys
from mediaspec.pipelines.long_video import LongVideoPipeline
from tests.pipelines.tiny_video import animatediff
sampler, frames, path, kill = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
settings = {"window": 4, "overlap": 2} if sampler == "outpaint" else {"window": 4, "lookahead": False}
peaks = {}
def callback(pipe, step, time, values):
    peaks[step] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if step == kill:
        os.kill(os.getpid(), signal.SIGKILL)
pipe = LongVideoPipeline(animatediff())
pipe("a red cat", frames, sampler, num_inference_steps=2 if sampler == "outpaint" else 4, guidance_scale=1, seeds=0,
     sampler_settings=settings, output_path=path, callback_on_step_end=callback)
print(json.dumps([peaks.get(64), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]))
"""


def child(sampler: str, frames: int, path: Path, kill: int = -1) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CHILD, sampler, str(frames), str(path), str(kill)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["fifo", "outpaint"])
def test_memory_stands_still_from_frame_64_to_frame_512(sampler: str, tmp_path: Path) -> None:
    """Either sampler makes about one frame per step here; the end includes writing the file."""
    made = child(sampler, 512, tmp_path / "long.mp4")
    assert made.returncode == 0, made.stderr
    early, whole = json.loads(made.stdout.splitlines()[-1])
    assert whole <= 1.05 * early, (early, whole)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["fifo", "outpaint"])
def test_a_killed_process_goes_on_to_the_same_file(sampler: str, tmp_path: Path) -> None:
    whole = child(sampler, 40, tmp_path / "whole.mp4")
    killed = child(sampler, 40, tmp_path / "killed.mp4", kill=23)
    assert whole.returncode == 0, whole.stderr
    assert killed.returncode == -signal.SIGKILL and not (tmp_path / "killed.mp4").exists()
    resumed = child(sampler, 40, tmp_path / "killed.mp4")
    assert resumed.returncode == 0, resumed.stderr
    assert (tmp_path / "killed.mp4").read_bytes() == (tmp_path / "whole.mp4").read_bytes()
