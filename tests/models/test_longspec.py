"""The LongSpec network: what each query may see, where it starts from, and that training and inference agree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from mediaspec.core.kv import KVStore
from mediaspec.core.prompt import TokenPrompt
from mediaspec.models.longspec import LongSpecConfig, LongSpecHead, last_full_layer, rope_of
from mediaspec.models.longspec_attention import anchor_positions, lagged_attention, window_attention
from mediaspec.models.longspec_step import Cached, Ring
from mediaspec.targets.causal_lm import CausalLMTarget
from tests.targets.test_causal_lm import make_model

CASES = json.loads((Path(__file__).parents[1] / "data" / "longspec_cases.json").read_text())
IDS = torch.tensor([1, 4, 5, 7, 12, 13, 20, 33, 40, 47])


def make_head(model: transformers.PreTrainedModel, window: int = 5, **settings: object) -> LongSpecHead:
    """A head with weights large enough that its logits depend on everything it reads."""
    torch.manual_seed(1)
    head = LongSpecHead.from_target(model, IDS, window=window, **settings).eval()  # type: ignore[arg-type]
    with torch.no_grad():
        for weight in (head.wo.weight, head.cross_o.weight, head.w2.weight, head.cross_q.weight):
            weight.normal_(std=weight.shape[1] ** -0.5)
    return head


def cached(model: transformers.PreTrainedModel, ids: Tensor) -> KVStore:
    target = CausalLMTarget(model, num_tokens=8)
    cache = target.new_cache(len(ids), 0)
    target.prefill(TokenPrompt.from_padded(ids), cache)
    return cache


def test_anchor_offset_case() -> None:
    inputs, expected = CASES["anchor_offset"]["inputs"], CASES["anchor_offset"]["expected"]
    assert anchor_positions(inputs["N"], inputs["offset"], inputs["anchors"]) == expected["positions"]
    assert anchor_positions(128, inputs["offset"], inputs["anchors"])[-1] == expected["last_of_128"]


def test_noisy_visible_keys_case() -> None:
    inputs, expected = CASES["anchor_offset"]["inputs"], CASES["anchor_offset"]["expected"]
    n, lag = inputs["seq_len"], inputs["noisy_shift"]
    values = torch.eye(n)[None, None]
    seen = lagged_attention(torch.zeros(1, 1, n, n), torch.zeros(1, 1, n, n), values, lag)[0, 0]
    assert [row.nonzero()[:, 0].tolist() for row in seen] == expected["noisy_visible_keys_per_query"]
    assert torch.allclose(seen[-1].sum(), torch.tensor(1.0))


@pytest.mark.parametrize("first", [1, 2, 4])
@pytest.mark.parametrize("lag", [1, 3])
def test_queries_of_a_suffix_see_what_they_see_among_all(first: int, lag: int) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 9, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    places = torch.tensor(anchor_positions(9, 2))
    assert torch.allclose(lagged_attention(q[:, :, first:], k, v, lag), lagged_attention(q, k, v, lag)[:, :, first:])
    some = window_attention(q[:, :, first:], k, v, places, 4)
    assert torch.allclose(some, window_attention(q, k, v, places, 4)[:, :, first:], atol=1e-6)


def test_gradients_of_rows_before_the_lag_are_zero() -> None:
    torch.manual_seed(0)
    q = torch.randn(1, 2, 6, 8, requires_grad=True)
    k, v = torch.randn(1, 2, 6, 8, requires_grad=True), torch.randn(1, 2, 6, 8, requires_grad=True)
    lagged_attention(q, k, v, 3).square().sum().backward()
    assert torch.equal(q.grad[:, :, :3], torch.zeros(1, 2, 3, 8)) and q.grad[:, :, 4:].abs().min() > 0
    assert torch.equal(v.grad[:, :, 3:], torch.zeros(1, 2, 3, 8)) and v.grad[:, :, 0].abs().min() > 0
    blind = torch.randn(1, 2, 6, 8, requires_grad=True)
    lagged_attention(blind, k, v, 6).sum().backward()
    assert torch.equal(blind.grad, torch.zeros_like(blind))


def test_the_loss_of_a_training_pass_is_finite_and_the_window_goes_by_positions() -> None:
    head = make_head(make_model())
    n = 12
    embeds = torch.randn(n, 32)
    keys = values = torch.randn(n, 2, 8)
    out = head(embeds, torch.arange(n), keys, values, starts=[0, n], lags=[2])
    out.square().mean().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in head.parameters())
    far = torch.tensor(anchor_positions(n, 50))
    alone = torch.arange(4, n) + 50
    with torch.no_grad():
        head.cross_o.weight.zero_()
        jumped = head(embeds, far, keys, values, starts=[0, n], lags=[1])[4:]
        rest = head(embeds[4:], alone, keys[4:], values[4:], starts=[0, n - 4], lags=[1])
    assert torch.allclose(jumped, rest, atol=1e-5), "anchors are farther back than the window"


def test_packed_sequences_do_not_see_each_other() -> None:
    head = make_head(make_model())
    embeds, keys, values = torch.randn(9, 32), torch.randn(9, 2, 8), torch.randn(9, 2, 8)
    places = torch.cat([torch.arange(5), torch.arange(4)])
    with torch.no_grad():
        packed = head(embeds, places, keys, values, [0, 5, 9], [1, 3], [2, 0])
        one = head(embeds[:5], places[:5], keys[:5], values[:5], [0, 5], [1])[2:]
        two = head(embeds[5:], places[5:], keys[5:], values[5:], [0, 4], [3])
    assert torch.allclose(packed, torch.cat([one, two]), atol=1e-5)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("depth", [0, 2])
def test_inference_equals_the_teacher_forced_pass(norm: bool, depth: int) -> None:
    """A draft at `depth` behind the ring's wrap gives the logits that training saw at lag depth + 1."""
    model = make_model()
    head = make_head(model, final_norm=norm)
    ids = torch.randint(3, 50, (1, 19), generator=torch.Generator().manual_seed(2))
    keys, values = (part[0].transpose(0, 1)[:19] for part in cached(model, ids).layer(3))
    rows = model.get_output_embeddings().weight.detach()[IDS]
    with torch.no_grad():
        embeds = model.get_input_embeddings()(ids[0])
        goal = F.linear(head(embeds, torch.arange(19), keys, values, [0, 19], [depth + 1])[-1], rows)
        step = head.prepare(model.get_input_embeddings(), rows, dtype=torch.float32)
        ring = step.new_ring(1, spare=3)
        for start in (0, 7, 14):
            _, _, k, v = step.project(ids[:, start : start + 7], start)
            ring.write(start, k, v)
        x, q, _, _ = step.project(ids[:, -1:], 18)
        root = 18 - depth
        view = Cached(*(part[:, :, :root] for part in cached(model, ids).layer(3)))
        got = step.logits(x, q, 18, ring, ring.chain_mask(18), view)[0, 0]
        general = step.logits(x, q, torch.tensor([[18]]), ring, ring.mask(torch.tensor([[18]])), view)[0, 0]
    assert torch.allclose(got, goal, atol=5e-3 * float(goal.abs().max())), "weights are rounded to fp16"
    assert torch.allclose(got, general, atol=1e-5)


def test_masks_of_the_ring_are_the_window() -> None:
    ring = Ring(rows=2, heads=1, head_dim=2, window=4, spare=3)
    for p in range(20):
        shown = (ring.chain_mask(p)[0, 0, 0] == 0).nonzero()[:, 0].tolist()
        assert shown == sorted(q % 7 for q in range(max(0, p - 3), p + 1))
        assert torch.equal(ring.mask(torch.tensor([[p], [p]]))[1, 0, 0], ring.chain_mask(p)[0, 0, 0])
    # root at 9, nodes 1 and 2 are its children, node 3 is a child of node 2: depth 2 sees 2 fewer committed ones
    seen = torch.tensor([[[False, True, True]]])
    shown = (ring.tree_mask(torch.tensor([9]), 2, seen)[0, 0, 0] == 0).nonzero()[:, 0].tolist()
    assert shown == sorted([8 % 7, 9 % 7, 11 % 7, 12 % 7])


def test_a_head_starts_as_the_layer_it_reads() -> None:
    """Without cross-attention, a head of a one-layer model is that model."""
    model = make_model(num_hidden_layers=1)
    scale = float(model.get_input_embeddings().weight.detach().pow(2).mean().sqrt())
    head = LongSpecHead.from_target(model, window=64, hidden_scale=scale)
    ids = torch.randint(3, 50, (1, 11), generator=torch.Generator().manual_seed(2))
    keys = values = torch.zeros(11, 2, 8)
    with torch.no_grad():
        head.cross_o.weight.zero_()
        embeds = model.get_input_embeddings()(ids[0])
        out = head(embeds, torch.arange(11), keys, values, [0, 11], [1])
        assert torch.allclose(model.lm_head(out), model(ids).logits[0], atol=1e-3)


def test_saves_without_the_targets_matrices_and_loads(tmp_path: Path) -> None:
    head = make_head(make_model(), qkv_bias=True)
    head.half().save_pretrained(tmp_path)
    loaded = LongSpecHead.from_pretrained(tmp_path, dtype=torch.float32)
    assert loaded.config.rotary == head.config.rotary and loaded.config.target_layer == 3
    assert torch.equal(loaded.draft_ids, IDS) and loaded.draft_ids.dtype == torch.int64
    for name, weight in head.state_dict().items():
        assert torch.equal(loaded.state_dict()[name].float(), weight.float()), name
    stored = (tmp_path / "model.safetensors").stat().st_size
    numbers = sum(p.numel() for p in head.parameters())
    assert stored < 2 * numbers + 8 * len(IDS) + 4096


def test_a_head_for_smollm2_stays_below_12_megabytes() -> None:
    with torch.device("meta"):
        head = LongSpecHead(LongSpecConfig(draft_vocab_size=8192, qkv_bias=False, final_norm=True))
    assert 2 * sum(p.numel() for p in head.parameters()) + 8 * 8192 < 12e6


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_scaled_rotations_are_the_targets(kind: str) -> None:
    scaled = {"rope_type": kind, "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 32}
    if kind == "llama3":
        scaled |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model = make_model(rope_parameters=scaled)
    rotary = next(part for part in model.modules() if hasattr(part, "inv_freq"))
    turns, factor = make_head(model).config.frequencies()
    assert torch.allclose(turns, rotary.inv_freq) and factor == rotary.attention_scaling


def test_the_last_full_layer_is_read() -> None:
    assert last_full_layer(make_model().config) == 3
    gemma = make_model("Gemma3", num_hidden_layers=6)
    full = [layer for layer, kind in enumerate(gemma.config.layer_types) if kind == "full_attention"]
    assert last_full_layer(gemma.config) == full[-1]
    head = LongSpecHead.from_target(gemma)
    assert head.config.target_layer == full[-1] and head.config.rotary == rope_of(gemma.config)
    with pytest.raises(ValueError, match="every layer of this target has a sliding window"):
        last_full_layer(make_model("Mistral").config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(num_attention_heads=5), "multiple of num_key_value_heads"),
        (dict(head_dim=7), "even"),
        (dict(window=0), "at least 1"),
        (dict(draft_vocab_size=50000), "must lie in"),
        (dict(confidence_threshold=1.0), "probability below 1"),
        (dict(rotary={"rope_type": "spiral"}), "spiral"),
    ],
)
def test_refuses_impossible_sizes(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LongSpecConfig(**settings)


def test_refuses_draft_ids_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match="distinct ids"):
        LongSpecHead.from_target(make_model(), torch.tensor([1, 1]))
    with pytest.raises(ValueError, match="from 2 to 50"):
        LongSpecHead.from_target(make_model(), torch.tensor([2, 50]))
