"""Every rule by name: conformance, settings, errors, and the measured law against the predicted one."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mediaspec.core.law import emitted_law, one_step_drift
from mediaspec.core.rng import ACCEPT, DRAFT, TARGET, RowRng
from mediaspec.core.tree import TreeSpec
from mediaspec.core.types import Draft, Warp
from mediaspec.core.verify import VerifyInputs, verify_chain_by_mass, verify_tree_by_mass
from mediaspec.kernels.sample import sample
from mediaspec.rules import AcceptanceRule, CoolSDRule, LanternRule, available_rules, make_rule
from mediaspec.rules.budget import omega_for_budget
from mediaspec.rules.cool_sd import omega_schedule
from mediaspec.testing import check_rule

VARIANTS = [
    ("exact", {}),
    ("coupled", {}),
    ("cool_sd", {}),
    ("cool_sd", {"schedule": "cool-paper", "delta": 2.0}),
    ("cool_sd", {"schedule": "front", "delta": 1.5, "residual": "band"}),
    ("cool_sd", {"schedule": "uniform", "delta": 0.7}),
    ("cool_sd", {"eps": 0.1}),
    ("cool_sd", {"eps": 0.0}),
    ("cool_sd", {"omega": [2.0, 0.5], "ledger": "hellinger"}),
    ("lantern", {"k": 3, "delta": 0.3}),
    ("lantern++", {"k": 4}),
    ("gsd", {"group": 5}),
    ("gsd", {"group": 4, "distance_threshold": 0.5}),
    ("ensemble", {}),
]
BOOK = torch.sin(torch.arange(48.0).view(24, 2))


def with_book(rule: AcceptanceRule, book: Tensor = BOOK) -> AcceptanceRule:
    if hasattr(rule, "set_codebook"):
        rule.set_codebook(book)
    return rule


def rows(count: int, length: int, vocab: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random laws P [count, length + 1, V] and Q [count, length, V]."""
    generator = torch.Generator().manual_seed(seed)
    p = (2 * torch.randn(count, length + 1, vocab, generator=generator)).softmax(-1)
    noise = torch.randn(count, length, vocab, generator=generator)
    return p, (p[:, :length].log() + noise).softmax(-1)


def round_inputs(rule: AcceptanceRule, p: Tensor, q: Tensor, **more: object) -> VerifyInputs:
    batch, length, vocab = q.shape
    rng = RowRng(torch.arange(batch), vocab, length + 8)
    start = torch.arange(batch) % 5
    positions = start[:, None] + torch.arange(length)
    purpose = TARGET if rule.coupled else DRAFT
    tokens = sample(q.log()[:, None], Warp(), seeds=rng.seeds, positions=positions, purpose=purpose).tokens
    draft = Draft(tokens, torch.full((batch,), length), q)
    return VerifyInputs(p.log()[:, None], draft, Warp(), rng, start, **more)


@pytest.mark.parametrize("name, config", VARIANTS)
def test_conformance(name: str, config: dict) -> None:
    check_rule(with_book(make_rule(name, **config)), rounds=6000, prepare=with_book)


def test_names_and_what_they_guarantee() -> None:
    wanted = {
        "coupled": "exact-tokens",
        "exact": "exact-law",
        "cool_sd": "bounded-drift",
        "lantern++": "bounded-drift",
        "ensemble": "bounded-drift",
        "lantern": "unbounded",
        "gsd": "unbounded",
    }
    assert set(wanted) <= set(available_rules())
    assert {name: make_rule(name).guarantee for name in wanted} == wanted


def test_cool_sd_says_when_it_is_lossless() -> None:
    assert CoolSDRule(eps=0.0).lossless and CoolSDRule(omega=[1.0, 0.3]).lossless
    assert CoolSDRule(schedule="uniform", delta=0.9).lossless and CoolSDRule(delta=0.2).lossless
    assert not CoolSDRule().lossless and not CoolSDRule(eps=1e-3).lossless
    assert not CoolSDRule(omega=[0.5, 1.01]).lossless


@pytest.mark.parametrize(
    "name, config, hint",
    [
        ("cool-sd", {}, 'did you mean "cool_sd"'),
        ("exakt", {}, 'did you mean "exact"'),
        ("cool_sd", {"dleta": 2.0}, "did you mean 'delta'"),
        ("exact", {"delta": 2.0}, "it has no settings"),
        ("cool_sd", {"schedule": "cool_paper"}, 'write schedule="cool-paper"'),
        ("cool_sd", {"delta": 0.0}, "write delta=1.1"),
        ("cool_sd", {"delta": math.inf}, "write delta=1.1"),
        ("cool_sd", {"nu": -1.0}, "write nu=0.7"),
        ("cool_sd", {"length": 0}, "length=5"),
        ("cool_sd", {"eps": 1.5}, "write eps=0.05"),
        ("cool_sd", {"omega_cap": 1.0}, "write omega_cap=4.0"),
        ("cool_sd", {"schedule": "front", "delta": 0.5}, "write delta=1.1"),
        ("cool_sd", {"omega": []}, "write omega="),
        ("cool_sd", {"omega": [1.5], "eps": 0.1}, "no eps"),
        ("cool_sd", {"residual": "gster"}, 'write residual="gstar"'),
        ("cool_sd", {"ledger": "none"}, 'write ledger="'),
        ("lantern", {"k": 0}, "write k=10"),
        ("cool_sd", {"length": 2.5}, "length=5"),
        ("cool_sd", {"delta": "fast"}, "cannot be made"),
        ("cool_sd", {"omega": 2.0}, "cannot be made"),
        ("lantern", {"k": 1.5}, "write k=10"),
        ("lantern", {"lam": 3.0}, "write delta="),
        ("lantern++", {"delta": 0.5}, "write lam="),
        ("gsd", {"group": 2.5}, "write group=14"),
        ("lantern", {"delta": 5.0}, "a factor is lam"),
        ("lantern++", {"lam": 1.0}, "write lam=5.0"),
        ("gsd", {"group": 0}, "write group=14"),
        ("gsd", {"p_threshold": 0.0}, "write p_threshold=0.15"),
        ("gsd", {"distance_threshold": 0.0}, "write 0.5"),
        ("ensemble", {"weight": 1.1}, "write weight=0.9"),
    ],
)
def test_errors_say_what_to_write(name: str, config: dict, hint: str) -> None:
    with pytest.raises(ValueError) as error:
        make_rule(name, **config)
    assert hint in str(error.value)


def test_a_codebook_is_asked_for() -> None:
    rule = make_rule("lantern", k=2)
    p, q = rows(1, 1, 24, 0)
    with pytest.raises(ValueError, match="no codebook yet"):
        rule.accepted_mass(p[:, :1], q)
    with pytest.raises(ValueError, match="does not show as `codebook`"):
        rule.prepare(object())
    rule.set_codebook(BOOK[:7])
    with pytest.raises(ValueError, match="7 codes and the target 24 tokens"):
        rule.accepted_mass(p[:, :1], q)

    class Target:
        codebook = BOOK

    rule.prepare(Target())
    assert rule.accepted_mass(p[:, :1], q).shape == q.shape
    distant = make_rule("gsd", distance_threshold=0.5)
    with pytest.raises(ValueError, match="distance_threshold"):
        distant.prepare(object())
    distant.prepare(Target())
    assert torch.equal(distant.codebook, BOOK)


def test_a_rule_of_ones_own_is_found_by_name_and_checked() -> None:
    class HalfRule(AcceptanceRule):
        name = "test_half"
        lossless = True

        def linear(self, length: int) -> tuple[Tensor, Tensor]:
            return torch.full((length,), 0.5), torch.zeros(length)

    try:
        rule = make_rule("test_half")
        assert isinstance(rule, HalfRule)
        with pytest.raises(TypeError, match="HalfRule has that name"):
            type("OtherRule", (HalfRule,), {})
        with pytest.raises(TypeError, match="must define"):
            type("EmptyRule", (AcceptanceRule,), {"name": "test_empty"})
    finally:
        del AcceptanceRule.registry["test_half"]


@pytest.mark.parametrize("name, config", VARIANTS)
def test_saved_as_a_scheduler_and_strict_on_loading(name: str, config: dict, tmp_path: Path) -> None:
    rule = make_rule(name, **config)
    rule.save_pretrained(tmp_path)
    file = tmp_path / "scheduler_config.json"
    content = json.loads(file.read_text())
    assert content["_class_name"] == type(rule).__name__
    assert all(content[key] == value for key, value in config.items())
    assert type(rule).from_pretrained(tmp_path).bound(4).tolist() == rule.bound(4).tolist()
    file.write_text(json.dumps({**content, "detla": 1.0}))
    with pytest.raises(ValueError, match="no setting 'detla'"):
        type(rule).from_pretrained(tmp_path)


def test_schedules_keep_their_mean_and_end_in_one() -> None:
    for schedule in ("cool-paper", "front", "uniform", "linear"):
        for delta in (1.1, 2.0):
            assert sum(omega_schedule(schedule, 5, delta)) / 5 == pytest.approx(delta)
    assert omega_schedule("front", 5, 2.0, omega_cap=4.0) == pytest.approx([4, 3, 1, 1, 1])
    assert min(omega_schedule("cool", 5, 1.1)) == 1
    assert make_rule("cool_sd", length=2).linear(4)[0].tolist()[2:] == [1, 1]
    assert make_rule("cool_sd", schedule="uniform", delta=1.5, length=2).linear(4)[0].tolist() == [1.5] * 4


def laws(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    vocab = draw(st.integers(2, 9))
    weights = st.lists(st.integers(0, 20), min_size=vocab, max_size=vocab).filter(any)
    p, q = (torch.tensor(draw(weights), dtype=torch.float64) for _ in range(2))
    return p / p.sum(), q / q.sum()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.composite(laws)(), st.lists(st.floats(0.1, 20), min_size=2, max_size=2))
def test_facts_of_one_relaxed_step(pair: tuple[Tensor, Tensor], omegas: list[float]) -> None:
    p, q = pair
    low, high = sorted(omegas)
    alpha_exact = torch.minimum(p, q).sum()
    previous = -1.0
    for omega in (low, high):
        for residual in ("gstar", "band"):
            a = CoolSDRule(omega=[omega], residual=residual).accepted_mass(p[None], q[None])[0]
            m, drift = emitted_law(p, a, residual), one_step_drift(p, a)
            assert float(m.sum()) == pytest.approx(1, abs=1e-9)
            assert float(0.5 * (m - p).abs().sum()) == pytest.approx(float(drift), abs=1e-8)
            assert not a[p == 0].any()
            if omega >= 1:
                assert float(drift) == pytest.approx(float(a.sum() - alpha_exact), abs=1e-9)
                assert float(drift) <= 1 - 1 / omega + 1e-9
                assert (m <= torch.maximum(p, q) + 1e-8).all() and (m >= torch.minimum(p, q) - 1e-8).all()
            else:
                assert float(drift) == 0
        assert float(a.sum()) >= previous
        previous = float(a.sum())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.composite(laws)(), st.floats(0, 1))
def test_budgets_are_spent_exactly(pair: tuple[Tensor, Tensor], eps: float) -> None:
    p, q = pair
    omega = omega_for_budget(p, q, eps)
    most = torch.where(p > 0, (q - p).clamp(min=0), 0.0).sum()  # drift of accepting all that can be accepted
    if torch.isinf(omega):
        assert float(most) <= eps + 1e-9
    else:
        drift = one_step_drift(p, torch.minimum(q, omega * p))
        assert float(omega) >= 1 and float(drift) == pytest.approx(eps, abs=1e-9)
    a = CoolSDRule(eps=eps).accepted_mass(p[None], q[None])[0]
    assert float(one_step_drift(p, a)) <= eps + 1e-9


def test_batched_budgets_equal_single_ones_and_hold_in_float32() -> None:
    p, q = rows(64, 3, 2048, 3)
    p = p[:, :3]
    together = omega_for_budget(p, q, 0.07)
    alone = torch.stack([omega_for_budget(p[b, i], q[b, i], 0.07) for b in range(64) for i in range(3)])
    torch.testing.assert_close(together.flatten(), alone)
    drift = one_step_drift(p, CoolSDRule(eps=0.07).accepted_mass(p, q))
    assert float(drift.max()) < 0.07 + 1e-5 and float(drift.min()) > 0.0699


@pytest.mark.parametrize("config", [{}, {"delta": 2.0, "residual": "band"}, {"schedule": "cool-paper"}])
def test_kernel_and_generic_paths_agree(config: dict) -> None:
    rule = CoolSDRule(**config)
    p, q = rows(400, 4, 32, 1)
    lengths = torch.arange(400) % 5
    forced = torch.full((400, 5), -1)
    forced[::7, 1] = 3
    inputs = round_inputs(rule, p, q, forced=forced, need_probs=True)
    tokens = torch.where(forced[:, :4] >= 0, forced[:, :4], inputs.draft.tokens)
    draft = Draft(tokens, lengths, inputs.draft.probs)
    inputs = VerifyInputs(**{**vars(inputs), "draft": draft})
    fused, generic = rule.verify(inputs), verify_chain_by_mass(rule, inputs)
    assert torch.equal(fused.num_accepted, generic.num_accepted)
    assert torch.equal(fused.next_token, generic.next_token)
    torch.testing.assert_close(fused.drift, generic.drift, atol=1e-6, rtol=0)
    torch.testing.assert_close(fused.target_probs, generic.target_probs)
    assert (fused.drift[::7, 1] == 0).all() and float(fused.drift.sum()) > 0


@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.parametrize("config", [{"delta": 2.0}, {"schedule": "cool-paper", "residual": "band"}])
def test_kernel_and_generic_paths_agree_on_trees(config: dict, sampled: bool) -> None:
    rule, batch, vocab = CoolSDRule(**config), 300, 12
    tree = TreeSpec.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
    generator = torch.Generator().manual_seed(5)
    p = torch.randn(batch, tree.num_nodes + 1, vocab, generator=generator)
    noise = torch.randn(batch, len(tree.internal), vocab, generator=generator)
    q = (p[:, list(tree.internal)] + noise).softmax(-1)
    rng, start = RowRng(torch.arange(batch), vocab, 16), torch.arange(batch) % 6
    depth = torch.tensor([tree.depth[row] for row in tree.internal])
    positions = start[:, None] + depth
    drawn = sample(q.log()[:, None], Warp(), seeds=rng.seeds, positions=positions, purpose=DRAFT, width=3).tokens
    tokens = torch.cat([drawn[:, i, : len(tree.children[row])] for i, row in enumerate(tree.internal)], 1)
    draft = Draft(tokens, torch.arange(batch) % 4, q if sampled else None, tree)
    forced = torch.full((batch, tree.max_depth + 1), -1)
    forced[::5, 0] = tokens[::5, 1]
    inputs = VerifyInputs(p[:, None], draft, Warp(top_k=8), rng, start, forced=forced, need_probs=True)
    fused, generic = rule.verify(inputs), verify_tree_by_mass(rule, inputs)
    assert torch.equal(fused.num_accepted, generic.num_accepted)
    assert torch.equal(fused.next_token, generic.next_token)
    assert torch.equal(fused.path, generic.path)
    torch.testing.assert_close(fused.drift, generic.drift, atol=1e-5, rtol=0)
    assert int(fused.num_accepted.max()) >= 2 and float(fused.drift.sum()) > 0


def test_the_hellinger_ledger_does_not_change_decisions() -> None:
    p, q = rows(200, 3, 16, 2)
    plain = round_inputs(CoolSDRule(), p, q)
    one, other = CoolSDRule().verify(plain), CoolSDRule(ledger="hellinger").verify(plain)
    assert torch.equal(one.num_accepted, other.num_accepted) and torch.equal(one.next_token, other.next_token)
    assert one.hellinger is None and other.hellinger.shape == (200, 3)
    assert ((other.hellinger > 1e-6) <= (other.drift > 0)).all()


@pytest.mark.parametrize(
    "name, config",
    [("cool_sd", {"delta": 2.0}), ("cool_sd", {"eps": 0.15, "residual": "band"}), ("lantern++", {"k": 3}),
     ("lantern", {"k": 3, "delta": 0.2}), ("gsd", {"group": 5}), ("ensemble", {"weight": 0.6})],
)  # fmt: skip
def test_measured_tv_is_the_predicted_one(name: str, config: dict) -> None:
    """TV(m, P) = m(S) - P(S), S = {m > P}: the frequency of S is unbiased. 3 standard errors, 30,000 rounds."""
    rule, rounds = with_book(make_rule(name, **config)), 30_000
    p, q = rows(1, 1, 24, 11)
    a = rule.accepted_mass(p[0, :1], q[0])[0]
    law, drift = emitted_law(p[0, 0], a, rule.residual), float(one_step_drift(p[0, 0], a))
    inputs = round_inputs(rule, p.expand(rounds, -1, -1), q.expand(rounds, -1, -1))
    verdict = rule.verify(inputs)
    emitted = torch.where(verdict.num_accepted > 0, inputs.draft.tokens[:, 0], verdict.next_token)
    surplus = law > p[0, 0]
    share, wanted = float(surplus[emitted].double().mean()), float(law[surplus].sum())
    error = math.sqrt(wanted * (1 - wanted) / rounds)
    measured = share - float(p[0, 0][surplus].sum())
    assert drift > 0.04
    assert abs(measured - drift) < 3 * error
    assert float(verdict.drift.mean()) == pytest.approx(drift, abs=1e-5)


def test_coupled_acceptance_has_its_closed_form() -> None:
    p, q = torch.tensor([0.4, 0.3, 0.2, 0.1]), torch.tensor([0.1, 0.2, 0.3, 0.4])
    a = make_rule("coupled").accepted_mass(p[None], q[None])[0]
    direct = 1 / torch.maximum(p / p[:, None], q / q[:, None]).sum(1)
    torch.testing.assert_close(a, direct)
    tv = 0.5 * float((p - q).abs().sum())
    assert (1 - tv) / (1 + tv) <= float(a.sum()) <= 1 - tv


def test_choices_and_drafts_of_a_coupled_rule() -> None:
    rule = make_rule("coupled")
    p, q = rows(300, 3, 16, 4)
    inputs = round_inputs(rule, p, q, need_choices=True)
    verdict = rule.verify(inputs)
    positions = inputs.start[:, None] + torch.arange(4)
    plain = sample(p.log()[:, None], Warp(), seeds=inputs.rng.seeds, positions=positions, purpose=TARGET).tokens
    assert torch.equal(verdict.choices, plain)
    agree = (plain[:, :3] == inputs.draft.tokens).long().cumprod(1).sum(1)
    assert torch.equal(verdict.num_accepted, agree)


def test_lantern_prefers_the_nearest_codes() -> None:
    rule = LanternRule(k=2, delta=0.5)
    rule.set_codebook(torch.tensor([[0.0], [1.0], [1.5], [9.0]]))
    assert rule.neighbours.tolist() == [[1, 2], [2, 0], [1, 0], [2, 1]]


def test_uniform_numbers_of_siblings_differ() -> None:
    rng = RowRng(torch.arange(4), 8, 16)
    positions = torch.arange(5).expand(4, -1)
    assert not torch.equal(rng.uniform(positions, ACCEPT, 0), rng.uniform(positions, ACCEPT, 1))
