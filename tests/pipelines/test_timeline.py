"""Timelines: segments, files, and what is said about wrong ones."""

from __future__ import annotations

import json

import pytest

from mediaspec.pipelines.prompt_fields import PromptFields
from mediaspec.pipelines.timeline import Segment, Timeline


def test_a_timeline_from_tuples() -> None:
    line = Timeline.of([("a cat", 0, 3), ({"subject": "a dog", "action": "runs"}, 8, 11)])
    assert line.length == 12 and line.texts == ["a cat", "a dog runs"]
    assert line.schedule()[3:9] == [(0, 0.0), (0, 0.2), (0, 0.4), (0, 0.6), (0, 0.8), (1, 0.0)]
    assert line.schedule("cut")[3:9] == [(0, 0.0), (0, 0.0), (0, 0.0), (1, 0.0), (1, 0.0), (1, 0.0)]
    assert line.schedule("linear") == line.schedule()
    assert Timeline.of(line, 20).length == 20 and Timeline.of(line) is line


def test_one_prompt_and_frames_outside_all_segments() -> None:
    assert Timeline.of("a cat", 5).schedule() == [(0, 0.0)] * 5
    line = Timeline.of([("a cat", 2, 3), ("a dog", 5, 6)], 9)
    assert [i for i, _ in line.schedule()] == [0, 0, 0, 0, 0, 1, 1, 1, 1] and line.schedule()[4] == (0, 0.5)


def test_prompts_spread_evenly() -> None:
    line = Timeline.even(["a", "b", "c"], 100)
    assert [(s.start, s.end) for s in line.segments] == [(0, 23), (37, 61), (75, 99)]  # 13 frames of transition
    assert Timeline.even(["a", "b"], 1000).segments[1].start - Timeline.even(["a", "b"], 1000).segments[0].end == 101
    assert [s.start for s in Timeline.even(["a", "b"], 2).segments] == [0, 1]
    with pytest.raises(ValueError, match="write at most 8"):
        Timeline.even(["a", "b"], 10, transition=9)
    with pytest.raises(ValueError, match="do not fit"):
        Timeline.even(["a", "b"], 1)


@pytest.mark.parametrize("segments,frames,message", [
    ([("a cat", 0, 10), ("a dog", 8, 20)], None,
     r"segments 0 .*0-10.* and 1 .*8-20.* overlap; start segment 1 at frame 11"),
    ([("a cat", 10, 20), ("a dog", 0, 5)], None, "wrong order"),
    ([("a cat", 10, 4)], None, "before it starts at 10"),
    ([("a cat", -1, 4)], None, "count from 0"),
    ([("a cat", 0, 4), ("a dog", 8, 16)], 16, "ends at frame 16, but the video has 16 frames.*end it at 15"),
    ([("a cat", 0)], None, r"write \(text or fields, start_frame, end_frame\)"),
    ([("a cat", 0, 3.5)], None, "no frame number"),
    ([("  ", 0, 3)], None, "is empty"),
    ([({"subjet": "a cat"}, 0, 3)], None, "did you mean 'subject'"),
    ([], None, "no segments"),
    ("a cat", None, "write num_frames"),
    ([("a cat", 0, 3)], 0, "at least 1"),
])  # fmt: skip
def test_wrong_timelines(segments, frames, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        Timeline.of(segments, frames)


def test_files_round_trip(tmp_path) -> None:
    line = Timeline((Segment("a cat", 0, 3), Segment(PromptFields("a dog", "runs", place="on snow"), 8, 11)), 16)
    path = tmp_path / "line.json"
    path.write_text(json.dumps(line.record()))
    assert Timeline.load(path) == line == Timeline.of(str(path))
    assert Timeline.load(path, 20).length == 20
    yaml = tmp_path / "line.yaml"
    yaml.write_text(
        "blend: linear\nsegments:\n  - {text: a cat, start: 0, end: 3}\n  - {text: a dog, frames: [6, 9]}\n"
    )
    assert Timeline.load(yaml).texts == ["a cat", "a dog"] and Timeline.read_options(yaml) == {"blend": "linear"}
    short = tmp_path / "short.yml"
    short.write_text("num_frames: 20\ntransition: 4\nsegments: [a cat, a dog]\n")
    assert [(s.start, s.end) for s in Timeline.load(short).segments] == [(0, 7), (12, 19)]


@pytest.mark.parametrize("text,message", [
    ("segmnts: [a]", "must hold 'segments"),
    ("segments: [a]\nnum_framse: 3", "did you mean 'num_frames'"),
    ("segments:\n  - {text: a, frame: [0, 3]}", "segment 0 has an unknown key 'frame'; did you mean 'frames'"),
    ("segments:\n  - {text: a, frames: [3, 0]}", "before it starts"),
    ("segments:\n  - {text: a, frames: [0, 3]}\n  - {text: b}", "segment 1 has no frames but others have"),
    ("segments:\n  - {text: a, fields: {subject: b}}", "either text: or fields:"),
    ("segments:\n  - {text: a, frames: [0]}", r"write \[first, last\]"),
    ("segments:\n  - {text: a, frames: [0, 9]}\nnum_frames: 5", "has 5 frames"),
    ("segments:\n  - {text: a, start: 1}", "belong together"),
    ("segments: [a, b]", "or num_frames"),
    ("segments: []", "at least one segment"),
    ("a: [", "is no YAML"),
    ("segments: [a, b]\nnum_frames: many", "num_frames='many'; write a whole number"),
    ("segments: [a, b]\nnum_frames: 20\ntransition: long", "transition='long'; write a whole number"),
])  # fmt: skip
def test_wrong_files(tmp_path, text: str, message: str) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        Timeline.load(path)
    assert str(path) in str(error.value)


def test_missing_and_binary_files(tmp_path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        Timeline.load(tmp_path / "none.yaml")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="no UTF-8"):
        Timeline.load(tmp_path / "b.yaml")
