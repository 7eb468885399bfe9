"""Table and plot of `mediaspec bench text`, table of `mediaspec eval text`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .report import markdown

__all__ = ["plot_text_speed", "text_bench_table", "text_eval_table"]

Row = Mapping[str, Any]


def text_bench_table(rows: Sequence[Row]) -> str:
    """Rows of `mediaspec bench text` as a table."""
    cells = []
    for row in rows:
        low, high = row["ratio_quartiles"]
        best = row["ratio_to_best_peer"]
        cells.append(
            [
                row["task"],
                f"`{row['rule']}`" + ("" if row["attention"] == "none" else f" under `{row['attention']}`"),
                row["policy"],
                row["drafter"],
                f"{row['ratio_to_plain']:.2f}x",
                f"{low:.2f} - {high:.2f}",
                "-" if best is None else f"{best:.2f}x",
                f"{row['ratio_with_prefill']:.2f}x",
                f"{row['tokens_per_call']:.2f}",
                f"{row['seconds']:.3f}",
                f"{row['prefill_seconds']:.3f}",
                f"{row['equal_to_plain']} of {row['texts']}",
                row["guarantee"] or "-",
            ]
        )
    header = [
        "task", "rule", "policy", "drafter", "decoding", "quartiles", "to best peer", "whole call", "tokens per call",
        "seconds", "of them prompt", "texts as plain", "guarantee",
    ]  # fmt: skip
    return markdown(header, cells)


def text_eval_table(result: Row) -> str:
    """Result of `mediaspec eval text` as a table."""
    cells = []
    for row in result["rows"]:
        change, needle = row["perplexity_change"], row["needle"]
        cells.append(
            [
                f"`{row['attention']}`",
                str(row["length"]),
                "-" if row["perplexity"] is None else f"{row['perplexity']:.3f}",
                "-" if change is None else f"{change['value'] * 100:+.2f} ± {change['error'] * 100:.2f} %",
                "-" if needle is None else f"{needle['right']} of {needle['of']}",
                "-" if row["kv_ratio"] is None else f"{row['kv_ratio']:.3f}",
            ]
        )
    header = ["attention", "length", "perplexity", "change", "needles found", "KV bytes, of all"]
    return markdown(header, cells)


def plot_text_speed(rows: Sequence[Row], path: str | Path, title: str = "") -> None:
    """Writes a PNG: decoding speed against plain, one group of bars per task.

    Args:
        rows: of `mediaspec bench text`.
        path: file ending in .png; its folder must exist.
        title: line above the plot.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError('the plot needs matplotlib; write: pip install "mediaspec[eval]"') from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    tasks = list(dict.fromkeys(row["task"] for row in rows))
    labels = list(dict.fromkeys(row["label"] for row in rows))
    figure, axes = plt.subplots(figsize=(2.4 + 1.1 * len(tasks) + 0.28 * len(rows), 4.6), dpi=140)
    width = 0.84 / len(labels)
    ours, others = plt.get_cmap("viridis"), plt.get_cmap("Greys")
    peers = {row["label"] for row in rows if row["peer"]}
    for place, label in enumerate(labels):
        own = [row for row in rows if row["label"] == label]
        shade = place / max(len(labels) - 1, 1)
        axes.bar(
            [tasks.index(row["task"]) + (place - (len(labels) - 1) / 2) * width for row in own],
            [row["ratio_to_plain"] for row in own],
            width=width * 0.92,
            yerr=[
                [max(0.0, row["ratio_to_plain"] - row["ratio_quartiles"][0]) for row in own],
                [max(0.0, row["ratio_quartiles"][1] - row["ratio_to_plain"]) for row in own],
            ],
            capsize=2,
            color=others(0.35 + 0.4 * shade) if label in peers else ours(shade),
            label=label,
        )
    axes.axhline(1.0, color="#bbbbbb", linewidth=0.8)
    axes.set_xticks(range(len(tasks)), tasks)
    axes.set_ylabel("speed of decoding, ratio to plain")
    if title:
        axes.set_title(title, fontsize=10)
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    axes.grid(axis="y", alpha=0.25)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)
