"""Finished latents become pictures at once and go to disk or into memory."""

from __future__ import annotations

import time
from typing import Any, Protocol

import numpy as np
import PIL.Image
import torch
from torch import Tensor

from .samplers import Step
from .video_writer import VideoWriter

__all__ = ["Frames", "Run"]


class Run(Protocol):
    """What makes one video step by step, as its frames need to know it: a `Sampler`, a `ContinuationRun`."""

    index: int
    """Steps that were made."""

    @property
    def done(self) -> bool:
        """Whether the video is whole."""

    def state(self) -> dict[str, Any]:
        """Tensors and numbers from which `load` goes on exactly."""

    def load(self, state: dict[str, Any]) -> None:
        """Goes on from a `state()`."""


class Frames:
    """Where the frames of one video go.

    Args:
        decoder: latents [C, n, h, w] to pictures, see `FrameDecoder`; None for latents.
        num_frames: pictures to keep; more are cut (latents of a Wan model stand for 4 each).
        output_type: "pil", "np", "pt" or "latent".
        writer: takes the pictures; without one they stay in memory.
        seconds: clock of the call, whose "decode" and "write" grow.
    """

    def __init__(
        self, decoder: Any, num_frames: int, output_type: str, writer: VideoWriter | None, seconds: dict[str, float]
    ) -> None:
        self.decoder, self.num_frames, self.output_type = decoder, num_frames, output_type
        self.writer, self.seconds = writer, seconds
        self.count = 0
        self.kept: list[Tensor] = []

    def add(self, step: Step) -> None:
        """Decodes what a step finished, a few frames at a time."""
        if step.frames is None:
            return
        if self.output_type == "latent":
            self.kept.append(step.frames)
            return
        pictures = iter(self.decoder(step.frames))
        while True:
            begun = time.perf_counter()
            some = next(pictures, None)
            self.seconds["decode"] += time.perf_counter() - begun
            if some is None:
                return
            some = some[: self.num_frames - self.count]
            self.count += len(some)
            begun = time.perf_counter()
            if self.writer is not None:
                self.writer.write(some)
            else:
                self.kept.append(_bytes(some) if self.output_type == "pil" else some.float().cpu())
            self.seconds["write"] += time.perf_counter() - begun

    def keep(self, run: Run) -> None:
        """Saves the state of what makes the video, and the decoder's, beside the frames."""
        if self.writer is not None:
            begun = time.perf_counter()
            self.writer.save({"sampler": run.state(), "decoder": self.decoder.state()})
            self.seconds["write"] += time.perf_counter() - begun

    def restore(self, run: Run) -> int | None:
        """Takes `run` up where an earlier call left it; returns the steps it had made, or None."""
        state = None if self.writer is None else self.writer.state()
        if state is None or self.writer is None:
            return None
        run.load(state["sampler"])
        self.decoder.load(state["decoder"])
        self.count = self.writer.count
        return run.index

    def finish(self) -> None:
        """Closes the video's file."""
        if self.writer is not None:
            begun = time.perf_counter()
            self.writer.finish()
            self.seconds["write"] += time.perf_counter() - begun

    @staticmethod
    def joined(videos: list[Frames], output_type: str) -> Any:
        """The frames of several videos as the output has them; interrupted videos may be shorter, then as a list."""
        if output_type == "pil":
            return [[PIL.Image.fromarray(one) for part in video.kept for one in part.numpy()] for video in videos]
        axis = 1 if output_type == "latent" else 0
        whole = [torch.cat(video.kept, axis) if video.kept else torch.empty(0) for video in videos]
        if output_type == "np":
            whole = [video.permute(0, 2, 3, 1) if video.ndim == 4 else video for video in whole]
        if not whole or len({video.shape for video in whole}) > 1:
            return [video.numpy() for video in whole] if output_type == "np" else whole
        stacked = torch.stack(whole)
        return np.asarray(stacked) if output_type == "np" else stacked


def _bytes(pictures: Tensor) -> Tensor:
    """[n, 3, H, W] in [0, 1] to [n, H, W, 3] uint8 on the CPU."""
    return (pictures.float().clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu()
