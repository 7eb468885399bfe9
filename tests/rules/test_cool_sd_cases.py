"""All 59 reference cases of relaxed speculative sampling (tests/data/cool_sd_cases.json), one test each."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mediaspec.core.law import residual_weights
from mediaspec.core.types import Draft, Warp
from mediaspec.core.verify import VerifyInputs, verify_chain_by_mass
from mediaspec.rules import CoolSDRule, EnsembleRule, GSDRule, LanternRule
from mediaspec.rules.budget import omega_for_budget

from .exact_laws import GivenNumbers, chain_round, fixed_children, sampled_children, sequence_law, step

CASES = json.loads((Path(__file__).parents[1] / "data" / "cool_sd_cases.json").read_text())
ATOL = CASES["tolerance"]
KINDS = {"exp": "cool-paper", "linear": "linear", "uniform": "uniform"}


def cases(*prefixes: str) -> list:
    chosen = [case for case in CASES["cases"] if case["name"].startswith(prefixes)]
    assert chosen
    return [pytest.param(case["input"], case["expected"], id=case["name"]) for case in chosen]


def row(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(got: object, wanted: object) -> None:
    torch.testing.assert_close(
        torch.as_tensor(got, dtype=torch.float64), torch.as_tensor(wanted, dtype=torch.float64), rtol=0, atol=ATOL
    )


def test_there_are_59_cases_and_each_is_run() -> None:
    run = (
        "schedule/", "one_step/", "degenerate/", "bias/", "chain/", "annealing/", "sequence/", "tree/siblings/",
        "tree/where_to_relax", "tree/deterministic/", "lantern/", "gsd/", "ensemble/", "iid/", "budget/", "verify/",
    )  # fmt: skip
    assert len(CASES["cases"]) == 59
    assert all(case["name"].startswith(run) for case in CASES["cases"])


@pytest.mark.parametrize("given, expected", cases("schedule/"))
def test_schedule(given: dict, expected: dict) -> None:
    schedule = "cool" if given["clamp_min"] == 1.0 else KINDS[given["kind"]]
    rule = CoolSDRule(schedule=schedule, delta=given["delta"], nu=given["nu"], length=given["L"])
    scale, offset = rule.linear(given["L"])
    close(scale, expected["omega"])
    assert not offset.any()


@pytest.mark.parametrize("given, expected", cases("one_step/", "degenerate/"))
def test_one_step(given: dict, expected: dict) -> None:
    p, q = row(given["P"]), row(given["Q"])
    one = step(CoolSDRule(omega=[given["omega"]]), p, q, 0)
    for key in ("a", "alpha", "R", "G", "m", "e"):
        if key in expected:
            close(one[key], expected[key])
    close(0.5 * (one["m"] - p).abs().sum(), expected["tv"])
    if "m_band" in expected:
        band = step(CoolSDRule(omega=[given["omega"]], residual="band"), p, q, 0)
        close(band["m"], expected["m_band"])
        close(0.5 * (band["m"] - p).abs().sum(), expected["tv_band"])
        close((p * (p / one["m"]).log()).sum(), expected["kl_P_m"])
        close((p * (p / band["m"]).log()).sum(), expected["kl_P_m_band"])
        if "G_band" in expected:
            close(band["G"], expected["G_band"])


@pytest.mark.parametrize("given, expected", cases("bias/"))
def test_the_standard_residual_is_wrong_below_one_and_ours_is_right(given: dict, expected: dict) -> None:
    p, q = row(given["P"]), row(given["Q"])
    one = step(CoolSDRule(omega=[given["omega"]]), p, q, 0)
    standard = residual_weights(p, torch.minimum(p, q))
    wrong = one["a"] + one["R"] * standard / standard.sum()
    close(wrong, expected["m_wrong"])
    close(0.5 * (wrong - p).abs().sum(), expected["tv_wrong"])
    close(0.5 * (one["m"] - p).abs().sum(), expected["tv_gstar"])


@pytest.mark.parametrize("given, expected", cases("chain/"))
def test_chain(given: dict, expected: dict) -> None:
    got = chain_round(CoolSDRule(omega=given["omegas"]), given["V"], len(given["omegas"]))
    for key in ("tv", "bound", "mean_accepted", "p_all_accepted"):
        close(got[key], expected[key])
    if "phat" in expected:
        close([got["law"][key] for key in sorted(got["law"])], expected["phat"])
        close([got["target"][key] for key in sorted(got["target"])], expected["p"])
    assert got["tv"] <= got["bound"] + ATOL


@pytest.mark.parametrize("given, expected", cases("annealing/"))
def test_annealing(given: dict, expected: dict) -> None:
    bounds = []
    for name in ("front", "uniform", "back"):
        got = chain_round(CoolSDRule(omega=expected[name]["omegas"]), given["V"], 2)
        close(got["mean_accepted"], given["N"])
        close(got["bound"], expected[name]["bound"])
        close(got["tv"], expected[name]["tv"])
        bounds.append(got["bound"])
    assert bounds == sorted(bounds)


@pytest.mark.parametrize("given, expected", cases("sequence/"))
def test_sequence(given: dict, expected: dict) -> None:
    rule = CoolSDRule(omega=given["omegas"], residual=given["residual"])
    got = sequence_law(rule, given["V"], len(given["omegas"]), given["T"])
    for key in ("tv", "ledger", "rounds", "bc", "bc_ledger"):
        close(got[key], expected[key])
    bound = math.sqrt(max(0.0, 1 - got["bc"] ** 2)) if got["bc"] < 1 - 1e-12 else 0.0
    close(bound, expected["h_bound"])
    assert got["tv"] <= min(bound, got["ledger"]) + ATOL


@pytest.mark.parametrize("given, expected", cases("tree/siblings/"))
def test_sampled_children(given: dict, expected: dict) -> None:
    rules = [CoolSDRule(omega=[omega]) for omega in given["omegas"]]
    got = sampled_children(rules, row(given["P"]), row(given["Q"]))
    for key in ("m", "tv", "accept", "bound"):
        close(got[key], expected[key])


@pytest.mark.parametrize("given, expected", cases("tree/where_to_relax"))
def test_where_to_relax(given: dict, expected: dict) -> None:
    for one in expected.values():
        rules = [CoolSDRule(omega=[omega]) for omega in one["omegas"]]
        got = sampled_children(rules, row(given["P"]), row(given["Q"]))
        for key in ("tv", "accept", "bound"):
            close(got[key], one[key])
    assert expected["last_only"]["tv"] == min(one["tv"] for one in expected.values())


@pytest.mark.parametrize("given, expected", cases("tree/deterministic/"))
def test_fixed_children(given: dict, expected: dict) -> None:
    rules = [CoolSDRule(omega=[given["omega"]])] * len(given["tokens"])
    got = fixed_children(rules, row(given["P"]), given["tokens"])
    for key in ("m", "tv", "accept"):
        close(got[key], expected[key])


@pytest.mark.parametrize("given, expected", cases("lantern/"))
def test_lantern(given: dict, expected: dict) -> None:
    p, q, x = row(given["P"]), row(given["Q"]), given["x"]
    if given["delta"] > 1:
        rule = LanternRule(variant="lantern++", k=given["k"], lam=given["delta"])
    else:
        rule = LanternRule(k=given["k"], delta=given["delta"])
    rule.set_codebook(torch.tensor([[0.0], [1.0], [3.0], [7.0]]))  # code 0 has the neighbours 1, 2, 3
    assert given["neighbours"][: given["k"]] == rule.neighbours[x].tolist()
    close(rule.accept_prob(p[None], q[None])[0, x], expected["accept"])
    borrowed = sum(given["P"][code] for code in given["neighbours"][: expected["n_neighbours"]])
    close(given["P"][x] + borrowed, expected["p_relaxed"])


@pytest.mark.parametrize("given, expected", cases("gsd/"))
def test_gsd(given: dict, expected: dict) -> None:
    rule = GSDRule(group=given["G"], p_threshold=given["p_thr"])
    close(rule.accept_prob(row(given["P"])[None], row(given["Q"])[None])[0, given["x"]], expected["accept"])


@pytest.mark.parametrize("given, expected", cases("ensemble/"))
def test_ensemble(given: dict, expected: dict) -> None:
    one = step(EnsembleRule(weight=given["w"]), row(given["P"]), row(given["Q"]), 0)
    close(one["alpha"], expected["alpha"])
    close(one["m"], expected["m"])
    close(one["e"], expected["tv"])


@pytest.mark.parametrize("given, expected", cases("iid/"))
def test_iid_schedules(given: dict, expected: dict) -> None:
    p, q, length = row(given["P"]), row(given["Q"]), given["L"]
    rules = {
        "vanilla": CoolSDRule(omega=[1.0] * length),
        "exp_raw_delta1.1": CoolSDRule(schedule="cool-paper", delta=1.1),
        "exp_clamped_delta1.1": CoolSDRule(delta=1.1),
        "uniform_same_N": CoolSDRule(schedule="uniform", delta=expected["uniform_same_N"]["omegas"][0]),
        "exp_raw_same_N": CoolSDRule(schedule="cool-paper", delta=expected["exp_raw_same_N"]["delta"]),
        "front_loaded_cap4_same_N": CoolSDRule(
            schedule="front", delta=sum(expected["front_loaded_cap4_same_N"]["omegas"]) / length, omega_cap=4.0
        ),
    }
    assert rules.keys() == expected.keys()
    for name, rule in rules.items():
        mass, accepted, bound = 1.0, 0.0, 0.0
        for i in range(length):
            one = step(rule, p, q, i)
            close(one["alpha"], expected[name]["alpha"][i])
            bound += mass * float(one["e"])
            mass *= float(one["alpha"])
            accepted += mass
        close(accepted, expected[name]["N"])
        close(bound, expected[name]["B"])
        close(mass, expected[name]["A_L"])
        if "omegas" in expected[name]:
            close(rule.linear(length)[0], expected[name]["omegas"])


@pytest.mark.parametrize("given, expected", cases("budget/"))
def test_budget(given: dict, expected: dict) -> None:
    p, q = row(given["P"]), row(given["Q"])
    omega = omega_for_budget(p, q, given["eps"])
    close(omega, float(expected["omega"]))
    one = step(CoolSDRule(eps=given["eps"]), p, q, 0)
    close(one["e"], expected["e"])
    close(one["alpha"], expected["alpha"])


@pytest.mark.parametrize("path", ["kernel", "generic"])
@pytest.mark.parametrize("given, expected", cases("verify/"))
def test_verify_case(given: dict, expected: dict, path: str) -> None:
    """Given uniforms and noise, float32; the kernel path runs whatever MEDIASPEC_KERNELS selects."""
    rule = CoolSDRule(omega=given["omegas"])
    p, q, draft = (torch.tensor(given[key]) for key in ("p", "q", "draft"))
    batch, length = draft.shape
    start = torch.full((batch,), 5)
    noise = torch.tensor(given["noise"])[:, None].expand(-1, length + 1, -1)
    rng = GivenNumbers(start, torch.tensor(given["u_acc"]), noise)
    inputs = VerifyInputs(p.log()[:, None], Draft(draft, torch.full((batch,), length), q), Warp(), rng, start)
    verdict = rule.verify(inputs) if path == "kernel" else verify_chain_by_mass(rule, inputs)
    assert verdict.num_accepted.tolist() == expected["n_accepted"]
    assert verdict.next_token.tolist() == expected["next_exp"]
    torch.testing.assert_close(verdict.drift.sum(1), torch.tensor(expected["ledger"]), rtol=0, atol=1e-5)

    for b, n in enumerate(expected["n_accepted"]):  # the residual's law, by the inverse distribution function
        a = rule.accepted_mass(p[b, :length], q[b])[n] if n < length else torch.zeros_like(p[b, n])
        weights = residual_weights(p[b, n], a).double()
        drawn = torch.searchsorted(weights.cumsum(0), given["u_res"][b] * weights.sum(), side="right")
        assert int(drawn) == expected["next"][b]


def test_verify_cases_through_the_triton_interpreter() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "MEDIASPEC_KERNELS": "triton"}
    command = [sys.executable, "-m", "pytest", "-v", f"{__file__}::test_verify_case", "-k", "kernel"]
    done = subprocess.run(
        command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "3 passed" in done.stdout
