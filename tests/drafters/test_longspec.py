"""Drafting with a LongSpec head: it changes no token, copies a target it equals, and keeps a constant state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mediaspec.core.arm import make_arms
from mediaspec.core.engine import Engine
from mediaspec.core.grammar import Grammar
from mediaspec.core.prompt import TokenPrompt
from mediaspec.core.tree import TreeSpec
from mediaspec.core.types import DecodeState, Draft, TargetOutput, Warp
from mediaspec.drafters import LongSpecDrafter, NgramDrafter, make_drafter
from mediaspec.kernels import philox
from mediaspec.models.longspec import LongSpecConfig, LongSpecHead
from mediaspec.policies import make_policy
from mediaspec.rules.coupled import CoupledRule
from mediaspec.rules.exact import ExactRule
from mediaspec.targets.causal_lm import CausalLMTarget
from mediaspec.testing.check_drafter import check_drafter
from tests.drafters.test_conformance import TREE
from tests.models.test_longspec import make_head
from tests.targets.test_causal_lm import make_model, prompts
from tests.toy import ToyTarget

NEW = 16
MODEL = make_model()
GREEDY, WARM = Warp(temperature=0.0), Warp(temperature=0.9, top_p=0.95)


def make_prompt(rows: int) -> TokenPrompt:
    return TokenPrompt.from_padded(*prompts(rows))


def target_of(model: Any = MODEL, new: int = NEW) -> CausalLMTarget:
    return CausalLMTarget(model, new)


def copying_head(window: int = 64) -> tuple[Any, LongSpecHead]:
    """A one-layer model and a head that equals it."""
    model = make_model(num_hidden_layers=1)
    scale = float(model.get_input_embeddings().weight.detach().pow(2).mean().sqrt())
    head = LongSpecHead.from_target(model, window=window, hidden_scale=scale).eval()
    with torch.no_grad():
        head.cross_o.weight.zero_()
    return model, head


def decode(target: CausalLMTarget, drafter: Any, rows: int, rule: Any = None, **settings: Any) -> Any:
    settings.setdefault("warp", GREEDY)
    return Engine(target, rule or ExactRule(), drafter).decode(make_prompt(rows), torch.arange(rows), **settings)


@pytest.mark.parametrize("window", [4, 64])
def test_conformance(window: int) -> None:
    head = make_head(MODEL, window)
    check_drafter(
        lambda: LongSpecDrafter(head), target_of(new=9), make_prompt_of, budgets=(1, 6), trees=(TREE,), rows=48
    )


def make_prompt_of(rows: int) -> TokenPrompt:
    """Row b gets the same prompt for every number of rows."""
    some = make_prompt(8)
    return some.select(torch.arange(rows) % 8)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("tree", [None, TREE])
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Gemma3"])
def test_greedy_tokens_are_the_targets(rows: int, tree: TreeSpec | None, family: str) -> None:
    model = make_model(family, **({"num_hidden_layers": 6} if family == "Gemma3" else {}))
    target = target_of(model)
    head = LongSpecHead.from_target(model, torch.arange(0, 50, 2), window=5)
    plain = decode(target, None, rows).tokens
    assert torch.equal(decode(target, LongSpecDrafter(head), rows, num_draft_tokens=4, tree=tree).tokens, plain)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("tree", [None, TreeSpec.from_widths([2, 1, 1])])
@pytest.mark.parametrize("rule", [ExactRule(), CoupledRule()])
@pytest.mark.parametrize("warp", [GREEDY, WARM])
def test_a_head_that_copies_the_target_is_always_followed(rows: int, tree: Any, rule: Any, warp: Warp) -> None:
    model, head = copying_head()
    result = decode(target_of(model), LongSpecDrafter(head), rows, rule, warp=warp, num_draft_tokens=4, tree=tree)
    # one token by the prefill, then 15 by fives (chains of 4) or fours (3 levels)
    assert result.stats.target_calls == 1 + (3 if tree is None else 4)
    assert result.stats.accepted_per_position == result.stats.tested_per_position


class Checked(LongSpecDrafter):
    """Compares every draft of a greedy run with the teacher-forced pass over the same tokens."""

    nodes = 0

    def begin(self, state: DecodeState, output: TargetOutput, extra: int) -> None:
        super().begin(state, output, extra)
        self.live = torch.arange(state.rows)

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        self.live = self.live[rows]

    def propose(self, state: DecodeState, budget: int, tree: TreeSpec | None = None) -> Draft:
        draft = super().propose(state, budget, tree)
        count = draft.tokens.shape[1]
        shape = draft.tree or TreeSpec(tuple(range(count)))
        for row in range(state.rows):
            for node in shape.internal:
                path, at = [], node
                while at:
                    path.append(at - 1)
                    at = shape.parents[at - 1]
                self._compare(state, row, draft.tokens[row], path[::-1], shape.children[node])
        return draft

    def _compare(self, state: DecodeState, row: int, drafted: Tensor, path: list[int], children: Any) -> None:
        source = int(self.live[row])
        prompt, new = state.condition.ids[source, : state.condition.host_lengths[source]], state.host_lengths[row]
        tokens = torch.cat([prompt, state.tokens[row, :new], drafted[path]])
        root, count = len(prompt) + new - 1, len(tokens)
        keys, values = (torch.zeros(count, 2, 8) for _ in range(2))
        for store, part in zip((keys, values), state.cache.layer(3), strict=True):
            store[:root] = part[row, :, :root].transpose(0, 1)
        embeds = state.target.embed(tokens)
        out = self.head(embeds, torch.arange(count), keys, values, [0, count], [len(path) + 1])[-1]
        logits = MODEL.get_output_embeddings()(out)[self.head.draft_ids]
        best = self.head.draft_ids[logits.topk(len(children)).indices]
        assert torch.equal(drafted[[child - 1 for child in children]], best)
        Checked.nodes += 1


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("tree", [None, TREE])
def test_drafts_are_those_of_the_teacher_forced_pass(rows: int, tree: TreeSpec | None) -> None:
    """A window of 5 in a ring of at most 14 slots over 40 tokens, rows that stand at different lengths."""
    Checked.nodes = 0
    drafter = Checked(make_head(MODEL, 5, final_norm=True), dtype=torch.float32)
    decode(target_of(new=40), drafter, rows, num_draft_tokens=4, tree=tree)
    assert Checked.nodes > 60


def test_beam_trees_change_no_token_and_are_as_large_as_asked() -> None:
    target, head = target_of(), make_head(MODEL, final_norm=True)
    budget = TreeSpec.from_widths([3, 2])  # 9 nodes, 2 deep
    seen: list[TreeSpec] = []

    class Watched(LongSpecDrafter):
        def propose(self, state: DecodeState, budget: int, tree: TreeSpec | None = None) -> Draft:
            draft = super().propose(state, budget, tree)
            assert draft.tree is not None and draft.probs is None
            seen.append(draft.tree)
            return draft

    for rule, warp in ((ExactRule(), GREEDY), (CoupledRule(), WARM)):
        plain = decode(target, None, 1, rule, warp=warp).tokens
        got = decode(target, Watched(head, beam=(4, 8, 8)), 1, rule, warp=warp, tree=budget)
        assert torch.equal(got.tokens, plain)
    assert {tree.num_nodes for tree in seen} == {9} and max(tree.max_depth for tree in seen) <= 2
    assert len({tree.parents for tree in seen}) > 1, "a new shape in every round"
    rows = decode(target, LongSpecDrafter(head, beam=(4, 8)), 3, tree=budget)
    assert torch.equal(rows.tokens, decode(target, None, 3).tokens)


def test_a_beam_of_a_copy_is_always_followed() -> None:
    model, head = copying_head()
    tree = TreeSpec.from_widths([3, 1, 1])
    result = decode(target_of(model), LongSpecDrafter(head, beam=(3, 6, 6)), 1, tree=tree)
    accepted = result.stats.accepted_per_position
    assert accepted[0] == result.stats.tested_per_position[0] and accepted[1] > 0


@pytest.mark.slow
def test_beam_law_under_the_exact_rule() -> None:
    """The law of two tokens with beam trees against the model's own: chi-square over 2,000 seeds, p > 0.001."""
    model = make_model(vocab_size=7, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    target, head = target_of(model, 3), LongSpecHead.from_target(model, window=5)
    drafter, tree = LongSpecDrafter(head, beam=(3, 3)), TreeSpec.from_widths([2, 1])
    prompt = TokenPrompt.from_padded(torch.tensor([[3, 4, 5]]))
    counts = torch.zeros(7, 7)
    for seed in range(2000):
        tokens = Engine(target, ExactRule(), drafter).decode(prompt, torch.tensor([seed]), tree=tree).tokens[0]
        counts[tokens[0], tokens[1]] += 1
    with torch.inference_mode():
        first = model(prompt.ids).logits[0, -1].softmax(-1)
        pairs = torch.cat([prompt.ids.expand(7, -1), torch.arange(7)[:, None]], 1)
        law = first[:, None] * model(pairs).logits[:, -1].softmax(-1)
    expected = 2000 * law.flatten()
    big = expected >= 5
    seen = torch.cat([counts.flatten()[big], counts.flatten()[~big].sum()[None]])
    goal = torch.cat([expected[big], expected[~big].sum()[None]])
    statistic, freedom = float(((seen - goal) ** 2 / goal).sum()), len(goal) - 1
    assert statistic < freedom + 3.1 * (2 * freedom) ** 0.5 + 4, f"{statistic} with {freedom} degrees of freedom"


def test_the_state_has_one_size_at_every_context_length() -> None:
    model = make_model(max_position_embeddings=8192)
    head, sizes = make_head(model, window=512), []
    for length in (1024, 8192 - 64):
        drafter = LongSpecDrafter(head)
        prompt = TokenPrompt.from_padded(torch.randint(3, 50, (1, length), generator=torch.Generator().manual_seed(0)))
        target = target_of(model, 8)
        cache = target.new_cache(1, 6)
        cache.reserve(cache.capacity + length)
        cache.advance(torch.tensor([length]), [length])
        state = DecodeState(
            tokens=torch.full((1, 16), 5), lengths=torch.tensor([1]), branches=1, warp=GREEDY, guidance=None,
            rng=None, draft_purpose=philox.TARGET, target=target, host_lengths=[1], condition=prompt, cache=cache,
        )  # fmt: skip
        with torch.inference_mode():
            drafter.begin(state, TargetOutput(torch.zeros(1, 1, 50)), extra=6)
            drafter.propose(state, 5)
        held = [part for part in vars(drafter._run.ring).values() if isinstance(part, Tensor)]
        sizes.append((drafter.nbytes, sum(part.numel() * part.element_size() for part in held)))
        assert drafter.nbytes == 2 * (512 + 6) * 2 * 8 * 4
    assert sizes[0] == sizes[1]


def test_other_drafters_rounds_are_followed() -> None:
    """Under a policy a head sees rounds of others and plain ones; it goes on drafting as if it had never paused."""
    model, head = copying_head()
    own = []

    class Watched(LongSpecDrafter):
        mine: Draft | None = None

        def propose(self, state: DecodeState, budget: int, tree: TreeSpec | None = None) -> Draft:
            self.mine = super().propose(state, budget, tree)
            return self.mine

        def observe(self, state: DecodeState, draft: Draft | None, verdict: Any, output: TargetOutput) -> None:
            if self.mine is not None:
                own.append(bool((verdict.num_accepted >= draft.lengths).all()))
            self.mine = None
            super().observe(state, draft, verdict, output)

    arms = [arm.to_dict() for arm in make_arms(["ngram", "longspec"], [3])]
    for rows in (1, 3):
        own.clear()
        drafters = {"ngram": NgramDrafter(), "longspec": Watched(head)}
        target, policy = target_of(model, 60), make_policy("exp3", arms=arms, seed=1)
        result = Engine(target, ExactRule(), drafters).decode(
            make_prompt(rows), torch.arange(rows), warp=GREEDY, policy=policy
        )
        assert torch.equal(result.tokens, decode(target, None, rows).tokens)
        assert all(own) and 1 < len(own) < result.stats.target_calls - 2


def test_copies_fork_and_finished_rows_leave() -> None:
    target, head = target_of(new=24), make_head(MODEL, 5)
    copies, seeds = torch.tensor([0, 1, 1, 0, 1]), torch.arange(5)
    drafter = LongSpecDrafter(head)
    two = Engine(target, ExactRule(), drafter).decode(make_prompt(2), seeds, copies=copies, warp=WARM)
    five = Engine(target, ExactRule(), drafter).decode(make_prompt(2).select(copies), seeds, warp=WARM)
    assert torch.equal(two.tokens, five.tokens)
    assert two.stats.row_calls < 5 * two.stats.target_calls


def test_confidence_ends_a_chain_early_and_changes_no_token() -> None:
    target, calls = target_of(), []
    plain = decode(target, None, 3, CoupledRule(), warp=WARM).tokens
    for threshold in (0.0, 0.3, 0.999):
        head = make_head(MODEL)
        head.config.confidence_threshold = threshold
        result = decode(target, LongSpecDrafter(head), 3, CoupledRule(), warp=WARM, num_draft_tokens=6)
        assert torch.equal(result.tokens, plain)
        calls.append(sum(result.stats.tested_per_position))
    assert calls[0] > calls[1] > calls[2]


def test_forced_and_forbidden_tokens() -> None:
    class Some(Grammar):
        """Token 9 (which no head here drafts) at every third place, and only ids below 40 elsewhere."""

        def __init__(self) -> None:
            pass

        def allowed(self, device: torch.device) -> Tensor:
            return torch.arange(50, device=device) < 40

        def forced(self, positions: Tensor) -> Tensor:
            return torch.where(positions % 3 == 2, 9, -1)

    target, head = target_of(), make_head(MODEL)
    for rule in (ExactRule(), CoupledRule()):
        for tree in (None, TREE):
            drafter = LongSpecDrafter(head, beam=(2, 2))
            got = Engine(target, rule, drafter, Some()).decode(make_prompt(2), torch.arange(2), warp=WARM, tree=tree)
            assert bool((got.tokens[:, 2::3] == 9).all()) and bool((got.tokens < 40).all())


def test_coupled_draws_use_the_targets_own_numbers() -> None:
    from mediaspec.drafters._reduced import _exponentials

    seeds, places = torch.tensor([3, 1 << 40]), torch.tensor([7, 100])
    ids = torch.tensor([[[0, 5, 49]], [[2, 3, 11]]])
    whole = philox.exponential(seeds, places[:, None], 50, philox.TARGET)
    assert torch.equal(_exponentials(seeds, places, ids), whole.gather(2, ids))


def test_half_precision_runs() -> None:
    model = make_model().to(torch.bfloat16)
    head = LongSpecHead.from_target(make_model()).to(torch.bfloat16)
    target = target_of(model)
    result = decode(target, LongSpecDrafter(head), 2, num_draft_tokens=3)
    assert result.tokens.shape == (2, NEW)


def test_found_by_name() -> None:
    assert isinstance(make_drafter("longspec", head=make_head(MODEL), beam=(2, 2)), LongSpecDrafter)
    with pytest.raises(ValueError, match="needs head"):
        make_drafter("longspec")
    with pytest.raises(ValueError, match="nodes kept per level"):
        LongSpecDrafter(make_head(MODEL), beam=())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(vocab_size=51), "vocab_size=51 but the target has 50"),
        (dict(hidden_size=64), "hidden_size=64 but the target has 32"),
        (dict(num_key_value_heads=1), "num_key_value_heads=1 but the target has 2"),
        (dict(head_dim=16), "head_dim=16 but the target has 8"),
        (dict(target_layer=2), "target_layer=2 but the target has 3"),
        (dict(rotary={"rope_type": "default", "rope_theta": 5e5}), "could not read the target's keys"),
    ],
)
def test_refuses_a_foreign_target(change: dict[str, Any], message: str) -> None:
    known = make_head(MODEL).config
    names = ("hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rotary",
             "intermediate_size", "target_layer")  # fmt: skip
    head = LongSpecHead(LongSpecConfig(**{name: getattr(known, name) for name in names} | change))
    with pytest.raises(ValueError, match=message):
        LongSpecDrafter(head).check(target_of())
    with pytest.raises(ValueError, match=message):
        decode(target_of(), LongSpecDrafter(head), 1)


def test_refuses_what_is_no_language_model() -> None:
    with pytest.raises(ValueError, match="ToyTarget"):
        LongSpecDrafter(make_head(MODEL)).check(ToyTarget(vocab_size=7, num_tokens=9))
    with pytest.raises(ValueError, match="begin"):
        LongSpecDrafter(make_head(MODEL)).select(torch.tensor([0]))
