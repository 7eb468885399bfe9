"""What a comparison makes: attention lists, prompt and timeline files, jobs, rows that survive a killed process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mediaspec.attention.tiara import TiARA
from mediaspec.eval.video_plan import parse_attention, parse_sampler_settings, plan_jobs, read_prompts, read_timelines
from mediaspec.eval.video_rows import VideoRows, read_rows


def test_attention_lists() -> None:
    found = parse_attention("none,tiara:paper,tiara:safe,tiara:alpha=3,window_length=9,tiara:safe,steps=0..7")
    assert [one.text for one in found] == [
        "none", "tiara:paper", "tiara:safe", "tiara:alpha=3,window_length=9", "tiara:safe:steps=(0, 7)",
    ]  # fmt: skip
    assert found[0].build() is None and found[0].plain
    assert found[1].build() == TiARA.paper() and found[2].build() == TiARA.safe()
    assert found[3].build() == TiARA(alpha=3, window_length=9)
    assert found[4].build() == TiARA.safe(steps=(0, 7))
    assert found[2].build("reflect") == TiARA.safe(boundary="reflect") and found[0].build("reflect") is None
    assert parse_attention("tiara:boundary=zero")[0].build("reflect").boundary == "zero"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("none,,tiara", "empty entry"),
        ("tiarra", "did you mean 'tiara'"),
        ("none:safe", "takes no settings"),
        ("tiara:safe,tiara:safe", "listed twice"),
        ("tiara:safe:paper", "at most one"),
        ("tiara:alpha=", "key=value"),
        ("tiara:alpha=3,alpha=4", "once"),
        ("tiara:windw_length=7", "window_length"),
        ("tiara:window_length=x", "window_length"),
    ],
)
def test_wrong_attention_is_refused(text: str, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        parse_attention(text)


def test_prompt_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\ufeffone\n\n two \n", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('"one"\n{"prompt": "two"}\n')
    (tmp_path / "c.json").write_text(json.dumps({"prompts": ["one", "two"], "pairs": []}))
    for name in ("a.txt", "b.jsonl", "c.json"):
        assert read_prompts(tmp_path / name) == ["one", "two"]
    assert read_prompts(tmp_path / "a.txt", 1) == ["one"]
    (tmp_path / "d.json").write_text(json.dumps({"prompts": [3]}))
    (tmp_path / "e.txt").write_text("\n")
    (tmp_path / "f.txt").write_bytes(b"\xff\xfe\xff")
    for name, message in (("d.json", "prompt 0"), ("e.txt", "no prompts"), ("f.txt", "UTF-8"), ("g.txt", "no file")):
        with pytest.raises(ValueError, match=message):
            read_prompts(tmp_path / name)
    with pytest.raises(ValueError, match="at most"):
        read_prompts(tmp_path / "a.txt", 3)


def test_timeline_files(tmp_path: Path) -> None:
    pairs = {"pairs": [["a cat sits", "a cat runs"], [["a dog sits", 0, 9], ["a dog runs", 20, 31]]]}
    (tmp_path / "pairs.json").write_text(json.dumps(pairs))
    one, two = read_timelines(tmp_path / "pairs.json", 32)
    assert one.texts == pairs["pairs"][0] and one.length == two.length == 32
    assert [(s.start, s.end) for s in two.segments] == [(0, 9), (20, 31)]
    single = {"num_frames": 64, "segments": [{"text": "a", "frames": [0, 3]}, {"text": "b", "frames": [8, 11]}]}
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x.json").write_text(json.dumps(single))
    for path in (tmp_path / "folder", tmp_path / "folder" / "x.json"):
        assert [line.length for line in read_timelines(path, 32)] == [32]
    (tmp_path / "text.json").write_text(json.dumps({"pairs": "a cat"}))
    with pytest.raises(ValueError, match="write a list"):
        read_timelines(tmp_path / "text.json", 32)
    (tmp_path / "bad.json").write_text(json.dumps({"pairs": [["a", "b"], [["a", 5, 2]]]}))
    with pytest.raises(ValueError, match="pairs 1"):
        read_timelines(tmp_path / "bad.json", 32)


def test_jobs_hold_the_seed_of_a_prompt_and_come_prompt_by_prompt() -> None:
    settings = parse_attention("none,tiara:safe")
    jobs = plan_jobs(["a", "b"], ["freenoise", "fifo"], settings, seeds=2, seed=10)
    assert len(jobs) == 16 and len({job.stem for job in jobs}) == 16
    assert [job.number for job in jobs] == [0] * 8 + [1] * 8
    assert {job.item: job.seed for job in jobs} == {"0000-10": 10, "0000-11": 11, "0001-12": 12, "0001-13": 13}
    assert jobs[1].stem == "freenoise_tiara_safe/0000-10" and jobs[1].group == "freenoise / tiara:safe"
    with pytest.raises(ValueError, match="make no video"):
        plan_jobs([], ["fifo"], settings)


def test_rows_survive_cut_lines_other_workers_and_refuse_other_settings(tmp_path: Path) -> None:
    rows = VideoRows(tmp_path, {"steps": 16, "samplers": ("a", "b")})
    rows.add({"id": "x", "value": 1})
    with open(rows.path, "ab") as file:
        file.write(b'{"id": "y", "val')
    again = VideoRows(tmp_path, {"steps": 16, "samplers": ("a", "b")})
    assert again.find("x") == {"id": "x", "value": 1} and again.find("y") is None
    again.add({"id": "y", "value": 2})
    VideoRows(tmp_path, {"steps": 16, "samplers": ("a", "b")}, (1, 2)).add({"id": "z", "value": 3})
    again.add({"id": "x", "value": 4})
    assert [(row["id"], row["value"]) for row in read_rows(tmp_path)] == [("x", 4), ("y", 2), ("z", 3)]
    with pytest.raises(ValueError, match="begun with steps=16, now it is 20"):
        VideoRows(tmp_path, {"steps": 20, "samplers": ("a", "b")})
    with pytest.raises(ValueError):
        again.add({"id": "bad", "value": float("nan")})
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        VideoRows(tmp_path, {})


def test_sampler_settings() -> None:
    assert parse_sampler_settings(["fifo:lookahead=false,eta=0.5"], ["fifo"]) == {
        "fifo": {"lookahead": False, "eta": 0.5}
    }
    for wrong in ("fifo", "plain:eta=1", "fifo:eta", "fifo:eta=1,eta=2"):
        with pytest.raises(ValueError, match="write"):
            parse_sampler_settings([wrong], ["fifo"])
