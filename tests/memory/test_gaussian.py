"""The exact decomposition for Gaussian videos against an independent program, and what follows from it."""

from __future__ import annotations

import math

import pytest
import torch

from mediaspec.memory.closed_forms import (
    ar1_bottleneck,
    diluted_evidence,
    diluted_variance,
    reference_gain_radius,
    reference_noise_tradeoff,
    scene_bottleneck,
)
from mediaspec.memory.gaussian import GaussianRollout
from mediaspec.memory.gaussian_law import GaussianVideo, ar1, last_features, scene
from mediaspec.memory.loss_gap import snr_integral
from mediaspec.memory.slot_steps import CosinePath, snr
from mediaspec.memory.window_schedule import WindowSchedule

from .cases import CASES, assert_like

LOW, HIGH = 0.05, 0.98
HALF = (LOW + HIGH) / 2
STAIRS = tuple(LOW + (HIGH - LOW) * (j + 1) / 4 for j in range(4))
VISIBLE = [1, 1, 1, 1, 0, 0, 0, 0, 1, 1]


def schedule(w: int, delta: int, t_in: tuple[float, ...], m_ar: int) -> WindowSchedule:
    return WindowSchedule(w, delta, t_in, m_ar, clean_level=LOW, noise_level=HIGH)


def chunks(count: int = 1, m_ar: int = 4, steps: int = 4, **errors) -> GaussianRollout:
    """AR(1) chunks of 2 with the last `count` frames as references."""
    video = GaussianVideo(ar1(2 * steps, 0.9))
    return GaussianRollout(video, schedule(2, 2, (HIGH,) * 2, m_ar), steps, last_features(count), **errors)


def queue(count: int = 0, **errors) -> GaussianRollout:
    video = GaussianVideo(ar1(9, 0.9))
    return GaussianRollout(video, schedule(4, 1, STAIRS, 1), 6, last_features(count) if count else None, **errors)


def needle(count: int, pool: int, shown: list[int] = VISIBLE, sampler: str = "posterior") -> GaussianRollout:
    video = GaussianVideo(scene(shown, 0.25))
    return GaussianRollout(video, schedule(2, 2, (HIGH,) * 2, 4), 5, last_features(count, pool), sampler=sampler)


def figure() -> GaussianRollout:
    return GaussianRollout(GaussianVideo(ar1(10, 0.9)), schedule(4, 2, (HALF, HALF, HIGH, HIGH), 2), 4)


ROLLOUTS = {
    **{f"chunk_ar1_rho0.9_w2_r{r}": (lambda r=r: chunks(r)) for r in (0, 1, 2, 4)},
    **{f"chunk_ar1_rho0.9_w2_r1_m{m}": (lambda m=m: chunks(1, m)) for m in (1, 2, 8, 32)},
    "chunk_ar1_rho0.9_w2_r0_m64": lambda: chunks(0, 64, 2),
    "chunk_ar1_bias0.05": lambda: chunks(bias=0.05),
    "chunk_ar1_gain0.05": lambda: chunks(gain=0.05),
    "fifo_ar1_w4": queue,
    "fifo_ar1_w4_ref2": lambda: queue(2),
    "chunk_ar1_optimal_m4": lambda: chunks(sampler="tracked"),
    "fifo_ar1_w4_optimal": lambda: queue(sampler="tracked"),
    "chunk_ar1_renoise_m4": lambda: chunks(sampler="renoise"),
    "fifo_ar1_w4_renoise": lambda: queue(sampler="renoise"),
    "chunk_ar1_optimal_bias0.05": lambda: chunks(bias=0.05, sampler="tracked"),
    "figure_ar1_w4_d2": figure,
    **{
        f"needle_w2_r{r}_pool{q}": (lambda r=r, q=q: needle(r, q))
        for r, q in ((0, 1), (2, 1), (4, 1), (8, 1), (8, 2), (8, 4), (8, 8))
    },
    **{
        f"needle2of8_pool{q}": (lambda q=q: needle(8, q, [1, 1, 0, 0, 0, 0, 0, 0, 1, 1], "tracked"))
        for q in (1, 2, 4, 8)
    },
}


def test_every_case_is_here():
    assert set(ROLLOUTS) == set(CASES["linear_gaussian"])


@pytest.mark.parametrize("name", ROLLOUTS)
def test_all_terms(name):
    report = ROLLOUTS[name]().report()
    wanted = CASES["linear_gaussian"][name]
    gaps = ("identity_gap", "ar_identity_gap")
    assert_like(report, {key: value for key, value in wanted.items() if key not in gaps})
    assert max(abs(report[gap]) for gap in gaps) < 1e-8
    for step in report["steps"]:
        assert abs(step["mb"] - step["mb_path"]) < 1e-9
        assert step["end"] <= step["de"] + step["see"] + 1e-9
    for clip, loose, tight in zip(report["kl_clip"], report["clip_bound_without_mb"], report["clip_bound_endpoint"]):
        assert clip <= tight + 1e-9 <= loose + 2e-9
    assert report["kl_clean_video"] <= report["kl_ar_path"] + 1e-9 <= report["kl_path"] + 2e-9


@pytest.mark.parametrize("rho", [0.9, 0.999])
@pytest.mark.parametrize("bias", [0.0, 0.02])
def test_accumulation(rho, bias):
    video = GaussianVideo(ar1(24, rho))
    rollout = GaussianRollout(video, schedule(1, 1, (HIGH,), 6), 24, last_features(1), bias=bias, sampler="tracked")
    mean, cov = rollout.sampler_law()
    for k, wanted in CASES["accumulation"][f"rho{rho}_bias{bias}"].items():
        place = rollout.clean[int(k) - 1]
        true, made = float(rollout.cov[place, place]), float(cov[place, place])
        kl = 0.5 * (true / made - 1 + float(mean[place]) ** 2 / made + math.log(made / true))
        assert kl == pytest.approx(wanted, rel=1e-6, abs=1e-12)


def spearman(a: list[float], b: list[float]) -> float:
    ranks = [torch.tensor(v).argsort().argsort().double() for v in (a, b)]
    n = len(a)
    return float(1 - 6 * ((ranks[0] - ranks[1]) ** 2).sum() / (n * (n * n - 1)))


@pytest.mark.parametrize("label", ["steps_only", "bias_only", "both"])
def test_prediction_without_a_rollout(label):
    case, made = CASES["schedule_prediction"][label], []
    for row in case["rows"]:
        video = GaussianVideo(ar1(16, 0.95))
        rollout = GaussianRollout(
            video, schedule(2, 2, (HIGH,) * 2, row["m"]), 8, last_features(1), bias=row["bias"], sampler="tracked"
        )
        report = rollout.report()
        totals = report["totals"]
        made.append({"path": totals["see"] + totals["de"], "end": totals["end"], "clip8": report["kl_clip"][-1]})
        assert_like(made[-1], {key: row[key] for key in made[-1]})
    real = [row["clip8"] for row in made]
    for name in ("path", "end"):
        assert spearman([row[name] for row in made], real) == pytest.approx(case[f"spearman_{name}"], abs=1e-9)


def test_gap_of_errors_over_signal_to_noise_is_the_bottleneck():
    cov = scene([1, 1, 1, 0, 0, 1], 0.25)
    video = GaussianVideo(cov)
    high, low = (float(snr(CosinePath(), torch.tensor(u, dtype=torch.float64))) for u in (LOW, HIGH))
    ratios = torch.exp(torch.linspace(math.log(low), math.log(high), 4001, dtype=torch.float64))

    def left(references: list[int]) -> torch.Tensor:
        """Variance of frame 5 given references and itself at every ratio."""
        given = cov[references][:, references]
        cross = cov[[5]][:, references]
        prior = float(cov[5, 5] - (cross @ torch.linalg.solve(given, cross.T))[0, 0])
        return prior / (1 + ratios * prior)

    found = snr_integral(left([3, 4]) - left([0, 1, 2, 3, 4]), ratios)
    wanted = CASES["i_mmse"]
    assert found == pytest.approx(wanted["integral"], rel=1e-9)
    assert found == pytest.approx(wanted["exact"], abs=1e-4)
    one = torch.tensor([5])
    frames, levels = torch.tensor([5, 3, 4]), torch.tensor([0.5, 0.0, 0.0], dtype=torch.float64)
    _, variance = video.posterior(one, frames, levels, torch.eye(3, dtype=torch.float64))
    prior = 1 / (1 / float(left([3, 4])[0]) - float(ratios[0]))
    assert float(variance) == pytest.approx(prior / (1 + float(snr(CosinePath(), levels[:1])) * prior), rel=1e-9)


def test_closed_forms():
    wanted = CASES["closed_forms"]
    for rho, mb in wanted["mb_ar1_no_refs"].items():
        assert ar1_bottleneck(float(rho)) == pytest.approx(mb, rel=1e-12)
    for row in wanted["needle_mb"]:
        assert scene_bottleneck(row["m"], row["r"], row["s2"]) == pytest.approx(row["mb"], rel=1e-9, abs=1e-12)
    for row in wanted["pooling_dilution"]:
        assert diluted_evidence(row["q"], row["g"]) == row["m_eff"]
        assert diluted_variance(row["q"], row["g"], 0.25) == pytest.approx(row["cond_var"], rel=1e-9)
    for row in wanted["reference_noise_tradeoff"]:
        made = reference_noise_tradeoff(row["rho"], row["ref_noise_var"], 32)
        assert_like(made, {"gain": row["gain"], "mb": row["mb"], "accumulation": row["accum_K32"]})
    for row in wanted["reference_gain_radius"]:
        assert reference_gain_radius(row["coef"]) == pytest.approx(row["spectral_radius"], rel=1e-9)


def test_more_references_never_forget_more():
    """Nested references order the bottleneck, not the divergence of the finished video."""
    forgotten = [chunks(r).report()["totals"]["mb"] for r in (0, 1, 2, 4)]
    assert all(after <= before + 1e-12 for before, after in zip(forgotten, forgotten[1:]))
    without, with_two = queue().report(), queue(2).report()
    assert with_two["totals"]["mb"] < 1e-6 < without["totals"]["mb"]
    assert with_two["kl_clean_video"] > without["kl_clean_video"]


def test_impossible_laws_are_refused():
    with pytest.raises(ValueError, match="negative eigenvalue"):
        GaussianVideo(torch.tensor([[1.0, 2.0], [2.0, 1.0]]))
    with pytest.raises(ValueError, match="no finite KL"):
        GaussianRollout(GaussianVideo(ar1(2, 0.5)), WindowSchedule(2, 2, (1.0, 1.0), 1), 1)
    with pytest.raises(ValueError, match="4 steps need 8 frames"):
        GaussianRollout(GaussianVideo(ar1(7, 0.5)), schedule(2, 2, (HIGH,) * 2, 1), 4)
