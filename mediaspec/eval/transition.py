"""Multi-prompt videos: how even the change between two prompts is, and whether both sides show their own prompt.

Every transition is measured in one window of frames, the frames between the two segments and a margin on both sides,
whatever blend made the video; a hard cut has the same window with its cut in the middle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ..pipelines.timeline import Timeline
from .video_metrics import adjacent_cosines, cscv

if TYPE_CHECKING:
    from .video_score import TextReader

__all__ = ["MARGIN", "transition_scores", "transition_windows"]

MARGIN = 8
"""Frames of the two segments around a transition that belong to its window."""


def transition_windows(timeline: Timeline, num_frames: int, margin: int = MARGIN) -> list[tuple[int, int]]:
    """First and one past the last frame of every transition's window.

    Args:
        timeline: with at least two segments for any window.
        num_frames: of the video; windows end there.
        margin: frames on both sides.

    Example: `transition_windows(Timeline.of([("a", 0, 9), ("b", 20, 29)]), 30, 4)` is [(6, 24)].
    """
    windows = []
    for one, two in zip(timeline.segments, timeline.segments[1:]):
        windows.append((max(0, one.end + 1 - margin), min(num_frames, two.start + margin)))
    return windows


def transition_scores(
    frames: np.ndarray,
    timeline: Timeline,
    features: Callable[[np.ndarray], np.ndarray] | None,
    reader: TextReader | None = None,
    *,
    every: int = 2,
) -> dict[str, float]:
    """Evenness of the transitions and text alignment on both sides of them.

    Args:
        frames: [T, H, W, 3] uint8.
        timeline: that the video was made with.
        features: frames -> [n, D]; None leaves the evenness out.
        reader: scores frames against a text; None leaves the alignment out.
        every: frames of a window that features are taken of.

    Returns:
        `transition_cscv_lite0` (CSCV in the windows), `transition_step_lite0` (largest 1 - cosine of neighbours in
        them), `alignment_before`, `alignment_after`, `retrieval_before` and `retrieval_after` (own prompt on the
        frames it holds in full), each a mean over transitions; without transitions nothing.

    Raises:
        ValueError: fewer frames than the timeline has.
    """
    if len(frames) < timeline.length:
        raise ValueError(
            f"the video has {len(frames)} frames and its timeline {timeline.length}; give the whole video"
        )
    columns: dict[str, list[float]] = {}

    def note(key: str, value: float) -> None:
        columns.setdefault(key, []).append(value)

    windows = transition_windows(timeline, len(frames))
    for (low, high), one, two in zip(windows, timeline.segments, timeline.segments[1:]):
        kept = frames[low:high:every]
        if features is not None and len(kept) >= 3:
            rows = features(kept)
            note("transition_cscv_lite0", cscv(rows))
            note("transition_step_lite0", float(1 - adjacent_cosines(rows).min()))
        if reader is not None:
            for side, segment in (("before", one), ("after", two)):
                found = reader.scores(frames[segment.start : segment.end + 1], segment.text)
                for key in ("alignment", "retrieval"):
                    if key in found:
                        note(f"{key}_{side}", found[key])
    return {key: float(np.mean(values)) for key, values in columns.items()}
