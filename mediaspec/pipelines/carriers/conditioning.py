"""Encoded texts of a call, and classifier-free guidance with them.

B videos, S text tokens, D text channels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

__all__ = ["Conditioning", "guide"]


@dataclass
class Conditioning:
    """Encoded text of a call, conditional and unconditional.

    Args:
        embeds: [B, S, D], or None for a network without text.
        negative: [B, S, D], or None where guidance is off.
        guidance_scale: classifier-free guidance; 1 or less is off.
        extra: more inputs of the conditional call (image features, masks, pooled texts), by name of the argument.
        negative_extra: those of the unconditional call.
    """

    embeds: Tensor | None = None
    negative: Tensor | None = None
    guidance_scale: float = 1.0
    extra: dict[str, Any] = field(default_factory=dict)
    negative_extra: dict[str, Any] = field(default_factory=dict)

    @property
    def guides(self) -> bool:
        """Whether a call asks the network twice."""
        return self.guidance_scale > 1 and self.negative is not None

    def guided(self, predict: Callable[[Tensor | None, dict[str, Any]], Tensor]) -> Tensor:
        """The guided prediction: u + g (c - u).

        Args:
            predict: (embeds, extra) to a prediction [B, C, n, h, w]; asked once, or twice with guidance.

        Example:
            >>> told = Conditioning(torch.ones(1, 1, 1), torch.zeros(1, 1, 1), guidance_scale=3.0)
            >>> told.guided(lambda embeds, extra: embeds).item()
            3.0
        """
        told = predict(self.embeds, self.extra)
        if not self.guides:
            return told
        return guide(told, predict(self.negative, self.negative_extra), self.guidance_scale)


def guide(told: Tensor, untold: Tensor, scale: float) -> Tensor:
    """Classifier-free guidance (arXiv:2207.12598): untold + scale * (told - untold)."""
    return untold + scale * (told - untold)
