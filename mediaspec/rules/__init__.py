"""Acceptance rules by name. A rule of your own is one file with one subclass of `AcceptanceRule`, see `rules.base`."""

from __future__ import annotations

import difflib
from typing import Any

from .base import GUARANTEES, AcceptanceRule
from .cool_sd import CoolSDRule
from .coupled import CoupledRule
from .ensemble import EnsembleRule
from .exact import ExactRule
from .gsd import GSDRule
from .lantern import LanternRule

__all__ = [
    "GUARANTEES",
    "AcceptanceRule",
    "CoolSDRule",
    "CoupledRule",
    "EnsembleRule",
    "ExactRule",
    "GSDRule",
    "LanternRule",
    "available_rules",
    "make_rule",
]


def available_rules() -> list[str]:
    """Names that `make_rule` knows, including those of imported third-party rules."""
    return sorted(AcceptanceRule.registry)


def make_rule(name: str, **config: Any) -> AcceptanceRule:
    """Builds an acceptance rule from its name and settings.

    Args:
        name: one of `available_rules()`: "exact", "coupled", "cool_sd", "lantern", "lantern++", "gsd", "ensemble", ...
        config: settings of that rule's constructor.

    Raises:
        ValueError: unknown name or setting, with the nearest valid one; a value out of range.

    Example:
        >>> make_rule("cool_sd", eps=0.05).guarantee
        'bounded-drift'
    """
    names = available_rules()
    if name not in names:
        near = difflib.get_close_matches(str(name).lower().replace("-", "_"), names, 1, cutoff=0.0)
        raise ValueError(f'there is no acceptance rule {name!r}; did you mean "{near[0]}"? The rules are {names}')
    cls, preset = AcceptanceRule.registry[name]
    cls.check_settings(config)
    try:
        return cls(**{**preset, **config})
    except TypeError as error:
        raise ValueError(f"rule {name!r} cannot be made with {config}: {error}") from error
