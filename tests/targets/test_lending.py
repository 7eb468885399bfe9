"""Runs that borrow one model at a time get their own results and give it back as it was."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mediaspec.core.prompt import TokenPrompt
from mediaspec.targets.causal_lm import CausalLMTarget

PROMPT = TokenPrompt.from_padded(torch.tensor([[3, 5, 7, 9]]))


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=24, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=32,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def scored(target: CausalLMTarget) -> torch.Tensor:
    cache = target.new_cache(1, 2)
    target.prefill(PROMPT, cache)
    return target.score(torch.tensor([[1, 2]]), cache).logits


@pytest.mark.parametrize("fast", [True, False])
def test_overlapping_runs(model: Any, fast: bool) -> None:
    wanted, before = scored(CausalLMTarget(model, 4, fast=fast)), model.config._attn_implementation
    first, second = CausalLMTarget(model, 4, fast=fast), CausalLMTarget(model, 4, fast=fast)
    outer, inner = ExitStack(), ExitStack()
    outer.enter_context(first.attached())
    inner.enter_context(second.attached())
    outer.close()
    assert torch.equal(scored(second), wanted), "the other run has ended, this one goes on"
    inner.close()
    assert model.config._attn_implementation == before
    assert not any("forward" in vars(one) for one in model.modules())


def test_an_error_in_a_pass_leaves_nothing_behind(model: Any) -> None:
    target = CausalLMTarget(model, 4)
    target.feature_layers = (0, 1)
    with pytest.raises(IndexError):
        target.prefill(TokenPrompt.from_padded(torch.tensor([[1, 99]])), target.new_cache(1, 2))
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())
    assert model.config._attn_implementation != "mediaspec"


def test_another_forward_is_left_alone(model: Any) -> None:
    target = CausalLMTarget(model, 4)
    scored(target)
    module = model.model.layers[0].mlp.up_proj
    inner = module.forward
    module.forward = mine = lambda x: 2 * inner(x)
    slow = scored(CausalLMTarget(model, 4, fast=False))
    torch.testing.assert_close(scored(target), slow, atol=1e-5, rtol=1e-4)
    assert vars(module)["forward"] is mine


def test_texts_beyond_the_trained_positions_are_named(model: Any) -> None:
    with pytest.warns(UserWarning, match="32 were trained"):
        target = CausalLMTarget(model, 30)
        target.prefill(PROMPT, target.new_cache(1, 2))
