"""Muon, batched and shared out over processes: momentum made orthogonal for the hidden matrices of a transformer.

Equal matrices are stacked so that the Newton-Schulz iterations are a few batched products, and each process iterates
its share of every stack only. Source: K. Jordan et al., Muon (2024); the 0.2 sqrt(max(rows, columns)) factor, which
makes one learning rate fit AdamW and Muon, from arXiv:2502.16982, section 2.2.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def orthogonalise(g: Tensor, steps: int = 5, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Nearest semi-orthogonal matrices, roughly, by a quintic Newton-Schulz iteration.

    Args:
        g: [M, r, c] with r <= c.
        dtype: what it computes in; bf16 is enough, float32 is faster on a CPU without matrix units for bf16.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = (g / (g.norm(dim=(1, 2), keepdim=True) + 1e-7)).to(dtype)
    for _ in range(steps):
        s = x @ x.transpose(1, 2)
        x = a * x + (b * s + c * s @ s) @ x
    return x


class Muon:
    """Muon over 2-D parameters; fused projections are treated as their separate square parts.

    Args:
        parameters: 2-D parameters whose sides divide by `unit`.
        momentum: Nesterov momentum.
        unit: parts of the rows that are matrices of their own have this many rows (the model width).
        weight_decay: decoupled weight decay.
        dtype: of the Newton-Schulz iterations.
    """

    def __init__(
        self,
        parameters: list[Tensor],
        unit: int,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.parameters, self.unit, self.momentum, self.weight_decay = parameters, unit, momentum, weight_decay
        self.dtype = dtype
        self.buffers = [torch.zeros_like(p) for p in parameters]

    def _parts(self, p: Tensor) -> list[Tensor]:
        """Views [unit, n] of a parameter-shaped tensor: q, k, v apart, tall matrices transposed."""
        if p.shape[0] == 3 * self.unit and p.shape[1] == self.unit:
            return list(p.split(self.unit))
        return [p if p.shape[0] <= p.shape[1] else p.t()]

    @torch.no_grad()
    def step(self, lr: float, rank: int = 0, world: int = 1) -> None:
        """Update the parameters from their gradients (already averaged over the processes)."""
        stacks: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}
        for p, buffer in zip(self.parameters, self.buffers, strict=True):
            if p.grad is None:
                continue
            buffer.lerp_(p.grad, 1 - self.momentum)
            nesterov = p.grad.lerp(buffer, self.momentum)
            for part, g in zip(self._parts(p.data), self._parts(nesterov), strict=True):
                stacks.setdefault(tuple(part.shape), []).append((part, g))
        for shape, pairs in sorted(stacks.items()):
            share = -(-len(pairs) // world)
            mine = pairs[rank * share : (rank + 1) * share]
            update = torch.zeros(share, *shape, dtype=self.dtype)
            if mine:
                update[: len(mine)] = orthogonalise(torch.stack([g for _, g in mine]), dtype=self.dtype)
            everybody = [torch.empty_like(update) for _ in range(world)]
            if world > 1:
                dist.all_gather(everybody, update)
            else:
                everybody = [update]
            scale = 0.2 * max(shape) ** 0.5
            for (part, _), u in zip(pairs, torch.cat(everybody), strict=False):
                part.mul_(1 - lr * self.weight_decay).add_(u.float(), alpha=-lr * scale)
