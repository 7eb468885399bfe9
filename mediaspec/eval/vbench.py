"""VBench's files: a folder of videos as its evaluation looks for them, and its result files as rows.

    write_vbench("for_vbench", [("a cat", 0, Path("out/0000-0.npz"))], dimensions=["subject_consistency"])
    scores = read_vbench("evaluation_results")     # {"subject_consistency": VBenchScore(...), ...}

VBench (arXiv:2311.17982, package vbench 0.1.5) finds the video of a prompt as `{prompt}-{index}.mp4`, with indices
0 to 4, and reads prompts and dimensions from a full_info.json. It writes NAME_full_info.json and
NAME_eval_results.json, where every dimension holds [score, list of {video_path, video_results}].
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..pipelines.keywords import nearest
from .video_files import encode_mp4, read_video

__all__ = ["DIMENSIONS", "VBenchScore", "normalised", "read_vbench", "video_name", "write_vbench"]

DIMENSIONS = (
    "subject_consistency", "background_consistency", "aesthetic_quality", "imaging_quality", "object_class",
    "multiple_objects", "color", "spatial_relationship", "scene", "temporal_style", "overall_consistency",
    "human_action", "temporal_flickering", "motion_smoothness", "dynamic_degree", "appearance_style",
)  # fmt: skip

NEED_MORE = ("object_class", "multiple_objects", "scene", "appearance_style", "color", "spatial_relationship")
"""Dimensions that need facts beside the prompt; VBench refuses them for prompts of one's own."""

RANGES: Mapping[str, tuple[float, float]] = {
    "subject_consistency": (0.1462, 1.0),
    "background_consistency": (0.2615, 1.0),
    "temporal_flickering": (0.6293, 1.0),
    "motion_smoothness": (0.706, 0.9975),
    "dynamic_degree": (0.0, 1.0),
}
"""Lowest and highest score by which its leaderboard scales a dimension."""

MOST_BYTES = 255  # of a file name on the usual file systems


def video_name(prompt: str, index: int, ending: str = ".mp4") -> str:
    """The file name under which VBench looks for a video.

    Args:
        prompt: as in full_info.json.
        index: of the video of that prompt, from 0.
        ending: with its dot.

    Raises:
        ValueError: a prompt that cannot be part of a file name.

    Example: `video_name("a cat", 2)` is "a cat-2.mp4".
    """
    name = f"{prompt}-{index}{ending}"
    if not prompt.strip() or "/" in prompt or "\0" in prompt or len(name.encode()) > MOST_BYTES or index < 0:
        raise ValueError(
            f"{prompt[:60]!r} with index {index} gives no file name; VBench names files by prompts, so give a prompt "
            f"without slashes that fits {MOST_BYTES} bytes, and an index from 0"
        )
    return name


def write_vbench(
    folder: str | Path,
    videos: Iterable[tuple[str, int, Path]],
    dimensions: Sequence[str] = ("subject_consistency", "background_consistency", "temporal_flickering",
                                 "motion_smoothness", "dynamic_degree"),
    fps: float | None = None,
) -> Path:  # fmt: skip
    """Writes videos and full_info.json for VBench.

    Args:
        folder: gets videos/ and full_info.json; files of an earlier call are written over.
        videos: (prompt, index, path) each. An .mp4 is copied, others are encoded.
        dimensions: names, of every prompt.
        fps: overrides what files say.

    Returns:
        Path of full_info.json; run `vbench evaluate --videos_path FOLDER/videos --full_json_dir FOLDER/full_info.json
        --dimension ...`, or `mode=custom_input`.

    Raises:
        ValueError: an unknown dimension, a prompt that is no file name, one prompt and index twice, no videos.
    """
    for name in dimensions:
        if name not in DIMENSIONS:
            raise ValueError(f"VBench has no dimension {name!r}; {nearest(name, DIMENSIONS)}")
        if name in NEED_MORE:
            raise ValueError(f"dimension {name} needs VBench's own prompts with their facts; leave it out")
    plan: dict[str, tuple[str, Path]] = {}
    for prompt, index, path in videos:
        name = video_name(prompt, index)
        if name in plan:
            raise ValueError(f"{name!r} comes twice; number the videos of one prompt 0, 1, ...")
        plan[name] = (prompt, path)
    if not plan:
        raise ValueError("there are no videos to write")
    root = Path(folder)
    (root / "videos").mkdir(parents=True, exist_ok=True)
    info: dict[str, dict[str, Any]] = {}
    for name, (prompt, path) in plan.items():
        target = root / "videos" / name
        part = root / "videos" / f".{os.getpid()}.part.mp4"
        try:
            if path.suffix.lower() == ".mp4" and fps is None:
                shutil.copyfile(path, part)
            else:
                video = read_video(path, fps)
                encode_mp4(video.frames, video.fps, part)
            os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)
        entry = info.setdefault(prompt, {"prompt_en": prompt, "dimension": list(dimensions), "video_list": []})
        entry["video_list"].append(str(target))
    path = root / "full_info.json"
    path.write_text(json.dumps(list(info.values()), indent=4, ensure_ascii=False), encoding="utf-8")
    return path


@dataclass(frozen=True)
class VBenchScore:
    """One dimension of a result.

    Args:
        dimension: name.
        score: over all videos, as VBench pools it.
        videos: path -> score of that video; empty where VBench stored none.
    """

    dimension: str
    score: float
    videos: dict[str, float]

    def by_prompt(self) -> dict[str, list[float]]:
        """Scores of the videos by the prompt in their file name, in the order of their indices."""
        found: dict[str, list[tuple[int, float]]] = {}
        for path, value in self.videos.items():
            stem = Path(path).stem
            match = re.search(r"-(\d+)$", stem)
            prompt, index = (stem[: match.start()], int(match[1])) if match else (stem, 0)
            found.setdefault(prompt, []).append((index, value))
        return {prompt: [value for _, value in sorted(pairs)] for prompt, pairs in found.items()}


def read_vbench(path: str | Path) -> dict[str, VBenchScore]:
    """Reads a NAME_eval_results.json, or all of them in a folder (later files win).

    Raises:
        ValueError: no such file, no JSON, or another structure.
    """
    path = Path(path)
    if path.is_dir():
        files = sorted(path.glob("*eval_results.json"), key=lambda one: (one.stat().st_mtime_ns, one.name))
    else:
        files = [path] if path.is_file() else []
    if not files:
        raise ValueError(f"{path} holds no *eval_results.json; give the folder that VBench wrote to")
    found: dict[str, VBenchScore] = {}
    for file in files:
        try:
            document = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{file} is no JSON: {error}") from error
        if not isinstance(document, dict):
            raise ValueError(f"{file} holds no dimensions; give the file that VBench wrote")
        for dimension, entry in document.items():
            found[dimension] = _score(file, dimension, entry)
    return found


def _score(file: Path, dimension: str, entry: Any) -> VBenchScore:
    score, videos = (entry[0], entry[1]) if isinstance(entry, list) and len(entry) == 2 else (entry, [])
    if isinstance(score, bool) or not isinstance(score, (int, float)) or not isinstance(videos, list):
        raise ValueError(f"{file}: {dimension} is {str(entry)[:80]}; expected [score, list of videos]")
    own: dict[str, float] = {}
    for one in videos:
        value = one.get("video_results") if isinstance(one, dict) else None
        # dynamic degree stores true and false, a few dimensions store per-frame lists or texts beside the score
        if isinstance(value, (int, float)) and isinstance(one.get("video_path"), str) and math.isfinite(value):
            own[one["video_path"]] = float(value)
    return VBenchScore(dimension, float(score), own)


def normalised(dimension: str, score: float) -> float:
    """A score scaled as VBench's leaderboard does, (score - lowest) / (highest - lowest), within 0..1.

    Raises:
        ValueError: a dimension whose range is not known here.

    Example: `normalised("dynamic_degree", 0.5)` is 0.5.
    """
    if dimension not in RANGES:
        raise ValueError(f"no range is known for {dimension!r}; {nearest(dimension, RANGES)}")
    low, high = RANGES[dimension]
    return min(1.0, max(0.0, (score - low) / (high - low)))
