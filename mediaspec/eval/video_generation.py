"""Makes the videos of a manifest: resumable within a video and from video to video.

A video under way lies in `OUT/.work-<settings hash>/`; when it is finished, its contact strip, its file and its line
in the manifest are written in this order, as for pictures.

    OUT/000000.mp4  OUT/000000.strip.png         the video, and frames of it side by side
    OUT/000000/000000.png ...                    with format "png" instead of the mp4
    OUT/attention.json                           what the attention edit measured, by video; not part of the manifest
"""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import PIL.Image
import PIL.ImageSequence

from ..pipelines.keywords import nearest
from ..pipelines.loading import EMBEDDED
from ..pipelines.prompt_bank import PromptBank
from ..pipelines.timeline import BLENDS, Timeline
from ..pipelines.versions import versions
from .generation import model_fingerprint
from .manifest import SETTINGS_FILE, FinishedImage, Item, Manifest, ManifestError
from .sheet import contact_sheet

__all__ = ["FORMATS", "VideoGeneration", "VideoItem", "VideoSettings", "contact_strip", "generate_videos"]

FORMATS = {"mp4": ".mp4", "gif": ".gif", "png": ""}
STRIP = 16
"""Frames on a contact strip at most."""


@dataclass(frozen=True)
class VideoItem(Item):
    """One video to make; see `Item`.

    Args:
        format: "mp4", "gif" or "png".
    """

    format: str = "mp4"

    @property
    def file(self) -> str:
        """The video's file; of a folder of PNG files the first one."""
        return f"{self.id}/{0:06d}.png" if self.format == "png" else f"{self.id}{FORMATS[self.format]}"

    @property
    def video(self) -> str:
        """The video's file or folder."""
        return f"{self.id}{FORMATS[self.format]}"

    @property
    def strip(self) -> str:
        """The contact strip's file."""
        return f"{self.id}.strip.png"


@dataclass(frozen=True)
class VideoSettings:
    """Everything that decides a video besides its prompt and its seed. None leaves a value to the pipeline.

    Args:
        model: embedded name, folder or repository id.
        num_frames: length.
        sampler: see `LongVideoPipeline`.
        num_inference_steps, guidance_scale, height, width: as in the pipeline call.
        attention: settings of TiARA as a mapping; None: the model's own attention.
        timeline: `Timeline.record()`; None: one prompt per video.
        blend, align, fill: how the prompts of a timeline mix, see `PromptBank.from_timeline`.
        fps: frames per second of the file.
        format: "mp4", "gif" or "png".
        dtype: "float32", "bfloat16" or "float16". device: "cpu", "cuda", ...

    Raises:
        ValueError: an unknown name (the nearest one is named) or a number out of range.
    """

    model: str = "moving-emoji"
    num_frames: int = 64
    sampler: str = "freenoise"
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    height: int | None = None
    width: int | None = None
    attention: dict[str, Any] | None = None
    timeline: dict[str, Any] | None = None
    blend: str | None = None
    align: str | None = None
    fill: str | None = None
    fps: float = 8
    format: str = "mp4"
    dtype: str = "float32"
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(f"format {self.format!r} is not known; {nearest(self.format, FORMATS)}")
        if self.blend is not None and self.blend not in BLENDS:
            raise ValueError(f"blend {self.blend!r} is not known; {nearest(self.blend, BLENDS)}")
        if self.num_frames < 1:
            raise ValueError(f"num_frames={self.num_frames}; write at least 1")
        if not 0 < self.fps < math.inf:
            raise ValueError(f"fps={self.fps}; write frames per second, for instance 8")
        if self.guidance_scale is not None and not math.isfinite(self.guidance_scale):
            raise ValueError(f"guidance_scale={self.guidance_scale!r}; write a finite number, 1 switches guidance off")

    def record(self) -> dict[str, Any]:
        """JSON-ready form that a manifest stores and hashes; the model counts by its files, not by its path."""
        values = {key: value for key, value in asdict(self).items() if value is not None}
        fingerprint = model_fingerprint(self.model)
        if fingerprint is not None:
            values["model_sha256"] = fingerprint
            if self.model not in EMBEDDED:
                values["model"] = Path(self.model).resolve().name
        return json.loads(json.dumps(values))


@dataclass(frozen=True)
class VideoGeneration:
    """What a run did.

    Args:
        rows: manifest rows of all requested videos, in order.
        made: how many of them this run made; the others were there.
        seconds: wall-clock time of the pipeline calls.
        attention: by video id what the attention edit measured.
    """

    rows: list[dict[str, Any]]
    made: int
    seconds: float
    attention: dict[str, dict[str, Any]]


def generate_videos(
    items: Sequence[VideoItem],
    out: str | Path,
    settings: VideoSettings,
    *,
    load: Callable[[VideoSettings], Any],
    enable: Callable[[Any, dict[str, Any]], Any] | None = None,
    on_video: Callable[[Any, int, int], None] | None = None,
) -> VideoGeneration:
    """Makes what is missing of `items` in the folder `out`.

    Args:
        items: all videos.
        out: folder of the videos and the manifest.
        settings: what they are made with.
        load: makes the `LongVideoPipeline`; called only if something is missing.
        enable: makes the attention handle of a base pipeline; called with it and settings.attention for every video.
        on_video: called with (pipeline, finished videos, wanted videos) before every video.

    Raises:
        ManifestError: the folder has other settings or unfinished videos of others, cannot be written, or is in use.
        ValueError: from the pipeline. Where it comes before anything was made, a new folder is taken away again.
    """
    made, seconds = 0, 0.0
    with _nothing_left(Path(out)), Manifest(out, settings.record(), versions()) as manifest:
        work = manifest.root / f".work-{manifest.hash}"
        _refuse_other_work(manifest.root, work)
        measured = _read_measured(manifest.root)
        todo = manifest.pending(items)
        pipe: Any = load(settings) if todo else None
        bank = _bank(pipe, settings) if todo else None
        for item in items:
            if item not in todo:
                continue
            if on_video is not None:
                on_video(pipe, len(items) - len(todo) + made, len(items))
            begun = time.perf_counter()
            path = work / item.video
            summary = _make(pipe, item, settings, bank, path, enable)
            seconds += time.perf_counter() - begun
            if summary is not None:
                measured[item.id] = summary
                _write_measured(manifest.root, measured)
            manifest.finish([_finish(manifest.root, item, settings, path)])
            _clear(path)
            made += 1
        for item in items:  # what a kill left behind a finished line; videos of other calls stay
            _clear(work / item.video)
        if work.exists() and not any(work.iterdir()):
            work.rmdir()
        rows = [manifest.rows[item.id] for item in items]
    return VideoGeneration(rows, made, seconds, {item.id: measured[item.id] for item in items if item.id in measured})


@contextmanager
def _nothing_left(root: Path) -> Iterator[None]:
    """Takes away what a run has put into a folder if it fails before it made anything there."""
    new = [one for one in (root, *root.parents) if not one.exists()]
    begun = (root / SETTINGS_FILE).exists()
    try:
        yield
    except Exception:
        work = [one for folder in root.glob(".work-*") for one in folder.rglob("*") if one.is_file()]
        if not begun and not work and not any(root.glob("manifest*.jsonl")):
            (root / SETTINGS_FILE).unlink(missing_ok=True)
            for folder in new:
                with suppress(OSError):
                    folder.rmdir()
        raise


def _refuse_other_work(root: Path, work: Path) -> None:
    """Frames and states that another run has made here are not thrown away unasked.

    Raises:
        ManifestError: there are some. Folders of runs that made nothing are removed.
    """
    for other in root.glob(".work-*"):
        made = (one for one in other.rglob("*") if one.is_file() and one.name not in ("settings.json", "lock"))
        if other != work and any(made):
            raise ManifestError(
                f"{other} holds unfinished videos made with other settings; use those settings to go on with them, "
                "choose another folder with --out, or delete that one"
            )
        if other != work:
            shutil.rmtree(other)


def _clear(path: Path) -> None:
    """Removes a finished video from the work folder, with its settings and parts."""
    for place in (path, path.with_name(path.name + ".parts")):
        if place.is_dir():
            shutil.rmtree(place)
        else:
            place.unlink(missing_ok=True)
    path.with_name(path.name + ".json").unlink(missing_ok=True)


def contact_strip(frames: Sequence[PIL.Image.Image], captions: Sequence[str], columns: int = 8) -> bytes:
    """PNG of frames side by side with a caption under each, 128 to 192 pixels wide each.

    Args:
        frames: pictures; captions: as many texts.
        columns: frames a row.
    """
    size = max(128, min(frames[0].width, 192))
    buffer = io.BytesIO()
    contact_sheet(frames, captions, columns, size).save(buffer, format="PNG", compress_level=6)
    return buffer.getvalue()


def _bank(pipe: Any, settings: VideoSettings) -> PromptBank | None:
    if settings.timeline is None:
        return None
    options = {name: getattr(settings, name) for name in ("blend", "align", "fill")}
    return PromptBank.from_timeline(
        pipe.base, _timeline(settings), **{name: value for name, value in options.items() if value is not None}
    )


def _timeline(settings: VideoSettings) -> Timeline:
    record = settings.timeline or {}
    segments = [(one.get("text", one.get("fields")), *one["frames"]) for one in record["segments"]]
    return Timeline.of(segments, settings.num_frames)


def _make(
    pipe: Any, item: VideoItem, settings: VideoSettings, bank: PromptBank | None, path: Path, enable: Any
) -> dict[str, Any] | None:
    """Runs the pipeline into `path`; returns what the attention edit measured, if there is one."""
    names = ("num_inference_steps", "guidance_scale", "height", "width")
    given = {name: getattr(settings, name) for name in names if getattr(settings, name) is not None}
    handle = enable(pipe.base, settings.attention) if settings.attention is not None and enable is not None else None
    try:
        pipe.attention = handle
        pipe(
            None if bank is not None else item.prompt, settings.num_frames, settings.sampler, prompt_bank=bank,
            negative_prompt=item.negative_prompt, seeds=item.seed, output_path=path, fps=settings.fps, **given,
        )  # fmt: skip
        return None if handle is None else _short_summary(handle.summary())
    finally:
        pipe.attention = None
        if handle is not None:
            handle.remove()


def _short_summary(summary: dict[str, Any]) -> dict[str, Any]:
    modules = summary["modules"]
    count = modules if isinstance(modules, int) else len(modules)
    numbers = {key: summary.get(key) for key in ("mean_delta", "mean_rho", "own_frame_mass")}
    return {"modules": count, **{key: value for key, value in numbers.items() if _is_number(value)}}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _finish(root: Path, item: VideoItem, settings: VideoSettings, path: Path) -> FinishedImage:
    """Reads a finished video back into what the manifest stores."""
    wanted = sorted({round(k * (settings.num_frames - 1) / (STRIP - 1)) for k in range(STRIP)})
    texts = [item.prompt] * settings.num_frames
    if settings.timeline is not None:
        line = _timeline(settings)
        texts = [line.texts[i] for i, _ in (replace(line, num_frames=settings.num_frames)).schedule("cut")]
    pictures = {n: picture for n, picture in _frames(path, settings.num_frames) if n in wanted}
    shown = [n for n in wanted if n in pictures]
    strip = contact_strip([pictures[n] for n in shown], [f"{n}: {texts[n]}" for n in shown])
    extra = {item.strip: strip}
    if item.format == "png":
        (root / item.id).mkdir(parents=True, exist_ok=True)
        files = sorted(path.glob("*.png"))
        extra |= {f"{item.id}/{file.name}": file.read_bytes() for file in files[1:]}
        whole = files[0].read_bytes()
    else:
        whole = path.read_bytes()
    stats = {"video": item.video, "num_frames": settings.num_frames, "fps": settings.fps}
    return FinishedImage(item, whole, stats, extra)


def _frames(path: Path, count: int) -> Iterator[tuple[int, PIL.Image.Image]]:
    """Numbered frames of a finished video."""
    if path.suffix == "":
        for number, file in enumerate(sorted(path.glob("*.png"))):
            with PIL.Image.open(file) as picture:
                yield number, picture.convert("RGB")
    elif path.suffix == ".gif":
        with PIL.Image.open(path) as movie:
            lengths = [int(frame.info.get("duration", 0)) for frame in PIL.ImageSequence.Iterator(movie)]
            unit, number = sum(lengths) / count, 0
            for frame, length in zip(PIL.ImageSequence.Iterator(movie), lengths, strict=True):
                for _ in range(max(1, round(length / unit)) if unit else 1):  # equal neighbours are stored once
                    if number < count:
                        yield number, frame.convert("RGB")
                    number += 1
    else:
        import imageio.v3 as iio

        for number, pixels in enumerate(iio.imiter(path)):
            yield number, PIL.Image.fromarray(pixels)


def _read_measured(root: Path) -> dict[str, dict[str, Any]]:
    try:
        found = json.loads((root / "attention.json").read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    except (OSError, ValueError):
        return {}  # it only informs; a damaged one is written anew


def _write_measured(root: Path, measured: dict[str, dict[str, Any]]) -> None:
    temporary = root / ".attention.json.tmp"
    temporary.write_text(json.dumps(measured, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(temporary, root / "attention.json")
