"""Where the frames of a video stand in a sequence: F frames of P tokens in a row, text before or behind them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["FrameLayout", "query_delta", "same_set", "video_delta"]


@dataclass(frozen=True)
class FrameLayout:
    """The place of the video in a joint sequence: token start + f P + y W + x is position (y, x) of frame f.

    Args:
        frames: F.
        tokens: P, of one frame.
        start: tokens before the video (text first); tokens behind it are text too.
        width: W, tokens of one row of a frame; only the mode "neighbourhood" asks for it.

    Raises:
        ValueError: no frames, no tokens, a negative start, or a width that does not divide P.

    Example:
        >>> FrameLayout(frames=3, tokens=2, start=1).ids(8).tolist()
        [-1, 0, 0, 1, 1, 2, 2, -1]
    """

    frames: int
    tokens: int
    start: int = 0
    width: int | None = None

    def __post_init__(self) -> None:
        if self.frames < 1 or self.tokens < 1 or self.start < 0:
            raise ValueError(
                f"frames={self.frames}, tokens={self.tokens}, start={self.start} are not a layout; give at least one "
                "frame of at least one token and a start >= 0."
            )
        if self.width is not None and (self.width < 1 or self.tokens % self.width):
            raise ValueError(f"width={self.width} does not divide the {self.tokens} tokens of a frame.")

    @property
    def stop(self) -> int:
        """The first token behind the video."""
        return self.start + self.frames * self.tokens

    def ids(self, length: int, device: torch.device | str = "cpu") -> Tensor:
        """Frame of every token of a sequence, [length] int64; -1 for text."""
        place = torch.arange(length, device=device) - self.start
        frame = place.div(self.tokens, rounding_mode="floor")
        return frame.masked_fill((place < 0) | (frame >= self.frames), -1)


def same_set(layout: FrameLayout, mode: str, radius: int, rows: Tensor, columns: Tensor) -> Tensor:
    """Which keys belong to the set that a query's bias acts on.

    Args:
        layout, mode, radius: see `mediaspec.kernels.tiara_bias.framed_attention`.
        rows: [M] int64 positions of queries in the sequence.
        columns: [N] int64 positions of keys.

    Returns:
        [M, N] bool; a row of a text query is empty.
    """
    q = (rows - layout.start)[:, None]
    k = (columns - layout.start)[None, :]
    inside = (q >= 0) & (q < layout.stop - layout.start) & (k >= 0)
    if mode == "self_token":
        return inside & (q == k)
    tokens = layout.tokens
    same = inside & (q.div(tokens, rounding_mode="floor") == k.div(tokens, rounding_mode="floor"))
    if mode == "neighbourhood":
        wide = layout.width or 1
        q, k = q % tokens, k % tokens
        same &= (q // wide - k // wide).abs() <= radius
        same &= (q % wide - k % wide).abs() <= radius
    return same


def query_delta(delta: Tensor, layout: FrameLayout, length: int, dtype: torch.dtype) -> Tensor:
    """The bias of every query, [B or 1, H or 1, length] with 0 at text, from one per frame or one per query."""
    delta = delta.to(dtype)
    ids = layout.ids(length, delta.device)
    if delta.shape[-1] == layout.frames and layout.frames != length:
        delta = delta.index_select(-1, ids.clamp(min=0))
    return delta.masked_fill(ids < 0, 0.0)


def video_delta(delta: Tensor, layout: FrameLayout, dtype: torch.dtype) -> Tensor:
    """The bias of the video queries alone, [B or 1, H or 1, F, P or 1]."""
    delta = delta.to(dtype)
    if delta.shape[-1] == layout.frames:
        return delta[..., None]
    split: Tensor = delta[..., layout.start : layout.stop].unflatten(-1, (layout.frames, layout.tokens))
    return split
