"""Draws how a picture was decoded: token kinds over the grid, the drift spent per token, beside the picture itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from PIL import Image, ImageDraw, ImageFont

__all__ = ["draw_trace"]

PANEL, GAP, TITLE, LEGEND = 384, 24, 28, 64
INK, PAPER, FAINT = (24, 24, 27), (255, 255, 255), (212, 212, 216)
# by the numbers of core.stats.Trace; blue, orange and green differ in lightness too, so they survive grey printing
KINDS = {
    1: ("accepted draft", (37, 99, 235)),
    2: ("resampled", (249, 115, 22)),
    0: ("bonus or plain", (167, 243, 208)),
    3: ("forced", (113, 113, 122)),
}
NOT_DECODED = (244, 244, 245)


def draw_trace(
    picture: Image.Image,
    kind: Sequence[int],
    drift: Sequence[float],
    rounds: Sequence[int],
    grid: tuple[int, int],
    title: str = "",
    decoded: int | None = None,
) -> Image.Image:
    """One picture with three panels.

    Args:
        picture: the decoded image.
        kind: per token in raster order, a number of `core.stats.Trace`.
        drift: per token, closed-form TV spent at its test.
        rounds: per token, the verification round that emitted it; a thin line separates rounds.
        grid: (height, width) of the token grid.
        title: written on top, usually the prompt.
        decoded: number of tokens that were committed; all where omitted.

    Returns:
        An RGB picture, 1224 x 500 for a square grid.
    """
    height, width = grid
    done = len(kind) if decoded is None else decoded
    small, normal = ImageFont.load_default(13), ImageFont.load_default(15)
    canvas = Image.new("RGB", (3 * PANEL + 2 * GAP + 2 * GAP // 2, PANEL + 2 * TITLE + LEGEND + GAP // 2), PAPER)
    draw = ImageDraw.Draw(canvas)
    left = [GAP // 2 + i * (PANEL + GAP) for i in range(3)]
    top = 2 * TITLE
    draw.text((left[0], 6), _fit(draw, title, normal, canvas.width - GAP), INK, font=normal)
    accepted = sum(k == 1 for k in kind[:done])
    total = sum(drift[:done])
    calls = max(rounds[:done], default=0) + 1
    captions = (
        "picture",
        f"tokens: {done} from {calls} target calls, {accepted} accepted drafts",
        f"drift per token: sum {total:.3g}, largest {max(drift[:done], default=0.0):.3g}",
    )
    for x, caption in zip(left, captions, strict=True):
        draw.text((x, TITLE + 4), _fit(draw, caption, small, PANEL), INK, font=small)
    canvas.paste(picture.convert("RGB").resize((PANEL, PANEL), Image.Resampling.NEAREST), (left[0], top))

    peak = max(drift[:done], default=0.0)
    cell_w, cell_h = PANEL / width, PANEL / height
    for i in range(len(kind)):
        row, column = divmod(i, width)
        for x, colour in (
            (left[1], KINDS[int(kind[i])][1] if i < done else NOT_DECODED),
            (left[2], _heat(drift[i] / peak if peak > 0 else 0.0) if i < done else NOT_DECODED),
        ):
            box = _box(x, top, column, row, cell_w, cell_h)
            draw.rectangle(box, fill=colour, outline=PAPER)
        if 0 < i < done and rounds[i] != rounds[i - 1]:
            x0, y0, _, y1 = _box(left[1], top, column, row, cell_w, cell_h)
            draw.line((x0, y0 + 1, x0, y1 - 1), fill=INK, width=2)
    _legend(draw, left, top + PANEL + 10, peak, small)
    return canvas


def _box(x: int, y: int, column: int, row: int, width: float, height: float) -> tuple[int, int, int, int]:
    return (
        x + round(column * width), y + round(row * height), x + round((column + 1) * width) - 1,
        y + round((row + 1) * height) - 1,
    )  # fmt: skip


def _legend(draw: ImageDraw.ImageDraw, left: list[int], y: int, peak: float, font: Any) -> None:
    for i, (name, colour) in enumerate(KINDS.values()):
        x, row = left[1] + (i % 2) * PANEL // 2, y + (i // 2) * 22
        draw.rectangle((x, row, x + 14, row + 14), fill=colour, outline=INK)
        draw.text((x + 20, row), name, INK, font=font)
    draw.text((left[1], y + 42), "| a new round begins", INK, font=font)
    for i in range(PANEL // 2):
        draw.line((left[2] + i, y, left[2] + i, y + 14), fill=_heat(i / (PANEL // 2 - 1)))
    draw.rectangle((left[2], y, left[2] + PANEL // 2, y + 14), outline=INK)
    text = f"0 to {peak:.3g} (total variation)" if peak > 0 else "0 everywhere: the target's own law"
    draw.text((left[2], y + 20), text, INK, font=font)


def _heat(share: float) -> tuple[int, int, int]:
    """White to dark red."""
    low, high = (255, 251, 235), (153, 27, 27)
    share = min(max(share, 0.0), 1.0) ** 0.5  # small values stay visible
    return tuple(round(a + (b - a) * share) for a, b in zip(low, high, strict=True))  # type: ignore[return-value]


def _fit(draw: ImageDraw.ImageDraw, text: str, font: Any, width: int) -> str:
    text = " ".join(text.split())
    if draw.textlength(text, font=font) <= width:
        return text
    while text and draw.textlength(text + "...", font=font) > width:
        text = text[:-1]
    return text.rstrip() + "..."
