"""Tables and statistics of measured videos: means per group, paired differences between groups, distance of clips.

A group is one way of making videos (sampler / attention / blend), an item one prompt and seed. Groups are compared on
the items that both hold, each with its baseline: the same sampler without attention setting, and for blends every
other blend against "promptblend" as the treatment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .paired import compare_metrics
from .report import markdown
from .video_features import FRECHET_TITLE
from .video_plan import NONE
from .video_score import METRICS, directions

__all__ = ["compare_groups", "frechet_of_groups", "group_table", "paired_table", "pairs_of_groups", "summarise_groups"]

Row = Mapping[str, Any]


def _groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(str(row["group"]), []).append(row)
    return found


def summarise_groups(rows: Sequence[Row], rounds: int = 1000, seed: int = 0) -> list[dict[str, Any]]:
    """Mean of every metric per group, with a bootstrap interval over videos.

    Args:
        rows: of videos, in order of the groups.
        rounds: resamples. seed: of the resampling.

    Returns:
        per group: group, videos, seconds (mean, None for finished videos), attention (means of its summary's numbers),
        metrics: key -> {"mean", "low", "high", "count"}; spectrum: mean power over time in equal bands of frequency.
    """
    out = []
    for group, own in _groups(rows).items():
        metrics = {}
        for key in METRICS:
            values = np.array([row["metrics"][key] for row in own if key in row["metrics"]], dtype=np.float64)
            if not len(values):
                continue
            draws = np.random.default_rng(seed).integers(0, len(values), (rounds, len(values)))
            low, high = np.quantile(values[draws].mean(1), [0.025, 0.975])
            metrics[key] = {
                "mean": float(values.mean()), "low": float(low), "high": float(high), "count": len(values)
            }  # fmt: skip
        spectra = [row["spectrum"] for row in own if row.get("spectrum")]
        seconds = [row["seconds"] for row in own if row.get("seconds") is not None]
        out.append(
            {
                "group": group,
                "videos": len(own),
                "seconds": round(float(np.mean(seconds)), 3) if seconds else None,
                "attention": _attention_means([row.get("attention_summary") for row in own]),
                "metrics": metrics,
                "spectrum": np.mean(spectra, axis=0).round(5).tolist() if spectra else None,
            }
        )
    return out


def _attention_means(summaries: Sequence[Any]) -> dict[str, float] | None:
    """Means of the plain numbers of attention summaries."""
    found = [one for one in summaries if isinstance(one, Mapping)]
    if not found:
        return None
    keys = [key for key, value in found[0].items() if _number(value) is not None]
    columns = {key: [_number(one.get(key)) for one in found] for key in keys}
    return {
        key: float(np.mean([one for one in column if one is not None]))
        for key, column in columns.items()
        if any(one is not None for one in column)
    }


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def pairs_of_groups(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """(baseline, treatment) pairs of group names.

    Rows with an attention setting are paired with "none" of the same sampler and blend; "promptblend" with the other
    blends; of rows without settings (finished folders) the first group is the baseline of all others.
    """
    first: dict[str, Row] = {group: own[0] for group, own in _groups(rows).items()}
    names = list(first)
    if "attention" not in rows[0]:
        return [(names[0], other) for other in names[1:]]
    found = []
    for name, row in first.items():
        for other, base in first.items():
            alike = row["sampler"] == base["sampler"]
            if alike and row.get("blend") == base.get("blend") and base["attention"] == NONE != row["attention"]:
                found.append((other, name))
            same = alike and row["attention"] == base["attention"]
            if same and row.get("blend") == "promptblend" and base.get("blend") not in (None, "promptblend"):
                found.append((other, name))
    return found


def compare_groups(rows: Sequence[Row], rounds: int = 2000, seed: int = 0) -> list[dict[str, Any]]:
    """Paired statistics of every baseline and treatment.

    Returns:
        per pair: baseline, treatment, pairs, metrics: key -> `PairedDifference` as a mapping. Pairs of groups that
        share fewer than two items are left out.
    """
    groups = {group: {str(row["item"]): row for row in own} for group, own in _groups(rows).items()}
    out = []
    for baseline, treatment in pairs_of_groups(rows):
        items = [item for item in groups[baseline] if item in groups[treatment]]
        if len(items) < 2:
            continue
        found = compare_metrics(
            [groups[baseline][item]["metrics"] for item in items],
            [groups[treatment][item]["metrics"] for item in items],
            directions(),
            rounds=rounds,
            seed=seed,
        )
        out.append(
            {
                "baseline": baseline,
                "treatment": treatment,
                "pairs": len(items),
                "metrics": {key: one.as_dict() for key, one in found.items()},
            }
        )
    return out


def frechet_of_groups(
    rows: Sequence[Row], clips: Callable[[Sequence[Row]], np.ndarray | None], reference: np.ndarray | None = None
) -> list[dict[str, Any]]:
    """Fréchet distance of every group's clips to a reference, or of every treatment's clips to its baseline's.

    Args:
        rows: of videos.
        clips: rows of a group -> features [clips, D], None where there are none.
        reference: [clips, D] of videos that are held to be good; None compares treatments with baselines.

    Returns:
        per comparison: group, to, value, floor (between random halves of the reference), clips, title. With few clips
        the distance is biased upwards; the floor shows by how much.
    """
    import torch

    from .frechet import frechet_rows, half_floor

    groups = _groups(rows)
    features = {group: clips(own) for group, own in groups.items()}
    wanted: list[tuple[str, str, np.ndarray | None]]
    if reference is not None:
        wanted = [(group, "reference", reference) for group in groups]
    else:
        wanted = [(treatment, baseline, features[baseline]) for baseline, treatment in pairs_of_groups(rows)]
    out = []
    for group, name, base in wanted:
        own = features[group]
        if own is None or base is None or min(len(own), len(base)) < 4:
            continue
        first, second = torch.from_numpy(own), torch.from_numpy(base)
        out.append(
            {
                "group": group, "to": name, "value": round(frechet_rows(first, second), 4),
                "floor": round(half_floor(second), 4), "clips": [len(own), len(base)], "title": FRECHET_TITLE,
            }
        )  # fmt: skip
    return out


def group_table(groups: Sequence[Row], notes: Mapping[str, Any] | None = None) -> str:
    """Means per group as a markdown table."""
    keys = [key for key in METRICS if any(key in one["metrics"] for one in groups)]
    cells = []
    for one in groups:
        line = [f"`{one['group']}`", str(one["videos"])]
        for key in keys:
            entry = one["metrics"].get(key)
            line.append("-" if entry is None else f"{entry['mean']:.{METRICS[key].digits}f}")
        seconds = one.get("seconds")
        cells.append([*line, "-" if seconds is None else f"{seconds:.1f}"])
    header = ["group", "videos", *(_arrow(key) for key in keys), "seconds"]
    text = markdown(header, cells)
    if notes:
        text += "\n\n" + measured_by(notes)
    return text


def measured_by(scorer: Mapping[str, Any]) -> str:
    """One sentence that says how the numbers were measured."""
    pictures, shots = scorer.get("pictures"), scorer.get("shots")
    every = scorer["feature_every"]
    parts = [f"flow: {scorer['flow']}" + (f", every {scorer['flow_every']} pairs" if scorer["flow_every"] > 1 else "")]
    if pictures:
        parts.append(f"{pictures['name']} on every {_ordinal(every)} frame at {pictures['side']} px")
    if shots:
        parts.append(f"{shots['name']} on every frame at {shots['side'][1]}x{shots['side'][0]}")
    parts.append("these features stand in for DINO and CLIP and do not compare with published tables")
    return "Measured with " + "; ".join(parts) + "."


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def _arrow(key: str) -> str:
    one = METRICS[key]
    return one.title + {"higher": " ↑", "lower": " ↓", None: ""}[one.better]


def paired_table(comparison: Row) -> str:
    """One comparison as a markdown table."""
    cells = []
    for key, one in comparison["metrics"].items():
        digits = METRICS[key].digits + 1
        relative = "-" if one["relative"] is None else f"{100 * one['relative']:+.1f} %"
        cells.append(
            [
                _arrow(key),
                f"{one['without']:.{digits}f}",
                f"{one['treated']:.{digits}f}",
                f"{one['mean']:+.{digits}f}",
                f"{one['low']:+.{digits}f} .. {one['high']:+.{digits}f}",
                relative,
                "-" if one["improved"] is None else f"{100 * one['improved']:.0f} %",
                _p(one["p_value"]),
                _p(one["p_holm"]),
                one["verdict"],
            ]
        )
    title = f"`{comparison['treatment']}` against `{comparison['baseline']}`, {comparison['pairs']} pairs"
    header = ["metric", "without", "with", "difference", "95 %", "relative", "improved", "p", "p (Holm)", "verdict"]
    return f"{title}\n\n{markdown(header, cells)}"


def _p(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.1e}" if value < 0.001 else f"{value:.3f}"
