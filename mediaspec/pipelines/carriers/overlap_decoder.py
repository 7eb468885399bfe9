"""Decoding a long video piece by piece with a codec that knows whole clips only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .base import Carrier

__all__ = ["OverlapDecoder"]


class OverlapDecoder:
    """Decodes latents piece by piece, each together with the last latents before it.

    The codecs look a limited time back (and a little ahead), so that pictures are those of one whole decode up to what
    lies further away; nothing grows with the video.

    Args:
        carrier: whose `decode` is used.
        overlap: latent frames in front of a piece.
        piece: most latent frames that are decoded in one go, for videos that come whole (those made from their end);
            None is all that are handed over.

    Raises:
        ValueError: no overlap.
    """

    def __init__(self, carrier: Carrier, overlap: int = 2, piece: int | None = None) -> None:
        if overlap < 1:
            raise ValueError(f"overlap={overlap}; 1 or more, else the pictures between two pieces are missing")
        self.carrier, self.overlap, self.piece = carrier, overlap, piece
        self.seen: Tensor | None = None

    def __call__(self, latents: Tensor) -> Iterator[Tensor]:
        """[C, n, h, w] to pictures [m, 3, H, W] in 0..1."""
        for part in latents.split(self.piece or latents.shape[1], 1):
            whole = part if self.seen is None else torch.cat([self.seen.to(part), part], 1)
            pictures = self.carrier.decode(whole[None])[0]
            if self.seen is not None:
                pictures = pictures[:, pictures.shape[1] - self.carrier.temporal_ratio * part.shape[1] :]
            self.seen = whole[:, -self.overlap :].clone()
            yield (pictures.float().clamp(-1, 1) / 2 + 0.5).transpose(0, 1)

    def state(self) -> dict[str, Any]:
        return {} if self.seen is None else {"seen": self.seen}

    def load(self, state: dict[str, Any]) -> None:
        self.seen = state.get("seen")
