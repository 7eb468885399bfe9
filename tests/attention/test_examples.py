"""The examples in the docstrings run."""

from __future__ import annotations

import doctest
import importlib

import pytest

MODULES = ("collector", "logits", "pattern", "rope_profile", "select", "sinks", "slash", "strip")


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"mediaspec.attention.{name}"))
    assert result.failed == 0 and result.attempted > 0
