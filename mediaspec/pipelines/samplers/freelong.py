"""FreeLong: low frequencies from attention over all frames, high ones from attention nearby (arXiv:2407.19918).

Every attention along time runs twice: over the whole video (global) and near each frame (local). Their outputs are
mixed in the spectrum over time, height and width: Z = IFFT3(LP * FFT3(Z_global) + (1 - LP) * FFT3(Z_local)) with the
Gaussian low-pass LP = exp(-D^2 / 2), D^2 = sum over the three axes of (f / cutoff)^2, f in [-1, 1). The largest
resolution uses the local branch alone.

The authors' local branch is a band |i - j| <= window / 2. Motion modules know positions up to 32 frames only, so here
the local branch runs windows with their own positions (as FreeNoise does), and the global one spreads the positions of
one window over the whole video. Attention processors such as TiARA act on the local branch; the global one is
low-passed anyway. All frames pass the model together: memory grows with N.
N frames, M = B * h * w rows, C channels.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import torch
from diffusers.models.attention_processor import AttnProcessor2_0
from torch import Tensor

from ..frame_chunks import chunked_frames
from .freenoise import blend_weights, frame_windows
from .plain import Plain
from .temporal import TemporalSite, hooked

__all__ = ["FreeLong", "low_pass", "spectral_blend", "spread_positions"]


def low_pass(shape: tuple[int, int, int], cutoff: float = 0.25) -> Tensor:
    """Gaussian low-pass over (time, height, width), [N, h, w] float32, in the order of `torch.fft.fftn`."""
    distance = torch.zeros(shape, dtype=torch.float64)
    for axis, size in enumerate(shape):
        frequency = torch.fft.fftfreq(size, dtype=torch.float64) * 2
        view = [1, 1, 1]
        view[axis] = size
        distance += (frequency / cutoff).square().view(view)
    return (-distance / 2).exp().float()


def spectral_blend(wide: Tensor, near: Tensor, cutoff: float = 0.25) -> Tensor:
    """Low frequencies of `wide` and high ones of `near`.

    Args:
        wide: [B, h, w, N, C] global branch. near: the local one, likewise.
        cutoff: of the low-pass, in units of the highest frequency.

    Returns:
        [B, h, w, N, C] of the dtype of `near`.
    """
    _, height, width, frames, _ = near.shape
    mask = low_pass((frames, height, width), cutoff).permute(1, 2, 0)[None, ..., None].to(near.device)
    axes = (1, 2, 3)
    spectrum = mask * torch.fft.fftn(wide.float(), dim=axes) + (1 - mask) * torch.fft.fftn(near.float(), dim=axes)
    return torch.fft.ifftn(spectrum, dim=axes).real.to(near.dtype)


def spread_positions(table: Tensor, num_frames: int, window: int) -> Tensor:
    """Positions of one window stretched over `num_frames`, [1, N, C], by linear interpolation of the table."""
    place = torch.linspace(0, min(window, table.shape[1]) - 1, num_frames, device=table.device)
    below = place.floor().long()
    above = (below + 1).clamp_max(table.shape[1] - 1)
    share = (place - below)[None, :, None].to(table.dtype)
    return table[:, below] * (1 - share) + table[:, above] * share


class FreeLong(Plain):
    """FreeLong's spectral blend.

    Args:
        blend_steps: share of the steps that blend (0.5 in the paper, 1 in the released code); later ones are local.
        cutoff: of the low-pass.
        stride: frames between windows of the local branch, where it runs in windows.
        frame_chunk: frames per call of the layers over space, which bounds their work space.

    Example:
        >>> pipe("a red ball", num_frames=64, sampler="freelong")  # doctest: +SKIP
    """

    name = "freelong"

    def __init__(
        self,
        *args: Any,
        blend_steps: float = 0.5,
        cutoff: float = 0.25,
        stride: int = 4,
        frame_chunk: int = 32,
        **settings: Any,
    ) -> None:
        if not 0 <= blend_steps <= 1:
            raise ValueError(f"blend_steps={blend_steps}; allowed is 0 to 1, a share of the steps")
        if cutoff <= 0:
            raise ValueError(f"cutoff={cutoff}; it must be above 0 (1 is the highest frequency)")
        super().__init__(*args, **settings)
        if not 1 <= stride <= self.window:
            raise ValueError(f"stride={stride}; allowed is 1 to the window, {self.window}")
        self.blend_steps, self.cutoff, self.stride, self.frame_chunk = blend_steps, cutoff, stride, frame_chunk

    @property
    def blends(self) -> bool:
        """Whether the coming step mixes both branches."""
        return self.index < round(self.blend_steps * self.total)

    @contextmanager
    def installed(self) -> Any:
        if self.num_frames <= self.window:
            yield
            return
        largest = self.shape[1] * self.shape[2]
        plain = AttnProcessor2_0()

        def run(site: TemporalSite, attend: Any, hidden: Tensor) -> Tensor:
            near = self._near(attend, hidden)
            height, width = site.size
            if not self.blends or height * width >= largest:
                return near
            row = hidden
            if site.positions is not None:
                table = site.positions(hidden.new_zeros(1, self.window, hidden.shape[2]))
                row = hidden + spread_positions(table, hidden.shape[1], self.window)
            wide = plain(site.attention, row)
            shape = (-1, height, width, *near.shape[1:])
            return spectral_blend(wide.reshape(shape), near.reshape(shape), self.cutoff).reshape(near.shape)

        with hooked(self.denoiser.model, run), chunked_frames(self.denoiser.model, self.frame_chunk):
            yield

    def _near(self, attend: Any, hidden: Tensor) -> Tensor:
        frames = hidden.shape[1]
        weights = blend_weights(frames, self.window, self.stride)
        fused = torch.zeros_like(hidden, dtype=torch.promote_types(hidden.dtype, torch.float32))
        table = weights.to(fused.device, fused.dtype)
        for row, (start, end) in enumerate(frame_windows(frames, self.window, self.stride)):
            fused[:, start:end] += attend(hidden[:, start:end]) * table[row, start:end, None]
        return fused.to(hidden.dtype)
