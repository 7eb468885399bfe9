"""A policy's own random numbers: the library's Philox under a purpose of their own, one after the other.

They never touch the numbers tokens are drawn with, and a run can be replayed from (seed, numbers drawn so far).
"""

from __future__ import annotations

import math

import torch

from ..kernels import philox

__all__ = ["POLICY", "Stream"]

POLICY = 0x706F6C
"""Philox purpose of policy decisions."""
BLOCK = 256


class Stream:
    """Uniform and gamma numbers from a seed.

    Args:
        seed: any integer of 64 bits; drawn: numbers already used.

    Example:
        >>> Stream(3).uniform() == Stream(3).uniform()
        True
    """

    def __init__(self, seed: int, drawn: int = 0) -> None:
        self.seed, self.drawn = seed, drawn
        self._first, self._block = -1, [0.0]

    def uniform(self) -> float:
        """The next number in [0, 1), a multiple of 2^-24."""
        block, place = divmod(self.drawn, BLOCK)
        if block != self._first:
            positions = torch.arange(block * BLOCK, (block + 1) * BLOCK, device="cpu")[None]
            self._block = philox.uniform(torch.tensor([self.seed], device="cpu"), positions, POLICY)[0].tolist()
            self._first = block
        self.drawn += 1
        return self._block[place]

    def beta(self, accepts: float, rejects: float) -> float:
        """A draw from Beta(accepts, rejects), both at least 1."""
        first = self._gamma(accepts)
        return first / (first + self._gamma(rejects))

    def _gamma(self, shape: float) -> float:
        """Gamma(shape, 1) for shape >= 1 (Marsaglia, Tsang, ACM TOMS 26(3), 2000)."""
        d = shape - 1 / 3
        c = 1 / math.sqrt(9 * d)
        while True:
            radius = math.sqrt(-2 * math.log(1 - self.uniform()))
            x = radius * math.cos(2 * math.pi * self.uniform())
            v = (1 + c * x) ** 3
            if v > 0 and math.log(1 - self.uniform()) < 0.5 * x * x + d - d * v + d * math.log(v):
                return d * v
