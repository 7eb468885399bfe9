"""Tables that public samplers compute step by step, in closed form.

S levels, H frames, B blocks, N steps; a row is one step. Each function was checked against the step-by-step rule.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = [
    "block_lag_table",
    "block_lag_updates",
    "fifo_init_frames",
    "framepack_paddings",
    "pyramid_matrix",
    "pyramid_window",
    "rolling_windows",
]


def _at_least_one(**numbers: int) -> None:
    for name, value in numbers.items():
        if value < 1:
            raise ValueError(f"{name}={value}; at least 1 is needed")


def pyramid_matrix(frames: int, steps: int, slope: float) -> Tensor:
    """Levels of Diffusion Forcing's pyramid: row m, frame i has clip(S + int(slope * i) - m, 0, S).

    Args:
        frames: H.
        steps: S levels; slope: levels between neighbours; S makes one frame after the other, 0 all together.

    Returns:
        [S + int((H - 1) slope) + 1, H] int64 (arXiv:2407.01392).

    Example:
        >>> pyramid_matrix(2, 2, 1).tolist()
        [[2, 2], [1, 2], [0, 1], [0, 0]]
    """
    _at_least_one(frames=frames, steps=steps)
    if slope < 0:
        raise ValueError(f"slope={slope}; later frames cannot be cleaner, give at least 0")
    ahead = torch.tensor([int(i * slope) for i in range(frames)])
    rows = torch.arange(steps + int((frames - 1) * slope) + 1)
    return (steps + ahead[None, :] - rows[:, None]).clamp(0, steps)


def pyramid_window(steps: int, slope: int) -> tuple[int, list[int]]:
    """The window that an endless pyramid settles to: its length and its levels at the start of a step.

    Example:
        >>> pyramid_window(50, 20)
        (3, [10, 30, 50])
    """
    _at_least_one(steps=steps, slope=slope)
    w = math.ceil(steps / slope)
    return w, [steps - slope * (w - 1 - j) for j in range(w)]


def block_lag_table(blocks: int, steps: int, lag: int, ready: int = 0) -> Tensor:
    """Step index of every block when each starts `lag` steps after the one before (SkyReels-V2's `ar_step`).

    Args:
        blocks: B in all, of which the first `ready` are finished.
        steps: N denoising steps of a block.
        lag: 0 denoises all blocks together, N or more one after the other.

    Returns:
        [N + (B - ready - 1) min(lag, N), B] int64: 0 not begun, i the i-th step done in this row, N + 1 finished
        before. `block_lag_updates` says which blocks a row moves.

    Example:
        >>> block_lag_table(2, 2, 1).tolist()
        [[1, 0], [2, 1], [3, 2]]
    """
    _at_least_one(blocks=blocks, steps=steps)
    if lag < 0 or not 0 <= ready < blocks:
        raise ValueError(f"lag={lag}, ready={ready}; need lag >= 0 and 0 <= ready < blocks={blocks}")
    late, todo = min(lag, steps), blocks - ready
    rows = torch.arange(1, steps + (todo - 1) * late + 1)
    place = torch.arange(blocks) - ready
    table = (rows[:, None] - place[None, :] * late).clamp(0, steps + 1)
    table[:, :ready] = steps + 1
    return table


def block_lag_updates(table: Tensor, steps: int) -> Tensor:
    """[rows, B] bool: the blocks that a row of `block_lag_table` moves (their timestep is `timesteps[index - 1]`)."""
    before = torch.cat([torch.where(table[:1] > steps, steps + 1, 0), table[:-1]])
    return (table != before) & (table != steps + 1)


def rolling_windows(blocks: int, levels: int) -> list[tuple[int, int]]:
    """First and last block of every window when `levels` blocks are in work at a time (Rolling Forcing).

    Example:
        >>> rolling_windows(4, 3)
        [(0, 0), (0, 1), (0, 2), (1, 3), (2, 3), (3, 3)]
    """
    _at_least_one(blocks=blocks, levels=levels)
    return [(max(0, i - levels + 1), min(blocks - 1, i)) for i in range(blocks + levels - 1)]


def framepack_paddings(sections: int) -> list[int]:
    """Sections between what is made and the first frame, per section, in generation order (arXiv:2504.12626).

    Example:
        >>> framepack_paddings(5)
        [3, 2, 2, 1, 0]
    """
    _at_least_one(sections=sections)
    if sections > 4:
        return [3] + [2] * (sections - 3) + [1, 0]
    return list(range(sections))[::-1]


def fifo_init_frames(frames: int, parts: int) -> list[int]:
    """Frame of the base clip that seeds each of `frames * parts` queue slots (arXiv:2405.11473).

    The first `frames * (parts - 1)` frames that leave such a queue are copies of frame 0 and are thrown away.

    Example:
        >>> fifo_init_frames(4, 2)
        [0, 0, 0, 0, 0, 1, 2, 3]
    """
    _at_least_one(frames=frames, parts=parts)
    return [max(0, i - frames * (parts - 1)) for i in range(frames * parts)]
