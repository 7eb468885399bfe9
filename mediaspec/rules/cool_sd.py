"""COOL-SD: annealed relaxation of speculative sampling (arXiv:2601.09212), its schedules and a budgeted form.

Accept x at draft position i of a round with f = min(1, omega_i P(x)/Q(x)), resample rejections from Norm([P - Q f]_+).
e_i = sum [Q f - P]_+ is the one-step TV; omega_i <= 1 costs none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from ..core.component import register_to_config
from ..core.law import RESIDUALS
from ..kernels.verify_chain import Residual
from .base import AcceptanceRule, check_choice, check_count
from .budget import omega_for_budget

__all__ = ["SCHEDULES", "CoolSDRule", "omega_schedule"]

SCHEDULES = ("cool", "cool-paper", "front", "uniform", "linear")


def omega_schedule(
    schedule: str, length: int, delta: float = 1.1, nu: float = 0.7, omega_cap: float = 4.0
) -> list[float]:
    """Relaxation factors omega_1 .. omega_length; their mean is delta before clamping.

    Args:
        schedule: one of
            "cool-paper": delta * length * exp(-nu i) / sum_j exp(-nu j), the paper's exponential decay;
            "cool": the same, raised to 1 where it falls below: equal drift bound, strictly longer accepted runs;
            "front": omega_cap for the first positions, a remainder, then 1: the least bound at equal accepted length
                under a cap (rows alike at all positions);
            "uniform": delta everywhere; "linear": proportional to length - i + 1.
        length: nominal draft length L.
        delta: mean factor, > 0; for "front" from 1 to omega_cap.
        nu: decay per position.
        omega_cap: largest factor of "front".

    Example:
        >>> [round(w, 4) for w in omega_schedule("cool", 5)]
        [2.855, 1.4177, 1.0, 1.0, 1.0]
    """
    if schedule == "uniform":
        return [float(delta)] * length
    if schedule == "front":
        strength = length * (delta - 1) / (omega_cap - 1)
        return [1 + (omega_cap - 1) * min(1.0, max(0.0, strength - i)) for i in range(length)]
    weights = [math.exp(-nu * i) if schedule != "linear" else float(length - i) for i in range(length)]
    omega = [delta * length * weight / sum(weights) for weight in weights]
    return [max(value, 1.0) for value in omega] if schedule == "cool" else omega


class CoolSDRule(AcceptanceRule):
    """Annealed relaxed acceptance with a metered drift.

    Factors belong to positions counted from the start of the round and stay those of the nominal length when a draft
    is cut short; behind the nominal length they are 1 ("uniform": delta). In trees they belong to depths.

    Args:
        schedule: "cool" (clamped at 1, default), "cool-paper", "front", "uniform" or "linear"; see `omega_schedule`.
        delta: mean relaxation; 1.1 and 2 are the paper's settings. Larger is faster and drifts more.
        nu: exponential decay per position.
        length: nominal draft length L the schedule is made for.
        eps: TV budget per tested position instead of a schedule: every row gets the largest omega >= 1 whose one-step
            TV is at most eps, so a round drifts by at most eps times its tested positions, whatever model and draft.
            0 is lossless. schedule, delta and nu are not used with it.
        omega: explicit factors >= 0, first position first, instead of a schedule; behind them 1.
        omega_cap: largest factor: the plateau of "front" (4.0 if None) and, with eps, a limit on m/P per token.
        residual: "gstar" ([P - a]_+) or "band" (same TV, least KL, Hellinger and chi-square distance).
        ledger: "tv", or "hellinger" for the sharper bound at the cost of a second pass over the rows.

    Raises:
        ValueError: a setting out of range.

    Example:
        >>> CoolSDRule(delta=1.1).guarantee, CoolSDRule(eps=0.0).guarantee
        ('bounded-drift', 'exact-law')
    """

    name = "cool_sd"

    @register_to_config
    def __init__(
        self,
        schedule: str = "cool",
        delta: float = 1.1,
        nu: float = 0.7,
        length: int = 5,
        eps: float | None = None,
        omega: Sequence[float] | None = None,
        omega_cap: float | None = None,
        residual: str = "gstar",
        ledger: str = "tv",
    ) -> None:
        check_choice("schedule", schedule, SCHEDULES)
        check_choice("residual", residual, RESIDUALS)
        check_choice("ledger", ledger, ("tv", "hellinger"))
        if not (math.isfinite(delta) and delta > 0):
            raise ValueError(f"delta must be a finite number above 0, got {delta!r}; write delta=1.1, or 1.0 for none")
        if not (math.isfinite(nu) and nu >= 0):
            raise ValueError(f"nu must be a finite number >= 0, got {nu!r}; write nu=0.7")
        check_count("length", length, 5)
        if omega_cap is not None and not omega_cap > 1:
            raise ValueError(f"omega_cap must be above 1 (no relaxation), got {omega_cap!r}; write omega_cap=4.0")
        if eps is not None and not 0 <= eps <= 1:
            raise ValueError(f"eps is a total variation and must be in [0, 1], got {eps!r}; write eps=0.05")
        if omega is not None and (eps is not None or not omega or not all(0 <= w < math.inf for w in omega)):
            raise ValueError(f"omega takes finite factors >= 0 and no eps, got {omega!r}; write omega=[2.0, 1.5]")
        cap = 4.0 if omega_cap is None else float(omega_cap)
        if eps is None and omega is None and schedule == "front" and not 1 <= delta <= cap:
            raise ValueError(f'schedule="front" needs 1 <= delta <= {cap} (its cap), got {delta!r}; write delta=1.1')
        self.eps, self.omega_cap = eps, omega_cap
        self.residual, self.ledger = cast(Residual, residual), ledger
        factors = omega_schedule(schedule, length, delta, nu, cap) if omega is None else omega
        self.omega = [float(factor) for factor in factors]
        self.behind = float(delta) if omega is None and schedule == "uniform" else 1.0
        self.lossless = eps == 0 if eps is not None else max(self._factors(length + 1)) <= 1
        # Raising P(x) shrinks the others, which may tighten a row's budgeted omega faster than P(x) grows.
        self.monotone = eps is None

    @property
    def guarantee(self) -> str:
        return "exact-law" if self.lossless else "bounded-drift"

    def linear(self, length: int) -> tuple[Tensor, Tensor] | None:
        if self.eps is not None and not self.lossless:
            return None
        factors = [1.0] * length if self.lossless and self.eps is not None else self._factors(length)
        return torch.tensor(factors, dtype=torch.float64), torch.zeros(length)

    def accepted_mass(self, p: Tensor, q: Tensor, first: int = 0) -> Tensor:
        if self.eps is None or self.lossless:
            return super().accepted_mass(p, q, first)
        # At most 1e30: then P = 0 stays rejected, and a P too small for a finite Q/P adds below 1e-8 to the drift.
        largest = 1e30 if self.omega_cap is None else self.omega_cap
        omega = omega_for_budget(p, q, self.eps).clamp(max=largest)
        return torch.minimum(q, omega[..., None] * p)

    def bound(self, length: int) -> Tensor:
        """eps where a budget is set; else 1 - 1/omega: m <= omega P, and e <= min((omega - 1) s, 1 - s) with s the
        target's mass on the surplus tokens."""
        if self.eps is not None:
            cap = math.inf if self.omega_cap is None else self.omega_cap
            return torch.full((length,), min(self.eps, 1 - 1 / cap))
        return torch.tensor([1 - 1 / max(1.0, value) for value in self._factors(length)])

    def _factors(self, length: int) -> list[float]:
        return (self.omega + [self.behind] * max(0, length - len(self.omega)))[:length]
