"""Timing: order of the runs, pairing of ratios, medians, and what the machine did meanwhile."""

import multiprocessing
import time
from collections.abc import Sequence

import pytest

from mediaspec.eval.speed import MachineWatch, Run, Runner, interleave, provenance, summarise


def recorder(label: str, seconds: Sequence[float], log: list[tuple[str, tuple[str, ...], tuple[int, ...]]]) -> Runner:
    """A runner that reports given seconds; the first call is the warm-up."""
    left = [99.0, *seconds]

    def run(prompts: Sequence[str], seeds: Sequence[int]) -> Run:
        log.append((label, tuple(prompts), tuple(seeds)))
        return Run(
            left.pop(0),
            256 * len(prompts),
            64,
            4.0,
            0.5,
            "exact-law",
            {"target": 0.3, "draft": 0.5, "verify": 0.2},
            {"k": 1},
        )

    return Runner(label, run)


def test_rules_take_turns_on_the_same_work() -> None:
    log: list[tuple[str, tuple[str, ...], tuple[int, ...]]] = []
    runners = [recorder("plain", [4, 4, 4], log), recorder("a", [1, 1, 1], log), recorder("b", [2, 2, 2], log)]
    interleave(runners, ["p0", "p1", "p2"], repeats=3, batch_size=2, seed=10)
    assert len(log) == 12
    assert [label for label, _, _ in log[:6]] == ["plain", "a", "b"] * 2
    for repeat in range(3):
        turn = log[3 + 3 * repeat : 6 + 3 * repeat]
        assert {label for label, _, _ in turn} == {"plain", "a", "b"}
        assert len({work for _, *work in ((l, p, s) for l, p, s in turn) for work in [tuple(work)]}) == 1
        assert turn[0][2] == (10 + 2 * repeat, 11 + 2 * repeat)
    assert log[3][1] == ("p0", "p1") and log[6][1] == ("p2", "p0")
    assert [t[0] for t in log[6:9]] == ["a", "b", "plain"]


def test_ratios_are_paired_within_a_repeat() -> None:
    """Repeat 2 is twice as slow for everybody: the ratio does not notice."""
    log: list[tuple[str, tuple[str, ...], tuple[int, ...]]] = []
    runs = interleave([recorder("plain", [4, 8, 4], log), recorder("a", [2, 4, 1], log)], ["p"], repeats=3)
    plain, row = summarise(runs)
    assert plain["ratio_to_plain"] == 1.0
    assert row["rule"] == "a" and row["ratio_to_plain"] == 2.0 and row["seconds"] == 2
    assert row["ratio_quartiles"] == [2.0, 3.0]
    assert row["tokens_per_call"] == 4.0 and row["drift"] == 0.5 and row["tokens_per_second"] == 128.0
    assert (
        row["seconds_split"] == {"draft": 0.5, "target": 0.3, "verify": 0.2}
        and row["settings"] == {"k": 1}
        and row["repeats"] == 3
    )
    assert row["seconds_iqr"] == 1.5 and row["overhead_share"] == 0.2


def test_refusals() -> None:
    log: list[tuple[str, tuple[str, ...], tuple[int, ...]]] = []
    with pytest.raises(ValueError, match="at least 1"):
        interleave([recorder("plain", [], log)], ["p"], repeats=0)
    with pytest.raises(ValueError, match="not distinct"):
        interleave([recorder("a", [], log), recorder("a", [], log)], ["p"])
    with pytest.raises(ValueError, match="add it to --rules"):
        summarise({"a": [Run(1, 1, 1, 1, 0, "exact-law")]})


def spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_a_busy_neighbour_is_noticed() -> None:
    with MachineWatch() as watch:
        time.sleep(0.01)
    if watch.foreign is None and watch.load_before is None:
        pytest.skip("this system does not tell what its processors do")
    neighbour = multiprocessing.get_context("spawn").Process(target=spin, args=(8.0,))
    neighbour.start()
    try:
        time.sleep(2.0)  # start-up of the interpreter
        with MachineWatch() as watch:
            time.sleep(1.5)
    finally:
        neighbour.kill()
        neighbour.join()
    if watch.foreign is None:
        pytest.skip("no /proc/stat here")
    assert watch.foreign > 0.10
    assert any("unreliable" in sentence for sentence in watch.warnings())
    assert watch.as_dict()["quiet"] is False


def test_provenance_names_what_matters() -> None:
    import torch

    record = provenance("cpu", torch.float32, 7)
    assert record["dtype"] == "float32" and record["device"] == "cpu" and record["seed"] == 7
    assert record["threads"] == torch.get_num_threads()
    assert {"python", "torch", "mediaspec"} <= set(record["versions"])
