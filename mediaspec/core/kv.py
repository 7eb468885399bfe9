"""A preallocated key/value store with a length per row: append, commit, rollback, fork.

Nothing is copied when drafts are rejected: a row's length simply does not move over their slots, which the next pass
overwrites. Only an accepted tree path (its nodes lie apart) and row selection move data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .tree import TreeSpec

__all__ = ["KVStore", "Slots", "shared_length"]


def shared_length(lengths: Sequence[int]) -> int | None:
    """The one length of all rows, where they stand alike: then slices and views do instead of gathers and masks."""
    first = lengths[0]
    return first if min(lengths) == max(lengths) else None


@dataclass(frozen=True)
class Slots:
    """Where one pass of N inputs writes and what it may read; made once per pass and shared by all layers.

    Args:
        start: first slot when every row has the same length, else None.
        index: [R, 1, N, 1] int64 slot of every input, None when `start` is given.
        positions: [R, N] int64 sequence positions (a tree node's is the committed length plus its depth).
        live: number of slots attention has to look at.
        mask: [R or 1, 1, N, live] additive mask in the store's dtype, None when everything live is visible.
    """

    start: int | None
    index: Tensor | None
    positions: Tensor
    live: int
    mask: Tensor | None


class KVStore:
    """Keys and values of `layers` layers for `rows` sequences, all slots allocated up front.

    Args:
        layers, rows, heads, head_dim, capacity: sizes; `capacity` counts prefix, tokens and the longest draft.
        dtype: the model's dtype; device: where the store lives.

    Raises:
        ValueError: a pass would not fit into `capacity`.

    Example:
        >>> store = KVStore(layers=1, rows=2, heads=1, head_dim=4, capacity=8, dtype=torch.float32)
        >>> slots = store.plan(3)
        >>> keys, values = store.write(0, slots, torch.ones(2, 1, 3, 4), torch.ones(2, 1, 3, 4))
        >>> store.advance(torch.tensor([3, 1])); store.lengths.tolist()
        [3, 1]
    """

    def __init__(
        self,
        layers: int,
        rows: int,
        heads: int,
        head_dim: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.keys = torch.zeros(layers, rows, heads, capacity, head_dim, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        self.hidden_slots: Tensor | None = None
        self.host_lengths: list[int] = [0] * rows
        self.watch: Callable[..., Any] | None = None  # an `attention.restriction.Watch`, shown every unrestricted pass
        self.sight: Any = None  # an `attention.output_error.LayerSight` while a pass shows its layers

    @property
    def rows(self) -> int:
        return self.keys.shape[1]

    @property
    def heads(self) -> int:
        return self.keys.shape[2]

    @property
    def head_dim(self) -> int:
        return self.keys.shape[4]

    @property
    def dtype(self) -> torch.dtype:
        return self.keys.dtype

    @property
    def capacity(self) -> int:
        return self.keys.shape[3]

    @property
    def nbytes(self) -> int:
        return 2 * self.keys.numel() * self.keys.element_size()

    def hide(self, padding: Tensor) -> None:
        """Hides prefix slots from every query: `padding` [R, C] bool, True = hidden (left padding of a prompt)."""
        hidden = torch.zeros(self.rows, self.capacity, dtype=torch.bool, device=self.keys.device)
        hidden[:, : padding.shape[1]] = padding
        self.hidden_slots = hidden

    def reserve(self, capacity: int) -> None:
        """Grows an empty store to at least `capacity` slots; what it holds is lost."""
        if capacity > self.capacity:
            layers, rows, heads, _, size = self.keys.shape
            self.keys = self.keys.new_zeros(layers, rows, heads, capacity, size)
            self.values = torch.zeros_like(self.keys)

    def plan(self, count: int, tree: TreeSpec | None = None) -> Slots:
        """Slots for the next `count` inputs of every row (for a tree, the root and its nodes in level order)."""
        longest = max(self.host_lengths)
        if longest + count > self.capacity:
            raise ValueError(
                f"{longest} cached positions and {count} new ones do not fit into {self.capacity} slots: "
                f"allocate the cache with more `extra` positions"
            )
        live = longest + count
        device = self.lengths.device
        uniform = shared_length(self.host_lengths) is not None
        order = torch.arange(count, device=device)
        slots = self.lengths[:, None] + order
        positions = slots if tree is None else self.lengths[:, None] + tree.depth_tensor(device)
        if uniform and count == 1 and self.hidden_slots is None:
            return Slots(longest, None, positions, live, None)
        keys = torch.arange(live, device=device)
        if tree is None:
            if uniform and self.hidden_slots is None:
                visible = (keys <= slots[0, :, None])[None]
            else:
                visible = keys <= slots[:, :, None]
        else:
            offset = keys - self.lengths[:, None]
            inside = (offset >= 0) & (offset < count)
            ancestor = tree.ancestor_tensor(device)[:, offset.clamp(0, count - 1)].transpose(0, 1)
            visible = (offset < 0)[:, None, :] | (ancestor & inside[:, None, :])
        if self.hidden_slots is not None:
            visible = visible & ~self.hidden_slots[:, None, :live]
        mask = torch.zeros(visible.shape, dtype=self.dtype, device=device).masked_fill_(~visible, float("-inf"))
        index = None if uniform else slots[:, None, :, None]
        return Slots(longest if uniform else None, index, positions, live, mask[:, None])

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """All slots of one layer: keys and values [R, H, capacity, Dh], no copy."""
        return self.keys[layer], self.values[layer]

    def write(self, layer: int, slots: Slots, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Stores [R, H, N, Dh] keys and values of one layer; returns views [R, H, live, Dh] of all live ones."""
        all_keys, all_values = self.layer(layer)
        if slots.start is not None:
            stop = slots.start + keys.shape[2]
            all_keys[:, :, slots.start : stop] = keys
            all_values[:, :, slots.start : stop] = values
        else:
            assert slots.index is not None
            index = slots.index.expand(keys.shape)
            all_keys.scatter_(2, index, keys)
            all_values.scatter_(2, index, values)
        return all_keys[:, :, : slots.live], all_values[:, :, : slots.live]

    def advance(self, counts: Tensor, host_counts: list[int] | None = None) -> None:
        """Commits the first `counts` [R] of the slots just written.

        On CUDA pass `host_counts` as well, or call `set_host_lengths` before the next `plan`.
        """
        self.lengths = self.lengths + counts
        if host_counts is not None:
            self.host_lengths = [length + count for length, count in zip(self.host_lengths, host_counts, strict=True)]
        elif self.lengths.device.type == "cpu":
            self.host_lengths = self.lengths.tolist()

    def set_host_lengths(self, lengths: list[int]) -> None:
        """Tells the store what the engine's one sync per round has read."""
        self.host_lengths = list(lengths)

    def commit(self, path: Tensor, counts: Tensor) -> None:
        """Keeps an accepted tree path and moves the lengths by `counts` [R]; `set_host_lengths` must follow.

        Slot `path[:, i]` ([R, depth + 1] int64, offsets from the length) moves to offset i.
        """
        source = (self.lengths[:, None] + path)[None, :, None, :, None]
        order = torch.arange(path.shape[1], device=path.device)
        target = (self.lengths[:, None] + order)[None, :, None, :, None]
        layers, _, heads, _, size = self.keys.shape
        shape = (layers, path.shape[0], heads, path.shape[1], size)
        for store in (self.keys, self.values):
            store.scatter_(3, target.expand(shape), store.gather(3, source.expand(shape)))
        self.lengths = self.lengths + counts

    def rollback(self, lengths: Tensor, host_lengths: list[int] | None = None) -> None:
        """Sets the committed lengths [R]; slots beyond them are forgotten."""
        self.lengths = lengths.clone()
        self.host_lengths = host_lengths if host_lengths is not None else lengths.tolist()

    def select(self, rows: Tensor, host_rows: list[int] | None = None) -> None:
        """Keeps or repeats rows (int64 [R']): fork after a prefill, or dropping finished rows."""
        host_rows = rows.tolist() if host_rows is None else host_rows
        self.keys = self.keys.index_select(1, rows)
        self.values = self.values.index_select(1, rows)
        self.lengths = self.lengths.index_select(0, rows)
        self.host_lengths = [self.host_lengths[row] for row in host_rows]
        if self.hidden_slots is not None:
            self.hidden_slots = self.hidden_slots.index_select(0, rows)
