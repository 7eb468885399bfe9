"""Tables from result files, and the plot."""

import json
from pathlib import Path
from typing import Any

import pytest

from mediaspec.eval.report import bench_table, combined_table, eval_table, plot_speed_drift, read_json, report


def bench_row(rule: str, ratio: float, drift: float, guarantee: str) -> dict[str, Any]:
    return {
        "rule": rule, "ratio_to_plain": ratio, "ratio_quartiles": [ratio - 0.1, ratio + 0.1], "tokens_per_call": 2.5,
        "seconds": 1.25, "tokens_per_second": 204.8, "drift": drift, "guarantee": guarantee,
        "provenance": {"command": "mediaspec bench image", "machine": "m", "dtype": "float32", "threads": 2,
                       "versions": {"torch": "2.14"}, "git": "abc"},
    }  # fmt: skip


def eval_result() -> dict[str, Any]:
    def rule(name: str, frechet: float) -> dict[str, Any]:
        return {
            "rule": name, "guarantee": "exact-law", "tokens_per_call": 2.0, "drift": {"mean": 0.25},
            "frechet": {"value": frechet, "error": 0.01, "floor": 0.02},
            "frechet_ratio": {"value": 1.01, "error": 0.004}, "kid": {"value": 0.0012, "error": 0.0003, "floor": 0.0},
            "captions": {"concept_top1": {"value": 0.912, "error": 0.006}},
        }  # fmt: skip

    return {
        "rules": [rule("plain", 0.5), rule("cool_sd:delta=2", 0.6)], "num_images": 2048,
        "reference": {"what": "plain decoding", "count": 2048},
        "features": {"title": "Frechet distance (EfficientNet-Lite0)", "side": 128, "filter": "bicubic"},
    }  # fmt: skip


BENCH = [bench_row("plain", 1.0, 0.0, "exact-law"), bench_row("cool_sd:delta=2", 2.6, 0.31, "bounded-drift")]


def test_bench_table() -> None:
    lines = bench_table(BENCH).splitlines()
    assert lines[0].startswith("| rule | speed | quartiles | tokens per call |")
    assert lines[3].startswith(
        "| `cool_sd:delta=2` | 2.60x | 2.50 - 2.70 | 2.50 | 1.250 | 205 | 0.31 | bounded-drift |"
    )
    assert "| 0 | exact-law |" in lines[2]


def test_eval_table_names_the_features_and_never_says_fid() -> None:
    table = eval_table(eval_result())
    assert "Frechet distance (EfficientNet-Lite0)" in table and "FID" not in table
    assert "91.2 ± 0.6 %" in table and "1.010 ± 0.004" in table and "1.20 ± 0.30" in table
    assert "2048 images per rule" in table and "bicubic" in table


def test_combined_table_joins_by_rule() -> None:
    lines = combined_table(BENCH, eval_result()).splitlines()
    assert len(lines) == 4 and "2.60x" in lines[3] and "0.6 ± 0.01" in lines[3]
    with pytest.raises(ValueError, match="share no rule"):
        combined_table([bench_row("gsd", 1, 0, "unbounded")], eval_result())


def test_report_reads_captured_output(tmp_path: Path) -> None:
    (tmp_path / "bench.json").write_text("repeat 1/5 plain\n" + json.dumps(BENCH) + "\n")
    (tmp_path / "eval.json").write_text(json.dumps(eval_result(), indent=1))
    text = report([tmp_path / "bench.json", tmp_path / "eval.json"])
    assert text.count("\n| --- |") == 3 and "`mediaspec bench image`" in text and "revision abc" in text
    (tmp_path / "bad.json").write_text("no result")
    with pytest.raises(ValueError, match="holds no JSON"):
        read_json(tmp_path / "bad.json")


def test_plot_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from PIL import Image

    plot_speed_drift([*BENCH, bench_row("gsd", 3.0, 9.0, "unbounded")], tmp_path / "p.png", "emoji-64")
    with Image.open(tmp_path / "p.png") as picture:
        assert picture.format == "PNG" and picture.width > 600
