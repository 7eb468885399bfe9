"""A matrix multiplication prepared once for few input rows on the CPU.

Decoding multiplies 1 to 16 rows with every matrix of a model, so the time is that of reading the weights. `F.linear`
reaches about 40 % of the memory bandwidth there. Two prepared forms read less or faster:

    half     the weight is kept as fp16 in FBGEMM's tiles, rows and sums stay float32. Chosen only where every weight
             is exactly an fp16 number (checkpoints saved in half precision), so the result is that of float32.
    onednn   the weight is kept in oneDNN's blocked layout, float32 or bfloat16.

Measured with float32 rows on 1 core of a Zen 4 server, 192 -> 1024: `F.linear` 151, onednn 92, half 38 microseconds at
2 rows; 167, 103 and 69 at 12 rows.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["KINDS", "MOST_ROWS", "PreparedLinear", "half_exact", "weights_mark"]

KINDS = ("auto", "half", "onednn", "plain")
MOST_ROWS = 48
"""Input rows up to which a prepared form is the faster one (fp16 tiles against F.linear, 2 cores)."""
logger = logging.getLogger(__name__)


class PreparedLinear:
    """`F.linear` with a frozen weight: [.., in] -> [.., out], the result in the dtype of its argument.

    Args:
        weight: [out, in], any float dtype; read now: later changes need a new object ("plain" may share its memory).
        dtype: what the products are computed in: torch.float32, torch.bfloat16 or torch.float16; None is the weight's.
            float16 computes in float32 where the weight is kept as half.
        bias: [out] or None.
        kind: one of `KINDS`. "auto" takes the fastest that runs here, which on an accelerator is "plain".

    Raises:
        ValueError: the weight is no matrix, or a kind was asked for that cannot run; the message says why.

    Example:
        >>> layer = PreparedLinear(torch.eye(3), kind="plain")
        >>> layer(torch.tensor([[1.0, 2.0, 3.0]])).tolist()
        [[1.0, 2.0, 3.0]]
    """

    def __init__(
        self,
        weight: Tensor,
        dtype: torch.dtype | None = None,
        *,
        bias: Tensor | None = None,
        kind: str = "auto",
    ) -> None:
        if weight.dim() != 2:
            raise ValueError(f"a linear weight has shape [out, in], got {list(weight.shape)}")
        if kind not in KINDS:
            raise ValueError(f"kind={kind!r}; allowed are {', '.join(KINDS)}")
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype if dtype is None else dtype
        weight = weight.detach()
        bias = None if bias is None else bias.detach()
        with torch.inference_mode():
            self.kind, self.reason = self._choose(weight, kind)
            if self.kind == "half":
                self.dtype = torch.float32
                wide = None if bias is None else bias.float().contiguous()
                self._run = _half(weight.float().contiguous(), wide)
            else:
                weight = weight.to(self.dtype).contiguous()
                bias = None if bias is None else bias.to(self.dtype)
                self._run = _onednn(weight, bias) if self.kind == "onednn" else functools.partial(_plain, weight, bias)

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype is self.dtype:
            return self._run(x)
        return self._run(x.to(self.dtype)).to(x.dtype)

    def describe(self) -> str:
        """What runs and, where nothing faster than `F.linear` does, why."""
        text = f"{self.in_features} -> {self.out_features}, {str(self.dtype).removeprefix('torch.')}, {self.kind}"
        return f"{text} ({self.reason})" if self.reason else text

    def _choose(self, weight: Tensor, kind: str) -> tuple[str, str]:
        """The kind to use and the reason for it."""
        if kind == "plain":
            return kind, ""
        half, onednn = _no_half(weight, self.dtype), _no_onednn(weight, self.dtype)
        if kind in ("auto", "half") and not half:
            return "half", ""
        if kind in ("auto", "onednn") and not onednn:
            return "onednn", ""
        if kind != "auto":
            reason = half if kind == "half" else onednn
            raise ValueError(f"kind={kind!r} cannot run: {reason}; write kind='auto' to take what can")
        if weight.device.type == "cpu":
            _say_once(f"CPU matrices run unprepared: half: {half}; onednn: {onednn}")
        return "plain", onednn


def half_exact(*weights: Tensor) -> bool:
    """Whether every entry is exactly an fp16 number. Reads the values: for loading, not for a decode loop."""
    return all(w.dtype == torch.float16 or bool(torch.equal(w.half().to(w.dtype), w)) for w in weights)


def weights_mark(module: nn.Module) -> tuple[Any, ...] | None:
    """Changes when a weight of a module is replaced, moved, or written to, also through `.data`; None off the CPU.

    Reads some 64 numbers of every parameter, one or two milliseconds for a few hundred of them.
    """
    marks: list[Any] = [module.training]
    for weight in module.parameters():
        if weight.device.type != "cpu":
            return None
        some = weight.detach().flatten()[:: max(1, weight.numel() // 64)]
        version = 0 if weight.is_inference() else weight._version
        marks.append((weight.data_ptr(), weight.dtype, version, float(some.double().sum())))
    return tuple(marks)


def _plain(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    return F.linear(x, weight, bias)


def _bare(operator: Any) -> Callable[..., Tensor]:
    """The operator without its Python shell, which looks through the arguments of every call."""
    bare: Callable[..., Tensor] = getattr(operator, "_op", operator)
    return bare


def _half(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    packed = torch.ops.quantized.linear_prepack_fp16.default(weight, bias)
    multiply = _bare(torch.ops.quantized.linear_dynamic_fp16.default)
    return lambda x: multiply(x, packed)


def _onednn(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    packed = torch.ops.mkldnn._reorder_linear_weight.default(weight, None)
    multiply = _bare(torch.ops.mkldnn._linear_pointwise.default)
    return lambda x: multiply(x, packed, bias, "none", [], "")


def _no_half(weight: Tensor, dtype: torch.dtype) -> str:
    """Why the half form cannot be used; empty where it can."""
    if weight.device.type != "cpu":
        return f"it is for the CPU, the weight is on {weight.device}"
    if dtype not in (torch.float32, torch.float16):
        return f"it computes in float32, asked for is {dtype}"
    return _half_trial() or ("" if half_exact(weight) else "the weight is not exactly representable in fp16")


def _no_onednn(weight: Tensor, dtype: torch.dtype) -> str:
    """Why the oneDNN form cannot be used; empty where it can."""
    if weight.device.type != "cpu":
        return f"it is for the CPU, the weight is on {weight.device}"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"it computes in float32 or bfloat16, asked for is {dtype}"
    return _onednn_trial(dtype)


def _trial(make: Callable[[Tensor, Tensor | None], Callable[[Tensor], Tensor]], dtype: torch.dtype) -> str:
    """Runs a small product and compares: the operators are internal to torch and may be absent or built out."""
    weight = (torch.arange(35.0).view(5, 7) / 8 - 2).to(dtype)
    x = (torch.arange(21.0).view(3, 7) / 4 - 2).to(dtype)
    try:
        with torch.inference_mode():
            result = make(weight, None)(x)
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        return f"this torch ({torch.__version__}) cannot run it: {str(error).splitlines()[0]}"
    if not torch.allclose(result.float(), x.float() @ weight.float().T, atol=0.05, rtol=0.02):
        return f"this torch ({torch.__version__}) gives wrong products"
    return ""


@functools.cache
def _half_trial() -> str:
    if not {"fbgemm", "x86"} & set(torch.backends.quantized.supported_engines):
        return "this torch was built without FBGEMM"
    return _trial(_half, torch.float32)


@functools.cache
def _onednn_trial(dtype: torch.dtype) -> str:
    if not torch.backends.mkldnn.is_available():
        return "this torch was built without oneDNN"
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "this CPU has no bfloat16 instructions"
    return _trial(_onednn, dtype)


@functools.cache
def _say_once(message: str) -> None:
    logger.warning(message)
