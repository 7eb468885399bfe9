"""The attention benchmark runs its smoke mode on the CPU and says that it measured no kernel."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_smoke_run_is_labelled(tmp_path):
    out = tmp_path / "attention.json"
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "bench_attention.py"), "--device", "cpu", "--cached", "300",
         "--heads", "4", "--kv-heads", "2", "--size", "16", "--tree", "13", "--repeats", "1", "--out", str(out)],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(out.read_text())
    assert report["smoke"] is True and "no kernel is measured" in report["label"]
    rows = {(row["operation"], row["implementation"]): row for row in report["rows"]}
    both = [(name, impl) for name in ("plain", "chain", "tree", "sparse-300") for impl in ("reference", "sdpa")]
    assert set(rows) == {*both, ("merge", "reference")}
    # two key heads of 16 floats: 301 keys and values, four queries and outputs
    assert rows["plain", "reference"]["megabytes"] == (2 * 2 * 301 * 16 + 2 * 4 * 16) * 4 / 1e6
    assert sum(row["fastest"] for row in report["rows"]) >= 5
