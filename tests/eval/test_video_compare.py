"""Groups, pairs, tables, distances of clips and the report, on rows whose answer is known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mediaspec.eval.video_compare import (
    compare_groups,
    frechet_of_groups,
    group_table,
    paired_table,
    pairs_of_groups,
    summarise_groups,
)
from mediaspec.eval.video_report import render_report, time_slice

pytest.importorskip("scipy")
SCORER = {"flow": "blocks", "flow_every": 1, "feature_every": 4, "pictures": None, "shots": None}


def rows_of(sampler: str, attention: str, gain: float, blend: str | None = None, count: int = 12) -> list[dict]:
    out = []
    for number in range(count):
        own = np.random.default_rng(number).normal(0, 0.02)
        noise = np.random.default_rng(number + 1000 * len(attention)).normal(0, 0.002)
        group = " / ".join(filter(None, [sampler, attention, blend]))
        out.append(
            {
                "id": f"{group}/{number}", "group": group, "item": str(number), "sampler": sampler, "blend": blend,
                "attention": attention, "prompt": f"prompt {number}", "timeline": None, "file": "gone.npz", "fps": 8,
                "frames": 20, "spectrum": [4.0, 1.0, 0.5, 0.1],
                "seconds": 2.0, "attention_summary": None if attention == "none" else {"modules": 4},
                "metrics": {"flicker": 0.9 + own + gain + noise, "warping_error": 3 - gain, "motion": 8 * (1 - gain)},
            }
        )  # fmt: skip
    return out


ROWS = [
    *rows_of("freenoise", "none", 0), *rows_of("freenoise", "tiara:safe", 0.02), *rows_of("fifo", "none", 0),
    *rows_of("fifo", "tiara:safe", 0.0001, count=9),
]  # fmt: skip


def test_treatments_meet_the_baseline_of_their_sampler() -> None:
    assert pairs_of_groups(ROWS) == [
        ("freenoise / none", "freenoise / tiara:safe"),
        ("fifo / none", "fifo / tiara:safe"),
    ]
    blends = [row for blend in ("promptblend", "linear", "cut") for row in rows_of("fifo", "none", 0, blend, 2)]
    wanted = [(f"fifo / none / {other}", "fifo / none / promptblend") for other in ("linear", "cut")]
    assert pairs_of_groups(blends) == wanted
    bare = [{"group": name} for name in ("a", "b", "c")]
    assert pairs_of_groups(bare) == [("a", "b"), ("a", "c")]


def test_a_gain_is_told_from_none() -> None:
    first, second = compare_groups(ROWS)
    assert first["metrics"]["flicker"]["verdict"] == "better" and first["pairs"] == 12
    assert first["metrics"]["warping_error"]["verdict"] == "better"
    assert first["metrics"]["motion"]["verdict"] == "changed"
    assert first["metrics"]["motion"]["relative"] == pytest.approx(-0.02)
    assert second["pairs"] == 9 and second["metrics"]["flicker"]["verdict"] == "no difference"
    table = paired_table(first)
    assert "`freenoise / tiara:safe` against `freenoise / none`, 12 pairs" in table and "| better |" in table


def test_groups() -> None:
    groups = summarise_groups(ROWS)
    assert [one["videos"] for one in groups] == [12, 12, 12, 9]
    entry = groups[0]["metrics"]["flicker"]
    assert entry["low"] < entry["mean"] < entry["high"] and entry["count"] == 12
    assert groups[1]["attention"] == {"modules": 4.0} and groups[0]["attention"] is None
    table = group_table(groups, SCORER)
    assert "| `fifo / tiara:safe` | 9 |" in table and "flow: blocks" in table and "do not compare" in table


def test_distances_of_clips() -> None:
    """The treatment whose clips are shifted is far, the other one is as near as half against half."""
    rng = np.random.default_rng(0)
    clips = {group: rng.normal(size=(60, 4)) for group in {row["group"] for row in ROWS}}
    clips["freenoise / tiara:safe"] = clips["freenoise / tiara:safe"] + 3

    def rows_clips(rows):
        return clips[rows[0]["group"]].astype(np.float32)

    far, near = frechet_of_groups(ROWS, rows_clips)
    assert far["value"] == pytest.approx(36, rel=0.3) and near["value"] < 1 and far["clips"] == [60, 60]
    assert "TransNetV2" in far["title"] and "FVD" not in far["title"]
    to_reference = frechet_of_groups(ROWS, rows_clips, clips["fifo / none"].astype(np.float32))
    assert [one["to"] for one in to_reference] == ["reference"] * 4 and to_reference[2]["value"] == pytest.approx(0)
    assert frechet_of_groups(ROWS, lambda rows: None) == []


def test_the_page_escapes_texts_and_lives_without_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    rows = [{**row, "prompt": "a <b>bold</b> & red ball"} for row in ROWS]
    result = {
        "rows": rows, "groups": summarise_groups(rows), "comparisons": compare_groups(rows), "frechet": [],
        "scorer": SCORER, "settings": {"model": "tiny"}, "provenance": None,
    }  # fmt: skip
    page = render_report(tmp_path, result, 3)
    assert "a &lt;b&gt;bold&lt;/b&gt; &amp; red ball" in page and "<b>bold" not in page
    assert page.count("file not found") == 3 * 4 and "model tiny" in page
    assert page.count("data:image/png") == 3  # the plots
    with pytest.raises(ValueError, match="no measured videos"):
        render_report(tmp_path, {**result, "rows": []})


def test_time_slice() -> None:
    frames = np.zeros((5, 4, 6, 3), np.uint8)
    frames[3, 2] = 9
    found = time_slice(frames)
    assert found.shape == (6, 5, 3) and (found[:, 3] == 9).all() and found.sum() == 9 * 6 * 3
