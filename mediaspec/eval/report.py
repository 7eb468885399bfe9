"""Tables and the speed-drift plot from the JSON that `mediaspec bench` and `mediaspec eval` write.

mediaspec bench image --rules plain,exact,cool_sd --json > bench.json
mediaspec eval image --rules plain,exact,cool_sd --num-images 2048 --json > eval.json
mediaspec eval report bench.json eval.json
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["bench_table", "combined_table", "eval_table", "markdown", "plot_speed_drift", "read_json", "report"]

Row = Mapping[str, Any]


def read_json(path: str | Path) -> list[dict[str, Any]] | dict[str, Any]:
    """Reads a result: a JSON file, or captured output whose last non-empty line is the JSON.

    Raises:
        ValueError: neither is JSON.
    """
    text = Path(path).read_text()
    lines = [line for line in text.splitlines() if line.strip()]
    for candidate in (text, lines[-1] if lines else ""):
        try:
            value: list[dict[str, Any]] | dict[str, Any] = json.loads(candidate)
            return value
        except json.JSONDecodeError:
            continue
    raise ValueError(f"{path} holds no JSON result; write it with `mediaspec bench image ... --json > {path}`")


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table; the first column is left-aligned, the others right."""
    rule = ["---"] + ["---:"] * (len(header) - 1)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, rule, *rows])


def _drift(value: float) -> str:
    return "0" if value == 0 else f"{value:.3g}"


def bench_table(rows: Sequence[Row]) -> str:
    """Rows of `mediaspec bench image` as a table."""
    cells = [
        [
            f"`{row['rule']}`",
            f"{row['ratio_to_plain']:.2f}x",
            f"{row['ratio_quartiles'][0]:.2f} - {row['ratio_quartiles'][1]:.2f}",
            f"{row['tokens_per_call']:.2f}",
            f"{row['seconds']:.3f}",
            f"{row['tokens_per_second']:.0f}",
            _drift(row["drift"]),
            str(row["guarantee"]),
        ]
        for row in rows
    ]
    header = ["rule", "speed", "quartiles", "tokens per call", "seconds", "tokens/s", "drift bound", "guarantee"]
    return markdown(header, cells)


def _with_error(entry: Row | None, digits: int = 3, percent: bool = False) -> str:
    if entry is None:
        return "-"
    scale, unit = (100.0, " %") if percent else (1.0, "")
    return f"{entry['value'] * scale:.{digits}g} ± {entry['error'] * scale:.1g}{unit}"


def eval_table(result: Row) -> str:
    """Result of `mediaspec eval image` as a table, with what the numbers rest on below it."""
    rules: Sequence[Row] = result["rules"]
    captions = [m for m in ("concept_top1", "all", "recall_at_1") if any(m in r.get("captions", {}) for r in rules)]
    clip = any("clip_score" in r for r in rules)
    cells = []
    for row in rules:
        frechet, kid = row["frechet"], row["kid"]
        ratio = row.get("frechet_ratio")
        line = [
            f"`{row['rule']}`",
            _with_error(frechet, 4),
            "-" if ratio is None else f"{ratio['value']:.3f} ± {ratio['error']:.1g}",
            f"{frechet['floor']:.3g}",
            f"{kid['value'] * 1000:.2f} ± {kid['error'] * 1000:.2f}",
        ]
        line += [_with_error(row.get("captions", {}).get(m), 3, percent=True) for m in captions]
        line += [_with_error(row.get("clip_score"), 4)] if clip else []
        cells.append([*line, _drift(row["drift"]["mean"]), f"{row['tokens_per_call']:.2f}"])
    names = {"concept_top1": "concept right", "all": "caption right", "recall_at_1": "R@1"}
    header = ["rule", str(result["features"]["title"]), "to plain", "half floor", "KID x 1000"]
    header += [names[m] for m in captions] + (["CLIP score"] if clip else []) + ["drift bound", "tokens per call"]
    features, reference = result["features"], result["reference"]
    note = (
        f"{result['num_images']} images per rule; reference: {reference['what']} ({reference['count']} images); "
        f"features at {features['side']} px, {features['filter']}; ± is one bootstrap standard error."
    )
    return markdown(header, cells) + "\n\n" + note


def combined_table(bench: Sequence[Row], quality: Row) -> str:
    """One line per rule that is in both results: speed, drift and quality."""
    by_rule = {row["rule"]: row for row in quality["rules"]}
    cells = []
    for row in bench:
        other = by_rule.get(row["rule"])
        if other is None:
            continue
        cells.append(
            [
                f"`{row['rule']}`",
                f"{row['ratio_to_plain']:.2f}x",
                f"{row['tokens_per_call']:.2f}",
                _drift(other["drift"]["mean"]),
                _with_error(other["frechet"], 4),
                _with_error(other.get("captions", {}).get("concept_top1"), 3, percent=True),
                str(row["guarantee"]),
            ]
        )
    if not cells:
        raise ValueError("the two results share no rule; run bench and eval with the same --rules")
    title = str(quality["features"]["title"])
    return markdown(["rule", "speed", "tokens per call", "drift bound", title, "concept right", "guarantee"], cells)


def report(paths: Sequence[str | Path]) -> str:
    """Markdown for any mix of result files: a list is a speed result, an object a quality result.

    Args:
        paths: files; with exactly one of each kind the combined table comes first.
    """
    from .text_report import text_bench_table, text_eval_table  # it is built on this file

    results = [(Path(p), read_json(p)) for p in paths]
    bench = [(p, r) for p, r in results if isinstance(r, list)]
    quality = [(p, r) for p, r in results if isinstance(r, dict)]
    parts = []
    pictures = not any("task" in row for _, rows in bench for row in rows) and all("rules" in r for _, r in quality)
    if len(bench) == 1 and len(quality) == 1 and pictures:
        parts.append(combined_table(bench[0][1], quality[0][1]))
    for _, rows in bench:
        table = text_bench_table(rows) if rows and "task" in rows[0] else bench_table(rows)
        parts.append(table + _command(rows[0].get("provenance", {}) if rows else {}))
    for _, result in quality:
        table = text_eval_table(result) if "rows" in result else eval_table(result)
        parts.append(table + _command(result.get("provenance", {})))
    return "\n\n".join(parts)


def _command(record: Row) -> str:
    if not record:
        return ""
    versions = ", ".join(f"{k} {v}" for k, v in record["versions"].items())
    return (
        f"\n\n`{record['command']}`  \n{record['machine']}, {record['dtype']}, {record['threads']} threads, {versions}"
        + (f", revision {record['git']}" if record.get("git") else "")
    )


def plot_speed_drift(rows: Sequence[Row], path: str | Path, title: str = "") -> None:
    """Writes a PNG: speed ratio against the drift bound, one point per rule.

    Args:
        rows: of `mediaspec bench image`.
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

    figure, axes = plt.subplots(figsize=(7.2, 4.6), dpi=140)
    colours = {"exact-tokens": "#1b7837", "exact-law": "#2166ac", "bounded-drift": "#d6604d", "unbounded": "#7f7f7f"}
    seen: set[str] = set()
    for row in rows:
        kind = str(row["guarantee"])
        low, high = row["ratio_quartiles"]
        axes.errorbar(
            [row["drift"]],
            [row["ratio_to_plain"]],
            yerr=[[max(0.0, row["ratio_to_plain"] - low)], [max(0.0, high - row["ratio_to_plain"])]],
            fmt="o",
            capsize=3,
            color=colours.get(kind, "#542788"),
            label=kind if kind not in seen else None,
        )
        seen.add(kind)
    axes.axhline(1.0, color="#bbbbbb", linewidth=0.8)
    positive = [row["drift"] for row in rows if row["drift"] > 0]
    if positive and max(positive) > 20 * min(positive):
        axes.set_xscale("symlog", linthresh=min(positive))
    axes.set_xlabel("drift: accumulated total-variation bound per picture (0 = the model's own law)")
    axes.set_ylabel("speed, ratio to plain decoding")
    axes.set_ylim(0, 1.12 * max(row["ratio_to_plain"] for row in rows))
    axes.margins(x=0.15)
    if title:
        axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.25)
    figure.tight_layout()
    _label(axes, rows)
    figure.savefig(path)
    plt.close(figure)


def _label(axes: Any, rows: Sequence[Row]) -> None:
    """Writes rule names right of their points, from low to high, moved up where one would cover another."""
    placed: list[tuple[float, float]] = []
    for row in sorted(rows, key=lambda r: float(r["ratio_to_plain"])):
        point = (row["drift"], row["ratio_to_plain"])
        x, y = axes.transData.transform(point)
        wanted = y
        for other_x, other_y in sorted(placed):
            if abs(x - other_x) < 120 and wanted - other_y < 18:
                wanted = max(wanted, other_y + 18)
        placed.append((x, wanted))
        points = 72 / axes.figure.dpi
        axes.annotate(
            str(row["rule"]), point, xytext=(8, (wanted - y) * points - 2), textcoords="offset points", fontsize=8
        )
