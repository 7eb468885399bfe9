"""Everything: every finished frame at full resolution. Exact, and it grows with the video."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .base import FrameMemory, FrameStore, MemoryRead

__all__ = ["FullMemory"]


class FullMemory(FrameMemory):
    """Keeps all frames.

    Example:
        >>> import torch
        >>> memory = FullMemory()
        >>> memory.write(torch.zeros(1, 4, 3, 8, 8))
        >>> memory.read().frames.shape, memory.nbytes
        (torch.Size([1, 4, 3, 8, 8]), 3072)
    """

    name = "full"

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._store = FrameStore()

    def _write(self, frames: Tensor, ids: list[int], poses: Tensor | None) -> None:
        self._store.append(frames, ids)

    def _read(self, targets: Sequence[int] | Tensor | None, query: Tensor | None, pose: Tensor | None) -> MemoryRead:
        return self._shown(self._store.group(self.kernel))

    def _clear(self) -> None:
        self._store = FrameStore()

    def _contents(self) -> dict[str, Tensor]:
        return self._store.state_dict()

    def _restore(self, state: dict[str, Tensor]) -> None:
        self._store.load_state_dict(state)

    @property
    def frames_held(self) -> int:
        return len(self._store)

    @property
    def nbytes(self) -> int:
        return self._store.nbytes
