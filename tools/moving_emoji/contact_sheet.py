"""Sample held-out captions with the embedded moving-emoji and tile them, one clip per row: docs/moving_emoji.png.

    python tools/moving_emoji/contact_sheet.py --count 12 --out docs/moving_emoji.png

With `--gif` the same clips also move, side by side, in one GIF.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw

sys.path.append(str(Path(__file__).parents[2]))

from mediaspec.models.clip_reader import ATTRIBUTES, load_clip_reader
from mediaspec.pipelines.video_models import load_moving_emoji


def labelled(clips: list[np.ndarray], captions: list[str], every: int = 2, scale: int = 1) -> Image.Image:
    """Clips [F, H, W, 3] uint8 as rows of every second frame, each under its caption."""
    height, width, line = clips[0].shape[1] * scale, clips[0].shape[2] * scale, 14
    columns = len(clips[0][::every])
    out = Image.new("RGB", (columns * width, len(clips) * (height + line)), "white")
    pen = ImageDraw.Draw(out)
    for i, (clip, text) in enumerate(zip(clips, captions, strict=True)):
        pen.text((2, i * (height + line) + 1), text, fill="black")
        for k, frame in enumerate(clip[::every]):
            picture = Image.fromarray(frame).resize((width, height), Image.Resampling.NEAREST)
            out.paste(picture, (k * width, i * (height + line) + line))
    return out


def moving(clips: list[np.ndarray], path: Path, columns: int = 4, scale: int = 2) -> None:
    """Write the clips side by side as one looping GIF at 8 frames a second."""
    rows = [np.concatenate(clips[i : i + columns], 2) for i in range(0, len(clips) // columns * columns, columns)]
    frames = [Image.fromarray(f) for f in np.concatenate(rows, 1)]
    frames = [f.resize((f.width * scale, f.height * scale), Image.Resampling.NEAREST) for f in frames]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=125, loop=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, default=Path(__file__).with_name("held_out.json"))
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--guidance", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("docs/moving_emoji.png"))
    parser.add_argument("--gif", type=Path)
    args = parser.parse_args()
    captions = json.loads(args.prompts.read_text())["prompts"][: args.count]
    pipe, reader = load_moving_emoji(), load_clip_reader()
    pipe.set_progress_bar_config(disable=True)
    clips, rows, total, kind = [], [], dict.fromkeys(ATTRIBUTES, 0.0), 0.0
    for i, text in enumerate(captions):
        made = pipe(
            text,
            num_frames=16,
            num_inference_steps=args.steps,
            guidance_scale=args.guidance,
            generator=torch.Generator().manual_seed(args.seed + i),
            output_type="np",
        ).frames[0]
        clips.append((np.asarray(made) * 255 + 0.5).astype(np.uint8))
        score = reader.score(clips[-1], text)
        for name in ATTRIBUTES:
            total[name] += float((score[name] > 0.5).float().mean()) / len(captions)
        kind += float((reader.kind_of_motion(clips[-1], text) > 0.5).float().mean()) / len(captions)
        rows.append(f"{text}   ({', '.join(f'{name} {float(score[name].mean()):.2f}' for name in ATTRIBUTES)})")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    labelled(clips, rows).save(args.out, optimize=True)
    if args.gif:
        moving(clips, args.gif)
    total["kind of motion"] = kind
    print(json.dumps({"clips": len(clips), "frames_read_right": {k: round(v, 3) for k, v in total.items()}}))


if __name__ == "__main__":
    main()
