"""Videos whose frames are jointly Gaussian, the exact denoiser for them, and the joint law of all noise levels.

Frames X_1..X_N ~ N(0, S) are scalars here; a vector video is more of them (block covariance), or independent copies.
With x_i^u = a(u) X_i + s(u) e the levels of one frame form a Markov chain: given the cleanest one that is known,
noisier ones say nothing more about any frame. So conditional laws need one variable per frame only, which is exact and
keeps the matrices small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .arvdm import Prediction
from .base import MemoryRead
from .slot_steps import CosinePath, NoisePath

__all__ = ["Features", "GaussianDenoiser", "GaussianVideo", "ar1", "gaussian_kl", "last_features", "scene"]

Features = Callable[[int], tuple[list[int], Tensor]]
"""References of a step whose window starts at frame `first`: ids of past frames [T] and a map G [R, T] of them."""


def ar1(frames: int, rho: float) -> Tensor:
    """[N, N] covariance rho^|i - j|."""
    place = torch.arange(frames, dtype=torch.float64)
    return rho ** (place[:, None] - place[None, :]).abs()


def scene(visible: Sequence[float], noise_var: float, rho_noise: float = 0.0) -> Tensor:
    """[N, N] covariance of c_i s + v_i: one hidden scene s ~ N(0, 1), shown with strength c_i, and noise v_i."""
    shown = torch.tensor(visible, dtype=torch.float64)
    return shown[:, None] * shown[None, :] + noise_var * ar1(len(shown), rho_noise)


def last_features(count: int, pool: int = 1) -> Features:
    """The last `count` clean frames, averaged in groups of `pool`."""

    def rule(first: int) -> tuple[list[int], Tensor]:
        ids = list(range(max(0, first - count), first))
        groups = [range(i, min(i + pool, len(ids))) for i in range(0, len(ids), pool)]
        features = torch.zeros(len(groups), len(ids), dtype=torch.float64)
        for row, group in enumerate(groups):
            features[row, group.start : group.stop] = 1.0 / len(group)
        return ids, features

    return rule


def logdet(matrix: Tensor) -> float:
    """ln det of a positive definite matrix; 0 for an empty one."""
    return 2 * float(torch.linalg.cholesky(matrix).diagonal().log().sum()) if len(matrix) else 0.0


def gaussian_kl(mean_p: Tensor, cov_p: Tensor, mean_q: Tensor, cov_q: Tensor) -> float:
    """KL(N(mean_p, cov_p) || N(mean_q, cov_q)) in nats.

    Example:
        >>> nought, one = torch.zeros(1), torch.ones(1, 1)
        >>> round(gaussian_kl(nought, one, nought, 2 * one), 4)
        0.0966
    """
    gap = mean_q - mean_p
    solved = torch.linalg.solve(cov_q, torch.cat([cov_p, gap[:, None]], 1))
    quad = float(gap @ solved[:, -1])
    trace = float(solved[:, :-1].diagonal().sum())
    return 0.5 * (trace - len(gap) + quad + logdet(cov_q) - logdet(cov_p))


@dataclass(frozen=True)
class GaussianVideo:
    """The law of frames at any levels.

    Args:
        covariance: [N, N] of the clean frames, float64.
        path: noise path.

    Raises:
        ValueError: not symmetric or not positive semi-definite.
    """

    covariance: Tensor
    path: NoisePath = CosinePath()

    def __post_init__(self) -> None:
        cov = self.covariance
        if cov.dim() != 2 or cov.shape[0] != cov.shape[1] or not torch.allclose(cov, cov.T):
            raise ValueError(f"covariance has shape {tuple(cov.shape)}; give a symmetric [N, N] matrix")
        if float(torch.linalg.eigvalsh(cov)[0]) < -1e-9:
            raise ValueError("the covariance has a negative eigenvalue; it belongs to no law")
        object.__setattr__(self, "covariance", cov.double())

    def _coefficients(self, levels: Tensor) -> tuple[Tensor, Tensor]:
        return self.path.signal(levels), self.path.noise(levels)

    def joint(self, frames: Tensor, levels: Tensor) -> Tensor:
        """[n, n] covariance of frames [n] at levels [n]; the same frame may stand at several levels."""
        a, s = self._coefficients(levels)
        cov = a[:, None] * a[None, :] * self.covariance[frames][:, frames]
        low = torch.minimum(levels[:, None], levels[None, :])
        high = torch.maximum(levels[:, None], levels[None, :])
        a_low, s_low = self._coefficients(low)
        shared = self.path.signal(high) / a_low * s_low**2  # a noisier level keeps the noise of the cleaner one
        return cov + torch.where(frames[:, None] == frames[None, :], shared, 0.0)

    def cross(self, clean: Tensor, frames: Tensor, levels: Tensor) -> Tensor:
        """[k, n] covariance of exact clean frames with frames at levels."""
        return self._coefficients(levels)[0] * self.covariance[clean][:, frames]

    def posterior(self, clean: Tensor, frames: Tensor, levels: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        """E[X_clean | seen x] = K seen x, and its covariance.

        Args:
            clean: [k] ids; frames, levels: [n] variables x.
            seen: [r, n] linear map of what is known of them.

        Returns:
            (K [k, r], covariance [k, k]).
        """
        cross = self.cross(clean, frames, levels) @ seen.T
        gain = torch.linalg.solve(seen @ self.joint(frames, levels) @ seen.T, cross.T).T
        return gain, self.covariance[clean][:, clean] - gain @ cross.T

    def sample(self, normal: Tensor) -> Tensor:
        """Clean videos [..., N] from standard normal numbers of that shape."""
        values, vectors = torch.linalg.eigh(self.covariance)
        root = vectors * values.clamp_min(0).sqrt()
        return normal.double() @ root.T


class GaussianDenoiser:
    """E[X | window, references] as a network of `generate`, with the variance it leaves open.

    Channels and cells of a frame are independent copies of the same law.

    Args:
        video: the law.
        features: what is known of the references; None is all frames that the memory shows.
        reference_level: level at which the memory's frames really stand (the clean level of the schedule).
        bias, gain: errors on purpose: (1 + gain) E[X | ...] + bias.

    Example:
        >>> net = GaussianDenoiser(GaussianVideo(ar1(4, 0.9)))
        >>> made = net(torch.ones(1, 1, 2), torch.tensor([0.5, 0.5]), torch.tensor([0, 1]), MemoryRead(), None)
        >>> made.output.shape, made.variance.shape
        (torch.Size([1, 1, 2]), torch.Size([2]))
    """

    def __init__(
        self,
        video: GaussianVideo,
        features: Features | None = None,
        reference_level: float = 0.0,
        bias: float = 0.0,
        gain: float = 0.0,
    ) -> None:
        self.video, self.features, self.reference_level = video, features, reference_level
        self.bias, self.gain = bias, gain

    def __call__(
        self, x: Tensor, levels: Tensor, frame_ids: Tensor, read: MemoryRead, actions: Tensor | None
    ) -> Prediction:
        past, known = read.frames, read.frame_ids
        count = len(frame_ids)
        if past is None or known is None:
            ids, features, seen_past = torch.zeros(0, dtype=torch.int64), torch.zeros(0, 0, dtype=torch.float64), None
        else:
            shown = known[0].tolist()
            wanted, features = (
                (shown, torch.eye(len(shown), dtype=torch.float64))
                if self.features is None
                else self.features(int(frame_ids.min()))
            )
            missing = sorted(set(wanted) - set(shown))
            if missing:
                raise ValueError(f"the features need frames {missing} that the memory does not show")
            ids = torch.tensor(wanted, dtype=torch.int64)
            seen_past = past[:, :, [shown.index(i) for i in wanted]]
        frames = torch.cat([frame_ids, ids])
        at = torch.cat([levels.double(), torch.full((len(ids),), self.reference_level, dtype=torch.float64)])
        seen = (
            torch.block_diag(torch.eye(count, dtype=torch.float64), features)
            if len(ids)
            else torch.eye(count).double()
        )
        gain, left = self.video.posterior(frame_ids, frames, at, seen)
        values = x.double() if seen_past is None else torch.cat([x, seen_past.to(x)], 2).double()
        mean = torch.einsum("kn,bcn...->bck...", gain @ seen, values)
        return Prediction(((1 + self.gain) * mean + self.bias).to(x.dtype), left.diagonal())
