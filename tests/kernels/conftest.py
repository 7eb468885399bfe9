"""GPU tests need a device; `tests/conftest.py` chooses the interpreter where there is none."""

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# The interpreter computes with numpy, which warns where a NaN is made on purpose.
NUMPY_NOISE = "ignore::RuntimeWarning:triton.runtime.interpreter"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """GPU tests are skipped, not failed, where there is no device."""
    for item in items:
        if item.get_closest_marker("gpu") and DEVICE == "cpu":
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
