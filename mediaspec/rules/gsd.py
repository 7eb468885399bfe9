"""Grouped speculative decoding: accept by the probability ratio of a group of similar tokens (GSD, ICCV 2025).

The group of x is the window of `group` ranks around it in the order of P, less the members whose probability or, with
a codebook, whose vector is too far from that of x. x is accepted with min(1, P(group)/Q(group)).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..core.component import register_to_config
from .base import AcceptanceRule, check_choice, check_count

__all__ = ["GSDRule"]


class GSDRule(AcceptanceRule):
    """Acceptance by group ratio; rejections resample from Norm([P - a]_+), the residual of least TV.

    The group depends on x, so that no bound holds in advance and a token of target probability 0 can be emitted: the
    drift is measured, not limited.

    Args:
        group: G >= 1 ranks in a group; 14 in released code, 3 to 50 in the paper. 1 is the exact rule.
        p_threshold: members differ from P(x) by less than this.
        distance_threshold: members' vectors have less than this squared distance from that of x; None: not looked at.
            Needs the target's codebook (`prepare(target)` or `set_codebook`); 0.5 in released code.
        ledger: "tv" or "hellinger".

    Raises:
        ValueError: a setting out of range, or verification before a needed codebook is known.

    Example:
        >>> p, q = torch.tensor([[.4, .3, .2, .1]]), torch.tensor([[.1, .2, .3, .4]])
        >>> GSDRule(group=2).accept_prob(p, q)[0, 3]        # the group of the rarest token is itself
        tensor(0.2500)
    """

    name = "gsd"
    permutation_equivariant = False  # equal probabilities are ranked by token id
    monotone = False  # a token that changes rank changes its group

    @register_to_config
    def __init__(
        self,
        group: int = 14,
        p_threshold: float = 0.15,
        distance_threshold: float | None = None,
        ledger: str = "tv",
    ) -> None:
        check_choice("ledger", ledger, ("tv", "hellinger"))
        check_count("group", group, 14)
        if not 0 < p_threshold <= 1:
            raise ValueError(f"p_threshold must be in (0, 1], got {p_threshold!r}; write p_threshold=0.15")
        if distance_threshold is not None and not distance_threshold > 0:
            raise ValueError(f"distance_threshold must be above 0 or None, got {distance_threshold!r}; write 0.5")
        self.group, self.p_threshold, self.distance_threshold = group, p_threshold, distance_threshold
        self.ledger = ledger
        self.lossless = group == 1
        self.may_leave_support = group > 1
        self.codebook: Tensor | None = None

    def set_codebook(self, codebook: Tensor) -> None:
        """codebook [V, D]: row v is the vector that token v stands for."""
        self.codebook = codebook.detach().float()

    def prepare(self, target: object) -> None:
        if self.distance_threshold is None:
            return
        codebook = getattr(target, "codebook", None)
        if not isinstance(codebook, Tensor):
            raise ValueError(
                f"distance_threshold needs the codebook, and {type(target).__name__} does not show one as `codebook`; "
                f"call rule.set_codebook(vectors [V, D]) or write distance_threshold=None"
            )
        self.set_codebook(codebook)

    def accepted_mass(self, p: Tensor, q: Tensor, first: int = 0) -> Tensor:
        sorted_p, order = p.sort(dim=-1, stable=True)
        sorted_q = q.gather(-1, order)
        before, behind = self.group // 2, self.group - self.group // 2 - 1
        window_p = pad(sorted_p, (before, behind)).unfold(-1, self.group, 1)  # [..., V, G], beyond the ends 0
        window_q = pad(sorted_q, (before, behind)).unfold(-1, self.group, 1)
        keep = (window_p - sorted_p[..., None]).abs() < self.p_threshold
        if self.distance_threshold is not None:
            keep = keep & self._near(order, before, behind, self.distance_threshold)
        keep[..., before] = True
        total_p, total_q = (window_p * keep).sum(-1), (window_q * keep).sum(-1)
        ratio = torch.where(total_q > 0, total_p / total_q, 0.0).clamp(max=1)
        return torch.zeros_like(q).scatter(-1, order, sorted_q * ratio)

    def _near(self, order: Tensor, before: int, behind: int, threshold: float) -> Tensor:
        """[..., V, G] bool: members whose vector is close to that of the window's centre, one offset at a time."""
        if self.codebook is None:
            raise ValueError("GSDRule has no codebook yet; call rule.set_codebook(vectors [V, D]) first")
        if self.codebook.device != order.device:
            self.codebook = self.codebook.to(order.device)
        vectors = self.codebook[order]
        length = order.shape[-1]
        rank = torch.arange(length, device=order.device)
        near = []
        for offset in range(-before, behind + 1):
            member = vectors.index_select(-2, (rank + offset).clamp(0, length - 1))
            near.append((member - vectors).square().sum(-1) < threshold)
        return torch.stack(near, -1)
