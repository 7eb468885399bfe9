"""What a `VideoContinuationPipeline` returns."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffusers.utils import BaseOutput

from .video_history import VideoHistory

if TYPE_CHECKING:
    import numpy as np
    import PIL.Image
    from torch import Tensor

__all__ = ["VideoContinuationOutput"]


@dataclass
class VideoContinuationOutput(BaseOutput):
    """Videos, and how they came about. Pictures of `video` or `image` are not repeated.

    Args:
        frames: by `output_type`: "pil" a list of pictures per video, "np" [B, N, H, W, 3] float32 in [0, 1], "pt"
            [B, N, 3, H, W] float32 in [0, 1], "latent" [B, C, L, h, w]. None when `output_path` was given.
        paths: the files (or folders of PNG files), with `output_path`.
        history: with `return_history`, one `VideoHistory` per video, to go on in another call; None for a video that
            an earlier call had finished on disk.
        stats: JSON-ready dict: `carrier, schedule, num_frames, latent_frames, ar_steps, model_calls, memory` (per
            video: `tokens, frames, nbytes` at the last step, `most_tokens, most_frames, most_bytes` at any),
            `seconds {total, encode, denoise, decode, write}, seconds_per_frame, settings, seeds, resumed`
            (autoregressive step each video went on from), `interrupted, versions`.
    """

    frames: list[list[PIL.Image.Image]] | np.ndarray | Tensor | None = None
    paths: list[Path] | None = None
    history: list[VideoHistory | None] | None = None
    stats: dict[str, Any] | None = None
