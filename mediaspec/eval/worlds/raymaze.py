"""RayMaze-64: a maze of coloured walls seen by a ray caster, 64 x 64 pixels, 60 degrees wide.

The maze is carved by recursive backtracking on 5 x 5 cells (an 11 x 11 grid of squares); every square has four face
colours of a palette of eight. Three actions, as in DMLab: 0 turns left by 15 degrees, 1 turns right by 15 degrees,
2 goes a quarter of a square forward unless a wall is in the way. Headings are whole multiples of 15 degrees, so that
24 turns lead back to the very same picture.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["FORWARD", "HEADINGS", "LEFT", "RIGHT", "RayMaze", "Sight"]

LEFT, RIGHT, FORWARD = 0, 1, 2
HEADINGS = 24
STRIDE = 0.25
"""Squares per forward action."""
MARGIN = 0.125
"""Squares kept from a wall: half a stride, so that walking between centres of squares never touches one."""
MOVES = ((1, 0), (0, 1), (-1, 0), (0, -1))
FIELD = math.pi / 3
SIZE = 64


@dataclass(frozen=True)
class Sight:
    """What the 64 rays of a view hit.

    Args:
        x, y: [64] int64 squares of the walls hit.
        face: [64] int64, 0 west, 1 north (towards smaller y), 2 east, 3 south side of the square.
        depth: [64] float64, distance along the viewing direction in squares.
    """

    x: np.ndarray
    y: np.ndarray
    face: np.ndarray
    depth: np.ndarray


class RayMaze:
    """One maze.

    Args:
        seed: of walls and colours. Training uses 0..9999, tests 200000 and up.
        cells: cells along a side.

    Attributes:
        wall: [2 cells + 1, 2 cells + 1] bool, indexed [x, y].
        palette: [8, 3] float64; colour: [.., .., 4, 3], by square and face.

    Example:
        >>> maze = RayMaze(0)
        >>> poses, frames = maze.rollout((1.5, 1.5, 0), [RIGHT] * 24)
        >>> frames.shape, bool((frames[0] == frames[24]).all())
        ((25, 64, 64, 3), True)
    """

    def __init__(self, seed: int, cells: int = 5) -> None:
        if cells < 1:
            raise ValueError(f"cells={cells} is not allowed; write a number from 1 on, 5 by default")
        rng = np.random.default_rng(seed)
        side = 2 * cells + 1
        self.seed, self.cells, self.side = seed, cells, side
        self.wall = self._carve(rng, cells)
        self.palette = rng.uniform(0.15, 1.0, (8, 3))
        self.colour_index = rng.integers(0, 8, (side, side, 4))
        self.colour = self.palette[self.colour_index]
        self.sky = rng.uniform(0.5, 0.9, 3)
        self.floor = rng.uniform(0.1, 0.4, 3)

    @staticmethod
    def _carve(rng: np.random.Generator, cells: int) -> np.ndarray:
        wall = np.ones((2 * cells + 1, 2 * cells + 1), dtype=bool)
        wall[1, 1] = False
        path, reached = [(0, 0)], {(0, 0)}
        while path:
            x, y = path[-1]
            ways = [
                (dx, dy)
                for dx, dy in MOVES
                if 0 <= x + dx < cells and 0 <= y + dy < cells and (x + dx, y + dy) not in reached
            ]
            if not ways:
                path.pop()
                continue
            dx, dy = ways[int(rng.integers(0, len(ways)))]
            wall[2 * x + 1 + dx, 2 * y + 1 + dy] = False
            wall[2 * (x + dx) + 1, 2 * (y + dy) + 1] = False
            reached.add((x + dx, y + dy))
            path.append((x + dx, y + dy))
        return wall

    def look(self, x: float, y: float, yaw: float) -> Sight:
        """Casts the rays of a view; yaw in radians, clockwise with y pointing down (larger yaw is further right)."""
        angle = yaw + ray_angles()
        dx, dy = np.cos(angle), np.sin(angle)
        dx = np.where(np.abs(dx) < 1e-9, 1e-9, dx)
        dy = np.where(np.abs(dy) < 1e-9, 1e-9, dy)
        at_x, at_y = np.full(SIZE, int(x)), np.full(SIZE, int(y))
        step_x, step_y = np.sign(dx).astype(np.int64), np.sign(dy).astype(np.int64)
        next_x = np.where(step_x > 0, at_x + 1 - x, x - at_x) / np.abs(dx)
        next_y = np.where(step_y > 0, at_y + 1 - y, y - at_y) / np.abs(dy)
        face = np.zeros(SIZE, dtype=np.int64)
        reach = np.zeros(SIZE)
        going = np.ones(SIZE, dtype=bool)
        for _ in range(4 * self.side):
            along_x = going & (next_x <= next_y)
            along_y = going & ~along_x
            reach = np.where(along_x, next_x, np.where(along_y, next_y, reach))
            at_x = at_x + step_x * along_x
            at_y = at_y + step_y * along_y
            next_x = next_x + along_x / np.abs(dx)
            next_y = next_y + along_y / np.abs(dy)
            face = np.where(along_x, np.where(step_x > 0, 0, 2), np.where(along_y, np.where(step_y > 0, 1, 3), face))
            at = np.clip(at_x, 0, self.side - 1), np.clip(at_y, 0, self.side - 1)
            going &= ~self.wall[at]
            if not going.any():
                break
        depth = np.maximum(reach * np.cos(angle - yaw), 1e-3)
        return Sight(np.clip(at_x, 0, self.side - 1), np.clip(at_y, 0, self.side - 1), face, depth)

    def render(self, x: float, y: float, yaw: float) -> np.ndarray:
        """The picture seen at a place in squares and a yaw in radians: [64, 64, 3] float64 in 0..1."""
        seen = self.look(x, y, yaw)
        half = np.minimum(SIZE / (2 * seen.depth), 4 * SIZE)
        rows = np.arange(SIZE)[:, None] + 0.5 - SIZE / 2
        light = (1 / (1 + 0.15 * seen.depth)) * np.where(seen.face % 2 == 0, 1.0, 0.75)
        walls = self.colour[seen.x, seen.y, seen.face] * light[:, None]
        behind = np.where((rows < 0)[:, :, None], self.sky, self.floor) * np.ones((1, SIZE, 1))
        return np.where((np.abs(rows) < half)[:, :, None], walls[None], behind)

    def wall_colours(self, x: float, y: float, yaw: float) -> np.ndarray:
        """Palette numbers [64] int64 of the walls at the columns of a view."""
        seen = self.look(x, y, yaw)
        return self.colour_index[seen.x, seen.y, seen.face]

    def is_free(self, x: float, y: float) -> bool:
        """Whether one may stand there, with the margin to every wall."""
        corners = [(x + a, y + b) for a in (-MARGIN, MARGIN) for b in (-MARGIN, MARGIN)]
        return not any(self.wall[int(a), int(b)] for a, b in corners)

    def step(self, pose: tuple[float, float, int], action: int) -> tuple[float, float, int]:
        """The pose (x, y, heading) after an action; heading counts 15 degrees, 0..23.

        Raises:
            ValueError: an action other than 0, 1 and 2.
        """
        x, y, heading = pose
        if action == LEFT:
            return x, y, (heading - 1) % HEADINGS
        if action == RIGHT:
            return x, y, (heading + 1) % HEADINGS
        if action != FORWARD:
            raise ValueError(f"action {action} is not allowed; write 0 (left), 1 (right) or 2 (forward)")
        yaw = heading_angle(heading)
        # rounding keeps a walk there and back on the very same points
        ahead = round(x + STRIDE * math.cos(yaw), 9), round(y + STRIDE * math.sin(yaw), 9)
        return (*ahead, heading) if self.is_free(*ahead) else pose

    def poses(self, start: tuple[float, float, int], actions: Sequence[int]) -> np.ndarray:
        """Poses [N, 3] float64 (x, y, heading) of a walk of N - 1 actions.

        Raises:
            ValueError: a start inside a wall.
        """
        if not self.is_free(start[0], start[1]):
            raise ValueError(f"({start[0]}, {start[1]}) is in or at a wall; start at (1.5, 1.5), which is always free")
        walk = [start]
        for action in actions:
            walk.append(self.step(walk[-1], int(action)))
        return np.array(walk)

    def rollout(self, start: tuple[float, float, int], actions: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Poses [N, 3] and frames [N, 64, 64, 3] of a walk of N - 1 actions."""
        poses = self.poses(start, actions)
        return poses, np.stack([self.render(x, y, heading_angle(int(h))) for x, y, h in poses])

    def visible(self, x: float, y: float, heading: int) -> frozenset[tuple[int, int, int]]:
        """Wall faces (x, y, face) that are seen at a pose."""
        seen = self.look(x, y, heading_angle(heading))
        return frozenset(zip(seen.x.tolist(), seen.y.tolist(), seen.face.tolist()))


def ray_angles() -> np.ndarray:
    """Angles [64] of the columns against the viewing direction, radians; equal distances on a flat screen."""
    middle = (SIZE - 1) / 2
    return np.arctan((np.arange(SIZE) - middle) / middle * math.tan(FIELD / 2))


def heading_angle(heading: int) -> float:
    """Radians of a heading of 15 degrees each."""
    return 2 * math.pi * (heading % HEADINGS) / HEADINGS
