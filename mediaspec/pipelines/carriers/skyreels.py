"""SkyReels-V2 (`SkyReelsV2Transformer3DModel`): trained with diffusion forcing, a timestep for every latent frame.

References are shown at the memory's level and told so; the public pipeline's `addnoise_condition=20` is level 0.02,
which `schedule()` asks for. Attention is two-sided, or causal by blocks of frames (`causal_block`, the pipeline's
`causal_block_size`), with one block starting `ar_step` steps after the other: the schedule "skyreels_streaming".
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...memory.base import MemoryRead
from .wan import WanCodec
from .window import Clip, picked

__all__ = ["SkyReelsCarrier"]


class SkyReelsCarrier(WanCodec):
    """The pipelines `SkyReelsV2DiffusionForcing*`, and `SkyReelsV2Pipeline`, whose weights know one timestep per clip.

    Args:
        pipe_or_model: the pipeline or the transformer.
        causal_block: latent frames of an attention block; set for the time of a call, and taken back. None leaves what
            the network's config says, 1 is two-sided. Windows must be whole blocks; of the references, the oldest that
            do not fill a block are left out (fewer than one block are filled up with copies of the oldest). The
            network's mask is dense, L x L booleans for L tokens.
        fps: of the video, for weights that are told (16, or anything else for 24).
        per_frame: a timestep per frame also where all frames stand at one level; None is what the pipeline does.
        settings: of `WanCodec` and `WindowCarrier`. `trained_frames` is 25 (97 pictures, 540P); 720P weights: 31.

    Raises:
        ValueError: see `WanCodec`.

    Example:
        >>> carrier = SkyReelsCarrier(pipe, causal_block=5)                                  # doctest: +SKIP
        >>> carrier.schedule().name                                                          # doctest: +SKIP
        'skyreels_streaming'
    """

    name: ClassVar[str] = "skyreels"
    needs_ftfy: ClassVar[bool] = True  # diffusers guards the import and not the use, which would be a NameError
    model_classes: ClassVar[tuple[str, ...]] = ("SkyReelsV2Transformer3DModel",)
    pipeline_classes: ClassVar[tuple[str, ...]] = (
        "SkyReelsV2Pipeline",
        "SkyReelsV2DiffusionForcingPipeline",
        "SkyReelsV2DiffusionForcingImageToVideoPipeline",
        "SkyReelsV2DiffusionForcingVideoToVideoPipeline",
    )
    trained: ClassVar[int] = 25
    default_size = (544, 960)

    def __init__(
        self,
        pipe_or_model: Any,
        *,
        causal_block: int | None = None,
        fps: int = 24,
        per_frame: bool | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(pipe_or_model, **settings)
        if causal_block is not None and causal_block < 1:
            raise ValueError(f"causal_block={causal_block}; write the frames of a block, 1 for two-sided attention")
        self.causal_block, self.fps = causal_block, fps
        forced = self.pipe is None or "DiffusionForcing" in type(self.pipe).__name__
        self.per_frame = forced if per_frame is None else per_frame

    @property
    def block(self) -> int:
        """Frames of an attention block in a call."""
        return int(self.model.config.num_frame_per_block) if self.causal_block is None else self.causal_block

    def default_schedule(self) -> tuple[str, dict[str, Any]]:
        """Streaming by blocks where attention is causal, else long videos from overlapping clips."""
        most, block = self.guard.frames, self.block
        if block > 1:
            return "skyreels_streaming", {"block": block, "blocks": max(most // block - 1, 1), "steps": 30}
        return "skyreels_long", {"base": most, "overlap": max(min(5, most // 4), 1), "steps": 30}

    def check_call(self, x: Tensor, levels: Tensor, frame_ids: Tensor) -> None:
        super().check_call(x, levels, frame_ids)
        if x.shape[2] % self.block:
            raise ValueError(
                f"a window of {x.shape[2]} frames does not divide into attention blocks of {self.block}; use a "
                "schedule whose delta and w are multiples of it, or causal_block=1"
            )

    def fit(self, read: MemoryRead, frame_ids: Tensor) -> MemoryRead:
        read, block = super().fit(read, frame_ids), self.block
        ids = read.frame_ids
        if block == 1 or ids is None:
            return read
        if not bool((ids < frame_ids.min().to(ids.device)).all()):
            raise ValueError("causal attention cannot look at frames behind the window; write causal_block=1")
        held = ids.shape[1]
        if held < block:
            return super().fit(picked(read, [0] * (block - held) + list(range(held))), frame_ids)
        return picked(read, range(held % block, held)) if held % block else read

    def predict(self, clip: Clip, embeds: Tensor, extra: dict[str, Any]) -> Tensor:
        with self._blocks(), self.cached(self.model, embeds):
            if not self.per_frame and clip.one_level:
                return self._ask(clip.x, self.times(clip)[:, 0], embeds, False)
            if self.model.config.inject_sample_info and clip.x.shape[0] > 1:
                # the class adds its frame rate to [B, F, ...] embeddings in a way that fits one row only
                rows = zip(clip.x.split(1), self.times(clip).split(1), embeds.split(1))
                return torch.cat([self._ask(*row, True) for row in rows])
            return self._ask(clip.x, self.times(clip), embeds, True)

    def _ask(self, x: Tensor, times: Tensor, embeds: Tensor, forcing: bool) -> Tensor:
        out: Tensor = self.model(
            hidden_states=x.to(self.model.dtype),
            timestep=times,
            encoder_hidden_states=embeds.to(self.model.dtype),
            enable_diffusion_forcing=forcing,
            fps=[0 if self.fps == 16 else 1] * x.shape[0],
            return_dict=False,
        )[0]
        return out.float()

    @contextmanager
    def _blocks(self) -> Iterator[None]:
        """The network with `causal_block`, and as it was afterwards."""
        before = self.model.config.num_frame_per_block
        if self.block == before:
            yield
            return
        self.model._set_ar_attention(self.block)
        try:
            yield
        finally:
            self.model._set_ar_attention(before)
