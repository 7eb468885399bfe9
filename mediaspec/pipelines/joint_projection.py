"""Queries, keys and values of joint text and video attention as CogVideoX and HunyuanVideo make them.

Whoever puts another attention in their middle begins here: the mass blend (`prompt_joint`) and TiARA. The steps are
those of diffusers' CogVideoXAttnProcessor2_0, its fused form, and HunyuanVideoAttnProcessor2_0.

B batch, H heads, D head size, S text tokens, V video tokens, N either.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.attention_processor import FusedCogVideoXAttnProcessor2_0
from diffusers.models.embeddings import apply_rotary_emb
from torch import Tensor, nn

__all__ = ["cogvideox_qkv", "hunyuan_qkv", "is_fused"]


def is_fused(processor: Any) -> bool:
    """Whether a processor of CogVideoX multiplies with one matrix. The module's own flag stays on after unfusing."""
    return isinstance(processor, FusedCogVideoXAttnProcessor2_0)


def cogvideox_qkv(
    attn: Any, text: Tensor, video: Tensor, tables: Any = None, *, fused: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Both streams through the same weights, text first; the video alone is rotated.

    Args:
        attn: the module.
        text: [B, S, C]; video: [B, V, C].
        tables: cosines and sines [V, D] each, or None.
        fused: multiply with `attn.to_qkv`, see `is_fused`.

    Returns:
        Query, key and value [B, H, S + V, D].
    """
    states, count = torch.cat([text, video], 1), text.shape[1]
    parts = attn.to_qkv(states).chunk(3, -1) if fused else (attn.to_q(states), attn.to_k(states), attn.to_v(states))
    q, k, v = (one.transpose(1, 2) for one in _heads(attn, *parts))
    q, k = _normed(attn.norm_q, q), _normed(attn.norm_k, k)
    if tables is not None:
        q, k = (torch.cat([one[:, :, :count], _turned(one[:, :, count:], tables, 2)], 2) for one in (q, k))
    return q, k, v


def hunyuan_qkv(
    attn: Any, states: Tensor, tables: Any = None, *, video: int | None = None, added: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """One stream of HunyuanVideo: the video, the text, or both where they share weights.

    Args:
        attn: the module.
        states: [B, N, C], the video first.
        tables: cosines and sines [V, D] each; None rotates nothing.
        video: V; None means that all of `states` is video.
        added: take the text's own weights, which the double blocks have.

    Returns:
        Query, key and value [B, N, H, D].
    """
    if added:
        layers, norms = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj), (attn.norm_added_q, attn.norm_added_k)
    else:
        layers, norms = (attn.to_q, attn.to_k, attn.to_v), (attn.norm_q, attn.norm_k)
    q, k, v = _heads(attn, *(layer(states) for layer in layers))
    q, k = _normed(norms[0], q), _normed(norms[1], k)
    if tables is not None and video is None:
        q, k = _turned(q, tables, 1), _turned(k, tables, 1)
    elif tables is not None:
        q, k = (torch.cat([_turned(one[:, :video], tables, 1), one[:, video:]], 1) for one in (q, k))
    return q, k, v


def _heads(attn: Any, *projected: Tensor) -> list[Tensor]:
    """[B, N, H * D] to [B, N, H, D]."""
    return [one.unflatten(2, (attn.heads, -1)) for one in projected]


def _normed(norm: nn.Module | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


def _turned(x: Tensor, tables: Any, axis: int) -> Tensor:
    """Rotary positions along an axis; a typed face of diffusers' function, which also has a complex form."""
    turned: Any = apply_rotary_emb(x, tables, sequence_dim=axis)
    return turned
