"""Conformance suite for frame memories: does it hold what was written, show only that, and come back from disk?

B rows, C channels, T frames. All numbers are functions of the arguments: a run is reproducible.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from ..memory.base import FrameMemory, MemoryRead, load_state, save_state

__all__ = ["check_memory"]


def check_memory(
    factory: Callable[[], FrameMemory],
    *,
    shape: tuple[int, ...] = (4, 8, 8),
    rows: int = 2,
    frames: int = 24,
    bounded: bool = False,
) -> None:
    """Checks a memory's promises on its own interface.

    Args:
        factory: makes an empty memory; every call with the same settings and the same (trained) networks.
        shape: of a frame, (C, H, W).
        rows: B; frames: T per video.
        bounded: whether the memory promises not to grow with the video.

    Raises:
        AssertionError: naming the memory and the promise that fails.

    Example:
        >>> from mediaspec.memory.window import WindowMemory
        >>> check_memory(lambda: WindowMemory(4), bounded=True)
    """
    video, poses = _video(rows, shape, 2 * frames)
    with torch.no_grad():
        _starts_empty(factory)
        _holds_what_was_written(factory, video[:, :, :frames], poses[:, :frames])
        _chunks_do_not_matter(factory, video[:, :, :frames], poses[:, :frames])
        _rows_do_not_matter(factory, video[:, :, :frames], poses[:, :frames])
        _reading_changes_nothing(factory, video, poses, frames)
        _comes_back(factory, video, poses, frames)
        _refuses(factory, video, poses)
        if bounded:
            _does_not_grow(factory, rows, shape, frames)


def _video(rows: int, shape: tuple[int, ...], count: int) -> tuple[Tensor, Tensor]:
    """Smooth frames that all differ, [B, C, T, H, W], and poses [B, T, 2]."""
    cells = torch.arange(rows * count * torch.Size(shape).numel(), dtype=torch.float64)
    video = torch.sin(cells * 0.7).float().reshape(rows, count, *shape).transpose(1, 2).contiguous()
    time = torch.arange(count).float()
    poses = torch.stack([torch.sin(time / 3), torch.cos(time / 5)], -1)
    return video, torch.stack([poses + row for row in range(rows)])


def _require(ok: bool | Tensor, memory: FrameMemory, message: str) -> None:
    if not bool(ok):
        raise AssertionError(f"{type(memory).__name__} ({memory.name}): {message}")


def _write(memory: FrameMemory, video: Tensor, poses: Tensor, start: int, end: int, chunk: int = 5) -> None:
    for first in range(start, end, chunk):
        last = min(first + chunk, end)
        memory.write(video[:, :, first:last], range(first, last), poses[:, first:last])


def _read(memory: FrameMemory, poses: Tensor, at: int) -> MemoryRead:
    return memory.read(range(at, at + 4), pose=poses[:, at % poses.shape[1]])


def _leaves(read: MemoryRead) -> list[Tensor]:
    found = [part for group in read.groups for part in (group.frames, group.frame_ids)]
    if read.tokens is not None:
        tokens = read.tokens
        found += [tokens.values, tokens.positions, tokens.times, tokens.spans, tokens.counts]
    return found


def _same(a: MemoryRead, b: MemoryRead, tolerance: float = 0.0) -> bool:
    left, right = _leaves(a), _leaves(b)
    if len(left) != len(right) or any(x.shape != y.shape for x, y in zip(left, right)):
        return False
    return all(
        torch.allclose(x.double(), y.double(), rtol=tolerance, atol=tolerance, equal_nan=True)
        for x, y in zip(left, right)
    )


def _starts_empty(factory: Callable[[], FrameMemory]) -> None:
    memory = factory()
    _require(memory.frames_held == 0 and memory.nbytes == 0, memory, "a new memory holds something")
    _require(memory.read([0], pose=torch.zeros(1, 2)).is_empty, memory, "a new memory shows something")
    _require(factory() is not memory, memory, "the factory hands out the same memory twice")


def _holds_what_was_written(factory: Callable[[], FrameMemory], video: Tensor, poses: Tensor) -> None:
    memory, count = factory(), video.shape[2]
    _write(memory, video, poses, 0, count)
    _require(memory.written == count, memory, f"written={memory.written} after {count} frames")
    _require(memory.frames_held <= count, memory, f"holds {memory.frames_held} of {count} frames")
    read = _read(memory, poses, count)
    _require(read.is_empty or memory.nbytes > 0, memory, "shows frames that weigh nothing")
    for group in read.groups:
        ids = group.frame_ids
        _require(ids.shape == (len(video), group.frames.shape[2]), memory, f"frame_ids of shape {tuple(ids.shape)}")
        _require((ids >= 0).all() and (ids < count).all(), memory, "shows frames that were never written")
        _require((ids.diff(dim=1) > 0).all(), memory, "frames of a group are not in rising order")
        for row in range(len(video)):
            _require(
                torch.equal(group.frames[row], video[row][:, ids[row]]), memory, "shows other frames than written"
            )
    tokens = read.tokens
    if tokens is not None:
        batch, length = tokens.values.shape[:2]
        _require(tokens.positions.shape == (batch, length, 3), memory, "positions are not [B, L, 3]")
        _require(tokens.times.shape[:2] == (batch, length), memory, "times are not [B, L, K]")
        _require(tokens.spans.shape == (length, 2), memory, "spans are not [L, 2]")
        _require(tokens.counts.shape == (length,), memory, "counts are not [L]")
        _require((tokens.counts >= 1).all(), memory, "a token stands for less than one base token")
        times = tokens.times[~tokens.times.isnan()]
        _require((times >= 0).all() and (times < count).all(), memory, "tokens stand for frames never written")
        _require(tokens.values.isfinite().all(), memory, "tokens are not finite")


def _chunks_do_not_matter(factory: Callable[[], FrameMemory], video: Tensor, poses: Tensor) -> None:
    count = video.shape[2]
    memories = [factory() for _ in range(3)]
    for memory, chunk in zip(memories, (1, 5, count)):
        _write(memory, video, poses, 0, count, chunk)
    reads = [_read(memory, poses, count) for memory in memories]
    for read in reads[1:]:
        _require(_same(reads[0], read, 1e-6), memories[0], "what it shows depends on how many frames a write has")


def _rows_do_not_matter(factory: Callable[[], FrameMemory], video: Tensor, poses: Tensor) -> None:
    together, alone = factory(), factory()
    _write(together, video, poses, 0, video.shape[2])
    _write(alone, video[:1], poses[:1], 0, video.shape[2])
    joint, single = _read(together, poses, video.shape[2]), _read(alone, poses[:1], video.shape[2])
    _require(len(joint.groups) == len(single.groups), together, "the number of groups depends on the batch")
    for group, other in zip(joint.groups, single.groups):
        same = torch.equal(group.frame_ids[:1], other.frame_ids) and torch.equal(group.frames[:1], other.frames)
        _require(same, together, "a video's frames depend on its batch")
    _require(
        (joint.tokens is None) == (single.tokens is None), together, "whether there are tokens depends on the batch"
    )
    if joint.tokens is not None and single.tokens is not None:
        near = joint.tokens.values[:1].shape == single.tokens.values.shape and torch.allclose(
            joint.tokens.values[:1], single.tokens.values, rtol=1e-5, atol=1e-5
        )
        _require(near, together, "a video's tokens depend on its batch")


def _reading_changes_nothing(factory: Callable[[], FrameMemory], video: Tensor, poses: Tensor, frames: int) -> None:
    memory = factory()
    _write(memory, video, poses, 0, frames)
    held = memory.state_dict()
    first = _read(memory, poses, frames)
    kept = [leaf.clone() for leaf in _leaves(first)]
    _require(_same(first, _read(memory, poses, frames)), memory, "a second read shows something else")
    after = memory.state_dict()
    unchanged = held.keys() == after.keys() and all(torch.equal(held[key], after[key]) for key in held)
    _require(unchanged, memory, "reading changes the contents")
    _write(memory, video, poses, frames, 2 * frames)
    still = all(torch.equal(x.nan_to_num(-1), y.nan_to_num(-1)) for x, y in zip(kept, _leaves(first)))
    _require(still, memory, "a later write changes what was read before")


def _comes_back(factory: Callable[[], FrameMemory], video: Tensor, poses: Tensor, frames: int) -> None:
    memory, loaded = factory(), factory()
    _write(memory, video, poses, 0, frames)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "memory.safetensors"
        save_state(path, memory.state_dict())
        loaded.load_state_dict(load_state(path))
    _require(loaded.nbytes == memory.nbytes, memory, f"{memory.nbytes} bytes are {loaded.nbytes} after loading")
    _require(_same(_read(memory, poses, frames), _read(loaded, poses, frames)), memory, "shows something else, loaded")
    for one in (memory, loaded):
        _write(one, video, poses, frames, 2 * frames)
    at = 2 * frames
    _require(_same(_read(memory, poses, at), _read(loaded, poses, at)), memory, "goes on differently after loading")
    memory.reset()
    _require(memory.nbytes == 0 and memory.written == 0, memory, "reset() leaves something")
    _require(_read(memory, poses, at).is_empty, memory, "reset() leaves something to show")


def _refuses(factory: Callable[[], FrameMemory], video: Tensor, poses: Tensor) -> None:
    bad = video[:, :, :2].clone()
    bad[0, 0, 1] = float("nan")
    calls = {
        "NaN": lambda memory: memory.write(bad, [2, 3], poses[:, :2]),
        "another size": lambda memory: memory.write(video[:, :1, :2], [2, 3], poses[:, :2]),
        "one id for two frames": lambda memory: memory.write(video[:, :, :2], [2], poses[:, :2]),
        "the same id twice": lambda memory: memory.write(video[:, :, :2], [2, 2], poses[:, :2]),
        "a foreign state": lambda memory: memory.load_state_dict({"something": torch.zeros(1)}),
    }
    for name, call in calls.items():
        memory = factory()
        memory.write(video[:, :, :2], [0, 1], poses[:, :2])
        try:
            call(memory)
        except ValueError:
            continue
        raise AssertionError(f"{type(memory).__name__} ({memory.name}): takes {name} without a ValueError")


def _does_not_grow(factory: Callable[[], FrameMemory], rows: int, shape: tuple[int, ...], frames: int) -> None:
    memory, largest = factory(), [0, 0, 0]
    video, poses = _video(rows, shape, 3 * frames)
    for third in range(3):
        for first in range(third * frames, (third + 1) * frames):
            _write(memory, video, poses, first, first + 1)
            largest[third] = max(largest[third], memory.nbytes)
    _require(largest[2] <= largest[1], memory, f"grows: at most {largest} bytes in every third of {3 * frames} frames")
