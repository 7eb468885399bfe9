"""A memory's frames in the slots of networks that pack their history themselves (FramePack, Helios).

Such a network has one slot for an anchor, then one slot per history frame in groups of falling resolution, and the
window:

    forwards        [anchor][ 16 at k4 ][2 at k2][1 at k1][ window ]
    from the end    [anchor][ gap ][ window ][1 at k1][2 at k2][ 16 at k4 ]

The frame next to the window has the k1 slot. A frame's position is that of its slot, so that a long video never leaves
the positions of training. For frames that follow each other a slot is what their ids say; frames with gaps between
their ids (a memory that retrieves) move together.

While the video is shorter than the slots, the anchor is also a history frame, as in the pipelines of both networks.
B videos, C channels, m frames of a group, h x w latent cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...memory.base import Kernel, MemoryRead

__all__ = ["Shown", "Slots", "anchored", "check_groups", "check_sizes", "lay_out", "shown"]


@dataclass(frozen=True)
class Shown:
    """What a memory shows, by the side of the window on which it lies, in rising order of ids.

    Args:
        past: [B, C, p, h, w], p may be 0; past_ids: [B, p].
        future: [B, C, f, h, w], f may be 0; future_ids: [B, f].
    """

    past: Tensor
    past_ids: Tensor
    future: Tensor
    future_ids: Tensor


@dataclass(frozen=True)
class Slots:
    """One group of slots.

    Args:
        frames: [B, C, m, h, w]; indices: [m] int64 positions.
        real: [m] bool, False where zeros stand for a frame that does not exist.
    """

    frames: Tensor
    indices: Tensor
    real: Tensor

    @staticmethod
    def cat(parts: Sequence[Slots | None]) -> Slots | None:
        """All parts one after the other; None for none."""
        found = [part for part in parts if part is not None]
        if not found:
            return None
        return Slots(
            torch.cat([part.frames for part in found], 2),
            torch.cat([part.indices for part in found]),
            torch.cat([part.real for part in found]),
        )


def shown(read: MemoryRead, x: Tensor, frame_ids: Tensor) -> Shown:
    """The frames of a read beside the window x.

    Args:
        read: of the memory.
        x: [B, C, n, h, w]; frame_ids: [n].

    Raises:
        ValueError: a memory of tokens alone, frames of another size, frames that the window holds too, or rows whose
            frames do not stand alike.

    Example:
        >>> beside = shown(MemoryRead(), torch.zeros(1, 4, 3, 2, 2), torch.arange(3))
        >>> beside.past.shape[2], beside.future.shape[2]
        (0, 0)
    """
    frames, ids = read.frames, read.frame_ids
    if frames is None or ids is None:
        if read.tokens is not None:
            raise ValueError(
                "the memory keeps tokens only, and this network packs frames itself; use 'pack' without packers, "
                "'window', 'sink_window', 'full' or 'retrieve'"
            )
        none, no_ids = x[:, :, :0], frame_ids.new_zeros(x.shape[0], 0)
        return Shown(none, no_ids, none, no_ids)
    if (frames.shape[:2], frames.shape[3:]) != (x.shape[:2], x.shape[3:]):
        raise ValueError(
            f"the memory shows frames {tuple(frames.shape)} to a window {tuple(x.shape)}; rows, channels and cells "
            "must agree, history and video need one size"
        )
    frames, ids = frames.to(x), ids.to(frame_ids)
    before = (ids < frame_ids.min()).sum(1)
    after = (ids > frame_ids.max()).sum(1)
    if bool((before + after != ids.shape[1]).any()):
        raise ValueError(f"the memory shows frames {ids[0].tolist()}, and the window makes {frame_ids.tolist()}")
    if bool((before != before[0]).any()):
        raise ValueError(
            f"the videos of this batch have {before.tolist()} references before the window; one call needs the same "
            "number in all, run them one by one"
        )
    p = int(before[0])
    return Shown(frames[:, :, :p], ids[:, :p], frames[:, :, p:], ids[:, p:])


def lay_out(
    frames: Tensor, sizes: Sequence[int], first: int, *, at_end: bool, zeros: bool
) -> tuple[Slots | None, ...]:
    """Frames in groups of slots.

    Args:
        frames: [B, C, m, h, w] in rising order of ids; those that find no slot are left out.
        sizes: slots per group, in the order of time.
        first: position of the first slot.
        at_end: the last frame has the last slot (a past); False: the first has the first (a future).
        zeros: empty slots hold zeros; False leaves them out, and a group without frames is None.

    Example:
        >>> groups = lay_out(torch.ones(1, 4, 5, 2, 2), (16, 2, 1), 1, at_end=True, zeros=False)
        >>> [group.indices.tolist() for group in groups]
        [[15, 16], [17, 18], [19]]
    """
    capacity = sum(sizes)
    count = min(frames.shape[2], capacity)
    frames = frames[:, :, frames.shape[2] - count :] if at_end else frames[:, :, :count]
    offset = capacity - count if at_end else 0
    places = torch.arange(first, first + capacity, device=frames.device)
    found: list[Slots | None] = []
    start = 0
    for size in sizes:
        end = start + size
        low, high = min(max(start, offset), end), max(min(end, offset + count), start)
        held = frames[:, :, low - offset : high - offset] if high > low else frames[:, :, :0]
        if zeros and size:
            group = frames.new_zeros(*frames.shape[:2], size, *frames.shape[3:])
            real = torch.zeros(size, dtype=torch.bool, device=frames.device)
            if high > low:
                group[:, :, low - start : high - start] = held
                real[low - start : high - start] = True
            found.append(Slots(group, places[start:end], real))
        elif high > low:
            real = torch.ones(high - low, dtype=torch.bool, device=frames.device)
            found.append(Slots(held, places[low:high], real))
        else:
            found.append(None)
        start = end
    return tuple(found)


def anchored(past: Tensor, ids: Tensor, capacity: int, *, zeros: bool) -> tuple[Slots | None, Tensor]:
    """The anchor at position 0, and the history frames.

    The anchor is the oldest frame shown. It is also the first history frame while the history has room for it and
    nothing is missing between the two.

    Args:
        past: [B, C, p, h, w]; ids: [B, p] rising, the last one next to the window.
        capacity: slots of the history.
        zeros: without a frame the anchor is zeros; False: it is None.

    Returns:
        The anchor and [B, C, m, h, w].
    """
    place = torch.zeros(1, dtype=torch.int64, device=past.device)
    if not past.shape[2]:
        empty = past.new_zeros(*past.shape[:2], 1, *past.shape[3:])
        return (Slots(empty, place, place.bool()) if zeros else None), past
    anchor = Slots(past[:, :, :1], place, ~place.bool())
    follows = past.shape[2] == 1 or bool((ids[:, 1] == ids[:, 0] + 1).all())
    return anchor, past if follows and past.shape[2] <= capacity else past[:, :, 1:]


def check_sizes(sizes: Sequence[int], least: Sequence[int]) -> tuple[int, ...]:
    """History sizes, oldest group first.

    Args:
        sizes: one per group; least: fewest slots of each.

    Raises:
        ValueError: another number of groups, or too few slots.
    """
    found = tuple(int(size) for size in sizes)
    if len(found) != len(least) or any(size < low for size, low in zip(found, least)):
        raise ValueError(
            f"history_sizes={list(sizes)}; give {len(least)} numbers, oldest group first, each at least "
            f"{list(least)}, for instance [16, 2, 1]"
        )
    return found


def check_groups(read: MemoryRead, sizes: Sequence[int], kernels: Sequence[Kernel]) -> None:
    """Raises ValueError where the memory packs more frames into a group than the network has slots for.

    Args:
        read: of the memory; groups at full resolution are not counted, they are divided anew.
        sizes, kernels: of the network's groups.
    """
    for size, kernel in zip(sizes, kernels):
        held = sum(group.frames.shape[2] for group in read.groups if tuple(group.kernel) == tuple(kernel))
        if tuple(kernel) != tuple(kernels[-1]) and held > size:
            raise ValueError(
                f"the memory shows {held} frames at {tuple(kernel)}, and the carrier has {size} slots there; make "
                f"both with the same history_sizes, as carrier.memory() does"
            )
