"""Small worlds with exact memory tests: PanoRoom-64, RayMaze-64 and, as an extra, ViZDoom.

    episode = make_episode("panoroom", "needle", seed=200000)
    asked = recall_frames(episode, reach=8)

An episode is a function of its seed alone.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .episode import Episode, memory_horizon, recall_frames
from .panoroom import PanoRoom
from .protocols import loop, needle, palindrome, turn_back
from .raymaze import RayMaze
from .vizdoom import FIELD_DEGREES, doom_palindrome

__all__ = [
    "TEST_SEED", "WORLDS", "Episode", "PanoRoom", "RayMaze", "WorldInfo", "find_world", "make_episode",
    "memory_horizon", "recall_frames",
]  # fmt: skip

TEST_SEED = 200_000
"""First seed of held-out worlds."""


@dataclass(frozen=True)
class WorldInfo:
    """What a world offers.

    Args:
        protocols: name -> function of (seed, **settings) that makes an episode.
        num_actions: action ids are 0..num_actions - 1.
        position: how a model places its tokens, "column" or "pose".
        train_seeds: how many seeds from 0 on belong to training.
        field_of_view: degrees, of "pose".
        needs: the package that draws it and the extra of mediaspec that brings it; None is mediaspec alone.
    """

    protocols: dict[str, Callable[..., Episode]]
    num_actions: int
    position: str
    train_seeds: int
    field_of_view: float = 60.0
    needs: tuple[str, str] | None = None

    @property
    def install(self) -> str | None:
        """The command that brings the missing package, None where nothing is missing."""
        if self.needs is None or importlib.util.find_spec(self.needs[0]) is not None:
            return None
        return f"pip install 'mediaspec[{self.needs[1]}]'"


WORLDS = {
    "panoroom": WorldInfo({"needle": needle, "palindrome": palindrome}, 3, "column", 5000),
    "raymaze": WorldInfo({"loop": loop, "turn_back": turn_back}, 3, "pose", 10000),
    "vizdoom": WorldInfo({"palindrome": doom_palindrome}, 4, "pose", 10000, FIELD_DEGREES, ("vizdoom", "worlds")),
}


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return close[0] if close else known[0]


def find_world(name: str) -> WorldInfo:
    """The entry of a world.

    Raises:
        ValueError: an unknown name.
    """
    if name not in WORLDS:
        raise ValueError(f"world {name!r} is none of {', '.join(WORLDS)}; write {_nearest(name, list(WORLDS))!r}")
    return WORLDS[name]


def make_episode(world: str, protocol: str, seed: int, **settings: Any) -> Episode:
    """The episode of a room.

    Args:
        world: "panoroom", "raymaze" or "vizdoom".
        protocol: one of the world's.
        seed: of the room; held-out rooms start at `TEST_SEED`.
        settings: of the protocol.

    Raises:
        ValueError: an unknown world or protocol.
        ImportError: "vizdoom" without its package.

    Example:
        >>> len(make_episode("panoroom", "palindrome", 200000, frames=16))
        31
    """
    known = find_world(world).protocols
    if protocol not in known:
        raise ValueError(
            f"{world} has no protocol {protocol!r}, only {', '.join(known)}; write {_nearest(protocol, list(known))!r}"
        )
    return known[protocol](seed, **settings)
