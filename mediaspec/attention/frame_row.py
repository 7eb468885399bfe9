"""TiARA's row in a joint space-time attention: how much a frame looks at every frame, from a few of its queries.

Where one attention runs over all F frames of P tokens (and text), the matrix that TiARA analyses is that of the masses

    R[f, g] = mean over queries i of frame f of sum over keys j of frame g of a_ij

It is measured with `queries_per_frame` queries at even distances and a softmax over all keys; averaging queries and
keys before the softmax would be biased. The sum over a frame's keys is attention with a one-hot code in place of the
values, so a flash kernel does it and no L x L matrix exists. Cost: queries_per_frame / P of the attention's products,
every `refresh` steps: 2 % / 4 for 1560 tokens a frame.

R without its text share, rows summing to 1, goes through the same spectrum as a temporal row (`attention.tiara`, N =
F) and gives rho and delta per row, head and frame. The same-frame block also carries the image, so delta is bounded:
a row keeps `mass_floor` of its own-frame mass m, and never less than 1 / (2F):

    delta <= log(m (1 - floor) / (floor (1 - m))),    floor = max(mass_floor m, 1 / (2F))
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels.tiara_bias.layout import FrameLayout
from ..kernels.tiara_bias.lse import attend
from .tiara import TiARA, adaptive_bias, motion_intensity, pool_rows

__all__ = ["FrameEdit", "FrameRows", "floor_delta", "frame_edit", "frame_masses"]

SLOTS = 64
"""Calls of one step and branch whose rows are kept, windows of a long video or halves of guidance; later ones are
measured every time."""


def frame_masses(
    q: Tensor,
    k: Tensor,
    layout: FrameLayout,
    queries_per_frame: int = 32,
    scale: float | None = None,
    key_mask: Tensor | None = None,
) -> Tensor:
    """R[f, g] with the text share left out of the sums but not of the softmax.

    Args:
        q, k: [B, H, L, D] rotated.
        layout: where the frames stand.
        queries_per_frame: n; all of a frame's where n >= P, then R is exact.
        scale: factor on the products, 1 / sqrt(D) by default.
        key_mask: [B, L] bool, False at keys that nobody sees.

    Returns:
        [B, H, F, F] float32 (float64 where q is); rows sum to 1 minus the mass on text.

    Example:
        >>> q = torch.zeros(1, 1, 7, 4)                              # one text token, two frames of three
        >>> [round(mass, 4) for mass in frame_masses(q, q, FrameLayout(2, 3, 1))[0, 0, 0].tolist()]
        [0.4286, 0.4286]
    """
    if queries_per_frame < 1:
        raise ValueError(f"queries_per_frame={queries_per_frame} is not allowed; write 1 or more (32 is the default).")
    length, size = q.shape[2:]
    frames, tokens = layout.frames, layout.tokens
    scale = size**-0.5 if scale is None else scale
    count = min(queries_per_frame, tokens)
    spots = (2 * torch.arange(count, device=q.device) + 1) * tokens // (2 * count)
    places = layout.start + torch.arange(frames, device=q.device)[:, None] * tokens + spots
    sampled = q.index_select(2, places.flatten())
    ids = layout.ids(length, q.device)
    parts = []
    for first in range(0, frames, size):  # a flash kernel wants values as wide as keys
        wide = min(size, frames - first)
        codes = (ids[:, None] == torch.arange(first, first + wide, device=q.device)).to(q.dtype)
        codes = F.pad(codes, (0, size - wide)).expand(*k.shape)
        parts.append(attend(sampled, k, codes, scale, key_mask)[0][..., :wide])
    masses = torch.cat(parts, -1)
    masses = masses if masses.dtype == torch.float64 else masses.float()
    return masses.unflatten(2, (frames, count)).mean(3)


def floor_delta(delta: Tensor, mass: Tensor, floor: Tensor | float) -> Tensor:
    """The largest bias up to delta that keeps the edited own mass m e^-delta / (1 - m (1 - e^-delta)) >= floor.

    Args:
        delta: >= 0; mass: m, in [0, 1], before the edit; floor: in (0, 1). A mass below the floor allows no bias.

    Example:
        >>> round(floor_delta(torch.tensor(5.0), torch.tensor(0.5), 0.2).item(), 4)       # ln 4
        1.3863
    """
    mass = mass.clamp(1e-7, 1 - 1e-7)
    floor = torch.as_tensor(floor, dtype=mass.dtype, device=mass.device)
    most = (mass * (1 - floor) / (floor * (1 - mass))).log()
    return torch.minimum(delta, most.clamp_min(0.0))


@dataclass(frozen=True)
class FrameEdit:
    """The bias of one attention call.

    Args:
        delta: [B, H, F], of the queries of each frame.
        means: [4] float32: delta, rho, own-frame mass before and after, averaged. In the modes that damp less than a
            frame the last one is a lower bound.
        limit: a number that no delta exceeds, known without reading delta.
    """

    delta: Tensor
    means: Tensor
    limit: float


def frame_edit(masses: Tensor, config: TiARA) -> FrameEdit:
    """delta from R: `joint_alpha` (1 - rho), with booster, cap and mass floor.

    Args:
        masses: [B, H, F, F] from `frame_masses`, F >= 5.
        config: settings; pool "space" is what R does anyway.

    Example:
        >>> still = torch.full((1, 1, 8, 8), 1 / 8)
        >>> frame_edit(still, TiARA()).delta[0, 0, 0].item() < 0.7
        True
    """
    config = replace(
        config, alpha=config.joint_alpha, pool=None if config.pool == "space" else config.pool, layers=None, steps=None
    )
    rows = masses / masses.sum(-1, keepdim=True).clamp_min(1e-12)
    own = masses.diagonal(dim1=-2, dim2=-1)
    rho = motion_intensity(pool_rows(rows, config.pool), config)
    floor = (config.mass_floor * own).clamp_min(1 / (2 * masses.shape[-1]))
    delta = floor_delta(adaptive_bias(rows, config).expand_as(own), own, floor)
    left = own * (-delta).exp()
    after = left / (1 - own + left)
    means = torch.stack([delta.mean(), rho.mean(), own.mean(), after.mean()]).float()
    return FrameEdit(delta, means, config.joint_alpha * (1 + config.booster))


@dataclass(frozen=True)
class _Kept:
    edit: FrameEdit
    run: int
    step: int


class FrameRows:
    """The rows of one attention module, measured every `refresh` denoising steps.

    Rows are kept by cache context ("cond", "uncond") and by the place of a call within its step, so windows of a long
    video and the halves of guidance do not read each other's.

    Args:
        config: settings.

    Example:
        >>> rows, q = FrameRows(TiARA(refresh=2)), torch.zeros(1, 1, 10, 4)
        >>> first, second, third = (rows.edit(q, q, FrameLayout(5, 2), step=step) for step in (0, 1, 2))
        >>> first is second, first is third
        (True, False)
    """

    def __init__(self, config: TiARA) -> None:
        self.config = config
        self._kept: dict[tuple[Hashable, int], _Kept] = {}
        self._now = (-1, -1)
        self._calls: dict[Hashable, int] = {}

    @torch.compiler.disable
    @torch.no_grad()
    def edit(
        self,
        q: Tensor,
        k: Tensor,
        layout: FrameLayout,
        *,
        step: int,
        run: int = 0,
        branch: Hashable = None,
        scale: float | None = None,
        key_mask: Tensor | None = None,
    ) -> FrameEdit:
        """The bias of a call: a kept one while it is younger than `refresh` steps, of this run and of this shape.

        Args:
            q, k, layout, scale, key_mask: see `frame_masses`.
            step, run: of the denoising; branch: name of the cache context.
        """
        if self._now != (run, step):
            self._now = (run, step)
            self._calls.clear()
        order = self._calls.get(branch, 0)
        self._calls[branch] = order + 1
        kept = self._kept.get((branch, order))
        if kept is not None and kept.run == run and 0 <= step - kept.step < self.config.refresh:
            delta = kept.edit.delta
            if delta.shape == (*q.shape[:2], layout.frames) and delta.device == q.device:
                return kept.edit
        masses = frame_masses(q, k, layout, self.config.queries_per_frame, scale, key_mask)
        made = frame_edit(masses, self.config)
        if order < SLOTS:
            self._kept[branch, order] = _Kept(made, run, step)
        return made
