"""Steps of slots at their own levels against the formulas of one level, and noise that can be addressed."""

from __future__ import annotations

import pytest
import torch

from mediaspec.memory.frame_noise import FRESH, STEP, FrameNoise
from mediaspec.memory.slot_steps import AlphasPath, CosinePath, FlowPath, SlotSampler, VarianceTrack, posterior, snr

G = torch.Generator().manual_seed(0)
X, OUT, NOISE = (torch.randn(2, 3, 4, 5, 5, generator=G, dtype=torch.float64) for _ in range(3))
T = torch.tensor([0.2, 0.5, 0.5, 1.0], dtype=torch.float64)
S = torch.tensor([0.0, 0.3, 0.5, 0.9], dtype=torch.float64)
PATHS = {"cosine": CosinePath(), "flow": FlowPath(), "alphas": AlphasPath(torch.linspace(0.999, 0.01, 50).double())}


@pytest.mark.parametrize("path", PATHS)
def test_the_posterior_is_bayes_rule(path):
    """Given x_s ~ N(a_s x0, s_s^2) and x_t = r x_s + noise, the Gaussian of x_s given both."""
    levels = torch.rand(2, 50, generator=G, dtype=torch.float64).sort(0).values
    s, t = levels[0], levels[1]
    curve = PATHS[path]
    a, b, v = posterior(curve, t, s)
    ratio = curve.signal(t) / curve.signal(s)
    added = curve.noise(t) ** 2 - ratio**2 * curve.noise(s) ** 2
    precision = 1 / curve.noise(s) ** 2 + ratio**2 / added
    torch.testing.assert_close(v, 1 / precision)
    torch.testing.assert_close(a, ratio / added / precision)
    torch.testing.assert_close(b, curve.signal(s) / curve.noise(s) ** 2 / precision)
    torch.testing.assert_close(b**2 / v, snr(curve, s) - snr(curve, t), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", ["euler", "ddim", "posterior", "tracked", "renoise"])
@pytest.mark.parametrize("prediction", ["sample", "epsilon", "v_prediction", "flow_prediction"])
def test_slots_are_independent(kind, prediction):
    """A window equals its slots stepped alone, and slots that stay are copied bit for bit."""
    path = FlowPath() if prediction == "flow_prediction" else CosinePath()
    sampler = SlotSampler(path, kind, prediction, eta=0.5 if kind == "ddim" else 0.0)
    t = T if prediction != "epsilon" else T.clamp_max(0.95)
    variance = torch.tensor([0.1, 0.2, 0.3, 0.4])
    whole = sampler.step(OUT, X, t, S, NOISE, variance)
    assert bool(whole.isfinite().all()) and torch.equal(whole[:, :, 2], X[:, :, 2])
    for j in range(4):
        one = slice(j, j + 1)
        alone = sampler.step(OUT[:, :, one], X[:, :, one], t[one], S[one], NOISE[:, :, one], variance[one])
        assert torch.equal(alone, whole[:, :, one])


def test_euler_is_the_flow_and_ddim_between_paths():
    flow = SlotSampler(FlowPath())
    wanted = X + (S - T)[:, None, None] * OUT
    torch.testing.assert_close(flow.step(OUT, X, T, S), torch.where((S == T)[:, None, None], X, wanted))
    clean = SlotSampler(FlowPath(), "euler", "sample").step(X - T[:, None, None] * OUT, X, T, S)
    torch.testing.assert_close(clean, flow.step(OUT, X, T, S))
    cosine = CosinePath()
    t, s = torch.tensor([0.6], dtype=torch.float64), torch.tensor([0.2], dtype=torch.float64)
    x, e = X[:, :, :1], OUT[:, :, :1]
    made = SlotSampler(cosine, "ddim", "epsilon").step(e, x, t, s)
    x0 = (x - cosine.noise(t) * e) / cosine.signal(t)
    torch.testing.assert_close(made, cosine.signal(s) * x0 + cosine.noise(s) * e)
    full = SlotSampler(cosine, "ddim", "epsilon", eta=1.0).step(e, x, t, s, NOISE[:, :, :1])
    ancestral = SlotSampler(cosine, "posterior", "epsilon").step(e, x, t, s, NOISE[:, :, :1])
    torch.testing.assert_close(full, ancestral)


def test_tracked_steps_put_back_what_is_open():
    """With E[x0 | x_t] and its variance, a step from a Gaussian lands exactly on the right variance."""
    path, t, s = CosinePath(), torch.tensor([0.9]).double(), torch.tensor([0.4]).double()
    a, n = float(path.signal(t)), float(path.noise(t))
    gain, left = a / (a * a + n * n), 1 - a * a / (a * a + n * n)
    keep, b, v = (float(one) for one in posterior(path, t, s))
    made = (keep + b * gain) ** 2 * (a * a + n * n) + v + b * b * left
    assert made == pytest.approx(float(path.signal(s)) ** 2 + float(path.noise(s)) ** 2, rel=1e-9)
    track = VarianceTrack(2, 1)
    with pytest.raises(ValueError, match="no error was measured for sub-step 1"):
        track.read(1)
    track.update(1, torch.tensor([left]))
    sampler = SlotSampler(path, "tracked", "sample")
    one = torch.zeros(1, 1, 1, dtype=torch.float64)
    step = sampler.step(one, one, t, s, one + 1, track.read(1))
    assert float(step) == pytest.approx((v + b * b * left) ** 0.5, rel=1e-6)
    other = VarianceTrack(2, 1)
    other.load_state_dict(track.state_dict())
    assert torch.equal(other.read(1), track.read(1))


def test_wrong_steps_are_refused():
    sampler = SlotSampler(FlowPath())
    with pytest.raises(ValueError, match="levels go up"):
        sampler.step(OUT, X, S, T)
    with pytest.raises(ValueError, match="draws noise"):
        SlotSampler(FlowPath(), "renoise").step(OUT, X, T, S)
    with pytest.raises(ValueError, match="needs the variance"):
        SlotSampler(FlowPath(), "tracked").step(OUT, X, T, S, NOISE)
    with pytest.raises(ValueError, match="allowed are euler"):
        SlotSampler(FlowPath(), "heun")
    with pytest.raises(ValueError, match="eta"):
        SlotSampler(FlowPath(), "euler", eta=0.5)
    with pytest.raises(ValueError, match="falls"):
        AlphasPath(torch.tensor([0.5, 0.9]))


def test_noise_is_normal_and_addressed():
    source = FrameNoise(torch.arange(64), (3, 8, 8), torch.float64)
    drawn = source([4, 9], STEP, 3)
    assert drawn.shape == (64, 3, 2, 8, 8)
    assert torch.equal(source([9], STEP, 3)[:, :, 0], drawn[:, :, 1])
    for other in (source([4], FRESH, 3), source([4], STEP, 4), source([5], STEP, 3)):
        assert abs(float(torch.corrcoef(torch.stack([other.flatten(), drawn[:, :, 0].flatten()]))[0, 1])) < 0.04
    values = drawn.flatten()  # 24,576 numbers: 4 deviations of the mean are 0.026, of the variance 0.036
    assert abs(float(values.mean())) < 0.026 and abs(float(values.var()) - 1) < 0.036
    assert abs(float((values**4).mean()) - 3) < 0.25
    assert source([], FRESH).shape == (64, 3, 0, 8, 8)
