"""Which rule and which drafter a call uses: names, objects, or the pipeline's own components."""

from __future__ import annotations

import copy
import difflib
from typing import Any

from ..drafters import DRAFTERS, JacobiDrafter, make_drafter
from ..models.eagle import EagleHead
from ..models.llamagen import LlamaGenGPT
from ..rules import AcceptanceRule, available_rules, make_rule

__all__ = ["choose_drafter", "choose_rule", "drafter_name", "drafter_names", "name_of", "settings_of"]

# drafters that run a network, and which one
NETWORKS = {"eagle": EagleHead, "model": LlamaGenGPT}


def drafter_names() -> tuple[str, ...]:
    """Names a call may use; "none" drafts nothing."""
    return (*sorted(DRAFTERS), "none")


def choose_rule(given: AcceptanceRule | str | None, component: AcceptanceRule) -> AcceptanceRule | None:
    """The rule of a call; None means speculation off.

    Args:
        given: a rule, a name, "plain" for no speculation, or None for the pipeline's own.
        component: the pipeline's own.

    Raises:
        ValueError: unknown name. TypeError: neither rule nor name.
    """
    if given is None:
        return component
    if isinstance(given, str):
        if given != "plain":
            try:
                return make_rule(given)
            except ValueError:
                if given in available_rules():
                    raise
                names = ("plain", *available_rules())
                raise ValueError(f"there is no rule {given!r}; {_near(given, names)}") from None
        return None
    if not isinstance(given, AcceptanceRule):
        raise TypeError(
            f"rule={given!r} is a {type(given).__name__}; give an AcceptanceRule, a name such as 'cool_sd', or 'plain'"
        )
    return given


def choose_drafter(given: Any, component: Any, drive: Any, explicit_rule: bool) -> Any:
    """The drafter of a call, ready for the engine; None drafts nothing.

    Args:
        given: a drafter, a network (EagleHead, LlamaGenGPT), a name of `drafter_names()`, or None for the
            pipeline's own.
        component: the pipeline's own, or None.
        drive: turns a network (EagleHead, LlamaGenGPT) into the drafter that runs it.
        explicit_rule: the caller named a rule, so drafting nothing would not be what was asked for.

    Raises:
        ValueError: unknown name, or a name whose network this pipeline does not have.
    """
    if given is None:
        if component is None and explicit_rule:
            raise ValueError(
                "a rule was given but this pipeline has no drafter, so nothing would be drafted; add drafter='jacobi' "
                "(needs no network), or write rule='plain'"
            )
        return _ready(component, drive)
    if not isinstance(given, str):
        return _ready(given, drive)
    if given == "none":
        return None
    if given not in DRAFTERS:
        raise ValueError(f"there is no drafter {given!r}; {_near(given, drafter_names())}")
    if given not in NETWORKS:
        return _ready(component if isinstance(component, DRAFTERS[given]) else make_drafter(given), drive)
    kind = NETWORKS[given]
    if not isinstance(component, kind):
        owned = "none" if component is None else type(component).__name__
        raise ValueError(
            f"drafter={given!r} needs a {kind.__name__}, but this pipeline's drafter is {owned}; write "
            f"pipe.register_modules(drafter=...) or drafter=<a {kind.__name__}>, or use drafter='jacobi'"
        )
    return _ready(component, drive)


def _ready(drafter: Any, drive: Any) -> Any:
    if isinstance(drafter, (EagleHead, LlamaGenGPT)):
        return drive(drafter)
    if isinstance(drafter, JacobiDrafter):
        return copy.copy(drafter)  # a run's state lives in the drafter, and calls in several threads may overlap
    if drafter is None or (hasattr(drafter, "propose") and hasattr(drafter, "observe")):
        return drafter
    raise TypeError(
        f"drafter={drafter!r} is a {type(drafter).__name__}; give an EagleHead, a LlamaGenGPT, an object with propose "
        f"and observe, or a name: {', '.join(drafter_names())}"
    )


def name_of(value: Any) -> str:
    """How stats name a rule or drafter: its registered name, else its class."""
    if value is None:
        return "none"
    return getattr(value, "name", "") or type(value).__name__


def drafter_name(drafter: Any) -> str:
    """The registered name of a drafter, else its class."""
    return next((name for name, kind in DRAFTERS.items() if type(drafter) is kind), name_of(drafter))


def settings_of(value: Any) -> dict[str, Any]:
    """JSON-ready settings of a component that keeps a config."""
    config = getattr(value, "config", None)
    if not isinstance(config, dict):
        return {}
    plain = (int, float, str, bool, list, tuple)
    return {k: v for k, v in config.items() if not k.startswith("_") and isinstance(v, plain)}


def _near(name: str, allowed: tuple[str, ...]) -> str:
    match = difflib.get_close_matches(name, allowed, 1, cutoff=0.0)
    return f"did you mean {match[0]!r}? Allowed are {', '.join(allowed)}"
