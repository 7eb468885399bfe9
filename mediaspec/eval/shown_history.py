"""The past as an evaluation shows it to a frame model: as it is, noised, or its newest frames alone.

Both knobs move one trained model between forgetting and drift (arXiv:2503.10704): what is noised or left out cannot be
remembered, and its errors cannot be handed on either. The model is told the level of every noised frame.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..models.frame_cache import FrameCache
from ..models.frame_dit import FrameDiT, History, Memory
from .rollout_noise import normal_rows

__all__ = ["ShownHistory"]


class ShownHistory:
    """A `FrameCache` with two knobs; without them it is the cache itself.

    Args:
        model: in evaluation mode.
        noise: level put on every frame when it is written, once, 0 <= noise < 1. `tools/arvdm` trains on 0 to 0.15.
        keep: newest frames that are shown, at least 1; None is all. What is read is encoded anew at every read, so
            that times with `keep` are not those of a cache.
        draw: number of a first frame -> generator of the noise of what is written there, or one per row; needed with
            noise.

    Raises:
        ValueError: a knob outside its range, or noise without `draw`.

    Example:
        >>> from mediaspec.models.frame_dit import FrameDiTConfig
        >>> model = FrameDiT(FrameDiTConfig(hidden_size=32, num_hidden_layers=2, memory="prepend")).eval()
        >>> shown = ShownHistory(model, keep=5)
        >>> shown.write(History(torch.randn(1, 9, 40, 8, 8), torch.zeros(1, 9, 2) + 512, torch.ones(1, 9).long(),
        ...                     torch.zeros(1, 9)))
        >>> shown.read(torch.zeros(1, 4, 2) + 512).tokens    # 5 of 9 frames
        80
    """

    def __init__(
        self, model: FrameDiT, *, noise: float = 0.0, keep: int | None = None,
        draw: Callable[[int], torch.Generator | Sequence[torch.Generator]] | None = None,
    ) -> None:  # fmt: skip
        if not 0 <= noise < 1:
            raise ValueError(f"history_noise={noise} is not allowed; write a level from 0 to below 1, as 0.1")
        if keep is not None and keep < 1:
            raise ValueError(f"keep={keep} is not allowed; write 1 frame or more, or None for all")
        if noise and draw is None:
            raise ValueError("a noised history needs draw=, the generator of its noise")
        self.model, self.noise, self.keep, self.draw = model, noise, keep, draw
        self.frames = 0
        self._cache = FrameCache(model)
        self._newest: History | None = None

    def write(self, new: History) -> None:
        """Adds finished frames, in their order; they are noised here if they are to be."""
        if self.noise:
            assert self.draw is not None
            normal = normal_rows(new.latents.shape, self.draw(self.frames))
            noised = (1 - self.noise) * new.latents + self.noise * normal
            new = History(noised, new.poses, new.actions, torch.full_like(new.levels, self.noise))
        self.frames += new.frames
        if self.keep is None:
            self._cache.write(new)
            return
        old = self._newest
        if old is not None:
            new = History(*(torch.cat([a, b], dim=1) for a, b in zip(vars(old).values(), vars(new).values())))
        self._newest = new.last(self.keep)

    def read(self, targets: Tensor) -> Memory:
        """What the next frames (poses [B, w, P]) read."""
        if self.keep is not None:
            self._cache = FrameCache(self.model)
            if self._newest is not None:
                self._cache.write(self._newest)
        return self._cache.read(targets)

    @property
    def nbytes(self) -> int:
        """Bytes of everything that is kept; with `keep`, of what the last read saw."""
        return self._cache.nbytes
