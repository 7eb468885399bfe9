"""Chain verification in plain torch.

On the CPU it stands in every decoding round, so each operation has to earn its 5 us.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ..philox import ACCEPT, TARGET
from ..philox import reference as philox
from ..sample import Warp
from ..sample.reference import draw, probabilities
from . import ChainVerdict

__all__ = ["TINY", "band_residual", "verify_chain"]

TINY = 1e-9
"""Residual mass at or below which the target's law is emitted instead: such a sum is rounding, not probability."""


@functools.lru_cache(maxsize=64)
def _arange(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device)


@functools.lru_cache(maxsize=64)
def _zeros(rows: int, count: int, device: torch.device) -> Tensor:
    """Drift that nobody writes to."""
    return torch.zeros(rows, count, device=device)


def band_residual(p: Tensor, accepted: Tensor) -> Tensor:
    """[..., V] residual weights [c p - a]_+ with c in (0, 1] fixed by their sum being 1 - sum(a).

    The emitted law p * clip(q / p, c, scale) keeps the smallest possible TV and minimises every f-divergence from p.
    The sum is a convex piecewise linear function of c, the maximum over token sets of c p(set) - a(set); so c is the
    smallest of (R + a(set)) / p(set) over the sets of lowest a / p.
    """
    order = torch.where(p > 0, accepted / p, float("inf")).argsort(-1)
    mass_p = p.gather(-1, order).cumsum(-1).clamp_(min=torch.finfo(torch.float32).tiny)
    mass_a = accepted.gather(-1, order).cumsum(-1)
    rejected = (1 - mass_a[..., -1:]).clamp_(min=0)
    c = ((rejected + mass_a) / mass_p).amin(-1, keepdim=True)
    return (c * p - accepted).clamp_(min=0)


def _count(ok: Tensor, lengths: Tensor) -> Tensor:
    """[B, K] bool -> [B] int64: the run of true values from the left, at most `lengths`."""
    return torch.minimum(ok.cumprod(1).sum(1), lengths)


def _at(x: Tensor, every: Tensor, n: Tensor) -> Tensor:
    """[B, N, V], [B] -> [B, V]: row n[b] of every b."""
    return x[0].index_select(0, n) if len(n) == 1 else x[every, n]


def verify_chain(
    target_logits: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    warp: Warp,
    draft_probs: Tensor | None,
    seeds: Tensor,
    start: Tensor,
    scale: Tensor | None,
    offset: Tensor | None,
    residual: str,
    guidance: Tensor | None,
    allowed: Tensor | None,
    forced: Tensor | None,
    noise: Tensor | None,
    uniforms: Tensor | None,
    mode: str,
    need_choices: bool,
    need_probs: bool,
) -> ChainVerdict:
    """See `mediaspec.kernels.verify_chain.verify_chain`."""
    batch, length = tokens.shape
    vocab = target_logits.shape[-1]
    device = tokens.device
    every = _arange(batch, device)
    p = probabilities(target_logits, warp, guidance, allowed, forced)
    target_probs = p if need_probs else None

    choices = None
    if mode == "match" or need_choices:
        if noise is None:
            noise = philox.exponential(seeds, start[:, None] + _arange(length + 1, device), vocab, TARGET)
        choices = draw(p, noise)
    if mode == "match":
        assert choices is not None
        n = _count(choices[:, :length] == tokens, lengths)
        next_token = choices[every, n]
        n = n.masked_fill(next_token < 0, 0)
        return ChainVerdict(n, next_token, _zeros(batch, length, device), choices, target_probs)

    if uniforms is None:
        uniforms = philox.uniform(seeds, start[:, None] + _arange(length, device), ACCEPT)
    drafted = tokens[..., None]
    pt = p[:, :length].gather(-1, drafted)[..., 0]
    bound = pt if scale is None else scale * pt
    if draft_probs is None:
        if offset is not None:
            bound = bound + offset
        ok = uniforms < bound
    else:
        q = draft_probs
        qt = q.gather(-1, drafted)[..., 0]
        if offset is not None:
            bound = bound + offset * qt
        ok = uniforms * qt < bound
    if batch == 1 and forced is None and device.type == "cpu":
        row = None if draft_probs is None else draft_probs[0]
        first, weights, drift = _one_row(p[0], tokens, lengths, row, bound, ok, scale, offset, residual)
        if noise is None:
            en = philox.exponential(seeds, start[:, None] + first, vocab, TARGET)[0, 0]
        else:
            en = noise[0, first]
        next_token = draw(weights, en)[None]
        if int(next_token) < 0:
            first, drift = 0, _zeros(1, length, device)
        return ChainVerdict(torch.full_like(lengths, first), next_token, drift, choices, target_probs)
    if forced is not None:
        free = forced[:, :length] < 0
        ok = torch.where(free, ok, forced[:, :length] == tokens)
    n = _count(ok, lengths)

    # Residual at the first rejected row m; where nothing was rejected it is replaced by the bonus law below.
    m = n.clamp(max=length - 1)
    pn = _at(p, every, n)
    relaxed = scale is not None or offset is not None
    if draft_probs is None:
        taken = bound.clamp(max=1)
        excess = (taken - pt).clamp_(min=0) if relaxed else None
        an = torch.zeros_like(pn).scatter_(-1, tokens[every, m, None], taken[every, m, None])
    elif relaxed:
        a = p[:, :length] if scale is None else p[:, :length] * scale[..., None]
        if offset is not None:
            a = a + offset[..., None] * q
        a = torch.minimum(a, q)
        excess = (a - p[:, :length]).clamp_(min=0).sum(-1)
        an = _at(a, every, m)
    else:
        excess = None
        an = _at(q, every, m)
        an = torch.minimum(an, pn) if residual == "band" else an
    w = band_residual(pn, an) if residual == "band" else (pn - an).clamp_(min=0)
    usable = (w.sum(-1) > TINY) & (n < lengths)
    w = torch.where(usable[:, None], w, pn)
    if noise is None:
        en = philox.exponential(seeds, (start + n)[:, None], vocab, TARGET)[:, 0]
    else:
        en = _at(noise, every, n)
    next_token = draw(w, en)

    faulty = next_token < 0
    if excess is None:
        drift = _zeros(batch, length, device)
    else:
        last = torch.minimum(n, lengths - 1).masked_fill(faulty, -1)
        tested = _arange(length, device) <= last[:, None]
        if forced is not None:
            tested = tested & free
        drift = torch.where(tested, excess, 0.0)
    return ChainVerdict(n.masked_fill(faulty, 0), next_token, drift, choices, target_probs)


def _one_row(
    p: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    q: Tensor | None,
    bound: Tensor,
    ok: Tensor,
    scale: Tensor | None,
    offset: Tensor | None,
    residual: str,
) -> tuple[int, Tensor, Tensor]:
    """The rest of `verify_chain` for one row on the CPU, where the host reads for free: half the operations.

    Args:
        p: [K+1, V] target law; q: [K, V] draft law or None for point masses.
        bound, ok: [1, K] accepted mass of every drafted token (over q where there is one) and the test's outcome;
            the others as in `verify_chain`.

    Returns:
        The number of accepted tokens, weights [V] of the next one, drift [1, K].
    """
    limit, length = int(lengths), tokens.shape[1]
    passed = ok[0].tolist()
    n = 0
    while n < limit and passed[n]:
        n += 1
    rows = slice(0, min(n + 1, limit))
    s = 1.0 if scale is None else scale.reshape(-1, length)[0, rows, None]
    o = 0.0 if offset is None else offset.reshape(-1, length)[0, rows, None]
    relaxed = scale is not None or offset is not None
    drift, weights = _zeros(1, length, p.device), p[n]
    if relaxed and limit:
        if q is None:
            taken = bound[:, rows].clamp(max=1)
            excess = (taken - p[rows].gather(1, tokens[0, rows, None])[None, :, 0]).clamp_(min=0)
        else:
            a = s * p[rows]
            a = torch.minimum(a if offset is None else a + o * q[rows], q[rows])
            excess = (a - p[rows]).clamp_(min=0).sum(-1)[None]
        drift = torch.zeros_like(drift)
        drift[:, rows] = excess
    if n < limit:
        if q is None:
            accepted = torch.zeros_like(weights).scatter_(0, tokens[0, n, None], bound[0, n, None].clamp(max=1))
        elif relaxed:
            accepted = a[n]
        else:
            accepted = torch.minimum(q[n], weights) if residual == "band" else q[n]
        rest = band_residual(weights, accepted) if residual == "band" else (weights - accepted).clamp_(min=0)
        weights = rest if float(rest.sum()) > TINY else weights
    return n, weights, drift
