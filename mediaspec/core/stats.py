"""What one run did: counts, drift and seconds, per row and in total."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

__all__ = ["DecodeResult", "DecodeStats", "Trace"]


@dataclass(frozen=True)
class Trace:
    """How every token came about, each [B, T] on the CPU.

    Args:
        kind: uint8, one of `BONUS` (drawn from the target row: plain or bonus), `ACCEPTED`, `RESAMPLED`, `FORCED`.
        round: int32, number of the verification round that emitted the token (0 = prefill).
        drift: float32, closed-form one-step TV spent at the token's test, 0 where none was spent.
    """

    kind: Tensor
    round: Tensor
    drift: Tensor

    BONUS = 0
    ACCEPTED = 1
    RESAMPLED = 2
    FORCED = 3


@dataclass(frozen=True)
class DecodeStats:
    """Counts of one run.

    Args:
        tokens: committed tokens of all rows.
        target_calls: passes of the target (each serves the whole batch), prefill included.
        row_calls: passes summed over the rows that were unfinished at the time.
        accepted_per_position: how often draft position i was accepted; `tested_per_position`: how often it was tested.
        drift: per row, the accumulated closed-form bound on TV(law of the row, target law); 0 for lossless rules.
        hellinger_bound: per row, the sharper bound where the rule keeps a Hellinger ledger, else None.
        guarantee: the rule's guarantee, "exact-tokens", "exact-law", "bounded-drift" or "unbounded"; "lossy" where the
            target itself runs an approximation (an attention policy).
        seconds: per phase: prefill, draft, target, verify, commit.
        arms: rounds a policy gave to each arm, "drafter:K", "drafter:treeN" or "plain"; empty without a policy.
    """

    tokens: int
    target_calls: int
    row_calls: int
    accepted_per_position: list[int]
    tested_per_position: list[int]
    drift: list[float]
    guarantee: str
    hellinger_bound: list[float] | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    arms: dict[str, int] = field(default_factory=dict)

    @property
    def tokens_per_call(self) -> float:
        """Committed tokens per target pass and row (tau, bonus token included); 1.0 without speculation."""
        return self.tokens / max(self.row_calls, 1)


@dataclass(frozen=True)
class DecodeResult:
    """Args: tokens [B, T] int64; lengths per row (T unless interrupted); stats; trace when it was asked for."""

    tokens: Tensor
    lengths: list[int]
    stats: DecodeStats
    trace: Trace | None = None
