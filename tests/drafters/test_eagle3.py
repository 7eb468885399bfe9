"""The EAGLE-3 drafter: its drafts are those of the written-out head, whatever rounds went before; refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mediaspec.core.arm import PLAIN, Arm
from mediaspec.core.engine import Engine
from mediaspec.core.outcome import Choice
from mediaspec.core.prompt import TokenPrompt
from mediaspec.core.tree import TreeSpec
from mediaspec.core.types import DecodeState, Draft, Warp
from mediaspec.drafters import Eagle3Drafter, EagleDrafter, NgramDrafter, make_drafter
from mediaspec.models.eagle3 import Eagle3Config, Eagle3Head
from mediaspec.rules import CoupledRule, ExactRule
from mediaspec.targets.causal_lm import CausalLMTarget
from mediaspec.testing.check_drafter import check_drafter
from tests.attention.models import make_model
from tests.drafters.heads import toy_head
from tests.toy import ToyTarget

VOCAB, NEW, LAYERS = 30, 13, 4
GREEDY = Warp(temperature=0.0)
TREE = TreeSpec.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0)])


def make_head(model: Any, count: int = 20, **settings: Any) -> Eagle3Head:
    """A head whose drafts depend on all it reads; every third token cannot be drafted."""
    ids = torch.tensor([i for i in range(model.config.vocab_size) if i % 3 != 1][:count])
    torch.manual_seed(3)
    head = Eagle3Head.from_target(model, ids, **settings).eval()
    with torch.no_grad():
        for weight in (head.mix.weight, head.fc.weight, head.wk.weight, head.wv.weight, head.wq.weight):
            weight.add_(torch.randn_like(weight) * 0.1)
    return head


@pytest.fixture(scope="module")
def target() -> CausalLMTarget:
    return CausalLMTarget(make_model(num_hidden_layers=LAYERS, vocab_size=VOCAB), NEW)


def prompt(lengths: list[int], vocab: int = VOCAB) -> TokenPrompt:
    ids = torch.randint(3, vocab, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(2))
    return TokenPrompt(ids, torch.tensor(lengths), tuple(lengths))


def decode(target: CausalLMTarget, given: TokenPrompt, drafter: Any, **more: Any) -> Any:
    settings = {"warp": GREEDY, "num_draft_tokens": 4, **more}
    rule = settings.pop("rule", CoupledRule())
    seeds = settings.pop("seeds", torch.arange(len(given)))
    return Engine(target, rule, drafter).decode(given, seeds, **settings)


@torch.no_grad()
def written_out(target: CausalLMTarget, head: Eagle3Head, tokens: Tensor, steps: int, window: int) -> list[int]:
    """A greedy chain behind `tokens` [n], from the modules alone."""
    model = target.model
    body = model(input_ids=tokens[None], output_hidden_states=True)
    levels = list(body.hidden_states[1:-1])
    last: list[Tensor] = []
    hook = model.model.layers[-1].register_forward_hook(
        lambda m, a, out: last.append(out if isinstance(out, Tensor) else out[0])
    )
    model(input_ids=tokens[None])
    hook.remove()
    features = torch.cat([(levels + last)[layer] for layer in head.config.feature_layers], -1)[0]
    embeds = model.get_input_embeddings().weight
    rows = model.get_output_embeddings().weight[head.draft_ids]
    first = window  # how many of the oldest positions the drafter does not read
    features, tokens, drawn = features[first:], tokens[first:], []
    for _ in range(steps):
        n = len(tokens) - 1
        states = head.unroll(
            embeds[tokens[1:]][None], _padded(features, n)[None], torch.arange(n)[None], len(drawn) + 1
        )
        logits = rows @ head.read(states[-1][0, -1])
        drawn.append(int(head.draft_ids[logits.argmax()]))
        tokens = torch.cat([tokens, torch.tensor(drawn[-1:])])
    return drawn


def _padded(features: Tensor, count: int) -> Tensor:
    """Features of `count` positions; those that the target has not given yet are junk, which nothing may read."""
    known = features[:-1][:count]
    return torch.cat([known, torch.full((count - len(known), features.shape[1]), 1e3)])


class Checked(Eagle3Drafter):
    """Compares every draft with the written-out one; `others` are rounds in which another drafter's tokens count."""

    def __init__(self, head: Eagle3Head, target: CausalLMTarget, **settings: Any) -> None:
        super().__init__(head, torch.float32, **settings)
        self.name, self.target, self.compared = "eagle3", target, 0

    def propose(self, state: DecodeState, budget: int, tree: TreeSpec | None = None) -> Draft:
        draft = super().propose(state, budget, tree)
        prompts = state.condition if state.copies is None else state.condition.select(state.copies)
        for row, count in enumerate(state.host_lengths):
            # rows beyond the prompts left the batch; their order cannot be told without copies
            if len(prompts) != state.rows or count >= self.target.num_tokens - budget:
                continue
            before = prompts.ids[row, : prompts.host_lengths[row]]
            tokens = torch.cat([before, state.tokens[row, :count]])
            skipped = max(len(before) - self.window, 0)
            if tree is None:
                wanted = written_out(self.target, self.head, tokens, draft.tokens.shape[1], skipped)
                assert draft.tokens[row].tolist() == wanted, (row, count)
            else:
                wanted = written_out(self.target, self.head, tokens, tree.max_depth, skipped)
                firsts = [tree.depth.index(depth) - 1 for depth in range(1, tree.max_depth + 1)]
                assert draft.tokens[row, firsts].tolist() == wanted, (row, count)
            self.compared += 1
        return draft


@pytest.mark.parametrize("lengths", [[7], [1], [9, 9, 9], [12, 1, 5]], ids=str)
@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
def test_drafts_are_the_written_out_ones(target: CausalLMTarget, lengths: list[int], tree: TreeSpec | None) -> None:
    for window in (512, 6):
        drafter = Checked(make_head(target.model), target, window=window)
        given = prompt(lengths)
        found = decode(target, given, drafter, tree=tree)
        assert torch.equal(found.tokens, decode(target, given, None).tokens)
        assert drafter.compared >= len(lengths)


class Script:
    """A policy that plays fixed arms one after another."""

    def __init__(self, *arms: Arm) -> None:
        self.arms, self.round = arms, 0

    def begin(self, drafters: Any = (), *, model: str = "default", limits: Any = None) -> None:
        self.round = 0

    def choose(self, rows: Any, length: int = 0, ready: Any = None) -> Choice:
        index = self.round % len(self.arms)
        self.round += 1
        return Choice(self.arms[index], index, tuple(rows), length)

    def observe(self, choice: Choice, outcome: Any) -> None:
        pass


@pytest.mark.parametrize("lengths", [[7], [12, 1, 5]], ids=str)
@pytest.mark.parametrize("kept", [64, 0])
def test_it_follows_rounds_it_did_not_draft(
    target: CausalLMTarget, lengths: list[int], kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain rounds, another drafter's chains, trees; with little kept it must read between two drafts of its own."""
    monkeypatch.setattr("mediaspec.drafters.eagle3.PENDING", kept)
    mine = (Arm("eagle3", 3), Arm("other", 2), Arm("eagle3", 3, TREE), Arm("eagle3", 2))
    script = Script(*[PLAIN] * 4, Arm("other", 3), *[PLAIN] * 5, *mine)
    target = CausalLMTarget(target.model, 20)
    drafter = Checked(make_head(target.model), target)
    given = prompt(lengths)
    found = decode(target, given, {"other": NgramDrafter(), "eagle3": drafter}, policy=script)
    assert torch.equal(found.tokens, decode(target, given, None).tokens)
    assert drafter.compared >= len(lengths)


def test_forked_prompts_and_leaving_rows(target: CausalLMTarget) -> None:
    given, copies = prompt([9, 4]), torch.tensor([0, 1, 1, 0, 1])
    warp, seeds = Warp(temperature=0.9), torch.arange(5)
    drafter = Eagle3Drafter(make_head(target.model))
    forked = decode(target, given, drafter, warp=warp, copies=copies, seeds=seeds)
    whole = decode(target, given.select(copies), drafter, warp=warp, seeds=seeds)
    plain = decode(target, given, None, warp=warp, copies=copies, seeds=seeds)
    assert torch.equal(forked.tokens, plain.tokens) and torch.equal(whole.tokens, plain.tokens)
    assert forked.stats.accepted_per_position == whole.stats.accepted_per_position
    assert forked.stats.row_calls < 5 * forked.stats.target_calls  # finished rows left


def test_the_conformance_suite() -> None:
    model = make_model(num_hidden_layers=3, vocab_size=9, hidden_size=16, intermediate_size=16)
    target = CausalLMTarget(model, 8)
    head = make_head(model, 6)

    def condition(rows: int) -> TokenPrompt:
        lengths = [(5, 14, 9)[row % 3] for row in range(rows)]
        ids = torch.randint(9, (256, 14), generator=torch.Generator().manual_seed(5))[:rows]
        return TokenPrompt(ids, torch.tensor(lengths), tuple(lengths))

    tree = TreeSpec.from_widths([2, 2, 1])
    check_drafter(lambda: Eagle3Drafter(head), target, condition, budgets=(1, 4), trees=[tree], rows=128)
    check_drafter(lambda: Eagle3Drafter(head, confidence=0.4), target, condition, budgets=(4,), rows=128)


def test_a_law_is_zero_outside_the_draft_vocabulary(target: CausalLMTarget) -> None:
    seen: list[Tensor] = []

    class Watched(Eagle3Drafter):
        def propose(self, state: DecodeState, budget: int, tree: TreeSpec | None = None) -> Draft:
            draft = super().propose(state, budget, tree)
            assert draft.probs is not None
            seen.append(draft.probs)
            return draft

    drafter = Watched(make_head(target.model))
    decode(target, prompt([5, 8]), drafter, rule=ExactRule(), warp=Warp(temperature=0.8, top_p=0.9))
    outside = torch.ones(VOCAB, dtype=torch.bool)
    outside[drafter.head.draft_ids] = False
    assert all(bool((law[..., outside] == 0).all()) for law in seen)


def test_confidence_shortens_chains_by_the_rows_own_law(target: CausalLMTarget) -> None:
    given = prompt([6, 11, 3])
    plain = decode(target, given, None)
    drafted = []
    for confidence in (0.0, 0.3, 0.9):
        found = decode(target, given, Eagle3Drafter(make_head(target.model), confidence=confidence))
        assert torch.equal(found.tokens, plain.tokens)
        drafted.append(sum(found.stats.tested_per_position))
    assert drafted[0] >= drafted[1] > 0 and Eagle3Drafter(make_head(target.model)).confidence == 0
    saved = make_head(target.model, confidence_threshold=0.3)
    assert Eagle3Drafter(saved).confidence == 0.3 and Eagle3Drafter(saved, confidence=0.0).confidence == 0


def test_a_head_is_prepared_once_per_model(target: CausalLMTarget) -> None:
    drafter = Eagle3Drafter(make_head(target.model))
    decode(target, prompt([5]), drafter)
    step = drafter._prepared[0][2]
    decode(CausalLMTarget(target.model, 9), prompt([5]), drafter)
    assert drafter._prepared[0][2] is step


def test_made_by_name(target: CausalLMTarget) -> None:
    assert isinstance(make_drafter("eagle3", head=make_head(target.model), window=64), Eagle3Drafter)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 31}, "vocab_size=31 but the target has 30"),
        ({"hidden_size": 16, "head_dim": 8}, "hidden_size=16 but the target has 32"),
        ({"feature_layers": (0, 2, 4)}, "the target has 4"),
    ],
)
def test_refuses_a_foreign_target(target: CausalLMTarget, change: dict[str, Any], message: str) -> None:
    settings: dict[str, Any] = dict(
        hidden_size=32, vocab_size=VOCAB, draft_vocab_size=4, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, feature_layers=(0, 1, 3),
    )  # fmt: skip
    drafter = Eagle3Drafter(Eagle3Head(Eagle3Config(**(settings | change))))
    with pytest.raises(ValueError, match=message):
        drafter.check(target)


def test_refusals(target: CausalLMTarget) -> None:
    head = make_head(target.model)
    with pytest.raises(ValueError, match="window=0"):
        Eagle3Drafter(head, window=0)
    with pytest.raises(ValueError, match="confidence=1"):
        Eagle3Drafter(head, confidence=1.0)
    toy = ToyTarget(vocab_size=VOCAB, num_tokens=9)
    toy.hidden_size = 32
    with pytest.raises(ValueError, match="ToyTarget shows none"):
        Eagle3Drafter(head).check(toy)
    with pytest.raises(ValueError, match="call it before"):
        Eagle3Drafter(head).propose(None, 1)  # type: ignore[arg-type]

    class Deaf(Eagle3Drafter):
        feature_layers = ()

        def __init__(self, head: Eagle3Head) -> None:
            super().__init__(head)
            self.wanted, self.feature_layers = self.feature_layers, ()

        def begin(self, *arguments: Any) -> None:
            self.feature_layers = self.wanted
            super().begin(*arguments)

    with pytest.raises(ValueError, match="but the target gave none"):
        decode(target, prompt([4]), Deaf(head))
    assert not isinstance(EagleDrafter(toy_head(ToyTarget())), Eagle3Drafter)
