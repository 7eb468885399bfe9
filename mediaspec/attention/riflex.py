"""RIFLEx: one rotary frequency along time is lowered so that a longer video does not repeat (arXiv:2502.15894).

The rotary embedding along time has frequencies theta_j = b^(-2(j-1)/d), j = 1..d/2, with period 2 pi / theta_j frames.
The component whose period is nearest to the frame where a long video begins to repeat (the intrinsic frequency k) is
the cause; slowed to a period longer than the video, 2 pi share / L with share 0.9, it goes through less than one turn.

d channels of the rotary embedding that belong to time, b its base, L latent frames, P tokens per frame.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["INTRINSIC", "intrinsic_index", "periods", "riflex_frequency", "set_frequency"]

# k of published models, counted from 1: CogVideoX-5B (d = 16, b = 10000, period 20 frames), HunyuanVideo (d = 16,
# b = 256, period 50), Wan 2.1 (d = 44, b = 10000, period 51; a community default, some loss of quality is reported)
INTRINSIC = {
    "CogVideoXTransformer3DModel": 2,
    "HunyuanVideoTransformer3DModel": 4,
    "WanTransformer3DModel": 6,
}


def periods(channels: int, base: float = 10000.0) -> list[int]:
    """Period of every rotary component along time, in latent frames, rounded.

    Args:
        channels: d, even. base: b.

    Raises:
        ValueError: an odd or empty d.

    Example:
        >>> periods(44)[:6], periods(16, 256.0)[:4]
        ([6, 10, 15, 22, 34, 51], [6, 13, 25, 50])
    """
    if channels < 2 or channels % 2:
        raise ValueError(f"channels={channels}; a rotary embedding has an even number of channels, at least 2")
    return [round(2 * math.pi * base ** (2 * j / channels)) for j in range(channels // 2)]


def intrinsic_index(channels: int, repeats_at: int, base: float = 10000.0) -> int:
    """k: the component, counted from 1, whose period is nearest to the frame where repetition starts.

    Args:
        channels: d. repeats_at: latent frame at which a video that is too long begins again. base: b.

    Raises:
        ValueError: `repeats_at` below 1.

    Example:
        >>> intrinsic_index(16, 21), intrinsic_index(16, 48, base=256.0)
        (2, 4)
    """
    if repeats_at < 1:
        raise ValueError(f"repeats_at={repeats_at}; give the latent frame, from 1 on, at which the video repeats")
    found = periods(channels, base)
    return 1 + min(range(len(found)), key=lambda j: abs(found[j] - repeats_at))


def riflex_frequency(channels: int, k: int, num_frames: int, base: float = 10000.0, share: float = 0.9) -> float:
    """Frequency of component k for a video of `num_frames` latent frames, in radians per frame.

    The trained one where that is slow enough already, so that short videos stay as they are.

    Raises:
        ValueError: a component that the embedding has not, a share outside (0, 1], or no frame.
    """
    if not 1 <= k <= channels // 2:
        raise ValueError(f"k={k}; an embedding of {channels} channels along time has components 1 to {channels // 2}")
    if not 0 < share <= 1:
        raise ValueError(f"share={share}; allowed is above 0 up to 1, the part of a turn that the video may take")
    if num_frames < 1:
        raise ValueError(f"num_frames={num_frames}; a video has at least 1 latent frame")
    return min(base ** (-2 * (k - 1) / channels), share * 2 * math.pi / num_frames)


def set_frequency(cos: Tensor, sin: Tensor, num_frames: int, k: int, frequency: float) -> tuple[Tensor, Tensor]:
    """Rotary tables with another frequency in component k along time.

    Args:
        cos, sin: [..., L*P, ..., D] with tokens in frame-major order on the one axis of that length, the time channels
            first and every component twice in a row, as diffusers' Wan, HunyuanVideo and CogVideoX have them.
        num_frames: L. k: component, from 1. frequency: radians per frame.

    Returns:
        New tensors; the given ones stay.

    Raises:
        ValueError: tables that do not hold whole frames, or a component that they have not.
    """
    tokens = max(cos.shape[:-1])
    if num_frames < 1 or tokens % num_frames or not 1 <= k <= cos.shape[-1] // 2:
        raise ValueError(
            f"num_frames={num_frames} and k={k} do not fit rotary tables of shape {tuple(cos.shape)}; {tokens} tokens "
            f"are a whole number of frames, and components count from 1 to {cos.shape[-1] // 2}"
        )
    turned = torch.arange(num_frames, dtype=torch.float64, device="cpu") * frequency
    turned = turned.repeat_interleave(tokens // num_frames)
    axis = cos.shape[:-1].index(tokens)
    shape = [1] * cos.ndim
    shape[axis] = tokens
    columns = slice(2 * (k - 1), 2 * k)
    changed = []
    for table, values in ((cos, turned.cos()), (sin, turned.sin())):
        table = table.clone()
        table[..., columns] = values.view(shape).to(table.device, table.dtype)
        changed.append(table)
    return changed[0], changed[1]
