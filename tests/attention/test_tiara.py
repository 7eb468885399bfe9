"""TiARA's algorithm against numbers of an independent program, and what it promises."""

from __future__ import annotations

import doctest
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from mediaspec.attention import tiara
from mediaspec.attention.tiara import (
    TiARA,
    adaptive_bias,
    blackman,
    corner_bias,
    dstft_power,
    edit_rows,
    motion_intensity,
    spectral_cap,
    temporal_plan,
)
from mediaspec.kernels.tiara_temporal import tiara_temporal

CASES = json.loads((Path(__file__).parents[1] / "data" / "tiara_attention_cases.json").read_text())
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])


def numbers(values: object, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).to(dtype)


def close(given: Tensor, wanted: object, tolerance: float | None = None) -> None:
    """Absolute and relative, 1e-9 in float64 and 2e-5 in float32."""
    tolerance = tolerance or (1e-9 if given.dtype == torch.float64 else 2e-5)
    torch.testing.assert_close(given.double(), numbers(wanted), rtol=tolerance, atol=tolerance)


def prototype(name: str, frames: int) -> Tensor:
    """Row-stochastic matrices with one shape around the diagonal, on a circle."""
    at = torch.arange(frames)
    distance = (at[:, None] - at).abs()
    distance = distance.minimum(frames - distance).double()

    def bell(width: float) -> Tensor:
        return torch.softmax(-0.5 * (distance / width) ** 2, -1)

    if name == "delta":
        return torch.eye(frames, dtype=torch.float64)
    if name == "uniform":
        return torch.full((frames, frames), 1.0 / frames, dtype=torch.float64)
    if name.startswith("gauss_"):
        return bell(float(name[6:]))
    if name == "alternating":
        rows = 1.0 - 0.8 * (distance % 2)
        return rows / rows.sum(-1, keepdim=True)
    return 0.9 * torch.eye(frames, dtype=torch.float64) + 0.1 * bell(2.0)


def test_windows():
    for name, wanted in CASES["windows"].items():
        kind, length = name.split("_")
        close(blackman(int(length), {"sym": "symmetric"}.get(kind, kind)), wanted)
    torch.testing.assert_close(blackman(8, "periodic"), blackman(9)[:8])
    torch.testing.assert_close(
        blackman(8, "periodic"), torch.blackman_window(8, dtype=torch.float64), atol=1e-12, rtol=0
    )
    torch.testing.assert_close(blackman(7), torch.from_numpy(np.blackman(7)), atol=1e-12, rtol=0)


@DTYPES
def test_dstft(dtype):
    case = CASES["dstft"]
    for name, signal in case["signals"].items():
        rows = numbers(signal, dtype).expand(case["N"], -1)
        power = dstft_power(rows, TiARA(window_length=case["L"]), 0, 9)
        close(power[case["frame"]], case["power_k0_to_8"][name])


def test_dstft_is_the_short_time_transform_of_the_wrapped_row():
    row = torch.randn(16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    power = dstft_power(row.expand(16, -1), TiARA(), 0, 16)
    wrapped, taps = torch.cat([row[-3:], row, row[:3]]).to(torch.complex128), blackman(7)
    angle = -2 * math.pi / 16 * torch.outer(torch.arange(22.0), torch.arange(16.0)).double()
    terms = torch.polar(torch.ones_like(angle), angle)
    for frame in range(16):
        moved = torch.zeros(22, dtype=torch.float64)
        moved[frame : frame + 7] = taps
        close(power[frame], ((wrapped * moved) @ terms).abs().square().tolist())


@DTYPES
def test_rho_prototypes(dtype):
    for case in CASES["rho_prototypes"]:
        cfg = TiARA(window_length=case["L"], phi1=case["phi1"], phi2=case["phi2"], grid=case["grid"])
        rho = motion_intensity(prototype(case["row"], case["N"]).to(dtype), cfg)
        close(rho[case["N"] // 2], case["rho"])
        assert TiARA().bands(case["N"]) == (case["phi1"], case["phi2"])


@DTYPES
def test_rho_band_table(dtype):
    for case in CASES["rho_band_table"]:
        cfg = TiARA(window_length=case["L"], phi1=case["phi1"], phi2=case["phi2"])
        rho = motion_intensity(prototype(case["row"], case["N"]).to(dtype), cfg)[8]
        close(rho, case["rho"], 2e-5 if dtype == torch.float32 else 1e-6)  # six digits are given


@DTYPES
def test_rho_boundary(dtype):
    case = CASES["rho_boundary"]
    cfg = TiARA(window_length=case["L"], phi1=case["phi1"], phi2=case["phi2"])
    rows = numbers(case["A"], dtype)
    for boundary, wanted in case["rho"].items():
        close(motion_intensity(rows, replace(cfg, boundary=boundary)), wanted)
    close(motion_intensity(rows, replace(cfg, window="periodic")), case["rho_periodic_window"])


@DTYPES
def test_four_frames(dtype):
    case = CASES["four_frames"]
    cfg = TiARA(alpha=case["alpha"], window_length=case["L"], phi1=case["phi1"], phi2=case["phi2"])
    logits = numbers(case["logits"], dtype)
    rows = logits.softmax(-1)
    close(rows, case["A"])
    close(edit_rows(rows, torch.full((4,), 5.0)), case["fixed_A_new"])
    close(motion_intensity(rows, cfg), case["rho"])
    delta = adaptive_bias(rows, cfg)
    close(delta, case["delta"])
    close(edit_rows(rows, delta), case["A_new"])
    close((logits - torch.diag(delta)).softmax(-1), case["A_new"])
    corner = corner_bias(4, replace(cfg, corner_frames=1, corner_strength=2.0))
    assert corner.count_nonzero() == 2 and corner[0, 3] == corner[3, 0] == 2.0
    close(edit_rows(rows, delta, corner), case["corner1_beta2_A_new"])


def steps(out: Tensor) -> Tensor:
    return out.diff(dim=0).square().sum(-1).mean()


@DTYPES
def test_step_signal(dtype):
    case = CASES["step_signal"]
    cfg = TiARA(alpha=case["alpha"], window_length=case["L"])
    assert cfg.bands(16) == (case["phi1"], case["phi2"])
    x = numbers(case["x"], dtype)
    rows = ((case["q_scale"] * x) @ x.T / math.sqrt(x.shape[-1])).softmax(-1)
    delta = adaptive_bias(rows, cfg)
    edited = edit_rows(rows, delta)
    close(motion_intensity(rows, cfg), case["rho"])
    close(delta, case["delta"])
    close(rows.diagonal(), case["diag_before"])
    close(edited.diagonal(), case["diag_after"])
    close(edited[8], case["A_new_row8"])
    close((edited @ x)[8], case["out_row8"])
    close(steps(rows @ x), case["mean_sq_step_before"])
    close(steps(edited @ x), case["mean_sq_step_after"])
    safe = replace(cfg, cap=True)
    close(spectral_cap(rows, safe).clamp(max=99.0), case["cap"])
    close(adaptive_bias(rows, safe), case["delta_capped"])
    close(steps(edit_rows(rows, adaptive_bias(rows, safe)) @ x), case["mean_sq_step_capped"])


@DTYPES
@pytest.mark.parametrize("case", CASES["flicker_cases"], ids=lambda case: case["kind"])
def test_flicker_cases(case, dtype):
    x = numbers(case["x"], dtype)
    rows = (case["scale"] * x @ x.T / math.sqrt(x.shape[-1])).softmax(-1)

    def flicker(out: Tensor) -> Tensor:
        return torch.fft.fft(out, dim=0).abs().square().sum(1)[4:13].sum()

    before = flicker(rows @ x)
    close(rows.diagonal().mean(), case["mean_diag"])
    close(before, case["hf_before"])
    for name, cfg in (
        ("alpha1", TiARA(alpha=1.0)),
        ("alpha6", TiARA.paper(alpha=6.0)),
        ("alpha6_capped", TiARA.safe(alpha=6.0)),
    ):
        close(flicker(edit_rows(rows, adaptive_bias(rows, cfg)) @ x) / before, case[f"ratio_{name}"])


@DTYPES
def test_batched(dtype):
    case = CASES["batched"]
    cfg = TiARA(alpha=case["alpha"], window_length=case["L"], phi1=case["phi1"], phi2=case["phi2"])
    rows = numbers(case["logits"], dtype).softmax(-1)
    delta = adaptive_bias(rows, cfg)
    close(motion_intensity(rows, cfg), case["rho"])
    close(delta, case["delta"])
    close(edit_rows(rows, delta).diagonal(dim1=-2, dim2=-1), case["diag_after"])
    # the fast form, from queries and keys that have these very logits
    q = numbers(case["logits"], dtype)
    unit = torch.eye(8, dtype=dtype).expand_as(q)
    out, means = tiara_temporal(q, unit, unit, temporal_plan(cfg, 8, dtype=dtype), scale=1.0, means=True)
    close(out.diagonal(dim1=-2, dim2=-1), case["diag_after"])
    wanted = [torch.tensor(case[name]).mean().item() for name in ("delta", "rho")]
    close(means[:2], wanted, 1e-6 if dtype == torch.float64 else 2e-5)


def test_circulant():
    case = CASES["circulant"]
    kernel = numbers(case["kernel"])
    rows = torch.stack([kernel.roll(i) for i in range(16)])
    gain = torch.fft.fft(kernel).real
    edited = torch.fft.fft(edit_rows(rows, torch.full((16,), case["delta"]))[0]).real
    close(gain, case["H"])
    close(edited, case["H_new"])
    share = kernel[0] * (1 - math.exp(-case["delta"]))
    close(share, case["s"])
    close(edited, ((gain - share) / (1 - share)).tolist())
    assert (share <= 2 * gain / (1 + gain)).tolist() == case["safe_bins"]


def test_spectral_optimum():
    case = CASES["spectral_optimum"]
    row, frame = numbers(case["row"]), case["frame"]
    # the case closes its band below phi2 = N / 2; ours takes the last bin in, so the search below has the word
    rows = torch.stack([row.roll(i - frame) for i in range(16)])
    found = spectral_cap(rows, TiARA(window_length=case["L"], phi1=case["phi1"]))[frame]
    trials = torch.linspace(0, row[frame].item(), 4001, dtype=torch.float64)
    tried = row.repeat(4001, 16, 1)
    tried[:, :, frame] = trials[:, None]
    for first, last, wanted in ((4, 9, row[frame] * (-found).exp()), (4, 8, numbers(case["x_star"]))):
        energy = dstft_power(tried, TiARA(window_length=case["L"]), first, last)[:, frame].sum(-1)
        assert abs(trials[energy.argmin()] - wanted) < 1.1 * row[frame] / 4000
    bins = tiara._spectrum_table(TiARA(window_length=case["L"]), 16, case["phi1"], case["phi2"])[frame]
    rest = row.clone()
    rest[frame] = 0.0
    best = -((rest @ bins.real).mean() / bins[frame, 0].real)
    close(best, case["x_star"])
    close((row[frame] / best).log(), case["delta_star"])


@DTYPES
def test_gain_table(dtype):
    at = torch.arange(16)
    distance = at.minimum(16 - at).double()
    for case in CASES["gain_table"]:
        kernel = (1 - case["spike"]) * torch.softmax(-0.5 * (distance / case["sigma"]) ** 2, 0)
        kernel[0] += case["spike"]
        rows = torch.stack([kernel.roll(i) for i in range(16)]).to(dtype)
        close(motion_intensity(rows, TiARA())[0], case["rho"])
        # a cap of 4.6 where the band is all but empty is a logarithm of what float32 has left of it
        close(spectral_cap(rows, TiARA())[0].clamp(max=99.0), case["cap"], 2e-4 if dtype == torch.float32 else None)
        energies = {}
        for name, delta in (
            ("none", torch.zeros(16)),
            ("fixed6", torch.full((16,), 6.0)),
            ("tiara6", adaptive_bias(rows, TiARA())),
            ("capped6", adaptive_bias(rows, TiARA.safe())),
        ):
            gain = torch.fft.fft(edit_rows(rows, delta)[0]).real
            energies[name] = gain[4:13].square().sum()
            close(energies[name], case[name], 1e-7 if dtype == torch.float64 else 2e-5)
        assert energies["capped6"] <= energies["tiara6"] + 1e-6


def test_the_edit_keeps_ratios_and_is_the_nearest_row_of_its_own_mass():
    g = torch.Generator().manual_seed(1)
    rows = torch.randn(9, 9, generator=g, dtype=torch.float64).softmax(-1)
    before = rows.diagonal()
    for delta in (0.5, 2.0, 6.0):
        edited = edit_rows(rows, torch.full((9,), delta))
        ratio = (edited / rows).masked_fill(torch.eye(9, dtype=torch.bool), torch.nan)
        assert torch.allclose(ratio.nan_to_num(1.0).amax(-1), ratio.nan_to_num(9.0).amin(-1))
        assert (edited.diagonal() < before).all()
        before = edited.diagonal()
        cost = torch.nn.functional.kl_div(rows.log(), edited, reduction="none").sum(-1) + delta * edited.diagonal()
        other = (edited.log() + 0.2 * torch.randn(200, 9, 9, generator=g, dtype=torch.float64)).softmax(-1)
        costs = (other * (other / rows).log()).sum(-1) + delta * other.diagonal(dim1=-2, dim2=-1)
        assert (costs >= cost - 1e-12).all()


@pytest.mark.parametrize("boundary", ["circular", "reflect", "zero"])
@pytest.mark.parametrize("grid", ["frames", "padded"])
def test_cap_is_the_best_own_weight_of_every_row(boundary, grid):
    """Against a search, end rows and mirrored own entries included."""
    rows = torch.randn(7, 7, generator=torch.Generator().manual_seed(2), dtype=torch.float64).softmax(-1)
    cfg = TiARA(boundary=boundary, grid=grid)
    first, half = cfg.bands(7)[0], (7 if grid == "frames" else 13) // 2 + 1
    own = rows.diagonal()
    best = own * (-spectral_cap(rows, cfg)).exp()
    for frame in range(7):
        tried = rows.repeat(2001, 1, 1)
        tried[:, frame, frame] = torch.linspace(0, own[frame].item(), 2001, dtype=torch.float64)
        energy = dstft_power(tried, cfg, first, half)[:, frame].sum(-1)
        assert abs(tried[energy.argmin(), frame, frame] - best[frame]) < 1.1 * own[frame] / 2000


OPTIONS = [
    {},
    {"cap": True},
    {"booster": 0.7},
    {"boundary": "reflect", "cap": True},
    {"boundary": "zero", "cap": True, "booster": 0.5},
    {"grid": "padded", "cap": True, "booster": 1.0},
    {"pool": "heads"},
    {"pool": "space", "cap": True},
    {"window_length": 5, "window": "periodic"},
    {"window_length": 9, "phi1": 2, "phi2": 3, "booster": 0.3},
    {"corner_frames": 2, "corner_strength": 1.5},
]


@pytest.mark.parametrize("frames", [7, 8, 16, 21, 32])
def test_fast_form_is_the_algorithm(frames):
    g = torch.Generator().manual_seed(frames)
    q, k, v = (torch.randn(6, 2, frames, 12, generator=g, dtype=torch.float64) for _ in range(3))
    rows = (q @ k.transpose(-1, -2) * 12**-0.5).softmax(-1).view(2, 3, 2, frames, frames)
    for options in OPTIONS:
        cfg = TiARA(**options)
        delta = adaptive_bias(rows, cfg)
        edited = edit_rows(rows, delta, corner_bias(frames, cfg))
        wanted = (edited @ v.view(2, 3, 2, frames, 12)).view_as(v)
        for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 2e-5)):
            plan = temporal_plan(cfg, frames, dtype=dtype)
            out, means = tiara_temporal(
                *(one.to(dtype) for one in (q, k, v)), plan, pool=cfg.pool, videos=2, means=True
            )
            torch.testing.assert_close(out, wanted.to(dtype), rtol=0, atol=tolerance)
            rho = motion_intensity(tiara.pool_rows(rows, cfg.pool), cfg)
            full = [
                delta.mean(),
                rho.mean(),
                rows.diagonal(dim1=-2, dim2=-1).mean(),
                edited.diagonal(dim1=-2, dim2=-1).mean(),
            ]
            torch.testing.assert_close(means, torch.stack(full).to(dtype), rtol=0, atol=10 * tolerance)


def test_booster_takes_more_where_motion_is_abnormal():
    rows = torch.stack([prototype("alternating", 16), prototype("gauss_2.0", 16)])
    plain, boosted = adaptive_bias(rows, TiARA()), adaptive_bias(rows, TiARA(booster=1.0))
    more = (boosted / plain).mean(-1)
    assert more[0] > 1.08 > 1.01 > more[1] >= 1.0


def test_sharp_rows_keep_their_digits():
    """a_ii = 1 - 1e-6 in float32, and 16-bit rows are edited in float32."""
    rows = torch.full((8, 8), 1e-6 / 7)
    rows.fill_diagonal_(1 - 1e-6)
    edited = edit_rows(rows, torch.full((8,), 12.0))
    exact = edit_rows(rows.double(), torch.full((8,), 12.0, dtype=torch.float64))
    torch.testing.assert_close(edited.double(), exact, rtol=1e-5, atol=0)
    assert edit_rows(rows.bfloat16(), torch.full((8,), 12.0)).dtype == torch.float32
    assert (
        not edit_rows(torch.zeros(8, 8), torch.ones(8)).any()
        and not motion_intensity(torch.zeros(8, 8), TiARA()).any()
    )


@pytest.mark.parametrize("settings", [{"alpha": 1e4}, {"alpha": 1.0, "corner_frames": 7, "corner_strength": 1e4}])
def test_huge_biases_stay_finite(settings):
    """Rows that see nothing but themselves, or nothing but a corner, in float32: there is no other entry to go to."""
    cfg = TiARA(**settings)
    q = 200 * torch.eye(8)[None, None]
    k = q if "corner_frames" not in settings else q.roll(4, -1)
    v = torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    out, means = tiara_temporal(q, k, v, temporal_plan(cfg, 8), means=True)
    rows = (q @ k.mT * 8**-0.5).softmax(-1)
    edited = edit_rows(rows, adaptive_bias(rows, cfg), corner_bias(8, cfg))
    assert out.isfinite().all() and means.isfinite().all()
    torch.testing.assert_close(edited.sum(-1), torch.ones(1, 1, 8))
    torch.testing.assert_close(out, edited @ v)


def test_tables_are_made_once_and_are_no_inference_tensors():
    cfg = TiARA(alpha=4.25)
    with torch.inference_mode():
        plan = temporal_plan(cfg, 11)
        adaptive_bias(torch.eye(11), cfg)
    assert temporal_plan(replace(cfg, steps=(0, 3), layers="mid"), 11) is plan
    assert not plan.basis.is_inference()
    q = torch.randn(2, 1, 11, 4, requires_grad=True)
    out, _ = tiara_temporal(q, q, q, plan)
    out.sum().backward()
    assert q.grad is not None and q.grad.isfinite().all()
    adaptive_bias(q.softmax(-1) @ q.softmax(-1).mT, cfg).sum().backward()


def test_gradients():
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 2, 8, 3, generator=g, dtype=torch.float64, requires_grad=True) for _ in range(3))
    plan = temporal_plan(TiARA(booster=0.5), 8, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda *given: tiara_temporal(*given, plan)[0], (q, k, v))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": -1.0}, "alpha=-1.0; write a finite number >= 0"),
        ({"alpha": math.nan}, "alpha=nan"),
        ({"alpha": math.inf}, "alpha=inf"),
        ({"window_length": 0}, "window_length=0; write a whole number >= 1"),
        ({"window_length": 2}, "only zero taps"),
        ({"window": "hann"}, "window='hann' is unknown; allowed are 'symmetric', 'periodic'"),
        ({"boundary": "wrap"}, "allowed are 'circular', 'reflect', 'zero'"),
        ({"pool": "time"}, "pool='time' is unknown"),
        ({"phi1": 4, "phi2": 4}, "not below phi2"),
        ({"phi2": 1}, "no bin for fast motion"),
        ({"steps": (3, 1)}, "two fractions"),
        ({"steps": (0, 0.5)}, "two fractions"),
        ({"steps": 4}, "two fractions"),
        ({"layers": "("}, "not a regular expression"),
        ({"layers": []}, "a list of indices from 0"),
        ({"mass_floor": 1.0}, "mass_floor=1.0"),
        ({"cap": 1}, "True or False"),
        ({"route": ""}, "name of a route"),
    ],
)
def test_wrong_settings(settings, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        TiARA(**settings)


def test_wrong_sizes():
    with pytest.raises(ValueError, match="reads 7 frames and the clip has 6"):
        TiARA(window_length=9).bands(6)
    with pytest.raises(ValueError, match="phi2=9 exceeds the 8 bins"):
        TiARA(phi2=9).bands(8)
    with pytest.raises(ValueError, match="phi1=8, so phi2=9, exceeds the 8 bins"):
        TiARA(phi1=8).bands(8)
    with pytest.raises(ValueError, match=r"give \[.., N, N\]"):
        motion_intensity(torch.zeros(3, 4), TiARA())
    with pytest.raises(ValueError, match="too few"):
        temporal_plan(TiARA(), 4)
    with pytest.raises(ValueError, match="needs"):
        adaptive_bias(torch.eye(8)[None], TiARA(pool="space"))


def test_steps():
    assert [TiARA(steps=(1, 2)).at_step(i, None) for i in range(4)] == [False, True, True, False]
    assert [TiARA(steps=(0.0, 0.5)).at_step(i, 5) for i in range(5)] == [True, True, True, False, False]
    with pytest.raises(ValueError, match="set_step"):
        TiARA(steps=(0.0, 0.5)).at_step(0, None)
    assert TiARA.paper() == TiARA() and TiARA.safe(alpha=5.0) == TiARA(alpha=5.0, cap=True)


def test_examples():
    for module in (tiara, __import__("mediaspec.attention.tiara_settings", fromlist=["x"])):
        result = doctest.testmod(module)
        assert result.failed == 0 and result.attempted > 0
