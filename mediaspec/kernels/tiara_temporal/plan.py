"""The tables of one edit: everything about a row's spectrum that depends on the settings and on N alone.

Row i has X_ik = sum_j bins[i, j, k] A_ij. Two energies are wanted, of bins below phi2 and of those from phi1 on. Both
are quadratic forms of the few entries that the window sees (5 for a symmetric window of 7), so there are C <= L real
directions y_c in which both are diagonal at once:

    sum_{k < phi2} |X_ik|^2 = sum_c y_c^2,     sum_{phi1 <= k < phi2} |X_ik|^2 = sum_c s_c y_c^2,     0 <= s_c <= 1

At N = 16, L = 7, phi2 = 8 that is 5 products per row instead of the 15 real parts of X, and rho = sum s y^2 / sum y^2
lies in [0, 1] by construction.

Letters: N frames, C directions, E energies.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["MOST", "TemporalPlan", "make_plan"]

MOST = 80.0
"""No bias takes more: e^-80 is a normal float32, so a row with nothing but its own entry can be divided by it."""

SMALLEST = 1e-12  # directions below this share of the strongest one carry no energy that float64 could tell from zero


@dataclass(frozen=True, eq=False)
class TemporalPlan:
    """What `tiara_temporal` needs besides q, k and v.

    Args:
        frames: N.
        alpha, booster: of the bias alpha (1 - rho) (1 + booster * eta).
        basis: [N, C, N]; y_ic = sum_j basis[i, c, j] A_ij. With `cap` its last row gives the best own weight.
        shares: [N, E, C] weights of y^2 for the energies of fast motion, of all bins below phi2 and, with a booster,
            of abnormal bins.
        cap: whether there is such a last row (it is no direction: C does not count it).
        corner: [N, N] factors on the entries, exp(-beta) at the corners; None for none.
    """

    frames: int
    alpha: float
    booster: float
    basis: Tensor
    shares: Tensor
    cap: bool
    corner: Tensor | None

    @property
    def directions(self) -> int:
        """C."""
        return self.shares.shape[-1]


def make_plan(
    bins: Tensor,
    first: int,
    last: int,
    *,
    alpha: float,
    booster: float = 0.0,
    cap: Tensor | None = None,
    corner: Tensor | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> TemporalPlan:
    """Finds the directions.

    Args:
        bins: [N, N, K] complex128 on the CPU with K >= last; with a booster all K - last further bins are abnormal.
        first, last: phi1 and phi2.
        alpha, booster: see `TemporalPlan`.
        cap: [N, N] float64, row i times row i of the attention is the best own weight; or None.
        corner: [N, N] bias that is taken from logits; or None.
        device, dtype: of the tables.

    Returns:
        The plan; where rows differ in the number of directions (a zero boundary), the shorter are filled with zeros.
    """
    frames = bins.shape[0]
    found = [_directions(bins[row], first, last) for row in range(frames)]
    width = max(len(direction) for direction, _ in found)
    basis = torch.zeros(frames, width, frames, dtype=torch.float64)
    fast = torch.zeros(frames, width, dtype=torch.float64)
    for row, (direction, share) in enumerate(found):
        basis[row, : len(direction)], fast[row, : len(direction)] = direction, share
    shares = torch.stack([fast, torch.ones_like(fast)], 1)
    if booster:
        more = [_factor(bins[row, :, last:]) for row in range(frames)]
        extra = max(len(one) for one in more)
        beyond = torch.zeros(frames, extra, frames, dtype=torch.float64)
        for row, one in enumerate(more):
            beyond[row, : len(one)] = one
        basis = torch.cat([basis, beyond], 1)
        shares = torch.nn.functional.pad(shares, (0, extra))
        abnormal = torch.zeros(frames, 1, width + extra, dtype=torch.float64)
        abnormal[..., width:] = 1.0
        shares = torch.cat([shares, abnormal], 1)
    if cap is not None:
        basis = torch.cat([basis, cap[:, None]], 1)
    return TemporalPlan(
        frames,
        float(alpha),
        float(booster),
        basis.to(device, dtype).contiguous(),
        shares.to(device, dtype).contiguous(),
        cap is not None,
        None if corner is None else corner.clamp_max(MOST).neg().exp().to(device, dtype),
    )


def _factor(bins: Tensor) -> Tensor:
    """[C, N] real directions whose squares sum to the energy of [N, K] bins."""
    gram = (bins @ bins.conj().T).real
    values, vectors = torch.linalg.eigh(gram)
    kept = values > SMALLEST * values[-1].clamp_min(1e-300)
    found: Tensor = values[kept].sqrt()[:, None] * vectors[:, kept].T
    return found


def _directions(bins: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
    """[C, N] directions of the energy of bins below `last`, turned so that those from `first` on are diagonal; [C]."""
    low = (bins[:, :last] @ bins[:, :last].conj().T).real
    fast = (bins[:, first:last] @ bins[:, first:last].conj().T).real
    values, vectors = torch.linalg.eigh(low)
    kept = values > SMALLEST * values[-1].clamp_min(1e-300)
    values, vectors = values[kept], vectors[:, kept]
    white = vectors / values.sqrt()
    share, turn = torch.linalg.eigh(white.T @ fast @ white)
    return turn.T @ (values.sqrt()[:, None] * vectors.T), share.clamp(0.0, 1.0)
