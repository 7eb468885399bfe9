"""The benchmark of the frame bias runs on the CPU and writes what it says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_small_run(tmp_path):
    out = tmp_path / "bias.json"
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "bench_tiara_bias.py"), "--device", "cpu", "--frames", "6", "--grid",
         "2", "3", "--heads", "1", "--size", "16", "--repeats", "1", "--out", str(out)],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(out.read_text())
    rows = {(row["part"], row["route"], row["mode"]): row for row in report["rows"]}
    assert {key for key in rows if key[0] == "layer"} == {
        ("layer", "plain", "plain"),
        ("layer", "subtract", "frame"),
        ("layer", "subtract", "self_token"),
    }
    assert {route for part, route, _ in rows if part == "attention"} >= {"plain", "subtract", "split", "columns"}
    assert rows["attention", "subtract", "frame"]["products"] == 1 + 1 / 6
    assert rows["attention", "columns", "frame"]["products"] == 24 / 16
    assert report["grid"] == [2, 3] and report["frames"] == 6
