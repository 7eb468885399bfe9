"""LlamaGen GPT: equality with the published formulas written out naively, caches, masks, guidance and storage."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModel, DynamicCache

from mediaspec.models.llamagen import GPT_PRESETS, LlamaGenConfig, LlamaGenGPT, hf_generate_images
from mediaspec.models.llamagen.gpt import attention_mask
from mediaspec.models.llamagen.rope import apply_rotary, rope_2d

SIZES = {"dim": 48, "n_layer": 3, "n_head": 4, "vocab_size": 40, "block_size": 16, "multiple_of": 16}
CONFIGS = {
    "class": LlamaGenConfig(**SIZES, num_classes=7),
    "class-gqa": LlamaGenConfig(**SIZES, num_classes=7, n_kv_head=2),
    "text": LlamaGenConfig(**SIZES, condition="text", cls_token_num=6, caption_dim=20, ffn_dim_multiplier=1.3),
}


def make_model(kind: str, seed: int = 0) -> LlamaGenGPT:
    torch.manual_seed(seed)
    model = LlamaGenGPT(CONFIGS[kind]).eval()
    for p in model.parameters():  # large weights, so that a wrong rotation or mask is far above rounding
        if p.dim() > 1:
            torch.nn.init.normal_(p, std=0.18)
        else:
            torch.nn.init.uniform_(p, 0.5, 1.5)
    return model


def make_inputs(kind: str, rows: int = 3) -> tuple[Tensor, Tensor, Tensor | None]:
    """Image tokens [B, S], condition, mask: one row without padding, one with some, one with a single text token."""
    g = torch.Generator().manual_seed(1)
    config = CONFIGS[kind]
    tokens = torch.randint(config.vocab_size, (rows, config.block_size), generator=g)
    if config.condition == "class":
        return tokens, torch.randint(config.num_classes, (rows,), generator=g), None
    cond = torch.randn(rows, config.cls_token_num, config.caption_dim, generator=g)
    padding = torch.tensor([0, 2, config.cls_token_num - 1]).repeat(rows)[:rows]
    return tokens, cond, torch.arange(config.cls_token_num)[None] >= padding[:, None]


def naive_logits(model: LlamaGenGPT, tokens: Tensor, cond: Tensor, mask: Tensor | None, drop: Tensor) -> Tensor:
    """The published formulas, one row, one head and one position at a time, in fp64, from the raw state dict."""
    c = model.config
    w = {k: v.double() for k, v in model.state_dict().items()}
    group = c.n_head // c.kv_heads
    prefix = c.cls_token_num

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + c.norm_eps).sqrt() * weight

    def turn(x: Tensor, position: int) -> Tensor:
        if position < prefix:
            return torch.zeros_like(x)
        row, column = divmod(position - prefix, c.grid)
        quarter = c.head_dim // 4
        freq = torch.tensor([c.rope_base ** (-i / quarter) for i in range(quarter)], dtype=torch.float64)
        angle = torch.cat([row * freq, column * freq])
        pairs = torch.view_as_complex(x.reshape(-1, 2).contiguous())
        return torch.view_as_real(pairs * torch.exp(1j * angle)).flatten()

    results = []
    for b in range(len(tokens)):
        if c.condition == "class":
            label = c.num_classes if drop[b] else int(cond[b])
            h = w["cls_embedding.embedding_table.weight"][label][None]
        else:
            feats = cond[b].double() * (1.0 if mask is None else mask[b].double()[:, None])
            feats = w["cls_embedding.uncond_embedding"] if drop[b] else feats
            hidden = feats @ w["cls_embedding.cap_proj.fc1.weight"].T
            hidden = 0.5 * hidden * (1 + torch.tanh(math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)))
            h = hidden @ w["cls_embedding.cap_proj.fc2.weight"].T
        h = torch.cat([h, w["tok_embeddings.weight"][tokens[b]]])
        n = len(h)
        for i in range(c.n_layer):
            x = norm(h, w[f"layers.{i}.attention_norm.weight"])
            qkv = (x @ w[f"layers.{i}.attention.wqkv.weight"].T).view(n, -1, c.head_dim)
            out = torch.zeros(n, c.n_head, c.head_dim, dtype=torch.float64)
            for head in range(c.n_head):
                q = torch.stack([turn(qkv[p, head], p) for p in range(n)])
                k = torch.stack([turn(qkv[p, c.n_head + head // group], p) for p in range(n)])
                v = qkv[:, c.n_head + c.kv_heads + head // group]
                for p in range(n):
                    seen = [s for s in range(p + 1) if s == p or s >= prefix or mask is None or bool(mask[b, s])]
                    weights = torch.exp(q[p] @ k[seen].T / math.sqrt(c.head_dim))
                    out[p, head] = (weights / weights.sum()) @ v[seen]
            h = h + out.flatten(1) @ w[f"layers.{i}.attention.wo.weight"].T
            x = norm(h, w[f"layers.{i}.ffn_norm.weight"])
            gate = x @ w[f"layers.{i}.feed_forward.w1.weight"].T
            up = x @ w[f"layers.{i}.feed_forward.w3.weight"].T
            h = h + (gate * torch.sigmoid(gate) * up) @ w[f"layers.{i}.feed_forward.w2.weight"].T
        results.append(norm(h, w["norm.weight"])[prefix - 1 :] @ w["output.weight"].T)
    return torch.stack(results)


def test_rotary_turns_complex_pairs_and_blanks_the_prefix() -> None:
    cos, sin = rope_2d(grid=3, head_dim=8, base=10000.0, prefix=2)
    assert cos.shape == sin.shape == (2 + 9, 4) and cos.dtype == torch.float32
    assert not cos[:2].any() and not sin[:2].any()
    x = torch.randn(2, 11, 5, 8, generator=torch.Generator().manual_seed(0))
    pairs = torch.view_as_complex(x.unflatten(-1, (4, 2)))
    expected = torch.view_as_real(pairs * torch.complex(cos, sin)[:, None]).flatten(-2)
    torch.testing.assert_close(apply_rotary(x, cos, sin), expected, rtol=0, atol=1e-6)
    # position (row 2, column 1): the first half of the pairs knows the row, the second the column
    freq = torch.tensor([1.0, 10000.0**-0.5])
    torch.testing.assert_close(cos[2 + 7], torch.cat([2 * freq, freq]).cos())
    assert not apply_rotary(x, cos, sin)[:, :2].any()


def test_rotary_takes_positions_that_differ_between_rows() -> None:
    cos, sin = rope_2d(grid=4, head_dim=8, base=10000.0, prefix=1)
    positions = torch.tensor([[3, 4, 5], [9, 10, 11]])
    x = torch.randn(2, 3, 2, 8, generator=torch.Generator().manual_seed(0))
    ragged = apply_rotary(x, cos[positions], sin[positions])
    for b in range(2):
        alone = apply_rotary(x[b : b + 1], cos[positions[b]], sin[positions[b]])
        assert torch.equal(ragged[b], alone[0])


@pytest.mark.parametrize("kind", CONFIGS)
@torch.no_grad()
def test_forward_equals_the_published_formulas(kind: str) -> None:
    model = make_model(kind)
    tokens, cond, mask = make_inputs(kind)
    drop = torch.tensor([False, True, False])
    logits = model(tokens, cond, mask, drop_ids=drop).logits
    expected = naive_logits(model, tokens[:, :-1], cond, mask, drop)
    assert expected.std() > 0.5
    torch.testing.assert_close(logits.double(), expected, rtol=0, atol=5e-5)


@pytest.mark.parametrize("kind", CONFIGS)
@torch.no_grad()
def test_rows_of_logits_follow_the_tokens_given(kind: str) -> None:
    model = make_model(kind)
    tokens, cond, mask = make_inputs(kind)
    full = model(tokens, cond, mask).logits
    assert full.shape == (3, 16, 40) and full.dtype == torch.float32
    assert torch.equal(model(tokens[:, :-1], cond, mask).logits, full)
    torch.testing.assert_close(model(tokens[:, :5], cond, mask).logits, full[:, :6], rtol=0, atol=1e-5)
    torch.testing.assert_close(model(tokens[:, :0], cond, mask).logits, full[:, :1], rtol=0, atol=1e-5)
    torch.testing.assert_close(model(tokens, cond, mask, logits_to_keep=2).logits, full[:, -2:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", CONFIGS)
@torch.no_grad()
def test_cached_decode_equals_the_full_pass(kind: str) -> None:
    model = make_model(kind)
    tokens, cond, mask = make_inputs(kind)
    full = model(tokens, cond, mask).logits
    cache = DynamicCache(config=model.config)
    pieces = [model(tokens[:, :2], cond, mask, cache=cache).logits]
    for start, stop in ((2, 3), (3, 4), (4, 9), (9, 10), (10, 15)):  # single tokens and blocks to verify
        pieces.append(model(tokens[:, start:stop], cond_mask=mask, cache=cache).logits)
    torch.testing.assert_close(torch.cat(pieces, dim=1), full, rtol=0, atol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("kind", CONFIGS)
def test_generate_equals_the_full_pass(kind: str, scale: float) -> None:
    model = make_model(kind)
    _, cond, mask = make_inputs(kind)
    tokens = hf_generate_images(model, cond, mask, guidance_scale=scale, do_sample=False)
    assert tokens.shape == (3, 16)
    with torch.no_grad():
        c = model(tokens, cond, mask).logits
        u = model(tokens, cond, mask, drop_ids=torch.ones(3, dtype=torch.bool)).logits
    assert torch.equal((u + scale * (c - u)).argmax(-1), tokens)


@torch.no_grad()
def test_scores_inside_generate_are_those_of_the_full_pass() -> None:
    model = make_model("text")
    tokens, cond, mask = make_inputs("text")
    out = model.generate(
        inputs=tokens[:, :3], cond=cond, cond_mask=mask, max_new_tokens=13, do_sample=False,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    assert torch.equal(out.sequences[:, :3], tokens[:, :3])
    full = model(out.sequences, cond, mask).logits
    torch.testing.assert_close(torch.stack(out.logits, dim=1), full[:, 3:], rtol=0, atol=1e-5)


@torch.no_grad()
def test_generate_samples_from_the_guided_and_filtered_law() -> None:
    # 4,000 first tokens; total variation of a multinomial over <= 5 cells stays below 0.05 but with probability < 1e-4
    model = make_model("class")
    cond = torch.full((4000,), 3)
    torch.manual_seed(0)
    kwargs = {"guidance_scale": 2.0, "temperature": 1.7, "top_k": 5, "num_tokens": 1}
    drawn = hf_generate_images(model, cond, **kwargs).flatten()
    none = torch.zeros(1, 0, dtype=torch.long)
    c = model(none, cond[:1]).logits[0, 0]
    u = model(none, cond[:1], drop_ids=torch.tensor([True])).logits[0, 0]
    guided = (u + 2.0 * (c - u)) / 1.7
    guided[guided < guided.topk(5).values[-1]] = -torch.inf
    observed = torch.bincount(drawn, minlength=40) / len(drawn)
    assert (observed - guided.softmax(-1)).abs().sum() / 2 < 0.05


def test_generate_without_a_condition_says_what_to_pass() -> None:
    with pytest.raises(ValueError, match="pass cond="):
        make_model("class").generate(inputs=torch.zeros(1, 2, dtype=torch.long), max_new_tokens=1)


def test_mask_hides_padding_but_never_the_position_itself() -> None:
    mask = attention_mask(torch.tensor([[False, False, True], [True, True, True]]), past=0, length=5)
    assert mask is not None and mask.shape == (2, 1, 5, 5)
    seen = [[sorted(torch.nonzero(row).flatten().tolist()) for row in m[0]] for m in mask]
    assert seen[0] == [[0], [1], [2], [2, 3], [2, 3, 4]]
    assert seen[1] == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4]]
    step = attention_mask(torch.tensor([[False, False, True]]), past=4, length=2)
    assert step is not None
    assert step[0, 0].tolist() == [[False, False, True, True, True, False], [False, False, True, True, True, True]]
    assert attention_mask(None, past=0, length=5) is None
    assert attention_mask(None, past=4, length=1) is None


@torch.no_grad()
def test_padded_text_positions_do_not_reach_the_image() -> None:
    model = make_model("text")
    tokens, cond, mask = make_inputs("text")
    assert mask is not None
    other = torch.where(mask[:, :, None], cond, torch.full_like(cond, 100.0))
    assert torch.equal(model(tokens, cond, mask).logits, model(tokens, other, mask).logits)
    changed = cond + 0.5 * mask[:, :, None]
    assert (model(tokens, changed, mask).logits - model(tokens, cond, mask).logits).abs().amax() > 0.1
    everything = torch.ones_like(mask)
    torch.testing.assert_close(model(tokens, cond, everything).logits, model(tokens, cond).logits, rtol=0, atol=1e-5)


@torch.no_grad()
def test_dropped_rows_forget_their_condition() -> None:
    for kind in CONFIGS:
        model = make_model(kind)
        tokens, cond, mask = make_inputs(kind)
        tokens[1] = tokens[0]
        if mask is not None:
            mask[1] = mask[0]
        both = model(tokens, cond, mask, drop_ids=torch.tensor([True, True, False])).logits
        torch.testing.assert_close(both[0], both[1], rtol=0, atol=1e-5)
        kept = model(tokens, cond, mask).logits
        torch.testing.assert_close(both[2], kept[2], rtol=0, atol=1e-5)
        assert (both[0] - kept[0]).abs().max() > 0.1


def test_labels_give_the_mean_cross_entropy_and_train_every_weight() -> None:
    model = make_model("text")
    tokens, cond, mask = make_inputs("text")
    drop = torch.tensor([False, False, True])
    labels = tokens.clone()
    labels[:, 3] = -100
    out = model(tokens, cond, mask, labels=labels, drop_ids=drop)
    logp = out.logits.log_softmax(-1).gather(-1, tokens[:, :, None])[..., 0]
    keep = labels != -100
    torch.testing.assert_close(out.loss, -logp[keep].mean())
    out.loss.backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


@torch.no_grad()
def test_pieces_for_a_decode_loop_give_the_forward_pass() -> None:
    model = make_model("text")
    tokens, cond, mask = make_inputs("text")
    prefix = model.embed_condition(cond, mask)
    assert prefix.shape == (3, 6, 48)
    h = torch.cat([prefix, model.tok_embeddings(tokens[:, :-1])], dim=1)
    cos, sin = model.rope_table()
    assert cos.shape == (6 + 16, 6)
    visited: list[int] = []
    allowed = attention_mask(mask, 0, h.shape[1])

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        visited.append(layer)
        scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~allowed, -torch.inf)
        return scores.softmax(-1) @ v

    positions = torch.arange(h.shape[1]).expand(3, -1)
    logits = model.head(model.run_layers(h, cos[positions], sin[positions], attend)[:, 5:])
    assert visited == [0, 1, 2]
    torch.testing.assert_close(logits, model(tokens, cond, mask).logits, rtol=0, atol=1e-5)


def test_tables_stay_fp32_and_serve_training_after_inference() -> None:
    model = make_model("class").to(torch.bfloat16)
    tokens, cond, _ = make_inputs("class")
    with torch.inference_mode():
        assert model(tokens, cond).logits.dtype == torch.float32
    assert all(t.dtype == torch.float32 for t in model.rope_table())
    model.train()
    model(tokens, cond, labels=tokens).loss.backward()
    assert model.output.weight.grad is not None


@pytest.mark.parametrize("kind", CONFIGS)
@torch.no_grad()
def test_save_and_load_give_the_same_logits(kind: str, tmp_path: Path) -> None:
    model = make_model(kind)
    tokens, cond, mask = make_inputs(kind)
    model.save_pretrained(tmp_path)
    for loaded in (LlamaGenGPT.from_pretrained(tmp_path), AutoModel.from_pretrained(tmp_path)):
        assert type(loaded) is LlamaGenGPT and not loaded.training
        assert loaded.config.to_diff_dict() == model.config.to_diff_dict()
        assert torch.equal(loaded(tokens, cond, mask).logits, model(tokens, cond, mask).logits)
    half = LlamaGenGPT.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half.output.weight.dtype == torch.bfloat16 and half.rope_table()[0].dtype == torch.float32


def test_fresh_weights_start_from_the_uniform_law() -> None:
    model = LlamaGenGPT(CONFIGS["text"]).eval()
    tokens, cond, mask = make_inputs("text")
    assert not model(tokens, cond, mask).logits.any()
    assert 0.015 < model.layers[0].attention.wqkv.weight.std() < 0.025
    assert 0.15 < model.cls_embedding.uncond_embedding.std() < 0.3  # 1 / sqrt(caption_dim) = 0.22


def test_presets_have_the_published_parameter_counts() -> None:
    published = {"GPT-B": 111e6, "GPT-L": 343e6, "GPT-XL": 775e6, "GPT-XXL": 1.4e9, "GPT-3B": 3.1e9}
    with torch.device("meta"):
        for name, count in published.items():
            model = LlamaGenGPT(LlamaGenConfig.preset(name))
            assert abs(sum(p.numel() for p in model.parameters()) / count - 1) < 0.03, name
    assert set(published) < set(GPT_PRESETS)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_size": 15}, "write e.g. 16"),
        ({"condition": "t2i"}, "'class'"),
        ({"cls_token_num": 3}, "cls_token_num=1"),
        ({"dim": 50}, "multiple of 4"),
        ({"n_kv_head": 3}, "must divide"),
    ],
)
def test_impossible_sizes_are_named(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LlamaGenConfig(**{**SIZES, **fields})


def test_wrong_inputs_are_named() -> None:
    model = make_model("text")
    tokens, cond, mask = make_inputs("text")
    with pytest.raises(ValueError, match="pad on the left"):
        model(tokens, cond[:, :4], mask)
    with pytest.raises(ValueError, match="cond is missing"):
        model(tokens)
    cache = DynamicCache(config=model.config)
    model(tokens, cond, mask, cache=cache)
    with pytest.raises(ValueError, match="exceed the 22"):
        model(tokens[:, :2], cond_mask=mask, cache=cache)
    with pytest.raises(ValueError, match="no preset"):
        LlamaGenConfig.preset("GPT-M")
