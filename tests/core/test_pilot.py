"""A policy chooses per round; what it is told, and that its choices never change lossless tokens."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mediaspec.core.arm import PLAIN, Arm
from mediaspec.core.ending import StopAt
from mediaspec.core.engine import Engine
from mediaspec.core.outcome import Choice, Outcome
from mediaspec.core.prompt import TokenPrompt
from mediaspec.core.tree import TreeSpec
from mediaspec.core.types import Warp
from mediaspec.drafters import ModelDrafter, NgramDrafter
from mediaspec.policies import make_policy
from mediaspec.rules import make_rule
from mediaspec.targets.causal_lm import CausalLMTarget

T = 24


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def prompt(rows: int) -> TokenPrompt:
    ids = torch.arange(rows * 7).view(rows, 7) * 5 % 31 + 1
    mask = torch.ones_like(ids)
    if rows > 1:
        mask[1, :3] = 0
    return TokenPrompt.from_padded(ids, mask)


class Scripted:
    """Runs through a list of arms again and again, and keeps what it was told."""

    def __init__(self, arms: tuple[Arm, ...], lengths: tuple[int, ...] | None = None) -> None:
        self.arms, self.lengths = arms, lengths
        self.told: list[tuple[Choice, Outcome]] = []
        self.asked: list[tuple[tuple[int, ...], int, Any]] = []

    def begin(self, drafters: Any = (), *, model: str = "default", limits: Any = None) -> None:
        self.drafters, self.limits = list(drafters), dict(limits or {})

    def choose(self, rows: Any, length: int = 0, ready: Any = None) -> Choice:
        self.asked.append((tuple(rows), length, ready))
        index = len(self.told) % len(self.arms)
        arm = self.arms[index]
        given = None if self.lengths is None or arm.off else tuple(self.lengths[row] for row in rows)
        return Choice(arm, index, tuple(rows), length, given)

    def observe(self, choice: Choice, outcome: Outcome) -> None:
        self.told.append((choice, outcome))


def drafters(model: Any) -> dict[str, Any]:
    return {"model": ModelDrafter(CausalLMTarget(model, T)), "ngram": NgramDrafter(max_ngram=1)}


def decode(model: Any, rows: int, policy: Any, given: Any, **settings: Any) -> Any:
    engine = Engine(CausalLMTarget(model, T), make_rule("coupled"), given)
    settings = {"warp": Warp(0.8), **settings}
    return engine.decode(prompt(rows), torch.arange(rows), policy=policy, **settings)


ARMS = (PLAIN, Arm("ngram", 3), Arm("model", 2), Arm("model", 2, TreeSpec((0, 0, 1))), Arm("ngram", 1))


@pytest.mark.parametrize("rows", [1, 3])
def test_tokens_do_not_depend_on_the_choices(model: Any, rows: int) -> None:
    plain = decode(model, rows, None, None, num_draft_tokens=0)
    policy = Scripted(ARMS)
    mixed = decode(model, rows, policy, drafters(model))
    assert torch.equal(plain.tokens, mixed.tokens)
    assert len({choice.index for choice, _ in policy.told}) == len(ARMS)
    assert sum(mixed.stats.arms.values()) == len(policy.told) == mixed.stats.target_calls - 1
    assert set(mixed.stats.arms) == {"plain", "ngram:3", "model:2", "model:tree3", "ngram:1"}


def test_a_policy_is_told_accepted_drafts_before_any_cut(model: Any) -> None:
    policy = Scripted((Arm("model", 4),))
    result = decode(model, 2, policy, drafters(model), ending=StopAt((), torch.tensor([T, 9])))
    assert result.lengths == [T, 9]
    rounds = policy.told
    # the draft model is the target itself: everything that had room is accepted
    for (choice, outcome), (rows, _, _) in zip(rounds, policy.asked):
        most = outcome.limit or [4] * len(rows)
        assert list(outcome.accepted) == list(most) and outcome.seconds is not None and outcome.seconds > 0
        assert choice.rows == rows
    assert any(outcome.limit is not None for _, outcome in rounds)
    assert {rows for rows, _, _ in policy.asked} == {(0, 1), (0,)}
    assert policy.asked[0][1] == 7 and policy.asked[1][1] > 7


def test_lengths_per_row_cut_the_drafts(model: Any) -> None:
    policy = Scripted((Arm("model", 4),), lengths=(1, 3, 2))
    result = decode(model, 3, policy, drafters(model))
    first = policy.told[0][1].accepted
    assert list(first) == [1, 3, 2]
    assert torch.equal(result.tokens, decode(model, 3, None, None).tokens)


def test_a_lookup_without_a_match_is_not_ready(model: Any) -> None:
    policy = Scripted((PLAIN,))
    decode(model, 1, policy, {"ngram": NgramDrafter(max_ngram=3, min_ngram=3)})
    assert policy.asked[0][2] == []
    policy = Scripted((PLAIN,))
    decode(model, 1, policy, {"ngram": NgramDrafter(max_ngram=1), "model": ModelDrafter(CausalLMTarget(model, T))})
    assert all("model" in ready for _, _, ready in policy.asked)


def test_survival_finds_the_drafter_that_copies_the_target(model: Any) -> None:
    policy = make_policy("survival", max_draft_tokens=3, costs=[1.0] + [1.05, 1.1, 1.15] * 2)
    given = {"ngram": NgramDrafter(max_ngram=1), "model": ModelDrafter(CausalLMTarget(model, T))}
    decode(model, 1, policy, given)
    result = decode(model, 1, policy, given)
    assert result.stats.arms.get("model:3", 0) >= 4
    assert result.stats.tokens_per_call > 2.5


def test_an_idle_lookup_is_never_chosen(model: Any) -> None:
    policy = make_policy("survival", max_draft_tokens=2)
    result = decode(model, 1, policy, {"ngram": NgramDrafter(max_ngram=8, min_ngram=8)})
    assert set(result.stats.arms) == {"plain"}


def test_several_drafters_need_a_policy(model: Any) -> None:
    with pytest.raises(ValueError, match="pass a policy"):
        decode(model, 1, None, drafters(model))
    with pytest.raises(ValueError, match="needs the drafter"):
        decode(model, 1, make_policy("fixed", num_draft_tokens=2, drafter="eagle"), drafters(model))


def test_features_of_all_prefix_positions_and_of_every_round(model: Any) -> None:
    target = CausalLMTarget(model, 4)
    target.feature_layers = (0, 1)
    cache = target.new_cache(2, 2)
    output = target.prefill(prompt(2), cache)
    hidden = model(prompt(2).ids[:1], output_hidden_states=True).hidden_states
    assert output.features is not None and output.features.shape == (2, 7, 64)
    torch.testing.assert_close(output.features[:1, :, :32], hidden[1], atol=1e-5, rtol=1e-4)
    scored = target.score(torch.tensor([[3, 4], [5, 6]]), cache)
    assert scored.features is not None and scored.features.shape == (2, 2, 64)
    target.feature_layers = (7,)
    with pytest.raises(ValueError, match="layers"):
        target.score(torch.tensor([[3], [5]]), cache)


def test_a_rule_in_an_arm_is_refused(model: Any) -> None:
    with pytest.raises(ValueError, match="a run has one rule"):
        decode(model, 1, make_policy("fixed", num_draft_tokens=2, rule="cool_sd"), {"ngram": NgramDrafter()})


def test_a_tree_of_a_policy_is_a_chain_for_a_lookup(model: Any) -> None:
    policy = Scripted((Arm("ngram", 2, TreeSpec((0, 0, 1))), Arm("model", 2, TreeSpec((0, 0, 1)))))
    mixed = decode(model, 1, policy, drafters(model))
    assert torch.equal(mixed.tokens, decode(model, 1, None, None).tokens)


def test_the_time_of_a_caller_is_nobodys_cost(model: Any) -> None:
    policy = Scripted((PLAIN,))
    decode(model, 1, policy, drafters(model), on_round=lambda step: time.sleep(0.05) or True)
    assert sorted(outcome.seconds for _, outcome in policy.told)[len(policy.told) // 2] < 0.05
