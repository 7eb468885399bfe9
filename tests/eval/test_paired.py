"""Paired statistics: known answers, agreement with SciPy, error rates, degenerate input."""

from __future__ import annotations

import numpy as np
import pytest

from mediaspec.eval.paired import compare_metrics, holm, paired_difference

stats = pytest.importorskip("scipy.stats")


def test_a_clear_gain_is_found() -> None:
    rng = np.random.default_rng(0)
    base = rng.normal(1, 0.2, 40)
    found = paired_difference(base, base + 0.05 + rng.normal(0, 0.02, 40))
    assert found.verdict == "better" and found.p_value < 1e-6 and found.improved > 0.9
    assert found.low < found.mean < found.high and found.low > 0.03 and found.effect > 1
    assert found.relative == pytest.approx(found.mean / found.without)
    assert found.relative_low < found.relative < found.relative_high
    assert paired_difference(base, base + 0.05, better="lower").verdict == "worse"


def test_outliers_against_the_ranks_claim_nothing() -> None:
    base = np.linspace(0, 1, 32)
    found = paired_difference(base, base + np.where(np.arange(32) < 30, 0.01, -5.0))
    assert found.p_value < 0.01 and found.improved > 0.9 and found.mean < 0
    assert found.verdict == "no difference"


def test_p_is_that_of_scipy() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=20), rng.normal(0.3, 1, 20)
    assert paired_difference(a, b).p_value == pytest.approx(stats.wilcoxon(b - a, zero_method="pratt").pvalue)


def test_no_effect_is_rarely_called_one() -> None:
    """100 runs without an effect: the interval misses 0 about 1 time in 20, p < 0.01 about 1 time in 100."""
    rng = np.random.default_rng(2)
    missed = false = 0
    for _ in range(100):
        found = paired_difference(rng.normal(size=30), rng.normal(size=30), rounds=300)
        missed += not found.low <= 0 <= found.high
        false += found.p_value < 0.01
    assert missed <= 15 and false <= 6  # binomial(100, 0.05) and (100, 0.01): under 1e-4 each


def test_holm() -> None:
    assert holm([0.01, 0.04]) == [0.02, 0.04]
    assert holm([0.04, 0.01, 0.03]) == [0.06, 0.03, 0.06]
    assert holm([0.9, 0.8]) == [1.0, 1.0] and holm([]) == []


def test_equal_runs_have_no_difference() -> None:
    found = paired_difference([0.5, 0.6, 0.7], [0.5, 0.6, 0.7])
    assert (found.mean, found.low, found.high, found.p_value, found.effect) == (0, 0, 0, 1, None)
    assert found.verdict == "no difference"
    zero = paired_difference([0.0, 0.0], [0.0, 1.0], better=None)
    assert zero.relative is None and zero.improved is None and np.isfinite([zero.low, zero.high]).all()


def test_metrics_are_corrected_together_and_holes_are_left_out() -> None:
    rng = np.random.default_rng(3)
    without = [{"a": x, "b": x, "c": 1.0} for x in rng.normal(size=12)]
    treated = [{"a": row["a"] + 1 + 0.1 * i, "b": row["b"] + rng.normal(), "c": None} for i, row in enumerate(without)]
    del treated[0]["b"]
    found = compare_metrics(without, treated, {"a": "higher", "b": "lower", "c": "higher"})
    assert list(found) == ["a", "b"] and (found["a"].pairs, found["b"].pairs) == (12, 11)
    assert found["a"].p_holm == pytest.approx(2 * found["a"].p_value)
    assert found["a"].as_dict()["verdict"] == "better"
    watched = compare_metrics(without, treated, {"a": "higher", "b": None})  # b makes no claim
    assert watched["a"].p_holm == watched["a"].p_value and watched["b"].p_holm == watched["b"].p_value


@pytest.mark.parametrize(
    ("a", "b", "better", "message"),
    [
        ([1.0], [2.0], "higher", "at least 2"),
        ([1.0, 2.0], [1.0], "higher", "at least 2"),
        ([1.0, float("nan")], [1.0, 2.0], "higher", "NaN"),
        ([1.0, 2.0], [1.0, 2.0], "up", "'lower'"),
    ],
)
def test_bad_input_is_refused(a, b, better, message) -> None:
    with pytest.raises(ValueError, match=message):
        paired_difference(a, b, better=better)
