"""Makes the videos of a comparison: one loaded model, a long sampler, an attention setting put on and taken off.

    settings = MakerSettings(model="moving-emoji", num_frames=128, num_inference_steps=16)
    maker = VideoMaker(settings, mediaspec.enable)
    frames, facts = maker.make(job)

The attention is put on for one video and taken off behind it, so that jobs may come in any order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from .video_plan import Job

__all__ = ["MakerSettings", "VideoMaker", "as_frames", "plain_values"]


@dataclass(frozen=True)
class MakerSettings:
    """What the videos depend on besides prompt, seed, sampler and attention.

    Args:
        model: "moving-emoji", or a folder or repository of a diffusers video pipeline.
        num_frames: per video.
        num_inference_steps: per video; None: the sampler's own.
        sampler_steps: other numbers of steps for some samplers, by name; FIFO's is the length of its queue.
        guidance_scale: None: the pipeline's own.
        negative_prompt: of all videos.
        height, width: None: the model's own.
        dtype: "float32", "bfloat16" or "float16".
        device: "cpu", "cuda", ...
        sampler_settings: keywords of each sampler, by its name.
    """

    model: str = "moving-emoji"
    num_frames: int = 128
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    negative_prompt: str | None = None
    height: int | None = None
    width: int | None = None
    dtype: str = "float32"
    device: str = "cpu"
    sampler_steps: Mapping[str, int] = field(default_factory=dict)
    sampler_settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.num_frames < 2 or (self.num_inference_steps is not None and self.num_inference_steps < 1):
            raise ValueError(
                f"num_frames is {self.num_frames} and num_inference_steps {self.num_inference_steps}; give at least 2 "
                "frames and 1 step"
            )

    def record(self) -> dict[str, Any]:
        """For run.json: everything that a video depends on; not the device."""
        found = asdict(self)
        found.pop("device")
        return found


class VideoMaker:
    """A base pipeline inside a long-video pipeline.

    Args:
        settings: see `MakerSettings`.
        enable: `mediaspec.enable`, which puts an attention setting on a pipeline and gives a handle.
        pipe: a base pipeline that is loaded already; None loads `settings.model`.
    """

    def __init__(self, settings: MakerSettings, enable: Callable[..., Any], pipe: Any = None) -> None:
        self.settings, self.enable = settings, enable
        self.base = load_base(settings) if pipe is None else pipe
        self.base.set_progress_bar_config(disable=True)

    def make(self, job: Job) -> tuple[np.ndarray, dict[str, Any]]:
        """One video.

        Returns:
            (frames uint8 [T, H, W, 3]; "seconds", and "attention_summary" of the attention setting or None).
        """
        from ..pipelines.long_video import LongVideoPipeline

        one = self.settings
        keywords: dict[str, Any] = {
            "num_frames": one.num_frames,
            "sampler": job.sampler,
            "num_inference_steps": one.sampler_steps.get(job.sampler, one.num_inference_steps),
            "guidance_scale": one.guidance_scale,
            "negative_prompt": one.negative_prompt,
            "height": one.height,
            "width": one.width,
            "sampler_settings": dict(one.sampler_settings.get(job.sampler, {})) or None,
            "seeds": job.seed,
            "output_type": "np",
        }
        keywords = {key: value for key, value in keywords.items() if value is not None}
        if job.timeline is not None:
            from ..pipelines.prompt_bank import PromptBank

            keywords["prompt_bank"] = PromptBank.from_timeline(
                self.base, job.timeline, one.num_frames, blend=job.blend or "promptblend"
            )
        else:
            keywords["prompt"] = job.prompt
        start = time.perf_counter()
        with self._attention(job) as handle:
            # the pipeline tells the handle the step, which a FIFO queue's mixed timesteps do not
            output = LongVideoPipeline(self.base, attention=handle)(**keywords)
            summary = None if handle is None else plain_values(handle.summary())
        return as_frames(output), {"seconds": round(time.perf_counter() - start, 3), "attention_summary": summary}

    def _attention(self, job: Job) -> Any:
        """The model under the job's attention; the handle's exit takes it off."""
        if job.attention.plain:
            return nullcontext(None)
        # a queue runs from clean to noisy; its ends must not be taken for neighbours
        boundary = "reflect" if job.sampler == "fifo" else None
        return self.enable(self.base, attention=job.attention.build(boundary))


def load_base(settings: MakerSettings) -> Any:
    """The base pipeline that a name stands for.

    Raises:
        ValueError: a device that is not there.
    """
    from diffusers import DiffusionPipeline

    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if settings.dtype not in dtypes:
        raise ValueError(f"dtype is {settings.dtype!r}; write one of {', '.join(dtypes)}")
    dtype = dtypes[settings.dtype]
    if settings.model == "moving-emoji":
        from ..pipelines.video_models import load_moving_emoji

        return load_moving_emoji(dtype=dtype, device=settings.device)
    return DiffusionPipeline.from_pretrained(settings.model, dtype=dtype).to(settings.device)


def as_frames(output: Any) -> np.ndarray:
    """The single video of a pipeline's output as uint8 [T, H, W, 3].

    Args:
        output: with `frames`: [1, T, H, W, 3] or [T, H, W, 3] floats in 0..1 or uint8, or lists of pictures.

    Raises:
        ValueError: more than one video, or values outside 0..1 or NaN.
    """
    frames: Any = output.frames if hasattr(output, "frames") else output
    if isinstance(frames, torch.Tensor):
        frames = frames.cpu().float().numpy()
    if not isinstance(frames, np.ndarray):
        if len(frames) == 1 and not hasattr(frames[0], "size"):
            frames = frames[0]
        frames = np.stack([np.asarray(one) for one in frames])
    if frames.ndim == 5:
        if len(frames) != 1:
            raise ValueError(f"the pipeline gave {len(frames)} videos where one was asked for")
        frames = frames[0]
    if frames.ndim != 4 or frames.shape[-1] != 3:
        raise ValueError(f"the pipeline gave frames of shape {frames.shape}; a video is [T, H, W, 3]")
    if frames.dtype == np.uint8:
        return frames
    if not np.isfinite(frames).all():
        bad = int((~np.isfinite(frames)).any((1, 2, 3)).sum())
        raise ValueError(f"{bad} of {len(frames)} frames hold NaN or infinity; try dtype float32")
    return np.rint(frames.clip(0, 1) * 255).astype(np.uint8)


def plain_values(value: Any) -> Any:
    """A summary as JSON can hold it; NaN and infinity become None."""
    if isinstance(value, Mapping):
        return {str(key): plain_values(one) for key, one in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain_values(one) for one in value]
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return plain_values(value.tolist()) if hasattr(value, "tolist") else str(value)
