"""VideoContinuationPipeline on an untrained frame world and on diffusers' own Wan classes, at toy size."""

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

from mediaspec.cli.walk import parse_actions
from mediaspec.eval.memory_rollout import make_chunk
from mediaspec.memory.arvdm import generate
from mediaspec.memory.frame_noise import FRESH
from mediaspec.memory.sink_window import SinkWindowMemory
from mediaspec.memory.window import WindowMemory
from mediaspec.models.frame_cache import FrameCache
from mediaspec.models.frame_dit import History
from mediaspec.models.frame_history import MEMORIES
from mediaspec.pipelines.carriers.frame_dit import FrameDiTCarrier
from mediaspec.pipelines.video_continuation import VideoContinuationPipeline
from mediaspec.pipelines.video_history import VideoHistory
from mediaspec.pipelines.video_input import to_video

from .tiny_video import wan
from .tiny_worlds import GIVEN, frame_world, walk

ROOT = Path(__file__).parents[2]
N = 10
CALL: dict[str, Any] = {"num_inference_steps": 2, "output_type": "pt"}


def world_pipe(memory: str = "pack_k2", **changes: Any) -> VideoContinuationPipeline:
    pipe = VideoContinuationPipeline(frame_world(memory, **changes))
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def pipe() -> VideoContinuationPipeline:
    return world_pipe()


@pytest.fixture(scope="module")
def wan_pipe() -> VideoContinuationPipeline:
    pipe = VideoContinuationPipeline(wan())
    pipe.set_progress_bar_config(disable=True)
    return pipe


# ----------------------------------------------------------------------------------------- the frame world's carrier


class ChunkNoise:
    """The noise that `make_chunk` draws: one generator per chunk."""

    def __call__(self, frame_ids: Any, purpose: int, step: int = 0) -> torch.Tensor:
        assert purpose == FRESH
        drawn = torch.randn(1, len(frame_ids), 4, 8, 8, generator=torch.Generator().manual_seed(frame_ids[0]))
        return drawn.transpose(1, 2)


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_rollout_is_that_of_the_evaluation_bit_for_bit(memory: str) -> None:
    """The frames of `eval.memory_rollout`, which goes chunk by chunk without a window schedule."""
    carrier = FrameDiTCarrier(frame_world(memory))
    told = walk(N)
    latents = carrier.encode(to_video(told["video"]))
    poses, actions = torch.tensor(told["poses"])[None].float(), torch.tensor(told["actions"])[None]
    cache, wanted = FrameCache(carrier.model), []
    zeros = torch.zeros(1, GIVEN)
    cache.write(History(latents.transpose(1, 2), poses[:, :GIVEN], actions[:, :GIVEN], zeros))
    for start in range(GIVEN, GIVEN + N, 4):
        index = torch.arange(start, start + 4).clamp(max=GIVEN + N - 1)
        drawn = torch.Generator().manual_seed(start)
        chunk = make_chunk(carrier.model, cache.read(poses[:, index]), poses[:, index], actions[:, index], drawn, 3)
        keep = min(4, GIVEN + N - start)
        wanted.append(chunk[:, :keep])
        cache.write(History(chunk[:, :keep], poses[:, index[:keep]], actions[:, index[:keep]], zeros[:, :keep]))
    carrier.steer(actions, poses)
    video = generate(
        carrier, carrier.schedule(steps=3), carrier.sampler(), ChunkNoise(), num_frames=N, memory=carrier.memory(),
        history=latents, actions=actions[..., None], poses=poses,
    )  # fmt: skip
    made = torch.cat([done.frames for done in video], 2)
    assert torch.equal(made.transpose(1, 2), torch.cat(wanted, 1))


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_bound_that_is_not_reached_changes_nothing(memory: str) -> None:
    pipe, told = world_pipe(memory), walk(N)
    free = pipe(num_frames=N, seeds=0, **told, **CALL)
    bound = pipe(num_frames=N, seeds=0, memory={"keep": 64}, **told, **CALL)
    assert torch.equal(free.frames, bound.frames)


@pytest.mark.parametrize("memory", [name for name in MEMORIES if name != "none"])
def test_a_bounded_cache_holds_a_constant_number_of_bytes(memory: str) -> None:
    """And reads what a cache that never saw the forgotten frames reads (blocks are cut at the same frames)."""
    model = frame_world(memory).transformer
    poses = torch.stack([8.0 * torch.arange(64) % 512, torch.full((64,), 512.0)], -1)[None]
    latents = torch.randn(1, 64, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    actions = torch.full((1, 64), 2)

    def part(start: int, stop: int) -> History:
        values = (latents, poses, actions, torch.zeros(1, 64))
        return History(*(value[:, start:stop] for value in values))

    bound, sizes = FrameCache(model, keep=8), []
    for start in range(0, 64, 4):
        bound.write(part(start, start + 4))
        sizes.append(bound.nbytes)
    assert len(set(sizes[4:])) == 1 and bound.held <= 12
    short = FrameCache(model)
    short.write(part(64 - bound.held, 64))
    read, wanted = bound.read(poses[:, :4]), short.read(poses[:, :4])
    assert read.tokens == wanted.tokens
    assert read.recent is not None and wanted.recent is not None
    torch.testing.assert_close(read.recent.keys, wanted.recent.keys, rtol=1e-5, atol=1e-5)
    again = FrameCache(model, keep=8)
    again.load_state_dict(bound.state_dict())
    again.write(part(0, 4))
    bound.write(part(0, 4))
    assert torch.equal(again.read(poses[:, :4]).recent.values, bound.read(poses[:, :4]).recent.values)  # type: ignore[union-attr]


def test_a_bound_smaller_than_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="write 0, 4 or more"):
        FrameCache(frame_world("pack_k4").transformer, keep=2)


# ---------------------------------------------------------------------------------------------------------- the videos


def test_seeds_make_videos_alone_and_together(pipe: VideoContinuationPipeline) -> None:
    told = walk(N)
    both = pipe(num_frames=N, num_videos_per_prompt=2, seeds=[3, 4], **told, **CALL)
    assert both.frames.shape == (2, N, 3, 64, 64) and both.stats["seeds"] == [3, 4]
    for row in range(2):
        alone = pipe(num_frames=N, seeds=[3 + row], **told, **CALL)
        assert torch.equal(alone.frames[0], both.frames[row])
    assert not torch.equal(both.frames[0], both.frames[1])
    drawn = pipe(num_frames=N, generator=torch.Generator().manual_seed(1), **told, **CALL)
    again = pipe(num_frames=N, seeds=drawn.stats["seeds"], **told, **CALL)
    assert torch.equal(drawn.frames, again.frames)


def test_a_chain_of_runs_is_one_long_run(pipe: VideoContinuationPipeline, tmp_path: Path) -> None:
    """Cut within a chunk of 4, through a file."""
    told = walk(N + 8)
    whole = pipe(num_frames=N + 4, seeds=0, return_history=True, **told, **CALL)
    first = pipe(num_frames=6, seeds=0, return_history=True, **told, **CALL)
    first.history[0].save(tmp_path / "walk.history")
    cut = GIVEN + 6
    more = {"actions": told["actions"][cut:], "poses": told["poses"][cut:], **CALL}
    second = pipe(num_frames=3, history=VideoHistory.load(tmp_path / "walk.history"), return_history=True, **more)
    more = {"actions": told["actions"][cut + 3 :], "poses": told["poses"][cut + 3 :], **CALL}
    third = pipe(num_frames=N + 4 - 9, history=second.history, return_history=True, **more)
    assert torch.equal(torch.cat([first.frames, second.frames, third.frames], 1), whole.frames)
    for name, value in whole.history[0].rollout.items():
        if name.startswith("memory"):
            assert torch.equal(value, third.history[0].rollout[name]), name
    with pytest.raises(ValueError, match="schedule.m_ar="):
        pipe(num_frames=3, history=second.history, **{**more, "num_inference_steps": 3})
    with pytest.raises(ValueError, match="its seed"):
        pipe(num_frames=3, history=second.history, seeds=1, **more)
    (tmp_path / "cut.history").write_bytes((tmp_path / "walk.history").read_bytes()[:500])
    with pytest.raises(ValueError, match="damaged"):
        VideoHistory.load(tmp_path / "cut.history")


def files(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.glob("*.png"))]


def test_a_stopped_video_goes_on_to_the_same_files(pipe: VideoContinuationPipeline, tmp_path: Path) -> None:
    told = {**walk(N), "num_frames": N, "seeds": 0, "num_inference_steps": 2}
    whole = pipe(output_path=tmp_path / "whole", **told)
    assert whole.frames is None and len(files(tmp_path / "whole")) == N

    def stop(pipe: Any, step: int, levels: torch.Tensor, values: dict[str, torch.Tensor]) -> None:
        pipe._interrupt = step == 3

    stopped = pipe(output_path=tmp_path / "cut", callback_on_step_end=stop, **told)
    assert stopped.stats["interrupted"] and not (tmp_path / "cut").exists()
    assert len(files(tmp_path / "cut.parts" / "frames")) == 4  # the second chunk was on its way
    with pytest.raises(ValueError, match="num_frames=10"):
        pipe(output_path=tmp_path / "cut", **{**told, "num_frames": 9})
    resumed = pipe(output_path=tmp_path / "cut", **told)
    assert resumed.stats["resumed"] == [1] and files(tmp_path / "cut") == files(tmp_path / "whole")
    done = pipe(output_path=tmp_path / "cut", **told)
    assert done.stats["model_calls"] == 0 and done.stats["resumed"] == [None]


def test_the_callback_sees_and_changes_every_denoising_step(pipe: VideoContinuationPipeline) -> None:
    seen: list[tuple[int, list[float], tuple[int, ...]]] = []

    def look(pipe: Any, step: int, levels: torch.Tensor, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        seen.append((step, levels.tolist(), tuple(values["latents"].shape)))
        return {"latents": torch.zeros_like(values["latents"])}

    made = pipe(num_frames=8, seeds=0, callback_on_step_end=look, **walk(8), **CALL)
    assert [one[0] for one in seen] == [0, 1, 2, 3] and seen[1][1] == [0.0] * 4
    assert seen[0][2] == (1, 4, 4, 8, 8) and 0 < seen[0][1][0] < 1
    torch.testing.assert_close(made.frames, torch.full_like(made.frames, 0.5))  # the codec's mean
    with pytest.raises(ValueError, match="return \\(1, 4, 4, 8, 8\\)"):
        pipe(num_frames=8, callback_on_step_end=lambda *_: {"latents": torch.zeros(1)}, **walk(8), **CALL)


def test_the_output_has_every_type_and_the_account(pipe: VideoContinuationPipeline) -> None:
    told = {**walk(N), "num_frames": N, "seeds": 0, "num_inference_steps": 2}
    pixels = pipe(**{**told, "output_type": "pt"}).frames
    array, stats = pipe(output_type="np", return_dict=False, **told)
    np.testing.assert_array_equal(array, pixels.permute(0, 1, 3, 4, 2).numpy())
    pictures = pipe(output_type="pil", **told).frames
    assert isinstance(pictures[0][0], PIL.Image.Image) and len(pictures[0]) == N
    latents = pipe(output_type="latent", **told).frames
    assert latents.shape == (1, 4, N, 8, 8)
    json.dumps(stats)
    # 3 chunks of 4; the last reads 9 + 8 frames: 12 in blocks of 2 with 4 tokens, 5 whole of 16
    assert stats["ar_steps"] == 3 and stats["model_calls"] == 6
    assert stats["memory"][0]["tokens"] == 6 * 4 + 5 * 16
    guess = pipe.estimate(N, num_inference_steps=2, given_frames=GIVEN)
    assert guess["memory_tokens"] == stats["memory"][0]["tokens"] and guess["model_calls"] == 6
    assert guess["memory_bytes"] == stats["memory"][0]["nbytes"] and guess["flops_per_frame"] > 0


@pytest.mark.parametrize(
    ("memory", "changes"), [("pack_k2", {}), ("pack_k2", {"packed_size": 16}), ("channel", {}), ("cross", {})]
)
def test_a_world_in_bfloat16(memory: str, changes: dict[str, Any]) -> None:
    """Poses, levels and the video stay in float32; the network's features of them are rounded."""
    told = {**walk(N), "num_frames": N, "seeds": 0, "num_inference_steps": 2, "output_type": "latent"}
    whole = world_pipe(memory, **changes)
    exact = whole(**told).frames
    half = whole.to(torch.bfloat16)(**told).frames
    assert half.dtype == torch.float32 and half.shape == exact.shape
    assert 0 < (half - exact).norm() < 0.1 * exact.norm()


def test_save_and_load(pipe: VideoContinuationPipeline, tmp_path: Path) -> None:
    pipe.save_pretrained(tmp_path / "world")
    again = VideoContinuationPipeline.from_pretrained(tmp_path / "world", torch_dtype=torch.float32)
    again.set_progress_bar_config(disable=True)
    told = {**walk(4), "num_frames": 4, "seeds": 0, **CALL}
    assert torch.equal(again(**told).frames, pipe(**told).frames)
    with pytest.raises(TypeError, match="low_cpu_mem_usage"):
        VideoContinuationPipeline.from_pretrained(tmp_path / "world", low_cpu_mem_usage=True)
    with pytest.raises(TypeError, match="did you mean 'token'"):
        VideoContinuationPipeline.from_pretrained(tmp_path / "world", tokn=True)
    (tmp_path / "world" / "codec.safetensors").write_bytes(b"x")
    with pytest.raises(ValueError, match="damaged"):
        VideoContinuationPipeline.from_pretrained(tmp_path / "world")
    with pytest.raises(ValueError, match="no config.json|neither"):
        VideoContinuationPipeline.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="no carrier"):
        VideoContinuationPipeline(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="move it with"):
        pipe.enable_model_cpu_offload()


def test_videos_are_read_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    colours = [PIL.Image.new("RGB", (16, 8), (60 * i, 0, 255 - 60 * i)) for i in range(4)]
    colours[0].save(tmp_path / "a.gif", save_all=True, append_images=colours[1:])
    (tmp_path / "folder").mkdir()
    for i, one in enumerate(colours):
        one.save(tmp_path / "folder" / f"{i}.png")
    wanted = to_video(colours)
    assert wanted.shape == (1, 3, 4, 8, 16) and torch.equal(to_video(tmp_path / "folder"), wanted)
    assert (to_video(str(tmp_path / "a.gif")) - wanted).abs().max() < 0.1
    for name in ("cut.gif", "cut.png", "cut.mp4"):
        (tmp_path / name).write_bytes((tmp_path / "a.gif").read_bytes()[:5])
        with pytest.raises(ValueError, match=f"{name} cannot be read"):
            to_video(tmp_path / name)
    for name in ("imageio_ffmpeg", *(f"imageio.plugins.{one}" for one in ("ffmpeg", "pyav", "opencv"))):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=r"cut.mp4 cannot be read.*pip install 'mediaspec\[video\]'"):
        to_video(tmp_path / "cut.mp4")


def test_actions_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('["right*2", 1]')
    assert parse_actions(str(tmp_path / "a.json"), 5, "panoroom") == [2, 2, 1, 2, 2]
    assert parse_actions("0*2, forward", 4, "raymaze") == [0, 0, 2, 0]
    for text, message in (("up", "left, hold, right"), ("3", "0 to 2"), ("left*x", "name\\*times"), ("", "has ''")):
        with pytest.raises(ValueError, match=message):
            parse_actions(text, 3, "panoroom")
    (tmp_path / "a.json").write_text('["rihgt"]')
    with pytest.raises(ValueError, match="'rihgt'"):
        parse_actions(str(tmp_path / "a.json"), 3, "panoroom")


# ----------------------------------------------------------------------------------------------------------------- Wan


WAN: dict[str, Any] = {
    "prompt": "a red cat", "height": 16, "width": 16, "output_type": "pt", "guidance_scale": 3.0, "seeds": 0,
    "schedule": {"name": "outpainting", "delta": 2, "last": 2, "steps": 2},
    "memory": {"name": "sink_window", "sink": 1, "last": 2},
}  # fmt: skip


def test_wan_goes_on_from_a_video_with_a_rolling_memory_and_sinks(wan_pipe: VideoContinuationPipeline) -> None:
    seen = np.random.default_rng(0).random((9, 16, 16, 3))
    made = wan_pipe(video=seen, num_frames=14, **WAN)
    assert made.frames.shape == (1, 14, 3, 16, 16) and bool(torch.isfinite(made.frames).all())
    account = made.stats["memory"][0]
    # 16 x 16 pixels are 2 x 2 cells, one token a frame: a sink and the last two
    assert account["tokens"] == 3 and account["frames"] == 3 and made.stats["latent_frames"] == 4
    assert torch.equal(made.frames, wan_pipe(video=seen, num_frames=14, **WAN).frames)
    same = SinkWindowMemory(1, 2)
    assert torch.equal(made.frames, wan_pipe(video=seen, num_frames=14, **{**WAN, "memory": same}).frames)
    other = wan_pipe(video=seen, num_frames=14, **{**WAN, "memory": WindowMemory(1)})
    assert not torch.equal(made.frames, other.frames)
    guess = wan_pipe.estimate(
        14, given_frames=9, **{key: WAN[key] for key in ("schedule", "memory", "height", "width", "guidance_scale")}
    )
    assert guess["memory_tokens"] == 3 and guess["memory_bytes"] == account["nbytes"]


def test_a_chain_of_wan_runs_is_one_long_run(wan_pipe: VideoContinuationPipeline) -> None:
    """Cut within the 4 pictures of a latent frame; the codec's caches go along."""
    picture = np.random.default_rng(0).random((16, 16, 3))
    whole = wan_pipe(image=picture, num_frames=12, **WAN)
    first = wan_pipe(image=picture, num_frames=6, return_history=True, **WAN)
    more = {**WAN, "history": first.history}
    del more["seeds"]
    second = wan_pipe(num_frames=6, **more)
    assert torch.equal(torch.cat([first.frames, second.frames], 1), whole.frames)


def test_wan_decodes_as_one_whole_decode(wan_pipe: VideoContinuationPipeline) -> None:
    call = {**WAN, "schedule": {"name": "fifo", "frames": 4, "parts": 1, "lookahead": False}, "memory": None}
    latents = wan_pipe(num_frames=13, **{**call, "output_type": "latent"}).frames
    pixels = wan_pipe(num_frames=13, **call).frames
    assert latents.shape == (1, 4, 4, 2, 2)
    wanted = wan_pipe.carrier.decode(latents)[0].transpose(0, 1) / 2 + 0.5
    torch.testing.assert_close(pixels[0], wanted.clamp(0, 1), rtol=1e-4, atol=1e-4)


def test_wan_saves_and_loads(wan_pipe: VideoContinuationPipeline, tmp_path: Path) -> None:
    wan_pipe.save_pretrained(tmp_path)
    again = VideoContinuationPipeline.from_pretrained(tmp_path)
    again.set_progress_bar_config(disable=True)
    assert torch.equal(again(num_frames=5, **WAN).frames, wan_pipe(num_frames=5, **WAN).frames)


def test_longer_than_trained_is_an_error_or_a_shorter_memory(wan_pipe: VideoContinuationPipeline) -> None:
    call = {**WAN, "memory": "full", "num_frames": 25}
    with pytest.raises(ValueError, match="trained on 4"):
        wan_pipe(trained_length=4, **call)
    made = wan_pipe(trained_length={"frames": 4, "beyond": "crop"}, **call)
    assert made.frames.shape[1] == 25 and made.stats["memory"][0]["most_tokens"] == 2


# -------------------------------------------------------------------------------------------------- separate processes

CHILD = """
import json, os, resource, signal, sys
from mediaspec.pipelines.video_continuation import VideoContinuationPipeline
from tests.pipelines.tiny_worlds import frame_world, walk
frames, path, kill = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
peaks = {}
def callback(pipe, step, levels, values):
    peaks[step] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if step == kill:
        os.kill(os.getpid(), signal.SIGKILL)
pipe = VideoContinuationPipeline(frame_world("pack_k2"))
out = pipe(num_frames=frames, num_inference_steps=1, seeds=0, memory={"keep": 32}, output_path=path,
           checkpoint_every=3, callback_on_step_end=callback, **walk(frames))
account = out.stats["memory"][0]
print(json.dumps([peaks.get(25), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, account, out.stats["resumed"]]))
"""


def child(frames: int, path: Path, kill: int = -1) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CHILD, str(frames), str(path), str(kill)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)


@pytest.mark.slow
def test_a_killed_process_goes_on_to_the_same_files(tmp_path: Path) -> None:
    whole = child(40, tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    killed = child(40, tmp_path / "cut", kill=7)
    assert killed.returncode == -signal.SIGKILL and not (tmp_path / "cut").exists()
    resumed = child(40, tmp_path / "cut")
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout.splitlines()[-1])[3] == [6]
    assert files(tmp_path / "cut") == files(tmp_path / "whole") and len(files(tmp_path / "cut")) == 40


@pytest.mark.slow
def test_two_thousand_frames_in_constant_memory(tmp_path: Path) -> None:
    """From frame 104 on nothing grows, the state on disk neither; an unbounded memory would read 4,000 tokens."""
    made = child(2000, tmp_path / "long")
    assert made.returncode == 0, made.stderr
    early, whole, account, _ = json.loads(made.stdout.splitlines()[-1])
    assert len(files(tmp_path / "long")) == 2000
    assert whole <= 1.05 * early, (early, whole)
    assert account["most_frames"] <= 32 + 5 and account["most_tokens"] <= 16 * 4 + 5 * 16


@pytest.mark.slow
def test_the_command_makes_a_video_and_goes_on(tmp_path: Path) -> None:
    frame_world("pack_k2").save_pretrained(tmp_path / "panoroom" / "pack_k2")
    base = [sys.executable, "-m", "mediaspec.cli", "generate", "continuation", str(tmp_path / "panoroom" / "pack_k2"),
            "--num-inference-steps", "1", "--device", "cpu", "--json"]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*base, *more], cwd=ROOT, capture_output=True, text=True, env=environment)

    first = ["--num-frames", "9", "--context", "5", "--keep", "8", "--out", str(tmp_path / "out")]
    made = run(*first, "--actions", "right*3,left*3", "--save-history")
    assert made.returncode == 0, made.stderr
    report = json.loads(made.stdout.splitlines()[-1])
    assert len(files(Path(report["video"]))) == 9 and report["memory_bytes"] > 0 and report["peak_rss_bytes"] > 0
    assert report["memory_tokens"] > 0 and report["seconds_per_frame"] > 0 and Path(report["histories"][0]).exists()
    again = run(*first, "--actions", "right*3,left*3")
    assert json.loads(again.stdout.splitlines()[-1])["made"] == 0
    wrong = run(*first, "--actions", "up*3")
    assert wrong.returncode == 2 and "left, hold, right" in wrong.stderr
    guess = run("--estimate", "--num-frames", "2000", "--keep", "64")
    assert json.loads(guess.stdout.splitlines()[-1])["ar_steps"] == 500, guess.stderr
