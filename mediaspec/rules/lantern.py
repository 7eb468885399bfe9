"""LANTERN and LANTERN++: a token may borrow the target probability of its nearest codes (arXiv:2410.03355).

For a drafted x let c_j be the target mass of its j nearest codes by L2 distance of their vectors, x itself excluded.
With j the most that keeps c_j within a budget, P_rel(x) = P(x) + c_j and x is accepted with min(1, P_rel(x)/Q(x)).
LANTERN's budget is a constant delta, LANTERN++'s is (lam - 1) P(x). Rejections resample from Norm([P - a]_+), which is
Norm([P - Q]_+) here because P_rel >= P: the residual of least TV, where released code has three others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.component import register_to_config
from .base import AcceptanceRule, check_choice, check_count

__all__ = ["LanternRule", "nearest_codes", "relaxed_probability"]

# Numbers of one gathered block [rows, tokens, k]: 64 MiB of float32.
BLOCK = 1 << 24


def nearest_codes(codebook: Tensor, k: int) -> Tensor:
    """[V, D] -> [V, k] int32: the k nearest other codes of every code, nearest first (L2, ties to the lowest id)."""
    vocab = codebook.shape[0]
    vectors = codebook.float()
    rows = max(1, BLOCK // vocab)
    parts = []
    for first in range(0, vocab, rows):
        distance = torch.cdist(vectors[first : first + rows], vectors, compute_mode="donot_use_mm_for_euclid_dist")
        own = torch.arange(first, first + distance.shape[0], device=codebook.device)
        distance[torch.arange(len(own), device=codebook.device), own] = torch.inf
        parts.append(distance.argsort(dim=-1, stable=True)[:, :k].int())
    return torch.cat(parts)


def relaxed_probability(p: Tensor, neighbours: Tensor, budget: Tensor) -> Tensor:
    """P_rel of every token.

    Args:
        p: [R, V] target probabilities.
        neighbours: [V, k] nearest codes, nearest first.
        budget: [R, V] mass a token may borrow.

    Returns:
        [R, V].
    """
    step = max(1, BLOCK // (p.shape[0] * neighbours.shape[1]))
    parts = []
    for first in range(0, p.shape[1], step):
        near = p[:, neighbours[first : first + step].long()].cumsum(-1)
        within = near <= budget[:, first : first + step, None]
        parts.append((near * within).amax(-1))  # c_j grows with j, so the largest one within budget is the last
    return p + torch.cat(parts, 1)


class LanternRule(AcceptanceRule):
    """Acceptance with the borrowed probability of neighbouring codes.

    Needs the target's codebook: `prepare(target)` reads `target.codebook` ([V, D]), or call `set_codebook`. The drift
    and the residual take the relaxed probability of the whole vocabulary, V * k gathers per row.

    Args:
        variant: "lantern" (budget delta) or "lantern++" (budget (lam - 1) P(x), hence m <= lam P).
        k: neighbours considered, >= 1.
        delta: borrowed mass in (0, 1] of "lantern"; 0.1 to 0.4 in the paper.
        lam: factor > 1 of "lantern++"; 5 to 20 in published runs with k = 5 to 10.
        ledger: "tv" or "hellinger".

    Raises:
        ValueError: a setting out of range, or verification before a codebook is known.

    Example:
        >>> rule = LanternRule(variant="lantern++", k=2, lam=3.0)
        >>> rule.set_codebook(torch.tensor([[0.0], [1.0], [3.0]]))
        >>> rule.accepted_mass(torch.tensor([[.2, .3, .5]]), torch.tensor([[.9, .1, .0]]))
        tensor([[0.5000, 0.1000, 0.0000]])
    """

    name = "lantern"
    presets = {"lantern++": {"variant": "lantern++", "k": 10}}
    permutation_equivariant = False  # the codebook names the tokens

    @register_to_config
    def __init__(
        self, variant: str = "lantern", k: int = 1000, delta: float = 0.1, lam: float = 5.0, ledger: str = "tv"
    ) -> None:
        check_choice("variant", variant, ("lantern", "lantern++"))
        check_choice("ledger", ledger, ("tv", "hellinger"))
        check_count("k", k, 10)
        unused, default = ("delta", 0.1) if variant == "lantern++" else ("lam", 5.0)
        if (delta if unused == "delta" else lam) != default:
            raise ValueError(
                f'variant="{variant}" has no {unused}: "lantern" borrows up to delta, "lantern++" (lam - 1) P(x); '
                f"write {'lam' if unused == 'delta' else 'delta'}=..., or the other variant"
            )
        if not 0 < delta <= 1:
            raise ValueError(f'delta is a probability mass in (0, 1], got {delta!r}; a factor is lam of "lantern++"')
        if not lam > 1:
            raise ValueError(f"lam must be above 1 (no relaxation), got {lam!r}; write lam=5.0")
        self.variant, self.k, self.delta, self.lam, self.ledger = variant, k, delta, lam, ledger
        # A token the target excludes can borrow in "lantern"; in "lantern++" its budget is 0.
        self.may_leave_support = variant == "lantern"
        self.neighbours: Tensor | None = None
        self._prepared_for: Tensor | None = None

    @property
    def guarantee(self) -> str:
        return "unbounded" if self.variant == "lantern" else "bounded-drift"

    def set_codebook(self, codebook: Tensor) -> None:
        """codebook [V, D]: row v is the vector that token v stands for. Tables of k >= V are cut to V - 1."""
        if codebook.dim() != 2:
            raise ValueError(f"the codebook must be [V, D], got shape {tuple(codebook.shape)}")
        self._prepared_for = None
        self.neighbours = nearest_codes(codebook.detach(), min(self.k, codebook.shape[0] - 1))

    def prepare(self, target: object) -> None:
        codebook = getattr(target, "codebook", None)
        if not isinstance(codebook, Tensor):
            raise ValueError(
                f"LanternRule needs the codebook that {type(target).__name__} does not show as `codebook`; call "
                f'rule.set_codebook(vectors [V, D]), or use rule="cool_sd", which needs none'
            )
        if codebook is not self._prepared_for:  # the table costs V^2 distances: 60 ms at V = 1,024
            self.set_codebook(codebook)
            self._prepared_for = codebook

    def accepted_mass(self, p: Tensor, q: Tensor, first: int = 0) -> Tensor:
        if self.neighbours is None:
            raise ValueError("LanternRule has no codebook yet; call rule.set_codebook(vectors [V, D]) first")
        if self.neighbours.shape[0] != p.shape[-1]:
            raise ValueError(
                f"the codebook has {self.neighbours.shape[0]} codes and the target {p.shape[-1]} tokens; "
                f"give set_codebook one vector per token"
            )
        if self.neighbours.device != p.device:
            self.neighbours = self.neighbours.to(p.device)
        rows = p.reshape(-1, p.shape[-1])
        budget = (self.lam - 1) * rows if self.variant == "lantern++" else torch.full_like(rows, self.delta)
        return torch.minimum(q, relaxed_probability(rows, self.neighbours, budget).reshape(p.shape))

    def bound(self, length: int) -> Tensor:
        return torch.full((length,), 1.0 if self.variant == "lantern" else 1 - 1 / self.lam)
