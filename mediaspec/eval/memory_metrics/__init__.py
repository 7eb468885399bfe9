"""What a rollout forgot, how far it drifted and what its memory costs."""

from __future__ import annotations

from .cost import kv_bytes
from .drift import Drift, history_drift
from .intervals import Interval, bootstrap_mean, spearman
from .loss_gap import flow_snr, nats_of_errors, snr_grid
from .needle import glyph_cells, needle_accuracy
from .recall import frame_psnr, frame_ssim, psnr_rows, recall_scores
from .walls import wall_colour_accuracy

__all__ = [
    "Drift", "Interval", "bootstrap_mean", "flow_snr", "frame_psnr", "frame_ssim", "glyph_cells", "history_drift",
    "kv_bytes", "nats_of_errors", "needle_accuracy", "psnr_rows", "recall_scores", "snr_grid", "spearman",
    "wall_colour_accuracy",
]  # fmt: skip
