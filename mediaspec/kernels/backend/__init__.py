"""Chooses between the plain torch reference and the Triton kernel of an operation.

Every operation lives in a folder of its own: `__init__.py` holds the contract and dispatches, `reference.py` is plain
torch and the readable truth, `triton.py` the kernel, `cases.py` the inputs that tests and benchmarks share.

Order of choice:

1. `impl="reference"` or `impl="triton"` given by the caller: exactly that one, or a ValueError that says why it
   cannot run;
2. the environment variable `MEDIASPEC_KERNELS` (`reference` or `triton`), treated like an explicit choice;
3. automatic: Triton for CUDA tensors where Triton is installed, the reference otherwise.

No choice changes a result beyond float rounding: both take the same uniforms and noise and agree on integer outputs.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from torch import Tensor

__all__ = ["ENVIRONMENT_VARIABLE", "Impl", "OPERATIONS", "choose", "describe", "launching_on"]

Impl = Literal["reference", "triton"]

ENVIRONMENT_VARIABLE = "MEDIASPEC_KERNELS"
OPERATIONS = (
    "philox",
    "sample",
    "verify_chain",
    "verify_tree",
    "tree_attention",
    "sparse_attention",
    "lse_merge",
    "tiara_temporal",
    "tiara_bias",
    "frame_pool",
)


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=4)


def _obstacle(device_type: str) -> str | None:
    """Why Triton cannot run on tensors of this device type, None where it can."""
    if not _installed():
        return "the package triton is not installed (pip install triton)"
    if device_type == "cuda" or _interpreting():
        return None
    return (
        f"the tensors are on {device_type!r}; move them to 'cuda', or set TRITON_INTERPRET=1 to interpret the kernel"
    )


def choose(op: str, tensor: Tensor, impl: str | None = None) -> Impl:
    """Names the implementation that runs `op` on `tensor`.

    Args:
        op: name of the operation, for messages.
        tensor: any tensor argument of it; its device decides.
        impl: "reference", "triton", or None for the environment variable and then the automatic choice.

    Raises:
        ValueError: an unknown name, or an explicit choice that cannot run here.
    """
    source = "impl"
    if impl is None:
        impl = os.environ.get(ENVIRONMENT_VARIABLE) or None
        source = ENVIRONMENT_VARIABLE
    if impl is None:
        if not tensor.is_cuda:
            return "reference"
        if _installed():
            return "triton"
        _warn_once("Triton is not installed: CUDA tensors go through the slower torch reference (pip install triton).")
        return "reference"
    if impl == "reference":
        return "reference"
    if impl != "triton":
        raise ValueError(f"{op}: {source}={impl!r} is unknown; write 'reference', 'triton', or leave it unset.")
    reason = _obstacle(tensor.device.type)
    if reason is not None:
        raise ValueError(f"{op}: {source}='triton' cannot run because {reason}; or write 'reference'.")
    return "triton"


def launching_on(tensor: Tensor) -> AbstractContextManager[object]:
    """Makes the tensor's CUDA device the current one: Triton launches there, wherever the tensors live."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def describe() -> dict[str, object]:
    """What would run where and why, for `mediaspec doctor`."""
    chosen = os.environ.get(ENVIRONMENT_VARIABLE) or None
    if _installed():
        import triton

        version: str | None = str(triton.__version__)
    else:
        version = None
    automatic_cuda = "triton" if _installed() else "reference (triton is not installed)"
    return {
        "operations": list(OPERATIONS),
        "triton": version,
        "triton_interpreter": _interpreting(),
        "cuda": torch.cuda.is_available(),
        ENVIRONMENT_VARIABLE: chosen,
        "on_cpu": chosen or "reference",
        "on_cuda": chosen or automatic_cuda,
        "triton_on_cpu": _obstacle("cpu") or "interpreted",
    }
