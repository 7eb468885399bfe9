"""Attention of a video in which every query sees its own frame less: TiARA's bias without an L x L matrix.

B rows, H heads, L tokens, D head size, F frames of P tokens. f(i) is the frame of token i; text has none:

    s_ij = scale q_i . k_j  -  delta_i [j in S_i]        O_i = sum_j softmax_j(s_ij) v_j

    "frame"           S_i = video tokens of frame f(i)
    "self_token"      S_i = {i}
    "neighbourhood"   S_i = tokens of frame f(i) at most `radius` rows and columns away

A text query has no set: it is plain. The bias before the softmax equals scaling the masses of S_i by e^-delta_i after
it, row by row, for any set: with m_i the mass of S_i all weights are divided by 1 - m_i (1 - e^-delta_i), and inside
S_i and outside of it the proportions stay. For P = 1 without text this is TiARA (arXiv:2412.17254) on a temporal row.

Six routes compute the same numbers (`ROUTES`); `choose_route` names one and says why.

| route | how | extra work | where |
|---|---|---|---|
| dense | explicit logits, in blocks of queries | no flash kernel | everywhere, differentiable |
| flex | FlexAttention score_mod | compiles per shape | CUDA, head sizes from 16 |
| columns | frame codes appended to q and k | (D + F) / D | "frame"; any kernel, differentiable |
| split | own frame and rest, merged by log-sum-exp | none, 2F + 2 calls | "frame"; any delta |
| subtract | plain pass, own block taken out again | 1 / F, or (2r + 1)^2 products a query | c <= 0.8 |
| triton | flash kernel that knows frames | about none | CUDA, D <= 128 |
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..backend import choose, launching_on
from .columns import frame_columns, with_columns
from .layout import FrameLayout
from .subtract import MOST

__all__ = ["MODES", "ROUTES", "FrameLayout", "Route", "choose_route", "frame_columns", "framed_attention"]

ROUTES = ("dense", "flex", "columns", "split", "subtract", "triton")
MODES = ("frame", "self_token", "neighbourhood")

SAFE_DELTA = -math.log(1 - MOST)
"""ln 5: c = (1 - e^-delta) m <= 0.8 whatever the mass m is, so nothing has to be read back from the device."""

WIDEST = 128
"""Largest head size of the Triton kernel: two stages of 64 keys and values fit the 99 KB of every sm_80 device."""


@dataclass(frozen=True)
class Route:
    """What computes a call, and why.

    Args:
        name: one of `ROUTES`.
        reason: one sentence.
        certain: True where c <= 0.8 is known before the call; the route "subtract" looks at its result otherwise.
    """

    name: str
    reason: str
    certain: bool = True


def choose_route(
    q: Tensor,
    layout: FrameLayout,
    *,
    mode: str = "frame",
    route: str = "auto",
    delta_limit: float | None = None,
    needs_grad: bool = False,
) -> Route:
    """Names the route of a call, without touching the device.

    `MEDIASPEC_KERNELS=reference` keeps the automatic choice from the Triton kernel, as everywhere.

    Args:
        q: [B, H, L, D]; its device, dtype and D decide.
        layout, mode: see `framed_attention`.
        route: one of `ROUTES`, or "auto".
        delta_limit: a number that no delta exceeds, if the host knows one. Up to ln 5 = 1.609 the cheap route is safe.
        needs_grad: a gradient is wanted; log-sum-exps have none.

    Raises:
        ValueError: an unknown route or mode, or an explicit route that cannot run, with the reason.

    Example:
        >>> q = torch.zeros(1, 2, 12, 8)
        >>> choose_route(q, FrameLayout(3, 4), delta_limit=0.7).name
        'subtract'
        >>> choose_route(q, FrameLayout(3, 4), delta_limit=6.0).name
        'split'
    """
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} is unknown; write one of {MODES}.")
    safe = delta_limit is not None and delta_limit <= SAFE_DELTA
    if route != "auto":
        reason = _obstacle(route, q, layout, mode, needs_grad)
        if reason is not None:
            raise ValueError(f"route={route!r} cannot run: {reason}; write route='auto' or another of {ROUTES}.")
        return Route(route, "asked for", safe)
    if needs_grad:
        name = "columns" if mode == "frame" else "dense"
        return Route(name, "a gradient is wanted and a log-sum-exp has none")
    if safe:
        return Route("subtract", f"no delta exceeds {delta_limit:g}, so c <= {MOST}: a plain pass and a small one")
    if choose("tiara_bias", q) == "triton" and _obstacle("triton", q, layout, mode, False) is None:
        return Route("triton", f"c may exceed {MOST}, and the kernel runs on this device")
    if mode == "frame":
        return Route("split", f"c may exceed {MOST}: parts merged by log-sum-exp are stable for every delta")
    if q.is_cuda and _obstacle("flex", q, layout, mode, False) is None:
        return Route("flex", f"c may exceed {MOST}, mode {mode!r}, and Triton cannot run")
    return Route("dense", f"c may exceed {MOST} in mode {mode!r}, and no kernel for it runs on this device")


def _obstacle(route: str, q: Tensor, layout: FrameLayout, mode: str, needs_grad: bool) -> str | None:
    """Why a route cannot run, None where it can."""
    if route not in ROUTES:
        return f"it is unknown, known are {ROUTES}"
    if route in ("columns", "split") and mode != "frame":
        return f"it knows whole frames and the mode is {mode!r}"
    if needs_grad and route in ("split", "subtract", "triton"):
        return "it gives no gradient; wrap the call in torch.no_grad(), or write 'columns' or 'dense'"
    if route == "triton":
        if q.dtype == torch.float64:
            return "it has no float64"
        if q.shape[-1] > WIDEST:
            return f"head size {q.shape[-1]} exceeds {WIDEST}"
        try:
            choose("tiara_bias", q, "triton")
        except ValueError as error:
            return str(error)
    if route == "flex" and not q.is_cuda:
        return "FlexAttention is compiled for CUDA tensors here"
    return None


def framed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    delta: Tensor,
    layout: FrameLayout,
    *,
    mode: str = "frame",
    radius: int = 1,
    scale: float | None = None,
    key_mask: Tensor | None = None,
    delta_limit: float | None = None,
    route: str = "auto",
) -> Tensor:
    """Attention with the bias -delta_i on the keys of every video query's own set.

    No route reads from the device where `delta_limit` is at most ln 5. On the CPU the limit is read from `delta` if it
    is not given. An explicit "subtract" beyond the limit looks at c once (a host sync) and repeats the call by another
    route where it exceeds 0.8.

    Args:
        q, k, v: [B, H, L, D] of one floating dtype, rotated; strides are free but for a dense last axis.
        delta: [B or 1, H or 1, F], one for each frame, or [B or 1, H or 1, L], one for each token, whose entries at
            text are not read; >= 0, any floating dtype.
        layout: where the frames stand.
        mode: "frame", "self_token" or "neighbourhood".
        radius: of "neighbourhood", >= 0.
        scale: factor on the products, 1 / sqrt(D) by default.
        key_mask: [B, L] bool, False at keys that nobody sees (padded text); video keys are seen.
        delta_limit, route: see `choose_route`.

    Returns:
        [B, H, L, D] in the dtype of q.

    Raises:
        ValueError: shapes that do not fit, an unknown mode or route, a route that cannot run.

    Example:
        >>> q = torch.zeros(1, 1, 3, 4); v = torch.arange(3.0).view(1, 1, 3, 1).expand(1, 1, 3, 4)
        >>> delta = torch.full((1, 1, 3), math.log(2))           # own frame: half of the others' weight
        >>> out = framed_attention(q, q, v, delta, FrameLayout(3, 1))
        >>> [round(value, 4) for value in out[0, 0, :, 0].tolist()]
        [1.2, 1.0, 0.8]
    """
    _check(q, k, v, delta, layout, mode, radius, key_mask)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, delta))
    if delta_limit is None and delta.device.type == "cpu" and not torch.compiler.is_compiling():
        delta_limit = float(delta.detach().max())
    chosen = choose_route(q, layout, mode=mode, route=route, delta_limit=delta_limit, needs_grad=needs_grad)
    name = chosen.name
    if name == "subtract":
        from .subtract import subtract_frame, subtract_near

        if mode == "frame":
            out, excess = subtract_frame(q, k, v, delta, layout, scale, key_mask)
        else:
            reach = 0 if mode == "self_token" else radius
            out, excess = subtract_near(q, k, v, delta, layout, reach, scale, key_mask)
        if chosen.certain or not bool((excess > MOST).any()):
            return out
        name = choose_route(q, layout, mode=mode, delta_limit=math.inf).name
    if name == "columns":
        return with_columns(q, k, v, delta, layout, scale, key_mask)
    if name == "split":
        from .split import split

        return split(q, k, v, delta, layout, scale, key_mask)
    arguments = (q, k, v, delta, layout, mode, radius, scale, key_mask)
    if name == "triton":
        from .triton import framed_attention as run

        with launching_on(q):
            return run(*arguments)
    if name == "flex":
        from .flex import with_flex

        return with_flex(*arguments)
    from . import reference

    return reference.dense(*arguments)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    delta: Tensor,
    layout: FrameLayout,
    mode: str,
    radius: int,
    key_mask: Tensor | None,
) -> None:
    if q.dim() != 4 or q.shape != k.shape or q.shape != v.shape:
        raise ValueError(
            f"q has shape {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}; give three times [B, H, L, D]."
        )
    if q.dtype != k.dtype or q.dtype != v.dtype or not q.is_floating_point():
        raise ValueError(f"q is {q.dtype}, k {k.dtype}, v {v.dtype}; give one floating dtype.")
    batch, heads, length, _ = q.shape
    if layout.stop > length:
        raise ValueError(
            f"{layout.frames} frames of {layout.tokens} tokens from token {layout.start} on need {layout.stop} tokens "
            f"and the sequence has {length}."
        )
    fits = delta.dim() == 3 and delta.shape[0] in (1, batch) and delta.shape[1] in (1, heads)
    if not fits or delta.shape[2] not in (layout.frames, length):
        raise ValueError(
            f"delta has shape {tuple(delta.shape)}; give [{batch} or 1, {heads} or 1, {layout.frames} frames or "
            f"{length} tokens]."
        )
    if mode == "neighbourhood" and (layout.width is None or radius < 0):
        raise ValueError(
            f"mode='neighbourhood' with radius={radius} and width={layout.width}: give a radius >= 0 and the layout "
            "the width of a frame in tokens."
        )
    if key_mask is not None and (key_mask.dtype != torch.bool or key_mask.shape != (batch, length)):
        raise ValueError(f"key_mask is {key_mask.dtype} {tuple(key_mask.shape)}; give bool {(batch, length)}.")
