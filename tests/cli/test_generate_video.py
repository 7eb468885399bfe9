"""`mediaspec generate video`: files, manifest, JSON line, timelines, resumption after SIGKILL, clear errors."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from mediaspec.eval.manifest import read_manifest
from mediaspec.pipelines import AutoPipeline

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = (ROOT / "mediaspec" / "models" / "moving_emoji" / "model_index.json").is_file()
SHORT = ("--num-frames", 20, "--num-inference-steps", 2, "--guidance-scale", 2, "--height", 16, "--width", 16)


@pytest.fixture(scope="session")
def video_model(tmp_path_factory) -> Path:
    from tests.pipelines import tiny_video

    folder = tmp_path_factory.mktemp("model") / "tiny-video"
    tiny_video.animatediff(letters=True).save_pretrained(folder)
    return folder


def report(result) -> dict:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.strip().splitlines()[-1])


def files_of(folder: Path) -> dict[str, bytes]:
    """Everything but the measurements, which need not be the same after a resumption."""
    found = {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
    return {name: data for name, data in found.items() if name != "attention.json"}


def test_videos_manifest_strip_and_json(command, video_model, tmp_path) -> None:
    arguments = ("generate", "video", "a taxi moves left", "a frog spins", "--out", tmp_path / "o", "--seed", 5,
                 *SHORT, "--model", video_model, "--attention", "tiara", "--alpha", 5, "--json")  # fmt: skip
    line = report(command(*arguments))
    assert line["videos"] == [str(tmp_path / "o" / f"{i:06d}.mp4") for i in range(2)]
    assert line["num_frames"] == 20 and line["made"] == 2 and line["seeds"] == [5, 6] and line["seconds"] > 0
    assert line["settings"]["attention"] == {"preset": "safe", "alpha": 5.0}
    attention = line["attention"]
    assert attention["modules"] > 0 and 0 <= attention["mean_rho"] <= 1 and 0 < attention["mean_delta"] <= 5
    import imageio.v3 as iio

    assert iio.imread(line["videos"][0]).shape == (20, 16, 16, 3)
    strip = PIL.Image.open(line["strips"][0])
    assert strip.width > 8 * 128 and strip.height > 2 * 128
    rows = read_manifest(tmp_path / "o")
    assert [row["prompt"] for row in rows] == ["a taxi moves left", "a frog spins"]
    assert rows[0]["stats"] == {"video": "000000.mp4", "num_frames": 20, "fps": 8.0}
    assert not list((tmp_path / "o").glob(".*"))  # nothing of the work is left
    before = files_of(tmp_path / "o")
    again = report(command(*arguments))
    assert again["made"] == 0 and again["attention"] == attention and again["videos"] == line["videos"]
    assert files_of(tmp_path / "o") == before


def test_a_timeline_and_the_other_formats(command, video_model, tmp_path) -> None:
    line = tmp_path / "line.yaml"
    line.write_text(
        "num_frames: 12\nsegments:\n  - {text: a taxi moves left on a road, frames: [0, 3]}\n"
        "  - fields: {subject: a taxi, action: spins, place: on snow}\n    frames: [8, 11]\n"
    )
    frames = {}
    for blend in ("promptblend", "linear", "cut"):
        out = tmp_path / blend
        result = report(command("generate", "video", "--timeline", line, "--out", out, "--format", "png", *SHORT[2:],
                                "--model", video_model, "--blend", blend, "--json"))  # fmt: skip
        assert result["videos"] == [str(out / "000000")] and result["attention"] is None
        assert result["settings"]["blend"] == blend and result["settings"]["timeline"]["num_frames"] == 12
        pictures = sorted((out / "000000").glob("*.png"))
        assert len(pictures) == 12
        frames[blend] = np.stack([np.asarray(PIL.Image.open(p)) for p in pictures])
        assert [row["prompt"] for row in read_manifest(out)] == ["a taxi moves left on a road -> a taxi spins on snow"]
    assert (frames["cut"] != frames["linear"]).any() and (frames["promptblend"] != frames["linear"]).any()
    gif = report(command("generate", "video", "a taxi", "--out", tmp_path / "g", "--format", "gif", *SHORT, "--model",
                         video_model, "--num-videos", 2, "--json"))  # fmt: skip
    assert [Path(p).name for p in gif["videos"]] == ["000000.gif", "000001.gif"]
    assert PIL.Image.open(gif["videos"][0]).n_frames > 1


@pytest.mark.slow
def test_killed_and_run_again_gives_the_same_files(command, video_model, tmp_path) -> None:
    given = ("generate", "video", "a taxi moves left", "a frog", *SHORT, "--num-inference-steps", 16, "--sampler",
             "fifo", "--model", video_model, "--format", "gif", "--json")  # fmt: skip
    arguments = [str(a) for a in given]
    report(command(*arguments, "--out", tmp_path / "whole"))
    out = tmp_path / "cut"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "mediaspec", *arguments, "--out", str(out)], cwd=ROOT, env=environment,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None and not list(out.glob(".work-*/*/state.pt")):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    line = report(command(*arguments, "--out", out))
    assert line["made"] >= 1
    assert files_of(out) == files_of(tmp_path / "whole")


@pytest.mark.parametrize("arguments,message", [
    ((), "give captions (one video each) as arguments"),
    (("a", "--timeline", "x.yaml"), "one of the two"),
    (("--timeline", "none.yaml"), "No such file"),
    (("a", "--sampler", "freenose"), "did you mean 'freenoise'"),
    (("a", "--attention", "tiara", "--tiara-preset", "save"), "did you mean 'safe'"),
    (("a", "--alpha", "3"), "belong to --attention tiara"),
    (("a", "--blend", "cut"), "it needs --timeline FILE"),
    (("a", "--format", "mp3"), "did you mean 'mp4'"),
    (("a", "--dtype", "half"), "write one of float32"),
    (("a", "--num-frames", "0"), "num_frames=0"),
    (("a", "--num-videos", "0"), "must be at least 1"),
    (("a", "--fps", "0"), "fps=0.0"),
    (("  ",), "is empty"),
    (("a", "--model", "moving-emojy"), "did you mean 'moving-emoji'"),
    (("a", "--attention", "tiara", "--alpha", "-1"), "alpha"),
    (("a", "--num-inference-steps", "0"), "num_inference_steps=0"),
    (("a", "--height", "15"), "divisible by 8"),
])  # fmt: skip
def test_errors_say_what_to_write(command, video_model, tmp_path, arguments, message: str) -> None:
    given = [video_model if a is None else a for a in arguments]
    model = () if "--model" in given else ("--model", video_model)
    result = command("generate", "video", *given, "--out", tmp_path / "o", *model)
    assert result.exit_code == 2 and result.stderr.startswith("error: ") and message in result.stderr, result.output
    assert "Traceback" not in result.output and not list(tmp_path.iterdir())


def test_another_models_folder_and_other_settings_are_refused(command, model, video_model, tmp_path) -> None:
    result = command("generate", "video", "a", "--model", model, "--out", tmp_path / "a")
    assert result.exit_code == 2 and "makes no videos" in result.stderr
    arguments = ("generate", "video", "a", "--model", video_model, "--out", tmp_path / "b", "--format", "gif", *SHORT)
    assert command(*arguments).exit_code == 0
    other = command(*arguments, "--fps", 12)
    assert other.exit_code == 2 and "fps: 8.0 there, 12.0 now" in other.stderr


def test_frames_of_other_settings_are_not_thrown_away(command, video_model, tmp_path) -> None:
    frames = tmp_path / ".work-other" / "000000.gif.parts" / "frames"
    frames.mkdir(parents=True)
    run = ("generate", "video", "a", "--model", video_model, "--out", tmp_path, "--format", "gif", *SHORT)
    for work in (frames / "000000.png", frames.parent / "state.pt"):
        work.write_bytes(b"hours of work")
        result = command(*run)
        assert result.exit_code == 2 and "made with other settings" in result.stderr and work.exists()
        work.unlink()
    assert command(*run).exit_code == 0 and not list(tmp_path.glob(".*"))


def test_auto_pipeline_makes_a_long_video_pipeline(video_model) -> None:
    import torch

    pipe = AutoPipeline.from_pretrained(str(video_model), dtype=torch.float64)
    assert type(pipe).__name__ == "LongVideoPipeline" and pipe.base.unet.dtype == torch.float64
    with pytest.raises(TypeError, match="unexpected keyword argument 'dtyp'"):
        AutoPipeline.from_pretrained(str(video_model), dtyp=torch.float64)


@pytest.mark.skipif(not SHIPPED, reason="the weights of moving-emoji are not in this checkout")
def test_the_shipped_model(command, tmp_path) -> None:
    line = report(command(
        "generate", "video", "a yellow taxi moves left on a grey road", "--num-frames", 20, "--num-inference-steps", 2,
        "--attention", "tiara", "--out", tmp_path, "--json",
    ))  # fmt: skip
    assert line["num_frames"] == 20 and Path(line["videos"][0]).is_file() and line["attention"]["modules"] > 0
    assert line["settings"]["guidance_scale"] == 4.0 and line["settings"]["num_inference_steps"] == 2
    assert type(AutoPipeline.from_pretrained("moving-emoji")).__name__ == "LongVideoPipeline"
