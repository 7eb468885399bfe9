"""The contract of all policies: arms, replay, saving, censoring, errors."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from mediaspec.core.tree import TreeSpec
from mediaspec.policies import PLAIN, Arm, Choice, DraftPolicy, Outcome, available_policies, make_arms, make_policy
from mediaspec.policies.base import Learner
from mediaspec.policies.cost import CostTable
from mediaspec.policies.levels import Levels
from mediaspec.policies.survival import level_rates

ROOT = Path(__file__).resolve().parents[2]
NAMES = ["fixed", "survival", "budget", "ucb", "exp3", "thompson", "hedge"]
RATES = {"ngram": 0.4, "head": 0.7}


@dataclass
class Turns(Learner):
    rounds: list[float]


class RoundRobinPolicy(DraftPolicy):
    """A third party's policy: one file, one class."""

    name = "test_round_robin"

    def _fresh(self) -> Turns:
        return Turns([0.0] * len(self.arms))

    def _pick(self, rows, costs, usable) -> int:
        return min(usable, key=lambda arm: self.learner.rounds[arm])

    def _learn(self, choice, outcome, costs) -> None:
        self.learner.rounds[choice.index] += 1


def decode(policy: DraftPolicy, rounds: int, dice: random.Random, batch: int = 2, start: int = 0) -> list[Choice]:
    """Some rounds of a batch whose drafts are accepted with fixed rates, with cuts and noisy seconds."""
    choices = []
    for number in range(start, start + rounds):
        choice = policy.choose(range(batch), 100 + 3 * number)
        depth = choice.arm.num_draft_tokens
        own = choice.lengths or [depth] * batch
        limit = [min(most, dice.choice([2, 9, 9, 9])) for most in own]
        accepted = []
        for most in limit:
            m = 0
            while m < most and dice.random() < RATES[choice.arm.drafter]:
                m += 1
            accepted.append(m)
        seconds = 0.02 * (1 + 0.1 * depth) * (0.9 + 0.2 * dice.random())
        policy.observe(choice, Outcome(accepted, seconds, limit if depth else None))
        choices.append(choice)
    return choices


@pytest.mark.parametrize("name", [*NAMES, "test_round_robin"])
def test_replay_and_resume_are_exact(name: str, tmp_path: Path) -> None:
    def fresh() -> DraftPolicy:
        policy = make_policy(name) if name == "fixed" else make_policy(name, seed=2**40 + 3)
        policy.begin(list(RATES), model="tiny")
        return policy

    once, again, dice = fresh(), fresh(), random.Random(9)
    whole = decode(once, 240, random.Random(9))
    first = decode(again, 120, dice)
    again.save_pretrained(tmp_path)
    resumed = type(again).from_pretrained(tmp_path)
    assert resumed.state_dict() == again.state_dict()
    rest = decode(resumed, 120, dice, start=120)
    assert [(c.index, c.lengths, c.probe) for c in first + rest] == [(c.index, c.lengths, c.probe) for c in whole]
    assert resumed.state_dict() == once.state_dict()
    assert json.loads(json.dumps(once.state_dict())) == once.state_dict()


@pytest.mark.parametrize("name", ["survival", "ucb", "thompson", "hedge"])
def test_given_costs_make_the_clock_irrelevant(name: str) -> None:
    runs = []
    for speed in (1.0, 50.0):
        policy = make_policy(name, arms=[arm.to_dict() for arm in make_arms(["head"], (2, 4))], costs=[1, 1.2, 1.4])
        policy.begin(["head"])
        dice, arms = random.Random(1), []
        for _ in range(100):
            choice = policy.choose([0])
            arms.append(choice.index)
            policy.observe(choice, Outcome([dice.randint(0, choice.arm.depth)], speed * (1 + dice.random())))
        runs.append(arms)
    assert runs[0] == runs[1]


def test_another_seed_decides_otherwise() -> None:
    def arms(seed: int) -> list[int]:
        policy = make_policy("exp3", seed=seed)
        policy.begin(list(RATES))
        return [choice.index for choice in decode(policy, 80, random.Random(1))]

    assert arms(1) != arms(2) and arms(1) == arms(1)


def test_state_belongs_to_model_and_arms() -> None:
    policy = make_policy("survival")
    policy.begin(["head"], model="small")
    decode(policy, 60, random.Random(0))
    policy.begin(["head"], model="large")
    assert policy.learner.old_risk == [[0.0] * 8]
    policy.begin(["ngram", "head"], model="small")
    assert policy.learner.old_risk == [[0.0] * 8] * 2
    policy.begin(["head"], model="small")
    assert policy.learner.old_risk[0][0] > 10 and policy.learner.risk == [[0.0] * 8]
    assert not policy.choose([0]).probe  # nothing is measured anew


def test_survival_counts_equal_a_recount_and_cuts_do_not_bias() -> None:
    policy, dice = make_policy("survival", forget=1.0, costs=[1.0] * 9, probe_every=0), random.Random(4)
    policy.begin(["head"])
    seen, rate = [], 0.8
    for number in range(4000):
        choice = policy.choose([0])
        limit = [min(choice.arm.depth, number % 9)]  # every length is cut in turn, as by stops and budgets
        accepted = 0
        while accepted < limit[0] and dice.random() < rate:
            accepted += 1
        policy.observe(choice, Outcome([accepted], limit=limit))
        seen.append((limit[0], accepted))
    for level in range(8):
        assert policy.learner.risk[0][level] == sum(g > level and m >= level for g, m in seen)
        assert policy.learner.accept[0][level] == sum(g > level and m > level for g, m in seen)
    levels = Levels.of(policy.learner.risk[0], policy.learner.accept[0])
    assert level_rates(levels, Levels(8)) == pytest.approx([rate] * 8, abs=0.05)


def test_a_draft_the_drafter_ended_is_its_yield() -> None:
    policy = make_policy("survival", forget=1.0, costs=[1.1] + [1.0] * 8, probe_every=0)
    policy.begin(["ngram"])
    for _ in range(30):  # no match: nothing offered, nothing accepted
        policy.observe(policy.choose([0]), Outcome([0]))
    assert policy.learner.risk[0][0] == 30 and policy.learner.accept[0][0] == 0


def test_trees_and_rules_are_arms() -> None:
    tree = TreeSpec.from_widths([3, 2, 1])
    arms = make_arms(["eagle"], (2, 4), trees=[tree], rules=[None, "cool_sd"])
    assert [(arm.depth, arm.rule) for arm in arms] == [
        (0, None), (2, None), (4, None), (3, None), (2, "cool_sd"), (4, "cool_sd"), (3, "cool_sd"),
    ]  # fmt: skip
    assert [Arm.from_dict(arm.to_dict()) for arm in arms] == list(arms)
    for name in ("survival", "ucb", "hedge"):
        policy = make_policy(name, arms=[arm.to_dict() for arm in arms], costs=[1, 1.3, 1.5, 1.25, 1.3, 1.5, 1.25])
        policy.begin(["eagle"])
        dice = random.Random(5)
        counts = {arm: 0 for arm in arms}
        for number in range(400):  # the tree accepts most, relaxed or not
            choice = policy.choose([0])
            rate = 0.9 if choice.arm.tree is not None else 0.3
            accepted = 0
            while accepted < choice.arm.depth and dice.random() < rate:
                accepted += 1
            policy.observe(choice, Outcome([accepted]))
            counts[choice.arm] += number >= 100
        if name != "hedge":  # without the others' scores hedge has no full information
            assert counts[arms[3]] + counts[arms[6]] > 240
    survival = make_policy("survival", max_draft_tokens=2, trees=[tree.parents])
    survival.begin(["eagle", "ngram"], limits={"ngram": 1})
    assert [(arm.drafter, arm.depth) for arm in survival.arms[1:]] == [
        ("eagle", 1),
        ("eagle", 2),
        ("eagle", 3),
        ("ngram", 1),
    ]


def test_without_a_drafter_everything_is_plain() -> None:
    for name in NAMES:
        policy = make_policy(name)
        policy.begin([])
        for _ in range(40):
            choice = policy.choose([0])
            assert choice.arm == PLAIN
            policy.observe(choice, Outcome([0], 0.01))


def test_fixed() -> None:
    policy = make_policy("fixed", num_draft_tokens=6, drafter="head", rule="coupled")
    policy.begin(["ngram", "head"])
    assert policy.choose([0]).arm == Arm("head", 6, None, "coupled")
    policy = make_policy("fixed", tree=[0, 0, 1, 2])
    policy.begin(["ngram"])
    assert policy.choose([0]).arm == Arm("ngram", 2, TreeSpec((0, 0, 1, 2)))
    policy = make_policy("fixed", num_draft_tokens=0)
    policy.begin(["ngram"])
    assert policy.choose([0]).arm.off


def test_costs_are_measured_per_batch_and_context() -> None:
    arms = make_arms(["head"], range(1, 9))
    table = CostTable(arms)
    for index in table.anchors():
        table.observe(index, 1, 100, 0.020 * (1.3 + 0.01 * arms[index].depth) if index else 0.020, False)
    costs = table.costs(1, 100)
    assert costs == pytest.approx([0.020, *(0.020 * (1.3 + 0.01 * depth) for depth in range(1, 9))], rel=0.25)
    assert costs[6] == pytest.approx(0.020 * 1.36, rel=0.01)  # between two measured lengths: linear
    table.observe(8, 1, 100, 5.0, False)
    assert costs[8] < 0.036  # one stall of 5 s costs a quarter at most, for a few rounds
    assert table.costs(8, 100) == costs  # another batch size starts from what is known
    for _ in range(3):
        table.observe(0, 8, 100, 0.040, False)
    assert table.costs(8, 100)[8] == pytest.approx(2 * costs[8], rel=0.1) and table.costs(1, 100)[0] == 0.020
    table.observe(8, 1, 100, 0.035, True)
    assert table.switch[0] > 0 and table.costs(1, 100)[8] == costs[8]


def test_a_drafter_that_waits_for_a_match_does_not_hold_up_the_measuring_of_others() -> None:
    policy = make_policy("survival", max_draft_tokens=4)
    policy.begin(["ngram", "head"])
    run = []
    for _ in range(6):
        choice = policy.choose([0], 0, ["head"])
        policy.observe(choice, Outcome([0], 0.02 if choice.arm.off else 0.05))
        run.append((choice.arm.drafter, choice.probe))
    assert run == [(None, True)] * 2 + [("head", True)] * 4
    other = make_policy("survival", max_draft_tokens=4)
    other.load_state_dict(json.loads(json.dumps(policy.state_dict())))
    for one in (policy, other):  # a match: its turn comes, once
        one.begin(["ngram", "head"])
        choice = one.choose([0], 0, ["ngram", "head"])
        assert (choice.arm.drafter, choice.probe) == ("ngram", True)


def test_settings_and_names_are_checked() -> None:
    assert set(NAMES) <= set(available_policies())
    with pytest.raises(ValueError, match='did you mean "survival"'):
        make_policy("survial")
    with pytest.raises(ValueError, match="did you mean 'scale'"):
        make_policy("ucb", scal=1.0)
    with pytest.raises(ValueError, match="forget must be a number from 0.5 to 1.0"):
        make_policy("survival", forget=2.0)
    with pytest.raises(ValueError, match="max_draft_tokens must be an integer of at least 1"):
        make_policy("survival", max_draft_tokens=0)
    with pytest.raises(ValueError, match='write scheme="normal"'):
        make_policy("hedge", scheme="soft")
    with pytest.raises(ValueError, match="seed must be an integer"):
        make_policy("exp3", seed="a")
    with pytest.raises(ValueError, match="either lengths"):
        make_policy("ucb", lengths=[2], arms=[{}])
    with pytest.raises(ValueError, match="listed twice"):
        make_policy("ucb", arms=[{}, {}])
    with pytest.raises(ValueError, match="arms is empty"):
        make_policy("ucb", arms=[])
    with pytest.raises(ValueError, match="an arm has no field 'length'"):
        make_policy("ucb", arms=[{"drafter": "a", "length": 3}])
    with pytest.raises(ValueError, match="needs a drafter"):
        Arm(None, 3)
    with pytest.raises(ValueError, match="write num_draft_tokens=2"):
        Arm("a", 5, TreeSpec.chain(2))
    with pytest.raises(ValueError, match="plain decoding; write"):
        Arm("a", 0)


def test_calls_are_checked() -> None:
    policy = make_policy("survival")
    with pytest.raises(ValueError, match="call policy.begin"):
        policy.choose([0])
    with pytest.raises(ValueError, match=r"write \['ngram'\]"):
        policy.begin("ngram")
    with pytest.raises(ValueError, match="costs must be one positive number for each of the 9 arms"):
        make_policy("survival", costs=[1.0]).begin(["ngram"])
    with pytest.raises(ValueError, match="did you mean 'eagle'"):
        make_policy("ucb", arms=[{"drafter": "eagel", "num_draft_tokens": 3}]).begin(["eagle", "ngram"])
    policy = make_policy("survival", costs=[1.0] * 9)
    policy.begin(["ngram"])
    with pytest.raises(ValueError, match="rows is empty"):
        policy.choose([])
    choice = policy.choose([0, 1])
    for outcome, message in (
        (Outcome([1]), r"1 entries for 2 row\(s\)"),
        (Outcome([0, 9]), "must lie in 0..8"),
        (Outcome([0, -1]), "must lie in 0..8"),
        (Outcome([0, 1], 0.0), "seconds must be positive"),
        (Outcome([0, 1], float("nan")), "seconds must be positive"),
        (Outcome([0, 3], None, [8, 2]), "none below what was accepted"),
    ):
        with pytest.raises(ValueError, match=message):
            policy.observe(choice, outcome)
    policy.observe(choice, Outcome([0, 1]))
    other = make_policy("survival", costs=[1.0] * 9)
    other.begin(["ngram"])
    with pytest.raises(ValueError, match="not of the current decode"):
        other.observe(choice, Outcome([0, 1]))
    hedge = make_policy("hedge", lengths=[2], costs=[1, 1.2])
    hedge.begin(["ngram"])
    with pytest.raises(ValueError, match="agreement of 'ngram' has 2 rows"):
        hedge.observe(hedge.choose([0]), Outcome([0], agreement={"ngram": [[1.0], [0.5]]}))


def test_damaged_state_is_refused(tmp_path: Path) -> None:
    policy = make_policy("ucb")
    policy.begin(["ngram"])
    decode_one = policy.choose([0])
    policy.observe(decode_one, Outcome([0], 0.01))
    state = policy.state_dict()
    with pytest.raises(ValueError, match="not a state of policy 'exp3'"):
        make_policy("exp3").load_state_dict(state)
    with pytest.raises(ValueError, match="not a state"):
        make_policy("ucb").load_state_dict({})
    broken = json.loads(json.dumps(state))
    broken["models"][0]["learner"]["pulls"].pop()
    with pytest.raises(ValueError, match="is damaged"):
        make_policy("ucb").load_state_dict(broken)
    policy.save_pretrained(tmp_path)
    (tmp_path / "policy_state.json").write_text("{")
    with pytest.raises(ValueError, match="delete it"):
        type(policy).from_pretrained(tmp_path)
    (tmp_path / "policy_state.json").unlink()
    assert type(policy).from_pretrained(tmp_path).state_dict()["models"] == []
    config = json.loads((tmp_path / "scheduler_config.json").read_text())
    with pytest.raises(ValueError, match="no setting 'scales'"):
        type(policy).from_config({**config, "scales": 3})


def test_saved_without_diffusers_loads_the_same(tmp_path: Path) -> None:
    policy = make_policy("survival", max_draft_tokens=4)
    policy.begin(list(RATES))
    decode(policy, 50, random.Random(2))
    policy.save_pretrained(tmp_path / "with")
    code = (
        "import sys; sys.modules['diffusers'] = None\n"
        "from mediaspec.policies import SurvivalPolicy\n"
        "policy = SurvivalPolicy.from_pretrained(sys.argv[1] + '/with')\n"
        "assert policy.config.max_draft_tokens == 4\n"
        "policy.save_pretrained(sys.argv[1] + '/without')\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert type(policy).from_pretrained(tmp_path / "without").state_dict() == policy.state_dict()
