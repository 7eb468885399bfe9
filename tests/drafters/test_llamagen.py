"""The suites on a tiny LlamaGen transformer: what third parties run on a target and a drafter of their own."""

import pytest
import torch

from mediaspec.core.tree import TreeSpec
from mediaspec.drafters import EagleDrafter, ModelDrafter
from mediaspec.models.eagle import EagleHead, EagleHeadConfig
from mediaspec.models.llamagen import LlamaGenConfig, LlamaGenGPT
from mediaspec.targets.llamagen import ClassCondition, LlamaGenTarget
from mediaspec.testing import check_drafter, check_target


def network(seed, layers):
    torch.manual_seed(seed)
    config = LlamaGenConfig(
        dim=32, n_layer=layers, n_head=2, multiple_of=16, vocab_size=13, block_size=9, num_classes=6
    )
    gpt = LlamaGenGPT(config).eval()
    torch.nn.init.normal_(gpt.output.weight, std=0.3)
    return gpt


TARGET = LlamaGenTarget(network(0, 2))


def condition(rows):
    """Pairs of rows: guidance is on."""
    return ClassCondition.build(torch.arange(rows) % 6, guided=True)


def test_target():
    check_target(TARGET, lambda rows: ClassCondition.build(torch.arange(rows), guided=False))


@pytest.mark.parametrize("guided", [False, True])
def test_eagle(guided):
    torch.manual_seed(1)
    config = EagleHeadConfig(hidden_size=32, vocab_size=13, num_attention_heads=2, grid=(3, 3), guided=guided)
    head = EagleHead(config).eval()
    tree = TreeSpec.from_paths([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)])
    check_drafter(
        lambda: EagleDrafter(head), TARGET, condition, guidance_scale=1.5, budgets=(4,), trees=(tree,), rows=32
    )


def test_smaller_model():
    small = LlamaGenTarget(network(2, 1))
    check_drafter(lambda: ModelDrafter(small), TARGET, condition, guidance_scale=1.5, budgets=(4,), rows=32)
