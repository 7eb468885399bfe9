"""Clips and captions of moving-emoji: a closed grammar whose every caption names one kind of periodic 64 x 64 clip.

    caption = article subject motion place        "a yellow taxi moves left on a grey road"

Each clip shows one Noto emoji on a still scene at 8 frames a second. All motions are periodic (16 frames, 32 for the
slow ones): a subject that leaves the picture enters again on the other side, so a clip of any length makes sense. A
frame is one of 252 *states* (where, turned how far, how large) per subject and place; the whole grid of frames is
small enough to be encoded once. Positions are even pixels, so an 8-pixel latent grid sees 4 x 4 phases only.

The drawings are Noto Emoji, Copyright Google LLC, Apache License 2.0, from npm:

    npm pack @iconify-json/noto@1.2.9      # unpacked to <data>/iconify-json-noto-1.2.9/package/icons.json
    python tools/moving_emoji/scene.py --data emoji-data --sheet sheet.png
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

SIDE = 64
SIZE = 28
FPS = 8
PERIOD = 16
HELD_OUT_SHARE = 0.12
LANES = (-8, 0, 8)
PACKAGE = "iconify-json-noto-1.2.9"

SUBJECTS: dict[str, str] = {
    "yellow taxi": "taxi",
    "red apple": "red-apple",
    "green frog": "frog",
    "rocket": "rocket",
    "sailboat": "sailboat",
    "sunflower": "sunflower",
    "octopus": "octopus",
    "soccer ball": "soccer-ball",
    "ladybug": "lady-beetle",
    "fire engine": "fire-engine",
    "penguin": "penguin",
    "pink pig": "pig-face",
    "tiger": "tiger-face",
    "turtle": "turtle",
    "butterfly": "butterfly",
    "balloon": "balloon",
    "strawberry": "strawberry",
    "banana": "banana",
    "doughnut": "doughnut",
    "cactus": "cactus",
    "mushroom": "mushroom",
    "crab": "crab",
    "robot": "robot",
    "blue book": "blue-book",
}
"""Noun phrase -> icon name."""

PLACES = (
    "on a grey road",
    "on green grass",
    "in a blue sky",
    "on a sandy beach",
    "in the night sky",
    "on white snow",
)

MOTIONS = (
    "moves left",
    "moves right",
    "moves up",
    "moves down",
    "moves left slowly",
    "moves right slowly",
    "moves up slowly",
    "moves down slowly",
    "spins",
    "pulses",
    "bounces",
)

State = tuple[int, int, int, int]
"""x and y offset of the centre in pixels (toroidal), turn in sixteenths, size step 0..8 (4 is the plain size)."""

PLAIN_SIZE = 4


def _wrap(v: int) -> int:
    return (v + SIDE // 2) % SIDE - SIDE // 2


def _states() -> list[State]:
    grid = [_wrap(v) for v in range(0, SIDE, 2)]
    found = [(x, y, 0, PLAIN_SIZE) for y in LANES for x in grid] + [(x, y, 0, PLAIN_SIZE) for x in LANES for y in grid]
    found += [(x, 0, k, PLAIN_SIZE) for x in LANES for k in range(16)]
    found += [(x, 0, 0, s) for x in LANES for s in range(9)]
    return list(dict.fromkeys(found))


STATES: list[State] = _states()
STATE_INDEX: dict[State, int] = {s: i for i, s in enumerate(STATES)}


@dataclass(frozen=True)
class Clip:
    """What one clip shows.

    Args:
        subject: key of `SUBJECTS`.
        motion: one of `MOTIONS`.
        place: one of `PLACES`.
        lane: 0, 1 or 2; which parallel line the subject keeps to. The caption does not tell.
        phase: frame of the period the clip starts at; neither does the caption.
    """

    subject: str
    motion: str
    place: str
    lane: int = 1
    phase: int = 0


def caption(clip: Clip) -> str:
    """The caption of a clip, for example ``"a yellow taxi moves left on a grey road"``."""
    article = "an" if clip.subject[0] in "aeiou" else "a"
    return f"{article} {clip.subject} {clip.motion} {clip.place}"


def parse(text: str) -> Clip:
    """Invert `caption`: the clip (middle lane, phase 0) that a caption of the grid names.

    Raises:
        ValueError: the text is no caption of the grid.
    """
    words = text.strip().removeprefix("an ").removeprefix("a ")
    for subject in SUBJECTS:
        for place in PLACES:
            if words.startswith(subject + " ") and words.endswith(" " + place):
                motion = words[len(subject) + 1 : -len(place) - 1]
                if motion in MOTIONS:
                    return Clip(subject, motion, place)
    raise ValueError(
        f"{text!r} is no caption of moving-emoji; write '<a subject> <motion> <place>' with words of the grid"
    )


def period(motion: str) -> int:
    """Frames after which a motion repeats."""
    return 2 * PERIOD if motion.endswith("slowly") else PERIOD


def state(motion: str, lane: int, t: int) -> State:
    """Where a subject is at frame t of a motion."""
    at, turn = LANES[lane], t % PERIOD
    if motion == "spins":
        return at, 0, turn, PLAIN_SIZE
    if motion == "pulses":
        return at, 0, 0, abs(turn - 8)
    if motion == "bounces":
        return at, 8 - 2 * round(14 * float(np.sin(np.pi * turn / PERIOD))), 0, PLAIN_SIZE
    step = (2 if motion.endswith("slowly") else 4) * t
    direction = motion.split()[1]
    if direction in ("left", "right"):
        return _wrap(step if direction == "right" else -step), at, 0, PLAIN_SIZE
    return at, _wrap(step if direction == "down" else -step), 0, PLAIN_SIZE


def states(clip: Clip, num_frames: int = PERIOD) -> list[State]:
    """The states of a clip's frames."""
    return [state(clip.motion, clip.lane, clip.phase + t) for t in range(num_frames)]


def held_out(subject: str, motion: str, place: str) -> bool:
    """True when a combination must not be trained on (about one in eight)."""
    key = f"{subject}|{motion}|{place}".encode()
    return int.from_bytes(hashlib.sha256(key).digest()[:4], "big") / 2**32 < HELD_OUT_SHARE


def combinations(split: str = "all") -> list[Clip]:
    """Every combination of the grid in a fixed order.

    Args:
        split: "all", "train" or "held_out".
    """
    if split not in ("all", "train", "held_out"):
        raise ValueError(f"split is {split!r}; allowed are 'all', 'train' and 'held_out'")
    grid = [Clip(s, m, p) for s in SUBJECTS for m in MOTIONS for p in PLACES]
    return [c for c in grid if split == "all" or held_out(c.subject, c.motion, c.place) == (split == "held_out")]


def evaluation_prompts(num_prompts: int = 64, num_pairs: int = 32) -> dict[str, list]:
    """Held-out captions for evaluation, balanced over subjects, and pairs for two-prompt videos.

    A pair keeps the subject and changes motion and place; both captions are held out.

    Returns:
        ``{"prompts": [text], "pairs": [[text, text]], "all_held_out": [text]}``, the same on every machine.
    """
    pool = combinations("held_out")
    rng = np.random.default_rng(4)
    order = [pool[i] for i in rng.permutation(len(pool))]
    prompts: list[str] = []
    count = dict.fromkeys(SUBJECTS, 0)
    for limit in range(1, 9):
        for c in order:
            if len(prompts) < num_prompts and count[c.subject] < limit and caption(c) not in prompts:
                prompts.append(caption(c))
                count[c.subject] += 1
    pairs: list[list[str]] = []
    uses = dict.fromkeys(SUBJECTS, 0)
    for limit in (1, 2, 3):
        for i, a in enumerate(order):
            for b in order[i + 1 :]:
                fits = a.subject == b.subject and a.motion.split()[:2] != b.motion.split()[:2] and a.place != b.place
                if fits and len(pairs) < num_pairs and uses[a.subject] < limit:
                    pair = [caption(a), caption(b)]
                    if pair not in pairs:
                        pairs.append(pair)
                        uses[a.subject] += 1
    return {"prompts": prompts, "pairs": pairs, "all_held_out": [caption(c) for c in pool]}


def scene(place: str) -> np.ndarray:
    """The still background of a place.

    Returns:
        [64, 64, 3] float32 in 0..1; the same on every call.
    """
    rng = np.random.default_rng([7, PLACES.index(place)])
    y, x = np.mgrid[0:SIDE, 0:SIDE].astype(np.float32)
    coarse = np.kron(rng.standard_normal((16, 16)), np.ones((4, 4))).astype(np.float32)

    def between(top: tuple[int, int, int], bottom: tuple[int, int, int]) -> np.ndarray:
        mix = (y / (SIDE - 1))[..., None]
        return (np.asarray(top, np.float32) * (1 - mix) + np.asarray(bottom, np.float32) * mix) / 255

    if place == "on a grey road":
        out = between((132, 134, 140), (104, 106, 112)) + 0.012 * coarse[..., None]
        out[30:34, (np.arange(SIDE) // 8) % 2 == 0] = (0.86, 0.85, 0.78)
    elif place == "on green grass":
        out = between((150, 206, 110), (84, 160, 66)) + 0.035 * coarse[..., None]
    elif place == "in a blue sky":
        out = between((96, 170, 240), (182, 222, 250))
        for cx, cy, r in ((14, 14, 7), (22, 16, 6), (48, 44, 8), (40, 47, 6), (55, 10, 5)):
            puff = np.exp(-(((x - cx) ** 2) / (r * 1.4) ** 2 + (y - cy) ** 2 / r**2))[..., None]
            out = out * (1 - 0.8 * puff) + 0.8 * puff
    elif place == "on a sandy beach":
        out = between((240, 214, 156), (222, 186, 118)) + 0.02 * coarse[..., None]
        sea = y < 10 + 2 * np.sin(x * (2 * np.pi / 32))
        out[sea] = (0.36, 0.72, 0.78)
    elif place == "in the night sky":
        out = between((18, 20, 58), (52, 44, 104))
        for cx, cy in rng.integers(1, SIDE - 2, (16, 2)):
            out[cy : cy + 2, cx : cx + 2] = (0.92, 0.9, 0.7)
    else:
        out = between((226, 234, 246), (248, 250, 254)) + 0.012 * coarse[..., None]
        hill = y > 44 + 5 * np.sin(x * (2 * np.pi / 64))
        out[hill] -= (0.10, 0.07, 0.03)
    return out.clip(0, 1).astype(np.float32)


class Renderer:
    """Draws frames. Sprites are rendered once per subject, turn and size, and kept.

    Args:
        data: folder with the unpacked icon package.
    """

    def __init__(self, data: str | Path) -> None:
        self.icons = json.loads((Path(data) / PACKAGE / "package" / "icons.json").read_text())
        self.scenes = {p: scene(p) for p in PLACES}
        self._large: dict[str, Image.Image] = {}
        self._sprites: dict[tuple[str, int, int], np.ndarray] = {}

    def _picture(self, subject: str) -> Image.Image:
        if subject not in self._large:
            import resvg_py

            name = SUBJECTS[subject]
            while name not in self.icons["icons"]:
                name = self.icons["aliases"][name]["parent"]
            v = self.icons["icons"][name]
            w, h = v.get("width", self.icons.get("width", 16)), v.get("height", self.icons.get("height", 16))
            svg = (
                '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
                f'viewBox="{v.get("left", 0)} {v.get("top", 0)} {w} {h}" width="256" height="256">{v["body"]}</svg>'
            )
            png = bytes(resvg_py.svg_to_bytes(svg_string=svg, width=256, skip_system_fonts=True))
            picture = Image.open(io.BytesIO(png)).convert("RGBA").resize((256, 256)).convert("RGBa")
            self._large[subject] = picture
        return self._large[subject]

    def sprite(self, subject: str, turn: int = 0, size: int = PLAIN_SIZE) -> np.ndarray:
        """A subject in the middle of an empty picture.

        Returns:
            [64, 64, 4] float32 in 0..1, colour times alpha in the first three channels.
        """
        key = (subject, turn, size)
        if key not in self._sprites:
            # 512 px canvas: the 256 px drawing turned, then reduced so that the drawing is 2 * half px wide
            canvas = Image.new("RGBa", (512, 512))
            canvas.paste(self._picture(subject), (128, 128))
            if turn:
                canvas = canvas.rotate(-22.5 * turn, Image.Resampling.BICUBIC)
            width = SIZE * (0.6 + 0.1 * size)
            side = 2 * round(width)
            small = np.asarray(canvas.resize((side, side), Image.Resampling.BOX), np.float32) / 255
            out = np.zeros((SIDE, SIDE, 4), np.float32)
            cut = max(0, (side - SIDE) // 2)
            small = small[cut : side - cut, cut : side - cut]
            at = (SIDE - small.shape[0]) // 2
            out[at : at + small.shape[0], at : at + small.shape[1]] = small
            self._sprites[key] = out
        return self._sprites[key]

    def frame(self, subject: str, place: str, at: State) -> np.ndarray:
        """Draw one frame: [64, 64, 3] uint8 RGB."""
        x, y, turn, size = at
        sprite = np.roll(self.sprite(subject, turn, size), (y, x), (0, 1))
        picture = self.scenes[place] * (1 - sprite[..., 3:]) + sprite[..., :3]
        return (picture * 255 + 0.5).clip(0, 255).astype(np.uint8)

    def clip(self, clip: Clip, num_frames: int = PERIOD) -> np.ndarray:
        """Draw a clip: [num_frames, 64, 64, 3] uint8 RGB."""
        return np.stack([self.frame(clip.subject, clip.place, s) for s in states(clip, num_frames)])


def sample_clip(rng: np.random.Generator, split: str = "train", lanes: tuple[int, ...] = (0, 1, 2)) -> Clip:
    """Draw a clip of a split: subject, place, kind of motion, lane (of `lanes`) and phase uniformly."""
    subjects = list(SUBJECTS)
    while True:
        motion = MOTIONS[rng.integers(len(MOTIONS))]
        clip = Clip(
            subjects[rng.integers(len(subjects))],
            motion,
            PLACES[rng.integers(len(PLACES))],
            lanes[rng.integers(len(lanes))],
            int(rng.integers(period(motion))),
        )
        if held_out(clip.subject, clip.motion, clip.place) == (split == "held_out"):
            return clip


def sheet(clips: list[np.ndarray], scale: int = 1) -> Image.Image:
    """Tile clips [F, H, W, 3], one per row."""
    rows = np.concatenate([np.concatenate(list(c), 1) for c in clips], 0)
    return Image.fromarray(rows).resize((rows.shape[1] * scale, rows.shape[0] * scale), Image.Resampling.NEAREST)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("emoji-data"))
    parser.add_argument("--sheet", type=Path, default=Path("sheet.png"))
    parser.add_argument("--held-out", type=Path, help="also write the evaluation prompts to this JSON file")
    args = parser.parse_args()
    renderer = Renderer(args.data)
    plain = [renderer.frame(s, PLACES[i % len(PLACES)], STATES[0]) for i, s in enumerate(SUBJECTS)]
    subjects = list(SUBJECTS)
    shown = [Clip(subjects[i], m, PLACES[i % len(PLACES)]) for i, m in enumerate(MOTIONS)]
    rows = [np.stack(plain[i : i + 12]) for i in range(0, len(plain), 12)]
    rows += [renderer.clip(c)[:12] for c in shown]
    sheet(rows, 2).save(args.sheet)
    if args.held_out:
        args.held_out.write_text(json.dumps(evaluation_prompts(), indent=1) + "\n")
    found = evaluation_prompts()
    print(len(STATES), "states", len(combinations()), "captions", {k: len(v) for k, v in found.items()})


if __name__ == "__main__":
    main()
