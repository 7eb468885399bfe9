"""FreeNoise: shuffled noise, attention along time over fused windows (arXiv:2310.15169).

The noise of the first U frames is reused in blocks of S frames, each block in a new order. Attention along time runs
on windows of U frames every S frames; their outputs merge with pyramid weights, right after each attention, as in the
authors' code (diffusers merges after both attentions of a block). When the last window does not fall on the grid it is
aligned to the end and feeds only the frames that no other window reaches; every frame's weights are divided by their
own sum. All frames pass the model together, so memory grows with N; `fuse="prediction"` runs the whole model per
window and merges its outputs instead, which needs the memory of one window and U/S times the work, and also works for
models that attend over space and time at once.
N frames, U = window, S = stride, C channels.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from ..frame_chunks import chunked_frames
from .plain import Plain
from .temporal import TemporalSite, hooked

__all__ = ["FreeNoise", "blend_weights", "frame_windows", "pyramid", "shuffled_blocks"]


def frame_windows(num_frames: int, window: int = 16, stride: int = 4) -> list[tuple[int, int]]:
    """Windows [start, end) every `stride` frames; a last one aligned to the end when the grid leaves frames over.

    Example:
        >>> frame_windows(26)
        [(0, 16), (4, 20), (8, 24), (10, 26)]
    """
    if num_frames <= window:
        return [(0, num_frames)]
    windows = [(start, start + window) for start in range(0, num_frames - window + 1, stride)]
    if windows[-1][1] != num_frames:
        windows.append((num_frames - window, num_frames))
    return windows


def pyramid(window: int) -> list[int]:
    """Weights 1, 2, ... up to the middle of a window and down again."""
    return [min(i + 1, window - i) for i in range(window)]


def blend_weights(num_frames: int, window: int = 16, stride: int = 4) -> Tensor:
    """How much each window says about each frame.

    Returns:
        [windows, N] float64; the column of every frame sums to 1. A last window off the grid has weight only on the
        frames that the windows of the grid do not reach.
    """
    windows = frame_windows(num_frames, window, stride)
    weights = torch.zeros(len(windows), num_frames, dtype=torch.float64)
    reached = 0
    for row, (start, end) in enumerate(windows):
        shape = torch.tensor(pyramid(end - start), dtype=torch.float64)
        first = reached if (start % stride) else start
        weights[row, first:end] = shape[first - start :]
        reached = end
    return weights / weights.sum(0)


def shuffled_blocks(num_frames: int, window: int, stride: int, generator: torch.Generator) -> Tensor:
    """[N] which of the first `window` noise frames each frame takes.

    Frames p .. p+S-1 (p = U, U+S, ...) take those of p-U .. p-U+S-1 in a random order.
    """
    source = list(range(min(window, num_frames)))
    for start in range(window, num_frames, stride):
        block = source[start - window : start - window + stride]
        order = torch.randperm(len(block), generator=generator).tolist()
        source += [block[i] for i in order]
    return torch.tensor(source[:num_frames])


class FreeNoise(Plain):
    """FreeNoise with a sound tail at any number of frames.

    Args:
        stride: frames S between windows, at most the window.
        fuse: "attention" merges after each attention along time; "prediction" merges model outputs.
        implementation: "ours", or "diffusers" to run on `enable_free_noise()` of the pipeline (called before, so that
            processors set afterwards stay); the video is then drawn up to the next frame of the window grid and cut,
            because the last window of diffusers 0.42 scales a ragged tail wrongly (to a half, for 26 frames).
        frame_chunk: frames per call of the layers over space (`fuse="attention"`), which bounds their work space.

    Raises:
        ValueError: eta above 0 (fresh noise would undo the shared noise), or settings that do not fit.

    Example:
        >>> pipe("a red ball", num_frames=64, sampler="freenoise")  # doctest: +SKIP
    """

    name = "freenoise"

    def __init__(
        self,
        *args: Any,
        stride: int = 4,
        fuse: str = "auto",
        implementation: str = "ours",
        frame_chunk: int = 32,
        **settings: Any,
    ) -> None:
        self.stride, self.frame_chunk, self.implementation = stride, frame_chunk, implementation
        self.fuse = fuse
        denoiser = args[0] if args else settings["denoiser"]
        if fuse == "auto":
            self.fuse = "attention" if getattr(denoiser, "has_temporal_attention", True) else "prediction"
        elif fuse not in ("attention", "prediction"):
            raise ValueError(f"fuse={fuse!r}; allowed are 'attention', 'prediction' and 'auto'")
        if implementation not in ("ours", "diffusers"):
            raise ValueError(f"implementation={implementation!r}; allowed are 'ours' and 'diffusers'")
        if settings.get("eta", 0.0):
            raise ValueError(f"eta={settings['eta']}; FreeNoise needs eta=0, fresh noise would undo the shared noise")
        if frame_chunk < 1:
            raise ValueError(f"frame_chunk={frame_chunk}; at least 1 frame is needed")
        super().__init__(*args, **settings)

    def start(self) -> Tensor:
        if not 1 <= self.stride <= self.window:
            raise ValueError(f"stride={self.stride}; allowed is 1 to the window, {self.window}")
        if self.implementation == "diffusers":
            self._check_diffusers()
        first = self.noise(min(self.window, self.num_frames))
        source = shuffled_blocks(self._drawn, self.window, self.stride, self.generator)
        return first[:, source.to(first.device)]

    @property
    def _drawn(self) -> int:
        """Frames that are sampled: N, or up to the grid for diffusers' windows."""
        if self.implementation == "ours" or self.num_frames <= self.window:
            return self.num_frames
        return self.num_frames + (self.window - self.num_frames) % self.stride

    @contextmanager
    def installed(self) -> Any:
        with ExitStack() as stack:
            if self.implementation == "ours" and self.fuse == "attention" and self.num_frames > self.window:
                stack.enter_context(self._windowed())
                stack.enter_context(chunked_frames(self.denoiser.model, self.frame_chunk))
            yield

    def _windowed(self) -> AbstractContextManager[Any]:
        windows = frame_windows(self.num_frames, self.window, self.stride)
        weights = blend_weights(self.num_frames, self.window, self.stride)

        def run(_site: TemporalSite, attend: Any, hidden: Tensor) -> Tensor:
            fused = torch.zeros_like(hidden, dtype=torch.promote_types(hidden.dtype, torch.float32))
            table = weights.to(fused.device, fused.dtype)
            for row, (start, end) in enumerate(windows):
                fused[:, start:end] += attend(hidden[:, start:end]) * table[row, start:end, None]
            return fused.to(hidden.dtype)

        return hooked(self.denoiser.model, run)

    def predict(self, latents: Tensor, time: Tensor, fraction: float) -> Tensor:
        if self.fuse == "attention" or self.num_frames <= self.window:
            return super().predict(latents, time, fraction)
        fused = torch.zeros_like(latents)
        weights = blend_weights(self.num_frames, self.window, self.stride).to(latents)
        for row, (start, end) in enumerate(frame_windows(self.num_frames, self.window, self.stride)):
            output = self.denoiser(latents[:, start:end], time, torch.arange(start, end), fraction)
            fused[:, start:end] += output * weights[row, start:end, None, None]
        return fused

    def step(self) -> Any:
        made = super().step()
        if made.frames is not None:
            made.frames = made.frames[:, : self.num_frames]
        return made

    def _check_diffusers(self) -> None:
        base = getattr(self.denoiser, "base", None)
        if base is None or not getattr(base, "free_noise_enabled", False):
            raise ValueError(
                "implementation='diffusers' runs on diffusers' own blocks; call "
                f"base.enable_free_noise(context_length={self.window}, context_stride={self.stride}) first and set "
                "attention processors after it"
            )
        given = (base._free_noise_context_length, base._free_noise_context_stride)
        if given != (self.window, self.stride):
            raise ValueError(
                f"the pipeline's FreeNoise has window {given[0]} and stride {given[1]}, the call {self.window} and "
                f"{self.stride}; write sampler_settings={{'window': {given[0]}, 'stride': {given[1]}}}"
            )
        if self.fuse == "prediction" or self.num_frames < self.window:
            raise ValueError(
                "implementation='diffusers' merges inside the blocks and needs at least one full window of "
                f"{self.window} frames; {self.num_frames} were asked for, with fuse={self.fuse!r}"
            )
