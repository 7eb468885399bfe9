"""The kernel benchmark runs its smoke mode on the CPU and says that it measured no kernel."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_smoke_run_is_labelled(tmp_path):
    out = tmp_path / "kernels.json"
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "bench_kernels.py"), "--device", "cpu", "--vocab", "64",
         "--repeats", "2", "--out", str(out)],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(out.read_text())
    assert report["smoke"] is True and "no kernel is measured" in report["label"]
    assert {row["implementation"] for row in report["rows"]} == {"reference"}
    assert {row["operation"].split()[0] for row in report["rows"]} >= {"sample", "chain-exact", "tree-exact"}
