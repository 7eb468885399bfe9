"""Table and plots of `mediaspec eval memory`: forgetting against drift against cost, and quality by AR step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .report import markdown
from .video_plots import COLOURS, GREY, _legend, _png, _pyplot, _style

__all__ = ["memory_table", "pareto_front", "plot_by_step", "plot_pareto"]

Row = Mapping[str, Any]


def pareto_front(rows: Sequence[Row]) -> list[str]:
    """Memories that no other beats in recall, drift and seconds per frame at once."""

    def key(row: Row) -> tuple[float, float, float]:
        return -row["recall_psnr"], row["drift_db"], row["seconds_per_frame"]

    known = [row for row in rows if row["recall_psnr"] is not None]
    return [
        row["memory"]
        for row in known
        if not any(key(other) != key(row) and all(a <= b for a, b in zip(key(other), key(row))) for other in known)
    ]


def _cell(row: Row, metric: str, form: str, scale: float = 1.0) -> str:
    if row.get(metric) is None:
        return "-"
    text = format(scale * row[metric], form)
    interval = row.get(f"{metric}_interval")
    return text if interval is None else f"{text} ({scale * interval[0]:{form}} - {scale * interval[1]:{form}})"


def memory_table(rows: Sequence[Row]) -> str:
    """Rows of `summarise` as markdown; intervals of 95 % in brackets, memories on the frontier with a star."""
    front = set(pareto_front(rows))
    walls = any(row.get("wall_accuracy") is not None for row in rows)
    header = ["memory", "recall dB", "SSIM", "walls %" if walls else "needle %", "drift dB", "loss gap nats", "tokens",
              "KV kB", "ms/frame"]  # fmt: skip
    cells = [
        [
            f"`{row['memory']}`" + (" *" if row["memory"] in front else ""),
            _cell(row, "recall_psnr", ".2f"),
            _cell(row, "recall_ssim", ".3f"),
            _cell(row, "wall_accuracy" if walls else "needle_accuracy", ".1f", 100),
            _cell(row, "drift_db", ".2f"),
            _cell(row, "loss_gap_nats", ".1f"),
            str(row["memory_tokens"]),
            f"{row['kv_bytes'] / 1024:.0f}",
            f"{1000 * row['seconds_per_frame']:.1f}",
        ]
        for row in rows
    ]
    return markdown(header, cells)


def plot_pareto(rows: Sequence[Row]) -> bytes:
    """Recall against drift as PNG, the area of a dot growing with seconds per frame; the frontier is filled.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: no row has a recall.
    """
    known = [row for row in rows if row["recall_psnr"] is not None]
    if not known:
        raise ValueError("no memory was asked to recall anything; give a protocol with longer walks or more rooms")
    plt = _pyplot()
    figure, axis = plt.subplots(figsize=(6.4, 4.2))
    front, slowest = set(pareto_front(rows)), max(row["seconds_per_frame"] for row in known)
    for number, row in enumerate(known):
        colour = COLOURS[number % len(COLOURS)]
        place = row["drift_db"], row["recall_psnr"]
        bars = {
            name: [[value - low], [high - value]]
            for name, value, (low, high) in (
                ("xerr", place[0], row["drift_db_interval"]), ("yerr", place[1], row["recall_psnr_interval"]),
            )
        }  # fmt: skip
        axis.errorbar(*place, **bars, color=colour, linewidth=0.8, alpha=0.6)
        size = 30 + 270 * row["seconds_per_frame"] / slowest
        face = colour if row["memory"] in front else "none"
        axis.scatter(*place, s=size, facecolor=face, edgecolor=colour, alpha=0.8)
        text = f"{row['memory']}, {row['memory_tokens']} tokens"
        axis.annotate(text, place, textcoords="offset points", xytext=(8, 6), fontsize=8, color=GREY)
    axis.set_xlabel("drift: real-history minus own-history PSNR, dB (left is better)")
    axis.set_ylabel("recall PSNR, dB")
    axis.margins(0.15)
    _style(axis)
    return bytes(_png(plt, figure))


def plot_by_step(rows: Sequence[Row]) -> bytes:
    """PSNR by AR step on own (line) and real history (dashed) as PNG.

    Raises:
        ImportError: matplotlib is missing.
    """
    plt = _pyplot()
    figure, axis = plt.subplots(figsize=(6.4, 4.2))
    for number, row in enumerate(rows):
        colour, steps = COLOURS[number % len(COLOURS)], range(1, len(row["own_by_step"]) + 1)
        axis.plot(steps, row["own_by_step"], color=colour, marker="o", markersize=3, label=row["memory"])
        axis.plot(steps, row["real_by_step"], color=colour, linestyle="--", linewidth=1)
    axis.set_xlabel("AR step")
    axis.set_ylabel("PSNR, dB; dashed: real history")
    _style(axis)
    _legend(axis)
    return bytes(_png(plt, figure))
