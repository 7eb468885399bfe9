"""Wan's codec (`AutoencoderKLWan`) and UMT5 texts, which Wan, SkyReels-V2, Helios and AnyFlow-FAR share."""

from __future__ import annotations

import importlib.util
from typing import Any, ClassVar

import torch
from torch import Tensor

from .base import Carrier

__all__ = ["WanPictures"]


class WanPictures(Carrier):
    """Texts and pictures of such a network; stands in front of the class that calls it."""

    needs_ftfy: ClassVar[bool] = False
    """Whether its pipeline cleans texts with ftfy."""
    max_sequence_length: int

    def read_codec(self, max_sequence_length: int) -> None:
        """Takes over the codec's ratios and the length of texts."""
        self.max_sequence_length = max_sequence_length
        vae = getattr(self.pipe, "vae", None)
        told = {} if vae is None else vae.config
        self.temporal_ratio = int(told.get("scale_factor_temporal") or 4)
        self.spatial_ratio = int(told.get("scale_factor_spatial") or 8)

    def _encode_text(
        self, texts: list[str], device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor | None, dict[str, Any]]:
        if getattr(self.pipe, "text_encoder", None) is None:
            raise ValueError(f"the carrier {self.name!r} has no text encoder; give prompt_embeds, or the pipeline")
        if self.needs_ftfy and importlib.util.find_spec("ftfy") is None:
            raise ImportError(
                f"texts for {self.name} are cleaned with ftfy: pip install 'mediaspec[video]', or give prompt_embeds"
            )
        embeds: Tensor = self.pipe.encode_prompt(
            texts, do_classifier_free_guidance=False, max_sequence_length=self.max_sequence_length, device=device
        )[0]
        return embeds.to(device, dtype), {}

    def encode(self, video: Tensor) -> Tensor:
        """Latents [B, C, t, h, w] of pictures [B, 3, 4 (t - 1) + 1, H, W]; the mode of the posterior, no noise."""
        self.check_pictures(video)
        vae = self.vae
        latents = vae.encode(video.to(self.device, vae.dtype)).latent_dist.mode().float()
        return self.scaled(latents, vae.config.latents_mean, vae.config.latents_std)

    def decode(self, latents: Tensor) -> Tensor:
        """Pictures [B, 3, 4 (t - 1) + 1, H, W]."""
        self.check_latents(latents)
        vae = self.vae
        plain = self.unscaled(latents.float(), vae.config.latents_mean, vae.config.latents_std)
        pictures: Tensor = vae.decode(plain.to(self.device, vae.dtype), return_dict=False)[0]
        return pictures.float()
