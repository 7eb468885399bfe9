"""Videos of any length from a diffusers pipeline whose model was trained on short clips.

    pipe = LongVideoPipeline(base)                               # AnimateDiffPipeline or WanPipeline
    video = pipe("a red ball rolls left", num_frames=128, sampler="freenoise").frames[0]
    pipe("a red ball rolls left", num_frames=512, sampler="fifo", output_path="ball.mp4")

Videos of one call are made one after another, so that each depends on its prompt, seed and settings alone and memory
holds one. B videos, N frames, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from diffusers.utils import BaseOutput
from torch import Tensor

from .keywords import nearest, strict
from .noise_levels import NoiseLevels
from .prompt_bank import PromptBank
from .prompt_conditioning import install_prompt_bank
from .samplers import SAMPLERS, FrameText, Sampler, Step
from .seeds import row_seeds
from .versions import versions
from .video_denoiser import UNetMotionDenoiser, WanDenoiser, denoiser_for
from .video_frames import Frames
from .video_stream import VideoStream, call_back, check_output

if TYPE_CHECKING:
    import numpy as np
    import PIL.Image

__all__ = ["LongVideoOutput", "LongVideoPipeline"]


@dataclass
class LongVideoOutput(BaseOutput):
    """Videos, and how they came about.

    Args:
        frames: by `output_type`: "pil" a list of pictures per video, "np" [B, N, H, W, 3] float32 in [0, 1], "pt"
            [B, N, 3, H, W] float32 in [0, 1], "latent" [B, C, N, h, w]. None when `output_path` was given.
        paths: the files (or folders of PNG files), with `output_path`; those that a stopped call did not come to are
            not there yet.
        stats: JSON-ready dict: `sampler, num_frames, steps, model_calls, seconds {total, encode, denoise, decode,
            write}, settings, seeds, resumed` (step each video went on from), `interrupted, versions`.
    """

    frames: list[list[PIL.Image.Image]] | np.ndarray | Tensor | None = None
    paths: list[Path] | None = None
    stats: dict[str, Any] | None = None


class LongVideoPipeline:
    """Runs the model of a base pipeline with a long-video sampler.

    Args:
        base: `AnimateDiffPipeline` (with a `UNetMotionModel`) or `WanPipeline`; used as it is, with
            everything that is enabled on it (offloading, TiARA, IP-Adapter weights, ...).
        attention: the handle of `mediaspec.enable(base, attention=...)`, which is then told the denoising step.
            Without it TiARA works as well and counts timesteps, which is right for all samplers but "fifo".

    Raises:
        ValueError: a pipeline of another family.

    Example:
        >>> pipe = LongVideoPipeline(load_moving_emoji())  # doctest: +SKIP
        >>> pipe("a yellow taxi moves left", num_frames=64, seeds=0).frames[0][0].show()  # doctest: +SKIP
    """

    def __init__(self, base: Any, attention: Any = None) -> None:
        denoiser_for(base, 1.0)
        self.base, self.attention = base, attention
        self._interrupt = False

    @property
    def components(self) -> dict[str, Any]:
        """Those of the base pipeline."""
        return dict(self.base.components)

    @property
    def device(self) -> torch.device:
        return torch.device(self.base.device)

    def to(self, *args: Any, **kwargs: Any) -> LongVideoPipeline:
        """Moves the base pipeline."""
        self.base.to(*args, **kwargs)
        return self

    def set_progress_bar_config(self, **kwargs: Any) -> None:
        """As in diffusers."""
        self.base.set_progress_bar_config(**kwargs)

    @property
    def interrupt(self) -> bool:
        """Whether the running call was asked to stop; set `pipe._interrupt = True` from a callback."""
        return self._interrupt

    @strict
    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        num_frames: int = 64,
        sampler: str = "freenoise",
        *,
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int | None = None,
        guidance_scale: float = 7.5,
        negative_prompt: str | None = None,
        num_videos_per_prompt: int = 1,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        seeds: int | Sequence[int] | Tensor | None = None,
        sampler_settings: dict[str, Any] | None = None,
        timeline: Any = None,
        prompt_bank: FrameText | None = None,
        clip_skip: int | None = None,
        output_type: str = "pil",
        output_path: str | Path | Sequence[str | Path] | None = None,
        fps: float = 8,
        resume: bool = True,
        overwrite: bool = False,
        checkpoint_every: int = 1,
        decode_chunk_size: int = 8,
        callback_on_step_end: Callable[..., dict[str, Tensor] | None] | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",),
        return_dict: bool = True,
    ) -> LongVideoOutput | tuple[Any, ...]:
        """Makes one video per prompt (and per `num_videos_per_prompt`).

        Args:
            prompt: text or texts; may be left out with `timeline` or `prompt_bank`.
            num_frames: frames N of each video. Up to the model's window they are drawn together, as the base does.
            sampler: "freenoise", "fifo", "freelong", "outpaint" or "plain"; see `mediaspec.pipelines.samplers`.
            height, width: pixels; default the model's own.
            num_inference_steps: noise levels; 50, or four windows for "fifo", whose queue it is the length of. Levels
                and kind of prediction are those of the base's scheduler; steps are DDIM, or Euler for flow matching.
            guidance_scale: classifier-free guidance; 1 switches it off.
            negative_prompt: what to avoid, one for all videos.
            num_videos_per_prompt: videos per prompt, with seeds of their own.
            generator: draws the seeds; a list has one per video. seeds: the int64 seeds themselves, see `row_seeds`.
            sampler_settings: keyword settings of the sampler, e.g. {"window": 16, "stride": 4}.
            timeline: prompts by frames, [(text or fields, start, end), ...] or a YAML or JSON file; see `PromptBank`.
            prompt_bank: text per frame, a `PromptBank` or anything with its `embeddings`.
            clip_skip: layers of the text encoder to leave out, as in AnimateDiff.
            output_type: "pil", "np", "pt" or "latent".
            output_path: write frames there as they are finished and return paths instead of frames: a file in .mp4 or
                .gif, or a path without ending for a folder of PNG files; see `VideoWriter`.
            fps: of the file. resume: go on with an unfinished video that is there. overwrite: replace a finished one.
            checkpoint_every: steps between two saved states, with `output_path`.
            decode_chunk_size: frames per call of the VAE.
            callback_on_step_end: called as callback(pipe, step, timestep, {"latents": ...}) after every step; returned
                latents replace the sampler's working latents [C, n, h, w] (its queue, for "fifo").
            callback_on_step_end_tensor_inputs: out of "latents".
            return_dict: an object, or a tuple (frames or paths, stats).

        Returns:
            `LongVideoOutput`.

        Raises:
            ValueError: an argument that cannot be used, with what is allowed; latents that are no longer numbers, with
                frame and step; parts on disk that belong to other settings.
        """
        # 1. Check and complete the arguments
        if sampler not in SAMPLERS:
            raise ValueError(f"sampler={sampler!r} is unknown; {nearest(sampler, SAMPLERS)}")
        check_output(output_type, output_path, callback_on_step_end_tensor_inputs)
        for name, value in (
            ("num_frames", num_frames), ("checkpoint_every", checkpoint_every), ("height", height), ("width", width),
            ("decode_chunk_size", decode_chunk_size), ("num_videos_per_prompt", num_videos_per_prompt),
            ("num_inference_steps", num_inference_steps),
        ):  # fmt: skip
            optional = name in ("height", "width", "num_inference_steps")
            if (value is None and optional) or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
                continue
            raise ValueError(f"{name}={value!r}; write a whole number from 1 on")
        if not math.isfinite(guidance_scale):
            raise ValueError(f"guidance_scale={guidance_scale!r}; write a finite number, 1 switches guidance off")
        prompts = self._prompts(prompt, timeline, prompt_bank, num_videos_per_prompt)
        denoiser = denoiser_for(self.base, guidance_scale)
        default_height, default_width = denoiser.default_size()
        height = default_height if height is None else height
        width = default_width if width is None else width
        denoiser.check(height, width, prompts[0], negative_prompt, num_frames)
        chosen = {name: value for name, value in (sampler_settings or {}).items() if value is not None}
        SAMPLERS[sampler].check_settings(chosen)
        window = int(chosen.get("window", denoiser.window))
        kind = self._kind(sampler, num_frames, denoiser, window)
        steps = SAMPLERS[sampler].default_steps(window) if num_inference_steps is None else num_inference_steps
        levels = NoiseLevels.of(self.base.scheduler, steps)
        denoiser.attention, denoiser.num_steps = self.attention, steps
        if kind is not SAMPLERS[sampler]:
            chosen = {name: value for name, value in chosen.items() if name in kind.settings()}

        # 2. Seeds, texts over time, and what a resumed run must have in common with the one it continues
        row = row_seeds(len(prompts), generator, seeds)
        bank = prompt_bank
        if timeline is not None:
            bank = PromptBank.from_timeline(self.base, timeline, num_frames)
        settings = {
            "sampler": sampler, "num_frames": num_frames, "height": height, "width": width, "guidance_scale":
            guidance_scale, "num_inference_steps": steps, "negative_prompt": negative_prompt, "clip_skip": clip_skip,
            "sampler_settings": chosen, "model": denoiser.fingerprint(), "prompts_over_time": _described(bank),
            "scheduler": _scheduler_settings(self.base.scheduler),
        }  # fmt: skip
        size = denoiser.latent_frames(num_frames), denoiser.latent_shape(height, width)

        def sampler_for(seed: int) -> Sampler:
            return kind(denoiser, levels, *size, torch.Generator().manual_seed(seed), **chosen)

        sampler_for(row[0])  # settings that do not fit raise here, before the texts are encoded
        own = [{**settings, "prompt": text, "seed": seed} for text, seed in zip(prompts, row, strict=True)]
        stream = VideoStream(
            own, num_frames, output_type=output_type, output_path=output_path, fps=fps, resume=resume,
            overwrite=overwrite, checkpoint_every=checkpoint_every,
        )  # fmt: skip

        # 3. Make the videos one by one
        self._interrupt = False
        self.base._num_timesteps = steps
        made = 0
        for i in stream.missing(lambda: self._interrupt):
            with stream.timed("encode"):
                denoiser.read(prompts[i], negative_prompt, bank, clip_skip)
            run = sampler_for(row[i])
            with ExitStack() as stack:
                if self.attention is not None:
                    stack.callback(self.attention.set_step, None)  # a later run of the base pipeline counts itself
                stack.enter_context(run.installed())
                if isinstance(bank, PromptBank):
                    stack.enter_context(install_prompt_bank(self.base, bank, num_inference_steps=steps))
                film = stack.enter_context(stream.film(i, run, denoiser.decoder(decode_chunk_size)))
                bar = stack.enter_context(self.base.progress_bar(total=run.total))
                bar.update(run.index)
                first = run.index

                def look(step: Step, run: Sampler = run, film: Frames = film) -> None:
                    _check_numbers(run, step, film.count)
                    self._call_back(callback_on_step_end, callback_on_step_end_tensor_inputs, run, step)

                stream.roll(film, run, run.step, stopped=lambda: self._interrupt, bar=bar, on_step=look)
            made += run.index - first

        # 4. Hand over
        self.base.maybe_free_model_hooks()
        frames, paths = stream.close(), stream.paths
        stats = {
            "sampler": kind.name, "num_frames": num_frames, "steps": made, "model_calls": denoiser.calls,
            "seconds": stream.seconds, "settings": settings, "seeds": row, "resumed": stream.resumed,
            "interrupted": self._interrupt, "versions": versions(),
        }  # fmt: skip
        if not return_dict:
            return (frames if paths is None else paths, stats)
        return LongVideoOutput(frames=frames, paths=paths, stats=stats)

    @staticmethod
    def _prompts(prompt: Any, timeline: Any, bank: Any, count: int) -> list[str]:
        """One text per video; with texts over time, the text only names the video."""
        if timeline is not None and bank is not None:
            raise ValueError("timeline and prompt_bank were both given; a timeline becomes a bank, give one of them")
        if prompt is None and timeline is None and bank is None:
            raise ValueError("no prompt was given; write pipe('a red ball'), or timeline=[(text, start, end), ...]")
        if isinstance(prompt, str) or prompt is None:
            prompt = [prompt or ""]
        if not prompt or not all(isinstance(one, str) for one in prompt):
            raise ValueError(f"prompt={prompt!r}; write a text or a list of texts (prompts by frames: timeline=)")
        return [one for one in prompt for _ in range(count)]

    @staticmethod
    def _kind(sampler: str, num_frames: int, denoiser: UNetMotionDenoiser | WanDenoiser, window: int) -> type[Sampler]:
        """The sampler to run: a video within one window needs none of the long ones."""
        latent = denoiser.latent_frames(num_frames)
        if window > denoiser.longest:
            raise ValueError(f"window={window}; the model knows positions for {denoiser.longest} frames")
        if sampler == "plain" and latent > denoiser.longest:
            raise ValueError(
                f"num_frames={num_frames} at once; the model knows positions for {denoiser.longest} frames. Take "
                "sampler='freenoise', 'fifo', 'freelong' or 'outpaint'"
            )
        if sampler == "freelong" and not denoiser.has_temporal_attention:
            raise ValueError(
                "freelong mixes attentions along time, which this model has not (it attends over space and time at "
                "once); take sampler='freenoise', 'fifo' or 'outpaint'"
            )
        return SAMPLERS["plain"] if latent <= window else SAMPLERS[sampler]

    def _call_back(self, callback: Any, names: Sequence[str], run: Sampler, step: Step) -> None:
        latents = call_back(self, callback, names, step.index, step.timestep, run.latents)
        if latents is not run.latents:
            if run.done and step.frames is not None and step.frames.shape == latents.shape:
                step.frames = latents
            run.latents = latents


def _check_numbers(run: Sampler, step: Step, count: int) -> None:
    """Raises ValueError when latents are no longer finite, naming frame and step; `count` frames are out already."""
    for values, what, first in ((step.frames, "finished frame", count), (run.latents, "frame in work", 0)):
        if values is None or bool(torch.isfinite(values).all()):
            continue
        bad = (~torch.isfinite(values)).flatten(2).any(2).any(0).nonzero()[0].item()
        raise ValueError(
            f"latents of {what} {first + int(bad)} are not finite after step {step.index} of {run.total} "
            f"({run.name}); a model in float16 may overflow: take bfloat16 or float32, or a lower guidance_scale"
        )


def _scheduler_settings(scheduler: Any) -> dict[str, str]:
    """What decides the noise levels; private entries are left out, some change their order from process to process."""
    config = {name: str(value) for name, value in dict(scheduler.config).items() if not name.startswith("_")}
    return {"class": type(scheduler).__name__, **config}


def _described(bank: Any) -> Any:
    """What a resumed run must share about texts over time, JSON-ready."""
    if bank is None:
        return None
    if isinstance(bank, PromptBank):
        return bank.describe()
    return type(bank).__name__
