"""The frame-level row of a joint attention: stored numbers, sampling, bounds, and how long a row is kept."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mediaspec.attention.frame_row import FrameRows, floor_delta, frame_edit, frame_masses
from mediaspec.attention.tiara import TiARA, adaptive_bias
from mediaspec.kernels.tiara_bias import FrameLayout, framed_attention
from mediaspec.kernels.tiara_bias.cases import make_case

STORED = json.loads((Path(__file__).parents[1] / "data" / "tiara_joint_cases.json").read_text())["joint"]
LAYOUT = FrameLayout(3, 4, 2)
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 2e-2}


def stored(name: str, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(STORED[name], dtype=torch.float64).to(dtype)


def rows(frames: int = 6, seed: int = 0) -> torch.Tensor:
    """[1, 2, F, F] masses whose rows leave a fifth to text."""
    g = torch.Generator().manual_seed(seed)
    return 0.8 * torch.randn(1, 2, frames, frames, generator=g, dtype=torch.float64).mul(2).softmax(-1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_stored_masses(dtype):
    q, k = (stored(name, dtype)[None, None] for name in "qk")
    masses = frame_masses(q, k, LAYOUT, 4)
    assert masses.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert (masses[0, 0] - stored("frame_mass")).abs().max() < TOLERANCE[dtype]
    normalised = masses / masses.sum(-1, keepdim=True)
    assert (normalised[0, 0] - stored("frame_mass_normalised")).abs().max() < TOLERANCE[dtype]


def test_stored_floor():
    own = stored("frame_mass_normalised").diagonal()
    found = floor_delta(torch.full_like(own, 5.0), own, STORED["floor"])
    assert (found - stored("floored_delta_from_5")).abs().max() < 1e-9


@pytest.mark.parametrize("mask", [False, True])
def test_more_frames_than_channels_and_a_mask(mask):
    """Codes go through the kernel in groups as wide as a head."""
    case = make_case(FrameLayout(7, 3, 2), 3, size=4, dtype=torch.float64)
    seen = torch.ones(2, 26, dtype=torch.bool)
    if mask:
        seen[:, 24:] = False
    found = frame_masses(case.q, case.k, case.layout, 99, key_mask=seen if mask else None)
    logits = (case.q @ case.k.transpose(-1, -2) / 2).masked_fill(~seen[:, None, None], -torch.inf)
    exact = logits.softmax(-1)[:, :, 2:23, 2:23].unflatten(2, (7, 3)).unflatten(4, (7, 3)).sum(-1).mean(3)
    assert (found - exact).abs().max() < 1e-9


def test_samples_are_strided_and_close():
    """Of 40 queries 8 are read: exactly those at 2, 7, 12 ..., and on random ones their mean is near."""
    case = make_case(FrameLayout(5, 40), 0, 1, 1, size=16, dtype=torch.float64)
    few, all_of_them = (frame_masses(case.q, case.k, case.layout, count) for count in (8, 40))
    kept = torch.arange(5)[:, None] * 40 + torch.arange(2, 40, 5)
    picked = (case.q[:, :, kept.flatten()] @ case.k.transpose(-1, -2) / 4).softmax(-1)
    assert (few - picked.unflatten(2, (5, 8)).unflatten(4, (5, 40)).sum(-1).mean(3)).abs().max() < 1e-9
    assert (few - all_of_them).abs().max() < 0.1 and not torch.equal(few, all_of_them)


def test_edit_is_that_of_a_temporal_row():
    masses = rows()
    cfg = TiARA(joint_alpha=0.7, mass_floor=0.0)
    normalised = masses / masses.sum(-1, keepdim=True)
    plain = adaptive_bias(normalised, TiARA(alpha=0.7))
    found = frame_edit(masses, cfg)
    own = masses.diagonal(dim1=-2, dim2=-1)
    assert torch.allclose(found.delta, floor_delta(plain, own, 1 / 12), atol=1e-12)
    assert found.limit == 0.7 and float(found.delta.max()) <= found.limit


@pytest.mark.parametrize("alpha", [0.7, 5.0])
def test_mass_floor(alpha):
    """No row keeps less than half of its own mass, nor less than 1 / (2F) where it had as much."""
    masses = rows()
    found = frame_edit(masses, TiARA(joint_alpha=alpha, booster=0.5))
    own = masses.diagonal(dim1=-2, dim2=-1)
    left = own * (-found.delta).exp()
    after = left / (1 - own + left)
    least = torch.maximum(0.5 * own, torch.full_like(own, 1 / 12))
    assert (after >= torch.minimum(least, own) - 1e-9).all() and (found.delta >= 0).all()
    if alpha == 5.0:
        assert torch.isclose(after, least).any()  # the bound binds
    assert torch.allclose(
        found.means.double(), torch.stack([x.mean() for x in (found.delta, rho(masses), own, after)])
    )


def rho(masses: torch.Tensor) -> torch.Tensor:
    normalised = masses / masses.sum(-1, keepdim=True)
    return 1 - adaptive_bias(normalised, TiARA(alpha=1.0))


def test_floor_holds_for_the_attention_itself():
    """With every query read and one token a frame, the edited masses are the formula's."""
    case = make_case(FrameLayout(8, 1), 0, 1, 1, size=8, dtype=torch.float64)
    q = 3 * case.q
    masses = frame_masses(q, case.k, case.layout)
    found = frame_edit(masses, TiARA(joint_alpha=6.0))
    eye = torch.eye(8, dtype=torch.float64)[None, None]
    edited = framed_attention(q, case.k, eye, found.delta, case.layout).diagonal(dim1=-2, dim2=-1)
    assert float(edited.mean()) == pytest.approx(float(found.means[3]), abs=1e-6)


def test_cap_and_pool():
    masses = rows()
    plain, capped = (
        frame_edit(masses, TiARA(joint_alpha=3.0, mass_floor=0.0, cap=cap)).delta for cap in (False, True)
    )
    assert (capped <= plain).all() and (capped < plain).any()
    calm = 0.1 * masses + 0.1  # nowhere near the mass floor, which is each head's own
    pooled = frame_edit(calm, TiARA(pool="heads", joint_alpha=0.2)).delta
    apart = frame_edit(calm, TiARA(joint_alpha=0.2)).delta
    assert torch.equal(pooled[:, 0], pooled[:, 1]) and not torch.equal(apart[:, 0], apart[:, 1])
    space, none = (frame_edit(masses, TiARA(pool=pool)).delta for pool in ("space", None))
    assert torch.equal(space, none)


def test_rows_are_kept_for_refresh_steps():
    case = make_case(FrameLayout(5, 3), 0, 1, 2)
    kept = FrameRows(TiARA(refresh=3))

    def at(step: int, branch: str | None = None, run: int = 0, scale: float = 1.0):
        return kept.edit(scale * case.q, case.k, case.layout, step=step, branch=branch, run=run)

    first = at(0)
    assert at(1, scale=2.0) is first and at(2) is first
    again = at(3, scale=2.0)
    assert again is not first and not torch.equal(again.delta, first.delta)
    assert at(4) is again
    assert at(4, "uncond") is not again  # another cache context
    assert at(4) is not again  # the second call of a step, another window
    assert at(0, run=1) is not again  # a new run
    wide = case.q.repeat(2, 1, 1, 1)
    assert kept.edit(wide, wide, case.layout, step=1, run=1).delta.shape == (2, 2, 5)  # a new shape


def test_calls_beyond_the_slots_are_measured(monkeypatch):
    """The third window of a step does not get the row of the first."""
    monkeypatch.setattr("mediaspec.attention.frame_row.SLOTS", 2)
    case = make_case(FrameLayout(5, 3), 0, 1, 2)
    kept = FrameRows(TiARA())
    for step in range(2):
        for scale in (1.0, 2.0, 3.0):
            q = scale * case.q
            found = kept.edit(q, case.k, case.layout, step=step)
            assert torch.equal(found.delta, FrameRows(TiARA()).edit(q, case.k, case.layout, step=0).delta)
    assert len(kept._kept) == 2


def test_refusals():
    q = torch.zeros(1, 1, 10, 4)
    with pytest.raises(ValueError, match="queries_per_frame"):
        frame_masses(q, q, FrameLayout(5, 2), 0)
    with pytest.raises(ValueError, match="window"):
        frame_edit(rows(5), replace(TiARA(), window_length=9))
