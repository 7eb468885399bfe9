"""Draw the evaluation captions as they should look: the drawn clips that generated videos are measured against.

    python tools/moving_emoji/render_held_out.py --data emoji-data --out drawn --num-frames 128
    mediaspec eval video drawn --captions drawn/captions.json --out drawn-eval

One lossless .npz per caption of `held_out.json` (middle lane, phase 0), through no autoencoder.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from scene import FPS, Renderer, parse  # isort: skip

from mediaspec.eval.video_files import write_frames


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("emoji-data"))
    parser.add_argument("--prompts", type=Path, default=Path(__file__).parent / "held_out.json")
    parser.add_argument("--num-frames", type=int, default=128)
    parser.add_argument("--out", type=Path, default=Path("drawn"))
    args = parser.parse_args()
    renderer, captions = Renderer(args.data), {}
    args.out.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(json.loads(args.prompts.read_text())["prompts"]):
        name = f"{number:04d}"
        write_frames(args.out / f"{name}.npz", renderer.clip(parse(text), args.num_frames), fps=FPS)
        captions[name] = text
    (args.out / "captions.json").write_text(json.dumps(captions, indent=1) + "\n")


if __name__ == "__main__":
    main()
