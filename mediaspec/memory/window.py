"""The last frames and nothing else: constant size, and whatever left the window is gone."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .full import FullMemory

__all__ = ["WindowMemory"]


class WindowMemory(FullMemory):
    """Keeps the `last` frames.

    Args:
        last: frames, 0 for no memory at all.

    Example:
        >>> import torch
        >>> memory = WindowMemory(2)
        >>> memory.write(torch.zeros(1, 4, 5, 8, 8))
        >>> memory.read().frame_ids.tolist()
        [[3, 4]]
    """

    name = "window"

    def __init__(self, last: int, **settings: Any) -> None:
        super().__init__(**settings)
        if last < 0:
            raise ValueError(f"last={last}; give 0 (no memory) or more frames")
        self.last = last

    def _write(self, frames: Tensor, ids: list[int], poses: Tensor | None) -> None:
        super()._write(
            frames[:, :, -self.last :] if self.last else frames[:, :, :0], ids[-self.last :][: self.last], poses
        )
        self._store.drop(len(self._store) - self.last)
