# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, disable-error-code="untyped-decorator"
"""Philox4x32-10 as Triton device functions, and the two kernels that fill tensors with them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["exponential", "exponential_row", "uniform", "uniform_scalar"]


@triton.jit
def uniform_scalar(seed, position, purpose, sibling):
    """One uniform in [0, 1) from (or a block of them, where position is a block) lane 0 of block 0."""
    word = position.to(tl.uint32)
    zero = word * 0
    bits, _, _, _ = tl.philox(seed, zero, word, zero + purpose, zero + sibling)
    return (bits >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2^-24


@triton.jit
def exponential_row(seed, position, purpose, base, BLOCK: tl.constexpr):
    """The exponentials of tokens base .. base + BLOCK - 1 (base a multiple of 4).

    Each counter is computed once and its four lanes are interleaved; four neighbouring tokens belong to one thread of
    a row's layout, so no data crosses threads (the compiled kernels use no shared memory for it up to 65536 tokens).
    """
    block = (base // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    zero = block * 0
    r0, r1, r2, r3 = tl.philox(seed, block, zero + position.to(tl.uint32), zero + purpose, zero)
    bits = tl.interleave(tl.interleave(r0, r2), tl.interleave(r1, r3))
    return -tl.log(((bits >> 9) * 2 + 1).to(tl.float32) * 5.9604644775390625e-08)


@triton.jit
def _uniform_kernel(seeds, positions, out, count, total, purpose, sibling, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < total
    seed = tl.load(seeds + index // count, mask=inside, other=0)
    position = tl.load(positions + index, mask=inside, other=0)
    tl.store(out + index, uniform_scalar(seed, position, purpose, sibling), mask=inside)


@triton.jit
def _exponential_kernel(seeds, positions, out, count, V, purpose, BLOCK: tl.constexpr):
    line = tl.program_id(0).to(tl.int64)
    base = tl.program_id(1) * BLOCK
    seed = tl.load(seeds + line // count)
    position = tl.load(positions + line)
    token = base + tl.arange(0, BLOCK)
    tl.store(out + line * V + token, exponential_row(seed, position, purpose, base, BLOCK), mask=token < V)


def uniform(seeds: Tensor, positions: Tensor, purpose: int, sibling: int) -> Tensor:
    """See `mediaspec.kernels.philox.uniform`."""
    positions = positions.contiguous()
    out = torch.empty(positions.shape, dtype=torch.float32, device=positions.device)
    total = positions.numel()
    if total:
        _uniform_kernel[(triton.cdiv(total, 256),)](
            seeds.contiguous(), positions, out, positions.shape[1], total, purpose, sibling, BLOCK=256
        )
    return out


def exponential(seeds: Tensor, positions: Tensor, vocab_size: int, purpose: int) -> Tensor:
    """See `mediaspec.kernels.philox.exponential`."""
    positions = positions.contiguous()
    out = torch.empty(*positions.shape, vocab_size, dtype=torch.float32, device=positions.device)
    if out.numel():
        block = min(4096, max(16, triton.next_power_of_2(vocab_size)))
        _exponential_kernel[(positions.numel(), triton.cdiv(vocab_size, block))](
            seeds.contiguous(), positions, out, positions.shape[1], vocab_size, purpose, BLOCK=block
        )
    return out
