"""One optimiser for the moving-emoji nets: Muon on hidden matrices (convolutions flattened), AdamW on the rest."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parent.parent / "emoji64"))
from muon import orthogonalise

OUTER = ("conv_in", "conv_out", "quant_conv", "token_embedding", "position_embedding", "time_embedding.linear_1")


class Optimiser:
    """Muon and AdamW behind one `step`.

    Args:
        model: all parameters that require a gradient are trained; weights of two to four axes use Muon, except
            first and last layers and embeddings (`OUTER`), which use AdamW like norms and biases.
        lr: peak rate of AdamW.
        hidden_lr: peak rate of Muon (same scale, arXiv:2502.16982 section 2.2).
        momentum: Nesterov momentum of Muon.
    """

    def __init__(self, model: nn.Module, lr: float, hidden_lr: float, momentum: float = 0.95) -> None:
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        hidden = [n for n, p in named if p.dim() in (2, 3, 4) and not any(o in n for o in OUTER)]
        self.all = [p for _, p in named]
        self.hidden = [p for n, p in named if n in hidden]
        self.other = [p for n, p in named if n not in hidden]
        self.buffers = [torch.zeros_like(p) for p in self.hidden]
        self.lr, self.hidden_lr, self.momentum = lr, hidden_lr, momentum
        self.adam = torch.optim.AdamW(self.other, lr=lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True)

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs."""
        return {"adam": self.adam.state_dict(), "buffers": self.buffers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.adam.load_state_dict(state["adam"])
        for mine, theirs in zip(self.buffers, state["buffers"], strict=True):
            mine.copy_(theirs)

    @torch.no_grad()
    def step(self, factor: float) -> float:
        """Update from the gradients and clear them.

        Args:
            factor: learning-rate factor of the schedule, 0..1.

        Returns:
            The gradient norm before clipping at 1.
        """
        norm = float(nn.utils.clip_grad_norm_(self.all, 1.0))
        for group in self.adam.param_groups:
            group["lr"] = self.lr * factor
        self.adam.step()
        stacks: dict[tuple[int, int, bool], list[tuple[Tensor, Tensor]]] = {}
        for p, buffer in zip(self.hidden, self.buffers, strict=True):
            if p.grad is None:
                continue
            buffer.lerp_(p.grad, 1 - self.momentum)
            g = p.grad.lerp(buffer, self.momentum).flatten(1)
            tall = g.shape[0] > g.shape[1]
            g = g.t() if tall else g
            stacks.setdefault((*g.shape, tall), []).append((p, g))
        for (rows, columns, tall), pairs in stacks.items():
            update = orthogonalise(torch.stack([g for _, g in pairs]), dtype=torch.float32)
            scale = -self.hidden_lr * factor * 0.2 * max(rows, columns) ** 0.5
            for (p, _), u in zip(pairs, update, strict=True):
                p.add_((u.t() if tall else u).reshape(p.shape), alpha=scale)
        for p in self.all:
            p.grad = None
        return norm
