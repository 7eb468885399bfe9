"""Makes and measures the videos of a comparison, one row each; a run that was stopped goes on where it was.

    rows = run_jobs(jobs, folder, maker, scorer)

A video is written whole (.npz, without loss) before its row; a row whose numbers rest on other scorer settings is
measured again from the file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..pipelines.timeline import Timeline
from .transition import transition_scores
from .video_features import CLIP_FRAMES, clip_rows
from .video_files import find_videos, read_video, write_frames
from .video_plan import Job
from .video_rows import VideoRows
from .video_score import VideoScorer

__all__ = ["FEATURES", "VIDEOS", "Maker", "load_clip_rows", "run_jobs", "score_folders"]

VIDEOS, FEATURES = "videos", "features"


class Maker(Protocol):
    """Makes videos."""

    def make(self, job: Job) -> tuple[np.ndarray, dict[str, Any]]:
        """uint8 [T, H, W, 3], and facts of the run as JSON can hold them."""
        ...


def score_hash(scorer: VideoScorer) -> str:
    """Names the scorer's settings and weights."""
    return hashlib.sha256(json.dumps(scorer.describe(), sort_keys=True).encode()).hexdigest()[:12]


def run_jobs(
    jobs: Sequence[Job],
    rows: VideoRows,
    maker: Callable[[], Maker],
    scorer: VideoScorer,
    *,
    fps: float = 8.0,
    on_row: Callable[[int, int, dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """Makes and measures what is missing.

    Args:
        jobs: of this worker.
        rows: of the run's folder.
        maker: called once, and only if a video is missing: loading a model takes time.
        scorer: measures.
        fps: of the videos.
        on_row: told (done, all, row) after every job, finished ones included.

    Returns:
        One row per job, in order.
    """
    mark = score_hash(scorer)
    made: Maker | None = None
    found = []
    for place, job in enumerate(jobs, 1):
        row = rows.find(job.stem)
        path = rows.folder / VIDEOS / f"{job.stem}.npz"
        content = job.record()
        if row is not None and any(row.get(key) != content[key] for key in ("prompt", "timeline")):
            raise ValueError(
                f"{rows.folder} holds {job.stem} of {row.get('prompt') or row.get('timeline')!r}, now it is "
                f"{job.prompt or content['timeline']!r}; keep the order of the prompts, or give another folder"
            )
        if row is None or row["score"] != mark or not path.is_file():
            facts: dict[str, Any]
            frames, facts = _stored(path)
            if frames is None:
                made = maker() if made is None else made
                frames, facts = made.make(job)
                write_frames(path, frames, fps)
                _write_facts(path, facts)
            metrics = measure(scorer, frames, fps, job.prompt, job.timeline)
            _store_clips(rows.folder / FEATURES / f"{job.stem}.npy", scorer)
            row = {
                **content, **facts, "file": path.relative_to(rows.folder).as_posix(), "fps": fps,
                "frames": len(frames), "size": list(frames.shape[1:3]), "score": mark, "metrics": metrics,
                "spectrum": _spectrum(scorer),
            }  # fmt: skip
            rows.add(row)
        found.append(row)
        if on_row is not None:
            on_row(place, len(jobs), row)
    return found


def _stored(path: Path) -> tuple[np.ndarray | None, dict[str, Any]]:
    """A video that is on the disk already, with the facts of its making; None where it has to be made."""
    facts_path = path.with_suffix(".json")
    if not path.is_file():
        return None, {}
    try:
        facts = json.loads(facts_path.read_text(encoding="utf-8"))
        return read_video(path).frames, facts
    except (OSError, ValueError):
        return None, {}  # damaged, or killed between the video and its facts: made again it is the same video


def _write_facts(path: Path, facts: dict[str, Any]) -> None:
    path.with_suffix(".json").write_text(json.dumps(facts), encoding="utf-8")


def measure(
    scorer: VideoScorer, frames: np.ndarray, fps: float, prompt: str | None, timeline: Timeline | None
) -> dict[str, float]:
    """All metrics of one video; of its transitions too where it has a timeline."""
    metrics = scorer.score(frames, fps, prompt)
    if timeline is not None:
        pictures = scorer.pictures
        features = None if pictures is None else (lambda some: pictures(some)[0])
        metrics |= transition_scores(frames, timeline, features, scorer.reader)
    return metrics


def _spectrum(scorer: VideoScorer) -> list[float] | None:
    return None if scorer.spectrum is None else [round(float(one), 5) for one in scorer.spectrum]


def _store_clips(path: Path, scorer: VideoScorer) -> None:
    """Features of the clips of the video that was scored last, for the Fréchet distance."""
    features = scorer.clip_features
    if features is None or len(features) < CLIP_FRAMES:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, clip_rows(features).astype(np.float32))


def load_clip_rows(folder: Path, rows: Sequence[Mapping[str, Any]]) -> np.ndarray | None:
    """Features of all clips of some rows, [clips, 1024]; None where a file is missing."""
    paths = [folder / FEATURES / f"{row['id']}.npy" for row in rows]
    if not paths or not all(path.is_file() for path in paths):
        return None
    return np.concatenate([np.load(path, allow_pickle=False) for path in paths])


def score_folders(
    folders: Sequence[Path],
    rows: VideoRows,
    scorer: VideoScorer,
    *,
    fps: float | None = None,
    captions: dict[str, str] | None = None,
    limit: int | None = None,
    on_row: Callable[[int, int, dict[str, Any]], None] | None = None,
) -> list[dict[str, Any]]:
    """Measures finished videos; a video of one name in two folders is one item.

    Args:
        folders: of videos. The first is what the others are compared with.
        rows: where results are kept.
        scorer: measures.
        fps: overrides what files say.
        captions: name of a video (without folder and ending) -> its text.
        limit: at most so many videos per folder.
        on_row: told (done, all, row).

    Raises:
        ValueError: a folder twice, or one without videos.
    """
    names = folder_names(folders)
    mark = score_hash(scorer)
    plan = []
    for folder, name in zip(folders, names):
        plan += [(name, key, path) for key, path in list(find_videos(folder).items())[:limit]]
    found = []
    for place, (name, key, path) in enumerate(plan, 1):
        stat = path.stat()
        stamp = [stat.st_size, stat.st_mtime_ns]
        text = (captions or {}).get(key)
        row = rows.find(f"{name}/{key}")
        asked = {"score": mark, "stamp": stamp, "prompt": text, "set_fps": fps}
        if row is None or any(row.get(name) != value for name, value in asked.items()):
            video = read_video(path, fps)
            try:
                metrics = measure(scorer, video.frames, video.fps, text, None)
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from error
            _store_clips(rows.folder / FEATURES / f"{name}/{key}.npy", scorer)
            row = {
                "id": f"{name}/{key}", "group": name, "item": key, "file": str(path.resolve()),
                "fps": video.fps, "frames": len(video.frames), "size": list(video.frames.shape[1:3]),
                **asked, "metrics": metrics, "spectrum": _spectrum(scorer),
            }  # fmt: skip
            rows.add(row)
        found.append(row)
        if on_row is not None:
            on_row(place, len(plan), row)
    return found


def folder_names(folders: Sequence[Path]) -> list[str]:
    """Short distinct names: the last part of the path, with its parent where two are equal.

    Raises:
        ValueError: one folder twice.
    """
    resolved = [Path(one).resolve() for one in folders]
    if len(set(resolved)) != len(resolved):
        raise ValueError(f"a folder is listed twice in {', '.join(map(str, folders))}; list each once")
    for depth in range(1, 8):
        names = ["_".join(one.parts[-depth:]).strip("/") or "root" for one in resolved]
        if len(set(names)) == len(names):
            return names
    return [f"{place}_{one.name}" for place, one in enumerate(resolved)]
