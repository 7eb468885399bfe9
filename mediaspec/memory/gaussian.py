"""What an autoregressive video sampler gets wrong, exactly and in nats, for Gaussian videos (after arXiv:2503.10704).

P is the law of the data with forward noise, Q that of the sampler with the exact denoiser (or one with a given error).
A path is the first window, then for every autoregressive step k its fresh noise and the window after every sub-step m.
The chain rule splits the path exactly:

    KL(P || Q) = sum_k [ NIE_k + sum_m (DE_km + SEE_km) + MB_k ]          (finer path)
               = sum_k [ NIE_k + END_k + MB_k ]                          (window before and after a step only)

    NIE   noise initialisation: fresh frames are not quite noise, and not quite independent of the past
    DE    discretisation: a sub-step draws independent Gaussians, the truth is a joint one
    SEE   score estimation: the network is not E[X | window, references]
    END   DE and SEE of a whole step together, at most their sum
    MB    memory bottleneck I(Out_k; Past_k | In_k, R_k): what the past still says beyond the references R_k

MB is paid by every kernel that sees the window and the references alone. It cannot be seen in single clips, whose KL
stays below sum (NIE + END).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .gaussian_law import Features, GaussianVideo, gaussian_kl, logdet
from .slot_steps import posterior, snr
from .window_schedule import WindowSchedule

__all__ = ["GaussianRollout"]

SAMPLERS = ("posterior", "tracked", "renoise")


@dataclass
class _Step:
    """Variables of one autoregressive step: indices into the list of all variables."""

    frames: Tensor
    past: list[int]
    fresh: list[int]
    states: list[list[int]] = field(default_factory=list)


class GaussianRollout:
    """The exact law of a sampler on Gaussian videos, and its error in parts.

    Args:
        video: of the data; at least (steps - 1) delta + w frames.
        schedule: with a `clean_level` above 0 (a finished frame without noise has no finite KL).
        steps: K autoregressive steps.
        references: what the network sees of the past, in finished frames; None is nothing.
        bias, gain: error of the network, (1 + gain) E[X | ...] + bias.
        sampler: kind of step, "posterior", "tracked" or "renoise" (`SlotSampler`).

    Raises:
        ValueError: a schedule that breaks a condition, too few frames, an unknown sampler.

    Example:
        >>> from mediaspec.memory.gaussian_law import ar1
        >>> schedule = WindowSchedule(2, 2, (0.98, 0.98), 4, clean_level=0.05, noise_level=0.98)
        >>> report = GaussianRollout(GaussianVideo(ar1(8, 0.9)), schedule, 4).report()
        >>> round(report["totals"]["mb"], 3)
        2.414
    """

    def __init__(
        self,
        video: GaussianVideo,
        schedule: WindowSchedule,
        steps: int,
        references: Features | None = None,
        *,
        bias: float = 0.0,
        gain: float = 0.0,
        sampler: str = "posterior",
    ) -> None:
        if sampler not in SAMPLERS:
            raise ValueError(f"sampler={sampler!r}; allowed are {', '.join(SAMPLERS)}")
        if schedule.clean_level <= 0:
            raise ValueError("clean_level=0: finished frames without noise have no finite KL; take e.g. 0.05")
        needed = (steps - 1) * schedule.delta + schedule.w
        if steps < 1 or len(video.covariance) < needed:
            raise ValueError(f"{steps} steps need {max(needed, 1)} frames; the video has {len(video.covariance)}")
        self.video, self.schedule, self.count = video, schedule.validate(), steps
        self.references, self.bias, self.gain, self.sampler = references, bias, gain, sampler
        self.levels = [torch.tensor(schedule.level(m), dtype=torch.float64) for m in range(schedule.m_ar + 1)]
        self._index: dict[tuple[int, float], int] = {}
        self._build()
        self.frames = torch.tensor([frame for frame, _ in self._index])
        self.at = torch.tensor([level for _, level in self._index], dtype=torch.float64)
        self.cov = video.joint(self.frames, self.at)
        """Covariance of all variables under the data's law."""
        self._views: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}

    def _variable(self, frame: int, level: float) -> int:
        return self._index.setdefault((frame, round(level, 12)), len(self._index))

    def _build(self) -> None:
        w, delta = self.schedule.w, self.schedule.delta
        first = self.levels[0].tolist()
        self.start = [self._variable(j, first[j]) for j in range(w - delta)]
        self.steps: list[_Step] = []
        for k in range(self.count):
            ids = range(k * delta, k * delta + w)
            past = list(range(len(self._index)))
            fresh = [self._variable(i, self.schedule.noise_level) for i in ids[w - delta :]]
            states = [[self._variable(i, t) for i, t in zip(ids, level.tolist())] for level in self.levels]
            self.steps.append(_Step(torch.tensor(ids), past, fresh, states))
        self.clean = [self._variable(i, self.schedule.clean_level) for i in range(self.count * delta)]

    # ---- conditional laws

    def _cleanest(self, variables: list[int]) -> list[int]:
        """One variable per frame, the cleanest: the others say nothing more."""
        best: dict[int, int] = {}
        at, frames = self.at.tolist(), self.frames.tolist()
        for i in variables:
            if frames[i] not in best or at[i] < at[best[frames[i]]]:
                best[frames[i]] = i
        return sorted(best.values())

    def _features(self, k: int) -> Tensor:
        """[R, variables] references of step k."""
        if self.references is None:
            return self.cov.new_zeros(0, len(self.cov))
        ids, features = self.references(k * self.schedule.delta)
        found = self.cov.new_zeros(len(features), len(self.cov))
        if len(ids):
            found[:, [self.clean[i] for i in ids]] = features
        return found

    def _rows(self, variables: list[int]) -> Tensor:
        found = self.cov.new_zeros(len(variables), len(self.cov))
        found[range(len(variables)), variables] = 1.0
        return found

    def _posterior(self, step: _Step, seen: Tensor) -> tuple[Tensor, Tensor]:
        """K and covariance of the clean window given `seen` [r, variables]; only columns in use enter."""
        used = seen.abs().sum(0).nonzero().flatten()
        return self.video.posterior(step.frames, self.frames[used], self.at[used], seen[:, used])

    def _view(self, k: int, m: int) -> tuple[Tensor, Tensor, Tensor]:
        """What the network sees in sub-step m of step k, [r, variables], and what follows for the clean window."""
        if (k, m) not in self._views:
            step = self.steps[k]
            seen = torch.cat([self._rows(step.states[m]), self._features(k)])
            self._views[k, m] = (seen, *self._posterior(step, seen))
        return self._views[k, m]

    def _given(self, a: list[int], seen: Tensor) -> Tensor:
        """Covariance of variables given `seen` [r, variables]."""
        if not len(seen):
            return self.cov[a][:, a]
        cross = self.cov[a] @ seen.T
        return self.cov[a][:, a] - cross @ torch.linalg.solve(seen @ self.cov @ seen.T, cross.T)

    def _kernel(self, m: int, k: Tensor, left: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Sub-step m: (keep [w], gain [w, r], offset, variance) of the sampler and the true covariance.

        A next window is keep * window + gain @ seen + offset + noise of that variance; k = E[X | seen] / seen.
        """
        before, after = self.levels[m], self.levels[m + 1]
        a, b, v = posterior(self.video.path, before, after)
        true = torch.diag(v) + b[:, None] * left * b[None, :]
        if self.sampler == "renoise":
            signal, noise = self.video.path.signal(after), self.video.path.noise(after)
            return torch.zeros_like(a), (1 + self.gain) * signal[:, None] * k, signal * self.bias, noise**2, true
        variance = v + (b**2 * left.diagonal() if self.sampler == "tracked" else 0.0)
        return a, (1 + self.gain) * b[:, None] * k, b * self.bias, variance, true

    # ---- parts of the divergence

    def _sub_step_kl(self, m: int, step: _Step, seen: Tensor, k: Tensor, left: Tensor) -> tuple[float, float]:
        """(DE, DE + SEE) of a sub-step on real windows."""
        a, b, _ = posterior(self.video.path, self.levels[m], self.levels[m + 1])
        window = self._rows(step.states[m])
        truth = a[:, None] * window + b[:, None] * (k @ seen)
        keep, gain, offset, variance, true = self._kernel(m, k, left)
        base = 0.5 * (
            float((true.diagonal() / variance).sum()) - len(variance) + float(variance.log().sum()) - logdet(true)
        )
        exact = gain / (1 + self.gain)

        def missed(rate: Tensor, constant: Tensor) -> float:
            gap = keep[:, None] * window + rate @ seen - truth
            spread = ((gap @ self.cov) * gap).sum(1)
            return 0.5 * float(((spread + constant**2) / variance).sum())

        return base + missed(exact, torch.zeros_like(offset)), base + missed(gain, offset)

    def _end_kl(self, k: int) -> float:
        """E KL(P(Out | In, R) || Q(Out | In, R)) of one whole step on real inputs."""
        seen, out = self._view(k, 0)[0], self.steps[k].states[-1]
        w = self.schedule.w
        count = len(seen) - w
        carried = torch.eye(w, w + count, dtype=torch.float64)
        known = torch.eye(w + count, dtype=torch.float64)[w:]
        offset, spread = torch.zeros(w, dtype=torch.float64), torch.zeros(w, w, dtype=torch.float64)
        for m in range(self.schedule.m_ar):
            _, exact, left = self._view(k, m)
            keep, gain, constant, variance, _ = self._kernel(m, exact, left)
            move = torch.diag(keep) + gain[:, :w]
            carried = move @ carried + gain[:, w:] @ known
            offset = move @ offset + constant
            spread = move @ spread @ move.T + torch.diag(variance)
        given = seen @ self.cov @ seen.T
        truth = torch.linalg.solve(given, seen @ self.cov[:, out]).T
        true = self._given(out, seen)
        gap = carried - truth
        inside = torch.linalg.solve(spread, torch.cat([true + gap @ given @ gap.T, offset[:, None]], 1))
        quad = float(inside[:, :-1].diagonal().sum() + offset @ inside[:, -1])
        return 0.5 * (quad - w + logdet(spread) - logdet(true))

    def terms(self) -> list[dict[str, float]]:
        """All parts of every step, in nats."""
        return [self._terms(k, step) for k, step in enumerate(self.steps)]

    def _terms(self, k: int, step: _Step) -> dict[str, float]:
        features, w = self._features(k), self.schedule.w
        past = self._cleanest([i for i in step.past if i not in set(step.fresh)])
        cov = self.cov[step.fresh][:, step.fresh]
        marginal = 0.5 * (float(cov.trace()) - len(cov) - logdet(cov))
        dependence = 0.5 * (logdet(cov) - logdet(self._given(step.fresh, self._rows(past))))
        found = {"see": 0.0, "de": 0.0, "mb_path": 0.0, "mb_first_order": 0.0, "vlb": 0.0}
        one = torch.eye(w, dtype=torch.float64)
        for m in range(self.schedule.m_ar):
            gained = snr(self.video.path, self.levels[m + 1]) - snr(self.video.path, self.levels[m])
            seen, gain, left = self._view(k, m)
            everything = self._cleanest(past + step.states[m])
            _, least = self._posterior(step, self._rows(everything))
            exact, whole = self._sub_step_kl(m, step, seen, gain, left)
            found["de"] += exact
            found["see"] += whole - exact
            root = gained.sqrt()
            scaled = [one + root[:, None] * c * root[None, :] for c in (left, least)]
            found["mb_path"] += 0.5 * (logdet(scaled[0]) - logdet(scaled[1]))
            found["mb_first_order"] += 0.5 * float((gained * (left - least).diagonal()).sum())
            predicted = (gain @ (seen @ self.cov @ seen.T) @ gain.T).diagonal()
            error = self.gain**2 * predicted + self.bias**2
            found["vlb"] += 0.5 * float((gained * (left.diagonal() + error)).sum())
        inside, out = step.states[0], step.states[-1]
        small = self._given(out, torch.cat([self._rows(inside), features]))
        big = self._given(out, self._rows(self._cleanest(past + inside)))
        return {
            "nie": marginal + dependence,
            "nie_marginal": marginal,
            "nie_dependence": dependence,
            "end": self._end_kl(k),
            "mb": 0.5 * (logdet(small) - logdet(big)),
            **found,
        }

    # ---- the sampler's law

    def sampler_law(self) -> tuple[Tensor, Tensor]:
        """Mean [n] and covariance [n, n] of all variables as the sampler makes them."""
        mean, cov = torch.zeros_like(self.at), torch.zeros_like(self.cov)
        start = torch.tensor(self.start, dtype=torch.int64)
        cov[start[:, None], start] = self.cov[start[:, None], start]
        for k, step in enumerate(self.steps):
            cov[step.fresh, step.fresh] = 1.0
            for m in range(self.schedule.m_ar):
                now, then = step.states[m], torch.tensor(step.states[m + 1])
                seen, gain, left = self._view(k, m)
                keep, rate, offset, variance, _ = self._kernel(m, gain, left)
                move = keep[:, None] * self._rows(now) + rate @ seen
                mean[then] = move @ mean + offset
                cross = move @ cov
                cov[then] = cross
                cov[:, then] = cross.T
                cov[then[:, None], then] = cross @ move.T + torch.diag(variance)
        return mean, cov

    def clip_law(self, k: int) -> tuple[Tensor, Tensor]:
        """Mean [delta] and covariance of the frames that step k finishes, as the sampler makes them."""
        mean, cov = self.sampler_law()
        ids = self.clean[k * self.schedule.delta : (k + 1) * self.schedule.delta]
        return mean[ids], cov[ids][:, ids]

    def report(self) -> dict[str, Any]:
        """All divergences, their parts and totals.

        Returns:
            kl_path, kl_ar_path (window before and after a step), kl_clean_video, kl_clip (per step), the bounds of a
            clip (clip_bound_without_mb from sub-steps, clip_bound_endpoint from whole steps), sum_of_terms and
            sum_of_ar_terms with their gaps to the exact values, totals, and steps (`terms`).
        """
        steps = self.terms()
        mean, cov = self.sampler_law()
        nought = torch.zeros_like(mean)

        def divergence(ids: list[int]) -> float:
            return gaussian_kl(nought[ids], self.cov[ids][:, ids], mean[ids], cov[ids][:, ids])

        kept = sorted({*self.start, *(i for step in self.steps for i in step.fresh + step.states[-1])})
        delta = self.schedule.delta
        parts = [s["nie"] + s["see"] + s["de"] for s in steps]
        ends = [s["nie"] + s["end"] for s in steps]
        forgotten = sum(s["mb"] for s in steps)
        path, ar_path = divergence(list(range(len(mean)))), divergence(kept)
        return {
            "kl_path": path,
            "sum_of_terms": sum(parts) + forgotten,
            "identity_gap": path - sum(parts) - forgotten,
            "kl_ar_path": ar_path,
            "sum_of_ar_terms": sum(ends) + forgotten,
            "ar_identity_gap": ar_path - sum(ends) - forgotten,
            "kl_clean_video": divergence(self.clean),
            "kl_clip": [divergence(self.clean[k * delta : (k + 1) * delta]) for k in range(self.count)],
            "clip_bound_without_mb": torch.tensor(parts, dtype=torch.float64).cumsum(0).tolist(),
            "clip_bound_endpoint": torch.tensor(ends, dtype=torch.float64).cumsum(0).tolist(),
            "totals": {name: sum(s[name] for s in steps) for name in ("nie", "see", "de", "end", "mb", "vlb")},
            "steps": steps,
        }
