"""Pooled tokens that are scaled and shifted by what they mean now: their age, the action and the noise level.

Average-pooled tokens fade together with what they show; a scale and a shift per channel, computed from how old a token
is and what the window does, lets the network weigh them. New weights start as the identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .base import Kernel, MemoryTokens
from .pack import FRAMEPACK, PackMemory
from .packers import MeanPacker
from .queries import _waves

__all__ = ["ModulatedMemory", "ModulatedPacker"]


class ModulatedPacker(MeanPacker):
    """x * (1 + scale) + shift on average-pooled tokens, scale and shift from (age, action, level).

    Args:
        proj: base patch embedding, used as it is.
        kernel: name or (kt, kh, kw).
        actions: width of an action vector, 0 for none.
        hidden: width of the small network.

    Example:
        >>> packer = ModulatedPacker(nn.Conv3d(4, 16, (1, 2, 2), (1, 2, 2)), "k2")
        >>> packer.dim
        16
    """

    def __init__(self, proj: nn.Conv3d, kernel: str | Kernel, actions: int = 0, hidden: int = 64) -> None:
        super().__init__(proj, kernel)
        self.dim, self.actions, self.hidden = proj.out_channels, actions, hidden
        self.net = nn.Sequential(nn.Linear(2 * hidden + actions, hidden), nn.SiLU(), nn.Linear(hidden, 2 * self.dim))
        nn.init.zeros_(self.net[-1].weight)  # type: ignore[arg-type]
        nn.init.zeros_(self.net[-1].bias)  # type: ignore[arg-type]
        self.action: Tensor | None = None
        self.level = 0.0

    def refresh(self, tokens: MemoryTokens, targets: Sequence[int] | Tensor | None = None) -> MemoryTokens:
        values = tokens.values
        now = tokens.positions[..., 0].max() if targets is None else torch.as_tensor(targets).float().mean()
        age = now.to(values.device) - tokens.positions[..., 0]
        seen = _waves(age.flatten(), self.hidden).reshape(*age.shape, self.hidden)
        level = _waves(age.new_tensor([1000.0 * self.level]), self.hidden).expand(*age.shape, self.hidden)
        parts = [seen, level]
        if self.actions:
            if self.action is None:
                raise ValueError(f"this packer takes actions of width {self.actions}; call set_condition(action=...)")
            parts.append(self.action.to(values.device).float()[:, None].expand(*age.shape, self.actions))
        scale, shift = self.net(torch.cat(parts, -1).to(self.proj.weight.dtype)).to(values.dtype).chunk(2, -1)
        return replace(tokens, values=values * (1 + scale) + shift)


class ModulatedMemory(PackMemory):
    """A `PackMemory` of modulated packers.

    Args:
        proj: base patch embedding.
        groups: as in `PackMemory`.
        actions: width of an action vector.
        settings: of `PackMemory`.
    """

    name = "modulated"

    def __init__(
        self,
        proj: nn.Conv3d,
        groups: Sequence[tuple[int | None, str | Kernel]] = FRAMEPACK,
        actions: int = 0,
        **settings: Any,
    ) -> None:
        super().__init__(groups, [ModulatedPacker(proj, kernel, actions) for _, kernel in groups], **settings)

    def set_condition(self, action: Tensor | None = None, level: float = 0.0) -> None:
        """What the window does now: action [B, A] and noise level, for the reads that follow."""
        for packer in self.packers or ():
            assert isinstance(packer, ModulatedPacker)
            packer.action, packer.level = action, level
