"""Censored counts per draft level: how often a level was tested and how often its token was accepted.

Lengths are nested. A round of length g that accepts m shows what every shorter length would have given, and nothing
about the levels behind min(m + 1, g): those are censored, not failed. K levels.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Levels", "expected_tokens"]


class Levels:
    """Counts [K] of one drafter (one tree, one rule).

    Example:
        >>> levels = Levels(4)
        >>> levels.add(accepted=2, tested=4)
        >>> levels.risk, levels.accept
        ([1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 0.0, 0.0])
    """

    def __init__(self, depth: int) -> None:
        self.risk = [0.0] * depth
        self.accept = [0.0] * depth

    @staticmethod
    def of(risk: list[float], accept: list[float]) -> Levels:
        """Counts that share the given lists."""
        levels = Levels(0)
        levels.risk, levels.accept = risk, accept
        return levels

    def merge(self, other: Levels) -> None:
        """Adds the counts of another run."""
        self.risk = [mine + its for mine, its in zip(self.risk, other.risk)]
        self.accept = [mine + its for mine, its in zip(self.accept, other.accept)]

    def add(self, accepted: int, tested: int) -> None:
        """One row of one round: `accepted` drafts of the `tested` levels that could have been accepted."""
        risk, accept = self.risk, self.accept
        for level in range(accepted):
            risk[level] += 1.0
            accept[level] += 1.0
        if accepted < tested:
            risk[accepted] += 1.0

    def scale(self, factor: float) -> None:
        """Forgets: all counts times `factor`."""
        self.risk = [factor * count for count in self.risk]
        self.accept = [factor * count for count in self.accept]

    def pooled(self, prior: float = 0.7, weight: float = 2.0) -> float:
        """Acceptance over all levels, shrunk to `prior` with the weight of `weight` tests."""
        return (sum(self.accept) + weight * prior) / (sum(self.risk) + weight)

    def conditional(self, prior: Sequence[float], weight: float = 4.0) -> list[float]:
        """[K] P(level k accepted | all before accepted), shrunk to `prior` [K]."""
        return [
            (accept + weight * believed) / (risk + weight)
            for accept, risk, believed in zip(self.accept, self.risk, prior)
        ]


def expected_tokens(conditional: Sequence[float]) -> list[float]:
    """[K+1] expected tokens of a round by draft length 0..K: 1 + sum over k < g of prod over j <= k of conditional_j.

    Example:
        >>> [round(tokens, 2) for tokens in expected_tokens([0.5, 0.5])]
        [1.0, 1.5, 1.75]
    """
    tokens, alive = [1.0], 1.0
    for rate in conditional:
        alive *= rate
        tokens.append(tokens[-1] + alive)
    return tokens
