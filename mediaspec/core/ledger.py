"""The drift ledger: how far the law of a finished row can be from the target's, summed up while it is decoded.

TV ledger (arXiv:2601.09212, theorem 2): TV(law of T tokens, target law) <= E[sum of the one-step drifts of all tested
draft positions]. One row's sum is an unbiased estimate of that bound, so average rows before you compare.
Hellinger ledger: with weights w = prod sqrt(P/m) along the emitted tokens, BC = 1 - E[sum w H^2(m, P)] is exactly the
Bhattacharyya coefficient of the decoding process, and TV <= sqrt(1 - BC^2). It is the sharper one for long rows: the
toy of the tests has TV 0.293, TV ledger 0.579, Hellinger bound 0.358.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .types import Verdict

__all__ = ["LEDGERS", "Ledger", "LedgerReport", "hellinger_bound", "tv_bound"]

LEDGERS = ("tv", "hellinger", "none")


def tv_bound(drift: Tensor) -> float:
    """Bound on TV from the TV ledgers [rows] of many runs of one law: their mean, at most 1."""
    return float(drift.double().mean().clamp(max=1.0))


def hellinger_bound(sums: Tensor) -> float:
    """Bound on TV from the Hellinger ledgers [rows] of many runs of one law: sqrt(1 - BC^2), BC = 1 - mean."""
    return float(_bound(sums.double().mean()))


def _bound(sums: Tensor) -> Tensor:
    coefficient = (1 - sums).clamp(0, 1)
    return (1 - coefficient.square()).clamp(min=0).sqrt()


@dataclass(frozen=True)
class LedgerReport:
    """Args: kind; drift [rows] float32, the TV ledgers; hellinger [rows] float32, the Hellinger ledgers or None."""

    kind: str
    drift: Tensor
    hellinger: Tensor | None

    @property
    def bound(self) -> float:
        """The tightest bound on TV(law, target law) that these rows support as runs of one law."""
        bound = tv_bound(self.drift)
        return bound if self.hellinger is None else min(bound, hellinger_bound(self.hellinger))


class Ledger:
    """Accumulates the drift of every row on the device.

    Args:
        rows: rows of the whole run.
        device: where verdicts live.
        kind: "tv" (one sum per round), "hellinger" (both ledgers) or "none" (for lossless rules: always 0).
    """

    def __init__(self, rows: int, device: torch.device | str = "cpu", kind: str = "tv") -> None:
        if kind not in LEDGERS:
            raise ValueError(f'ledger must be one of {LEDGERS}, got {kind!r}; write ledger="tv"')
        self.kind = kind
        self._drift = torch.zeros(rows, dtype=torch.float32, device=device)
        self._hellinger = torch.zeros_like(self._drift) if kind == "hellinger" else None
        self._log_weight = torch.zeros_like(self._drift)
        self._final_drift = self._drift.clone()
        self._final_hellinger = torch.zeros_like(self._drift)

    def add(self, verdict: Verdict) -> None:
        """Books one round of the live rows."""
        if self.kind == "none":
            return
        self._drift = self._drift + verdict.drift.sum(1)
        if self._hellinger is not None and verdict.hellinger is not None and verdict.weight is not None:
            self._hellinger = self._hellinger + self._log_weight.exp() * verdict.hellinger.sum(1)
            self._log_weight = self._log_weight + verdict.weight

    def store(self, rows: Sequence[int] | Tensor) -> None:
        """Copies the live rows' sums to the rows of the whole run that they are."""
        index = torch.as_tensor(rows, dtype=torch.int64, device=self._final_drift.device)
        self._final_drift[index] = self._drift
        if self._hellinger is not None:
            self._final_hellinger[index] = self._hellinger

    def select(self, rows: Tensor) -> None:
        """Keeps the given live rows, [n] int64."""
        self._drift = self._drift.index_select(0, rows)
        self._log_weight = self._log_weight.index_select(0, rows)
        if self._hellinger is not None:
            self._hellinger = self._hellinger.index_select(0, rows)

    def report(self) -> LedgerReport:
        """The stored sums of all rows, on the device."""
        hellinger = self._final_hellinger.clone() if self.kind == "hellinger" else None
        return LedgerReport(self.kind, self._final_drift.clone(), hellinger)

    def drift(self) -> list[float]:
        """The stored TV ledger of every row."""
        values: list[float] = self._final_drift.tolist()
        return values

    def hellinger_bound(self) -> list[float] | None:
        """sqrt(1 - BC^2) of every row's own Hellinger ledger; None unless kind="hellinger".

        The root is concave, so over many runs of one law use `report().bound`, which averages the sums first.
        """
        if self.kind != "hellinger":
            return None
        values: list[float] = _bound(self._final_hellinger).tolist()
        return values
