"""How much a memory would add, in nats, without a rollout: the gap of two losses on real clips.

For a network that predicts clean frames, with references R and with more memory M beside them,

    MB ~ 1/2 sum over sub-steps m and slots j of (snr_after - snr_before)_mj [ mse_mj(R) - mse_mj(R, M) ]

which is the I-MMSE integral on the schedule's own levels: exact for fine steps. Take one network that was trained with
random memories for both terms, so that they share weights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .arvdm import Denoiser, Prediction
from .base import MemoryRead
from .slot_steps import NoisePath, SlotSampler, snr
from .window_schedule import WindowSchedule

__all__ = ["loss_gap", "snr_gains", "snr_integral"]


def snr_gains(schedule: WindowSchedule, path: NoisePath) -> Tensor:
    """[m_ar, w] signal-to-noise ratio gained by every slot in every sub-step.

    Raises:
        ValueError: the schedule ends without noise, where the gain is infinite.
    """
    if schedule.clean_level <= 0:
        raise ValueError("clean_level=0 gains an infinite signal-to-noise ratio; measure down to e.g. 0.05")
    levels = torch.tensor([schedule.level(m) for m in range(schedule.m_ar + 1)], dtype=torch.float64)
    return snr(path, levels).diff(dim=0)


def snr_integral(gap: Tensor, ratios: Tensor) -> float:
    """1/2 the integral of a mean-square gap [n] over signal-to-noise ratios [n], by trapezoids.

    Example:
        >>> snr_integral(torch.ones(3), torch.tensor([0.0, 1.0, 4.0]))
        2.0
    """
    return 0.5 * float(((gap[1:] + gap[:-1]) / 2 * ratios.diff()).sum())


def loss_gap(
    net: Denoiser,
    clips: Tensor,
    schedule: WindowSchedule,
    sampler: SlotSampler,
    small: MemoryRead,
    big: MemoryRead,
    noise: Callable[[int], Tensor],
    frame_ids: Tensor | None = None,
    actions: Tensor | None = None,
) -> float:
    """Nats per window that the references `small` miss of what `big` knows.

    Args:
        net: network.
        clips: [B, C, w, ...] real windows.
        schedule: with a clean level above 0; sampler: for its path and kind of prediction.
        small, big: memory reads for these clips.
        noise: sub-step -> standard normal [B, C, w, ...]; both terms see the same.
        frame_ids: [w] ids, 0 to w - 1 by default; actions: as in `Denoiser`.

    Returns:
        The mean over clips of the gap of all cells of a window; divide by their number for nats per cell.
    """
    gains = snr_gains(schedule, sampler.path)
    ids = torch.arange(schedule.w) if frame_ids is None else frame_ids
    total = 0.0
    with torch.no_grad():
        for m in range(schedule.m_ar):
            level = torch.tensor(schedule.level(m), dtype=torch.float64)
            x = sampler.add_noise(clips, level, noise(m).to(clips))
            errors = []
            for read in (small, big):
                made = net(x, level, ids, read, actions)
                output = made.output if isinstance(made, Prediction) else made
                clean = sampler.clean(output, x, level)
                squared = (clean - clips.to(clean.dtype)).square().double()
                errors.append(squared.transpose(1, 2).flatten(2).sum(-1).mean(0))  # [w], cells of a frame added up
            total += 0.5 * float((gains[m] * (errors[0] - errors[1])).sum())
    return total
