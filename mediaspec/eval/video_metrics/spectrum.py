"""Spectrum of a video over time: how much of the pixels' change is slow, and how much is flicker.

Each pixel's luma is a signal over T frames. Its mean is taken off, a Hann window w set on, and

    P_k = c_k |X_k|^2 / (T sum w^2),   c_k = 1 at k = 0 and T/2, else 2

sums to the signal's variance. The band from a quarter of the frame rate up holds what changes back and forth within
four frames: flicker, and the edges of fast motion.
"""

from __future__ import annotations

import numpy as np

from .frames import check_frames

__all__ = ["SPECTRUM_BINS", "fast_change", "temporal_spectrum"]

SPECTRUM_BINS = 16


def _power(frames: np.ndarray) -> np.ndarray:
    """[T // 2 + 1] float64: mean over pixels of P_k, in squared grey levels."""
    frames = check_frames(frames, 4)
    luma = frames.reshape(*frames.shape[:3], -1)[..., :3]
    weights = np.array([0.299, 0.587, 0.114]) if luma.shape[-1] == 3 else np.ones(luma.shape[-1]) / luma.shape[-1]
    count = len(frames)
    window = np.hanning(count + 2)[1:-1]  # without the two zeros at its ends
    total = np.zeros(count // 2 + 1)
    rows = max(1, (1 << 22) // (count * luma.shape[2]))  # some rows at a time: float64 of all would be 8 x the video
    for at in range(0, luma.shape[1], rows):
        signal = luma[:, at : at + rows].astype(np.float64) @ weights
        signal = (signal - signal.mean(0)) * window[:, None, None]
        total += (np.abs(np.fft.rfft(signal, axis=0)) ** 2).sum((1, 2))
    twice = np.full(len(total), 2.0)
    twice[0] = 1.0
    if count % 2 == 0:
        twice[-1] = 1.0
    return np.asarray(twice * total / (count * (window**2).sum() * luma.shape[1] * luma.shape[2]))


def fast_change(frames: np.ndarray) -> float:
    """Root mean square of what changes faster than a quarter of the frame rate; lower is steadier.

    Args:
        frames: [T, H, W, C] uint8, T >= 4.

    Returns:
        Grey levels.

    Example: `fast_change(np.zeros((8, 4, 4, 3), np.uint8))` is 0.0.
    """
    power = _power(frames)
    frequency = np.arange(len(power)) / len(frames)
    return float(np.sqrt(power[frequency >= 0.25].sum()))


def temporal_spectrum(frames: np.ndarray, bins: int = SPECTRUM_BINS) -> np.ndarray:
    """Power in equal bands from 0 to half the frame rate.

    Args:
        frames: [T, H, W, C] uint8, T >= 4.
        bins: number of bands.

    Returns:
        [bins] float64, squared grey levels; sums to the variance over time, averaged over pixels (up to the window).
    """
    power = _power(frames)
    frequency = np.arange(len(power)) / len(frames)
    place = np.minimum((frequency * 2 * bins).astype(np.intp), bins - 1)
    return np.bincount(place, weights=power, minlength=bins)
