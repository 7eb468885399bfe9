"""Heat maps of an attention report: what every head of every layer does."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from ..attention.report import KINDS, AttentionReport, HeadReport

__all__ = ["plot_report"]


def plot_report(report: AttentionReport, path: str | Path) -> None:
    """Writes a PNG of eight maps, layers downwards and heads sideways.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError('the heat maps need matplotlib; write: pip install "mediaspec[eval]"') from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.colors import ListedColormap

    layers = report.layers()
    figure, axes = plt.subplots(2, 4, figsize=(15, 4 + 0.28 * len(layers)), constrained_layout=True)
    figure.suptitle(f"{report.model}: {report.tokens} tokens, the last {report.rows} queries", fontsize=12)
    maps: list[tuple[str, Any, dict[str, Any]]] = [
        ("sink: mean attention on token 0", lambda one: one.sink_score, {"vmin": 0, "vmax": 1}),
        ("lazy ratio: first 4 + last 1020 keys", lambda one: one.lazy_ratio, {"vmin": 0, "vmax": 1}),
        ("slash: best score of a distance > 0", _best_slash, {"vmin": 0, "vmax": 1}),
        ("effective keys, log10", lambda one: math.log10(max(one.effective_keys, 1)), {"vmin": 0}),
        ("rank-one share of queries", lambda one: one.q_rank1, {"vmin": 0, "vmax": 1}),
        ("rank-one share of keys", lambda one: one.k_rank1, {"vmin": 0, "vmax": 1}),
        ("mass kept by the pattern", lambda one: one.pattern_mass, {"vmin": 0, "vmax": 1}),
        (
            "kind: " + ", ".join(f"{place} {kind}" for place, kind in enumerate(KINDS)),
            lambda one: KINDS.index(one.kind),
            {"vmin": -0.5, "vmax": 3.5, "cmap": ListedColormap(["#4477aa", "#ee6677", "#228833", "#bbbbbb"])},
        ),
    ]
    for axis, (title, value, style) in zip(axes.flat, maps):
        grid = [[_number(value(one)) for one in layer] for layer in layers]
        image = axis.imshow(grid, aspect="auto", interpolation="nearest", **{"cmap": "viridis", **style})
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("head")
        axis.set_ylabel("layer")
        axis.set_xticks(range(0, len(layers[0]), max(1, len(layers[0]) // 8)))
        figure.colorbar(image, ax=axis, shrink=0.8)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def _best_slash(one: HeadReport) -> float:
    return max((score for distance, score in one.slash if distance > 0), default=0.0)


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)
