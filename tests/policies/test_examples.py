"""The examples in the docstrings run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import mediaspec.policies

MODULES = sorted(module.name for module in pkgutil.iter_modules(mediaspec.policies.__path__))


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"mediaspec.policies.{name}"))
    assert result.failed == 0 and (result.attempted > 0 or name in ("base", "outcome"))
