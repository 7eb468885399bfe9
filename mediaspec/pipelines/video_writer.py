"""Frames of a video go to disk as they are finished, and a killed run goes on where it stopped.

While a video is made, `<path>.parts/` holds its frames as PNG files, the sampler's state and the settings. When the
last frame is there, they become one file (or one folder of PNG files), which appears at once under its name, with its
settings beside it, and the parts go. Every file is written under another name first and then renamed, so a kill at any
moment leaves either the old one or the new one, and a resumed run makes the same bytes as an undisturbed one. A lock
in the parts, which the system releases when a process dies, keeps two processes from writing one video. Nothing is
written before `open`, so that a call whose inputs turn out wrong leaves no file behind.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import PIL.Image
import torch
from torch import Tensor

__all__ = ["VideoWriter", "video_paths"]

MOVIES = (".mp4", ".mov", ".mkv", ".webm")


def video_paths(path: str | os.PathLike[str] | list[Any], count: int) -> list[Path]:
    """One path per video: several videos with one path get numbers ("clip.mp4" to "clip-0000.mp4", ...).

    Raises:
        ValueError: a list of another length, or a path twice.
    """
    if isinstance(path, (list, tuple)):
        paths = [Path(one) for one in path]
        if len(paths) != count or len(set(paths)) != count:
            raise ValueError(
                f"output_path names {len(set(paths))} places for {count} videos; give {count}, or one path"
            )
        return paths
    one = Path(path)
    return [one] if count == 1 else [one.with_name(f"{one.stem}-{i:04d}{one.suffix}") for i in range(count)]


class VideoWriter:
    """Writes one video. Making the object only looks; the first call that needs them makes the parts (`open`).

    Args:
        path: ends in .mp4 (needs `imageio-ffmpeg`), .gif, or has no ending: a folder of PNG files. A GIF merges equal
            neighbouring frames into one that stays longer.
        settings: JSON-ready; whatever decides how the video looks. Parts made with others are refused.
        fps: frames per second of the finished file.
        resume: go on with parts that are there; False throws them away (not before `open`).
        overwrite: replace a finished video of other settings.

    Raises:
        ValueError: an unknown ending, no ffmpeg, a place that cannot be written, parts or a finished video with other
            settings.

    Example:
        >>> writer = VideoWriter("ball.gif", {"seed": 0})  # doctest: +SKIP
        >>> writer.write(frames)  # [n, 3, H, W] in [0, 1]  # doctest: +SKIP
        >>> writer.finish()  # doctest: +SKIP
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        settings: dict[str, Any],
        *,
        fps: float = 8,
        resume: bool = True,
        overwrite: bool = False,
    ) -> None:
        self.path, self.fps = Path(path), fps
        self.settings = json.loads(json.dumps({**settings, "fps": fps}))
        self._check_kind()
        if not fps > 0:
            raise ValueError(f"fps={fps}; it must be above 0")
        self.parts = self.path.with_name(self.path.name + ".parts")
        self.frames = self.parts / "frames"
        self.count = 0
        self._lock: IO[bytes] | None = None
        self._resume, self._opened = resume, False
        self._made: list[Path] = []
        self._drop_leftovers()
        self.complete = self._is_finished(resume, overwrite)
        if not self.complete:
            self._check_place()
            self._check_parts()

    def open(self) -> None:
        """Makes the parts, or takes up those that are there; from now on no other process writes the video.

        Raises:
            ValueError: another process is writing it, or has begun it with other settings meanwhile.
        """
        if self._opened or self.complete:
            return
        self._made = [one for one in (self.parts, *self.parts.parents) if not one.exists()]
        self.parts.mkdir(parents=True, exist_ok=True)
        if not self._take_lock():
            raise ValueError(f"another process is writing {self.path}; wait for it, or choose another output_path")
        self._opened = True
        try:
            self._check_parts()
        except ValueError:
            self._unlock()
            self._opened = False
            raise
        if not self._resume:
            (self.parts / "state.pt").unlink(missing_ok=True)
            if self.frames.exists():
                shutil.rmtree(self.frames)
        self.frames.mkdir(parents=True, exist_ok=True)
        _write_json(self.parts / "settings.json", self.settings)

    def withdraw(self) -> None:
        """Takes away what `open` made, folders on the way included, if no frame and no state came of it."""
        if not self._opened or self.complete or self._has_work():
            return
        shutil.rmtree(self.parts)
        self._unlock()
        self._opened = False
        for folder in self._made[1:]:
            with suppress(OSError):  # others may have put something there
                folder.rmdir()

    def state(self) -> dict[str, Any] | None:
        """What `save` was given last, with `count` set to its frames; None when nothing usable is there."""
        self.open()
        file = self.parts / "state.pt"
        if self.complete or not file.exists():
            return None
        try:
            stored = torch.load(file, map_location="cpu", weights_only=True)
            count, state = int(stored["count"]), stored["state"]
        except Exception as error:  # a damaged state costs time, not the video: the run is repeatable from its seed
            warnings.warn(f"{file} cannot be read ({error}); the video is made from the beginning", stacklevel=2)
            return None
        missing = [i for i in range(count) if not self._frame(i).exists()]
        if missing:
            warnings.warn(f"{self._frame(missing[0])} is missing; the video is made from the beginning", stacklevel=2)
            return None
        self.count = count
        return dict(state)

    def write(self, frames: Tensor) -> None:
        """Appends frames [n, 3, H, W] in [0, 1]."""
        self.open()
        pixels = (frames.detach().float().clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
        for picture in pixels:
            target = self._frame(self.count)
            unfinished = target.with_suffix(".tmp")
            PIL.Image.fromarray(picture).save(unfinished, format="PNG", compress_level=1)
            os.replace(unfinished, target)
            self.count += 1

    def save(self, state: dict[str, Any]) -> None:
        """Keeps `state` (tensors, numbers, texts) as belonging to the frames written so far."""
        self.open()
        file = self.parts / "state.pt"
        unfinished = file.with_suffix(".tmp")
        with open(unfinished, "wb") as stream:
            torch.save({"count": self.count, "state": state}, stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(unfinished, file)

    def finish(self) -> Path:
        """Makes the file of all frames and takes the parts away.

        Raises:
            ValueError: a frame that cannot be read; the rest stays as it is. OSError: the disk is full; the frames
                stay, and the same call makes the file when there is room.
        """
        if self.complete:
            return self.path
        self.open()
        for extra in self.frames.iterdir():  # left by a killed run that had come further than its saved state
            if extra.suffix != ".png" or not extra.stem.isdigit() or int(extra.stem) >= self.count:
                extra.unlink()
        made = self.frames if self._is_folder else self._encode()
        self._remove_old()
        _write_json(self._note if not self._is_folder else self.frames / "video.json", self.settings)
        os.replace(made, self.path)
        shutil.rmtree(self.parts)
        self._unlock()
        self.complete = True
        return self.path

    @property
    def _is_folder(self) -> bool:
        return self.path.suffix == ""

    @property
    def _note(self) -> Path:
        return self.path / "video.json" if self._is_folder else self.path.with_name(self.path.name + ".json")

    def _frame(self, index: int) -> Path:
        return self.frames / f"{index:06d}.png"

    def _check_kind(self) -> None:
        ending = self.path.suffix.lower()
        if ending in MOVIES:
            try:
                import imageio_ffmpeg

                imageio_ffmpeg.get_ffmpeg_exe()
            except (ImportError, RuntimeError) as error:
                raise ValueError(
                    f"{self.path.name} needs ffmpeg ({error}); pip install 'mediaspec[video]', or write to a .gif or "
                    "to a path without ending, which becomes a folder of PNG files"
                ) from error
        elif ending not in ("", ".gif"):
            raise ValueError(
                f"output_path ends in {ending!r}; allowed are {', '.join(MOVIES)}, .gif and no ending (PNG files)"
            )

    def _is_finished(self, resume: bool, overwrite: bool) -> bool:
        if not self.path.exists() or (self.path.is_dir() and not any(self.path.iterdir())):
            return False
        stored = _read_json(self._note)
        if stored is None and self.path.is_dir():  # never takes a folder away that is not a video of ours
            raise ValueError(f"{self.path} is a folder with other files; choose another output_path")
        if stored == self.settings and resume:
            return True
        if overwrite or (stored == self.settings and not resume):
            return False
        reason = "is there already" if stored is None else f"was made with {_difference(stored, self.settings)}"
        raise ValueError(f"{self.path} {reason}; choose another output_path, or write overwrite=True")

    def _check_place(self) -> None:
        """Raises ValueError where no file can be made."""
        place = next(one for one in self.path.absolute().parents if one.exists())
        if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
            reason = "there is no permission" if place.is_dir() else "it is a file"
            raise ValueError(f"cannot write to {place}: {reason}; choose another output_path")

    def _check_parts(self) -> None:
        """Raises ValueError where the parts hold work of other settings that may not be thrown away."""
        stored = _read_json(self.parts / "settings.json")
        if self._resume and stored != self.settings and self._has_work():
            made = "settings that cannot be read" if stored is None else _difference(stored, self.settings)
            raise ValueError(
                f"{self.parts} holds an unfinished video made with {made}; finish it with those settings, choose "
                "another output_path, or write resume=False to begin again"
            )

    def _drop_leftovers(self) -> None:
        """Removes parts of the finished video: a kill came between its last rename and the end of its parts."""
        done = _read_json(self._note)
        if done is None or not self.path.exists() or not self.parts.exists():
            return
        if _read_json(self.parts / "settings.json") in (done, None) and self._take_lock():
            shutil.rmtree(self.parts)
            self._unlock()

    def _take_lock(self) -> bool:
        """Whether no other process writes this video; within one process a later writer takes over."""
        if sys.platform == "win32":
            return True
        import fcntl

        self._lock = open(self.parts / "lock", "wb")  # noqa: SIM115 - held until the video is finished
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            self._unlock()
            return False
        except OSError:  # a file system without locks
            pass
        return True

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _has_work(self) -> bool:
        """Whether the parts hold anything that took time."""
        return (self.parts / "state.pt").exists() or (self.frames.exists() and any(self.frames.iterdir()))

    def _remove_old(self) -> None:
        if not self.path.is_dir():
            self._note.unlink(missing_ok=True)
            self.path.unlink(missing_ok=True)
        elif _read_json(self._note) is not None:
            shutil.rmtree(self.path)
        else:
            self.path.rmdir()  # an empty one; it raises OSError where somebody has put files there meanwhile

    def _pictures(self) -> Iterator[PIL.Image.Image]:
        for index in range(self.count):
            try:
                with PIL.Image.open(self._frame(index)) as picture:
                    yield picture.convert("RGB")
            except OSError as error:
                raise ValueError(
                    f"{self._frame(index)} cannot be read ({error}); write resume=False to make the video again"
                ) from error

    def _encode(self) -> Path:
        if not self.count:
            raise ValueError("no frame was written; there is nothing to make a video of")
        made = self.parts / f"video{self.path.suffix.lower()}"
        pictures = self._pictures()
        if made.suffix == ".gif":
            first = next(pictures)
            first.save(made, save_all=True, append_images=pictures, duration=round(1000 / self.fps), loop=0)
        else:
            import imageio.v2 as imageio
            import numpy as np

            movie: Any

            # no macro blocks: they would resize pictures; bit-exact flags leave dates and versions out of the file
            flags = ["-fflags", "+bitexact", "-flags:v", "+bitexact", "-crf", "18", "-threads", "1"]
            with imageio.get_writer(made, fps=self.fps, macro_block_size=1, output_params=flags) as movie:
                for picture in pictures:
                    odd = ((0, picture.height % 2), (0, picture.width % 2), (0, 0))  # the codec wants even sizes
                    movie.append_data(np.pad(np.asarray(picture), odd, mode="edge"))
            _check_movie(made, self.count)
        return made


def _check_movie(path: Path, count: int) -> None:
    """Raises OSError unless all frames can be read: ffmpeg's end is not looked at when it stops early."""
    import imageio_ffmpeg

    try:
        found = imageio_ffmpeg.count_frames_and_secs(path)[0]
    except RuntimeError as error:
        raise OSError(f"{path} is damaged ({str(error).splitlines()[-1]}); the disk may be full") from error
    if found < count:
        raise OSError(f"{path} holds {found} of {count} frames; the disk may be full")


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return None


def _write_json(path: Path, content: dict[str, Any]) -> None:
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(json.dumps(content, indent=1, sort_keys=True))
    os.replace(unfinished, path)


def _difference(stored: dict[str, Any], asked: dict[str, Any]) -> str:
    """The settings in which two runs differ, for an error."""
    names = sorted(name for name in stored.keys() | asked.keys() if stored.get(name) != asked.get(name))
    return ", ".join(f"{name}={stored.get(name)!r} (asked: {asked.get(name)!r})" for name in names)
