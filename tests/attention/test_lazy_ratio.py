"""The lazy ratio against a full softmax and the reference cases; the queue's order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mediaspec.attention.lazy_ratio import LayerQueue, kept_keys, lazy_ratio
from mediaspec.attention.logits import LogitForm
from mediaspec.attention.strip import strip_lse

CASE = json.loads((Path(__file__).parents[1] / "data" / "diagnostics_cases.json").read_text())["diagnostics"]
INPUTS, EXPECTED = CASE["inputs"], CASE["expected"]


def ratio(queries: Tensor, keys: Tensor, lengths: Tensor, sink: int, recent: int, form: LogitForm) -> Tensor:
    lse = strip_lse(queries, keys, lengths, form, 256)
    kept, at = kept_keys(keys, lengths, sink, recent)
    return lazy_ratio(queries, kept, at, lse, lengths, form)


def by_softmax(queries: Tensor, keys: Tensor, lengths: Tensor, sink: int, recent: int, form: LogitForm) -> Tensor:
    """[B, Hkv] from whole rows of probabilities, row by row in float64."""
    group = queries.shape[1] // keys.shape[1]
    found = []
    for row, length in enumerate(lengths.tolist()):
        count = min(queries.shape[2], length)
        q = queries[row, :, queries.shape[2] - count :].double()
        k = keys[row, :, :length].double().repeat_interleave(group, 0)
        logits = q @ k.transpose(1, 2) * form.scaling
        if form.softcap is not None:
            logits = form.softcap * torch.tanh(logits / form.softcap)
        key, query = torch.arange(length), torch.arange(length - count, length)[:, None]
        logits = logits.masked_fill(key > query, float("-inf"))
        if form.sinks is not None:
            logits = torch.cat([logits, form.sinks.double()[:, None, None].expand(-1, count, 1)], 2)
        kept = (key < sink) | (key >= length - recent)
        if form.sinks is not None:
            kept = torch.cat([kept, torch.ones(1, dtype=torch.bool)])
        mass = logits.softmax(-1)[:, :, kept].sum(-1).mean(1)
        found.append(mass.view(-1, group).mean(1))
    return torch.stack(found).float()


def test_reference_cases() -> None:
    """Three heads whose logits are given: queries are the rows of logits, keys the unit vectors."""
    scores = torch.tensor([[[float(x) for x in row] for row in head] for head in INPUTS["scores"]])
    total, last = scores.shape[1], INPUTS["w_last"]
    queries = scores.nan_to_num(neginf=0.0)[None, :, -last:]
    keys = torch.eye(total).expand(1, 3, -1, -1)
    got = ratio(queries, keys, torch.tensor([total]), INPUTS["w_sink"], INPUTS["w_recent"], LogitForm(1.0))[0]
    assert got.tolist() == pytest.approx(EXPECTED["lazy_ratio_per_head"], abs=1e-6)
    assert got.tolist() == pytest.approx(EXPECTED["lazy_ratio_from_lse"], abs=1e-6)
    assert float(got.mean()) == pytest.approx(EXPECTED["lazy_ratio_layer"], abs=1e-6)


def test_ratios_are_averaged_and_not_their_logarithms() -> None:
    scores = torch.tensor([[float(x) for x in row] for row in INPUTS["scores"][1]])
    queries = scores.nan_to_num(neginf=0.0)[None, None, -INPUTS["w_last"] :]
    keys, lengths = torch.eye(len(scores))[None, None], torch.tensor([len(scores)])
    kept, at = kept_keys(keys, lengths, 1, 1)
    at = at.clone()
    at[:, 1:] = 2**62  # the first key alone
    lse = strip_lse(queries, keys, lengths, LogitForm(1.0))
    got = float(lazy_ratio(queries, kept, at, lse, lengths, LogitForm(1.0)))
    assert got == pytest.approx(EXPECTED["mean_of_ratios"], abs=1e-7)
    assert got > 1.4 * EXPECTED["mean_of_logs_is_wrong"]


def test_queue_order() -> None:
    queue, order = LayerQueue(INPUTS["full_layers"]), []
    for layer, value in enumerate(INPUTS["layer_ratios"]):
        given = queue.push(layer, value)
        if given is not None:
            order.append([layer, given])
    assert order == EXPECTED["eviction_order_at_layer"]
    assert sorted(given for _, given in order) == EXPECTED["lazy_layers"]
    dropped = sum(1 - INPUTS["layer_ratios"][layer] for layer in EXPECTED["lazy_layers"])
    assert dropped == pytest.approx(EXPECTED["dropped_mass_bound_sum"])


def test_ties_give_up_the_lower_layer_and_guarded_layers_stay() -> None:
    queue = LayerQueue(2)
    assert [queue.push(layer, 0.5) for layer in range(4)] == [None, None, 0, 1]
    queue = LayerQueue(1)
    assert [queue.push(0, 0.9, keep=True), queue.push(1, 0.8, keep=True), queue.push(2, 0.1)] == [None, None, 2]


@pytest.mark.parametrize("group", [1, 4, 8])
def test_equals_the_full_softmax(group: int) -> None:
    """Ragged rows around the edges of the strip (32), of the kept keys (1024) and far beyond."""
    lengths = torch.tensor([3, 31, 32, 1023, 1024, 1025, 5000])
    generator = torch.Generator().manual_seed(group)
    queries = 2 * torch.randn(len(lengths), 8, 32, 8, generator=generator)
    keys = torch.randn(len(lengths), 8 // group, 5000, 8, generator=generator)
    form = LogitForm(0.7)
    got = ratio(queries, keys, lengths, 4, 1020, form)
    torch.testing.assert_close(got, by_softmax(queries, keys, lengths, 4, 1020, form), atol=2e-6, rtol=1e-5)
    assert bool((got[:5] - 1).abs().max() < 1e-6) and bool((got[6] < 0.9).all())


def test_soft_caps_and_learned_sinks() -> None:
    lengths = torch.tensor([40, 17])
    generator = torch.Generator().manual_seed(0)
    queries, keys = (3 * torch.randn(2, heads, n, 4, generator=generator) for heads, n in ((4, 8), (2, 40)))
    form = LogitForm(0.5, softcap=3.0, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]))
    got = ratio(queries, keys, lengths, 2, 6, form)
    torch.testing.assert_close(got, by_softmax(queries, keys, lengths, 2, 6, form), atol=1e-6, rtol=1e-5)
