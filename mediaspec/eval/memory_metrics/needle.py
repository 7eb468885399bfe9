"""Needle accuracy: is the binary glyph of a PanoRoom on the wall where it was seen before?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from ..worlds.panoroom import GLYPH, GLYPH_ROWS

__all__ = ["LEAST_CELLS", "glyph_cells", "needle_accuracy"]

LEAST_CELLS = 60
"""Cells of 64 that must agree. A glyph of chance agrees on 32 on average, on 60 or more once in 10^13."""


def glyph_cells(frame: np.ndarray, column: int) -> np.ndarray:
    """The glyph read off a frame: [8, 8] bool, brightness above its own mean.

    Args:
        frame: [64, 64, 3] in 0..1.
        column: where the glyph begins, 0..56.

    Raises:
        ValueError: a column where the glyph does not fit.
    """
    if not 0 <= column <= frame.shape[1] - GLYPH:
        raise ValueError(f"column {column}: the glyph of {GLYPH} columns fits from 0 to {frame.shape[1] - GLYPH}")
    part = np.asarray(frame, dtype=np.float64)[GLYPH_ROWS[0] : GLYPH_ROWS[1], column : column + GLYPH].mean(-1)
    return part > part.mean()


def needle_accuracy(
    made: np.ndarray, truth: np.ndarray, frames: Iterable[int], needles: Mapping[int, int]
) -> float | None:
    """Share of frames whose glyph is right in at least 60 of 64 cells.

    Args:
        made, truth: [N, 64, 64, 3] in 0..1.
        frames: the asked ones.
        needles: frame -> first column of the glyph, for frames that show all of it.

    Returns:
        A share in 0..1; None where no asked frame shows the needle.
    """
    shown = [t for t in frames if t in needles]
    if not shown:
        return None
    right = [
        int((glyph_cells(made[t], needles[t]) == glyph_cells(truth[t], needles[t])).sum()) >= LEAST_CELLS
        for t in shown
    ]
    return float(np.mean(right))
