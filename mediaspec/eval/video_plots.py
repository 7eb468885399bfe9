"""Plots of a video comparison as PNG bytes that read well on a light and on a dark page: mid grey on nothing.

Effects are paired: mean difference over the standard deviation of the differences, turned so that right is better.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from .video_score import METRICS

__all__ = ["plot_effects", "plot_spectra", "plot_tradeoff"]

GREY = "#8a8f98"
COLOURS = ("#4c8dd6", "#e07b39", "#3fa56b", "#b565c9", "#c9a227", "#d65c6a", "#4fb3bf", "#8f7a66")
MOTION_LIMIT = 10.0
"""Per cent of motion that a steadier video may lose before the gain is suspect."""


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError('the plots need matplotlib; write: pip install "mediaspec[eval]"') from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _style(axis: Any) -> None:
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axis.spines[side].set_color(GREY)
    axis.tick_params(colors=GREY, labelsize=8)
    axis.grid(True, axis="x", color=GREY, alpha=0.2, linewidth=0.6)
    axis.set_axisbelow(True)
    for text in (axis.title, axis.xaxis.label, axis.yaxis.label):
        text.set_color(GREY)
        text.set_fontsize(9)


def _png(plt: Any, figure: Any) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=144, transparent=True)
    plt.close(figure)
    return out.getvalue()


def _legend(axis: Any, **style: Any) -> None:
    legend = axis.legend(frameon=False, fontsize=8, **style)
    for text in legend.get_texts():
        text.set_color(GREY)


def plot_effects(comparisons: Sequence[Mapping[str, Any]]) -> bytes | None:
    """Paired effects of every treatment with intervals, and what happens to motion.

    Args:
        comparisons: from `compare_groups`.

    Returns:
        PNG; None where there is nothing to draw.

    Raises:
        ImportError: matplotlib is missing.
    """
    keys = [
        key
        for key, one in METRICS.items()
        if one.better is not None and any(_effect(c["metrics"].get(key)) for c in comparisons)
    ]
    if not keys:
        return None
    plt = _pyplot()
    motion = any(c["metrics"].get("motion", {}).get("relative") is not None for c in comparisons)
    height = 1.1 + len(keys) * (0.26 + 0.075 * len(comparisons)) + 0.16 * len(comparisons)
    figure, axes = plt.subplots(
        1, 2 if motion else 1, figsize=(10, height), squeeze=False, width_ratios=[2.6, 1] if motion else [1],
        layout="constrained",
    )  # fmt: skip
    axis = axes[0][0]
    axis.axvline(0, color=GREY, linewidth=1)
    for number, comparison in enumerate(comparisons):
        shift = (number - (len(comparisons) - 1) / 2) * 0.7 / max(len(comparisons), 1)
        places, means, low, high = [], [], [], []
        for place, key in enumerate(keys):
            found = _effect(comparison["metrics"].get(key))
            if found is None:
                continue
            sign = 1 if METRICS[key].better == "higher" else -1
            mean, ends = sign * found[0], sorted((sign * found[1], sign * found[2]))
            places.append(place + shift)
            means.append(mean)
            low.append(max(0.0, mean - ends[0]))
            high.append(max(0.0, ends[1] - mean))
        label = f"{comparison['treatment']} vs {comparison['baseline']}"
        colour = COLOURS[number % len(COLOURS)]
        axis.errorbar(
            means, places, xerr=[low, high], fmt="o", color=colour, markersize=4.5, linewidth=1.6, label=label
        )
    axis.set_yticks(range(len(keys)), [METRICS[key].title for key in keys])
    axis.set_ylim(len(keys) - 0.5, -0.5)
    axis.set_xlabel("paired effect, 95 % interval (right is better)")
    _style(axis)
    if motion:
        other = axes[0][1]
        other.axvspan(-MOTION_LIMIT, MOTION_LIMIT, color=GREY, alpha=0.12, linewidth=0)
        other.axvline(0, color=GREY, linewidth=1)
        for number, comparison in enumerate(comparisons):
            one = comparison["metrics"].get("motion")
            if one is None or one["relative"] is None or one["relative_low"] is None:
                continue
            mean = 100 * one["relative"]
            reach = [[max(0.0, mean - 100 * one["relative_low"])], [max(0.0, 100 * one["relative_high"] - mean)]]
            colour = COLOURS[number % len(COLOURS)]
            other.errorbar([mean], [number], xerr=reach, fmt="o", color=colour, markersize=4.5, linewidth=1.6)
        other.set_yticks([])
        other.set_ylim(len(comparisons) - 0.5, -0.5)
        other.set_xlabel("change of motion, %")
        _style(other)
    if len(comparisons) > 1 or motion:
        handles, labels = axis.get_legend_handles_labels()
        legend = figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=8)
        for text in legend.get_texts():
            text.set_color(GREY)
    return _png(plt, figure)


def _effect(one: Mapping[str, Any] | None) -> tuple[float, float, float] | None:
    """Effect and the ends of its interval; None where nothing differs."""
    if one is None or not one["effect"] or not one["mean"]:
        return None
    spread = one["mean"] / one["effect"]
    return one["effect"], one["low"] / spread, one["high"] / spread


def plot_tradeoff(groups: Sequence[Mapping[str, Any]], key: str = "consistency_lite0") -> bytes | None:
    """Steadiness against motion, one point per group: a method that only freezes moves up and left.

    Args:
        groups: from `summarise_groups`.
        key: metric of the vertical axis; "flicker" where a group lacks it.

    Returns:
        PNG; None with fewer than two groups that have both.
    """
    if not all(key in one["metrics"] for one in groups):
        key = "flicker"
    own = [one for one in groups if key in one["metrics"] and "motion" in one["metrics"]]
    if len(own) < 2:
        return None
    plt = _pyplot()
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    for number, one in enumerate(own):
        x, y = one["metrics"]["motion"], one["metrics"][key]
        axis.errorbar(
            [x["mean"]], [y["mean"]],
            xerr=[[x["mean"] - x["low"]], [x["high"] - x["mean"]]],
            yerr=[[y["mean"] - y["low"]], [y["high"] - y["mean"]]],
            fmt="o", color=COLOURS[number % len(COLOURS)], markersize=6, linewidth=1.2, label=one["group"],
        )  # fmt: skip
    axis.set_xlabel(METRICS["motion"].title)
    axis.set_ylabel(METRICS[key].title)
    _style(axis)
    axis.grid(True, color=GREY, alpha=0.2, linewidth=0.6)
    _legend(axis, loc="best")
    return _png(plt, figure)


def plot_spectra(groups: Sequence[Mapping[str, Any]]) -> bytes | None:
    """Power of the pixels' change over its frequency, one line per group.

    Args:
        groups: from `summarise_groups`.

    Returns:
        PNG; None where no group has a spectrum.
    """
    own = [one for one in groups if one.get("spectrum")]
    if not own:
        return None
    plt = _pyplot()
    figure, axis = plt.subplots(figsize=(7, 3.4), layout="constrained")
    for number, one in enumerate(own):
        bins = len(one["spectrum"])
        centres = [(place + 0.5) / (2 * bins) for place in range(bins)]
        power = [max(value, 1e-6) for value in one["spectrum"]]
        axis.plot(centres, power, color=COLOURS[number % len(COLOURS)], linewidth=1.6, label=one["group"])
    axis.set_yscale("log")
    axis.axvspan(0.25, 0.5, color=GREY, alpha=0.1, linewidth=0)
    axis.set_xlim(0, 0.5)
    axis.set_xlabel("cycles per frame (shaded: what counts as fast change)")
    axis.set_ylabel("power, squared grey levels")
    _style(axis)
    axis.grid(True, color=GREY, alpha=0.2, linewidth=0.6)
    _legend(axis, loc="best")
    return _png(plt, figure)
