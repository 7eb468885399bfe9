"""Pictures and captions of emoji-64: a closed grammar whose every caption means exactly one 64 x 64 picture.

    caption  = noun-phrase [" on a " COLOUR " background"] [", " STYLE " style"]
    phrase   = article ["small" | "mirrored"] concept  |  article concept " beside " article concept

No style means shaded, no background means white; pairs stand on white. The icons come from npm packages:

    npm pack @iconify-json/noto@1.2.9 @iconify-json/twemoji@1.2.5 @iconify-json/fluent-emoji-flat@1.2.6

each unpacked so that `<data>/<package>/package/icons.json` exists, `<package>` as in `PACKAGES`.
Licences: Noto Apache-2.0, Twemoji CC BY 4.0 (credit: Twitter, Inc and other contributors), Fluent Emoji MIT.

    python tools/emoji64/render.py --data emoji64-data --sheet sheet.png
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

from concepts import BACKGROUNDS, HELD_OUT_CONCEPTS, NO_ARTICLE, STYLES, concepts  # isort: skip

PACKAGES = {
    "noto": "iconify-json-noto-1.2.9",
    "twemoji": "iconify-json-twemoji-1.2.5",
    "fluent-emoji-flat": "iconify-json-fluent-emoji-flat-1.2.6",
}
SIDE = 64
SMALL = 40
PAIR = 32
HELD_OUT_SHARE = 0.1


@dataclass(frozen=True)
class Spec:
    """What one picture shows.

    Args:
        concept: noun phrase, a key of `concepts()`.
        style: key of `STYLES`.
        background: key of `BACKGROUNDS`.
        size: "", "small" or "mirrored".
        other: second noun phrase of a pair, "" for a single object.
        says_style: whether the caption names the style; only the shaded style may be left unsaid.
    """

    concept: str
    style: str = "shaded"
    background: str = "white"
    size: str = ""
    other: str = ""
    says_style: bool = True


def article(phrase: str, noun: str | None = None) -> str:
    """Put the right article before a noun phrase.

    Args:
        phrase: words to be read, for example "small apple".
        noun: the concept inside the phrase, which decides whether an article is used at all.
    """
    if (noun or phrase) in NO_ARTICLE:
        return phrase
    vowel = phrase[0] in "aeio" or (phrase[0] == "u" and not phrase.startswith("uni"))
    return f"{'an' if vowel else 'a'} {phrase}"


def caption(spec: Spec) -> str:
    """The one caption that names a picture."""
    words = f"{spec.size} {spec.concept}".strip()
    text = article(words, spec.concept)
    if spec.other:
        text += f" beside {article(spec.other)}"
    if spec.background != "white":
        text += f" on a {spec.background} background"
    if spec.says_style or spec.style != "shaded":
        text += f", {spec.style} style"
    return text


def held_out(spec: Spec) -> bool:
    """True when a picture must not be trained on: a held-out concept, or a held-out combination.

    A combination is concept x style x background (or concept x concept for a pair); plain white pictures of a known
    concept are never held out, so each drawing was seen at least once.
    """
    if spec.concept in HELD_OUT_CONCEPTS or spec.other in HELD_OUT_CONCEPTS:
        return True
    if not spec.other and spec.background == "white":
        return False
    key = f"{spec.concept}|{spec.other}|{spec.style}|{spec.background}".encode()
    return int.from_bytes(hashlib.sha256(key).digest()[:4], "big") / 2**32 < HELD_OUT_SHARE


class Renderer:
    """Draws specs. Icons are rendered once per size and kept.

    Args:
        data: folder with the unpacked icon packages.
    """

    def __init__(self, data: str | Path) -> None:
        self.names = concepts()
        self.sets = {
            s: json.loads((Path(data) / PACKAGES[s] / "package" / "icons.json").read_text()) for s in STYLES.values()
        }
        self._icons: dict[tuple[str, str, int], np.ndarray] = {}

    def icon(self, concept: str, style: str, side: int) -> np.ndarray:
        """One icon, premultiplied.

        Returns:
            [side, side, 4] float32 in 0..1, colour times alpha in the first three channels.
        """
        key = (concept, style, side)
        if key not in self._icons:
            import resvg_py

            icons, name = self.sets[STYLES[style]], self.names[concept]
            while name not in icons["icons"]:
                name = icons["aliases"][name]["parent"]
            v = icons["icons"][name]
            w, h = v.get("width", icons.get("width", 16)), v.get("height", icons.get("height", 16))
            svg = (
                '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
                f'viewBox="{v.get("left", 0)} {v.get("top", 0)} {w} {h}" width="{side}" height="{side}">'
                f"{v['body']}</svg>"
            )
            png = bytes(resvg_py.svg_to_bytes(svg_string=svg, width=side, skip_system_fonts=True))
            pixels = np.asarray(Image.open(io.BytesIO(png)).convert("RGBA").resize((side, side)), np.float32) / 255
            self._icons[key] = np.concatenate([pixels[..., :3] * pixels[..., 3:], pixels[..., 3:]], -1)
        return self._icons[key]

    def draw(self, spec: Spec) -> np.ndarray:
        """Draw one picture.

        Returns:
            [64, 64, 3] uint8 RGB.
        """
        out = np.empty((SIDE, SIDE, 3), np.float32)
        out[:] = np.asarray(BACKGROUNDS[spec.background], np.float32) / 255
        if spec.other:
            top = (SIDE - PAIR) // 2
            places = [(spec.concept, PAIR, top, 0), (spec.other, PAIR, top, PAIR)]
        elif spec.size == "small":
            places = [(spec.concept, SMALL, (SIDE - SMALL) // 2, (SIDE - SMALL) // 2)]
        else:
            places = [(spec.concept, SIDE, 0, 0)]
        for concept, side, y, x in places:
            icon = self.icon(concept, spec.style, side)
            if spec.size == "mirrored":
                icon = icon[:, ::-1]
            area = out[y : y + side, x : x + side]
            area *= 1 - icon[..., 3:]
            area += icon[..., :3]
        return (out * 255 + 0.5).clip(0, 255).astype(np.uint8)


def single_specs() -> list[Spec]:
    """Every picture of a single object, held-out ones included, in a fixed order."""
    return [
        Spec(c, style, background, size)
        for c in concepts()
        for style in STYLES
        for background in BACKGROUNDS
        for size in ("", "small", "mirrored")
    ]


def sample_spec(index: int, seed: int = 0, split: str = "train") -> Spec:
    """Draw one spec; the same (index, seed, split) gives the same spec on any machine.

    45 % plain on white, 35 % coloured background, 10 % small or mirrored, 10 % pairs. Half of the pictures are shaded
    (half of those leave the style unsaid), a quarter flat, a quarter fluent.

    Args:
        index: number of the sample.
        seed: seed of the stream.
        split: "train" or "held_out".
    """
    if split not in ("train", "held_out"):
        raise ValueError(f"split is {split!r}; allowed are 'train' and 'held_out'")
    rng = np.random.default_rng([seed, index, split == "held_out"])
    names, colours = list(concepts()), list(BACKGROUNDS)[1:]
    while True:
        kind, concept = rng.random(), names[rng.integers(len(names))]
        style = ("shaded", "shaded", "flat", "fluent")[rng.integers(4)]
        says = style != "shaded" or bool(rng.random() < 0.5)
        background, size, other = "white", "", ""
        if 0.45 <= kind < 0.80:
            background = colours[rng.integers(len(colours))]
        elif 0.80 <= kind < 0.90:
            size = ("small", "mirrored")[rng.integers(2)]
            if rng.random() < 0.3:
                background = colours[rng.integers(len(colours))]
        elif kind >= 0.90:
            other = names[rng.integers(len(names))]
        spec = Spec(concept, style, background, size, other, says)
        if held_out(spec) == (split == "held_out"):
            return spec


def sample(renderer: Renderer, index: int, seed: int = 0, split: str = "train") -> tuple[np.ndarray, str, Spec]:
    """One training example: [64, 64, 3] uint8 picture, caption and spec."""
    spec = sample_spec(index, seed, split)
    return renderer.draw(spec), caption(spec), spec


def sheet(pictures: list[np.ndarray], columns: int, scale: int = 1) -> Image.Image:
    """Tile equal pictures, row by row."""
    h, w = pictures[0].shape[:2]
    rows = -(-len(pictures) // columns)
    out = np.full((rows * h, columns * w, 3), 255, np.uint8)
    for i, p in enumerate(pictures):
        y, x = i // columns * h, i % columns * w
        out[y : y + h, x : x + w] = p
    return Image.fromarray(out).resize((columns * w * scale, rows * h * scale), Image.Resampling.NEAREST)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("emoji64-data"))
    parser.add_argument("--sheet", type=Path, default=Path("sheet.png"))
    parser.add_argument("--concepts", action="store_true", help="one picture per concept and style instead of samples")
    args = parser.parse_args()
    renderer = Renderer(args.data)
    if args.concepts:
        shown = [Spec(c, s) for c in concepts() for s in STYLES]
        sheet([renderer.draw(s) for s in shown], 30).save(args.sheet)
        return
    examples = [sample(renderer, i) for i in range(96)]
    sheet([e[0] for e in examples], 12, 2).save(args.sheet)
    for i, (_, text, _) in enumerate(examples):
        print(i // 12, i % 12, text)


if __name__ == "__main__":
    main()
