"""Philox4x32-10 in plain torch: 32-bit words carried in int64."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["exponential", "philox4x32", "uniform"]

MASK = 0xFFFFFFFF
MULTIPLIER_0 = 0xD2511F53
MULTIPLIER_1 = 0xCD9E8D57
WEYL_0 = 0x9E3779B9
WEYL_1 = 0xBB67AE85
ROUNDS = 10

# Counters per pass: eight int64 temporaries of this size (1 MiB together) stay in a core's cache.
CHUNK = 1 << 14


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten Philox rounds.

    Args:
        counter: four int64 tensors of broadcastable shapes holding words in [0, 2^32).
        key: two int64 tensors likewise.

    Returns:
        four int64 tensors of the broadcast shape, words in [0, 2^32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # A product of two 32-bit words fits 64 bits; int64 wraps, and its bit pattern is the unsigned product.
        product_0 = c0 * MULTIPLIER_0
        product_1 = c2 * MULTIPLIER_1
        c0 = ((product_1 >> 32) & MASK) ^ c1 ^ k0
        c2 = ((product_0 >> 32) & MASK) ^ c3 ^ k1
        c1 = product_1 & MASK
        c3 = product_0 & MASK
        k0 = (k0 + WEYL_0) & MASK
        k1 = (k1 + WEYL_1) & MASK
    return c0, c1, c2, c3


def _key(seeds: Tensor) -> tuple[Tensor, Tensor]:
    return seeds & MASK, (seeds >> 32) & MASK


def uniform(seeds: Tensor, positions: Tensor, purpose: int, sibling: int = 0) -> Tensor:
    """See `mediaspec.kernels.philox.uniform`."""
    k0, k1 = _key(seeds[:, None])
    position = positions & MASK
    zero = torch.zeros_like(position)
    bits, _, _, _ = philox4x32((zero, position, zero + purpose, zero + sibling), (k0, k1))
    return (bits >> 8).to(torch.float32) * 2.0**-24


def exponential(seeds: Tensor, positions: Tensor, vocab_size: int, purpose: int) -> Tensor:
    """See `mediaspec.kernels.philox.exponential`."""
    batch, count = positions.shape
    blocks = (vocab_size + 3) // 4
    lines = batch * count
    out = torch.empty(lines, blocks, 4, dtype=torch.float32, device=positions.device)
    k0, k1 = _key(seeds[:, None].expand(batch, count).reshape(lines, 1))
    position = (positions & MASK).reshape(lines, 1)
    block = torch.arange(blocks, device=positions.device)[None]
    word = torch.full_like(position, purpose)
    zero = torch.zeros_like(position)
    step = max(1, CHUNK // blocks)
    for low in range(0, lines, step):
        part = slice(low, low + step)
        lanes = philox4x32((block, position[part], word[part], zero[part]), (k0[part], k1[part]))
        for lane, bits in enumerate(lanes):
            out[part, :, lane] = ((bits >> 9) * 2 + 1).to(torch.float32)
    out = out.view(lines, blocks * 4)
    out.mul_(2.0**-24).log_().neg_()
    return out[:, :vocab_size].reshape(batch, count, vocab_size)
