"""Finished videos on disk: mp4 and other containers, gif, folders of pictures, .npy and .npz.

    video = read_video("out/taxi-0.mp4")       # frames uint8 [T, H, W, 3], fps
    found = find_videos("out")                 # {"taxi-0": Path("out/taxi-0.mp4"), ...}
    write_frames("out/taxi-0.npz", frames, fps=8)    # lossless, appears whole or not at all

Flicker is measured in single grey levels, and lossy files change those: compare videos of one format, best .npz.
"""

from __future__ import annotations

import importlib.util
import io
import os
import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

__all__ = ["Video", "encode_gif", "encode_mp4", "find_videos", "have_ffmpeg", "read_video", "write_frames"]

DEFAULT_FPS = 8.0
"""Of files that store none: pictures and bare arrays."""

CONTAINERS = (".mp4", ".webm", ".mkv", ".mov", ".avi")
PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".webp")


@dataclass(frozen=True)
class Video:
    """Frames of one video.

    Args:
        frames: [T, H, W, 3] uint8.
        fps: frames per second.
        path: where it came from.
    """

    frames: np.ndarray
    fps: float
    path: Path


def have_ffmpeg() -> bool:
    """Whether mp4 files can be read and written."""
    return importlib.util.find_spec("imageio_ffmpeg") is not None


def _need_ffmpeg(path: Path) -> None:
    if not have_ffmpeg():
        raise ImportError(
            f'{path} needs imageio-ffmpeg; write: pip install "mediaspec[video]", or give .gif, .npz or folders of png'
        )


def find_videos(folder: str | Path) -> dict[str, Path]:
    """Videos in a folder and below it, by name: relative path without ending, sorted in natural order.

    A folder that holds pictures and no videos is one video.

    Raises:
        ValueError: no folder, no videos in it, or one name twice (as .mp4 and .gif).
    """
    root = Path(folder)
    if not root.is_dir():
        raise ValueError(f"{root} is no folder; give folders of videos (mp4, gif, npy, npz, or folders of png)")
    found: dict[str, Path] = {}

    def add(path: Path, name: str) -> None:
        if name in found:
            raise ValueError(f"{found[name]} and {path} have one name; keep one format per folder")
        found[name] = path

    for path in sorted(root.rglob("*"), key=lambda one: _natural(str(one))):
        relative = path.relative_to(root)
        if any(part.startswith(".") for part in relative.parts):
            continue
        if path.is_file() and path.suffix.lower() in (*CONTAINERS, ".gif", ".npy", ".npz"):
            add(path, relative.with_suffix("").as_posix())
        elif path.is_dir() and any(one.suffix.lower() in PICTURES for one in path.iterdir()):
            add(path, relative.as_posix())
    if not found and any(one.suffix.lower() in PICTURES for one in root.iterdir()):
        found[root.name] = root
    if not found:
        raise ValueError(f"{root} holds no videos; give mp4, gif, npy, npz, or folders of png")
    return found


def _natural(text: str) -> list[Any]:
    """Sort key under which frame 10 follows frame 9."""
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in re.split(r"(\d+)", text)]


def read_video(path: str | Path, fps: float | None = None) -> Video:
    """Reads a video whole.

    Args:
        path: see the module's head. Arrays are uint8 [T, H, W, 3], or floats of that shape in 0..1.
        fps: overrides what the file says.

    Raises:
        ValueError: unreadable, empty or of frames of several sizes. ImportError: a container without imageio-ffmpeg.
    """
    path = Path(path)
    own: float | None = None
    try:
        if path.is_dir():
            names = [one for one in path.iterdir() if one.suffix.lower() in PICTURES]
            frames = _pictures(sorted(names, key=lambda one: _natural(one.name)))
        elif path.suffix.lower() in (".npy", ".npz"):
            frames, own = _array(path)
        elif path.suffix.lower() == ".gif":
            frames, own = _gif(path)
        else:
            frames, own = _container(path)
    except (UnidentifiedImageError, EOFError, KeyError, RuntimeError, zipfile.BadZipFile, SyntaxError) as error:
        raise ValueError(f"{path} cannot be read as a video ({error}); it may be cut off, write it again") from error
    if frames.ndim != 4 or 0 in frames.shape:
        raise ValueError(f"{path} holds frames of shape {frames.shape}; a video is [T, H, W, 3] with T >= 1")
    rate = fps if fps is not None else own if own else DEFAULT_FPS
    if not rate > 0:
        raise ValueError(f"fps is {rate}; give frames per second, a positive number")
    return Video(frames, float(rate), path)


def _pictures(paths: Sequence[Path]) -> np.ndarray:
    frames = []
    for path in paths:
        with Image.open(path) as picture:
            frames.append(np.asarray(picture.convert("RGB")))
    sizes = {frame.shape for frame in frames}
    if len(sizes) != 1:
        raise ValueError(
            f"{paths[0].parent} holds pictures of the sizes {sorted(s[:2] for s in sizes)}; give one size"
        )
    return np.stack(frames)


def _array(path: Path) -> tuple[np.ndarray, float | None]:
    fps = None
    try:
        loaded: Any = np.load(path, allow_pickle=False)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read as an array ({error}); write it with numpy.save") from error
    if path.suffix.lower() == ".npz":
        with loaded:
            if "frames" not in loaded:
                raise ValueError(f"{path} holds {', '.join(loaded.files)}; store the video under the name frames")
            fps = float(loaded["fps"]) if "fps" in loaded else None
            loaded = loaded["frames"]
    return _as_uint8(loaded, str(path)), fps


def _as_uint8(frames: np.ndarray, where: str) -> np.ndarray:
    if frames.ndim != 4 or frames.shape[-1] != 3:
        raise ValueError(f"{where} holds an array of shape {frames.shape}; a video is [T, H, W, 3]")
    if frames.dtype == np.uint8:
        return frames
    if not np.issubdtype(frames.dtype, np.floating):
        raise ValueError(f"{where} holds {frames.dtype}; write uint8, or floats in 0..1")
    if not np.isfinite(frames).all() or frames.min() < -1e-3 or frames.max() > 1 + 1e-3:
        raise ValueError(f"{where} holds floats outside 0..1 or NaN; write uint8, or floats in 0..1")
    return np.rint(frames.astype(np.float32).clip(0, 1) * 255).astype(np.uint8)


def _gif(path: Path) -> tuple[np.ndarray, float | None]:
    frames, milliseconds = [], []
    with Image.open(path) as picture:
        for number in range(getattr(picture, "n_frames", 1)):
            picture.seek(number)
            frames.append(np.asarray(picture.convert("RGB")))
            milliseconds.append(float(picture.info.get("duration", 0) or 0))
    mean = sum(milliseconds) / len(milliseconds)
    return np.stack(frames), 1000 / mean if mean > 0 else None


def _container(path: Path) -> tuple[np.ndarray, float | None]:
    if not path.is_file():
        raise ValueError(f"{path} is no file")
    if path.suffix.lower() not in CONTAINERS:
        raise ValueError(f"{path} is no video that is read here; give mp4, gif, npy, npz or a folder of png")
    _need_ffmpeg(path)
    import imageio_ffmpeg

    reader = imageio_ffmpeg.read_frames(str(path), pix_fmt="rgb24")
    try:
        facts = next(reader)
        width, height = facts["size"]
        frames = [np.frombuffer(data, np.uint8).reshape(height, width, 3) for data in reader]
    except StopIteration as error:
        raise ValueError(f"{path} holds no video") from error
    except OSError as error:  # the reader's message is FFmpeg's whole log; its last line says what is wrong
        reason = str(error).strip().splitlines()[-1]
        raise ValueError(f"{path} cannot be read as a video ({reason})") from error
    finally:
        reader.close()
    if not frames:
        raise ValueError(f"{path} holds no frames that can be decoded")
    return np.stack(frames), float(facts.get("fps") or 0) or None


def write_frames(path: str | Path, frames: np.ndarray, fps: float) -> Path:
    """Writes frames without loss as compressed .npz; a file of the name is complete, whenever the process dies.

    Args:
        path: ends in .npz.
        frames: [T, H, W, 3] uint8.
        fps: stored beside them.

    Raises:
        ValueError: not such frames. OSError: the disk is full; no partial file stays.
    """
    path = Path(path)
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[-1] != 3 or 0 in frames.shape:
        raise ValueError(f"frames are {frames.dtype} {frames.shape}; give uint8 [T, H, W, 3]")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as file:
            np.savez_compressed(file, frames=frames, fps=np.float64(fps))
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return path


def encode_gif(frames: np.ndarray, fps: float) -> bytes:
    """An endless GIF with one palette per frame.

    Args:
        frames: [T, H, W, 3] uint8.
        fps: at most 50, browsers slow down faster ones.
    """
    pictures = [Image.fromarray(frame).quantize(128, dither=Image.Dither.NONE) for frame in frames]
    out = io.BytesIO()
    duration = max(20, round(1000 / fps))
    pictures[0].save(out, "GIF", save_all=True, append_images=pictures[1:], duration=duration, loop=0, disposal=1)
    return out.getvalue()


def encode_mp4(frames: np.ndarray, fps: float, path: str | Path) -> Path:
    """Writes H.264 that browsers play; an odd last row or column is repeated, since the format wants even sizes.

    Args:
        frames: [T, H, W, 3] uint8.
        fps: frames per second.
        path: ends in .mp4.

    Raises:
        ImportError: imageio-ffmpeg is missing; the message names the extra.
    """
    path = Path(path)
    _need_ffmpeg(path)
    import imageio_ffmpeg

    height, width = frames.shape[1:3]
    frames = np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    writer = imageio_ffmpeg.write_frames(
        str(path), (frames.shape[2], frames.shape[1]), fps=fps, codec="libx264", quality=None, macro_block_size=1,
        output_params=["-crf", "20", "-preset", "veryfast", "-movflags", "+faststart"], ffmpeg_log_level="error",
    )  # fmt: skip
    writer.send(None)
    try:
        for frame in frames:
            writer.send(np.ascontiguousarray(frame))
    finally:
        writer.close()
    return path
