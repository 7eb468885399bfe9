"""Plot the training logs of moving-emoji.

python tools/moving_emoji/curves.py --logs tools/moving_emoji/logs --out tools/moving_emoji/logs/curves.png
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


def series(rows: list[dict[str, Any]], key: str) -> tuple[list[float], list[float]]:
    """Minutes and values of the lines that hold `key`."""
    kept = [r for r in rows if key in r]
    return [r["minutes"] for r in kept], [r[key] for r in kept]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--logs", type=Path, default=Path("tools/moving_emoji/logs"))
    parser.add_argument("--out", type=Path, default=Path("curves.png"))
    args = parser.parse_args()
    vae, decoder, denoiser, reader = (read(args.logs / f"{n}.jsonl") for n in ("vae", "decoder", "denoiser", "reader"))
    _, (a, b, c) = plt.subplots(1, 3, figsize=(12, 3.2))
    a.plot(*series(vae, "psnr_held_out"), label="whole")
    a.plot(*series(decoder, "psnr_held_out"), label="decoder alone")
    a.set(title="autoencoder", xlabel="minutes on one core", ylabel="held-out PSNR (dB)")
    a.legend(fontsize=7)
    for kind in ("clips", "diagonal", "history", "pictures", "directions"):
        b.plot(*series(denoiser, f"loss_{kind}"), label=kind)
    b.set(title="denoiser", xlabel="minutes on one core", ylabel="v-prediction error", yscale="log")
    b.legend(fontsize=7)
    for name in ("subject", "motion", "place"):
        c.plot(*series(reader, name), label=name)
    c.set(title="clip reader", xlabel="minutes on one core", ylabel="accuracy on spoiled clips")
    c.legend(fontsize=7)
    plt.tight_layout()
    plt.savefig(args.out, dpi=80)


if __name__ == "__main__":
    main()
