"""Draw 64 held-out captions with the embedded model: docs/emoji64.png.

    python tools/emoji64/contact_sheet.py --out docs/emoji64.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

from mediaspec import AutoPipeline
from mediaspec.eval.prompts import held_out_prompts, spread
from mediaspec.eval.sheet import contact_sheet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="emoji-64")
    parser.add_argument("--out", type=Path, default=Path("docs/emoji64.png"))
    parser.add_argument("--count", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    prompts = spread(held_out_prompts(args.model), args.count)
    pipe = AutoPipeline.from_pretrained(args.model)
    pictures = []
    for start in range(0, len(prompts), 16):
        batch = prompts[start : start + 16]
        seeds = [args.seed + start + k for k in range(len(batch))]
        pictures += pipe(batch, rule="plain", seeds=seeds).images
    args.out.parent.mkdir(parents=True, exist_ok=True)
    contact_sheet(pictures, prompts, columns=8).save(args.out, optimize=True)


if __name__ == "__main__":
    main()
