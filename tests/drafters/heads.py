"""Small untrained draft heads and runs shared by the drafter tests."""

from __future__ import annotations

import torch
from torch import Tensor

from mediaspec.core.engine import Engine
from mediaspec.models.eagle import EagleHead, EagleHeadConfig
from tests.toy import ToyTarget


def toy_head(target: ToyTarget, guided: bool = False, scale: float = 0.5) -> EagleHead:
    """A head with weights large enough that its drafts depend on everything it reads."""
    config = EagleHeadConfig(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        num_attention_heads=2,
        grid=target.grid,
        max_positions=target.num_tokens,
        guided=guided,
    )
    torch.manual_seed(0)
    head = EagleHead(config).eval()
    for weight in head.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=scale)
    return head


def toy_condition(branches: int):
    """Row b has offset b, its unconditional branch 0."""

    def condition(rows: int) -> Tensor:
        offsets = torch.arange(rows)
        return offsets if branches == 1 else torch.stack([offsets, torch.zeros_like(offsets)], 1).flatten()

    return condition


def decode(target, rule, drafter, rows, **settings):
    branches = 1 if settings.get("guidance_scale") is None else 2
    return Engine(target, rule, drafter).decode(toy_condition(branches)(rows), torch.arange(rows), **settings)
