"""Shared noise: draft and target draw with the same Gumbel noise, and a draft stays if it is the target's own draw.

Gumbel-max coupling after arXiv:2408.07978: the target's token at a position is argmax(log P + g), the draft's
argmax(log Q + g), with g a function of row seed and absolute position. What is committed depends on target and noise
alone, so it equals plain sampling with the same seed whatever the drafter, draft length or batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .base import AcceptanceRule

__all__ = ["CoupledRule"]


class CoupledRule(AcceptanceRule):
    """Accept iff the drafted token is the target's own draw: the very tokens of plain sampling.

    Accepts sum_x 1 / sum_y max(P(y)/P(x), Q(y)/Q(x)) of the drafted tokens, between (1 - TV)/(1 + TV) and 1 - TV.

    Example:
        >>> CoupledRule().guarantee
        'exact-tokens'
    """

    name = "coupled"
    lossless = True
    coupled = True
    ledger = "none"

    def accepted_mass(self, p: Tensor, q: Tensor, first: int = 0) -> Tensor:
        """Pr(draft = target = x) = 1 / sum_y max(P(y)/P(x), Q(y)/Q(x)), by one sort of P/Q."""
        order = torch.where(q > 0, p / q, torch.inf).argsort(dim=-1, stable=True)
        p_sorted, q_sorted = p.gather(-1, order), q.gather(-1, order)
        # y before x has the smaller P/Q, so Q(y)/Q(x) is the larger ratio; x and those behind it count by P.
        lower = q_sorted.cumsum(-1) - q_sorted
        upper = p_sorted.flip(-1).cumsum(-1).flip(-1)
        total = upper / p_sorted + lower / q_sorted
        a = torch.where((p_sorted > 0) & (q_sorted > 0), 1 / total, 0.0)
        return torch.zeros_like(a).scatter(-1, order, torch.minimum(a, torch.minimum(p_sorted, q_sorted)))
