"""VBench's files: names, full_info.json, result files of the structure that its code writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mediaspec.eval.vbench import DIMENSIONS, normalised, read_vbench, video_name, write_vbench
from mediaspec.eval.video_files import encode_mp4, read_video, write_frames
from tests.eval.clips import moving_square


def test_layout(tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    clip = moving_square(5, 16)
    write_frames(tmp_path / "a.npz", clip, 12)
    encode_mp4(clip, 8, tmp_path / "b.mp4")
    videos = [("a red ball", 0, tmp_path / "a.npz"), ("a red ball", 1, tmp_path / "b.mp4")]
    info = write_vbench(tmp_path / "out", videos, ["motion_smoothness"])
    assert [path.name for path in sorted((tmp_path / "out" / "videos").iterdir())] == [
        "a red ball-0.mp4",
        "a red ball-1.mp4",
    ]
    assert json.loads(info.read_text()) == [
        {
            "prompt_en": "a red ball",
            "dimension": ["motion_smoothness"],
            "video_list": [str(tmp_path / "out" / "videos" / f"a red ball-{k}.mp4") for k in (0, 1)],
        }
    ]
    first = read_video(tmp_path / "out" / "videos" / "a red ball-0.mp4")
    assert first.frames.shape == clip.shape and first.fps == pytest.approx(12)
    assert (tmp_path / "out" / "videos" / "a red ball-1.mp4").read_bytes() == (tmp_path / "b.mp4").read_bytes()


@pytest.mark.parametrize(
    ("prompt", "index", "dimensions", "message"),
    [
        ("a/b", 0, ["dynamic_degree"], "no file name"),
        ("", 0, ["dynamic_degree"], "no file name"),
        ("x" * 260, 0, ["dynamic_degree"], "255 bytes"),
        ("a", -1, ["dynamic_degree"], "index from 0"),
        ("a", 0, ["dynamic_degre"], "did you mean 'dynamic_degree'"),
        ("a", 0, ["color"], "own prompts"),
    ],
)
def test_what_vbench_could_not_find_is_refused(tmp_path: Path, prompt, index, dimensions, message) -> None:
    with pytest.raises(ValueError, match=message):
        write_vbench(tmp_path, [(prompt, index, tmp_path / "a.mp4")], dimensions)
    assert not (tmp_path / "videos").exists()


def test_one_prompt_and_index_twice(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="comes twice"):
        write_vbench(tmp_path, [("a", 0, tmp_path / "a.mp4")] * 2)
    with pytest.raises(ValueError, match="no videos"):
        write_vbench(tmp_path, [])


def test_results(tmp_path: Path) -> None:
    """[pooled score, rows per video]; dynamic degree stores booleans, other dimensions may lack the rows."""
    videos = [f"v/{video_name('a cat', k)}" for k in (1, 0)]
    document = {
        "subject_consistency": [0.9, [{"video_path": p, "video_results": v} for p, v in zip(videos, (0.8, 0.95))]],
        "dynamic_degree": [0.5, [{"video_path": p, "video_results": v} for p, v in zip(videos, (True, False))]],
        "color": [0.25, [{"video_path": videos[0], "video_results": "text"}]],
        "imaging_quality": 0.7,
    }
    (tmp_path / "run_eval_results.json").write_text(json.dumps(document))
    for path in (tmp_path, tmp_path / "run_eval_results.json"):
        found = read_vbench(path)
        assert set(found) == set(document) and found["subject_consistency"].score == 0.9
    assert found["subject_consistency"].by_prompt() == {"a cat": [0.95, 0.8]}
    assert found["dynamic_degree"].videos == {videos[0]: 1.0, videos[1]: 0.0}
    assert found["color"].videos == {} and found["imaging_quality"].score == 0.7


@pytest.mark.parametrize("text", ["[1]", "{", '{"subject_consistency": ["x", []]}', '{"subject_consistency": true}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x_eval_results.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="x_eval_results"):
        read_vbench(path)
    with pytest.raises(ValueError, match="holds no"):
        read_vbench(tmp_path / "missing")


def test_normalised() -> None:
    assert normalised("subject_consistency", 1.0) == 1 and normalised("motion_smoothness", 0.706) == 0
    assert normalised("motion_smoothness", 0.999) == 1
    with pytest.raises(ValueError, match="no range"):
        normalised("color", 0.5)
    assert len(set(DIMENSIONS)) == 16
