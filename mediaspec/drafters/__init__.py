"""Drafters: what proposes tokens. One drafter = one file; `make_drafter` finds them by name."""

from __future__ import annotations

import difflib
import inspect
from typing import Any

from ..core.types import Drafter
from .eagle import EagleDrafter
from .eagle3 import Eagle3Drafter
from .jacobi import JacobiDrafter
from .lazy import LazyDrafter
from .longspec import LongSpecDrafter
from .model import ModelDrafter
from .ngram import NgramDrafter
from .sparse import SparseDrafter

__all__ = [
    "DRAFTERS",
    "Eagle3Drafter",
    "EagleDrafter",
    "JacobiDrafter",
    "LazyDrafter",
    "LongSpecDrafter",
    "ModelDrafter",
    "NgramDrafter",
    "SparseDrafter",
    "make_drafter",
    "register_drafter",
]

DRAFTERS: dict[str, type] = {
    "eagle": EagleDrafter,
    "eagle3": Eagle3Drafter,
    "jacobi": JacobiDrafter,
    "lazy": LazyDrafter,
    "longspec": LongSpecDrafter,
    "model": ModelDrafter,
    "ngram": NgramDrafter,
    "sparse": SparseDrafter,
}


def register_drafter(name: str, drafter: type) -> None:
    """Makes a third party's drafter class available under `name`.

    Raises:
        ValueError: the name is taken by another class.
    """
    if DRAFTERS.setdefault(name, drafter) is not drafter:
        raise ValueError(
            f"{name!r} already names {DRAFTERS[name].__name__}; register {drafter.__name__} under another name"
        )


def make_drafter(name: str, **settings: Any) -> Drafter:
    """A drafter by name with its constructor's settings.

    Args:
        name: "eagle" and "eagle3" (need ``head=``), "model" (needs ``target=``), "jacobi", "lazy", "ngram", or a
            registered name.
        settings: what that drafter's constructor takes.

    Raises:
        ValueError: an unknown name or setting, with the nearest valid one; a missing setting.

    Example:
        >>> make_drafter("jacobi", window=8).config.window
        8
    """
    if name not in DRAFTERS:
        known = ", ".join(sorted(DRAFTERS))
        raise ValueError(f"no drafter named {name!r}{_nearest(name, DRAFTERS)}; there are {known}")
    parameters = inspect.signature(DRAFTERS[name]).parameters
    for setting in settings:
        if setting not in parameters:
            raise ValueError(
                f"drafter {name!r} has no setting {setting!r}{_nearest(setting, parameters)}; it takes "
                f"{', '.join(parameters)}"
            )
    missing = [key for key, one in parameters.items() if one.default is one.empty and key not in settings]
    if missing:
        example = f"make_drafter({name!r}, {', '.join(f'{key}=...' for key in missing)})"
        raise ValueError(f"drafter {name!r} needs {', '.join(missing)}: write {example}")
    drafter: Drafter = DRAFTERS[name](**settings)
    return drafter


def _nearest(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.4)
    return f" (did you mean {close[0]!r}?)" if close else ""
