"""Carriers of diffusers' networks: they read a text, take no actions, and want whole patches."""

from __future__ import annotations

from torch import Tensor

from .base import Carrier

__all__ = ["TextCarrier"]


class TextCarrier(Carrier):
    """What all of them check before a call."""

    def check_call(self, x: Tensor, levels: Tensor, frame_ids: Tensor) -> None:
        super().check_call(x, levels, frame_ids)
        rows, columns = self.patch[1:]
        if not x.shape[2] or x.shape[3] % rows or x.shape[4] % columns:
            raise ValueError(
                f"{self.name} takes at least one frame of cells in multiples of {rows} x {columns}, not "
                f"{tuple(x.shape)}; latent_shape(height, width) tells the cells of a size"
            )
        if not bool(((levels >= 0) & (levels <= 1)).all()):
            raise ValueError(f"levels {levels.tolist()}; they are fractions of the noisiest one, 0 to 1")
        embeds = self.conditioning.embeds
        if embeds is None:
            raise ValueError(
                f"the carrier {self.name!r} has no text yet; call condition('a text', batch={x.shape[0]}) or "
                "condition(prompt_embeds=...) first"
            )
        if embeds.shape[0] != x.shape[0]:
            raise ValueError(
                f"condition() was called with batch={embeds.shape[0]} and the window has {x.shape[0]} videos; write "
                f"condition(..., batch={x.shape[0]})"
            )

    def check_actions(self, actions: Tensor | None) -> None:
        """Raises ValueError for actions: none of these networks takes any."""
        if actions is not None:
            raise ValueError(f"the carrier {self.name!r} takes no actions; leave actions out")
