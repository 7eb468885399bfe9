"""How well policies choose: replays of three tasks against the best fixed arm in hindsight, and drafters that lie."""

from __future__ import annotations

import random

import pytest

from mediaspec.policies import PLAIN, Arm, Outcome, make_policy

from .traces import TASKS, Machine, best_fixed, replay

MACHINES = {
    "laptop": Machine(),
    "flat passes": Machine(draft={"ngram": 0.0, "head": 0.03, "hostile": 0.03}, verify=0.01, fixed=0.05),
    "dear drafts": Machine(draft={"ngram": 0.002, "head": 0.2, "hostile": 0.2}, verify=0.05),
}


@pytest.fixture(scope="module")
def best() -> dict[str, float]:
    return {task: best_fixed(task, MACHINES["laptop"]) for task in TASKS}


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    ("name", "least", "scored"),
    [("survival", 0.96, False), ("ucb", 0.90, False), ("thompson", 0.90, False), ("hedge", 0.96, True)],
)
def test_near_the_best_fixed_arm(name: str, least: float, scored: bool, task: str, best: dict[str, float]) -> None:
    shares = []
    for seed in (11, 12):
        run = replay(make_policy(name, seed=seed), task, MACHINES["laptop"], seed=seed, scored=scored)
        shares.append(run.rate / best[task])
    assert sum(shares) / len(shares) >= least, shares


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("machine", ["flat passes", "dear drafts"])
def test_survival_on_other_machines(machine: str, task: str) -> None:
    run = replay(make_policy("survival"), task, MACHINES[machine], seed=13)
    assert run.rate >= 0.96 * best_fixed(task, MACHINES[machine])


@pytest.mark.parametrize("name", ["survival", "budget", "ucb", "thompson", "hedge", "exp3"])
@pytest.mark.parametrize("draft", [0.01, 0.08, 0.5, 3.0])
def test_a_hostile_drafter_costs_little(name: str, draft: float) -> None:
    machine, policy, dice = Machine(draft={"hostile": draft}), make_policy(name, seed=5), random.Random(3)
    policy.begin(["hostile"])
    spent = []
    for place in range(450):
        choice = policy.choose([0], place)
        cost = machine.cost(choice.arm, choice.arm.num_draft_tokens, 0)
        seconds = cost * max(0.2, 1.0 + 0.05 * dice.gauss(0.0, 1.0))
        policy.observe(choice, Outcome([0], seconds, agreement={"hostile": [[0.0]]} if name == "hedge" else None))
        spent.append(cost / machine.plain)
    assert sum(spent[50:]) / 400 <= 1.03


@pytest.mark.parametrize("name", ["survival", "ucb", "thompson"])
def test_a_hostile_drafter_beside_a_good_one(name: str) -> None:
    machine = MACHINES["laptop"]
    alone = replay(make_policy(name, seed=2), "chat", machine, drafters=["head"], seed=1)
    both = replay(make_policy(name, seed=2), "chat", machine, drafters=["hostile", "head"], seed=1)
    after = [sum(run.gains[50:]) / sum(run.costs[50:]) for run in (alone, both)]
    assert after[1] >= 0.97 * after[0]


def test_zero_acceptance_is_off_within_20_rounds_and_probed_every_32() -> None:
    policy = make_policy("survival", costs=[1.0 + 0.1 * length for length in range(9)])
    policy.begin(["ngram"])
    arms = []
    for _ in range(500):
        choice = policy.choose([0])
        arms.append(choice.arm)
        policy.observe(choice, Outcome([0]))
    on = [number for number, arm in enumerate(arms) if not arm.off and number >= 20]
    assert arms[20:52].count(PLAIN) >= 31 and on
    gaps = {after - before for before, after in zip(on, on[1:])}
    assert gaps == {32} and {arms[number].num_draft_tokens for number in on} == {1}


@pytest.mark.parametrize(("name", "rounds"), [("survival", 200), ("thompson", 300), ("ucb", 900)])
def test_a_drafter_that_turns_good_is_found_again(name: str, rounds: int) -> None:
    settings = {"ucb": {"forget": 0.99}}.get(name, {})
    policy = make_policy(name, arms=[PLAIN.to_dict(), Arm("head", 4).to_dict()], costs=[1.0, 1.4], seed=1, **settings)
    policy.begin(["head"])
    for _ in range(200):
        policy.observe(policy.choose([0]), Outcome([0]))
    assert policy.choose([0]).arm.off
    used = 0
    for _ in range(rounds):
        choice = policy.choose([0])
        used += not choice.arm.off
        policy.observe(choice, Outcome([choice.arm.num_draft_tokens]))
    assert not policy.choose([0]).arm.off and used >= 5


def test_a_drafter_that_turns_bad_is_left() -> None:
    policy = make_policy("survival", costs=[1.0 + 0.1 * length for length in range(9)])
    policy.begin(["head"])
    for _ in range(200):
        choice = policy.choose([0])
        assert choice.arm.num_draft_tokens == 8 or choice.probe
        policy.observe(choice, Outcome([choice.arm.num_draft_tokens]))
    arms = []
    for _ in range(150):
        choice = policy.choose([0])
        arms.append(choice.arm.off)
        policy.observe(choice, Outcome([0]))
    assert arms.index(True) <= 40 and arms[60:].count(False) <= 4


def test_learned_state_starts_the_next_request_well() -> None:
    machine, policy = MACHINES["laptop"], make_policy("survival")
    first, again = (replay(policy, "copy", machine, seed=4) for _ in range(2))
    assert first.arms[0].off and not any(arm.off for arm in again.arms[:20])  # nothing is measured anew
    cold, warm = (sum(run.gains[:20]) / sum(run.costs[:20]) for run in (first, again))
    assert warm > 1.02 * cold
