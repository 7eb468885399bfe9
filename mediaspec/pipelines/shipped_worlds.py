"""Which frame worlds ("panoroom/pack_k2") are in the package, and how to get those that are not."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from ..models.frame_history import ALIASES, MEMORIES
from .keywords import nearest

__all__ = ["WORLDS", "check_shipped", "embedded_worlds"]

WORLDS = Path(str(resources.files("mediaspec"))) / "models" / "frame_worlds"
TRAINABLE = ("panoroom", "raymaze", "vizdoom")
"""Worlds that tools/arvdm knows."""


def embedded_worlds(root: Path = WORLDS) -> list[str]:
    """Names "world/memory" of the frame worlds inside the package."""
    return sorted(f"{file.parent.parent.name}/{file.parent.name}" for file in root.glob("*/*/config.json"))


def check_shipped(name: str) -> None:
    """Lets every name pass but those of frame worlds that are not in the package.

    Args:
        name: of a model, a folder or a repository; "world/memory" is a frame world where both are known.

    Raises:
        ValueError: weights that are not shipped, with the command that trains them, or a memory that is not known.
    """
    world, _, memory = name.partition("/")
    shipped = embedded_worlds()
    if world not in TRAINABLE or name in shipped:
        return
    own = f"{world}/{ALIASES.get(memory, memory)}"
    if memory in MEMORIES:
        raise ValueError(
            f"the weights of {name} are not part of the package; train them in a checkout of mediaspec with `python "
            f"tools/arvdm/train_frame_dit.py --world {world} --memory {memory} --minutes 60 --out arvdm-run`, and "
            f"bring them in with `python tools/arvdm/ship_models.py --run arvdm-run --world {world} --memories "
            f"{memory}`. In the package are {', '.join(shipped)}"
        )
    if own in shipped or any(one.startswith(f"{world}/") for one in shipped):
        raise ValueError(f"there is no frame world {name!r}; {nearest(own, shipped)}")
