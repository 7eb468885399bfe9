"""Wall-colour accuracy of a maze: the palette colour that each column shows at eye level."""

from __future__ import annotations

import numpy as np

__all__ = ["EYE_ROW", "wall_colour_accuracy"]

EYE_ROW = 32


def wall_colour_accuracy(
    made: np.ndarray, colours: np.ndarray, palette: np.ndarray, light: np.ndarray | None = None
) -> float:
    """Share of columns whose nearest palette colour is that of the wall there.

    Args:
        made: [N, 64, 64, 3] in 0..1.
        colours: [N, 64] int64, true palette numbers. Equal colours of a palette count as equal.
        palette: [8, 3].
        light: [N, 64], how bright each wall is lit, by which the palette is scaled before comparing; None compares
            with the palette itself and mistakes dim walls for darker colours.

    Raises:
        ValueError: shapes that do not fit.
    """
    if made.ndim != 4 or made.shape[0] != len(colours) or made.shape[2] != colours.shape[1]:
        raise ValueError(f"frames {made.shape} against wall colours {colours.shape}; give [N, 64, 64, 3] and [N, 64]")
    row = np.asarray(made, dtype=np.float64)[:, EYE_ROW]
    shades = np.ones(colours.shape) if light is None else np.asarray(light, dtype=np.float64)
    known = shades[:, :, None, None] * np.asarray(palette, dtype=np.float64)
    distance = ((row[:, :, None] - known) ** 2).sum(-1)
    return float((np.take_along_axis(distance, colours[:, :, None], 2)[..., 0] <= distance.min(-1)).mean())
