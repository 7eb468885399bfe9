"""The losslessness and shared-noise cases of the language specification, through this library's rules and kernels."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from mediaspec.core.law import emitted_law, point_mass, residual_weights
from mediaspec.kernels.sample.reference import best, draw
from mediaspec.rules import make_rule

CASES = json.loads((Path(__file__).parents[1] / "data" / "language_cases.json").read_text())
INPUTS, EXPECTED = CASES["losslessness"]["inputs"], CASES["losslessness"]["expected"]
P, Q = torch.tensor([INPUTS["p"]]), torch.tensor([INPUTS["q"]])


def close(got: torch.Tensor, wanted: object) -> None:
    torch.testing.assert_close(got.double().flatten(), torch.tensor(wanted).double().flatten(), atol=1e-6, rtol=0)


def test_a_sampled_draft() -> None:
    a = make_rule("exact").accepted_mass(P, Q)
    close(a.sum(), EXPECTED["standard_accept"])
    weights = residual_weights(P, a)
    close(weights / weights.sum(), EXPECTED["residual"])
    close(emitted_law(P, a), EXPECTED["standard_law"])
    close(1 - (P - Q).abs().sum() / 2, EXPECTED["one_minus_tv"])


def test_deterministic_drafts() -> None:
    """Point masses, one after the other: what is left of P after a rejection is P without the token."""
    rule, law, left, accepted = make_rule("exact"), torch.zeros_like(P), 1.0, 0.0
    p = P
    for token in INPUTS["point_children"]:
        a = rule.accepted_mass(p, point_mass(torch.tensor([token]), P.shape[1]))
        law, accepted = law + left * a, accepted + left * float(a.sum())
        left *= 1 - float(a.sum())
        weights = residual_weights(p, a)
        p = weights / weights.sum()
    close(torch.tensor(accepted), EXPECTED["point_accept"])
    close(law + left * p, EXPECTED["point_law"])


def test_independent_children_of_one_law() -> None:
    """Children drawn with replacement: every rejection leaves [P - Q]_+, and Q stays as it was. The law of a tree with
    siblings that may be equal, by the same two functions that verify a chain; exact in law at .874 accepted."""
    rule, p, law, accepted, left = make_rule("exact"), P, torch.zeros_like(P), 0.0, 1.0
    for _ in range(INPUTS["iid_children"]):
        a = rule.accepted_mass(p, Q)
        law, accepted = law + left * a, accepted + left * float(a.sum())
        left *= 1 - float(a.sum())
        weights = residual_weights(p, a)
        p = weights / weights.sum()
    close(torch.tensor(accepted), EXPECTED["iid_accept"])
    close(law + left * p, EXPECTED["iid_law"])
    close(law + left * p, INPUTS["p"])


def test_a_soft_law_for_an_argmax_draft_is_wrong() -> None:
    """The mistake to avoid: a token chosen by argmax tested with P/Q as if it had been sampled from Q, and P itself
    drawn from after a rejection."""
    token = int(Q.argmax())
    taken = torch.zeros_like(P)
    taken[0, token] = min(1.0, float(P[0, token] / Q[0, token]))
    broken = taken + (1 - taken.sum()) * P
    close(broken, EXPECTED["broken_law"])
    close((broken - P).abs().sum() / 2, EXPECTED["broken_tv"])
    assert EXPECTED["broken_tv"] > 0.4


def test_the_acceptance_of_shared_noise() -> None:
    close(make_rule("coupled").accepted_mass(P, Q).sum(), EXPECTED["gumbel_coupling_accept"])
    tv = float((P - Q).abs().sum() / 2)
    close(torch.tensor((1 - tv) / (1 + tv)), EXPECTED["gumbel_coupling_lower_bound"])
    assert EXPECTED["gumbel_coupling_lower_bound"] < EXPECTED["gumbel_coupling_accept"] < EXPECTED["one_minus_tv"]


def test_draws_with_shared_noise() -> None:
    inputs, expected = CASES["shared_noise"]["inputs"], CASES["shared_noise"]["expected"]
    noise = torch.tensor(inputs["gumbel"]).neg().exp()  # E = exp(-g), and argmax(p / E) = argmax(log p + g)
    p, q = torch.tensor(inputs["p"]), torch.tensor(inputs["q"])
    target, children = draw(p.expand_as(noise), noise), best(q / noise, 2)
    assert target.tolist() == expected["target"] and children.tolist() == expected["children_w2"]
    assert (children[:, 0] == target).long().tolist() == expected["match_w1"]
    assert (children == target[:, None]).any(1).long().tolist() == expected["match_w2"]


def test_acceptance_of_one_to_three_children_with_shared_noise() -> None:
    """The case's figures are means of 200,000 draws, as these are: both have a standard error of at most .0009, so
    five standard errors of their difference are .0061 (one child), .0036 and .0016."""
    case = CASES["shared_noise"]
    close(make_rule("coupled").accepted_mass(P, Q).sum(), case["expected"]["accept_w1_exact"])
    noise = torch.empty(200_000, 5).exponential_(generator=torch.Generator().manual_seed(17))
    target, children = draw(P.expand_as(noise), noise), best(Q / noise, 3)
    for width, wanted in enumerate(case["expected"]["accept_monte_carlo_w1_w2_w3"], start=1):
        found = float((children[:, :width] == target[:, None]).any(1).double().mean())
        assert abs(found - wanted) < 5 * (2 * wanted * (1 - wanted) / 200_000) ** 0.5
