"""Block means: both implementations agree, and they are means."""

from __future__ import annotations

import doctest
import importlib

import pytest
import torch

from mediaspec.kernels.frame_pool import frame_pool
from mediaspec.kernels.frame_pool.cases import cases, run

from .conftest import DEVICE
from .test_kernel_compile import HARNESS, names_of_compiled

BOTH = pytest.mark.parametrize("impl", ["reference", "triton"])


@pytest.mark.parametrize("case", cases(device=DEVICE), ids=lambda case: case.name)
def test_triton_agrees(case):
    wanted, given = run(case, "reference"), run(case, "triton")
    assert given.dtype == wanted.dtype and given.shape == wanted.shape
    tolerance = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float64: 1e-12}.get(wanted.dtype, 2e-6)
    torch.testing.assert_close(given, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [(1, 1, 1), (2, 2, 2), (4, 4, 4), (3, 5, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_agrees_on_the_device(kernel, dtype):
    frames = torch.randn(2, 16, 21, 60, 104, device="cuda", dtype=dtype)
    given, wanted = frame_pool(frames, kernel, impl="triton"), frame_pool(frames, kernel, impl="reference")
    torch.testing.assert_close(given, wanted, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


COMPILE = (
    HARNESS
    + """
from mediaspec.kernels.frame_pool.cases import cases, run
for case in cases(1):
    if case.name in ("k2", "ragged", "strided", "expanded", "bfloat16", "float64"):
        run(case, "triton")
print(" ".join(sorted(compiled)))
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernel_compiles(capability):
    pytest.importorskip("triton")
    assert names_of_compiled(COMPILE, capability) == {"_pool_kernel"}


@BOTH
def test_means_with_repeated_edges(impl):
    frames = torch.arange(30.0, device=DEVICE).view(1, 1, 2, 3, 5)
    given = frame_pool(frames, (2, 2, 2), impl=impl)
    padded = torch.nn.functional.pad(frames, (0, 1, 0, 1, 0, 0), mode="replicate")
    torch.testing.assert_close(given, torch.nn.functional.avg_pool3d(padded, 2))
    whole = frame_pool(frames[:, :, :, :2, :4], (2, 2, 4), impl=impl)
    assert whole.numel() == 1 and float(whole) == pytest.approx(float(frames[:, :, :, :2, :4].mean()))


def test_gradients_and_refusals():
    frames = torch.randn(1, 2, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: frame_pool(x, (2, 2, 2)), frames)
    with pytest.raises(ValueError, match="no gradient"):
        frame_pool(frames, (2, 2, 2), impl="triton")
    with torch.no_grad():
        assert frame_pool(frames, (2, 2, 2)).grad_fn is None
    for bad, kernel in ((torch.zeros(1, 2, 3, 4), (1, 1, 1)), (torch.zeros(1, 2, 0, 4, 4), (1, 1, 1))):
        with pytest.raises(ValueError, match="frames have shape"):
            frame_pool(bad, kernel)
    with pytest.raises(ValueError, match="floating point"):
        frame_pool(torch.zeros(1, 1, 1, 1, 1, dtype=torch.int64), (1, 1, 1))
    with pytest.raises(ValueError, match="at least 1"):
        frame_pool(torch.zeros(1, 1, 1, 1, 1), (0, 1, 1))


def test_example():
    assert doctest.testmod(importlib.import_module("mediaspec.kernels.frame_pool")).failed == 0
