"""Where tokens of a frame lie in the world: features of the camera's pose and of the place inside the frame.

Two kinds of worlds. "column": the camera stands still and turns, a pose is (first column seen, columns of the world),
and a token's place is its column of the world. "pose": a pose is (x, y, yaw in radians), and a token's place is the
camera's position with the direction of the ray through the token.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = [
    "POSITIONS", "centre_pose", "motion_features", "motion_size", "pose_distance", "position_features",
    "position_size",
]  # fmt: skip

POSITIONS = ("column", "pose")
COLUMN_HARMONICS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Of a period of 1024 columns: the finest wave has 16 columns, two patches."""
PERIOD = 1024.0
RAY_HARMONICS = (1, 2, 3, 4, 6, 8, 12)
PLACE_WAVES = (32.0, 16.0, 8.0, 4.0, 2.0)
"""Squares."""
ROW_HARMONICS = (1, 2, 3, 4)
VIEW = 64.0
"""Columns of a frame."""


def _waves(angle: Tensor, harmonics: tuple[int, ...]) -> Tensor:
    """Sines and cosines [..., 2 n] of multiples of angles [...] in radians."""
    turned = angle[..., None] * torch.tensor(harmonics, dtype=angle.dtype, device=angle.device)
    return torch.cat([turned.sin(), turned.cos()], dim=-1)


def position_size(kind: str) -> int:
    """Features of a token."""
    place = 2 * len(COLUMN_HARMONICS) if kind == "column" else 2 * len(RAY_HARMONICS) + 4 * len(PLACE_WAVES)
    return place + 2 * len(ROW_HARMONICS)


def position_features(kind: str, poses: Tensor, rows: int, columns: int, field_of_view: float = 60.0) -> Tensor:
    """Features of every token of frames that have `rows` x `columns` tokens.

    Args:
        kind: "column" or "pose".
        poses: [..., P] float32.
        rows, columns: of tokens.
        field_of_view: degrees, of "pose".

    Returns:
        [..., rows * columns, position_size(kind)] float32.
    """
    across = (torch.arange(columns, dtype=poses.dtype, device=poses.device) + 0.5) / columns
    down = (torch.arange(rows, dtype=poses.dtype, device=poses.device) + 0.5) / rows
    if kind == "column":
        column = torch.remainder(poses[..., :1] + VIEW * across, poses[..., 1:2])
        place = _waves(2 * math.pi / PERIOD * column, COLUMN_HARMONICS)
    else:
        ray = torch.atan((2 * across - 1) * math.tan(math.radians(field_of_view) / 2))
        parts = [_waves(poses[..., 2:3] + ray, RAY_HARMONICS)]
        for axis in (0, 1):
            angles = poses[..., axis : axis + 1, None] * (2 * math.pi / torch.tensor(PLACE_WAVES, device=poses.device))
            waves = torch.cat([angles.sin(), angles.cos()], dim=-1)
            parts.append(waves.expand(*waves.shape[:-2], columns, -1))
        place = torch.cat(parts, dim=-1)
    height = _waves(math.pi * down, ROW_HARMONICS)
    lead = place.shape[:-2]
    both = torch.cat(
        [
            place[..., None, :, :].expand(*lead, rows, columns, -1),
            height[:, None].expand(*lead, rows, columns, -1),
        ],
        dim=-1,
    )
    return both.reshape(*lead, rows * columns, -1)


def _turn(kind: str, poses: Tensor, origin: Tensor) -> Tensor:
    """How far poses are turned from an origin, the short way: columns or radians."""
    index = 0 if kind == "column" else 2
    around = poses[..., 1] if kind == "column" else torch.full_like(poses[..., 2], 2 * math.pi)
    delta = poses[..., index] - origin[..., index]
    return torch.remainder(delta + around / 2, around) - around / 2


def centre_pose(kind: str, poses: Tensor) -> Tensor:
    """The middle of blocks of consecutive frames: [..., P] of poses [..., T, P]."""
    first = poses[..., :1, :]
    turned = _turn(kind, poses, first).mean(-1)
    middle = poses.mean(-2)
    index = 0 if kind == "column" else 2
    angle = first[..., 0, index] + turned
    if kind == "column":
        angle = torch.remainder(angle, poses[..., 0, 1])
    parts = list(middle.unbind(-1))
    parts[index] = angle
    return torch.stack(parts, dim=-1)


def motion_size(kind: str) -> int:
    """Features of a pose against another."""
    return 5 if kind == "column" else 6


def motion_features(kind: str, poses: Tensor, origin: Tensor) -> Tensor:
    """Where poses are as seen from an origin: [..., motion_size(kind)] float32.

    Args:
        poses, origin: [..., P], broadcast against each other.
    """
    poses, origin = torch.broadcast_tensors(poses, origin)
    turn = _turn(kind, poses, origin)
    if kind == "column":
        share = turn / VIEW
        return torch.cat([share.clamp(-2, 2)[..., None], _waves(math.pi * share / 2, (1, 2))], dim=-1)
    delta = poses[..., :2] - origin[..., :2]
    cos, sin = origin[..., 2].cos(), origin[..., 2].sin()
    ahead, aside = cos * delta[..., 0] + sin * delta[..., 1], cos * delta[..., 1] - sin * delta[..., 0]
    near = torch.stack([ahead.tanh(), aside.tanh()], dim=-1)
    return torch.cat([near, _waves(turn, (1, 2))], dim=-1)


def pose_distance(kind: str, poses: Tensor, origin: Tensor) -> Tensor:
    """How unlike two views are: share of a view turned away, plus, for "pose", squares walked / 2.

    Args:
        poses, origin: [..., P], broadcast against each other.

    Returns:
        [...] float32, 0 for the same view.
    """
    poses, origin = torch.broadcast_tensors(poses, origin)
    turn = _turn(kind, poses, origin).abs()
    if kind == "column":
        return turn / VIEW
    return turn / (math.pi / 3) + (poses[..., :2] - origin[..., :2]).norm(dim=-1) / 2
