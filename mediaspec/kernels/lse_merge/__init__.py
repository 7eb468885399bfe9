"""Joins attention outputs over disjoint key sets into the output over their union.

S parts, B rows, H query heads, M queries, D head size. Part s holds O_s = softmax over its own keys times values and
L_s = ln(sum of exp(scaled logits)) over the same keys:

    L = ln sum_s exp(L_s)          O = sum_s exp(L_s - L) O_s          (arXiv:2502.17421, hybrid tree attention)

Parts are added in the order of s, always. A part without keys has L_s = -inf; its O_s is never read, it changes no bit
of the result, and so appending empty parts changes nothing either. A learned sink is a logit without a value: it takes
mass exp(sink) from every query of its head and is counted once, after the parts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..backend import choose, launching_on

__all__ = ["lse_merge"]


def lse_merge(
    outs: Tensor,
    lse: Tensor,
    sinks: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp over all parts, without a host sync.

    Args:
        outs: [S, B, H, M, D] float32, S >= 1 (the reference also takes float64).
        lse: [S, B, H, M] in the dtype of `outs`, natural logarithms of sums of exp(scaled logit); -inf marks an empty
            part. Libraries that return base-2 values need a factor ln 2.
        sinks: [H] logits of slots without a value, or None.
        dtype: of the output; None is the dtype of `outs`.
        impl: see `mediaspec.kernels.backend`.

    Returns:
        ([B, H, M, D] output, [B, H, M] log-sum-exp in the dtype of `lse`, the sink included). Where every part is
        empty the output is 0 and the log-sum-exp that of the sink, or -inf.

    Raises:
        ValueError: shapes or dtypes do not fit.

    Example:
        >>> outs = torch.tensor([1.0, 5.0, float("nan")]).view(3, 1, 1, 1, 1)
        >>> lse = torch.tensor([0.0, 0.0, -torch.inf]).view(3, 1, 1, 1)
        >>> out, joint = lse_merge(outs, lse)
        >>> out.item(), round(joint.item(), 4)
        (3.0, 0.6931)
    """
    if outs.dim() != 5 or outs.shape[0] < 1 or lse.shape != outs.shape[:-1]:
        raise ValueError(
            f"outs have shape {tuple(outs.shape)} and lse {tuple(lse.shape)}; give [S, B, H, M, D] with S >= 1 and "
            "[S, B, H, M]."
        )
    if outs.dtype not in (torch.float32, torch.float64) or lse.dtype != outs.dtype:
        raise ValueError(
            f"outs are {outs.dtype} and lse {lse.dtype}; keep both in float32 until they are merged: a 16-bit round "
            "trip costs three digits."
        )
    if sinks is not None and sinks.shape != (outs.shape[2],):
        raise ValueError(f"sinks have shape {tuple(sinks.shape)}; give one logit per query head, {[outs.shape[2]]}.")
    if choose("lse_merge", outs, impl) == "triton":
        from .triton import lse_merge as run

        with launching_on(outs):
            return run(outs, lse, sinks, dtype)
    from . import reference

    return reference.lse_merge(outs, lse, sinks, dtype)
