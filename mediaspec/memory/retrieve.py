"""The last frames and, of all older ones, those that look like what is to be made or were seen from near its pose.

Every frame is kept, the network reads a fixed number. Each video of a batch chooses for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels.frame_pool import frame_pool
from .base import FrameGroup, FrameMemory, FrameStore, MemoryRead, gather_frames

__all__ = ["RetrieveMemory"]

SCORES = ("cosine", "pose", "hybrid")


class RetrieveMemory(FrameMemory):
    """Shows the `last` most recent frames and the `count` best older ones.

    Args:
        count: older frames; last: recent frames.
        score: "cosine" of pooled latents between a frame and the query (without a query the last frame written),
            "pose" distance to the pose given to `read`, or "hybrid": the cosine plus exp(-dt^2), dt the distance in
            time to the middle of the targets in units of `time_scale` frames.
        pool: side of the grid that frames are pooled to before they are compared; 1 compares mean colours.
        period: [P] or a number, the period of each pose coordinate (2 pi for angles), None for none.
        time_scale: frames, "hybrid" only.

    Raises:
        ValueError: an unknown score or a negative number.

    Example:
        >>> memory = RetrieveMemory(1, 1, score="pose")
        >>> memory.write(torch.zeros(1, 4, 4, 8, 8), poses=torch.tensor([[[0.0], [1.0], [2.0], [3.0]]]))
        >>> memory.read(pose=torch.tensor([[0.9]])).frame_ids.tolist()
        [[1, 3]]
    """

    name = "retrieve"

    def __init__(
        self,
        count: int,
        last: int = 0,
        *,
        score: str = "cosine",
        pool: int = 4,
        period: float | Sequence[float] | None = None,
        time_scale: float = 16.0,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        if score not in SCORES:
            raise ValueError(f"score={score!r}; allowed are {', '.join(SCORES)}")
        if count < 0 or last < 0 or pool < 1 or time_scale <= 0:
            raise ValueError(f"count={count}, last={last}, pool={pool}, time_scale={time_scale}; out of range")
        self.count, self.last, self.score, self.pool = count, last, score, pool
        self.period = None if period is None else torch.as_tensor(period, dtype=torch.float32)
        self.time_scale = time_scale
        self._clear()

    def describe(self, frames: Tensor) -> Tensor:
        """[B, n, E] unit vectors that stand for frames [B, C, n, ...] in comparisons."""
        flat = frames if frames.dim() == 5 else frames.reshape(*frames.shape[:3], 1, -1)
        kernel = (1, -(-flat.shape[3] // self.pool), -(-flat.shape[4] // self.pool))
        pooled = frame_pool(flat.detach(), kernel).transpose(1, 2).flatten(2).float()
        return torch.nn.functional.normalize(pooled, dim=-1)

    def _write(self, frames: Tensor, ids: list[int], poses: Tensor | None) -> None:
        if self.score == "pose":
            if poses is None or poses.dim() != 3 or poses.shape[:2] != (frames.shape[0], len(ids)):
                given = None if poses is None else tuple(poses.shape)
                raise ValueError(f"score='pose' needs poses [B, n, P] with every write, not {given}")
            if not bool(torch.isfinite(poses).all()):
                raise ValueError("poses hold NaN or infinite values; such a frame would be nearest to everything")
            key = poses.detach().float().clone()  # the caller's own tensor may change
        else:
            key = self.describe(frames)
        self._keys += list(key.unbind(1))
        self._store.append(frames, ids)

    def scores(self, targets: Sequence[int] | Tensor | None, query: Tensor | None, pose: Tensor | None) -> Tensor:
        """[B, frames held] likeness of every kept frame, larger is closer."""
        keys = torch.stack(self._keys, 1)
        if self.score == "pose":
            if pose is None:
                raise ValueError("score='pose' needs the pose [B, P] of what is to be made; pass pose=")
            gap = keys - pose.to(keys)[:, None]
            if self.period is not None:
                period = self.period.to(keys)
                gap = gap - period * torch.round(gap / period)
            return -gap.square().sum(-1)
        wanted = keys[:, -1] if query is None else self.describe(query).mean(1)
        found = torch.nn.functional.cosine_similarity(keys, wanted[:, None], dim=-1)
        if self.score == "hybrid" and targets is not None:
            middle = torch.as_tensor(targets, dtype=torch.float32).mean()
            gap = (torch.tensor(self._store.ids, dtype=torch.float32) - middle) / self.time_scale
            found = found + torch.exp(-gap.square()).to(found)
        return found

    def _read(self, targets: Sequence[int] | Tensor | None, query: Tensor | None, pose: Tensor | None) -> MemoryRead:
        held = len(self._store)
        recent = min(self.last, held)
        older = self._store.group(self.kernel, 0, held - recent)
        if older is not None:
            order = sorted(range(held - recent), key=lambda i: self._store.ids[i])
            if self.count < len(order):
                score = self.scores(targets, query, pose)[:, order]
                best = score.topk(self.count, dim=1).indices.sort(1).values
                older = FrameGroup(gather_frames(older.frames, best), older.frame_ids.gather(1, best), self.kernel)
                older = older if self.count else None
        return self._shown(older, self._store.group(self.kernel, held - recent))

    def _clear(self) -> None:
        self._store = FrameStore()
        self._keys: list[Tensor] = []

    def _contents(self) -> dict[str, Tensor]:
        keys = {"keys": torch.stack(self._keys, 1)} if self._keys else {}
        return self._store.state_dict() | keys

    def _restore(self, state: dict[str, Tensor]) -> None:
        self._store.load_state_dict(state)
        self._keys = list(state["keys"].unbind(1)) if len(self._store) else []

    @property
    def frames_held(self) -> int:
        return len(self._store)

    @property
    def nbytes(self) -> int:
        return self._store.nbytes + sum(key.nbytes for key in self._keys)
