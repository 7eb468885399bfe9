"""The EAGLE-3 head: unrolling is drafting, both forms agree, and a new head is its target's last layer."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from mediaspec.core.kv import KVStore
from mediaspec.models.eagle3 import Eagle3Config, Eagle3Head, default_feature_layers, unit


def make_head(**changes):
    torch.manual_seed(1)
    settings = dict(
        hidden_size=32, vocab_size=24, draft_vocab_size=12, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, feature_layers=(0, 1, 3), rope_theta=100.0,
    )  # fmt: skip
    head = Eagle3Head(Eagle3Config(**(settings | changes))).eval()
    for name, weight in head.named_parameters():
        torch.nn.init.normal_(weight, mean=1.0 if "gain" in name or "norm" in name else 0.0, std=0.2)
    head.draft_ids.copy_(torch.arange(12) * 2)
    return head


def inputs(rows=2, count=16):
    torch.manual_seed(2)
    table, features = (
        torch.randn(24, 32),
        torch.randn(rows, count, 96) * torch.tensor([1.0, 5.0, 30.0]).repeat_interleave(32),
    )
    return table, torch.randint(24, (rows, count)), features


def places(rows=2, count=16):
    return torch.arange(count).expand(rows, -1)


def block(head, embeds, states, positions):
    """The head's block written down once more, over given states and without sharing keys between passes."""
    r, n, d = states.shape
    size, groups = head.config.head_dim, head.config.num_attention_heads // head.config.num_key_value_heads
    both = torch.cat([head.embed_norm(embeds), states * head.state_gain], -1)
    half = size // 2
    angle = positions[..., None] * 100.0 ** (-torch.arange(half) / half)
    cos, sin = (torch.cat([f(angle)] * 2, -1)[:, :, None] for f in (torch.cos, torch.sin))

    def turned(x):
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin

    q, k, v = (layer(both).view(r, n, -1, size) for layer in (head.wq, head.wk, head.wv))
    q, k, v = turned(q), turned(k).repeat_interleave(groups, 2), v.repeat_interleave(groups, 2)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    seen = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    x = states + head.mix(both) + head.wo(seen)
    y = head.ffn_norm(x)
    return unit(x + head.w2(torch.nn.functional.silu(head.w1(y)) * head.w3(y)), head.eps)


def sequential(head, embeds, features, prefix, steps):
    """Drafting as `unroll` must reproduce it: fused features up to `prefix`, then the head's own states."""
    states, outputs = head.fuse(features[:, :prefix]), []
    for step in range(steps):
        n = prefix + step
        out = block(head, embeds[:, :n], states, places(len(states), n))[:, -1:]
        outputs.append(out)
        states = torch.cat([states, out], 1)
    return outputs


def test_unroll_is_drafting():
    head = make_head()
    table, tokens, features = inputs()
    passes = head.unroll(table[tokens], features, places(), steps=4)
    assert torch.allclose(passes[0], head(table[tokens], features, places()), atol=1e-5)
    for prefix in (1, 4, 12):
        for step, wanted in enumerate(sequential(head, table[tokens], features, prefix, 4)):
            got = passes[step][:, prefix - 1 + step]
            assert torch.allclose(got, wanted[:, 0], atol=1e-4), (prefix, step)


def test_texts_in_one_row_do_not_see_each_other():
    head = make_head()
    table, tokens, features = inputs(rows=1)
    local = torch.cat([torch.arange(5), torch.arange(11)])[None]
    positions = local + 7
    together = head.unroll(table[tokens], features, positions, 3, local)
    for begin, end in ((0, 5), (5, 16)):
        cut = slice(begin, end)
        apart = head.unroll(table[tokens[:, cut]], features[:, cut], positions[:, cut], 3)
        for step in range(3):
            got, wanted = together[step][:, begin + step : end], apart[step][:, step:]
            assert torch.allclose(got, wanted, atol=1e-5), (begin, step)


def test_unroll_trains_every_weight():
    head = make_head()
    table, tokens, features = inputs()
    passes = head.unroll(table[tokens], features, places(), steps=3)
    sum((head.read(out[:, step:]) @ table.T).logsumexp(-1).mean() for step, out in enumerate(passes)).backward()
    assert all(weight.grad is not None and bool(weight.grad.isfinite().all()) for weight in head.parameters())


@pytest.mark.parametrize("small", [1.0, 0.02])  # an untrained target's embeddings are near the norm's epsilon
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-4), (None, 0.02), (torch.bfloat16, 0.3)])
def test_inference_form_equals_the_module(dtype, atol, small):
    head = make_head()
    table, tokens, features = inputs()
    table = table * small
    output = torch.randn(24, 32)
    with torch.inference_mode():
        states = head(table[tokens], features, places())
        wanted = head.read(states) @ output[head.draft_ids].T
        step = head.prepare(table, output, dtype)
        step.reserve(20)
        store, got = KVStore(1, 2, 2, 8, 20), []
        for first, stop in ((0, 5), (5, 6), (6, 16)):
            fused = step.fuse(features[:, first:stop])
            got.append(step(tokens[:, first:stop], fused, store, store.plan(stop - first)))
            store.advance(torch.full((2,), stop - first), [stop - first] * 2)
        logits = step.logits(torch.cat(got, 1))
    assert (torch.cat(got, 1) * 32**0.5 - states).abs().max() < atol
    assert (logits - wanted).abs().max() < 10 * atol


def test_half_precision_on_the_cpu_reads_half_the_bytes():
    head = make_head()
    table, _, _ = inputs()
    step = head.prepare(table, table)
    kinds = {step.enter.kind, step.wo.kind, step.w13.kind, step.w2.kind, step.fc.kind, step.rows.kind}
    assert kinds == {"half"} or "plain" in kinds and "FBGEMM" in step.enter.reason


def tiny_llama(**changes):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, **changes,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def test_a_head_starts_as_the_targets_last_layer():
    model = tiny_llama()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
    head = Eagle3Head.from_target(model, torch.tensor([9, 3, 5]), feature_scale=1.0)
    assert head.draft_ids.tolist() == [3, 5, 9] and head.config.feature_layers == (0, 1, 3)
    hidden = torch.randn(1, 6, 32)
    states = unit(hidden, 1e-6)
    features = torch.cat([torch.randn(1, 6, 64), hidden], -1)
    layer = model.model.layers[-1]
    mask = torch.full((6, 6), float("-inf")).triu(1)[None, None]
    rotation = model.model.rotary_emb(states, torch.arange(6)[None])
    with torch.no_grad():
        wanted = layer(states, attention_mask=mask, position_embeddings=rotation)
        wanted = model.model.norm(wanted if isinstance(wanted, torch.Tensor) else wanted[0])
        got = head.read(head(torch.randn(1, 6, 32), features, torch.arange(6)[None]))
    assert torch.allclose(got, wanted, atol=1e-3)


def test_scaled_rotations_are_kept():
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0}
    model = tiny_llama(rope_parameters=rope)
    head = Eagle3Head.from_target(model, torch.arange(8))
    assert head.config.frequencies == pytest.approx([0.25 * 100.0 ** (-i / 4) for i in range(4)])


def test_from_target_refuses_what_it_cannot_copy():
    model = tiny_llama()
    for ids, message in (([1, 1], "repeat"), ([40], r"\[0, 40\)"), ([], "1 to 40")):
        with pytest.raises(ValueError, match=message):
            Eagle3Head.from_target(model, torch.tensor(ids, dtype=torch.int64))
    biased = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=40,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
        )  # fmt: skip
    )
    with pytest.raises(ValueError, match="bias-free q_proj"):
        Eagle3Head.from_target(biased, torch.arange(8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads=3"),
        ({"draft_vocab_size": 25}, "1 to vocab_size=24"),
        ({"feature_layers": (3, 1)}, "ascending"),
        ({"feature_layers": ()}, "ascending"),
        ({"head_dim": 7}, "even"),
        ({"frequencies": [1.0]}, "give 4"),
        ({"confidence_threshold": 1.0}, "below 1"),
    ],
)
def test_config_refuses_what_does_not_fit(change, message):
    with pytest.raises(ValueError, match=message):
        make_head(**change)


def test_unroll_and_prepare_refuse_bad_sizes():
    head = make_head()
    table, tokens, features = inputs()
    with pytest.raises(ValueError, match="steps=0"):
        head.unroll(table[tokens], features, places(), steps=0)
    with pytest.raises(ValueError, match=r"embeddings have shape \[23, 32\]"):
        head.prepare(table[:23], table)
    with pytest.raises(ValueError, match="output matrix"):
        head.prepare(table, table[:, :16])


def test_feature_layers_of_any_depth():
    assert default_feature_layers(30) == (9, 19, 29)
    assert default_feature_layers(3) == (0, 1, 2)
    assert default_feature_layers(1) == (0,)


def test_another_draft_vocabulary_needs_no_training(tmp_path):
    head = make_head()
    table, tokens, features = inputs()
    before = head(table[tokens], features, places())
    assert torch.equal(head.restrict(torch.tensor([7, 2, 5]))(table[tokens], features, places()), before)
    head.save_pretrained(tmp_path)
    loaded = Eagle3Head.from_pretrained(tmp_path)
    assert loaded.draft_ids.tolist() == [2, 5, 7] and loaded.config.draft_vocab_size == 3
    step = loaded.prepare(table, table)
    assert step.logits(torch.randn(1, 1, 32)).shape == (1, 1, 3)


def test_head_is_saved_and_loaded(tmp_path):
    head = make_head(confidence_threshold=0.25)
    table, tokens, features = inputs()
    head.save_pretrained(tmp_path)
    loaded = Eagle3Head.from_pretrained(tmp_path).eval()
    assert tuple(loaded.config.feature_layers) == (0, 1, 3) and loaded.config.confidence_threshold == 0.25
    assert torch.equal(loaded.draft_ids, head.draft_ids) and loaded.draft_ids.dtype == torch.int64
    assert torch.equal(loaded(table[tokens], features, places()), head(table[tokens], features, places()))
    head.half().save_pretrained(tmp_path / "half")
    half = Eagle3Head.from_pretrained(tmp_path / "half", dtype=torch.float32)
    assert half.draft_ids.dtype == torch.int64 and torch.equal(half.draft_ids, head.draft_ids)
    assert torch.equal(half.fc.weight, head.fc.weight.float())
