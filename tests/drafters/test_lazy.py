"""The lazy drafter is lossless for any choice of layers, judges rows alone, and leaves the cache as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mediaspec.attention.register import LightTransferPolicy, attach_policy, detach_policy
from mediaspec.attention.selection import LightTransfer
from mediaspec.core.engine import Engine
from mediaspec.core.prompt import TokenPrompt
from mediaspec.core.tree import TreeSpec
from mediaspec.core.types import Warp
from mediaspec.drafters import LazyDrafter, make_drafter
from mediaspec.rules import CoupledRule
from mediaspec.targets.causal_lm import CausalLMTarget
from mediaspec.testing.check_drafter import check_drafter
from tests.attention.models import VOCAB, attentions, make_model
from tests.toy import ToyTarget

LAYERS, NEW = 4, 24
SMALL: dict[str, Any] = dict(w_sink=2, w_recent=10, w_last=8)
TREE = TreeSpec.from_widths([2, 2, 1])


def prompt(lengths: list[int], vocab: int = VOCAB) -> TokenPrompt:
    ids = torch.randint(3, vocab, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(2))
    return TokenPrompt(ids, torch.tensor(lengths), tuple(lengths))


def decode(target: CausalLMTarget, given: TokenPrompt, drafter: LazyDrafter | None, warp: Warp, **more: Any) -> Any:
    seeds = more.pop("seeds", torch.arange(len(given)))
    return Engine(target, CoupledRule(), drafter).decode(given, seeds, warp=warp, **more)


@pytest.fixture(scope="module")
def target() -> CausalLMTarget:
    return CausalLMTarget(make_model(num_hidden_layers=LAYERS), NEW)


@pytest.mark.parametrize("keep", [0, 1, 2, LAYERS])
@pytest.mark.parametrize("lengths", [[40], [40, 40, 40], [40, 3, 17]], ids=str)
def test_tokens_are_those_of_plain_decoding(target: CausalLMTarget, lengths: list[int], keep: int) -> None:
    """P from none to all; rows that are long, short, and long only after a while."""
    given = prompt(lengths)
    for warp in (Warp(temperature=0.0), Warp(temperature=0.8, top_p=0.9)):
        plain = decode(target, given, None, warp).tokens
        for tree in (None, TREE):
            found = decode(target, given, LazyDrafter(keep, **SMALL), warp, num_draft_tokens=4, tree=tree)
            assert torch.equal(found.tokens, plain)
            if keep == LAYERS and tree is None:
                assert found.stats.tokens_per_call >= 4, "a draft of all layers is always accepted"


def test_the_conformance_suite() -> None:
    model = make_model(num_hidden_layers=3, vocab_size=9, hidden_size=16, intermediate_size=16)
    target = CausalLMTarget(model, 8)

    def condition(rows: int) -> TokenPrompt:
        lengths = [(5, 14, 9)[row % 3] for row in range(rows)]
        ids = prompt([14], 9).ids.expand(rows, -1).clone()
        ids[:, 0] = 3 + torch.arange(rows) % 5
        return TokenPrompt(ids, torch.tensor(lengths), tuple(lengths))

    small: dict[str, Any] = dict(w_sink=1, w_recent=5, w_last=4)
    check_drafter(lambda: LazyDrafter(1, **small), target, condition, budgets=(1, 4), trees=(TREE,), rows=48)


def test_every_row_is_judged_by_itself(target: CausalLMTarget) -> None:
    """Beside others, alone, and against attention maps; a short row once its text has grown."""
    given = prompt([40, 25, 3])

    def sets(rows: TokenPrompt, seeds: list[int]) -> list[list[int] | None]:
        drafter, kept = LazyDrafter(2, judge="mass", **SMALL), []

        def note(step: Any) -> bool:
            if step.index and len(step.rows) == len(seeds):
                kept.append(drafter.lazy_sets())
            return True

        decode(target, rows, drafter, Warp(temperature=0.0), seeds=torch.tensor(seeds), on_round=note)
        assert kept[0][: len(seeds)].count(None) == sum(length <= 12 for length in rows.host_lengths)
        return kept[-1]

    together = sets(given, [0, 1, 2])
    for row in range(3):
        alone = sets(given.select(torch.tensor([row])), [row])[0]
        assert together[row] is None or alone == together[row]
        assert alone is not None and len(alone) == LAYERS - 2
    law = attentions(target.model, given.ids[0, :40])[:, :, -8:]
    key = torch.arange(40)
    ratio = law[..., (key < 2) | (key >= 30)].sum(-1).mean((1, 2))
    assert together[0] == sorted(ratio.argsort(descending=True)[:2].tolist())


def test_it_judges_by_the_change_of_outputs(target: CausalLMTarget) -> None:
    """The lossy policy, which is tested against the model's own forward, and the drafter agree on a prompt."""
    given = prompt([40])
    policy = LightTransferPolicy(LightTransfer(full_layers=2, **SMALL))
    attach_policy(target.model, policy)
    try:
        decode(target, given, None, Warp(temperature=0.0))
    finally:
        detach_policy(target.model, policy)
    drafter, seen = LazyDrafter(2, **SMALL), []

    def note(step: Any) -> bool:
        if step.index:
            seen.append(drafter.lazy_sets())
        return not step.index

    decode(target, given, drafter, Warp(temperature=0.0), on_round=note)
    assert policy.last is not None and seen[0] == [list(policy.last.lazy_layers)]


def test_drafts_touch_nothing_but_slots_behind_the_text(target: CausalLMTarget) -> None:
    given, drafter, seen = prompt([40, 30]), LazyDrafter(1, **SMALL), []
    loop = Engine(target, CoupledRule(), LazyDrafter(1, **SMALL)).steps(
        given, torch.arange(2), warp=Warp(temperature=0.0), tree=TREE
    )
    state = next(loop).state
    cache = state.cache
    assert cache is not None
    before = cache.keys.clone()
    drafter.begin(state, None, 8)  # type: ignore[arg-type]
    for tree in (None, TREE):
        draft = drafter.propose(state, 3, tree)
        seen.append(draft.tokens.shape)
        assert cache.host_lengths == cache.lengths.tolist() == [40, 30]
        for row, length in enumerate((40, 30)):
            assert torch.equal(cache.keys[:, row, :, :length], before[:, row, :, :length])
    assert seen == [(2, 3), (2, TREE.num_nodes)] and cache.watch is None


def test_fixed_layers_and_a_law_of_its_own(target: CausalLMTarget) -> None:
    given = prompt([40])
    plain = decode(target, given, None, Warp(temperature=0.9)).tokens
    drafter = LazyDrafter(lazy_layers=[0, 2], w_sink=2, w_recent=10, w_last=8, warp=Warp(temperature=0.5))
    assert torch.equal(decode(target, given, drafter, Warp(temperature=0.9)).tokens, plain)
    assert drafter.lazy_sets() == [[0, 2]]


def test_what_it_cannot_draft_for_is_refused(target: CausalLMTarget) -> None:
    assert isinstance(make_drafter("lazy", full_layers=3), LazyDrafter)
    both: dict[str, Any] = dict(full_layers=1, lazy_layers=[0])
    for wrong in (dict(w_recent=0), dict(w_sink=-1), dict(w_last=99, w_recent=8), dict(judge="sum"), both):
        with pytest.raises(ValueError):
            LazyDrafter(**wrong)
    toy = ToyTarget(vocab_size=7, num_tokens=9)
    with pytest.raises(ValueError, match="CausalLMTarget"):
        Engine(toy, CoupledRule(), LazyDrafter()).decode(torch.arange(1), torch.arange(1))
