"""What one draft position emits: residual laws, the emitted law and its distances from the target's.

P is the target row and Q the draft row (processed probabilities), a(x) = Q(x) f(x) <= Q(x) the accepted mass of an
acceptance probability f, R = 1 - sum(a) the rejection probability, G the law resampled from after a rejection and
m = a + R G the emitted law. Everything works on the last dimension; leading dimensions are free.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.verify_chain.reference import TINY, band_residual

__all__ = ["RESIDUALS", "emitted_law", "one_step_drift", "point_mass", "residual_weights", "squared_hellinger"]

RESIDUALS = ("gstar", "band")


def point_mass(tokens: Tensor, vocab_size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """[...] int64 -> [..., V]: the law of a deterministic draft. Ids outside the vocabulary (padding) give zeros."""
    ids = torch.arange(vocab_size, device=tokens.device)
    return (tokens[..., None] == ids).to(dtype)


def one_step_drift(p: Tensor, a: Tensor) -> Tensor:
    """[...]: sum [a - P]_+, the least TV(m, P) over all resampling laws, reached by both residuals here
    (arXiv:2601.09212, theorem 2)."""
    return (a - p).clamp(min=0).sum(-1)


def residual_weights(p: Tensor, a: Tensor, kind: str = "gstar") -> Tensor:
    """Weights (not normalised) of the law to resample from after a rejection.

    Args:
        p: [..., V] target probabilities.
        a: [..., V] accepted mass.
        kind: "gstar" gives [P - a]_+ (arXiv:2601.09212, theorem 2). "band" gives [cP - a]_+ with c in (0, 1] fixed by
            its sum R; same TV, and the least value of every f-divergence between m and P.

    Returns:
        [..., V], and P itself where nothing is left (then R = 0 up to round-off and the row is never used).
    """
    if kind not in RESIDUALS:
        raise ValueError(f'residual must be one of {RESIDUALS}, got {kind!r}; write residual="gstar"')
    weights = band_residual(p, a) if kind == "band" else (p - a).clamp(min=0)
    return torch.where(weights.sum(-1, keepdim=True) > TINY, weights, p)


def emitted_law(p: Tensor, a: Tensor, kind: str = "gstar") -> Tensor:
    """[..., V]: m = a + R G, the law of the token a tested position emits."""
    weights = residual_weights(p, a, kind)
    rejected = (1 - a.sum(-1, keepdim=True)).clamp(min=0)
    return a + rejected * weights / weights.sum(-1, keepdim=True).clamp(min=TINY)


def squared_hellinger(p: Tensor, m: Tensor) -> Tensor:
    """[...]: 1 - sum sqrt(m P), as half the squared distance of the roots: equal rows give 0 exactly."""
    return 0.5 * (p.sqrt() - m.sqrt()).square().sum(-1)
