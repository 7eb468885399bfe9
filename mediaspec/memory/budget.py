"""What a memory costs, in tokens, bytes and operations, before a run and during it, and where it must end.

Per call of a transformer with width D, feed-forward F, L layers, N_n new and N_h history tokens, 2 operations per
multiply-add, b bytes per number:

    recompute (prepend)   attention 4 (N_n + N_h)^2 D L, linear 2 (N_n + N_h)(4 D^2 + 2 D F) L, nothing cached
    cache (causal)        attention 4 N_n (N_n + N_h) D L, linear 2 N_n (4 D^2 + 2 D F) L, keys and values 2 L N_h D b
    channel               no history token; 2 N_n (C w_m p) D once, p cells per base patch
    cross                 adds 4 N_n N_h D L_x + 4 (N_n + N_h) D^2 L_x for L_x cross-attention layers
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from .base import FrameGroup, MemoryRead, MemoryTokens
from .packers import Kernel, token_count
from .window_schedule import WindowSchedule

__all__ = ["CallCost", "MemoryLedger", "TrainedLength", "call_cost", "geometric_tokens", "history_tokens", "step_cost"]

MODES = ("recompute", "cache", "channel", "cross")


def history_tokens(height: int, width: int, groups: Sequence[tuple[int, str | Kernel]]) -> tuple[list[int], int]:
    """Tokens of every group of a packed history, and of all.

    Args:
        height, width: latent cells.
        groups: (frames, kernel name or (kt, kh, kw)).

    Example:
        >>> history_tokens(60, 104, [(1, "k1"), (1, "k1"), (2, "k2"), (16, "k4")])
        ([1560, 1560, 390, 416], 3926)
    """
    counts = [token_count(frames, height, width, kernel) for frames, kernel in groups]
    return counts, sum(counts)


def geometric_tokens(frame_tokens: int, rate: float, history: int, new: int) -> dict[str, float]:
    """Tokens when the i-th frame back costs frame_tokens / rate^i: history, total, and the limit for endless history.

    Example:
        >>> geometric_tokens(1560, 2.0, 4, 9)["hist"]
        2925.0
    """
    if rate <= 1:
        raise ValueError(f"rate={rate}; older frames must cost less, give more than 1")
    held = frame_tokens * (1 - rate**-history) / (1 - 1 / rate)
    limit = frame_tokens * (rate / (rate - 1) + new)
    return {"hist": held, "total": held + new * frame_tokens, "limit": limit}


@dataclass(frozen=True)
class CallCost:
    """Operations of one network call, and bytes of keys and values that the history keeps."""

    attn_flops: int
    linear_flops: int
    kv_bytes: int

    @property
    def total_flops(self) -> int:
        return self.attn_flops + self.linear_flops


def call_cost(
    new: int,
    history: int,
    dim: int,
    ffn: int,
    layers: int,
    mode: Literal["recompute", "cache", "channel", "cross"] = "cache",
    *,
    bytes_per: int = 2,
    cross_layers: int | None = None,
    channel_cells: int = 0,
) -> CallCost:
    """Cost of one call, batch 1.

    Args:
        new, history: tokens.
        dim, ffn, layers: D, F, L of the transformer.
        mode: how history enters, see the head of this file.
        bytes_per: bytes of a cached number.
        cross_layers: L_x, None is `layers`.
        channel_cells: "channel": C * w_m * p numbers that join every new token.

    Example:
        >>> call_cost(4680, 3926, 1536, 8960, 30, "cache").kv_bytes
        723640320
    """
    if mode not in MODES:
        raise ValueError(f"mode={mode!r}; allowed are {', '.join(MODES)}")
    per_token = 2 * (4 * dim * dim + 2 * dim * ffn)
    if mode == "recompute":
        count = new + history
        return CallCost(4 * count * count * dim * layers, count * per_token * layers, 0)
    if mode == "cache":
        attention = 4 * new * (new + history) * dim * layers
        return CallCost(attention, new * per_token * layers, 2 * layers * history * dim * bytes_per)
    attention, linear = 4 * new * new * dim * layers, new * per_token * layers
    if mode == "channel":
        return CallCost(attention, linear + 2 * new * channel_cells * dim, 0)
    across = layers if cross_layers is None else cross_layers
    attention += 4 * new * history * dim * across
    kept = 2 * across * history * dim * bytes_per
    return CallCost(attention, linear + 4 * (new + history) * dim * dim * across, kept)


def step_cost(
    schedule: WindowSchedule, frame_tokens: int, history: int, dim: int, ffn: int, layers: int, mode: str = "cache"
) -> dict[str, float]:
    """Cost of an autoregressive step and per finished frame, before anything runs.

    Args:
        schedule: of the method; frame_tokens: tokens of a window frame; history: tokens read from the memory.
        dim, ffn, layers, mode: as in `call_cost`; "cache" adds the call that writes `delta` frames to the cache.
    """
    new = (schedule.net_frames or schedule.w) * frame_tokens
    cost = call_cost(new, history, dim, ffn, layers, mode)  # type: ignore[arg-type]
    flops = schedule.calls_per_step * cost.total_flops
    if mode == "cache" and history:
        flops += call_cost(schedule.delta * frame_tokens, history, dim, ffn, layers, "cache").total_flops
    return {
        "calls": schedule.calls_per_step,
        "tokens": new + (0 if mode == "channel" else history),
        "flops": flops,
        "flops_per_frame": flops / schedule.delta,
        "kv_bytes": cost.kv_bytes,
    }


@dataclass
class MemoryLedger:
    """What a run really read and kept; give it to `generate` as `callback_on_step_end`.

    Example:
        >>> ledger = MemoryLedger()
        >>> ledger(None, 0, {"memory_tokens": 40, "memory_frames": 3, "memory_bytes": 512, "calls": 4})
        >>> ledger.summary()["max_memory_tokens"]
        40
    """

    rows: list[dict[str, Any]] = field(default_factory=list)

    def __call__(self, rollout: object, step: int, info: dict[str, Any]) -> None:
        self.rows.append({"step": step, **info})

    def summary(self) -> dict[str, float]:
        """Largest and last values, and the number of calls."""
        found: dict[str, float] = {"steps": len(self.rows)}
        for name in ("memory_tokens", "memory_frames", "memory_bytes"):
            values = [row[name] for row in self.rows]
            found[f"max_{name}"] = max(values, default=0)
            found[f"last_{name}"] = values[-1] if values else 0
        found["calls"] = self.rows[-1]["calls"] if self.rows else 0
        return found


@dataclass(frozen=True)
class TrainedLength:
    """How many frames a network was trained to see, and what happens beyond.

    Args:
        frames: history and window together, counted in trained positions (ids from the oldest to the newest frame).
        beyond: "error" stops with a clear message; "crop" forgets the oldest frames that lie too far back (anchors
            too); "reindex" closes the gaps between ids, so that sinks and retrieved frames move next to the rest, and
            drops the oldest frames but `keep` if even that is too long.
        keep: "reindex": oldest frames that are never dropped (sinks).

    Raises:
        ValueError: an unknown fallback, or no room for anything.

    Example:
        >>> TrainedLength(8).fit(MemoryRead(), [0, 1, 2]).is_empty
        True
    """

    frames: int
    beyond: Literal["error", "crop", "reindex"] = "error"
    keep: int = 1

    def __post_init__(self) -> None:
        if self.frames < 1 or self.keep < 0:
            raise ValueError(f"frames={self.frames}, keep={self.keep}; need at least 1 frame, and keep >= 0")
        if self.beyond not in ("error", "crop", "reindex"):
            raise ValueError(f"beyond={self.beyond!r}; allowed are 'error', 'crop' and 'reindex'")

    def fit(self, read: MemoryRead, targets: Sequence[int]) -> MemoryRead:
        """The read, or what of it stays within the trained length.

        Raises:
            ValueError: it is too long and beyond="error", or the window alone is.
        """
        if len(targets) > self.frames:
            raise ValueError(f"a window of {len(targets)} frames; the network was trained on {self.frames} in all")
        low, high = self._reach(read)
        span = max(high, *targets) - min(low, *targets) + 1
        if read.is_empty or span <= self.frames:
            return read
        if self.beyond == "error":
            raise ValueError(
                f"history and window span {span:g} frames (ids {min(low, *targets):g} to {max(high, *targets):g}), "
                f"the network was trained on {self.frames}; take a smaller memory, or beyond='crop' or 'reindex'"
            )
        if self.beyond == "crop":
            return _kept(read, max(targets) - self.frames + 1, min(targets) + self.frames - 1)
        return self._reindexed(read, targets)

    @staticmethod
    def _reach(read: MemoryRead) -> tuple[float, float]:
        times = [group.frame_ids.float().flatten() for group in read.groups]
        if read.tokens is not None:
            times.append(read.tokens.positions[..., 0].flatten())
        if not times:
            return float("inf"), float("-inf")
        joined = torch.cat(times)
        return float(joined.min()), float(joined.max())

    def _reindexed(self, read: MemoryRead, targets: Sequence[int]) -> MemoryRead:
        """Frames renumbered without gaps, ending right before (or starting right behind) the window."""
        ids = read.frame_ids
        if ids is None:
            raise ValueError("beyond='reindex' needs frames; a memory of tokens alone can be cropped, beyond='crop'")
        held, room = ids.shape[1], self.frames - len(targets)
        later = bool((ids > max(targets)).all())
        if not later and not bool((ids < min(targets)).all()):
            raise ValueError("history frames lie within the window; beyond='reindex' needs them before or behind it")
        sinks = min(self.keep, room)
        if held <= room:
            kept = list(range(held))
        elif later:
            kept = list(range(room))
        else:
            kept = [*range(sinks), *range(held - (room - sinks), held)]
        moved = torch.full((held,), -1, device=ids.device)
        start = max(targets) + 1 if later else min(targets) - len(kept)
        moved[kept] = torch.arange(start, start + len(kept), device=ids.device)
        return _renumbered(read, ids, moved)


def _kept(read: MemoryRead, low: int, high: int) -> MemoryRead:
    """Groups and tokens between two ids; a batch keeps what every row may keep."""
    groups = []
    for group in read.groups:
        inside = ((group.frame_ids >= low) & (group.frame_ids <= high)).all(0)
        if bool(inside.any()):
            groups.append(FrameGroup(group.frames[:, :, inside], group.frame_ids[:, inside], group.kernel))
    return replace(read, groups=tuple(groups), tokens=_tokens_between(read.tokens, low, high))


def _tokens_between(tokens: MemoryTokens | None, low: float, high: float) -> MemoryTokens | None:
    if tokens is None:
        return None
    times = tokens.positions[..., 0]
    inside = ((times >= low) & (times <= high)).all(0)
    if not bool(inside.any()):
        return None
    return MemoryTokens(
        tokens.values[:, inside],
        tokens.positions[:, inside],
        tokens.times[:, inside],
        tokens.spans[inside],
        tokens.counts[inside],
    )


def _renumbered(read: MemoryRead, ids: Tensor, moved: Tensor) -> MemoryRead:
    """Every frame of rank i under the id moved[i]; -1 drops it. Tokens follow the frames they were made of."""
    groups = []
    for group in read.groups:
        rank = torch.searchsorted(ids.contiguous(), group.frame_ids.contiguous())
        new = moved[rank]
        inside = (new >= 0).all(0)
        if bool(inside.any()):
            groups.append(FrameGroup(group.frames[:, :, inside], new[:, inside], group.kernel))
    tokens = read.tokens
    if tokens is not None:
        whole = tokens.times.nan_to_num(-1.0)
        rank = (
            torch.searchsorted(ids.float().contiguous(), whole.flatten(1).contiguous())
            .view_as(whole)
            .clamp_max(ids.shape[1] - 1)
        )
        new_times = torch.where(tokens.times.isnan(), tokens.times, moved.float()[rank])
        inside = ~((new_times < 0).any(-1)).any(0)
        positions = torch.cat([new_times.nanmean(-1, keepdim=True), tokens.positions[..., 1:]], -1)
        tokens = MemoryTokens(
            tokens.values[:, inside], positions[:, inside], new_times[:, inside], tokens.spans[inside],
            tokens.counts[inside],
        )  # fmt: skip
        tokens = tokens if len(tokens) else None
    return replace(read, groups=tuple(groups), tokens=tokens)
