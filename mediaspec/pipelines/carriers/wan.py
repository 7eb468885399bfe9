"""Wan (`WanTransformer3DModel`): one timestep per token, so that every latent frame may stand at its own level.

Wan 2.2 TI2V 5B was trained with clean first frames at timestep 0 in the same call, which is what references are here.
Wan 2.1 and the 14B networks of 2.2 were trained with one timestep for the whole clip: mixed levels run on them, but
how well is a matter of the weights. Clips whose frames all stand at one level get one timestep, as in diffusers.

The two networks of Wan 2.2 14B share the levels: frames at or above the boundary take the prediction of the first,
others that of the second; a window on both sides of it asks both.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from ..frame_times import token_timesteps
from .wan_codec import WanPictures
from .window import Clip, WindowCarrier

__all__ = ["WanCarrier", "WanCodec"]


class WanCodec(WanPictures, WindowCarrier):
    """What Wan and SkyReels-V2 share: `AutoencoderKLWan` and UMT5 texts.

    Args:
        pipe_or_model: a pipeline or its transformer.
        max_sequence_length: text tokens, 512 in the pipelines.
        settings: of `WindowCarrier`.

    Raises:
        ValueError: a network of another kind.
    """

    def __init__(self, pipe_or_model: Any, *, max_sequence_length: int = 512, **settings: Any) -> None:
        super().__init__(pipe_or_model, **settings)
        config = self.model.config
        self.patch = tuple(config.patch_size)
        if self.patch[0] != 1:
            raise ValueError(f"patch_size={self.patch}; frames with levels of their own need one frame per token")
        if config.in_channels != config.out_channels:
            raise ValueError(
                f"in_channels={config.in_channels}, out_channels={config.out_channels}: this network takes its first "
                "picture on extra channels, and references cannot stand there; use text-to-video weights, or Wan 2.2 "
                "TI2V, which start from a picture as a history frame"
            )
        if self.guard.frames > config.rope_max_seq_len:
            raise ValueError(
                f"trained_frames={self.guard.frames}; the network has rotary positions for {config.rope_max_seq_len}"
            )
        self.latent_channels = config.in_channels
        self.read_codec(max_sequence_length)


class WanCarrier(WanCodec):
    """`WanPipeline`, and `WanImageToVideoPipeline` of Wan 2.2 TI2V (its picture is a history frame).

    Args:
        pipe_or_model: the pipeline or a `WanTransformer3DModel`.
        per_token: one timestep per token also where all frames stand at one level; None is the pipeline's
            `expand_timesteps`.
        settings: of `WanCodec` and `WindowCarrier`. `trained_frames` is 21 (81 pictures).

    Raises:
        ValueError: a network that takes its picture on extra channels (Wan 2.1 and 2.2 14B image-to-video).

    Example:
        >>> carrier = WanCarrier(pipe)                                                       # doctest: +SKIP
        >>> carrier.condition("a red ball", guidance_scale=5.0)                              # doctest: +SKIP
        >>> noise = FrameNoise(torch.tensor([0]), carrier.latent_shape(480, 832))            # doctest: +SKIP
        >>> video = generate(carrier, carrier.schedule(), carrier.sampler(), noise, num_frames=60)  # doctest: +SKIP
    """

    name: ClassVar[str] = "wan"
    model_classes: ClassVar[tuple[str, ...]] = ("WanTransformer3DModel",)
    pipeline_classes: ClassVar[tuple[str, ...]] = (
        "WanPipeline",
        "WanImageToVideoPipeline",
        "WanVideoToVideoPipeline",
    )
    trained: ClassVar[int] = 21

    def __init__(self, pipe_or_model: Any, *, per_token: bool | None = None, **settings: Any) -> None:
        super().__init__(pipe_or_model, **settings)
        config = getattr(self.pipe, "config", {})
        self.per_token = bool(config.get("expand_timesteps", False)) if per_token is None else per_token
        self.second: Any = getattr(self.pipe, "transformer_2", None)
        self.boundary: float | None = config.get("boundary_ratio") if self.second is not None else None

    def predict(self, clip: Clip, embeds: Tensor, extra: dict[str, Any]) -> Tensor:
        if self.boundary is None:
            return self._ask(self.model, clip, embeds)
        noisy = clip.levels >= self.boundary
        window = noisy[:, clip.window]
        if bool(window.all()):
            return self._ask(self.model, clip, embeds)
        if not bool(window.any()):
            return self._ask(self.second, clip, embeds)
        high, low = self._ask(self.model, clip, embeds), self._ask(self.second, clip, embeds)
        return torch.where(noisy[:, None, :, None, None], high, low)

    def _ask(self, model: Any, clip: Clip, embeds: Tensor) -> Tensor:
        times = self.times(clip)
        if self.per_token or not clip.one_level:
            times = token_timesteps(times, clip.x.shape[3], clip.x.shape[4], self.patch)
        else:
            times = times[:, 0]
        with self.cached(model, embeds):
            out: Tensor = model(clip.x.to(model.dtype), times, embeds.to(model.dtype), return_dict=False)[0]
        return out.float()
