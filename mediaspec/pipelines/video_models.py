"""The text-to-video models that ship inside the package."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import AnimateDiffPipeline

from .loading import embedded_folder

__all__ = ["load_moving_emoji"]


def load_moving_emoji(dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> AnimateDiffPipeline:
    """Loads moving-emoji, a small text-to-video model, without a network.

    It makes 64 x 64 clips of 16 frames at 8 frames a second from captions such as "a yellow taxi moves left on a grey
    road"; all words it knows are in `reader/config.json` of its folder. It predicts velocity, knows the empty prompt,
    and was also trained with timesteps that rise from frame to frame. Made by `tools/moving_emoji`.

    Args:
        dtype: of the weights; they are stored as float16.
        device: where the pipeline goes.

    Returns:
        A plain diffusers pipeline: `UNetMotionModel`, `AutoencoderKL`, `CLIPTextModel`, `DDIMScheduler`.

    Raises:
        ValueError: the weights are not in the package.

    Example:
        >>> pipe = load_moving_emoji()                                                           # doctest: +SKIP
        >>> clip = pipe("a red apple spins on green grass", num_frames=16, num_inference_steps=20,
        ...             guidance_scale=4.0, generator=torch.Generator().manual_seed(0)).frames[0]  # doctest: +SKIP
    """
    folder = embedded_folder("moving-emoji")
    loaded: Any = AnimateDiffPipeline.from_pretrained(folder, dtype=dtype, local_files_only=True)
    pipe: AnimateDiffPipeline = loaded.to(device)
    return pipe
