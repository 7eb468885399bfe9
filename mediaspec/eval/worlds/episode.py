"""An episode: what a memory test shows, asks and scores; and the memory horizon of its frames."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["Episode", "memory_horizon", "recall_frames"]


@dataclass(frozen=True)
class Episode:
    """One walk through a world, its frames and which of them test memory.

    Args:
        world, protocol: their names.
        seed: of the world's content.
        frames: [N, 64, 64, 3] float32 in 0..1.
        actions: [N] int64 in 0..num_actions - 1; actions[t] led to frame t, that of frame 0 is `hold`.
        poses: [N, P] float64: PanoRoom (yaw in columns, width of the world in columns), RayMaze and ViZDoom (x, y in
            squares, yaw in radians).
        context: frames that are given; the rest is predicted.
        horizon: [N] int64, frames since what is seen was last seen, the largest over its parts.
        fresh: [N] float64, share of what is seen that was never seen before.
        needles: frame -> column where the whole needle begins (PanoRoom).
        wall_colours: [N, 64] int64 palette numbers per column (RayMaze); palette and shading are in `extras`.
    """

    world: str
    protocol: str
    seed: int
    frames: np.ndarray
    actions: np.ndarray
    poses: np.ndarray
    context: int
    horizon: np.ndarray
    fresh: np.ndarray
    needles: dict[int, int] = field(default_factory=dict)
    wall_colours: np.ndarray | None = None
    extras: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.frames)


def memory_horizon(
    places: Iterable[Any], visible: Callable[[Any], Iterable[Hashable]]
) -> tuple[np.ndarray, np.ndarray]:
    """How old what is seen is, frame by frame.

    Args:
        places: where the frames are seen from.
        visible: place -> the parts of the world seen from it (columns, wall faces).

    Returns:
        horizon [N] int64, the largest number of frames since any visible part was last seen (0 where all is new), and
        fresh [N] float64, the share of visible parts never seen before.

    Example:
        >>> memory_horizon([0, 1, 0], lambda place: {place, place + 1})[0].tolist()
        [0, 1, 2]
    """
    last: dict[Hashable, int] = {}
    horizon, fresh = [], []
    for time, place in enumerate(places):
        parts = list(visible(place))
        ages = [time - last[part] for part in parts if part in last]
        horizon.append(max(ages, default=0))
        fresh.append(1 - len(ages) / len(parts))
        last.update(dict.fromkeys(parts, time))
    return np.array(horizon, dtype=np.int64), np.array(fresh)


def recall_frames(episode: Episode, reach: int, most_fresh: float = 0.1) -> np.ndarray:
    """Frames that only memory can get right: [N] bool.

    Args:
        episode: the walk.
        reach: frames that a model sees without memory, its recent frames and the chunk it writes. What was last seen
            longer ago than that must be remembered.
        most_fresh: frames that show a larger share of things never seen are left out: nobody could know them.

    Returns:
        True for predicted frames whose horizon exceeds `reach`.
    """
    asked = np.arange(len(episode)) >= episode.context
    return asked & (episode.horizon > reach) & (episode.fresh <= most_fresh)
