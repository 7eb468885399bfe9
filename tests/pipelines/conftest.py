"""Pipelines at toy size that several files of tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="module")
def framepack() -> Any:
    from . import tiny_packed

    return tiny_packed.framepack()


@pytest.fixture(scope="module")
def helios() -> Any:
    from . import tiny_packed

    return tiny_packed.helios()


@pytest.fixture(scope="module")
def far() -> Any:
    from . import tiny_packed

    return tiny_packed.far()


@pytest.fixture
def carriers(framepack: Any, helios: Any, far: Any) -> dict[str, Callable[..., Any]]:
    """Makers of the packed carriers by name."""
    from mediaspec.pipelines.carriers import carrier_for

    pipes = {"framepack": framepack, "helios": helios, "far": far}
    return {name: lambda _pipe=pipe, **settings: carrier_for(_pipe, **settings) for name, pipe in pipes.items()}
