"""Policies by name: who chooses drafter, draft length, tree and rule. One policy = one file, see `policies.base`."""

from __future__ import annotations

import difflib
from typing import Any

from ..core.arm import PLAIN, Arm, make_arms
from ..core.outcome import Choice, Outcome
from .base import DraftPolicy
from .budget import BudgetPolicy, allocate, verify_budget
from .exp3 import EXP3Policy
from .fixed import FixedPolicy
from .hedge import HedgePolicy
from .survival import SurvivalPolicy
from .thompson import ThompsonPolicy
from .ucb import UCBPolicy

__all__ = [
    "PLAIN",
    "Arm",
    "BudgetPolicy",
    "Choice",
    "DraftPolicy",
    "EXP3Policy",
    "FixedPolicy",
    "HedgePolicy",
    "Outcome",
    "SurvivalPolicy",
    "ThompsonPolicy",
    "UCBPolicy",
    "allocate",
    "available_policies",
    "make_arms",
    "make_policy",
    "verify_budget",
]


def available_policies() -> list[str]:
    """Names that `make_policy` knows, including those of imported third-party policies."""
    return sorted(DraftPolicy.registry)


def make_policy(name: str = "survival", **settings: Any) -> DraftPolicy:
    """Builds a policy from its name and settings.

    Args:
        name: one of `available_policies()`: "fixed", "survival" (the default), "ucb", "exp3", "thompson", "hedge",
            "budget", ...
        settings: of that policy's constructor.

    Raises:
        ValueError: unknown name or setting, with the nearest valid one; a value out of range.

    Example:
        >>> make_policy("ucb", scale=1.0).config.scale
        1.0
    """
    names = available_policies()
    if name not in names:
        near = difflib.get_close_matches(str(name).lower(), names, 1, cutoff=0.0)
        raise ValueError(f'there is no policy {name!r}; did you mean "{near[0]}"? The policies are {names}')
    cls = DraftPolicy.registry[name]
    cls.check_settings(settings)
    return cls(**settings)
