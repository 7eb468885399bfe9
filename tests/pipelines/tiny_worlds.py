"""An untrained frame world at toy size, and a walk for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mediaspec.models.frame_dit import FrameDiT, FrameDiTConfig
from mediaspec.models.patch_codec import PatchCodec
from mediaspec.pipelines.carriers.frame_dit import FrameWorld

__all__ = ["frame_world", "walk"]

GIVEN = 9


def frame_world(memory: str = "pack_k2", seed: int = 0, **changes: Any) -> FrameWorld:
    """64 x 64 pixels, 4 channels, chunks of 4 frames; outputs that start at zero would hide what the memory does."""
    torch.manual_seed(seed)
    config = FrameDiTConfig(
        hidden_size=16, memory_size=16, num_hidden_layers=2, num_attention_heads=2, channels=4, memory=memory,
        **changes,
    )  # fmt: skip
    model = FrameDiT(config).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    codec = PatchCodec(8, 4)
    codec.mean.fill_(0.5)
    return FrameWorld(model, codec)


def walk(frames: int, given: int = GIVEN) -> dict[str, Any]:
    """Arguments of a call: `given` pictures, and actions and poses of them and of `frames` more."""
    yaw = 8 * np.arange(given + frames)
    return {
        "video": np.random.default_rng(0).random((given, 64, 64, 3)).astype(np.float32),
        "actions": np.full(given + frames, 2),
        "poses": np.stack([yaw % 512, np.full(len(yaw), 512)], axis=1).astype(np.float64),
    }
