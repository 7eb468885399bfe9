"""A report of a tiny model says what the model's own eager attention says."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from mediaspec.attention.collector import Collector
from mediaspec.attention.diagnostics import AttentionReport, Settings
from mediaspec.attention.pattern import SparsePattern
from mediaspec.attention.strip import LazyWindow
from mediaspec.core.prompt import TokenPrompt
from mediaspec.eval.inspection import inspect_model, prompt_hash, rotary_of
from mediaspec.targets.causal_lm import CausalLMTarget
from tests.attention.models import HEADS, KEY_HEADS, LAYERS, VOCAB, attentions, make_model, tokens

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": dict(head_dim=16),
    "Gemma2": dict(head_dim=16, sliding_window=12, attn_logit_softcapping=2.0),
    "Glm": dict(head_dim=8, partial_rotary_factor=0.5),
}
ROWS, TOTAL = 16, 90
SETTINGS = Settings(rows=ROWS, epsilon=0.1, kappa=0.15, lazy=LazyWindow(8, 2, 20), lazy_at=0.4)


@pytest.mark.parametrize("family", FAMILIES)
def test_figures_agree_with_eager_attention(family: str) -> None:
    model, ids = make_model(family, **FAMILIES[family]), tokens(TOTAL)
    law = attentions(model, ids).double()
    report = inspect_model(model, ids, settings=SETTINGS)
    assert len(report.heads) == LAYERS * HEADS and report.tokens == TOTAL and report.rows == ROWS
    strip = law[:, :, -ROWS:]
    key = torch.arange(TOTAL)
    at = torch.arange(TOTAL - ROWS, TOTAL)
    kept = (key < 2) | (key >= TOTAL - 20)
    for one in report.heads:
        rows = strip[one.layer, one.head]
        if one.sink_score is None:
            assert family == "Gemma2"
        else:
            assert one.sink_score == pytest.approx(float(rows[:, 0].mean()), abs=1e-5)
        assert one.lazy_ratio == pytest.approx(float(rows[-8:, kept].sum(1).mean()), abs=1e-5)
        assert one.recent_mass[256] == pytest.approx(1.0, abs=1e-5)
        entropy = float(-torch.special.xlogy(rows, rows).sum(1).mean())
        assert one.effective_keys == pytest.approx(float(torch.tensor(entropy).exp()), rel=1e-4)
        mask = one.pattern.mask(at, key)
        assert one.pattern_mass == pytest.approx(float((rows * mask).sum() / ROWS), abs=1e-5)
        without = rows.clone()
        without[:, :4] = 0
        scores = [float(without.diagonal(TOTAL - ROWS - d).mean()) for d in range(TOTAL - ROWS + 1)]
        wanted = sorted(((d, s) for d, s in enumerate(scores) if s >= SETTINGS.kappa), key=lambda pair: -pair[1])[:8]
        assert [d for d, _ in one.slash] == [d for d, _ in wanted]
        assert [s for _, s in one.slash] == pytest.approx([s for _, s in wanted], abs=1e-5)
    ratios = [float(strip[layer, :, -8:, kept].sum(2).mean()) for layer in range(LAYERS)]
    assert report.lazy_per_layer() == pytest.approx(ratios, abs=1e-5)


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Glm"])
def test_moments_are_those_before_the_rotation(family: str) -> None:
    """Against the model's own projections (Qwen3: behind its norms of queries and keys)."""
    model, ids = make_model(family, **FAMILIES[family]), tokens(TOTAL)
    seen: dict[str, torch.Tensor] = {}
    attention = model.base_model.layers[1].self_attn
    for name in ("q", "k"):
        part = getattr(attention, f"{name}_norm", None) or getattr(attention, f"{name}_proj")
        part.register_forward_hook(lambda _, given, output, name=name: seen.update({name: output}))
    report = inspect_model(model, ids, settings=SETTINGS)
    size = attention.head_dim
    for name, field, count in (("q", "q_rank1", HEADS), ("k", "k_rank1", KEY_HEADS)):
        vectors = seen[name].reshape(TOTAL, count, size).double()
        values = torch.linalg.svdvals(vectors.transpose(0, 1)) ** 2
        wanted = (values[:, 0] / values.sum(1)).repeat_interleave(HEADS // count)
        got = [getattr(one, field) for one in report.layers()[1]]
        assert got == pytest.approx(wanted.tolist(), abs=1e-5)


@pytest.mark.parametrize(("family", "layout"), [("Llama", "half"), ("Glm", "interleaved")])
def test_the_rotation_is_read_off_the_model(family: str, layout: str) -> None:
    rotary = rotary_of(make_model(family, **FAMILIES[family]), 0)
    assert rotary is not None and rotary.layout == layout


def test_constant_tokens_have_the_closed_form() -> None:
    """One token repeated: queries and keys before rotation are constant, so the closed form is exact."""
    model = make_model()
    report = inspect_model(model, torch.full((TOTAL,), 7), settings=SETTINGS)
    for one in report.heads:
        assert one.q_rank1 == pytest.approx(1, abs=1e-5) and one.k_rank1 == pytest.approx(1, abs=1e-5)
        # the strip's 16 queries see 75 to 90 keys, the closed form all 90
        assert one.closed_form_tv is not None and one.closed_form_tv < 0.2
    mixed = inspect_model(model, tokens(TOTAL), settings=SETTINGS)
    assert max(one.closed_form_tv or 0 for one in mixed.heads) > 0.3


def test_watching_changes_nothing() -> None:
    model, ids = make_model(), tokens(TOTAL)
    target = CausalLMTarget(model, num_tokens=1)
    outputs = []
    for watch in (None, Collector([TOTAL], ROWS, [rotary_of(model, layer) for layer in range(LAYERS)])):
        cache = target.new_cache(1, 0)
        cache.watch = watch
        outputs.append(target.prefill(TokenPrompt.from_padded(ids[None]), cache).logits)
    assert torch.equal(*outputs)


def test_a_prompt_in_parts_and_ragged_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tail spans passes, and every row has its own."""
    monkeypatch.setattr("mediaspec.targets.causal_lm.CHUNK", 7)
    model, lengths = make_model(), [40, 9, 23]
    ids = [tokens(length, seed=length) for length in lengths]
    padded = torch.zeros(3, 40, dtype=torch.int64)
    mask = torch.zeros(3, 40)
    for row, one in enumerate(ids):
        padded[row, : len(one)], mask[row, : len(one)] = one, 1
    rotary = [rotary_of(model, layer) for layer in range(LAYERS)]

    def collect(ids: torch.Tensor, mask: torch.Tensor, lengths: list[int]) -> Collector:
        target, collector = CausalLMTarget(model, num_tokens=1), Collector(lengths, ROWS, rotary)
        cache = target.new_cache(len(ids), 0)
        cache.watch = collector
        target.prefill(TokenPrompt.from_padded(ids, mask), cache)
        return collector

    together = collect(padded, mask, lengths)
    for row, one in enumerate(ids):
        alone = collect(one[None], torch.ones(1, len(one)), [len(one)])
        for layer in range(LAYERS):
            mine, whole = alone.layers[layer], together.layers[layer]
            torch.testing.assert_close(whole.queries[row], mine.queries[0], atol=1e-5, rtol=1e-4)
            assert mine.query_moments is not None and whole.query_moments is not None
            torch.testing.assert_close(whole.query_moments.gram[row], mine.query_moments.gram[0], atol=1e-3, rtol=1e-4)


def test_a_report_travels_as_json() -> None:
    model, ids = make_model(), tokens(TOTAL)
    report = inspect_model(model, ids, name="tiny", settings=SETTINGS)
    data = json.loads(json.dumps(report.to_dict()))
    back = AttentionReport.from_dict(data)
    assert back.pattern() == report.pattern() == SparsePattern.from_dict(data)
    assert back.prompt_sha256 == prompt_hash(ids) and back.model == "tiny" and back.dtype == "float32"
    for one, two in zip(back.heads, report.heads, strict=True):
        assert one.kind == two.kind and one.lazy_ratio == pytest.approx(two.lazy_ratio, abs=1e-5)
        assert [d for d, _ in one.slash] == [d for d, _ in two.slash] and one.sink_set == two.sink_set
    assert len(data["summary"]["lazy_per_layer"]) == LAYERS
    assert data["summary"]["sinks"] == [[one.layer, one.head, round(one.sink_score or 0, 5)] for one in report.sinks()]
    again = inspect_model(model, ids, name="tiny", settings=SETTINGS)
    assert again == report


def test_bad_prompts_are_refused() -> None:
    model = make_model()
    with pytest.raises(ValueError, match="one prompt"):
        inspect_model(model, torch.zeros(2, 5, dtype=torch.int64))
    with pytest.raises(ValueError, match="at least one row"):
        Collector([5], rows=0)
    assert int(tokens(5).max()) < VOCAB
