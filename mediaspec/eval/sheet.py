"""Contact sheets: pictures in a grid with their captions underneath."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

__all__ = ["contact_sheet"]


def contact_sheet(
    pictures: Sequence[Image.Image], captions: Sequence[str], columns: int = 8, size: int = 128, margin: int = 6
) -> Image.Image:
    """Draws pictures `columns` a row, each enlarged to `size` pixels (nearest neighbour), its caption underneath.

    Args:
        pictures: any number of pictures; captions: as many texts, wrapped to two lines.
        columns: pictures a row. size: edge in pixels. margin: pixels between cells.

    Raises:
        ValueError: no pictures, or another number of captions.
    """
    if not pictures or len(pictures) != len(captions):
        raise ValueError(f"got {len(pictures)} pictures and {len(captions)} captions; give one caption per picture")
    font = ImageFont.load_default(11)
    text = 28
    columns = min(columns, len(pictures))
    rows = -(-len(pictures) // columns)
    cell_w, cell_h = size + margin, size + text + margin
    sheet = Image.new("RGB", (columns * cell_w + margin, rows * cell_h + margin), "white")
    draw = ImageDraw.Draw(sheet)
    for number, (picture, caption) in enumerate(zip(pictures, captions, strict=True)):
        x = margin + number % columns * cell_w
        y = margin + number // columns * cell_h
        sheet.paste(picture.resize((size, size), Image.Resampling.NEAREST), (x, y))
        lines = textwrap.wrap(caption, max(8, size // 6))[:2]
        for line, words in enumerate(lines):
            draw.text((x, y + size + 1 + 13 * line), words, fill="black", font=font)
    return sheet
