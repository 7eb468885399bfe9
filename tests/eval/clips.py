"""Small synthetic clips: a bright square that moves over a flat or textured ground, with or without flicker."""

from __future__ import annotations

import numpy as np


def moving_square(frames: int = 16, side: int = 32, step: int = 1, texture: float = 0.0, seed: int = 0) -> np.ndarray:
    """uint8 [T, side, side, 3]: an 8x8 square that moves `step` pixels to the right per frame and wraps."""
    rng = np.random.default_rng(seed)
    ground = 90 + texture * rng.standard_normal((side, side, 3))
    patch = rng.integers(120, 255, (8, 8, 3))
    out = np.empty((frames, side, side, 3), np.uint8)
    for t in range(frames):
        picture = ground.copy()
        columns = (np.arange(8) + 4 + step * t) % side
        picture[side // 2 - 4 : side // 2 + 4, columns] = patch
        out[t] = np.clip(picture, 0, 255).astype(np.uint8)
    return out


def flickering(frames: np.ndarray, strength: float = 12.0, seed: int = 1) -> np.ndarray:
    """The clip with another brightness in every frame."""
    light = np.random.default_rng(seed).standard_normal(len(frames)) * strength
    return np.clip(frames + light[:, None, None, None], 0, 255).astype(np.uint8)
