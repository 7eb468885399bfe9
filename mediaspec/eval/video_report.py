"""A static page of a video comparison: clips side by side, their x-t slices, metric tables, statistics and plots.

    write_report("out", result)          # out/report.html, one file without anything outside it

Clips are embedded as H.264 where imageio-ffmpeg is installed, else as GIF. Items are chosen evenly over the list, not
by their numbers.
"""

from __future__ import annotations

import base64
import io
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from .video_compare import measured_by
from .video_files import encode_gif, encode_mp4, have_ffmpeg, read_video
from .video_plots import plot_effects, plot_spectra, plot_tradeoff
from .video_score import METRICS

__all__ = ["render_report", "time_slice", "write_report"]

SIDE = 192
"""Clips are shown at least this large; enlarging repeats pixels."""

MOST_FRAMES = 256
"""Frames of a clip that are embedded; of longer ones the first."""

CLIP_METRICS = ("consistency_lite0", "flicker", "warping_error", "motion", "alignment", "transition_cscv_lite0")


def write_report(folder: str | Path, result: Mapping[str, Any], items: int = 4, title: str | None = None) -> Path:
    """Writes report.html.

    Args:
        folder: where it goes; files of rows are looked for from here.
        result: of `mediaspec eval video`, with "rows".
        items: prompts that are shown with their videos.
        title: of the page.

    Returns:
        The path of the page.

    Raises:
        ValueError: no rows. ImportError: matplotlib or Jinja2 is missing.
    """
    folder = Path(folder)
    page = render_report(folder, result, items, title)
    path = folder / "report.html"
    part = folder / f".report.{os.getpid()}.part"
    try:
        part.write_text(page, encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return path


def render_report(folder: Path, result: Mapping[str, Any], items: int = 4, title: str | None = None) -> str:
    """The page as text; arguments as of `write_report`."""
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        raise ImportError('the report needs Jinja2; write: pip install "mediaspec[eval]"') from error
    rows: Sequence[Mapping[str, Any]] = result["rows"]
    if not rows:
        raise ValueError("there are no measured videos to report; run mediaspec eval video first")
    source = (resources.files("mediaspec.eval") / "templates" / "video_report.html").read_text(encoding="utf-8")
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    keys = [key for key in METRICS if any(key in one["metrics"] for one in result["groups"])]
    plots = {
        "Effects": plot_effects(result["comparisons"]),
        "Steadiness against motion": plot_tradeoff(result["groups"]),
        "Spectrum over time": plot_spectra(result["groups"]),
    }
    return template.from_string(source).render(
        title=title or "Long video comparison",
        lead=_lead(result),
        metrics=METRICS,
        keys=keys,
        groups=result["groups"],
        marks=_marks(result["comparisons"]),
        comparisons=result["comparisons"],
        frechet=result.get("frechet") or [],
        measured=measured_by(result["scorer"]),
        plots=[(name, _uri(data, "image/png")) for name, data in plots.items() if data],
        items=[_item(folder, item, rows) for item in _chosen(rows, items)],
        details=json.dumps(
            {key: result[key] for key in ("settings", "scorer", "provenance") if key in result}, indent=1
        ),
        arrow={"higher": "↑", "lower": "↓", None: ""},
    )


def _lead(result: Mapping[str, Any]) -> str:
    settings = result.get("settings") or {}
    videos, groups = len(result["rows"]), len(result["groups"])
    items = len({row["item"] for row in result["rows"]})
    parts = [f"{videos} videos", f"{groups} ways of making them", f"{items} prompts and seeds"]
    frames = {row["frames"] for row in result["rows"]}
    parts.append(f"{min(frames)} frames" if len(frames) == 1 else f"{min(frames)} to {max(frames)} frames")
    if settings.get("model"):
        parts.append(f"model {settings['model']}")
    return ", ".join(parts)


def _marks(comparisons: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """group|metric -> verdict against its baseline; the first comparison of a group counts."""
    found: dict[str, str] = {}
    for comparison in comparisons:
        for key, one in comparison["metrics"].items():
            found.setdefault(f"{comparison['treatment']}|{key}", one["verdict"])
    return found


def _chosen(rows: Sequence[Mapping[str, Any]], count: int) -> list[str]:
    """Items spread evenly over all that most groups hold, in the order of the rows."""
    held: dict[str, int] = {}
    for row in rows:
        held[row["item"]] = held.get(row["item"], 0) + 1
    most = max(held.values())
    whole = [item for item, times in held.items() if times == most]
    count = min(count, len(whole))
    return [whole[round(place * (len(whole) - 1) / max(count - 1, 1))] for place in range(count)]


def _item(folder: Path, item: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    own = [row for row in rows if row["item"] == item]
    first = own[0]
    timeline = first.get("timeline")
    text = first.get("prompt") or ""
    if timeline:
        text = " → ".join(one.get("text") or " ".join(one["fields"].values()) for one in timeline["segments"])
    return {"name": item, "text": text, "clips": [_clip(folder, row) for row in own]}


def _clip(folder: Path, row: Mapping[str, Any]) -> dict[str, Any]:
    numbers = [
        (METRICS[key].title, f"{row['metrics'][key]:.{METRICS[key].digits}f}")
        for key in CLIP_METRICS
        if key in row["metrics"]
    ]
    found: dict[str, Any] = {"group": row["group"], "numbers": numbers, "video": None, "slice": None, "kind": "none"}
    try:
        video = read_video(folder / row["file"], row["fps"])
    except (OSError, ValueError):
        return found  # the file was moved since; its numbers still stand
    frames = video.frames[:MOST_FRAMES]
    scale = max(1, -(-SIDE // max(frames.shape[1:3])))
    large = frames.repeat(scale, 1).repeat(scale, 2) if scale > 1 else frames
    if have_ffmpeg():
        with tempfile.TemporaryDirectory() as place:
            data = encode_mp4(large, video.fps, Path(place) / "clip.mp4").read_bytes()
        found.update(kind="video", video=_uri(data, "video/mp4"))
    else:
        found.update(kind="gif", video=_uri(encode_gif(large, video.fps), "image/gif"))
    found["slice"] = _uri(_as_png(time_slice(frames)), "image/png")
    found["width"], found["height"] = large.shape[2], large.shape[1]
    return found


def time_slice(frames: np.ndarray) -> np.ndarray:
    """The middle row of every frame side by side: time runs to the right, the picture's width downwards.

    Args:
        frames: [T, H, W, 3] uint8.

    Returns:
        [W, T, 3] uint8. Steady things draw smooth lines, flicker draws vertical stripes.
    """
    return np.ascontiguousarray(frames[:, frames.shape[1] // 2].transpose(1, 0, 2))


def _as_png(picture: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray(picture).save(out, "PNG")
    return out.getvalue()


def _uri(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
