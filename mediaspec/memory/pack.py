"""Recent frames at full resolution, older ones at falling resolution: FramePack's history (arXiv:2504.12626).

Groups of frames share a rate, the newest group the finest. With 1 frame at k1, 2 at k2 and 16 at k4, and the first
frame kept, twenty frames cost as many tokens as two and a half. Two ways to keep them:

    store="frames"   the last frames stay as latents and are divided anew at every read: exact group sizes, gradients
                     reach the packers, and networks that pack themselves (FramePack, Helios) get their groups
    store="tokens"   a frame is packed when it moves to a coarser group, by whole kernel blocks, and its latents go
                     once it is in the last one: the memory itself is compressed, and may reach back without end

With store="tokens" a group keeps at least its frames and passes a block on only while that stays so; it holds at most
(kt of the next group) - 1 frames more. Groups without frames are skipped, never filled with zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .base import FrameMemory, FrameStore, Kernel, MemoryRead, MemoryTokens, below, prefixed
from .packers import MeanPacker, Packer, kernel_of

__all__ = ["FRAMEPACK", "PackMemory", "split_history"]

FRAMEPACK: tuple[tuple[int | None, str], ...] = ((16, "k4"), (2, "k2"), (1, "k1"))
"""Groups of FramePack and Helios, oldest first."""


def split_history(count: int, sizes: Sequence[int | None]) -> list[tuple[int, int]]:
    """Which of `count` frames belong to each group; the newest group is filled first.

    Args:
        count: frames of the history; sizes: frames per group, oldest group first, None takes all that are left.

    Returns:
        (start, end) per group, oldest first; equal where a group is empty.

    Example:
        >>> split_history(5, (16, 2, 1))
        [(0, 2), (2, 4), (4, 5)]
    """
    found, end = [], count
    for size in reversed(sizes):
        start = 0 if size is None else max(0, end - size)
        found.append((start, end))
        end = start
    return found[::-1]


@dataclass
class _Block:
    """Frames that share tokens: ids, tokens [B, L, D], and latents until the last group is reached."""

    ids: list[int]
    values: Tensor
    frames: Tensor | None


class PackMemory(FrameMemory):
    """Groups of frames at falling resolution.

    Args:
        groups: (frames, kernel) per group, oldest group first; frames None (first group only) has no limit.
        packers: one per group; None hands out raw groups for networks that pack themselves.
        sink: frames that are kept forever, at the rate of the newest group.
        store: "frames" or "tokens", see the head of this file.
        tail: store="tokens": what becomes of a block that leaves the last group: "delete", "mean" (one running
            average block) or "append" (one averaged token each).

    Raises:
        ValueError: groups, packers and store do not fit together.

    Example:
        >>> memory = PackMemory.mean(nn.Conv3d(4, 8, (1, 2, 2), (1, 2, 2)))
        >>> with torch.no_grad():
        ...     memory.write(torch.zeros(1, 4, 20, 8, 8))
        ...     [len(memory.read().tokens), [group.frame_ids.shape[1] for group in memory.read().groups]]
        [40, [1, 16, 2, 1]]
    """

    name = "pack"

    def __init__(
        self,
        groups: Sequence[tuple[int | None, str | Kernel]] = FRAMEPACK,
        packers: Sequence[Packer] | None = None,
        *,
        sink: int = 1,
        store: Literal["frames", "tokens"] = "frames",
        tail: Literal["delete", "mean", "append"] = "delete",
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        if not groups or any(n is not None and n < 1 for n, _ in groups) or any(n is None for n, _ in groups[1:]):
            raise ValueError(f"groups={groups}; give (frames >= 1, kernel) per group, None for the first one only")
        if packers is not None and len(packers) != len(groups):
            raise ValueError(f"{len(packers)} packers for {len(groups)} groups; give one per group, in that order")
        if store not in ("frames", "tokens") or tail not in ("delete", "mean", "append"):
            raise ValueError(
                f"store={store!r}, tail={tail!r}; write 'frames' or 'tokens', 'delete', 'mean' or 'append'"
            )
        if store == "tokens" and packers is None:
            raise ValueError("store='tokens' needs packers; keep frames, or give one packer per group")
        if tail != "delete" and (store != "tokens" or groups[0][0] is None):
            raise ValueError(f"tail={tail!r} needs store='tokens' and a first group with a limit")
        if sink < 0:
            raise ValueError(f"sink={sink}; it cannot be negative")
        self.sizes = [n for n, _ in groups]
        self.kernels = (
            [packer.kernel for packer in packers] if packers else [kernel_of(kernel) for _, kernel in groups]
        )
        self.packers, self.sink, self.store, self.tail = packers, sink, store, tail
        self.kernel = self.kernels[-1]
        if store == "tokens":
            self._check_blocks()
        self._stages: list[list[_Block]] = []
        self._tail: list[_Block] = []
        self._lost = 0  # blocks that left the last group
        self._clear()

    def _check_blocks(self) -> None:
        lengths = [kernel[0] for kernel in self.kernels]
        for older, newer in zip(lengths, lengths[1:]):
            if older % newer:
                raise ValueError(
                    f"blocks of {older} frames cannot be made of blocks of {newer}; take kernels that divide"
                )
        for size, length in zip(self.sizes, lengths):
            if size is not None and size % length:
                raise ValueError(f"a group of {size} frames holds no whole number of blocks of {length} frames")

    @classmethod
    def mean(
        cls, proj: nn.Conv3d, groups: Sequence[tuple[int | None, str | Kernel]] = FRAMEPACK, **settings: Any
    ) -> PackMemory:
        """A memory without training: average-pooled latents through the base patch embedding `proj`."""
        return cls(groups, [MeanPacker(proj, kernel) for _, kernel in groups], **settings)

    @property
    def max_frames(self) -> int | None:
        """Frames that are kept at most, sinks included; None without a limit."""
        sizes = [n for n in self.sizes if n is not None]
        if len(sizes) < len(self.sizes):
            return None
        late = sum(kernel[0] - 1 for kernel in self.kernels[:-1]) if self.store == "tokens" else 0
        return self.sink + sum(sizes) + late

    # ---- writing

    def _write(self, frames: Tensor, ids: list[int], poses: Tensor | None) -> None:
        first = min(max(self.sink - len(self._sinks), 0), len(ids))
        self._sinks.append(frames[:, :, :first], ids[:first])
        self._recent.append(frames[:, :, first:], ids[first:])
        if self.store == "tokens":
            self._demote()
        elif self.sizes[0] is not None:
            self._recent.drop(len(self._recent) - sum(n for n in self.sizes if n is not None))

    def _demote(self) -> None:
        """Packs new frames, and moves old blocks on until every group fits."""
        count, newest = len(self.sizes), len(self.sizes) - 1
        while len(self._recent) >= self.kernels[newest][0]:
            self._stages[newest].append(self._packed(newest, *self._recent.pop(self.kernels[newest][0])))
        for g in range(count - 1, 0, -1):
            stage, length, room = self._stages[g], self.kernels[g - 1][0], self.sizes[g]
            assert room is not None
            while self._held(g) - length >= room:
                taken = [stage.pop(0) for _ in range(length // self.kernels[g][0])]
                frames = torch.cat([block.frames for block in taken if block.frames is not None], 2)
                self._stages[g - 1].append(self._packed(g - 1, frames, [i for block in taken for i in block.ids]))
        room = self.sizes[0]
        while room is not None and self._held(0) > room:
            self._evict(self._stages[0].pop(0))

    def _packed(self, group: int, frames: Tensor, ids: list[int]) -> _Block:
        assert self.packers is not None
        order = sorted(range(len(ids)), key=lambda i: ids[i])
        frames, ids = frames[:, :, order], [ids[i] for i in order]
        return _Block(ids, self.packers[group](frames), frames if group else None)

    def _held(self, group: int) -> int:
        return len(self._stages[group]) * self.kernels[group][0]

    def _evict(self, block: _Block) -> None:
        self._lost += 1
        if self.tail == "append":
            self._tail.append(_Block(block.ids, block.values.mean(1, keepdim=True), None))
        elif self.tail == "mean":
            if not self._tail:
                self._tail = [_Block([block.ids[0], block.ids[-1]], block.values, None)]
            else:
                kept = self._tail[0]
                kept.values = kept.values + (block.values - kept.values) / self._lost
                kept.ids = [min(kept.ids[0], block.ids[0]), max(kept.ids[1], block.ids[-1])]

    # ---- reading

    def _read(self, targets: Sequence[int] | Tensor | None, query: Tensor | None, pose: Tensor | None) -> MemoryRead:
        found = [(len(self.sizes) - 1, self._sinks.group(self.kernels[-1]))]
        if self.store == "frames":
            places = split_history(len(self._recent), self.sizes)
            found += [(g, self._recent.group(self.kernels[g], *place)) for g, place in enumerate(places)]
        groups = [(g, group) for g, group in found if group is not None]
        if self.packers is None:
            return MemoryRead(tuple(group for _, group in groups))
        parts = [self.packers[g].refresh(self.packers[g].pack(group), targets) for g, group in groups]
        if self.store == "tokens":
            parts = [self.packers[0].refresh(tail, targets) for tail in self._tail_tokens()] + parts
            for g, stage in enumerate(self._stages):
                if stage:
                    parts.append(self.packers[g].refresh(self._tokens(g, stage), targets))
            return MemoryRead((), MemoryTokens.cat(parts))
        return MemoryRead(tuple(group for _, group in groups), MemoryTokens.cat(parts))

    def _tokens(self, group: int, blocks: list[_Block]) -> MemoryTokens:
        assert self.packers is not None and self._shape is not None
        values = torch.cat([block.values for block in blocks], 1)
        ids = torch.tensor([i for block in blocks for i in block.ids], device=values.device)
        layout = self.packers[group].layout(ids.expand(len(values), -1), *self._shape[-2:])
        return MemoryTokens(values, *layout)

    def _tail_tokens(self) -> list[MemoryTokens]:
        """Tokens of what left the last group."""
        if not self._tail:
            return []
        assert self.packers is not None and self._shape is not None
        packer, length = self.packers[0], self.kernels[0][0]
        rows, first = self._shape[0], self._tail[0].values
        ids = torch.arange(length, device=first.device).expand(rows, -1)
        positions, _, spans, counts = packer.layout(ids, *self._shape[-2:])
        if self.tail == "mean":
            start, end = self._tail[0].ids
            times = torch.full_like(positions[..., :1], (start + end) / 2)
            positions = torch.cat([times, positions[..., 1:]], -1)
            return [MemoryTokens(first, positions, times, spans, counts * self._lost)]
        values = torch.cat([block.values for block in self._tail], 1)
        times = torch.tensor([block.ids for block in self._tail], dtype=torch.float32, device=first.device)
        times = times.expand(rows, -1, -1)
        middle = positions[:, :1, 1:].new_tensor([float(positions[0, :, axis].mean()) for axis in (1, 2)])
        place = torch.cat([times.mean(-1, keepdim=True), middle.expand(rows, len(self._tail), 2)], -1)
        extent = [int(positions[0, :, axis].max() + spans[-1, axis - 1] / 2 + 0.5) for axis in (1, 2)]
        whole = torch.tensor(extent, device=first.device).expand(len(self._tail), 2)
        return [MemoryTokens(values, place, times, whole, counts.sum().expand(len(self._tail)))]

    # ---- keeping

    def _clear(self) -> None:
        self._sinks, self._recent = FrameStore(), FrameStore()
        self._stages = [[] for _ in self.sizes]
        self._tail, self._lost = [], 0

    def _contents(self) -> dict[str, Tensor]:
        state = prefixed("sink", self._sinks.state_dict()) | prefixed("recent", self._recent.state_dict())
        if self.store == "tokens":
            state["lost"] = torch.tensor(self._lost)
            for name, blocks in [*((f"group{g}", s) for g, s in enumerate(self._stages)), ("tail", self._tail)]:
                if blocks:
                    state[f"{name}.ids"] = torch.tensor([block.ids for block in blocks])
                    state[f"{name}.values"] = torch.stack([block.values for block in blocks])
                    frames = [block.frames for block in blocks if block.frames is not None]
                    if frames:
                        state[f"{name}.frames"] = torch.stack(frames)
        return state

    def _restore(self, state: dict[str, Tensor]) -> None:
        self._sinks.load_state_dict(below("sink", state))
        self._recent.load_state_dict(below("recent", state))
        if self.store == "frames":
            return
        self._lost = int(state["lost"])
        for name, blocks in [*((f"group{g}", s) for g, s in enumerate(self._stages)), ("tail", self._tail)]:
            part = below(name, state)
            for n in range(len(part.get("ids", ()))):
                frames = part["frames"][n].clone() if "frames" in part else None
                blocks.append(_Block(part["ids"][n].tolist(), part["values"][n].clone(), frames))

    @property
    def frames_held(self) -> int:
        held = sum(len(block.ids) for stage in self._stages for block in stage)
        tail = self._lost * self.kernels[0][0] if self._tail else 0
        return len(self._sinks) + len(self._recent) + held + tail

    @property
    def nbytes(self) -> int:
        blocks = [block for stage in self._stages for block in stage] + self._tail
        held = sum(block.values.nbytes + (0 if block.frames is None else block.frames.nbytes) for block in blocks)
        return held + self._sinks.nbytes + self._recent.nbytes
