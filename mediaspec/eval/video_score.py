"""All metrics of one video in one row, with their names, directions and what they stand in for.

    scorer = VideoScorer()                       # networks are loaded where their packages are installed
    row = scorer.score(frames, fps=8)            # {"flicker": .., "consistency_lite0": .., ..}

A frozen video wins every steadiness number, so the motion of every row stands beside them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from .video_features import FrameFeatures, ShotNetwork, load_frame_features, load_shot_network
from .video_metrics import (
    consistency_chain,
    cscv,
    dynamic_stride,
    fast_change,
    frame_similarity,
    interpolation_smoothness,
    is_dynamic,
    load_flow,
    motion_radii,
    temporal_flicker,
    temporal_spectrum,
    warping_error,
)
from .video_metrics.flow import resolve_flow
from .video_metrics.frames import check_frames

__all__ = ["METRICS", "Metric", "ScoreSettings", "TextReader", "VideoScorer", "directions"]


@dataclass(frozen=True)
class Metric:
    """How a number of a row is called and read.

    Args:
        title: for tables.
        better: "higher", "lower", or None where neither is.
        like: the published metric whose place it takes; empty where it is that metric.
        digits: after the point in tables.
    """

    title: str
    better: str | None
    like: str = ""
    digits: int = 4


METRICS: Mapping[str, Metric] = {
    "consistency_lite0": Metric("frame consistency (EfficientNet-Lite0)", "higher", "VBench subject consistency"),
    "border_consistency_lite0": Metric(
        "border consistency (EfficientNet-Lite0)", "higher", "VBench background consistency"
    ),
    "flicker": Metric("temporal flicker score", "higher", ""),
    "interpolation_smoothness": Metric("interpolation smoothness", "higher", "VBench motion smoothness"),
    "fast_change": Metric("change above 1/4 of the frame rate, rms grey levels", "lower", "", 3),
    "warping_error": Metric("warping error x 1000", "lower", "", 3),
    "warping_coverage": Metric("pixels compared by warping", None, "", 3),
    "frame_similarity_lite0": Metric("neighbour similarity (EfficientNet-Lite0)", "higher", "CLIP frame consistency"),
    "cscv_lite0": Metric("CSCV (EfficientNet-Lite0)", "higher", "CSCV on CLIP"),
    "cuts": Metric("accidental cuts (TransNetV2)", "lower", "", 3),
    "alignment": Metric("text alignment (caption reader)", "higher", "overall consistency", 3),
    "retrieval": Metric("caption retrieval, 1 / rank (caption reader)", "higher", "R-precision", 3),
    "alignment_motion": Metric("right motion (caption reader)", "higher", "", 3),
    "transition_cscv_lite0": Metric("transition CSCV (EfficientNet-Lite0)", "higher", "CSCV on CLIP"),
    "transition_step_lite0": Metric("largest step in a transition (EfficientNet-Lite0)", "lower", ""),
    "alignment_before": Metric("alignment before the transition (caption reader)", "higher", "", 3),
    "alignment_after": Metric("alignment after the transition (caption reader)", "higher", "", 3),
    "retrieval_before": Metric("caption retrieval before the transition, 1 / rank", "higher", "", 3),
    "retrieval_after": Metric("caption retrieval after the transition, 1 / rank", "higher", "", 3),
    "motion": Metric("motion, pixels of 256", None, "", 2),
    "dynamic": Metric("dynamic degree", None, "VBench dynamic degree", 3),
}
"""In the order of tables. `warping_error` is the mean squared error of values in 0..1, times 1000."""


def directions(keys: Any = None) -> dict[str, str | None]:
    """Metric -> better direction, of the given keys or of all."""
    return {key: one.better for key, one in METRICS.items() if keys is None or key in keys}


class TextReader(Protocol):
    """Scores how well frames show a text."""

    def scores(self, frames: np.ndarray, text: str) -> dict[str, float]:
        """uint8 [T, H, W, 3] and a caption -> "alignment", "retrieval" and others of `METRICS`, higher is better."""
        ...

    def describe(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class ScoreSettings:
    """What the numbers depend on.

    Args:
        feature_every: EfficientNet-Lite0 reads every so many-th frame.
        flow: "auto", "blocks", "farneback" or "dis".
        flow_side: frames are shrunk until their longer side is at most this before flow and warping.
        flow_every: warping compares every so many-th pair of neighbours.
        cut_threshold: probability above which a frame counts as the last before a cut.
        frames: use EfficientNet-Lite0. shots: use TransNetV2.
    """

    feature_every: int = 4
    flow: str = "auto"
    flow_side: int = 256
    flow_every: int = 1
    cut_threshold: float = 0.5
    frames: bool = True
    shots: bool = True

    def __post_init__(self) -> None:
        if min(self.feature_every, self.flow_every) < 1 or self.flow_side < 8 or not 0 < self.cut_threshold < 1:
            raise ValueError(
                f"feature_every is {self.feature_every}, flow_every {self.flow_every}, flow_side {self.flow_side} and "
                f"cut_threshold {self.cut_threshold}; give steps >= 1, a side >= 8 and a threshold between 0 and 1"
            )


class VideoScorer:
    """Measures videos one after the other.

    Args:
        settings: what to measure and how densely.
        reader: for `alignment`; None leaves it out.

    Attributes:
        clip_features: of the last scored video, TransNetV2 features [T, 1024]; None without that network.
        spectrum: of the last scored video, see `temporal_spectrum`; None for fewer than four frames.

    Raises:
        ImportError: a network or flow that is asked for is not installed; the message names the extra.
    """

    def __init__(self, settings: ScoreSettings | None = None, reader: TextReader | None = None) -> None:
        self.settings = settings or ScoreSettings()
        self.reader = reader
        self.flow_name = resolve_flow(self.settings.flow)
        self._flow = load_flow(self.flow_name)
        self.pictures: FrameFeatures | None = load_frame_features() if self.settings.frames else None
        self.shots: ShotNetwork | None = load_shot_network() if self.settings.shots else None
        self.clip_features: np.ndarray | None = None
        self.spectrum: np.ndarray | None = None

    def describe(self) -> dict[str, Any]:
        """What belongs beside the numbers; rows of equal descriptions are comparable."""
        one = self.settings
        return {
            "flow": self.flow_name,
            "flow_side": one.flow_side,
            "flow_every": one.flow_every,
            "feature_every": one.feature_every,
            "cut_threshold": one.cut_threshold,
            "metrics": list(METRICS),
            "pictures": None if self.pictures is None else self.pictures.describe(),
            "shots": None if self.shots is None else self.shots.describe(),
            "reader": None if self.reader is None else self.reader.describe(),
        }

    def score(self, frames: np.ndarray, fps: float, text: str | None = None) -> dict[str, float]:
        """Every metric that the video is long enough for.

        Args:
            frames: [T, H, W, 3] uint8, T >= 2.
            fps: frames per second, for the dynamic degree.
            text: caption for `alignment`.

        Returns:
            key of `METRICS` -> value.

        Raises:
            ValueError: not such frames.
        """
        frames = check_frames(frames, 2)
        row: dict[str, float] = {"flicker": temporal_flicker(frames)}
        if len(frames) >= 3:
            row["interpolation_smoothness"] = interpolation_smoothness(frames)
        self.spectrum = None
        if len(frames) >= 4:
            row["fast_change"] = fast_change(frames)
            self.spectrum = temporal_spectrum(frames)
        row.update(self._flow_metrics(frames, fps))
        self.clip_features = None
        if self.shots is not None:
            chances, self.clip_features = self.shots(frames)
            row["cuts"] = float(_runs(chances[:-1] > self.settings.cut_threshold))
        kept = frames[:: self.settings.feature_every]
        if self.pictures is not None and len(kept) >= 2:
            whole, border = self.pictures(kept)
            row["consistency_lite0"] = consistency_chain(whole)
            row["border_consistency_lite0"] = consistency_chain(border)
            row["frame_similarity_lite0"] = frame_similarity(whole)
            row["cscv_lite0"] = cscv(whole)
        if self.reader is not None and text is not None:
            row.update(self.reader.scores(frames, text))
        return {key: row[key] for key in METRICS if key in row}

    def _flow_metrics(self, frames: np.ndarray, fps: float) -> dict[str, float]:
        small = shrink(frames, self.settings.flow_side)
        every = self.settings.flow_every
        first, second = small[:-1][::every], small[1:][::every]
        forward, backward = self._flow(first, second), self._flow(second, first)
        found = [  # pair by pair: floats of the whole video would be eight times its bytes
            warping_error(np.stack([a, b]).astype(np.float32) / 255, f[None], g[None])
            for a, b, f, g in zip(first, second, forward, backward, strict=True)
        ]
        error, coverage = (float(np.mean(column)) for column in zip(*found))
        stride = min(dynamic_stride(fps), len(small) - 1)
        if stride == 1 and every == 1:
            moved = forward
        else:
            kept = small[::stride]
            moved = self._flow(kept[:-1], kept[1:])
        radii = motion_radii(moved)
        height, width = small.shape[1:3]
        return {
            "warping_error": 1000 * error,
            "warping_coverage": coverage,
            "motion": float(radii.mean() * 256 / min(height, width)),
            "dynamic": float(is_dynamic(radii, height, width)),
        }


def _runs(flags: np.ndarray) -> int:
    """Number of runs of True: neighbouring frames over the threshold are one cut."""
    return int((flags & ~np.concatenate([[False], flags[:-1]])).sum())


def shrink(frames: np.ndarray, side: int) -> np.ndarray:
    """Frames whose longer side is at most `side`, antialiased; smaller ones are returned as they are.

    Args:
        frames: [T, H, W, 3] uint8.
        side: pixels.
    """
    height, width = frames.shape[1:3]
    longest = max(height, width)
    if longest <= side:
        return frames
    size = max(1, round(height * side / longest)), max(1, round(width * side / longest))
    parts = []
    for at in range(0, len(frames), 16):
        images = torch.from_numpy(np.ascontiguousarray(frames[at : at + 16])).permute(0, 3, 1, 2).float()
        small = torch.nn.functional.interpolate(images, size, mode="bilinear", antialias=True, align_corners=False)
        parts.append(small.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).numpy())
    return np.concatenate(parts)
