"""Which past frames a frame model reads, and how: recent frames whole, older ones whole, packed, picked or not at all.

Memories (arXiv:2503.10704, section "memory structures"; packing as in arXiv:2504.12626):

    none       nothing
    window     the last frames
    prepend    the last frames, and all older ones in front of them ("full")
    channel    the last frames, and some older ones, evenly spaced, on the channels of the new frames
    cross      the last frames, and all older ones through a cross-attention of their own
    pack_k2    the last frames, and older ones in blocks of 2 frames x 4 x 4 cells: 1/8 of the tokens
    pack_k4    the last frames, and older ones in blocks of 4 frames x 8 x 8 cells: 1/64 of the tokens
    retrieve   the last frames, and the few older ones whose pose is nearest to what is asked
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .frame_positions import centre_pose, pose_distance

__all__ = ["MEMORIES", "Reading", "nearest_frames", "pack_length", "plan_reading"]

MEMORIES = ("none", "window", "prepend", "channel", "cross", "pack_k2", "pack_k4", "retrieve")
ALIASES = {"full": "prepend"}


def pack_length(memory: str) -> int:
    """Frames of a packed block, 0 for memories that do not pack."""
    return {"pack_k2": 2, "pack_k4": 4}.get(memory, 0)


@dataclass(frozen=True)
class Reading:
    """Frame numbers that an AR step reads.

    Args:
        recent: [B, R] whole and recent.
        older: [B, F] whole and old, for "prepend", "cross", "channel" and "retrieve"; else [B, 0].
        blocks: [B, N, kt] packed; kt is 1 and N 0 where nothing is.
    """

    recent: Tensor
    older: Tensor
    blocks: Tensor

    def later(self, frames: int) -> Reading:
        """The same with all numbers raised, for a plan over frames whose first one is number `frames`."""
        return Reading(self.recent + frames, self.older + frames, self.blocks + frames) if frames else self


def nearest_frames(kind: str, poses: Tensor, targets: Tensor, count: int) -> Tensor:
    """For each target in turn the nearest frame not yet taken, oldest first among equals: [B, min(count, F)] int64.

    Targets are asked again until `count` frames are taken; an old frame was seen, a newer one may be the model's own.

    Args:
        kind: "column" or "pose".
        poses: [B, F, P] of the frames to choose from.
        targets: [B, T, P].
        count: frames.
    """
    batch, frames = poses.shape[:2]
    count = min(count, frames)
    distance = pose_distance(kind, poses[:, None], targets[:, :, None])  # [B, T, F]
    distance = distance + 1e-5 * torch.arange(frames, device=poses.device) / max(frames, 1)
    cost = torch.zeros(batch, frames, device=poses.device)
    rows = torch.arange(batch, device=poses.device)
    taken = []
    for turn in range(count):
        best = (distance[:, turn % targets.shape[1]] + cost).argmin(1)
        taken.append(best)
        # a frame that shows the same view as one already taken tells nothing new
        cost = cost + 1e3 * (pose_distance(kind, poses, poses[rows, best][:, None]) < 1e-4)
        cost[rows, best] += 1e6
    return torch.stack(taken, dim=1) if taken else torch.zeros(batch, 0, dtype=torch.int64, device=poses.device)


def plan_reading(
    memory: str, kind: str, poses: Tensor, targets: Tensor, *, window: int, retrieve: int, channel_frames: int,
    memory_limit: int = 0,
) -> Reading:  # fmt: skip
    """Which of n past frames an AR step reads.

    Args:
        memory: one of `MEMORIES`.
        kind: of positions, "column" or "pose".
        poses: [B, n, P] of the past frames, oldest first.
        targets: [B, w, P] of the frames to make.
        window: recent frames; up to kt - 1 more where packing leaves a rest.
        retrieve: old frames picked by "retrieve".
        channel_frames: old frames on the channels; the oldest is repeated where there are fewer.
        memory_limit: most old frames, or blocks, that are read; those nearest in pose are kept. 0 is no limit.
    """
    batch, past = poses.shape[:2]
    device = poses.device

    def some(start: int, stop: int) -> Tensor:
        return torch.arange(start, stop, device=device).expand(batch, -1)

    nothing, no_blocks = some(0, 0), torch.zeros(batch, 0, 1, dtype=torch.int64, device=device)
    if memory == "none":
        return Reading(nothing, nothing, no_blocks)
    old = max(past - window, 0)
    length = pack_length(memory)
    if length:
        packed = old // length
        blocks = some(0, packed * length).reshape(batch, packed, length)
        if memory_limit and packed > memory_limit:
            centres = centre_pose(kind, poses[:, : packed * length].reshape(batch, packed, length, -1))
            keep = nearest_frames(kind, centres, targets, memory_limit).sort(1).values
            blocks = blocks.gather(1, keep[..., None].expand(-1, -1, length))
        return Reading(some(packed * length, past), nothing, blocks)
    recent = some(old, past)
    if memory == "window" or not old:
        return Reading(recent, nothing, no_blocks)
    if memory == "channel":
        spaced = torch.linspace(0, old - 1, channel_frames, device=device).round().long()
        return Reading(recent, spaced.expand(batch, -1), no_blocks)
    if memory == "retrieve" or (memory_limit and old > memory_limit):
        count = retrieve if memory == "retrieve" else memory_limit
        return Reading(recent, nearest_frames(kind, poses[:, :old], targets, count), no_blocks)
    return Reading(recent, some(0, old), no_blocks)
