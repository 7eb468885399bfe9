"""Sparse self-speculation: lossless whatever it reads, and it reads what the verification looked at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mediaspec.attention.logits import LogitForm
from mediaspec.attention.pattern import HeadPattern, SparsePattern
from mediaspec.core.engine import Engine
from mediaspec.core.kv import Slots
from mediaspec.core.prompt import TokenPrompt
from mediaspec.core.stats import DecodeResult
from mediaspec.core.tree import TreeSpec
from mediaspec.core.types import DecodeState, Warp
from mediaspec.drafters import SparseDrafter, make_drafter
from mediaspec.drafters.sparse import _FirstRow
from mediaspec.eval.inspection import inspect_model
from mediaspec.rules.coupled import CoupledRule
from mediaspec.targets.causal_lm import CausalLMTarget
from mediaspec.testing.check_drafter import check_drafter
from tests.attention.models import HEADS, KEY_HEADS, LAYERS, make_model, tokens
from tests.toy import ToyTarget

NEW = 30
TREE = TreeSpec.from_paths([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)])
FEW: dict[str, Any] = dict(ratio=0.1, min_keys=6, sinks=2, recent=4)
ALL = SparsePattern.uniform(LAYERS, KEY_HEADS, HeadPattern(recent=100_000))
NARROW = SparsePattern.uniform(LAYERS, KEY_HEADS, HeadPattern(sinks=(0,), recent=3, slash=(9,)))
DRAFTERS: dict[str, dict[str, Any]] = {
    "verified": FEW,
    "stride": {**FEW, "stride": 3},
    "pattern": dict(ratio=0, pattern=NARROW),
    "both": {**FEW, "pattern": NARROW},
}


def prompt(lengths: tuple[int, ...]) -> TokenPrompt:
    padded = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    mask = torch.zeros(len(lengths), max(lengths))
    for row, length in enumerate(lengths):
        padded[row, :length], mask[row, :length] = tokens(length, seed=row), 1
    return TokenPrompt.from_padded(padded, mask)


def decode(
    model: Any, drafter: Any, lengths: tuple[int, ...], tree: TreeSpec | None = None, depth: int = 4, warm: float = 0.0
) -> DecodeResult:
    target = CausalLMTarget(model, NEW)
    return Engine(target, CoupledRule(), drafter).decode(
        prompt(lengths),
        torch.arange(len(lengths)),
        warp=Warp(temperature=warm),
        num_draft_tokens=depth,
        tree=tree,
    )


class Spy(SparseDrafter):
    """Keeps what every round's drafts read, and the text they stand behind."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.rounds: list[tuple[list[int], Tensor | None]] = []

    def propose(self, state: DecodeState, budget: int, tree: TreeSpec | None = None) -> Any:
        draft = super().propose(state, budget, tree)
        assert state.cache is not None
        index = self._live().index
        self.rounds.append((list(state.cache.host_lengths), None if index is None else index.clone()))
        return draft


@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("lengths", [(40,), (40, 3, 21)], ids=["one", "ragged"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_tokens_are_those_of_plain_decoding(name: str, lengths: tuple[int, ...], tree: TreeSpec | None) -> None:
    model = make_model()
    plain = decode(model, None, lengths)
    spy = Spy(**DRAFTERS[name])
    got = decode(model, spy, lengths, tree)
    assert torch.equal(got.tokens, plain.tokens)
    assert got.stats.target_calls < plain.stats.target_calls
    assert any(index is not None for _, index in spy.rounds)


@pytest.mark.parametrize("family", ["Gemma2", "Qwen3"])
def test_windows_and_caps(family: str) -> None:
    """Layers with a window read their window; a soft cap and norms of keys are the target's own."""
    settings = dict(head_dim=16, sliding_window=12, attn_logit_softcapping=2.0) if family == "Gemma2" else {}
    model = make_model(family, **settings)
    plain = decode(model, None, (40, 17))
    assert torch.equal(decode(model, SparseDrafter(**FEW), (40, 17)).tokens, plain.tokens)


@pytest.mark.parametrize("name", ["verified", "pattern"])
def test_conformance(name: str) -> None:
    target = CausalLMTarget(make_model(), 12)

    def condition(rows: int) -> TokenPrompt:
        return prompt((14, 9, 20, 5, 11)[:rows] if rows <= 5 else (14, 9, 20, 5) * (rows // 4))

    check_drafter(lambda: SparseDrafter(**DRAFTERS[name]), target, condition, budgets=(1, 5), trees=(TREE,), rows=32)


@pytest.mark.parametrize("settings", [dict(ratio=1.0), dict(ratio=0, pattern=ALL), {**FEW, "pattern": ALL}])
@pytest.mark.parametrize("lengths", [(40,), (40, 3, 21)], ids=["one", "ragged"])
def test_all_keys_accept_every_draft(settings: dict[str, Any], lengths: tuple[int, ...]) -> None:
    stats = decode(make_model(), SparseDrafter(**settings), lengths, warm=1.0).stats
    assert stats.tested_per_position == stats.accepted_per_position and sum(stats.tested_per_position) > 15


def test_few_keys_are_sometimes_wrong() -> None:
    """Else the tests above would show nothing."""
    stats = decode(make_model(), SparseDrafter(ratio=0.0, pattern=NARROW), (40, 30), warm=1.0).stats
    assert sum(stats.accepted_per_position) < 0.95 * sum(stats.tested_per_position)


def test_choices_are_sorted_unique_committed_and_small() -> None:
    lengths = (60, 3, 30)
    spy = Spy(**FEW)
    decode(make_model(), spy, lengths)
    assert spy.rounds
    for host, index in spy.rounds:
        assert index is not None and index.shape[:3] == (LAYERS, len(host), KEY_HEADS)
        for row, length in enumerate(host):
            for keys in index[:, row].flatten(0, 1).tolist():
                real = [key for key in keys if key >= 0]
                assert real == sorted(set(real)) and real[-1] == length - 1
                assert {0, 1, *range(max(length - 4, 0), length)} <= set(real)
                # six or a tenth of the keys, four recent ones, and a round's tokens that are newer than the choice
                assert len(real) <= max(6, -(-length // 10)) + 4 + 5


def test_a_short_text_is_read_whole_and_costs_no_extra_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    retraced = watch_retrace(monkeypatch)
    spy = Spy(ratio=0.1, min_keys=200)
    decode(make_model(), spy, (20, 5))
    assert not retraced and all(index is None for _, index in spy.rounds[1:])


def watch_retrace(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    seen: list[list[int]] = []
    own = CausalLMTarget.retrace

    def spied(self: CausalLMTarget, tokens: Tensor, cache: Any) -> None:
        seen.append(tokens[:, -1].tolist())
        own(self, tokens, cache)

    monkeypatch.setattr(CausalLMTarget, "retrace", spied)
    return seen


def test_the_first_round_falls_back_to_the_prompts_last_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, over the last tokens of the prompt; what they look at most is what the first draft reads."""
    retraced = watch_retrace(monkeypatch)
    model, spy = make_model(), Spy(**{**FEW, "recent": 6, "sinks": 0})
    decode(model, spy, (50,))
    ids = tokens(50, seed=0)
    assert retraced == [[int(ids[-1])]]
    from tests.attention.models import attentions

    law = attentions(model, ids)[:, :, -6:]  # [L, H, 6, n]
    scores = law.mean(2).unflatten(1, (KEY_HEADS, -1)).mean(2)[..., :44]
    host, index = spy.rounds[0]
    assert host == [50] and index is not None and index.shape[3] == 12
    for layer in range(LAYERS):
        for head in range(KEY_HEADS):
            wanted = [*sorted(scores[layer, head].topk(6).indices.tolist()), *range(44, 50)]
            assert index[layer, 0, head].tolist() == wanted


def test_later_rounds_read_what_the_verification_saw() -> None:
    """With rho 0, the choice of round two is the top of the first verified row's own attention."""
    model, spy = make_model(), Spy(**{**FEW, "rho": 0.0, "sinks": 0})
    result = decode(model, spy, (50,))
    (first,), _ = spy.rounds[0]
    (second,), index = spy.rounds[1]
    from tests.attention.models import attentions

    whole = torch.cat([tokens(50, seed=0), result.tokens[0]])
    law = attentions(model, whole[: first + 1])[:, :, -1]  # of the row at position `first`, the first verified one
    scores = law.unflatten(1, (KEY_HEADS, -1)).mean(2)
    assert index is not None
    for layer in range(LAYERS):
        for head in range(KEY_HEADS):
            chosen = scores[layer, head, : first - 3].topk(6).indices.tolist()
            wanted = [*sorted(chosen), *range(first - 3, second)]
            assert [key for key in index[layer, 0, head].tolist() if key >= 0] == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
def test_weights_equal_a_softmax_over_the_same_products(dtype: torch.dtype, tree: TreeSpec | None) -> None:
    model = make_model().to(dtype)
    target = CausalLMTarget(model, NEW)
    seen: dict[int, tuple[Tensor, Tensor]] = {}
    weigh = _FirstRow()

    def watch(layer: int, queries: Tensor, keys: Tensor, slots: Slots, form: LogitForm) -> None:
        seen[layer] = queries.double(), keys.double()
        weigh(layer, queries, keys, slots, form)

    cache = target.new_cache(2, 12)
    target.prefill(prompt((30, 19)), cache)
    cache.watch = watch
    target.score(torch.full((2, 1 + TREE.num_nodes), 7), cache, tree)
    for layer, (queries, keys) in seen.items():
        size, group = keys.shape[3], HEADS // KEY_HEADS
        for row, length in enumerate((30, 19)):
            for head in range(KEY_HEADS):
                wanted = torch.zeros(length + 1, dtype=torch.float64)
                for query in queries[row, head * group : (head + 1) * group, 0]:
                    wanted += (keys[row, head, : length + 1] @ query * size**-0.5).softmax(0) / group
                got = weigh.weights[layer][row, head].double()
                torch.testing.assert_close(got[: length + 1], wanted, rtol=1e-4, atol=1e-9)
                assert float(got[length + 1 :].sum()) == 0


def test_the_watch_is_gone_behind_a_round() -> None:
    watched: list[Any] = []

    class Looking(Spy):
        def observe(self, state: DecodeState, *rest: Any) -> None:
            super().observe(state, *rest)
            assert state.cache is not None
            watched.append(state.cache.watch)

    decode(make_model(), Looking(**FEW), (40, 3))
    assert watched and not any(watched)


def test_a_pause_leads_to_a_new_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds of other drafters are not watched; when too much is new, the last tokens choose again, per row."""
    retraced = watch_retrace(monkeypatch)
    model = make_model()
    target = CausalLMTarget(model, NEW)
    spy = Spy(**FEW)
    turns: list[bool] = []

    class Sometimes:
        """Drafts in the first round and from the tenth on; in between nothing of use comes."""

        needs: frozenset[str] = frozenset()

        def begin(self, *given: Any) -> None:
            spy.begin(*given)

        def propose(self, state: DecodeState, budget: int, tree: TreeSpec | None = None) -> Any:
            turns.append(len(turns) < 1 or len(turns) >= 10)
            if turns[-1]:
                return spy.propose(state, budget, tree)
            draft = torch.zeros(state.rows, 1, dtype=torch.int64)
            from mediaspec.core.types import Draft

            return Draft(draft, torch.ones(state.rows, dtype=torch.int64))

        def observe(self, *given: Any) -> None:
            spy.observe(*given)

        def select(self, rows: Tensor) -> None:
            spy.select(rows)

    condition = prompt((40, 12))
    seeds = torch.arange(2)
    plain = Engine(target, CoupledRule(), None).decode(condition, seeds, warp=Warp(temperature=0.0))
    got = Engine(target, CoupledRule(), Sometimes()).decode(
        condition, seeds, warp=Warp(temperature=0.0), num_draft_tokens=3
    )
    assert torch.equal(got.tokens, plain.tokens)
    assert len(turns) > 10 and len(retraced) == 2


def test_a_report_is_a_pattern(tmp_path: Path) -> None:
    """What `mediaspec inspect` writes drafts, with and without the prompt's columns."""
    model = make_model()
    report = inspect_model(model, tokens(60, seed=0))
    path = tmp_path / "inspect.json"
    path.write_text(json.dumps(report.to_dict()))
    plain = decode(model, None, (60,))
    for pattern in (path, str(path), report.to_dict(), report.pattern().without_columns()):
        drafter = SparseDrafter(ratio=0, pattern=pattern)
        assert torch.equal(decode(model, drafter, (60,)).tokens, plain.tokens)
    assert SparseDrafter(pattern=path).pattern == report.pattern()


def test_drafts_ahead_see_their_own_slashes() -> None:
    """One set serves all drafts of a round: it holds every distance as seen from each of them."""
    fixed, distances = NARROW.tables(100, ahead=3)
    assert fixed[0, 0].tolist() == [0]
    wanted = {d - step for d in (0, 1, 2, 8, 9, 10) for step in range(3) if d >= step}
    assert distances[0, 0].tolist() == sorted(wanted)


def test_settings_are_checked(tmp_path: Path) -> None:
    assert isinstance(make_drafter("sparse", ratio=0.2), SparseDrafter)
    for wrong, message in (
        (dict(ratio=1.5), "in \\[0, 1\\]"),
        (dict(rho=1.0), "rho in"),
        (dict(recent=20, min_keys=10), "no more recent"),
        (dict(max_keys=10), "below min_keys"),
        (dict(ratio=0), "give a pattern"),
        (dict(pattern=tmp_path / "none.json"), "no JSON file"),
        (dict(pattern={"rows": []}), "mediaspec inspect"),
    ):
        with pytest.raises(ValueError, match=message):
            SparseDrafter(**wrong)
    with pytest.raises(ValueError, match="which ToyTarget does not offer"):
        SparseDrafter().check(ToyTarget())
    other = SparsePattern.uniform(5, 1, HeadPattern())
    with pytest.raises(ValueError, match="5 layers of 1 key heads"):
        decode(make_model(), SparseDrafter(pattern=other), (10,))
    with pytest.raises(ValueError, match="begin"):
        SparseDrafter().select(torch.tensor([0]))
