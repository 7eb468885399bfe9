"""transformers decoders as targets: what the store, the mask and the positions give is what the model itself gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from mediaspec.core.kv import KVStore
from mediaspec.core.prompt import TokenPrompt
from mediaspec.core.tree import TreeSpec
from mediaspec.targets.causal_lm import CausalLMTarget
from mediaspec.testing.check_target import check_target

VOCAB, NEW = 50, 24
SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "Qwen2-sliding": dict(use_sliding_window=True, sliding_window=5, max_window_layers=2),
    "Qwen3": dict(head_dim=16),
    "Mistral": dict(sliding_window=6, head_dim=8),
    "Gemma2": dict(sliding_window=5, head_dim=16, attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    "Gemma3": dict(sliding_window=5, head_dim=16),
    "Mixtral": dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
}
CLASSES = {"Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM")}


def make_model(family: str = "Llama", seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A real class at tiny size, with weights large enough for laws that are far from uniform."""
    name = family.split("-")[0]
    config_name, model_name = CLASSES.get(name, (f"{name}Config", f"{name}ForCausalLM"))
    settings = {**SIZES, **FAMILIES[family], **overrides}
    torch.manual_seed(seed)
    config = getattr(transformers, config_name)(**settings)
    model = getattr(transformers, model_name)._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=1.0 if "embed" in label else parameter.shape[-1] ** -0.5)
    return model


def prompts(rows: int, vocab: int = VOCAB) -> tuple[Tensor, Tensor]:
    """Left-padded ids [R, 9] and their mask; row 0 is full."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, vocab, (8, 9), generator=generator)[:rows]
    lengths = torch.tensor([9, 4, 7, 1, 9, 2, 5, 8])[:rows]
    mask = (torch.arange(9) >= 9 - lengths[:, None]).long()
    return ids * mask, mask


def prompt(rows: int) -> TokenPrompt:
    return TokenPrompt.from_padded(*prompts(rows))


def tokens_of(rows: int, count: int, seed: int = 1) -> Tensor:
    return torch.randint(3, VOCAB, (rows, count), generator=torch.Generator().manual_seed(seed))


def own_logits(model: PreTrainedModel, row: int, tokens: Tensor) -> Tensor:
    """[n + 1, V]: the model's own forward over one prompt and n tokens, without a cache."""
    ids, mask = prompts(row + 1)
    whole = torch.cat([ids[row][mask[row] == 1], tokens])[None]
    with torch.no_grad():
        return model(input_ids=whole, use_cache=False).logits[0, -(len(tokens) + 1) :]


def start(target: CausalLMTarget, rows: int, extra: int = 12) -> tuple[KVStore, Tensor]:
    cache = target.new_cache(rows, extra)
    return cache, target.prefill(prompt(rows), cache).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_families_pass_the_conformance_suite(family: str) -> None:
    check_target(CausalLMTarget(make_model(family), NEW), prompt, token_ids=range(3, VOCAB))


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_equal_the_models_own_forward(family: str) -> None:
    """Ragged prompts, ragged lengths behind them, a rejected block, windows shorter than the context."""
    model = make_model(family)
    target, tokens = CausalLMTarget(model, NEW), tokens_of(4, NEW)
    wanted = [own_logits(model, row, tokens[row]) for row in range(4)]
    cache, first = start(target, 4)
    for row in range(4):
        torch.testing.assert_close(first[row, 0], wanted[row][0], atol=2e-5, rtol=1e-4)
    target.score(tokens_of(4, 6, seed=9), cache)  # rejected altogether
    counts = [2, 5, 1, 7]
    target.score(tokens[:, :7], cache)
    cache.advance(torch.tensor(counts), counts)
    while max(counts) < NEW - 4:
        ahead = torch.stack([row[count : count + 4] for row, count in zip(tokens, counts, strict=True)])
        got = target.score(ahead, cache).logits
        for row, count in enumerate(counts):
            torch.testing.assert_close(got[row], wanted[row][count + 1 : count + 5], atol=2e-5, rtol=1e-4)
        moved = [1 + (row + counts[row]) % 4 for row in range(4)]
        cache.advance(torch.tensor(moved), moved)
        counts = [count + more for count, more in zip(counts, moved, strict=True)]


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma2"])
def test_tree_nodes_equal_the_models_own_forward(family: str) -> None:
    tree = TreeSpec.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
    model = make_model(family)
    target, tokens = CausalLMTarget(model, NEW), tokens_of(3, 4)
    cache, _ = start(target, 3)
    target.score(tokens, cache)
    counts = [4, 2, 3]
    cache.advance(torch.tensor(counts), counts)
    inputs = tokens_of(3, tree.num_nodes + 1, seed=4)
    scored = target.score(inputs, cache, tree).logits
    for node in range(tree.num_nodes + 1):
        path = [node]
        while path[0]:
            path.insert(0, tree.parents[path[0] - 1])
        for row, count in enumerate(counts):
            wanted = own_logits(model, row, torch.cat([tokens[row, :count], inputs[row, path]]))[-1]
            torch.testing.assert_close(scored[row, node], wanted, atol=2e-5, rtol=1e-4)


def test_a_long_prompt_runs_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mediaspec.targets.causal_lm.CHUNK", 4)
    model = make_model("Gemma3")
    _, first = start(CausalLMTarget(model, NEW), 8)
    for row in range(8):
        wanted = own_logits(model, row, tokens_of(1, 0)[0])[0]
        torch.testing.assert_close(first[row, 0], wanted, atol=2e-5, rtol=1e-4)


def test_a_prefill_scores_last_positions_only() -> None:
    """With 150,000 ids the logits of a whole prompt would outweigh the model."""
    model, seen = make_model(), []
    target = CausalLMTarget(model, NEW)
    model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[1]))
    start(target, 1)
    start(target, 4)  # lengths 9, 4, 7 and 1
    assert seen == [1, 4]


def test_padding_does_not_reach_a_row() -> None:
    """The same prompt alone and beside longer ones, padded left and right: equal to the last bit."""
    target = CausalLMTarget(make_model(), NEW)
    ids, mask = prompts(4)
    row = ids[1][mask[1] == 1]
    alone = TokenPrompt.from_padded(row[None])
    right = TokenPrompt.from_padded(torch.cat([row, torch.zeros(5, dtype=torch.int64)])[None], mask[1].flip(0)[None])
    assert torch.equal(right.ids, alone.ids) and right.host_lengths == alone.host_lengths == (4,)
    assert torch.equal(prompt(4).ids[1, :4], row) and torch.equal(prompt(4).aligned_right()[1, 5:], row)
    cache = target.new_cache(1, 4)
    target.prefill(alone, cache)
    batch, _ = start(target, 4, 4)
    tokens = tokens_of(4, 5)
    torch.testing.assert_close(
        target.score(tokens[1:2], cache).logits, target.score(tokens, batch).logits[1:2], atol=1e-5, rtol=1e-5
    )


def test_the_model_is_as_it_was() -> None:
    model = make_model("Gemma2")
    ids, mask = prompts(3)
    before = model(input_ids=ids, attention_mask=mask).logits
    target = CausalLMTarget(model, NEW)
    start(target, 3)
    assert model.config._attn_implementation == "eager" and not model.get_output_embeddings()._forward_pre_hooks
    assert torch.equal(before, model(input_ids=ids, attention_mask=mask).logits)
    with target.attached(), target.attached():
        assert model.config._attn_implementation == "mediaspec"
        inside = model(input_ids=ids, attention_mask=mask).logits  # an ordinary call in between keeps its meaning
    torch.testing.assert_close(inside[mask == 1], before[mask == 1], atol=1e-5, rtol=1e-4)
    assert model.config._attn_implementation == "eager"


def test_vocabularies_of_different_size() -> None:
    model = make_model(vocab_size=44)
    wide, narrow = CausalLMTarget(model, NEW, vocab_size=VOCAB), CausalLMTarget(model, NEW, vocab_size=40)
    ids = torch.tensor([[3, 43]])
    for target, size in ((wide, VOCAB), (narrow, 40)):
        cache = target.new_cache(1, 4)
        logits = target.prefill(TokenPrompt.from_padded(ids), cache).logits
        assert logits.shape == (1, 1, size) and bool(logits[..., :40].isfinite().all())
    assert bool((wide.score(torch.tensor([[49]]), wide_cache(wide)).logits[..., 44:] == float("-inf")).all())


def wide_cache(target: CausalLMTarget) -> KVStore:
    cache = target.new_cache(1, 4)
    target.prefill(TokenPrompt.from_padded(torch.tensor([[3, 4]])), cache)
    return cache


def test_models_it_cannot_serve_are_refused() -> None:
    with pytest.raises(ValueError, match="dynamic"):
        CausalLMTarget(make_model(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), 4)
    with pytest.raises(ValueError, match="TokenPrompt"):
        target = CausalLMTarget(make_model(), 4)
        target.prefill(torch.tensor([[1]]), target.new_cache(1, 0))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one token"):
        TokenPrompt.from_padded(torch.tensor([[1, 2], [3, 4]]), torch.tensor([[1, 1], [0, 0]]))
    config = transformers.T5Config(
        vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    with pytest.raises(ValueError, match="decoder-only"):
        CausalLMTarget(transformers.T5ForConditionalGeneration(config), 4)
