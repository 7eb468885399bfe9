"""The videos of one call, one after another: frames go out as they are finished, a broken-off video is taken up.

    stream = VideoStream(settings, num_frames, output_type="pil", output_path="clip.mp4")
    for i in stream.missing(stopped):
        with stream.film(i, run, decoder) as film:
            stream.roll(film, run, run.step, stopped=stopped, bar=bar)
    frames = stream.close()

Nothing is on disk before the first `film`, when all inputs are checked; where making a video fails before it has a
frame or a state, its parts go again. What a killed process leaves behind, `VideoWriter` says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from .keywords import nearest
from .samplers import Step
from .video_frames import Frames, Run
from .video_writer import VideoWriter, video_paths

__all__ = ["Interrupted", "VideoStream", "call_back", "check_output"]

OUTPUT_TYPES = ("pil", "np", "pt", "latent")


class Interrupted(Exception):
    """A callback asked to stop; the step that was on its way is dropped and made again later."""


def check_output(output_type: str, output_path: Any, callback_inputs: Sequence[str]) -> None:
    """Raises ValueError for arguments that every video pipeline takes and that say nothing of the model."""
    if output_type not in OUTPUT_TYPES:
        raise ValueError(f"output_type={output_type!r}; {nearest(output_type, OUTPUT_TYPES)}")
    if output_path is not None and output_type == "latent":
        raise ValueError("output_type='latent' returns latents and writes no pictures; leave output_path out")
    unknown = set(callback_inputs) - {"latents"}
    if unknown:
        raise ValueError(f"callback_on_step_end_tensor_inputs has {sorted(unknown)}; allowed is 'latents'")


def call_back(pipe: Any, callback: Any, names: Sequence[str], step: int, time: Any, latents: Tensor) -> Tensor:
    """Asks `callback_on_step_end`.

    Args:
        pipe: that runs; callback: of the user, or None; names: its `callback_on_step_end_tensor_inputs`.
        step: number of the step; time: what the model was given, timesteps or levels.
        latents: in work.

    Returns:
        The latents to go on with: those given, or what the callback returned in their place.

    Raises:
        TypeError: it returned something else than a dict. ValueError: latents of another shape.
    """
    returned = None if callback is None else callback(pipe, step, time, {name: latents for name in names})
    if returned is not None and not isinstance(returned, dict):
        raise TypeError(f"the callback returned {returned!r}; return a dict of the tensors it was given, or None")
    new: Tensor = (returned or {}).get("latents", latents)
    if new.shape != latents.shape:
        raise ValueError(f"the callback returned latents {tuple(new.shape)}; return {tuple(latents.shape)}")
    return new


class VideoStream:
    """Where the videos of a call go.

    Args:
        settings: one per video, JSON-ready: whatever decides how it looks; see `VideoWriter`.
        num_frames: pictures of each.
        output_type: "pil", "np", "pt" or "latent".
        output_path: a path, or one per video; None keeps the frames in memory.
        fps, resume, overwrite: of `VideoWriter`.
        checkpoint_every: steps between two saved states.

    Attributes:
        paths: of the videos, None without output_path.
        seconds: clock of the call: "total", "encode", "denoise", "decode", "write".
        resumed: by video the step it was taken up at; None for those made from the beginning, or not at all.

    Raises:
        ValueError: a path that cannot be written, or parts and videos of other settings there. Nothing is written yet.
    """

    def __init__(
        self,
        settings: Sequence[dict[str, Any]],
        num_frames: int,
        *,
        output_type: str,
        output_path: str | Path | Sequence[str | Path] | None = None,
        fps: float = 8,
        resume: bool = True,
        overwrite: bool = False,
        checkpoint_every: int = 1,
    ) -> None:
        self.num_frames, self.output_type, self.checkpoint_every = num_frames, output_type, checkpoint_every
        self.seconds = {"total": time.perf_counter(), "encode": 0.0, "denoise": 0.0, "decode": 0.0, "write": 0.0}
        count = len(settings)
        self.paths = None if output_path is None else video_paths(output_path, count)  # type: ignore[arg-type]
        self.writers: list[VideoWriter | None] = [None] * count
        for i, path in enumerate(self.paths or []):
            self.writers[i] = VideoWriter(path, settings[i], fps=fps, resume=resume, overwrite=overwrite)
        self.resumed: list[int | None] = [None] * count
        self._kept: list[Frames] = []

    def missing(self, stopped: Callable[[], bool]) -> Iterator[int]:
        """Numbers of the videos that are not there, until the call is `stopped`."""
        for i, writer in enumerate(self.writers):
            if not stopped() and (writer is None or not writer.complete):
                yield i

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Counts the time as seconds[what]."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[what] += time.perf_counter() - begun

    @contextmanager
    def film(self, i: int, run: Run, decoder: Any) -> Iterator[Frames]:
        """The frames of video `i` while it is made.

        From the first one on all unfinished videos of the call are locked, so that no second process begins one.

        Args:
            run: what makes it, as it begins; it is taken to where an earlier call left the video.
            decoder: see `Frames`; None for latents.

        Raises:
            ValueError: another process is writing one of the videos.
        """
        film = Frames(decoder, self.num_frames, self.output_type, self.writers[i], self.seconds)
        unfinished = [one for one in self.writers if one is not None and not one.complete]
        try:
            for one in unfinished:
                one.open()
            self.resumed[i] = film.restore(run)
            yield film
        except BaseException:
            for one in reversed(unfinished):
                one.withdraw()
            raise
        if self.paths is None:
            self._kept.append(film)

    def roll(
        self,
        film: Frames,
        run: Run,
        step: Callable[[], Step],
        *,
        stopped: Callable[[], bool],
        bar: Any,
        on_step: Callable[[Step], None] | None = None,
    ) -> None:
        """Makes steps until the video is done, which finishes its file, or the call is `stopped`.

        Args:
            film: of this video; run: what makes it.
            step: makes the next step; it may raise `Interrupted`.
            bar: of tqdm.
            on_step: called with every step before its frames go out.
        """
        saved = True
        while not run.done and not stopped():
            try:
                with self.timed("denoise"):
                    made = step()
            except Interrupted:
                break
            if on_step is not None:
                on_step(made)
            film.add(made)
            saved = run.done or run.index % self.checkpoint_every == 0
            if saved:
                film.keep(run)
            bar.update()
        if not saved:
            film.keep(run)
        if run.done:
            film.finish()

    def close(self) -> Any:
        """Stops the clock; the frames of all videos, None where they are on disk."""
        for one in reversed(self.writers):
            if one is not None:  # of a call that was stopped before it came to this video
                one.withdraw()
        self.seconds["total"] = time.perf_counter() - self.seconds["total"]
        return None if self.paths is not None else Frames.joined(self._kept, self.output_type)
