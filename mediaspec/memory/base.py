"""What a memory of frames is: frames that leave the window are written, the network reads what is worth its tokens.

    memory.write(frames, frame_ids)         finished frames, once, in the order in which they are finished
    memory.read(targets) -> MemoryRead      what the frames `targets` may look at
    memory.state_dict(), memory.nbytes      contents as tensors, and their size

Memories are interchangeable; one of them is one file. A memory holds contents, no weights: networks that compress
(packers) are given to it and are trained and saved by whoever owns them.

B rows, C channels, T frames, H x W cells of a frame, L tokens, D width.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

if TYPE_CHECKING:
    from .packers import Packer

__all__ = ["FrameGroup", "FrameMemory", "FrameStore", "MemoryRead", "MemoryTokens", "load_state", "save_state"]

Kernel = tuple[int, int, int]


@dataclass(frozen=True)
class FrameGroup:
    """Frames that are shown at one rate.

    Args:
        frames: [B, C, T, H, W] latents.
        frame_ids: [B, T] int64, rising.
        kernel: (kt, kh, kw) latent cells of a token, for networks that pack themselves.
    """

    frames: Tensor
    frame_ids: Tensor
    kernel: Kernel = (1, 2, 2)


@dataclass(frozen=True)
class MemoryTokens:
    """Tokens with what attention has to know of them.

    Args:
        values: [B, L, D].
        positions: [B, L, 3] centre of a token: frame id, row and column in units of base patches.
        times: [B, L, K] ids of the frames that were merged, NaN where there are fewer.
        spans: [L, 2] rows and columns of base patches that were merged.
        counts: [L] base tokens that were merged.
    """

    values: Tensor
    positions: Tensor
    times: Tensor
    spans: Tensor
    counts: Tensor

    def __len__(self) -> int:
        return self.values.shape[1]

    def log_count_bias(self) -> Tensor:
        """[L] to add to attention logits: exact where the merged tokens agree."""
        return self.counts.to(self.values.dtype).log()

    @staticmethod
    def cat(parts: Sequence[MemoryTokens]) -> MemoryTokens | None:
        """All parts one after the other; None for no part."""
        if not parts:
            return None
        most = max(part.times.shape[-1] for part in parts)
        times = [
            torch.nn.functional.pad(part.times, (0, most - part.times.shape[-1]), value=float("nan")) for part in parts
        ]
        return MemoryTokens(
            torch.cat([part.values for part in parts], 1),
            torch.cat([part.positions for part in parts], 1),
            torch.cat(times, 1),
            torch.cat([part.spans for part in parts]),
            torch.cat([part.counts for part in parts]),
        )


@dataclass(frozen=True)
class MemoryRead:
    """What a memory shows.

    Args:
        groups: raw frames by rate, oldest group first; empty for a memory that keeps tokens only.
        tokens: of memories with packers, else None.
        level: noise level at which the frames are to be shown (the network is told so).
    """

    groups: tuple[FrameGroup, ...] = ()
    tokens: MemoryTokens | None = None
    level: float = 0.0

    @property
    def is_empty(self) -> bool:
        return not self.groups and self.tokens is None

    @property
    def frames(self) -> Tensor | None:
        """[B, C, T, H, W] all raw frames in rising order of their ids, or None."""
        return self._sorted()[0]

    @property
    def frame_ids(self) -> Tensor | None:
        """[B, T] their ids."""
        return self._sorted()[1]

    def _sorted(self) -> tuple[Tensor | None, Tensor | None]:
        if not self.groups:
            return None, None
        ids = torch.cat([group.frame_ids for group in self.groups], 1)
        frames = torch.cat([group.frames for group in self.groups], 2)
        order = ids.argsort(dim=1, stable=True)
        if bool((order == torch.arange(ids.shape[1], device=ids.device)).all()):
            return frames, ids
        return gather_frames(frames, order), ids.gather(1, order)

    def with_level(self, level: float) -> MemoryRead:
        return replace(self, level=level)


def gather_frames(frames: Tensor, index: Tensor) -> Tensor:
    """Frames [B, C, T, ...] picked per row by index [B, n]."""
    wide = index.to(frames.device).reshape(index.shape[0], 1, -1, *[1] * (frames.dim() - 3))
    return frames.gather(2, wide.expand(-1, frames.shape[1], -1, *frames.shape[3:]))


class FrameStore:
    """Frames with their ids in the order in which they were written."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.frames: list[Tensor] = []  # [B, C, ...] each; a copy, so that a kept frame does not hold its whole chunk

    def __len__(self) -> int:
        return len(self.ids)

    def append(self, frames: Tensor, ids: Sequence[int]) -> None:
        self.ids += list(ids)
        self.frames += [frame.clone() for frame in frames.unbind(2)]

    def pop(self, count: int) -> tuple[Tensor, list[int]]:
        """Takes the `count` oldest frames out: [B, C, count, ...] and their ids."""
        taken, ids = torch.stack(self.frames[:count], 2), self.ids[:count]
        del self.frames[:count], self.ids[:count]
        return taken, ids

    def drop(self, count: int) -> None:
        """Forgets the `count` oldest frames."""
        if count > 0:
            del self.frames[:count], self.ids[:count]

    def group(self, kernel: Kernel, start: int = 0, end: int | None = None) -> FrameGroup | None:
        """Frames [start, end) in the order of their ids, or None for none."""
        places = sorted(range(len(self))[start:end], key=lambda i: self.ids[i])
        if not places:
            return None
        frames = torch.stack([self.frames[i] for i in places], 2)
        ids = torch.tensor([self.ids[i] for i in places], device=frames.device)
        return FrameGroup(frames, ids.expand(frames.shape[0], -1), kernel)

    @property
    def nbytes(self) -> int:
        return sum(frame.nbytes for frame in self.frames)

    def state_dict(self) -> dict[str, Tensor]:
        state = {"ids": torch.tensor(self.ids, dtype=torch.int64)}
        if self.frames:
            state["frames"] = torch.stack(self.frames, 2)
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.ids = state["ids"].tolist()
        self.frames = [frame.clone() for frame in state["frames"].unbind(2)] if self.ids else []


class FrameMemory(ABC):
    """Base of all memories: checks what is written, counts, saves.

    Args:
        level: noise level at which `read` asks for its frames to be shown.
        packer: makes tokens of full-resolution frames; None hands out raw frames alone.
        kernel: cells of a base patch, for networks that pack raw frames themselves.
    """

    name = "base"

    def __init__(self, *, level: float = 0.0, packer: Packer | None = None, kernel: Kernel = (1, 2, 2)) -> None:
        if not 0.0 <= level < 1.0:
            raise ValueError(f"level={level}; references are shown at a level from 0 to below 1")
        self.level, self.packer, self.kernel = level, packer, packer.kernel if packer is not None else kernel
        self.written = 0
        self._shape: tuple[int, ...] | None = None

    def write(
        self, frames: Tensor, frame_ids: Sequence[int] | Tensor | None = None, poses: Tensor | None = None
    ) -> None:
        """Takes finished frames.

        Args:
            frames: [B, C, n, ...] finite; the same B, C and cells in every call.
            frame_ids: n distinct ids >= 0; None goes on counting from the frames written so far.
            poses: [B, n, P] where the camera was, for memories that choose by pose.

        Raises:
            ValueError: another shape than before, values that are not finite, or ids that do not fit.
        """
        if frames.dim() < 3:
            raise ValueError(f"frames have shape {tuple(frames.shape)}; give [B, C, n, ...]")
        shape = (*frames.shape[:2], *frames.shape[3:])
        if self._shape is not None and shape != self._shape:
            raise ValueError(
                f"frames of shape {shape} (rows, channels, cells) after frames of {self._shape}; a memory holds one "
                "video size, call reset() before another"
            )
        count = frames.shape[2]
        if frame_ids is None:
            frame_ids = range(self.written, self.written + count)
        ids = [int(i) for i in (frame_ids.tolist() if isinstance(frame_ids, Tensor) else frame_ids)]
        if len(ids) != count or len(set(ids)) != count or any(i < 0 for i in ids):
            raise ValueError(f"frame_ids={ids} for {count} frames; give one distinct id >= 0 per frame")
        if not bool(torch.isfinite(frames).all()):
            raise ValueError(f"frames {ids[0]} to {ids[-1]} hold NaN or infinite values; a memory would keep them")
        if count == 0:
            return
        self._shape = shape
        self._write(frames.detach() if not torch.is_grad_enabled() else frames, ids, poses)
        self.written += count

    def read(
        self, targets: Sequence[int] | Tensor | None = None, query: Tensor | None = None, pose: Tensor | None = None
    ) -> MemoryRead:
        """What the frames `targets` may look at.

        Args:
            targets: ids of the window's frames, for memories that weigh by distance in time.
            query: [B, C, n, ...] frames that stand for what is to be made, for memories that choose by likeness.
            pose: [B, P] where the camera will be, for memories that choose by pose.
        """
        if self._shape is None:
            return MemoryRead(level=self.level)
        return self._read(targets, query, pose).with_level(self.level)

    @abstractmethod
    def _write(self, frames: Tensor, ids: list[int], poses: Tensor | None) -> None: ...

    @abstractmethod
    def _read(
        self, targets: Sequence[int] | Tensor | None, query: Tensor | None, pose: Tensor | None
    ) -> MemoryRead: ...

    @abstractmethod
    def _clear(self) -> None:
        """Forgets all contents."""

    @abstractmethod
    def _contents(self) -> dict[str, Tensor]:
        """Contents as a flat dict of tensors."""

    @abstractmethod
    def _restore(self, state: dict[str, Tensor]) -> None: ...

    @property
    @abstractmethod
    def frames_held(self) -> int:
        """Frames that can still be read in some form."""

    @property
    def nbytes(self) -> int:
        """Bytes of the contents, weights not counted."""
        return sum(value.nbytes for value in self._contents().values())

    def reset(self) -> None:
        """Forgets everything; another video may follow."""
        self.written, self._shape = 0, None
        self._clear()

    def state_dict(self) -> dict[str, Tensor]:
        """Contents as a flat dict of tensors, ready for safetensors."""
        shape = torch.tensor(self._shape or (), dtype=torch.int64)
        kind = torch.tensor(list(self.name.encode()), dtype=torch.uint8)
        return {"written": torch.tensor(self.written), "shape": shape, "kind": kind, **self._contents()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Takes contents from `state_dict` of a memory with the same settings.

        Raises:
            ValueError: a key is missing, or another kind of memory was saved.
        """
        missing = sorted({"written", "shape", "kind"} - set(state))
        if missing:
            raise ValueError(f"this is no memory state: {', '.join(missing)} missing; save one with state_dict()")
        kind = bytes(state["kind"].tolist()).decode()
        if kind != self.name:
            raise ValueError(f"this is the state of a memory {kind!r}, not {self.name!r}; load it into the former")
        self.reset()
        self.written = int(state["written"])
        self._shape = tuple(state["shape"].tolist()) or None
        if self._shape is not None:
            try:
                self._restore(state)
            except KeyError as error:
                self.reset()
                raise ValueError(f"the state lacks {error}; it was saved with other settings") from None

    def _shown(self, *groups: FrameGroup | None) -> MemoryRead:
        """A read of the groups that are not empty, with tokens where there is a packer."""
        found = tuple(group for group in groups if group is not None)
        packer = self.packer
        tokens = None if packer is None else MemoryTokens.cat([packer.pack(group) for group in found])
        return MemoryRead(found, tokens)


def prefixed(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under `prefix.key`."""
    return {f"{prefix}.{key}": value for key, value in state.items()}


def below(prefix: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under `prefix.`, without it."""
    return {key[len(prefix) + 1 :]: value for key, value in state.items() if key.startswith(f"{prefix}.")}


def save_state(path: str | os.PathLike[str], state: dict[str, Tensor]) -> None:
    """Writes a state to a safetensors file, all of it or nothing (a killed process leaves the old file).

    Example:
        >>> save_state("memory.safetensors", memory.state_dict())  # doctest: +SKIP
        >>> memory.load_state_dict(load_state("memory.safetensors"))  # doctest: +SKIP
    """
    path = Path(path)
    part = path.with_name(path.name + ".part")
    save_file({key: value.detach().cpu().contiguous().clone() for key, value in state.items()}, str(part))
    with open(part, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(part, path)


def load_state(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Reads a state that `save_state` wrote.

    Raises:
        ValueError: there is no such file, or it is damaged.
    """
    if not Path(path).is_file():
        raise ValueError(f"there is no state file {path}")
    try:
        return load_file(str(path))
    except Exception as error:
        raise ValueError(f"{path} is damaged ({error}); start again, or give an older state") from error
