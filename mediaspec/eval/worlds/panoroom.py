"""PanoRoom-64: a room painted on a cylinder, of which 64 columns are seen; turning is exact to the pixel.

The world is a strip of 64 rows and `width` columns of colours in 0..1: sky and floor, some rectangles, and one 8 x 8
binary glyph, the needle. An action turns the view by 8 columns (-1 left, 0 hold, +1 right), so every frame is a slice
of the strip and a revisited view is equal to the one remembered, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["GLYPH", "GLYPH_ROWS", "PanoRoom"]

GLYPH = 8
"""Side of the needle in pixels."""
GLYPH_ROWS = (28, 36)
"""First row of the needle and the one after its last."""


class PanoRoom:
    """One room.

    Args:
        seed: of its content. Training uses 0..4999, tests 200000 and up.
        width: columns of the strip; a multiple of 8, at least 64. 1024 for sweeps of more than 56 actions.
        objects: rectangles.

    Attributes:
        strip: [64, width, 3] float64, what there is to see.
        needle_x: first column of the needle.

    Raises:
        ValueError: a width that is no multiple of 8 or smaller than the view.

    Example:
        >>> room = PanoRoom(0)
        >>> yaws, frames = room.rollout(0, [1, 1, -1])
        >>> yaws.tolist(), frames.shape, bool((frames[1] == frames[3]).all())
        ([0, 8, 16, 8], (4, 64, 64, 3), True)
    """

    view = 64
    height = 64
    step = 8

    def __init__(self, seed: int, width: int = 512, objects: int = 8) -> None:
        if width < self.view or width % self.step:
            raise ValueError(f"width={width} is not allowed; write a multiple of {self.step} from {self.view} on")
        # the order of the draws is part of the world: another order is another room
        rng = np.random.default_rng(seed)
        self.seed, self.width = seed, width
        strip = np.empty((self.height, width, 3))
        strip[: self.height // 2] = rng.uniform(0.55, 0.85, 3)
        strip[self.height // 2 :] = rng.uniform(0.15, 0.4, 3)
        for _ in range(objects):
            left, broad = int(rng.integers(0, width)), int(rng.integers(8, 25))
            top, bottom = int(rng.integers(8, 28)), int(rng.integers(36, 56))
            strip[top:bottom, (left + np.arange(broad)) % width] = rng.uniform(0, 1, 3)
        self.needle_x = int(rng.integers(0, width))
        self.glyph = rng.integers(0, 2, (GLYPH, GLYPH)).astype(bool)
        colour = rng.uniform(0.2, 1.0, 3)
        columns = (self.needle_x + np.arange(GLYPH)) % width
        strip[GLYPH_ROWS[0] : GLYPH_ROWS[1], columns] = self.glyph[:, :, None] * colour
        self.strip = strip

    def frame(self, yaw: int) -> np.ndarray:
        """The view whose first column is `yaw`: [64, 64, 3] float64."""
        return self.strip[:, (yaw + np.arange(self.view)) % self.width]

    def yaws(self, yaw: int, actions: Sequence[int]) -> np.ndarray:
        """First columns [len(actions) + 1] int64 of the frames seen from `yaw` on.

        Raises:
            ValueError: an action other than -1, 0 and 1.
        """
        if not set(map(int, actions)) <= {-1, 0, 1}:
            raise ValueError(f"actions {sorted(set(map(int, actions)))} are not all -1 (left), 0 (hold) or 1 (right)")
        return (yaw + self.step * np.concatenate([[0], np.cumsum(np.asarray(actions, dtype=np.int64))])) % self.width

    def rollout(self, yaw: int, actions: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Yaws [N] and frames [N, 64, 64, 3] of a walk of N - 1 actions; the first frame is the one at `yaw`."""
        found = self.yaws(yaw, actions)
        return found, np.stack([self.frame(int(one)) for one in found])

    def visible(self, yaw: int) -> frozenset[int]:
        """Columns of the strip that are seen at `yaw`."""
        return frozenset(((yaw + np.arange(self.view)) % self.width).tolist())

    def needle_place(self, yaw: int) -> int | None:
        """Column of the frame where the needle begins, if all of it is seen at `yaw`."""
        place = (self.needle_x - yaw) % self.width
        return place if place <= self.view - GLYPH else None
