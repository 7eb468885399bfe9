"""How often the caption reader agrees with pictures, by kind of caption: the figures of the README's honest limits.

    mediaspec eval image --rules plain --num-images 2048 --reference pictures --out eval
    python tools/emoji64/by_kind.py --pictures eval/plain --every 2
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import torch

from mediaspec.eval.manifest import read_manifest
from mediaspec.eval.quality import load_picture
from mediaspec.eval.retrieval import caption_scores, load_reader

from concepts import HELD_OUT_CONCEPTS  # isort: skip

KINDS = ("unseen concept", "pair", "small or mirrored", "colour and style", "colour", "style", "plain")


def kind_of(caption: str) -> str:
    """The first of `KINDS` that a caption is of."""
    if any(re.search(rf"\b{concept}\b", caption) for concept in HELD_OUT_CONCEPTS):
        return KINDS[0]
    if " beside " in caption:
        return KINDS[1]
    if re.search(r"\b(small|mirrored)\b", caption):
        return KINDS[2]
    styled = bool(re.search(r"\b(flat|fluent) style", caption))
    if "background" in caption:
        return KINDS[3] if styled else KINDS[4]
    return KINDS[5] if styled else KINDS[6]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=Path, default=Path("eval/plain"), help="folder with a manifest")
    parser.add_argument("--every", type=int, default=1, help="read every n-th picture only")
    args = parser.parse_args()
    rows = read_manifest(args.pictures, check=False)[:: args.every]
    reader = load_reader()
    print(f"{'kind':18} {'pictures':>8} {'object':>7} {'all':>6}")
    for kind in KINDS:
        mine = [row for row in rows if kind_of(row["prompt"]) == kind]
        if mine:
            images = torch.stack([load_picture(args.pictures / row["file"]) for row in mine])
            scores = caption_scores(reader, images, [row["prompt"] for row in mine], rounds=2)
            print(f"{kind:18} {len(mine):8d} {scores['concept_top1']['value']:7.3f} {scores['all']['value']:6.3f}")


if __name__ == "__main__":
    main()
