"""Reference cases of the diagnostics and selectors (tests/data/diagnostics_cases.json)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mediaspec.attention.logits import LogitForm
from mediaspec.attention.rope_profile import Rotary, offset_logits, rank_one
from mediaspec.attention.select import (
    chunk_scores,
    group_scores,
    page_bounds,
    snapkv_scores,
    top_keys,
    verification_logits,
    verification_weights,
    vertical_slash,
)
from mediaspec.attention.sinks import sink_metric, sink_scores
from mediaspec.attention.slash import slash_dominant, slash_samples, slash_scores
from mediaspec.attention.strip import LazyWindow, StripSums, strip_pass

CASES = json.loads((Path(__file__).parents[1] / "data" / "diagnostics_cases.json").read_text())


def case(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    return CASES[name]["inputs"], CASES[name]["expected"]


def close(got: Tensor, wanted: Any, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(got.double(), torch.tensor(wanted, dtype=torch.float64), atol=tolerance, rtol=0)


def strip_of(scores: Tensor, lazy: LazyWindow | None = None, tile: int = 3) -> StripSums:
    """A strip pass over given logits [H, w, n]: queries are the logits, keys the unit vectors."""
    heads, _, total = scores.shape
    queries = torch.where(scores == float("-inf"), 0.0, scores)[None]
    keys = torch.eye(total).expand(1, heads, -1, -1)
    return strip_pass(queries, keys, torch.tensor([total]), LogitForm(1.0), lazy=lazy, tile=tile)


@pytest.fixture(scope="module")
def heads() -> tuple[dict[str, Any], dict[str, Any], Tensor]:
    given, expected = case("diagnostics")
    return given, expected, torch.tensor([[[float(x) for x in row] for row in head] for head in given["scores"]])


def test_sink_metric(heads: Any) -> None:
    given, expected, scores = heads
    sums = strip_of(scores)
    alpha = sink_scores(sums.columns, sums.lengths, sums.rows)[0]
    close(alpha, expected["alpha"])
    close(sink_metric(alpha, given["epsilon"]), expected["sink_metric_by_position"])


def test_slash_scores_and_what_the_sink_does_to_them(heads: Any) -> None:
    given, expected, scores = heads
    sums = strip_of(scores)
    raw = slash_scores(sums, without_sinks=False)[0]
    close(raw, expected["slash_scores"])
    samples, kappa = slash_samples(sums)[0], given["slash_kappa"]

    def found(some: Tensor, least: int) -> list[list[int]]:
        dominant = slash_dominant(some, samples, kappa, least)
        return [[head, d] for head, pairs in enumerate(dominant) for d, _ in pairs]

    assert found(raw, 1) == expected["slash_dominant"]
    # head 0 only has a sink: its long diagonal has two samples, one of them the sink's column
    assert found(raw, 3) == [[1, 2]]


def test_lazy_ratio_is_a_mean_of_ratios(heads: Any) -> None:
    given, expected, scores = heads
    window = LazyWindow(given["w_last"], given["w_sink"], given["w_recent"])
    sums = strip_of(scores, window)
    close(sums.lazy[0], expected["lazy_ratio_per_head"])
    close(sums.lazy[0], expected["lazy_ratio_from_lse"])
    close(sums.lazy.mean(1)[0], expected["lazy_ratio_layer"])
    only_sink = strip_of(scores[1:2], LazyWindow(given["w_last"], given["w_sink"], 0))
    close(only_sink.lazy[0, 0], expected["mean_of_ratios"])
    assert abs(float(only_sink.lazy) - expected["mean_of_logs_is_wrong"]) > 0.01


def test_rope_spectrum() -> None:
    given, expected = case("rope_spectrum")
    size = given["d"]
    theta = given["base"] ** (-2.0 * torch.arange(size // 2, dtype=torch.float64) / size)
    close(theta, expected["theta"])
    q, k = (torch.tensor(given[name], dtype=torch.float64) for name in ("q_mean", "k_mean"))
    rotary, distances = Rotary(theta, "half"), torch.arange(40)
    logits = offset_logits(q, k, rotary, distances, size**-0.5)
    close(logits, expected["logit_by_offset"], 1e-9)
    assert logits.argsort(descending=True, stable=True)[:3].tolist() == expected["top3_offsets"]
    at = torch.tensor([given["i"]])
    turned = rotary.turn(q[None], at) @ rotary.turn(k.expand(40, -1), at - distances).T * size**-0.5
    torch.testing.assert_close(turned[0], logits, atol=1e-12, rtol=0)
    close(rotary.pairs(q).abs() * rotary.pairs(k).abs(), expected["amplitude"], 1e-9)
    close(rotary.pairs(q).angle() - rotary.pairs(k).angle(), expected["phase"], 1e-9)
    wrong = offset_logits(q, k, Rotary(theta, "interleaved"), distances, size**-0.5)
    assert float((wrong - logits).abs().max()) > 0.1
    x = torch.tensor(given["matrix"], dtype=torch.float64)
    found = rank_one((x.T @ x)[None])
    close(found.share[0], expected["rank1_share"], 1e-9)
    close(found.effective[0], expected["effective_rank"], 1e-9)
    assert found.components.tolist() == [expected["r_0.95"]]


def test_verification_guided_selection() -> None:
    given, expected = case("selectors")
    raw = torch.tensor(given["verify_scores"])
    weights = verification_weights(raw * given["verify_scale"])
    close(weights, expected["verify_weight"])
    close(verification_logits(raw), expected["verify_logit"])
    assert top_keys(weights[None, None], 2).flatten().tolist() == expected["verify_top2_weight"]
    assert top_keys(verification_logits(raw)[None, None], 2).flatten().tolist() == expected["verify_top2_logit"]


def test_snapkv_votes() -> None:
    given, expected = case("selectors")
    pooled = snapkv_scores(torch.tensor(given["snap_scores"]), given["snap_kernel"])
    close(pooled, expected["snap_pooled"])
    assert top_keys(pooled[None, None], given["snap_keep"]).flatten().tolist() == expected["snap_selected"]


def test_page_bounds_are_bounds() -> None:
    given, expected = case("selectors")
    query, keys, page = torch.tensor(given["quest_q"]), torch.tensor(given["quest_k"]), given["quest_page"]
    bounds, best = page_bounds(query, keys, page), (keys @ query).view(-1, page).amax(1)
    close(bounds, expected["quest_bound"])
    close(best, expected["quest_true_page_max"])
    assert bool((bounds >= best - 1e-6).all())
    torch.testing.assert_close(chunk_scores(query, keys, page), (keys @ query).view(-1, page).mean(1))


def test_vertical_and_slash_sums_of_a_strip() -> None:
    given, expected = case("selectors")
    sums = strip_of(torch.tensor(given["vs_scores"])[None])
    close(sums.columns[0, 0], expected["vertical"])
    close(sums.offsets[0, 0], expected["slash_by_offset"])
    columns, offsets = vertical_slash(sums.columns[0, 0], sums.offsets[0, 0], 3, 3, forced_columns=1, forced=1)
    assert columns.tolist() == [0, 1, 5] and offsets.tolist() == [0, 1, 5]


def test_top_keys_of_a_prefill_strip() -> None:
    """Means over the text's rows, summed inside groups; per layer the sum over all heads."""
    given, expected = case("topk_sparse")
    visual, kept = given["visual"], given["K"]
    queries, keys = torch.tensor(given["q_text"])[None], torch.tensor(given["k"])[None]
    values = torch.tensor(given["v"])
    size = keys.shape[3]
    sums = strip_pass(queries, keys, torch.tensor([keys.shape[2]]), LogitForm(size**-0.5), tile=4)
    scores = sums.columns[0, :, :visual] / given["text"]
    grouped = group_scores(scores, given["kv_heads"])
    close(grouped, expected["score_per_kv_head"])
    close(scores.sum(0), expected["score_per_layer"])
    chosen = top_keys(grouped[None], kept)[0]
    assert chosen.tolist() == expected["selected_per_kv_head"]
    assert top_keys(scores.sum(0)[None, None], kept).flatten().tolist() == expected["selected_per_layer"]
    decode, group = torch.tensor(given["q_decode"])[:, 0], given["heads"] // given["kv_heads"]
    for head, query in enumerate(decode):
        k, v = keys[0, head // group], values[head // group]
        logits = k @ query * size**-0.5
        picked = chosen[head // group].tolist() + list(range(visual, len(k)))
        law, sparse = logits.softmax(0), logits[picked].softmax(0)
        close(law @ v, expected["dense_out"][head])
        close(sparse @ v[picked], expected["sparse_out"][head])
        close(law[picked].sum(), expected["kept_mass_per_head"][head])
