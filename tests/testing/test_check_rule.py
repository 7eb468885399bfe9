"""The conformance suite finds what is wrong with deliberately broken rules, and says what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mediaspec.core.types import Verdict
from mediaspec.core.verify import VerifyInputs
from mediaspec.rules import AcceptanceRule, CoolSDRule, ExactRule, make_rule
from mediaspec.testing import check_rule
from mediaspec.testing.check_rule import chi_square_p_value


@pytest.fixture(autouse=True)
def forget_broken_rules() -> Iterator[None]:
    known = dict(AcceptanceRule.registry)
    yield
    AcceptanceRule.registry.clear()
    AcceptanceRule.registry.update(known)


def fails(rule: AcceptanceRule, message: str) -> None:
    with pytest.raises(AssertionError) as error:
        check_rule(rule, rounds=4000)
    text = str(error.value)
    assert type(rule).__name__ in text and message in text, text


def test_a_relaxed_rule_that_claims_to_be_lossless() -> None:
    class Claim(AcceptanceRule):
        name = "broken_claim"
        lossless = True

        def linear(self, length: int) -> tuple[Tensor, Tensor]:
            return torch.full((length,), 1.5), torch.zeros(length)

    fails(Claim(), "the drift exceeds `bound`")


def test_a_verdict_that_hides_its_drift() -> None:
    class Hidden(CoolSDRule):
        name = "broken_hidden"

        def verify(self, inputs: VerifyInputs) -> Verdict:
            verdict = super().verify(inputs)
            return replace(verdict, drift=torch.zeros_like(verdict.drift))

    fails(Hidden(), "the verdict's drift is off by")


def test_rounds_that_do_not_follow_the_accepted_mass() -> None:
    class Greedy(ExactRule):
        name = "broken_greedy"

        def verify(self, inputs: VerifyInputs) -> Verdict:
            verdict = super().verify(inputs)
            best = inputs.target_logits[:, 0].argmax(-1).gather(1, verdict.num_accepted[:, None])[:, 0]
            rejected = (verdict.num_accepted < inputs.draft.lengths) & (verdict.next_token >= 0)
            return replace(verdict, next_token=torch.where(rejected, best, verdict.next_token))

    fails(Greedy(), "rounds do not follow its law at position 0")


def test_tokens_outside_the_support() -> None:
    class Mixture(AcceptanceRule):
        name = "broken_mixture"

        def accepted_mass(self, p: Tensor, q: Tensor, first: int = 0) -> Tensor:
            return torch.minimum(q, 0.5 * (p + q))

    fails(Mixture(), "a token of target probability 0 is accepted")


def test_mass_above_the_draft() -> None:
    class Heavy(AcceptanceRule):
        name = "broken_heavy"

        def accepted_mass(self, p: Tensor, q: Tensor, first: int = 0) -> Tensor:
            return p

    fails(Heavy(), "a must lie in [0, Q]")


def test_a_setting_that_is_not_saved() -> None:
    class Forgetful(AcceptanceRule):
        name = "broken_forgetful"
        strength = 1.5

        def linear(self, length: int) -> tuple[Tensor, Tensor]:
            return torch.full((length,), self.strength), torch.zeros(length)

    rule = Forgetful()
    rule.strength = 2.0
    fails(rule, "is every setting in the constructor?")


def test_a_constructor_that_is_not_registered() -> None:
    class Silent(ExactRule):
        name = "broken_silent"

        def __init__(self, strength: float = 1.0) -> None:
            self.strength = strength

    fails(Silent(), "decorate __init__ with `register_to_config`")


def test_rows_that_look_at_their_neighbours() -> None:
    class Crowd(AcceptanceRule):
        name = "broken_crowd"

        def accepted_mass(self, p: Tensor, q: Tensor, first: int = 0) -> Tensor:
            return torch.minimum(q, p * (3 if p.shape[0] == 1 else 1))

    fails(Crowd(), "is decided differently alone and in a batch")


def test_token_ids_that_matter() -> None:
    class Biased(AcceptanceRule):
        name = "broken_biased"

        def accepted_mass(self, p: Tensor, q: Tensor, first: int = 0) -> Tensor:
            return torch.minimum(q, p * torch.linspace(1, 2, p.shape[-1]))

    fails(Biased(), "renaming tokens changes the accepted mass")


def test_a_position_that_is_not_shifted() -> None:
    class Fixed(AcceptanceRule):
        name = "broken_fixed"

        def accepted_mass(self, p: Tensor, q: Tensor, first: int = 0) -> Tensor:
            return torch.minimum(q, p * torch.linspace(2, 1, p.shape[-2])[:, None])

    fails(Fixed(), "`first` does not shift")


def test_statements_that_contradict_each_other() -> None:
    class Contradiction(ExactRule):
        name = "broken_contradiction"
        guarantee = "unbounded"

    fails(Contradiction(), "contradicts guarantee")


def test_a_class_that_its_name_does_not_build() -> None:
    class Nameless(ExactRule):
        name = ""

    fails(Nameless(), "not this class")


def test_right_rules_pass_with_another_vocabulary_and_seed() -> None:
    check_rule(make_rule("exact"), vocab_size=7, seed=3, rounds=4000)
    check_rule(make_rule("cool_sd", eps=0.2), vocab_size=40, seed=4, rounds=4000)


def test_chi_square_has_its_level_and_its_power() -> None:
    law = torch.tensor([0.5, 0.3, 0.2, 0.0])
    assert chi_square_p_value(torch.tensor([500, 300, 200, 0]), law) == pytest.approx(1.0)
    assert chi_square_p_value(torch.tensor([5000, 3000, 2000, 1]), law) == 0.0
    assert chi_square_p_value(torch.tensor([450, 350, 200, 0]), law) == pytest.approx(0.0012727, rel=1e-3)
