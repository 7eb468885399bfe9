"""`mediaspec eval video` on tiny clips: finished folders, a real pipeline with and without TiARA, report, errors."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from mediaspec.eval.video_files import write_frames
from tests.eval.clips import flickering, moving_square

pytest.importorskip("scipy")
FAST = ("--no-lite0", "--no-shots", "--flow", "blocks")


def object_of(result) -> dict:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Six clips with flicker, and the same ones without."""
    root = tmp_path_factory.mktemp("clips")
    for number in range(6):
        calm = moving_square(18, 24, texture=8, seed=number)
        write_frames(root / "plain" / f"clip{number}.npz", flickering(calm, seed=number), 8)
        write_frames(root / "steady" / f"clip{number}.npz", calm, 8)
    return root / "plain", root / "steady"


class Pages(HTMLParser):
    """Collects tags, sources and text; complains about tags that do not close."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[tuple[str, str]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attributes: list) -> None:
        if tag not in ("meta", "img", "br", "link"):
            self.open.append(tag)
        self.sources += [(tag, value) for name, value in attributes if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        self.text += data


def test_finished_folders_are_compared_and_reported(command, folders, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    run = ("eval", "video", *folders, "--out", tmp_path, *FAST, "--json")
    result = command(*run, "--report", "--show", 2)
    found = object_of(result)
    assert [one["group"] for one in found["groups"]] == ["plain", "steady"]
    comparison = found["comparisons"][0]
    assert (comparison["baseline"], comparison["treatment"], comparison["pairs"]) == ("plain", "steady", 6)
    flicker, warping = comparison["metrics"]["flicker"], comparison["metrics"]["warping_error"]
    assert flicker["mean"] > 0 and flicker["improved"] == 1 and flicker["low"] > 0
    assert warping["mean"] < 0 and flicker["p_value"] == pytest.approx(2 / 64)  # six pairs, all one way
    assert flicker["p_holm"] > flicker["p_value"]
    assert "flow: blocks" in result.stdout and "| temporal flicker score" in result.stdout
    assert found["scorer"]["pictures"] is None and "alignment" not in comparison["metrics"]
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 12

    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    parser = Pages()
    parser.feed(page)
    assert not parser.open and "plain" in parser.text and "Paired statistics" in parser.text
    assert parser.sources and all(value.startswith("data:") for _, value in parser.sources)  # nothing from outside
    clips = [value for tag, value in parser.sources if value.startswith(("data:video/", "data:image/gif"))]
    assert len(clips) == 4  # two items, two groups

    again = object_of(command("eval", "video", tmp_path, "--json"))  # a filled folder is shown again
    assert again["comparisons"] == found["comparisons"] and again["scorer"] == found["scorer"]


def test_a_filled_folder_keeps_its_baseline(command, folders, tmp_path) -> None:
    """Rows are stored by name; "steady" was given first here and is no name's first."""
    plain, steady = folders
    found = object_of(command("eval", "video", steady, plain, "--out", tmp_path, *FAST, "--limit", 2, "--json"))
    again = object_of(command("eval", "video", tmp_path, "--json"))
    assert found["comparisons"][0]["baseline"] == again["comparisons"][0]["baseline"] == "steady"
    assert [one["group"] for one in again["groups"]] == ["steady", "plain"]


def test_rows_are_kept_until_something_changes(command, folders, tmp_path, monkeypatch) -> None:
    from mediaspec.eval.video_score import VideoScorer

    calls = []
    score = VideoScorer.score
    monkeypatch.setattr(VideoScorer, "score", lambda self, *rest: calls.append(1) or score(self, *rest))
    run = ("eval", "video", *folders, "--out", tmp_path, *FAST, "--limit", 1)
    for arguments, wanted in [(run, 2), (run, 0), ((*run, "--flow-every", 2), 2), ((*run, "--fps", 24), 2)]:
        calls.clear()
        assert command(*arguments).exit_code == 0
        assert len(calls) == wanted, arguments


def test_a_cut_off_row_is_measured_again(command, folders, tmp_path) -> None:
    run = ("eval", "video", folders[0], "--out", tmp_path, *FAST, "--limit", 2)
    assert command(*run).exit_code == 0
    path = tmp_path / "rows.jsonl"
    data = path.read_bytes()
    path.write_bytes(data[:-40])
    assert command(*run).exit_code == 0
    lines = path.read_bytes().split(b"\n")
    assert path.read_bytes().startswith(data[:-40]) and json.loads(lines[-2])["id"] == "plain/clip1"


def test_vbench_folders(command, folders, tmp_path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    run = ("eval", "video", folders[0], "--out", tmp_path / "rows", *FAST, "--limit", 1)
    found = object_of(command(*run, "--vbench", tmp_path / "vbench", "--json"))
    info = json.loads(Path(found["vbench"][0]).read_text())
    assert info[0]["prompt_en"] == "clip0" and Path(info[0]["video_list"][0]).name == "clip0-0.mp4"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give one of"),
        (("missing",), "is no folder"),
        (("--prompts", "missing.txt"), "is no file"),
        (("--prompts", "{prompts}", "--samplers", "fredom"), "freelong"),
        (("--prompts", "{prompts}", "--attention", "none,tiara:sfae"), "safe"),
        (("--prompts", "{prompts}", "--attention", "tiara:alhpa=3"), "alpha"),
        (("--prompts", "{prompts}", "--attention", "tiara:alpha=-1"), "alpha"),
        (("--prompts", "{prompts}", "--steps", "fifo=3"), "freenoise=16"),
        (("--prompts", "{prompts}", "--limit", "9"), "at most"),
        (("--prompts", "{prompts}", "--limit", "0"), "--limit is 0"),
        (("--prompts", "{prompts}", "--fps", "0"), "--fps is 0"),
        (("--prompts", "{prompts}", "--flow", "raft"), "there is no flow"),
        (("--prompts", "{prompts}", "--num-frames", "1"), "at least 2"),
        (("--timelines", "{timelines}", "--num-frames", "8", "--blends", "linaer"), "linear"),
        (("--timelines", "{timelines}", "--num-frames", "1"), "at least 2"),
        (("--prompts", "{prompts}", "--timelines", "{timelines}"), "give one of"),
        (("--prompts", "{prompts}", "--shard", "1/1"), "shard"),
    ],
)
def test_errors_name_the_way_out(command, tmp_path, arguments, message) -> None:
    (tmp_path / "prompts.txt").write_text("a red ball\n")
    (tmp_path / "pairs.json").write_text(json.dumps({"pairs": [["a red ball", "a blue ball"]]}))
    names = {"prompts": tmp_path / "prompts.txt", "timelines": tmp_path / "pairs.json"}
    given = [str(one).format(**names) for one in arguments]
    fast = FAST[:2] if "--flow" in given else FAST
    result = command("eval", "video", *given, "--out", tmp_path / "out", *fast)
    assert result.exit_code == 2, result.output
    assert message in result.stderr


def test_broken_videos_are_named(command, tmp_path) -> None:
    (tmp_path / "videos").mkdir()
    (tmp_path / "videos" / "bad.npz").write_bytes(b"PK\x03\x04 cut off")
    result = command("eval", "video", tmp_path / "videos", "--out", tmp_path / "out", *FAST)
    assert result.exit_code == 2 and "bad.npz" in result.stderr
    np.save(tmp_path / "videos" / "bad.npy", np.zeros((1, 8, 8, 3), np.uint8))
    (tmp_path / "videos" / "bad.npz").unlink()
    result = command("eval", "video", tmp_path / "videos", "--out", tmp_path / "out", *FAST)
    assert result.exit_code == 2 and "at least 2" in result.stderr and "bad.npy" in result.stderr


def test_moving_emoji_is_made_as_generate_video_makes_it(command, tmp_path, monkeypatch) -> None:
    from mediaspec.eval import video_run

    seen = []
    monkeypatch.setattr(video_run, "run_jobs", lambda jobs, rows, *_, **__: seen.append(rows.folder) or [])
    (tmp_path / "prompts.txt").write_text("a red ball\n")
    file = tmp_path / "prompts.txt"
    run = ("eval", "video", "--prompts", file, "--samplers", "freenoise,fifo", *FAST, "--no-reader")
    for name, options in (("a", ()), ("b", ("--guidance-scale", 2, "--steps", "freenoise=8"))):
        command(*run, *options, "--out", tmp_path / name)
    one, two = (json.loads((folder / "run.json").read_text()) for folder in seen)
    assert one["guidance_scale"] == 4.0 and one["sampler_steps"] == {"freenoise": 20}
    assert two["guidance_scale"] == 2.0 and two["sampler_steps"] == {"freenoise": 8}


def test_made_videos_of_a_saved_pipeline(command, tmp_path) -> None:
    """A pipeline folder from disk, same seeds with and without; --shard parts join in one folder."""
    pytest.importorskip("matplotlib")
    from tests.pipelines.tiny_video import animatediff

    animatediff().save_pretrained(tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("a b\nc d\n")
    run = (
        "eval", "video", "--model", tmp_path / "model", "--prompts", tmp_path / "prompts.txt", "--num-frames", 20,
        "--attention", "none,tiara:safe", "--steps", "freenoise=2", "--guidance-scale", 1, "--out", tmp_path / "out",
        *FAST, "--json",
    )  # fmt: skip
    for part in ("0/2", "1/2"):
        assert object_of(command(*run, "--shard", part))["groups"][0]["videos"] == 1
    found = object_of(command(*run, "--report"))
    assert [one["group"] for one in found["groups"]] == ["freenoise / none", "freenoise / tiara:safe"]
    assert found["groups"][1]["attention"]["modules"] > 0 and found["groups"][0]["attention"] is None
    assert found["comparisons"][0]["pairs"] == 2 and found["settings"]["num_frames"] == 20
    assert (tmp_path / "out" / "rows.0-of-2.jsonl").is_file() and Path(found["report"]).is_file()
    assert not (tmp_path / "out" / "rows.jsonl").exists()  # the workers had made everything
    changed = command(*run, "--num-frames", 24)
    assert changed.exit_code == 2 and "num_frames" in changed.stderr
