"""The prepared decoder computes what the modules compute, and steps aside where it would not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from mediaspec.core.prompt import TokenPrompt
from mediaspec.core.tree import TreeSpec
from mediaspec.models.decoder_step import DecoderStep
from mediaspec.targets.causal_lm import CausalLMTarget

SIZES: dict[str, Any] = dict(
    vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, head_dim=8,
)  # fmt: skip
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "llama with biases": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=6)),
}


def made(name: str) -> Any:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for weight in model.parameters():  # biases and norms start at 0 and 1
            weight.add_(0.1 * torch.randn_like(weight))
    return model


def scored(model: Any, fast: bool, tree: TreeSpec | None = None) -> Any:
    target = CausalLMTarget(model, 12, fast=fast)
    target.feature_layers = (0, 2)
    ids = torch.arange(14).view(2, 7) * 3 % 39 + 1
    cache = target.new_cache(2, 8)
    target.prefill(TokenPrompt.from_padded(ids, torch.tensor([[1] * 7, [0] * 3 + [1] * 4])), cache)
    tokens = torch.arange(2 * (4 if tree is None else 1 + tree.num_nodes)).view(2, -1)
    return target.score(tokens, cache, tree)


@pytest.mark.parametrize("tree", [None, TreeSpec((0, 0, 1))], ids=["chain", "tree"])
@pytest.mark.parametrize("name", MODELS)
def test_equals_the_modules(name: str, tree: TreeSpec | None) -> None:
    model = made(name)
    assert DecoderStep.of(model) is not None
    slow, quick = scored(model, False, tree), scored(model, True, tree)
    for part in ("logits", "hidden", "features"):
        torch.testing.assert_close(getattr(quick, part), getattr(slow, part), atol=1e-5, rtol=1e-4)


def test_it_steps_aside() -> None:
    torch.manual_seed(0)
    gemma = GemmaForCausalLM(GemmaConfig(**SIZES)).eval()
    assert DecoderStep.of(gemma) is None, "another architecture"

    class Mine(LlamaForCausalLM):
        """A subclass may compute something else."""

    assert DecoderStep.of(Mine(LlamaConfig(**SIZES)).eval()) is None
    hooked = made("llama")
    hooked.model.layers[0].register_forward_hook(lambda module, given, output: output)
    assert DecoderStep.of(hooked) is None, "somebody listens to the modules"
    patched = made("llama")
    patched.model.norm.forward = lambda x: 2 * x
    assert DecoderStep.of(patched) is None, "an instance computes something else"


class Adapted(torch.nn.Linear):
    """What a low-rank adapter looks like: a weight that is not all it computes."""


def test_an_adapter_keeps_its_modules() -> None:
    model = made("llama")
    inner = model.model.layers[0].self_attn
    old = inner.q_proj
    inner.q_proj = Adapted(old.in_features, old.out_features, bias=False)
    assert DecoderStep.of(model) is None


@pytest.mark.parametrize("how", ["in place", "data", "norm", "bias"])
def test_any_change_is_noticed(how: str) -> None:
    model = made("llama with biases")
    before = scored(model, True).logits
    with torch.no_grad():
        if how == "in place":
            model.model.layers[1].mlp.down_proj.weight.mul_(-1)
        elif how == "data":
            model.model.layers[1].self_attn.q_proj.weight.data.mul_(-3)
        elif how == "norm":
            model.model.norm.weight = torch.nn.Parameter(3 * model.model.norm.weight)
        else:
            model.model.layers[0].self_attn.v_proj.bias.data += 1
    after = scored(model, True).logits
    assert not torch.allclose(before, after, atol=1e-3)
    torch.testing.assert_close(after, scored(model, False).logits, atol=1e-5, rtol=1e-4)


def test_a_failed_trial_is_said_and_the_modules_run(caplog: pytest.LogCaptureFixture) -> None:
    model = made("llama")
    model.model.norm.variance_epsilon = 3.0  # something the prepared decoder cannot know
    assert DecoderStep.of(model) is None
    assert "own modules" in caplog.text


def test_the_model_is_left_as_it_was() -> None:
    model = made("qwen2")
    ids = torch.tensor([[1, 2, 3]])
    before = model(ids).logits
    scored(model, True)
    assert torch.equal(model(ids).logits, before)
    assert not any("forward" in vars(one) for one in model.modules())
