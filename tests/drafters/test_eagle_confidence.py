"""An unsure head stops early; that changes neither the tokens nor the law, nor does it depend on the batch."""

from __future__ import annotations

import pytest
import torch

from mediaspec.core.engine import Engine
from mediaspec.drafters.eagle import EagleDrafter
from mediaspec.models.eagle import EagleHead, EagleHeadConfig
from mediaspec.rules import make_rule
from tests.toy import ToyTarget

SEEDS = torch.tensor([5, 6, 7, 8])
CONDITION = torch.tensor([0, 3, 1, 2, 5, 0, 2, 2])


def head(threshold: float) -> EagleHead:
    torch.manual_seed(0)
    config = EagleHeadConfig(
        hidden_size=8, vocab_size=5, num_attention_heads=2, grid=(4, 4), confidence_threshold=threshold
    )
    return EagleHead(config).eval()


def decode(rule: str, threshold: float, rows: slice = slice(0, 4)):
    target = ToyTarget(5, 16, sharpness=2.0)
    engine = Engine(target, make_rule(rule), EagleDrafter(head(threshold)))
    condition = CONDITION.view(4, 2)[rows].reshape(-1)
    return engine.decode(condition, SEEDS[rows], guidance_scale=1.5, num_draft_tokens=6)


def test_coupled_tokens_stay_and_fewer_positions_are_tested() -> None:
    full, careful = decode("coupled", 0.0), decode("coupled", 0.5)
    assert torch.equal(full.tokens, careful.tokens)
    assert sum(careful.stats.tested_per_position[2:]) < sum(full.stats.tested_per_position[2:])


def test_stopping_early_does_not_depend_on_the_batch() -> None:
    whole = decode("exact", 0.4)
    for row in range(4):
        assert torch.equal(decode("exact", 0.4, slice(row, row + 1)).tokens[0], whole.tokens[row])


def test_an_impossible_threshold_is_refused() -> None:
    with pytest.raises(ValueError, match="confidence_threshold"):
        EagleHeadConfig(hidden_size=8, vocab_size=5, num_attention_heads=2, grid=(4, 4), confidence_threshold=1.5)
