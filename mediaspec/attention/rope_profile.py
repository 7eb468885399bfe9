"""Why slashes exist, and their closed form: nearly constant queries and keys that rotate (arXiv:2601.08297).

Where the queries and keys of a head, before rotation, hardly differ from their means q and k, its logit depends on the
distance d alone:

    logit(d) = scaling * sum_l a_l cos(theta_l d + phi_l),   a_l = |q_l| |k_l|,   phi_l = arg q_l - arg k_l

with q_l, k_l the pairs that rotate together. So a head's slashes follow from two vectors, without an attention map.

Letters: H heads, D head size, l rotary pairs, n keys, theta_l frequencies in radians per position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["RankOne", "Rotary", "closed_form", "offset_logits", "rank_one"]

LAYOUTS = ("half", "interleaved")


@dataclass(frozen=True)
class Rotary:
    """How a layer rotates.

    Args:
        frequencies: [l] theta_l as the model uses them (after any scaling); 2 l <= D, the rest is not rotated.
        layout: "half" pairs component l with l + (number of pairs), "interleaved" 2 l with 2 l + 1.

    Raises:
        ValueError: another layout.

    Example:
        >>> rotary, at = Rotary(torch.tensor([1.0]), "half"), torch.tensor([5])
        >>> rotary.undo(rotary.turn(torch.tensor([[1.0, 2.0]]), at), at).round(decimals=4)
        tensor([[1., 2.]])
    """

    frequencies: Tensor
    layout: str = "half"

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ValueError(f"rotary layout {self.layout!r}; there are {' and '.join(map(repr, LAYOUTS))}")

    def pairs(self, vectors: Tensor) -> Tensor:
        """[..., D] -> [..., l] complex, the rotating components."""
        count = len(self.frequencies)
        rotated = vectors[..., : 2 * count]
        if self.layout == "half":
            return torch.complex(rotated[..., :count].contiguous(), rotated[..., count:].contiguous())
        return torch.complex(rotated[..., 0::2].contiguous(), rotated[..., 1::2].contiguous())

    def turn(self, vectors: Tensor, positions: Tensor) -> Tensor:
        """[..., n, D] vectors rotated to their `positions` [n] (or [..., n])."""
        angle = positions[..., None].to(self.frequencies.dtype) * self.frequencies
        turned = self.pairs(vectors) * torch.polar(torch.ones_like(angle), angle)
        parts = [turned.real, turned.imag]
        joined = torch.cat(parts, -1) if self.layout == "half" else torch.stack(parts, -1).flatten(-2)
        return torch.cat([joined, vectors[..., 2 * len(self.frequencies) :]], -1)

    def undo(self, vectors: Tensor, positions: Tensor) -> Tensor:
        """What `turn` was given."""
        return self.turn(vectors, -positions)


@dataclass(frozen=True)
class RankOne:
    """How close a head's vectors are to multiples of one direction; each [H].

    Args:
        share: s_1^2 / sum s^2 of the singular values s.
        components: number of components that hold 95 % of the energy.
        effective: effective rank exp(-sum p log p), p = s^2 / sum s^2.
    """

    share: Tensor
    components: Tensor
    effective: Tensor


def rank_one(gram: Tensor, energy: float = 0.95) -> RankOne:
    """Rank-one indicators from X^T X; nothing is subtracted, the mean is the signal.

    Args:
        gram: [H, D, D] sum over tokens of x x^T.
        energy: of `RankOne.components`.

    Example:
        >>> rank_one(torch.diag(torch.tensor([3.0, 1.0]))[None]).share.tolist()
        [0.75]
    """
    power = torch.linalg.eigvalsh(gram.double()).flip(-1).clamp(min=0)
    p = power / power.sum(-1, keepdim=True).clamp(min=1e-300)
    components = (p.cumsum(-1) < energy).sum(-1) + 1
    effective = (-torch.special.xlogy(p, p).sum(-1)).exp()
    return RankOne(p[..., 0], components, effective)


def offset_logits(query: Tensor, key: Tensor, rotary: Rotary, distances: Tensor, scaling: float) -> Tensor:
    """[..., d] logits of one query and one key vector (before rotation) at given distances; arXiv:2601.08297, eq. (5).

    Args:
        query, key: [..., D].
        distances: [d] positions between them.
    """
    q, k = rotary.pairs(query), rotary.pairs(key)
    amplitude, phase = q.abs() * k.abs(), q.angle() - k.angle()
    angle = distances[:, None].to(rotary.frequencies.dtype) * rotary.frequencies
    turning = (amplitude[..., None, :] * torch.cos(angle + phase[..., None, :])).sum(-1)
    rest = slice(2 * len(rotary.frequencies), None)
    constant = (query[..., rest] * key[..., rest]).sum(-1)
    return scaling * (turning + constant[..., None])


def closed_form(
    query: Tensor, key: Tensor, rotary: Rotary, length: int, scaling: float, sink_key: Tensor | None = None
) -> Tensor:
    """[H, n] attention of the last query by distance, from mean vectors alone; O(H n D / 2) operations.

    Args:
        query, key: [H, D] means before rotation (a key head's mean repeated for its queries).
        length: n.
        sink_key: [H, D] the first key before rotation, which is no ordinary one: it takes the place of distance n - 1.
    """
    distances = torch.arange(length, device=query.device)
    logits = offset_logits(query, key, rotary, distances, scaling)
    if sink_key is not None:
        first = offset_logits(query, sink_key, rotary, distances[-1:], scaling)
        logits = torch.cat([logits[..., :-1], first], -1)
    return logits.softmax(-1)
