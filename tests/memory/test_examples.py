"""The examples in the docstrings run."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import mediaspec.memory

MODULES = sorted(path.stem for path in Path(mediaspec.memory.__file__).parent.glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    assert doctest.testmod(importlib.import_module(f"mediaspec.memory.{name}")).failed == 0
