"""Drift: what a model loses by living on its own frames, apart from what it never knew.

Every AR step is done twice, once on the model's own history and once on the real one. At equal index both forget
alike, so their difference is drift alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

__all__ = ["Drift", "history_drift"]


@dataclass(frozen=True)
class Drift:
    """Drift of a rollout.

    Args:
        gap_db: mean over frames of PSNR with real history minus PSNR with own history.
        last_gap_db: of the last AR step.
        slope_db: per AR step, least squares; 0 with one step.
        own_db, real_db: mean PSNR by AR index.
        first_last_db: own-history PSNR of the first 15 % of frames minus that of the last 15 %.
    """

    gap_db: float
    last_gap_db: float
    slope_db: float
    own_db: tuple[float, ...]
    real_db: tuple[float, ...]
    first_last_db: float

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def history_drift(own: Sequence[float], real: Sequence[float], chunk: int) -> Drift:
    """Drift from the PSNR of the predicted frames.

    Args:
        own, real: [N] dB of the same frames, on own and on real history.
        chunk: frames per AR step; the last step may have fewer.

    Raises:
        ValueError: other counts, none at all, or a chunk below 1.

    Example: `history_drift([30, 30, 26, 26], [30, 30, 30, 30], 2).slope_db` is 4.0.
    """
    a, b = np.asarray(own, dtype=np.float64), np.asarray(real, dtype=np.float64)
    if a.ndim != 1 or a.shape != b.shape or not len(a):
        raise ValueError(f"{a.shape} values on own and {b.shape} on real history; give the same frames, at least one")
    if chunk < 1:
        raise ValueError(f"chunk={chunk} is not allowed; write the frames of an AR step, 1 or more")
    cuts = list(range(0, len(a), chunk))
    own_rows = [float(a[i : i + chunk].mean()) for i in cuts]
    real_rows = [float(b[i : i + chunk].mean()) for i in cuts]
    gaps = np.array(real_rows) - np.array(own_rows)
    slope = float(np.polyfit(np.arange(len(gaps)), gaps, 1)[0]) if len(gaps) > 1 else 0.0
    part = max(1, round(0.15 * len(a)))
    return Drift(
        float((b - a).mean()), float(gaps[-1]), slope, tuple(own_rows), tuple(real_rows),
        float(a[:part].mean() - a[-part:].mean()),
    )  # fmt: skip
