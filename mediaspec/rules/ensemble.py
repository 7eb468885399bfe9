"""Static ensemble verification: the emitted law is the mixture w P + (1 - w) Q (arXiv:2604.07622)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.component import register_to_config
from .base import AcceptanceRule, check_choice

__all__ = ["EnsembleRule"]


class EnsembleRule(AcceptanceRule):
    """Accept x with min(1, 1 - w + w P(x)/Q(x)); the law emitted at a draft position is w P + (1 - w) Q.

    One-step TV is (1 - w) TV(P, Q). Unlike the omega rules it can emit a token of target probability 0 that the
    drafter likes; use drafters with the target's own mask.

    Args:
        weight: w in [0, 1], the target's share; 1 is the exact rule.
        ledger: "tv" or "hellinger".

    Raises:
        ValueError: weight outside [0, 1].

    Example:
        >>> round(float(EnsembleRule(weight=0.9).bound(1)), 3)
        0.1
    """

    name = "ensemble"

    @register_to_config
    def __init__(self, weight: float = 0.9, ledger: str = "tv") -> None:
        if not 0 <= weight <= 1:
            raise ValueError(f"weight must be in [0, 1] (the target's share), got {weight!r}; write weight=0.9")
        check_choice("ledger", ledger, ("tv", "hellinger"))
        self.weight, self.ledger = float(weight), ledger
        self.lossless = weight == 1
        self.may_leave_support = weight < 1

    @property
    def guarantee(self) -> str:
        return "exact-law" if self.lossless else "bounded-drift"

    def linear(self, length: int) -> tuple[Tensor, Tensor]:
        scale = torch.full((length,), self.weight, dtype=torch.float64)
        return scale, 1 - scale

    def bound(self, length: int) -> Tensor:
        return torch.full((length,), 1 - self.weight)
