"""The examples in the docstrings run as written."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize(
    "module",
    [
        "kernels.philox",
        "kernels.verify_chain",
        "kernels.lse_merge",
        "kernels.tree_attention",
        "kernels.sparse_attention",
        "core.rng",
    ],
)
def test_examples(module):
    result = doctest.testmod(importlib.import_module(f"mediaspec.{module}"))
    assert result.attempted > 0 and result.failed == 0
