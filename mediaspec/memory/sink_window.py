"""The first frames forever and the last ones: what keeps long rollouts from drifting without a larger window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from .base import FrameMemory, FrameStore, MemoryRead, below, prefixed

__all__ = ["SinkWindowMemory"]


class SinkWindowMemory(FrameMemory):
    """Keeps the first `sink` frames written and the `last` most recent others.

    Args:
        sink: frames; last: frames.
        anchors: keep the frames with these ids instead of the first `sink` ones.

    Example:
        >>> import torch
        >>> memory = SinkWindowMemory(1, 2)
        >>> memory.write(torch.zeros(1, 4, 5, 8, 8))
        >>> memory.read().frame_ids.tolist()
        [[0, 3, 4]]
    """

    name = "sink_window"

    def __init__(self, sink: int, last: int, *, anchors: Sequence[int] | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        if sink < 0 or last < 0:
            raise ValueError(f"sink={sink}, last={last}; neither may be negative")
        self.sink, self.last = sink, last
        self.anchors = None if anchors is None else frozenset(anchors)
        self._clear()

    def _write(self, frames: Tensor, ids: list[int], poses: Tensor | None) -> None:
        for place, i in enumerate(ids):
            stays = len(self._sinks) < self.sink if self.anchors is None else i in self.anchors
            (self._sinks if stays else self._recent).append(frames[:, :, place : place + 1], [i])
            self._recent.drop(len(self._recent) - self.last)

    def _read(self, targets: Sequence[int] | Tensor | None, query: Tensor | None, pose: Tensor | None) -> MemoryRead:
        return self._shown(self._sinks.group(self.kernel), self._recent.group(self.kernel))

    def _clear(self) -> None:
        self._sinks, self._recent = FrameStore(), FrameStore()

    def _contents(self) -> dict[str, Tensor]:
        return prefixed("sink", self._sinks.state_dict()) | prefixed("recent", self._recent.state_dict())

    def _restore(self, state: dict[str, Tensor]) -> None:
        self._sinks.load_state_dict(below("sink", state))
        self._recent.load_state_dict(below("recent", state))

    @property
    def frames_held(self) -> int:
        return len(self._sinks) + len(self._recent)

    @property
    def nbytes(self) -> int:
        return self._sinks.nbytes + self._recent.nbytes
