"""Layers over space run on a few frames at a time, so that their work space does not grow with the video.

Res blocks, spatial transformers and the layers between resolutions treat frames as rows of a batch. Chunking them
bounds what they need while they run; what they hand on (the features of all frames) still grows with the number of
frames.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers.hooks import HookRegistry, ModelHook
from diffusers.models.downsampling import Downsample2D
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.upsampling import Upsample2D
from torch import Tensor, nn

__all__ = ["chunked_frames"]

HOOK = "mediaspec_frame_chunks"
SPATIAL = (ResnetBlock2D, Transformer2DModel, Downsample2D, Upsample2D)


class _Chunked(ModelHook):
    """Cuts every tensor argument with one row per frame and joins the outputs."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        forward: Any = self.fn_ref.original_forward
        first: Any = args[0] if args else kwargs.get("hidden_states", kwargs.get("input_tensor"))
        rows = first.shape[0]
        if rows <= self.size:
            return forward(*args, **kwargs)

        def cut(value: Any, start: int) -> Any:
            if isinstance(value, Tensor) and value.ndim and value.shape[0] == rows:
                return value[start : start + self.size]
            if isinstance(value, (tuple, list)):  # text and image embeddings of IP-Adapter come as a pair
                return type(value)(cut(one, start) for one in value)
            return value

        outputs = [
            forward(*(cut(one, start) for one in args), **{name: cut(one, start) for name, one in kwargs.items()})
            for start in range(0, rows, self.size)
        ]
        if isinstance(outputs[0], Tensor):
            return torch.cat(outputs)
        return tuple(torch.cat(parts) for parts in zip(*outputs, strict=True))


@contextmanager
def chunked_frames(model: nn.Module, size: int) -> Iterator[None]:
    """While it is open, the layers of `model` over space see at most `size` frames per call.

    Args:
        model: a `UNetMotionModel`; the instance is hooked through diffusers' `HookRegistry`.
        size: rows (guidance halves times frames) per call.

    Example:
        >>> with chunked_frames(pipe.unet, 32):  # doctest: +SKIP
        ...     noise = pipe.unet(latents, time, encoder_hidden_states=text).sample
    """
    layers: list[nn.Module] = [module for module in model.modules() if isinstance(module, SPATIAL)]
    for layer in layers:
        HookRegistry.check_if_exists_or_initialize(layer).register_hook(_Chunked(size), HOOK)
    try:
        yield
    finally:
        for layer in layers:
            HookRegistry.check_if_exists_or_initialize(layer).remove_hook(HOOK, recurse=False)
