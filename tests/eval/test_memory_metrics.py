"""Metrics of memory: recall, needle, drift, loss gap against closed forms, wall colours, intervals."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from mediaspec.eval.memory_metrics import (
    bootstrap_mean,
    flow_snr,
    frame_psnr,
    frame_ssim,
    history_drift,
    kv_bytes,
    nats_of_errors,
    needle_accuracy,
    recall_scores,
    snr_grid,
    spearman,
    wall_colour_accuracy,
)
from mediaspec.eval.memory_rollout import NATS_LEVELS, chunk_nats
from mediaspec.eval.worlds import TEST_SEED, make_episode, recall_frames

CASES = json.loads((Path(__file__).parents[1] / "data" / "world_cases.json").read_text())


def scene() -> np.ndarray:
    """Covariance of six frames of which the last shows what the first three showed; noise 0.25."""
    seen = np.array([1, 1, 1, 0, 0, 1.0])
    return np.outer(seen, seen) + 0.25 * np.eye(6)


def vp_snr(level: float) -> float:
    """Of x_u = cos(pi u / 2) x + sin(pi u / 2) e."""
    return math.tan(math.pi * level / 2) ** -2


def mse(snr: float, known: list[int]) -> float:
    """Squared error of the last frame's best estimate from itself at an snr and from known frames."""
    cov, ids = scene(), [5, *known]
    inner = cov[np.ix_(ids, ids)].copy()
    inner[0, 0] += 1 / snr
    row = cov[5, ids]
    return float(cov[5, 5] - row @ np.linalg.solve(inner, row))


def test_loss_gap_of_the_linear_gaussian_process() -> None:
    """The exact denoiser's errors give the information of the memory: to 1e-4 on a fine grid, to 1 % on 40 levels."""
    want = CASES["i_mmse"]
    fine = np.exp(np.linspace(math.log(vp_snr(0.98)), math.log(vp_snr(0.05)), 4001))
    gap = np.array([mse(s, [3, 4]) - mse(s, [0, 1, 2, 3, 4]) for s in fine])
    integral = 0.5 * float(np.sum((gap[1:] + gap[:-1]) / 2 * np.diff(fine)))
    assert abs(integral - want["integral"]) < 1e-9
    # the same span of snr on our own grid of flow levels
    low, high = (1 / (1 + math.sqrt(vp_snr(u))) for u in (0.05, 0.98))
    for points, tolerance in ((4001, 1e-4), (40, 0.01)):
        levels, weights = snr_grid(low, high, points)
        errors = [np.array([mse(float(flow_snr(u)), known) for u in levels]) for known in ([3, 4], [0, 1, 2, 3, 4])]
        less, more = (float(nats_of_errors(one, weights)) for one in errors)
        assert abs((less - more) / want["exact"] - 1) < tolerance


def test_loss_gap_of_an_evaluation_is_the_closed_form_within_one_per_cent() -> None:
    """The evaluation's own levels, and a million walks of the linear-Gaussian process seen by the exact denoiser."""
    cov, g = scene(), torch.Generator().manual_seed(0)
    shape = (1, 4, 64, 64, 64)
    walks = torch.randn(6, *shape, generator=g, dtype=torch.float64)
    walks = torch.einsum("ij,j...->i...", torch.linalg.cholesky(torch.from_numpy(cov)), walks).float()

    def exact_denoiser(x, levels, poses, actions, memory):
        mean, variance = memory
        u = levels[:, :, None, None, None]
        return mean + variance * (1 - u) / ((1 - u) ** 2 * variance + u**2) * (x - (1 - u) * mean)

    nats, information = [], []
    ends = [float(flow_snr(u)) for u in NATS_LEVELS]
    for known in ([3, 4], [0, 1, 2, 3, 4]):
        gain = np.linalg.solve(cov[np.ix_(known, known)], cov[known, 5])
        variance = float(cov[5, 5] - gain @ cov[known, 5])
        mean = torch.einsum("k,k...->...", torch.from_numpy(gain).float(), walks[known])
        found = chunk_nats(
            exact_denoiser, (mean, variance), walks[5], torch.zeros(1, 4, 2), torch.zeros(1, 4).long(),
            torch.Generator().manual_seed(1),
        )  # fmt: skip
        nats.append(float(found.mean()) / 64**3)
        information.append(0.5 * math.log((1 + ends[0] * variance) / (1 + ends[1] * variance)))
    assert nats[0] - nats[1] == pytest.approx(information[0] - information[1], rel=0.01)


def test_weights_sum_to_half_the_snr_they_span() -> None:
    levels, weights = snr_grid(0.2, 0.9, 4001)
    assert levels[0] == pytest.approx(0.9) and levels[-1] == pytest.approx(0.2)
    assert weights.sum() == pytest.approx(float(flow_snr(0.2) - flow_snr(0.9)) / 2, rel=1e-5)
    with pytest.raises(ValueError, match="0 < low < high < 1"):
        snr_grid(0.0, 0.9)


def test_recall_counts_asked_frames_only() -> None:
    truth = np.random.default_rng(0).random((6, 64, 64, 3))
    made = truth.copy()
    made[5] = np.clip(made[5] + 0.1, 0, 1)
    scores = recall_scores(made, truth, [False] * 4 + [True, True])
    assert scores is not None and scores["psnr"] == (99 + frame_psnr(made[5], truth[5])) / 2
    assert scores["last_psnr"] == frame_psnr(made[5], truth[5])
    assert recall_scores(made, truth, [False] * 6) is None
    with pytest.raises(ValueError, match="NaN"):
        frame_psnr(made[0] * np.nan, truth[0])


def test_ssim_against_plain_sums() -> None:
    rng = np.random.default_rng(1)
    a = rng.random((13, 12, 1))
    b = np.clip(a + 0.2 * rng.standard_normal(a.shape), 0, 1)
    line = np.exp(-0.5 * ((np.arange(11) - 5) / 1.5) ** 2)
    window = np.outer(line, line) / line.sum() ** 2
    want = []
    for top in range(3):
        for left in range(2):
            x, y = (frame[top : top + 11, left : left + 11, 0] for frame in (a, b))
            mx, my = (window * x).sum(), (window * y).sum()
            vx, vy = (window * (x - mx) ** 2).sum(), (window * (y - my) ** 2).sum()
            cov = (window * (x - mx) * (y - my)).sum()
            want.append((2 * mx * my + 1e-4) * (2 * cov + 9e-4) / ((mx**2 + my**2 + 1e-4) * (vx + vy + 9e-4)))
    assert math.isclose(frame_ssim(a, b), float(np.mean(want)), rel_tol=1e-9)
    assert math.isclose(frame_ssim(a, a), 1.0)
    with pytest.raises(ValueError, match="11 pixels"):
        frame_ssim(a[:10], b[:10])


def test_needle_is_read_off_the_wall() -> None:
    one = make_episode("panoroom", "needle", TEST_SEED)
    asked = np.flatnonzero(recall_frames(one, 8)).tolist()
    assert needle_accuracy(one.frames, one.frames, asked, one.needles) == 1.0
    rng = np.random.default_rng(0)
    dim = np.clip(0.5 * one.frames + 0.1 + 0.01 * rng.standard_normal(one.frames.shape), 0, 1)
    assert needle_accuracy(dim, one.frames, asked, one.needles) == 1.0, "contrast does not matter"
    other = make_episode("panoroom", "needle", TEST_SEED + 1)
    assert needle_accuracy(other.frames, one.frames, asked, one.needles) == 0.0
    assert needle_accuracy(one.frames, one.frames, [], one.needles) is None


def test_drift_is_the_gap_between_histories() -> None:
    found = history_drift([30, 30, 28, 28, 26, 26], [30, 30, 30, 30, 30, 30], 2)
    assert (found.gap_db, found.last_gap_db, found.slope_db) == pytest.approx((2, 4, 2))
    assert found.own_db == (30, 28, 26) and found.first_last_db == 4
    assert history_drift([20.0], [20.0], 4).slope_db == 0
    with pytest.raises(ValueError, match="same frames"):
        history_drift([1.0], [1.0, 2.0], 1)


def test_wall_colours() -> None:
    one = make_episode("raymaze", "loop", TEST_SEED)
    assert one.wall_colours is not None
    palette, light = one.extras["palette"], one.extras["light"]
    assert wall_colour_accuracy(one.frames, one.wall_colours, palette, light) > 0.99
    assert wall_colour_accuracy(one.frames[::-1], one.wall_colours, palette, light) < 0.7
    twins = np.repeat(palette[:1], 8, axis=0)
    assert wall_colour_accuracy(one.frames, one.wall_colours, twins, light) == 1.0, "equal colours count as equal"


def test_intervals() -> None:
    rng = np.random.default_rng(0)
    inside = 0
    for trial in range(60):
        one = bootstrap_mean(rng.normal(3, 1, 40), seed=trial, rounds=400)
        inside += one.low <= 3 <= one.high
    assert 50 <= inside <= 60
    values = [1.0, 1.1, 0.9, 3.0, 3.1, 2.9]
    alone, grouped = bootstrap_mean(values), bootstrap_mean(values, [0, 0, 0, 1, 1, 1])
    assert grouped.high - grouped.low > alone.high - alone.low, "two trainings are less than six"
    assert spearman([1, 2, 3, 4], [2, 4, 6, 8]) == 1.0 and spearman([1, 1], [1, 2]) is None
    assert spearman([1, 2, 2, 3], [1, 2, 2, 3]) == pytest.approx(1.0)
    assert kv_bytes(3926, 1536, 30, 2) == 723_640_320
