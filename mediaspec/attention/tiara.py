"""TiARA: temporal attention that leans less on the own frame where the clip is calm (arXiv:2412.17254).

A row of the temporal attention matrix says where a frame looks. Inconsistent frames look at themselves: the diagonal
is too strong and the short-time spectrum of the row is rich in high frequencies. The edit takes a bias from the own
entry before the softmax, per row, as large as the row is calm:

    X_ik = sum_l w_l A[i, i + l - h] exp(-2 pi i k (l - h) / M)          windowed spectrum of row i at its own frame
    rho_i = sum_{phi1 <= k < phi2} |X_ik|^2 / sum_{k < phi2} |X_ik|^2    motion intensity
    delta_i = alpha (1 - rho_i),   A' = softmax(S - diag(delta))         the edit

The functions here take probabilities and are the readable form; `mediaspec.kernels.tiara_temporal` is the fast one
and `temporal_plan` makes its tables. The own weight a'_ii = a_ii e^-delta / Z with Z = 1 - a_ii (1 - e^-delta) is the
same as a second softmax, so everything follows from A and delta.

Letters: B videos, P positions, H heads, N frames, L taps of the window, h = L // 2, M length of the frequency grid.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import torch
from torch import Tensor

from ..kernels.tiara_temporal.plan import MOST, TemporalPlan, make_plan
from .tiara_settings import TiARA, blackman

__all__ = [
    "FEWEST_FRAMES",
    "TiARA",
    "abnormal_share",
    "adaptive_bias",
    "blackman",
    "corner_bias",
    "dstft_power",
    "edit_rows",
    "motion_intensity",
    "pool_rows",
    "spectral_cap",
    "temporal_plan",
]

FEWEST_FRAMES = 5
"""Shorter clips are left alone: a row of four entries has no spectrum to speak of."""

EPSILON = 1e-12  # energy below which a row counts as empty; rows sum to 1, so only zero rows are


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)
def _taps(cfg: TiARA, frames: int) -> tuple[Tensor, Tensor, int]:
    """Index [N, L] of the entry under each tap, tap weights [N, L] (0 outside a zero boundary), and M. On the CPU."""
    length, half = cfg.window_length, cfg.window_length // 2
    index = torch.arange(frames)[:, None] + torch.arange(length)[None] - half
    inside = (index >= 0) & (index < frames)
    if cfg.boundary == "circular":
        index, inside = index % frames, torch.ones_like(inside)
    elif cfg.boundary == "reflect":  # mirrors without repeating the end frame
        period = max(2 * (frames - 1), 1)
        index = index % period
        index, inside = torch.where(index >= frames, period - index, index), torch.ones_like(inside)
    else:
        index = index.clamp(0, frames - 1)
    weights = blackman(length, cfg.window)[None] * inside
    return index, weights, frames if cfg.grid == "frames" else frames + 2 * half


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)
def _device_tables(
    cfg: TiARA, frames: int, first: int, last: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Index [N, L], weights [N, L] and cosine and sine tables [L, last - first] of bins first..last-1."""
    index, weights, grid = _taps(cfg, frames)
    lag = torch.arange(cfg.window_length, dtype=torch.float64) - cfg.window_length // 2
    angle = 2 * math.pi * lag[:, None] * torch.arange(first, last, dtype=torch.float64)[None] / grid
    return (
        index.to(device),
        weights.to(device, dtype),
        angle.cos().to(device, dtype),
        angle.sin().to(device, dtype),
    )


def _wide(rows: Tensor) -> Tensor:
    """float32 or better: in 16 bits Z = 1 - a_ii (1 - e^-delta) loses its digits for a_ii near 1."""
    if rows.dim() < 2 or rows.shape[-1] != rows.shape[-2]:
        raise ValueError(f"temporal attention has shape {tuple(rows.shape)}; give [.., N, N], a row per query frame")
    return rows if rows.dtype in (torch.float32, torch.float64) else rows.float()


def dstft_power(rows: Tensor, cfg: TiARA, first: int = 0, last: int | None = None) -> Tensor:
    """|X_ik|^2 of every row at its own frame, for bins first <= k < last.

    Args:
        rows: [.., N, N]; row i is analysed around entry i. Attention matrices, but any rows will do.
        cfg: window, boundary and grid.
        first, last: bins; last None is phi2.

    Returns:
        [.., N, last - first], float32 or the dtype of float64 rows.

    Raises:
        ValueError: not square, or fewer frames than the window has taps.
    """
    rows = _wide(rows)
    frames = rows.shape[-1]
    last = cfg.bands(frames)[1] if last is None else last
    index, weights, cosine, sine = _device_tables(cfg, frames, first, last, rows.device, rows.dtype)
    near = rows.gather(-1, index.expand(*rows.shape[:-1], -1)) * weights
    return (near @ cosine).square() + (near @ sine).square()


def motion_intensity(rows: Tensor, cfg: TiARA) -> Tensor:
    """rho [.., N] in [0, 1]: the share of energy from phi1 on, of bins below phi2; 0 for empty rows.

    Example:
        >>> motion_intensity(torch.eye(16), TiARA())[0].item()   # a pure self-attending row has a flat spectrum
        0.5
    """
    power = dstft_power(rows, cfg)
    first, _ = cfg.bands(rows.shape[-1])
    total = power.sum(-1)
    share = power[..., first:].sum(-1) / total.clamp_min(EPSILON)
    return share.masked_fill(total <= EPSILON, 0.0)


def abnormal_share(rows: Tensor, cfg: TiARA) -> Tensor:
    """eta [.., N] in [0, 1]: the share of energy from phi2 on, of all bins up to half of the grid."""
    frames = rows.shape[-1]
    _, last = cfg.bands(frames)
    half = _taps(cfg, frames)[2] // 2 + 1
    if last >= half:
        return torch.zeros_like(_wide(rows)[..., 0])
    power = dstft_power(rows, cfg, 0, half)
    return power[..., last:].sum(-1) / power.sum(-1).clamp_min(EPSILON)


def spectral_cap(rows: Tensor, cfg: TiARA) -> Tensor:
    """delta* [.., N]: the bias that empties the band from phi1 to half of the grid; inf where it does not bind.

    With the neighbours fixed the band's energy sum_k |U_k x + R_k|^2 is least at x* = -sum Re(U* R) / sum |U|^2, where
    R is the spectrum without the own entry and U that of the own entry alone (the centre tap, unless a reflecting
    boundary shows it again). Beyond delta* = log(a_ii / x*) the edited kernel is a comb and flicker grows.
    """
    rows = _wide(rows)
    own = rows.diagonal(dim1=-2, dim2=-1)
    wanted = (rows * _cap_table(cfg, rows.shape[-1]).to(rows)).sum(-1)
    wanted = wanted.clamp_min(0.0).minimum(own)
    return torch.where(wanted > 0, (own / wanted.masked_fill(wanted <= 0, 1.0)).log(), torch.inf)


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)
def _spectrum_table(cfg: TiARA, frames: int, first: int, last: int) -> Tensor:
    """[N, N, bins] complex128: X_ik = sum_j A_ij table[i, j, k]; boundary and window are folded in."""
    index, weights, grid = _taps(cfg, frames)
    lag = torch.arange(cfg.window_length, dtype=torch.float64) - cfg.window_length // 2
    angle = -2 * math.pi * lag[:, None] * torch.arange(first, last, dtype=torch.float64)[None] / grid
    terms = weights[..., None] * torch.polar(torch.ones_like(angle), angle)
    table = torch.zeros(frames, frames, last - first, dtype=torch.complex128)
    return table.scatter_add_(1, index[..., None].expand(-1, -1, last - first), terms)


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)
def _cap_table(cfg: TiARA, frames: int) -> Tensor:
    """[N, N] float64, zero on the diagonal: the optimal own weight is row i times row i of it."""
    first, _ = cfg.bands(frames)
    half = _taps(cfg, frames)[2] // 2 + 1
    table = _spectrum_table(cfg, frames, min(first, half - 1), half)
    own = table.diagonal().T[:, None]  # [N, 1, bins]
    cap = -(own.conj() * table).real.sum(-1) / own.abs().square().sum(-1).clamp_min(EPSILON)
    return cap.fill_diagonal_(0.0)


def pool_rows(rows: Tensor, pool: str | None) -> Tensor:
    """Averages [.., P, H, N, N] over heads or positions, keeping the axis; unchanged for None."""
    if pool is None:
        return rows
    axis = -3 if pool == "heads" else -4
    if rows.dim() < -axis:
        raise ValueError(
            f"pool={pool!r} needs [.., {'P, ' if pool == 'space' else ''}H, N, N] and got {tuple(rows.shape)}"
        )
    return rows.mean(axis, keepdim=True)


def adaptive_bias(rows: Tensor, cfg: TiARA) -> Tensor:
    """delta [.., N] >= 0 that is taken from the own logit of every row.

    Args:
        rows: [.., N, N] probabilities; with `pool` also an axis of heads, or of positions and heads, before them.
        cfg: all of it but `layers`, `steps` and the corners.

    Returns:
        delta; a pooled axis has size 1.

    Example:
        >>> adaptive_bias(torch.eye(16), TiARA())[0].item()      # alpha (1 - 1/2)
        3.0
    """
    rows = pool_rows(_wide(rows), cfg.pool)
    delta = cfg.alpha * (1.0 - motion_intensity(rows, cfg))
    if cfg.booster:
        delta = delta * (1.0 + cfg.booster * abnormal_share(rows, cfg))
    return delta.minimum(spectral_cap(rows, cfg)) if cfg.cap else delta


def corner_bias(frames: int, cfg: TiARA) -> Tensor:
    """[N, N] >= 0 that is taken from logits of far frames: beta where |i - j| >= N - r."""
    at = torch.arange(frames)
    far = (at[:, None] - at[None]).abs() >= frames - cfg.corner_frames
    return far.double() * (cfg.corner_strength if cfg.corner_frames else 0.0)


def edit_rows(rows: Tensor, delta: Tensor, corner: Tensor | None = None) -> Tensor:
    """softmax(log A - diag(delta) - corner), without a second softmax.

    Args:
        rows: [.., N, N] probabilities; delta: [.., N], broadcast; corner: [N, N] from `corner_bias`, or None.

    Returns:
        [.., N, N], float32 or the dtype of float64 rows; an empty row stays empty. Biases beyond 80 act as 80.

    Example:
        >>> edit_rows(torch.full((2, 2), 0.5), torch.full((2,), 0.6931471824645996))[0].tolist()
        [0.3333333432674408, 0.6666666865348816]
    """
    rows = _wide(rows)
    own = torch.eye(rows.shape[-1], dtype=torch.bool, device=rows.device)
    edited = torch.where(own, rows * delta.to(rows).clamp_max(MOST).neg().exp()[..., None], rows)
    if corner is not None:
        edited = edited * corner.to(rows).clamp_max(MOST).neg().exp()
    total = edited.sum(-1, keepdim=True)
    return edited / total.masked_fill(total == 0, 1.0)


def temporal_plan(
    cfg: TiARA, frames: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> TemporalPlan:
    """The tables of `mediaspec.kernels.tiara_temporal` for N frames; made once per settings, N, device and dtype.

    Raises:
        ValueError: fewer than 5 frames, or fewer than the window has taps.
    """
    if frames < FEWEST_FRAMES:
        raise ValueError(
            f"{frames} frames are too few for TiARA, which needs {FEWEST_FRAMES}; leave such clips as they are"
        )
    plain = replace(cfg, layers=None, steps=None)  # gates do not change tables
    return _temporal_plan(plain, frames, torch.device(device), dtype)


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)
def _temporal_plan(cfg: TiARA, frames: int, device: torch.device, dtype: torch.dtype) -> TemporalPlan:
    first, last = cfg.bands(frames)
    half = _taps(cfg, frames)[2] // 2 + 1
    bins = _spectrum_table(cfg, frames, 0, max(last, half) if cfg.booster else last)
    return make_plan(
        bins,
        first,
        last,
        alpha=cfg.alpha,
        booster=cfg.booster if last < half else 0.0,
        cap=_cap_table(cfg, frames) if cfg.cap else None,
        corner=corner_bias(frames, cfg) if cfg.corner_frames and cfg.corner_strength else None,
        device=device,
        dtype=dtype,
    )
