"""How lazy a layer is, both ways: its share of attention on kept keys, and what its output loses without the others.

Letters: B rows, H query heads, Hkv key heads, w judging queries, C slots, D head size, M model width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .lazy_ratio import kept_keys, lazy_ratio
from .logits import LogitForm, strip_positions
from .output_error import LayerSight, output_error, strip_output
from .strip import strip_lse

__all__ = ["JUDGES", "Laziness", "score", "weigh"]

JUDGES = ("output", "mass")
TILE = 1024  # keys per step of the sums: 9 heads and 32 rows make 1.2 MB


@dataclass(frozen=True)
class Laziness:
    """Of one layer.

    Args:
        ratio: [B, Hkv] `lazy_ratio`; error: [B] `output_error`, None where the layer is judged by mass.
    """

    ratio: Tensor
    error: Tensor | None


def weigh(
    judge: str,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    sink: int,
    recent: int,
    form: LogitForm,
    sight: LayerSight | None = None,
    residual: Tensor | None = None,
) -> Laziness:
    """Weighs what a layer would keep by the last w queries of every row.

    Args:
        judge: "output", or "mass" for the ratio alone.
        queries: [B, H, w, D], right-aligned; keys, values: [B, Hkv, C, D], position 0 first.
        lengths: [B] int64, at most C.
        sink, recent: kept keys.
        form: of the logits; sight, residual [B, w, M]: as for `output_error`.
    """
    lse = strip_lse(queries, keys, lengths, form, TILE)
    kept, at = kept_keys(keys, lengths, sink, recent)
    ratio = lazy_ratio(queries, kept, at, lse, lengths, form)
    if judge == "mass":
        return Laziness(ratio, None)
    order = torch.arange(keys.shape[2], device=keys.device)[None]
    full = strip_output(queries, keys, values, order, lse, lengths, form, TILE)
    logits = form.tile(queries, kept, strip_positions(lengths, queries.shape[2]), at[:, None])
    own = form.with_sinks(logits.logsumexp(-1)).clamp(min=-1e30)  # a query that sees no kept key gets nothing
    few = strip_output(queries, kept, kept_keys(values, lengths, sink, recent)[0], at, own, lengths, form, TILE)
    return Laziness(ratio, output_error(full, few, lengths, sight, residual))


def score(ratio: float, error: float | None) -> float:
    """One number that is larger for lazier layers: the ratio, or minus the logarithm of the error."""
    return ratio if error is None else -math.log(max(error, 1e-9))
