"""Methods that take the arguments of a base method and more, without a second list of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["extends"]

F = TypeVar("F", bound=Callable[..., Any])


def extends(base: Callable[..., Any]) -> Callable[[F], F]:
    """Decorates a method that hands its **keywords on to `base`: `inspect.signature` and help show both lists.

    Args:
        base: the method of the base class. Where both name an argument, the method's own default holds.

    Example:
        >>> def base(self, text, *, batch=1, **more): ...
        >>> @extends(base)
        ... def method(self, text="", *, scale=2.0, **shared): ...
        >>> str(inspect.signature(method))
        "(self, text='', *, scale=2.0, batch=1, **more)"
    """

    def decorate(method: F) -> F:
        own, theirs = inspect.signature(method), inspect.signature(base)
        passed_on = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        named = {name: one for name, one in own.parameters.items() if one.kind not in passed_on}
        whole = {**named, **{name: one for name, one in theirs.parameters.items() if name not in named}}
        ordered = sorted(whole.values(), key=lambda one: one.kind)  # stable: within a kind, the own ones first
        method.__signature__ = own.replace(parameters=ordered)  # type: ignore[attr-defined]
        return method

    return decorate
