"""Drift summaries."""

import pytest

from mediaspec.eval.drift import drift_summary


def test_mean_error_and_bound() -> None:
    summary = drift_summary([0.2, 0.4, 0.6], 256)
    assert summary.mean == pytest.approx(0.4) and summary.largest == 0.6
    assert summary.error == pytest.approx(0.2 / 3**0.5)
    assert summary.per_token == pytest.approx(0.4 / 256)
    assert summary.tv_bound == pytest.approx(0.4)


def test_the_bound_is_never_above_one() -> None:
    assert drift_summary([3.0, 5.0], 16).tv_bound == 1.0
    assert drift_summary([0.0], 16).as_dict() == {
        "mean": 0.0,
        "error": 0.0,
        "largest": 0.0,
        "per_token": 0.0,
        "tv_bound": 0.0,
    }


@pytest.mark.parametrize("values", [[], [-0.1], [float("nan")]])
def test_refusals(values: list[float]) -> None:
    with pytest.raises(ValueError, match="drift of"):
        drift_summary(values, 16)
