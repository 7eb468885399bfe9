"""Slots of a streaming layer: a sink that stays and a ring for the rest, arXiv:2410.13846 section 3.

A key at sequence position p stands in slot p while p is in the sink, else in slot sink + (p - sink) mod R. What a
query may see is decided by positions, never by the order of slots. A rejected draft of M positions has overwritten the
M oldest ring slots, so R must exceed the recent window by the longest draft: R >= recent + M (arXiv:2410.13846 keeps
R = recent, which is right only where nothing is ever rolled back).

Letters: R rows (ring slots are written out), N positions of a pass, S = sink + ring slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.kv import Slots, shared_length
from ..core.tree import TreeSpec

__all__ = ["Ring"]

STEP = 8  # slots come in multiples of this, which keeps float32 products on the CPU independent of the batch


@dataclass(frozen=True)
class Ring:
    """Geometry of a streaming layer's slots.

    Args:
        sink: first positions that stay.
        recent: w, a query sees the last w positions up to its own.
        size: S, at least sink + recent.

    Raises:
        ValueError: an empty window or a ring that is shorter than it.

    Example:
        >>> ring = Ring(sink=1, recent=3, size=5)
        >>> ring.slot(torch.tensor([0, 1, 4, 5])).tolist(), ring.held(torch.tensor([5])).tolist()
        ([0, 1, 4, 1], [[0, 5, 2, 3, 4]])
    """

    sink: int
    recent: int
    size: int

    def __post_init__(self) -> None:
        if self.sink < 0 or self.recent < 1 or self.size < self.sink + self.recent:
            raise ValueError(
                f"a ring of {self.size} slots with sink={self.sink} and recent={self.recent}; the sink must be >= 0, "
                f"the window >= 1 and the slots at least their sum, plus the longest draft where drafts are rejected"
            )

    @staticmethod
    def sized(sink: int, recent: int, slack: int) -> Ring:
        """A ring for drafts of up to `slack` positions per pass, rounded up to a multiple of 8 slots."""
        return Ring(sink, recent, -(-(sink + recent + slack) // STEP) * STEP)

    @property
    def length(self) -> int:
        """Slots of the ring alone."""
        return self.size - self.sink

    def slot(self, positions: Tensor) -> Tensor:
        """Slot of every sequence position, of any shape."""
        return torch.where(positions < self.sink, positions, self.sink + (positions - self.sink) % self.length)

    def held(self, newest: Tensor) -> Tensor:
        """[R, S] sequence position in every slot when `newest` [R] is the last one written; -1 where there is none."""
        order = torch.arange(self.size, device=newest.device)
        last = newest[:, None]
        turning = last - (last - order) % self.length
        at = torch.where(order < self.sink, torch.where(order <= last, order, -1), turning)
        return at.masked_fill((order >= self.sink) & (turning < self.sink), -1)

    def lost(self, newest: int, position: int) -> bool:
        """Whether a query at `position` would miss a key, once `newest` is the last position ever written."""
        gone = newest - self.length
        return gone >= self.sink and gone > position - self.recent

    def plan(
        self, lengths: Tensor, host_lengths: Sequence[int], count: int, tree: TreeSpec | None, dtype: torch.dtype
    ) -> Slots:
        """Where the next `count` inputs of every row go and what they see; arguments as of `KVStore.plan`."""
        device = lengths.device
        first, longest = shared_length(host_lengths), max(host_lengths)
        live = min(longest + count, self.size)
        order = torch.arange(count, device=device)
        inputs = lengths[:, None] + order
        positions = inputs if tree is None else lengths[:, None] + tree.depth_tensor(device)
        start: int | None = None
        if first is not None:
            low = first if first < self.sink else self.sink + (first - self.sink) % self.length
            start = low if low + count <= self.size else None
        index = None if start is not None else self.slot(inputs)[:, None, :, None]
        if first is not None and count == 1 and first < self.sink + self.recent and live == first + 1:
            return Slots(start, index, positions, live, None)
        some = slice(0, 1) if first is not None else slice(None)
        base, query = lengths[some, None], positions[some, :, None]
        at = self.held(lengths[some] + count - 1)[:, :live]
        offset = at - base
        if tree is None:
            visible = at[:, None] <= query
        else:
            inside = offset.clamp(0, count - 1)
            ancestor = tree.ancestor_tensor(device)[:, inside].transpose(0, 1)
            visible = (offset < 0)[:, None] | ancestor
            at = torch.where(offset >= 0, base + tree.depth_tensor(device)[inside], at)
        visible = visible & (at >= 0)[:, None] & ((at[:, None] > query - self.recent) | (at < self.sink)[:, None])
        mask = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, float("-inf"))
        return Slots(start, index, positions, live, mask[:, None])
