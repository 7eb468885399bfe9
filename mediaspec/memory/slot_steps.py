"""One denoising step of a window whose frames stand at different noise levels, each with coefficients of its own.

A frame at level u is x = a(u) x0 + s(u) e. Steps from level t down to s < t:

    euler       x + (u_s - u_t) v, the ODE of flow matching; for other paths DDIM with eta 0
    ddim        the same with a share `eta` of fresh noise (arXiv:2010.02502, eq. 16)
    posterior   the law of x_s given x_t and the predicted x0, arXiv:2006.11239 eq. 6-7 (DDIM with eta 1)
    tracked     the posterior's mean with variance v + b^2 mse: the spread of what the prediction leaves open is put
                back, so that few steps do not make frames too certain
    renoise     a(s) x0 + s(s) e, predict clean and noise again (the few-step causal models)

With x_s = A x_t + B x0 + sqrt(v) e the posterior has

    beta = s_t^2 - (a_t / a_s)^2 s_s^2,  A = (a_t / a_s) s_s^2 / s_t^2,  B = a_s beta / s_t^2,  v = beta s_s^2 / s_t^2

and B^2 / v = snr(s) - snr(t). Slots with s = t are copied bit for bit. Levels are fractions in [0, 1], 1 the noisiest.
B rows, C channels, w slots.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = [
    "AlphasPath",
    "CosinePath",
    "FlowPath",
    "NoisePath",
    "SlotSampler",
    "VarianceTrack",
    "posterior",
    "snr",
]

KINDS = ("euler", "ddim", "posterior", "tracked", "renoise")
PREDICTIONS = ("sample", "epsilon", "v_prediction", "flow_prediction")


class NoisePath(Protocol):
    """How much of the frame and how much noise a level holds."""

    def signal(self, level: Tensor) -> Tensor:
        """a(u), elementwise, in the dtype of `level`."""
        ...

    def noise(self, level: Tensor) -> Tensor:
        """s(u), elementwise."""
        ...


@dataclass(frozen=True)
class CosinePath:
    """Variance preserving: a = cos(pi u / 2), s = sin(pi u / 2)."""

    def signal(self, level: Tensor) -> Tensor:
        return torch.cos(level * (math.pi / 2))

    def noise(self, level: Tensor) -> Tensor:
        return torch.sin(level * (math.pi / 2))


@dataclass(frozen=True)
class FlowPath:
    """Flow matching: a = 1 - u, s = u."""

    def signal(self, level: Tensor) -> Tensor:
        return 1 - level

    def noise(self, level: Tensor) -> Tensor:
        return level


class AlphasPath:
    """The path of a discrete diffusion model: level i / T has its i-th alpha-bar, level 0 none of the noise.

    Args:
        alphas_cumprod: [T] falling, as diffusers' schedulers keep them; between the T levels alpha-bar is linear.

    Raises:
        ValueError: not falling within (0, 1].
    """

    def __init__(self, alphas_cumprod: Tensor) -> None:
        table = torch.cat([torch.ones(1, dtype=torch.float64), alphas_cumprod.detach().double().cpu()])
        if table.dim() != 1 or len(table) < 2 or bool((table.diff() > 0).any()) or float(table[-1]) < 0:
            raise ValueError("alphas_cumprod must be a 1-D tensor that falls from at most 1 and stays at or above 0")
        self._table = table

    def _kept(self, level: Tensor) -> Tensor:
        table = self._table.to(level.device, level.dtype)
        place = level * (len(table) - 1)
        low = place.floor().clamp(0, len(table) - 2).long()
        return table[low] + (table[low + 1] - table[low]) * (place - low)

    def signal(self, level: Tensor) -> Tensor:
        return self._kept(level).sqrt()

    def noise(self, level: Tensor) -> Tensor:
        return (1 - self._kept(level)).clamp_min(0).sqrt()


def snr(path: NoisePath, level: Tensor) -> Tensor:
    """Signal-to-noise ratio a^2 / s^2, elementwise; infinite at level 0."""
    return (path.signal(level) / path.noise(level)) ** 2


def posterior(path: NoisePath, t: Tensor, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(A, B, v) of the posterior step from t to s <= t, elementwise; (1, 0, 0) where s = t.

    Example:
        >>> a, b, v = posterior(CosinePath(), torch.tensor(0.8), torch.tensor(0.3))
        >>> gained = snr(CosinePath(), torch.tensor(0.3)) - snr(CosinePath(), torch.tensor(0.8))
        >>> bool((b**2 / v - gained).abs() < 1e-4)
        True
    """
    a_t, s_t, a_s, s_s = path.signal(t), path.noise(t), path.signal(s), path.noise(s)
    same = s >= t
    total = torch.where(same, 1.0, s_t**2)
    ratio = a_t / a_s
    beta = (s_t**2 - ratio**2 * s_s**2).clamp_min(0)
    one, nought = torch.ones_like(ratio), torch.zeros_like(ratio)
    return (
        torch.where(same, one, ratio * s_s**2 / total),
        torch.where(same, nought, a_s * beta / total),
        torch.where(same, nought, beta * s_s**2 / total),
    )


class VarianceTrack:
    """A running mean of the squared error of the predicted clean frames, per slot and sub-step.

    "tracked" steps take what the network leaves open from here. It is filled on real clips, where the error is known,
    or from networks that return a variance with their prediction.

    Args:
        m_ar: sub-steps; w: slots.
        rate: weight of a new value; the first one counts in full.

    Example:
        >>> track = VarianceTrack(1, 2)
        >>> track.update(0, torch.tensor([0.2, 0.4]))
        >>> track.read(0).tolist()
        [0.20000000298023224, 0.4000000059604645]
    """

    def __init__(self, m_ar: int, w: int, rate: float = 0.05) -> None:
        if not 0 < rate <= 1:
            raise ValueError(f"rate={rate}; a running mean needs a weight in (0, 1]")
        self.rate = rate
        self.mse = torch.zeros(m_ar, w)
        self.count = torch.zeros(m_ar, dtype=torch.int64)

    def update(self, m: int, mse: Tensor) -> None:
        """Takes the mean squared errors [w] of sub-step m."""
        weight = 1.0 if int(self.count[m]) == 0 else self.rate
        self.mse[m] += weight * (mse.detach().cpu().to(self.mse.dtype) - self.mse[m])
        self.count[m] += 1

    def read(self, m: int) -> Tensor:
        """[w] mean squared errors of sub-step m.

        Raises:
            ValueError: nothing was measured there.
        """
        if int(self.count[m]) == 0:
            raise ValueError(
                f"no error was measured for sub-step {m}; call update(m, mse) on real clips first, or sample with "
                "kind='posterior'"
            )
        return self.mse[m]

    def state_dict(self) -> dict[str, Tensor]:
        return {"mse": self.mse.clone(), "count": self.count.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        if state["mse"].shape != self.mse.shape:
            raise ValueError(f"errors of shape {tuple(state['mse'].shape)}; this schedule has {tuple(self.mse.shape)}")
        self.mse, self.count = state["mse"].clone(), state["count"].clone()


class SlotSampler:
    """Steps a window from levels t to levels s, slot by slot.

    Args:
        path: of the model.
        kind: see the head of this file.
        prediction: what the network returns: "sample" (clean frames), "epsilon", "v_prediction", or
            "flow_prediction" (noise minus frames).
        eta: share of fresh noise, "ddim" only.
        track: where "tracked" steps read errors of networks that return no variance.
        clip: bound of the predicted clean frames, or None.

    Raises:
        ValueError: unknown names or an eta outside [0, 1].

    Example:
        >>> sampler = SlotSampler(FlowPath())
        >>> x, velocity = torch.ones(1, 1, 2), torch.full((1, 1, 2), 2.0)
        >>> sampler.step(velocity, x, torch.tensor([0.5, 1.0]), torch.tensor([0.5, 0.75]))
        tensor([[[1.0000, 0.5000]]])
    """

    def __init__(
        self,
        path: NoisePath,
        kind: str = "euler",
        prediction: str | None = None,
        *,
        eta: float = 0.0,
        track: VarianceTrack | None = None,
        clip: float | None = None,
    ) -> None:
        prediction = prediction or ("flow_prediction" if isinstance(path, FlowPath) else "sample")
        if kind not in KINDS:
            raise ValueError(f"kind={kind!r}; allowed are {', '.join(KINDS)}")
        if prediction not in PREDICTIONS:
            raise ValueError(f"prediction={prediction!r}; allowed are {', '.join(PREDICTIONS)}")
        if not 0.0 <= eta <= 1.0 or (eta and kind != "ddim"):
            raise ValueError(f"eta={eta} with kind={kind!r}; eta lies in [0, 1] and belongs to kind='ddim'")
        self.path, self.kind, self.prediction = path, kind, prediction
        self.eta, self.track, self.clip = eta, track, clip

    @property
    def draws(self) -> bool:
        """Whether `step` needs noise."""
        return self.kind in ("posterior", "tracked", "renoise") or self.eta > 0

    def add_noise(self, clean: Tensor, level: Tensor, noise: Tensor) -> Tensor:
        """Clean frames [B, C, w, ...] at levels [w]."""
        a, s = self._wide(self.path.signal, level, clean), self._wide(self.path.noise, level, clean)
        return (a * clean + s * noise.to(a.dtype)).to(clean.dtype)

    def clean(self, output: Tensor, x: Tensor, t: Tensor) -> Tensor:
        """The clean frames that a network output stands for, in float32 or better."""
        return self._parts(output, x, t)[0]

    def step(
        self,
        output: Tensor,
        x: Tensor,
        t: Tensor,
        s: Tensor,
        noise: Tensor | None = None,
        variance: Tensor | None = None,
    ) -> Tensor:
        """The window at the next levels.

        Args:
            output: [B, C, w, ...] of the network.
            x: [B, C, w, ...] window at levels `t`.
            t, s: [w] levels in [0, 1], s <= t.
            noise: [B, C, w, ...] standard normal, if `draws`.
            variance: "tracked": [w], or anything that spreads to x, mean squared error of the predicted frames.

        Returns:
            [B, C, w, ...] in the dtype of x, worked out in float32 or better.

        Raises:
            ValueError: s > t somewhere, or noise or a variance is missing.
        """
        if bool((s > t).any()):
            raise ValueError(
                f"levels go up, from {t.tolist()} to {s.tolist()}; a step goes down, noise with add_noise"
            )
        if self.draws and noise is None:
            raise ValueError(f"kind={self.kind!r} draws noise; pass noise of shape {tuple(x.shape)}")
        moved = self._move(output, x, t, s, noise, variance).to(x.dtype)
        return torch.where(_spread((s >= t).to(x.device), x), x, moved)

    def _move(
        self, output: Tensor, x: Tensor, t: Tensor, s: Tensor, noise: Tensor | None, variance: Tensor | None
    ) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        if self.kind == "euler" and self.prediction == "flow_prediction" and self.clip is None:
            t_wide, s_wide = t.to(wide), s.to(wide)
            return x.to(wide) + _spread((s_wide - t_wide).to(x.device), x) * output.to(wide)
        clean, error = self._parts(output, x, t)
        a_s, s_s = self._wide(self.path.signal, s, x), self._wide(self.path.noise, s, x)
        if self.kind in ("euler", "ddim") and self.eta == 0:
            return a_s * clean + s_s * error
        assert noise is not None
        noise = noise.to(clean.dtype)
        if self.kind == "renoise":
            return a_s * clean + s_s * noise
        a, b, v = (_spread(one.to(x.device, wide), x) for one in posterior(self.path, t.double(), s.double()))
        if self.kind == "ddim":
            return a_s * clean + (s_s**2 - self.eta**2 * v).clamp_min(0).sqrt() * error + self.eta * v.sqrt() * noise
        if self.kind == "tracked":
            if variance is None:
                raise ValueError(
                    "kind='tracked' needs the variance of the prediction; give a track, or kind='posterior'"
                )
            variance = variance.to(x.device, wide)
            v = v + b**2 * (_spread(variance, x) if variance.dim() == 1 else variance)
        return a * x.to(wide) + b * clean + v.sqrt() * noise

    def _parts(self, output: Tensor, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """(clean frames, noise) that the output stands for."""
        wide = torch.promote_types(x.dtype, torch.float32)
        output, x = output.to(wide), x.to(wide)
        a, s = self._wide(self.path.signal, t, x), self._wide(self.path.noise, t, x)
        if self.prediction == "epsilon":
            clean = (x - s * output) / a.clamp_min(1e-6)
        elif self.prediction == "v_prediction":
            clean = a * x - s * output
        elif self.prediction == "flow_prediction":
            clean = (x - s * output) / (a + s)
        else:
            clean = output
        if self.clip is not None:
            clean = clean.clamp(-self.clip, self.clip)
        elif self.prediction == "epsilon":
            return clean, output
        return clean, torch.where(s > 0, (x - a * clean) / s.clamp_min(1e-12), torch.zeros_like(x))

    @staticmethod
    def _wide(curve, level: Tensor, like: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        """A curve at levels [w], worked out in float64 and shaped for [B, C, w, ...]."""
        wide = torch.promote_types(like.dtype, torch.float32)
        return _spread(curve(level.double()).to(like.device, wide), like)


def _spread(values: Tensor, like: Tensor) -> Tensor:
    """[w] values shaped for [B, C, w, ...]."""
    return values.reshape(1, 1, -1, *[1] * (like.dim() - 3))
