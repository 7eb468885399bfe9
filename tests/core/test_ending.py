"""Rows that stop early: ids, lengths of their own, and text conditions, in blocks of any size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mediaspec.core.ending import StopAt, cut_at
from mediaspec.core.engine import Engine, Round
from mediaspec.core.tree import TreeSpec
from mediaspec.core.types import Warp
from mediaspec.drafters import ModelDrafter, NgramDrafter
from mediaspec.rules import make_rule
from tests.toy import ToyTarget

CASES = json.loads((Path(__file__).parents[1] / "data" / "language_cases.json").read_text())
SEEDS = torch.arange(8) + 11
CONDITION = torch.tensor([0, 3, 1, 2, 5, 7, 9, 4])
LENGTH = 16


def run(rule: str = "coupled", draft: bool = True, rows: slice = slice(None), **settings):  # type: ignore[no-untyped-def]
    drafter = ModelDrafter(ToyTarget(5, LENGTH, gap=0.8)) if draft else None
    return Engine(ToyTarget(5, LENGTH), make_rule(rule), drafter).decode(CONDITION[rows], SEEDS[rows], **settings)


def expected(stop_ids: tuple[int, ...], lengths: list[int]) -> list[list[int]]:
    """Plain tokens without any ending, cut by hand."""
    rows = []
    for tokens, limit in zip(run(draft=False).tokens.tolist(), lengths, strict=True):
        stops = [place + 1 for place, token in enumerate(tokens) if token in stop_ids]
        rows.append(tokens[: min([limit, *stops])])
    return rows


def kept(result) -> list[list[int]]:  # type: ignore[no-untyped-def]
    return [row[:length] for row, length in zip(result.tokens.tolist(), result.lengths, strict=True)]


def test_the_commit_case_of_the_specification() -> None:
    inputs, rows = CASES["commit"]["inputs"], CASES["commit"]["expected"]["rows"]
    draft, target = torch.tensor(inputs["draft"]), torch.tensor(inputs["target_argmax"])
    matched = (draft == target[:, :4]).long().cumprod(1).sum(1)
    assert matched.tolist() == [row["matched"] for row in rows]
    counts = torch.minimum(matched + 1, torch.tensor(inputs["budget"]))
    counts, stopped = cut_at(target, counts, inputs["eos"])
    finished = stopped | (counts == torch.tensor(inputs["budget"]))
    for row, wanted in enumerate(rows):
        assert int(counts[row]) == wanted["count"] == wanted["kv_valid_gain"]
        assert target[row, : int(counts[row])].tolist() == wanted["emitted"]
        assert bool(finished[row]) == wanted["finished"]
        assert min(int(counts[row]), 4) == wanted["draft_kv_valid_gain"]


@pytest.mark.parametrize("length", [1, 2, 3, 5, 9, 20])
@pytest.mark.parametrize("stop_ids", [(), (2,), (0, 4)])
def test_blocks_of_any_size_stop_where_plain_decoding_does(stop_ids: tuple[int, ...], length: int) -> None:
    """A stop falls on every place of a block here; budgets run from 1 to beyond a block."""
    limits = [1, 2, 3, 4, 5, 6, 11, 16]
    ending = StopAt(stop_ids, torch.tensor(limits))
    plain = run(draft=False, ending=ending)
    fast = run(num_draft_tokens=length, ending=ending)
    assert kept(plain) == kept(fast) == expected(stop_ids, limits)
    assert fast.stats.tokens == sum(map(len, kept(fast)))


@pytest.mark.parametrize("tree", [(2, 1), (3, 2, 1)])
def test_trees_stop_as_chains_do(tree: tuple[int, ...]) -> None:
    ending = StopAt((3,))
    assert kept(run(tree=TreeSpec.from_widths(tree), ending=ending)) == expected((3,), [LENGTH] * 8)


@pytest.mark.parametrize("rule", ["exact", "cool_sd"])
def test_rows_do_not_notice_that_others_stopped(rule: str) -> None:
    ending = StopAt((2,))
    whole = kept(run(rule, num_draft_tokens=4, ending=ending))
    for row in range(8):
        assert kept(run(rule, rows=slice(row, row + 1), num_draft_tokens=4, ending=ending)) == [whole[row]]


def test_greedy_needs_no_noise() -> None:
    for warp in (Warp(temperature=0.0),):
        plain = run("exact", draft=False, warp=warp)
        fast = run("exact", warp=warp, ending=StopAt((4,)))
        target = ToyTarget(5, LENGTH)
        for row, tokens in enumerate(kept(fast)):
            assert tokens == plain.tokens[row, : len(tokens)].tolist()
            for place, token in enumerate(tokens):
                assert token == int(target.logits(tokens[:place], int(CONDITION[row])).argmax())


def test_every_round_reports_committed_tokens_only() -> None:
    wanted, seen = expected((2,), [LENGTH] * 8), {row: 0 for row in range(8)}

    def on_round(step: Round) -> None:
        for live, row in enumerate(step.rows):
            now = step.lengths[row]
            assert step.state.tokens[live, :now].tolist() == wanted[row][:now]
            assert now >= seen[row]
            seen[row] = now

    run(num_draft_tokens=6, ending=StopAt((2,)), on_round=on_round)
    assert seen == {row: len(tokens) for row, tokens in enumerate(wanted)}


def test_logits_processed_by_the_text_before_them() -> None:
    """A ban on repeating the last token: the same tokens in blocks and one by one, and no repetition."""

    def ban(state, logits, draft, rows):  # type: ignore[no-untyped-def]
        out = logits.clone()
        for node in range(logits.shape[2]):
            last = state.last_token if node == 0 else draft.tokens[:, node - 1]
            first = (state.lengths == 0) & (node == 0)
            banned = torch.zeros_like(out[:, 0, node]).scatter(1, last[:, None], float("-inf"))
            out[:, 0, node] += torch.where(first[:, None], 0.0, banned)
        return out

    plain = run(draft=False, process=ban)
    assert not bool((plain.tokens[:, 1:] == plain.tokens[:, :-1]).any())
    assert torch.equal(plain.tokens, run(num_draft_tokens=5, process=ban).tokens)
    engine = Engine(ToyTarget(5, LENGTH), make_rule("coupled"), NgramDrafter())
    assert torch.equal(plain.tokens, engine.decode(CONDITION, SEEDS, process=ban).tokens)
    with pytest.raises(ValueError, match="one branch"):
        run(process=ban, guidance_scale=2.0)
    with pytest.raises(ValueError, match="one per row"):
        run(ending=StopAt((), torch.tensor([3])))
