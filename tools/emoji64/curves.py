"""Plot the training logs of emoji-64.

python tools/emoji64/curves.py --logs tools/emoji64/logs --out tools/emoji64/logs/curves.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a JSONL log, [] where it is missing."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def series(rows: list[dict[str, Any]], key: str) -> tuple[list[int], list[Any]]:
    """Steps and values of the lines that hold `key`."""
    kept = [r for r in rows if key in r and "step" in r]
    return [r["step"] for r in kept], [r[key] for r in kept]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logs", type=Path, default=Path("tools/emoji64/logs"))
    parser.add_argument("--out", type=Path, default=Path("curves.png"))
    args = parser.parse_args()
    vq, ar, head = (read(args.logs / f"{name}.jsonl") for name in ("vq-all", "ar", "drafter"))
    _, (a, b, c) = plt.subplots(1, 3, figsize=(12, 3.2))
    a.plot(*series(vq, "held_out_psnr"))
    a.set(title="tokenizer", xlabel="step", ylabel="held-out PSNR (dB)")
    b.plot(*series(ar, "loss"))
    for row in ar:
        if row.get("event") == "grow":
            b.axvline(row["step"], color="gray", linestyle=":")
    b.set(title="transformer (dotted: growth)", xlabel="step", ylabel="training loss (nats per token)")
    steps, values = series(head, "held_out_acceptance")
    for depth in range(len(values[0]) if values else 0):
        c.plot(steps, [v[depth] for v in values], label=f"depth {depth + 1}")
    c.set(title="draft head", xlabel="step", ylabel="held-out acceptance 1 - TV")
    c.legend(fontsize=7)
    plt.tight_layout()
    plt.savefig(args.out, dpi=80)


if __name__ == "__main__":
    main()
