"""Unknown keywords are errors that name the nearest valid one."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

__all__ = ["nearest", "refuse_unknown", "strict"]

F = TypeVar("F", bound=Callable[..., Any])


def nearest(name: str, allowed: Iterable[str]) -> str:
    """Text for an error: the closest allowed name if one is close, then all of them."""
    names = sorted(allowed)
    match = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"did you mean {match[0]!r}? " if match else ""
    return f"{hint}Allowed are {', '.join(names)}"


def refuse_unknown(given: Iterable[str], allowed: Iterable[str], where: str) -> None:
    """Raises TypeError for the first name in `given` that is not in `allowed`.

    Args:
        given: keyword names of a call.
        allowed: valid names.
        where: what was called, for the message.
    """
    names = set(allowed)
    for name in given:
        if name not in names:
            raise TypeError(f"{where} got an unexpected keyword argument {name!r}; {nearest(name, names)}")


def strict(function: F) -> F:
    """Decorates a function so that a misspelt keyword raises TypeError with the nearest valid name."""
    parameters = inspect.signature(function).parameters
    allowed = [name for name, p in parameters.items() if p.kind is not p.POSITIONAL_ONLY and name != "self"]

    @functools.wraps(function)
    def checked(*args: Any, **keywords: Any) -> Any:
        refuse_unknown(keywords, allowed, f"{function.__qualname__}()")
        return function(*args, **keywords)

    return checked  # type: ignore[return-value]
