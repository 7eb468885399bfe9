"""Table and plots of `mediaspec eval memory`: forgetting against drift against cost, and quality by AR step.

Also the two figures of tools/arvdm: recall by length of history, and the frontier between forgetting and drift.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .report import markdown
from .video_plots import COLOURS, GREY, _legend, _png, _pyplot, _style

__all__ = [
    "SWEEP_METRICS", "memory_table", "pareto_front", "plot_by_step", "plot_frontier", "plot_history_sweep",
    "plot_pareto",
]  # fmt: skip

Row = Mapping[str, Any]
SWEEP_METRICS = {
    "recall_psnr": ("recall PSNR, dB", 1),
    "needle_accuracy": ("needle accuracy", 1),
    "denoising_nats": ("denoising error, nats", -1),
}
"""Of a sweep over histories: title, and 1 where more is better."""


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
              "attended", "KV kB", "ms/frame"]  # fmt: skip
    cells = [
        [
            f"`{row['memory']}`" + (" *" if row["memory"] in front else ""),
            _cell(row, "recall_psnr", ".2f"),
            _cell(row, "recall_ssim", ".3f"),
            _cell(row, "wall_accuracy" if walls else "needle_accuracy", ".1f", 100),
            _cell(row, "drift_db", ".2f"),
            _cell(row, "loss_gap_nats", ".1f"),
            str(row["memory_tokens"]),
            str(row["attended_tokens"]),
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
    axis.margins(0.15)
    _label_apart(axis, known)
    axis.set_xlabel("drift: real-history minus own-history PSNR, dB (left is better)")
    axis.set_ylabel("recall PSNR, dB")
    _style(axis)
    return bytes(_png(plt, figure))


def _label_apart(axis: Any, rows: Sequence[Row]) -> None:
    """Writes names beside the dots; names that would lie on each other are moved up, lowest first."""
    axis.figure.canvas.draw()
    taken: list[tuple[float, float]] = []
    for row in sorted(rows, key=lambda row: float(row["recall_psnr"])):
        x, y = axis.transData.transform((row["drift_db"], row["recall_psnr"])) * 72 / axis.figure.dpi
        up = 6.0
        while any(abs(x - other) < 110 and abs(y + up - height) < 9 for other, height in taken):
            up += 1
        taken.append((x, y + up))
        axis.annotate(
            f"{row['memory']}, {row['memory_tokens']} tokens", (row["drift_db"], row["recall_psnr"]),
            textcoords="offset points", xytext=(8, up), fontsize=8, color=GREY,
        )  # fmt: skip


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
    axis.xaxis.get_major_locator().set_params(integer=True)
    _style(axis)
    _legend(axis)
    return bytes(_png(plt, figure))


def plot_history_sweep(protocols: Mapping[str, Sequence[Row]]) -> bytes:
    """Recall against the length of the history that is shown, as PNG: a column per protocol, a row per metric.

    Args:
        protocols: name -> lines of `summarise_sweep` of tools/arvdm/history_sweep.py; shades are their intervals.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: there are no lines.
    """
    metrics = [m for m in SWEEP_METRICS if any(m in line for lines in protocols.values() for line in lines)]
    if not metrics:
        raise ValueError("there is nothing to draw; give at least one protocol with rooms that ask to recall")
    plt = _pyplot()
    figure, axes = plt.subplots(
        len(metrics), len(protocols), figsize=(1.2 + 3.9 * len(protocols), 0.6 + 2.3 * len(metrics)), squeeze=False,
        sharex="col", layout="constrained",
    )  # fmt: skip
    memories = list(dict.fromkeys(line["memory"] for lines in protocols.values() for line in lines))
    for column, (protocol, lines) in enumerate(protocols.items()):
        histories = list(dict.fromkeys(line["history"] for line in lines))
        for place, metric in enumerate(metrics):
            axis = axes[place][column]
            for number, memory in enumerate(memories):
                own = [line for line in lines if line["memory"] == memory and metric in line]
                if not own:
                    continue
                at = [histories.index(line["history"]) for line in own]
                colour = COLOURS[number % len(COLOURS)]
                low, high = zip(*(line[metric]["interval"] for line in own))
                axis.fill_between(at, low, high, color=colour, alpha=0.2, linewidth=0)
                mean = [line[metric]["mean"] for line in own]
                axis.plot(at, mean, color=colour, marker="o", markersize=3.5, linewidth=1.4, label=memory)
            axis.set_xticks(range(len(histories)), [str(h) if h else "all" for h in histories])
            title, sign = SWEEP_METRICS[metric]
            if not column:
                axis.set_ylabel(title if sign > 0 else f"{title} (lower is better)")
            if not place:
                axis.set_title(protocol)
            if place == len(metrics) - 1:
                axis.set_xlabel("real past frames that are shown")
            _style(axis)
            axis.grid(True, color=GREY, alpha=0.2, linewidth=0.6)
    _legend(axes[0][0])
    return bytes(_png(plt, figure))


def plot_frontier(protocols: Mapping[str, Sequence[Row]], forgetting: str, drift: str) -> bytes:
    """Forgetting against drift as PNG, a panel per protocol; lower left is better, the frontier is filled.

    Args:
        protocols: name -> points of `frontier_points` of tools/arvdm/frontier.py, each with memory, setting, knob,
            value, forgetting and drift (mean and interval), memory_tokens and front. Points of one memory are joined
            along a knob, whose value stands beside them; the area of a dot grows with its tokens.
        forgetting, drift: what the axes are called.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: there are no points.
    """
    if not any(protocols.values()):
        raise ValueError("there are no points to draw; measure some memories first")
    plt = _pyplot()
    figure, axes = plt.subplots(
        1, len(protocols), figsize=(1.0 + 5.2 * len(protocols), 4.4), squeeze=False, layout="constrained"
    )
    memories = list(dict.fromkeys(point["memory"] for points in protocols.values() for point in points))
    most = max(max(point["memory_tokens"] for points in protocols.values() for point in points), 1)
    for axis, (protocol, points) in zip(axes[0], protocols.items()):
        for number, memory in enumerate(memories):
            own = [point for point in points if point["memory"] == memory]
            colour, plain = COLOURS[number % len(COLOURS)], [point for point in own if point["knob"] == ""]
            for knob, line in (("noise", "-"), ("keep", ":")):
                turned = sorted(
                    (p for p in own if p["knob"] == knob), key=lambda p: p["value"], reverse=knob == "keep"
                )
                if turned:
                    path = [(p["drift"]["mean"], p["forgetting"]["mean"]) for p in (*plain, *turned)]
                    axis.plot(*zip(*path), color=colour, linestyle=line, linewidth=1, alpha=0.6)
            for point in own:
                place = point["drift"]["mean"], point["forgetting"]["mean"]
                bars = [
                    [[one["mean"] - one["interval"][0]], [one["interval"][1] - one["mean"]]]
                    for one in (point["drift"], point["forgetting"])
                ]
                axis.errorbar(*place, xerr=bars[0], yerr=bars[1], color=colour, linewidth=0.7, alpha=0.5)
                face = colour if point["front"] else "none"
                size = 24 + 200 * point["memory_tokens"] / most
                axis.scatter(*place, s=size, facecolor=face, edgecolor=colour, alpha=0.8)
                if point["knob"]:
                    text = point["setting"] if point["knob"] == "both" else f"{point['value']:g}"
                    axis.annotate(text, place, textcoords="offset points", xytext=(5, 4), fontsize=6, color=GREY)
            if plain:
                axis.plot([], [], color=colour, marker="o", label=f"{memory}, {plain[0]['memory_tokens']} tokens")
        axis.set_title(protocol)
        axis.set_xlabel(f"{drift} (left is better)")
        axis.set_ylabel(f"{forgetting} (down is better)")
        axis.margins(0.12)
        knobs = {point["knob"] for point in points}
        for knob, line, text in (("noise", "-", "noise on the history"), ("keep", ":", "newest frames kept")):
            if knob in knobs:
                axis.plot([], [], color=GREY, linestyle=line, linewidth=1, label=text)
        _style(axis)
        axis.grid(True, color=GREY, alpha=0.2, linewidth=0.6)
        _legend(axis)
    return bytes(_png(plt, figure))
