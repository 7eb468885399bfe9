"""Standard speculative sampling: accept x with min(1, P(x)/Q(x)), else resample from [P - Q]_+ (arXiv:2211.17192)."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import AcceptanceRule

__all__ = ["ExactRule"]


class ExactRule(AcceptanceRule):
    """The lossless rule for sampled drafts: the emitted law is exactly the target's.

    Accepts 1 - TV(P, Q) of the drafted tokens, the most any lossless rule can.

    Example:
        >>> ExactRule().guarantee
        'exact-law'
    """

    name = "exact"
    lossless = True
    ledger = "none"

    def linear(self, length: int) -> tuple[Tensor, Tensor]:
        return torch.ones(length), torch.zeros(length)
