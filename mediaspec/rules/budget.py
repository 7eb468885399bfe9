"""The largest relaxation that keeps the one-step TV of a row within a budget, solved exactly."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["omega_for_budget"]


def omega_for_budget(p: Tensor, q: Tensor, eps: float | Tensor) -> Tensor:
    """The largest omega >= 1 with e(omega) <= eps, for every row.

    e(omega) = sum over Q > P of min(Q - P, (omega - 1) P) is the one-step TV of f = min(1, omega P/Q). It is
    increasing, concave and linear between the values of Q/P, so one sort of Q/P gives omega in closed form.

    Args:
        p: [..., V] target probabilities.
        q: [..., V] draft probabilities.
        eps: TV budget, a number or [...].

    Returns:
        [...], inf where accepting every draft token of positive target probability stays within the budget.

    Example:
        >>> p, q = torch.tensor([.4, .3, .2, .1]), torch.tensor([.1, .2, .3, .4])
        >>> omega_for_budget(p, q, 0.15)
        tensor(1.5000)
    """
    surplus = (q > p) & (p > 0)
    ratio = torch.where(surplus, q / p, torch.inf)
    ratio, order = ratio.sort(-1)
    inside = ratio.isfinite()
    mass = torch.where(inside, p.gather(-1, order), 0.0)
    gap = torch.where(inside, (q - p).gather(-1, order), 0.0)
    filled = gap.cumsum(-1) - gap  # tokens before k have reached Q - P and cost no more
    open_mass = mass.flip(-1).cumsum(-1).flip(-1)  # tokens from k on still grow with omega
    budget = torch.as_tensor(eps, dtype=p.dtype, device=p.device)
    budget = budget.expand(p.shape[:-1])[..., None]
    # e at the right end of segment k; the first one that exceeds the budget holds the solution.
    at_break = filled + (torch.where(inside, ratio, 1.0) - 1) * open_mass
    beyond = inside & (at_break > budget)
    k = beyond.to(torch.uint8).argmax(-1, keepdim=True)
    rise = (budget - filled.gather(-1, k)).clamp(min=0)
    omega = 1 + rise / open_mass.gather(-1, k).clamp(min=torch.finfo(p.dtype).tiny)
    return torch.where(beyond.any(-1), omega[..., 0], torch.inf)
