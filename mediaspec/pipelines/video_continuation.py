"""Videos that go on for as long as one likes, with a memory of what left the window.

    pipe = VideoContinuationPipeline.from_pretrained("panoroom/pack_k2")
    out = pipe(video=seen, actions=actions, poses=poses, num_frames=2000, memory=dict(keep=256), output_path="walk")

    pipe = VideoContinuationPipeline(WanPipeline.from_pretrained(...))
    out = pipe("a red ball rolls", num_frames=161, schedule=dict(name="outpainting", delta=6, last=3),
               memory=dict(name="sink_window", sink=1, last=3))

Videos of one call are made one after another, so that each depends on its prompt, seed and settings alone and memory
holds one. B videos, N pictures, L latent frames, C channels, h x w latent cells.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..memory.frame_noise import FrameNoise
from .carriers import carrier_class, carrier_for
from .carriers.base import Carrier
from .continuation_inputs import (
    AUTO,
    check_count,
    describe_carrier,
    describe_memory,
    describe_schedule,
    digest,
    fingerprint,
    make_guard,
    pick_sampler,
    texts_of,
)
from .continuation_loading import load_base
from .continuation_output import VideoContinuationOutput
from .continuation_plan import check_window, expected_cost, make_plan
from .continuation_run import ContinuationRun, CountedDecoder, MemoryAccount
from .continuation_start import read_start
from .keywords import strict
from .samplers import Step
from .seeds import row_seeds
from .versions import versions
from .video_history import VideoHistory
from .video_stream import Interrupted, VideoStream, call_back, check_output

__all__ = ["VideoContinuationOutput", "VideoContinuationPipeline"]


class VideoContinuationPipeline:
    """Rolls a video network out, chunk by chunk or through a window of rising noise, with a memory.

    Args:
        base: a diffusers pipeline (or bare transformer) of a family in `mediaspec.pipelines.carriers`, or a
            `FrameWorld` or `FrameDiT`; used as it is.
        carrier: name of the family; None finds it.
        carrier_settings: keyword settings of that carrier.

    Raises:
        ValueError: a network of another family.

    Example:
        >>> pipe = VideoContinuationPipeline.from_pretrained("panoroom/pack_k2")  # doctest: +SKIP
        >>> out = pipe(video=seen, actions=actions, poses=poses, num_frames=64, seeds=0)  # doctest: +SKIP
        >>> out.frames[0][0].show()  # doctest: +SKIP
    """

    def __init__(self, base: Any, carrier: str | None = None, **carrier_settings: Any) -> None:
        self.base = base
        self.carrier: Carrier = carrier_for(base, carrier, **carrier_settings)
        self._interrupt = False
        self._bar: dict[str, Any] = {}

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | os.PathLike[str],
        *,
        torch_dtype: torch.dtype | None = None,
        carrier: str | None = None,
        carrier_settings: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> VideoContinuationPipeline:
        """Loads a pipeline.

        Args:
            pretrained_model_name_or_path: an embedded frame world ("panoroom/pack_k2"), the folder of one, or folder
                or repository of a diffusers pipeline of a family in `mediaspec.pipelines.carriers`.
            torch_dtype: of the networks; None is float32. `dtype` is the same.
            carrier, carrier_settings: see the class.
            kwargs: of diffusers' `from_pretrained`.

        Raises:
            ValueError: nothing there, or a pipeline of another family. TypeError: an unknown keyword.
        """
        base = load_base(pretrained_model_name_or_path, torch_dtype, carrier_class, kwargs)
        return cls(base, carrier, **(carrier_settings or {}))

    def save_pretrained(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
        """Writes the base; `from_pretrained` reads it back (carrier settings are given again)."""
        if not hasattr(self.base, "save_pretrained"):
            raise ValueError(f"{type(self.base).__name__} cannot be saved; save its parts")
        self.base.save_pretrained(save_directory, **kwargs)

    @property
    def components(self) -> dict[str, Any]:
        """Those of the base."""
        return dict(getattr(self.base, "components", {"transformer": self.base}))

    @property
    def device(self) -> torch.device:
        return self.carrier.device

    def to(self, *args: Any, **kwargs: Any) -> VideoContinuationPipeline:
        """Moves the base."""
        self.base.to(*args, **kwargs)
        return self

    def enable_model_cpu_offload(self, *args: Any, **kwargs: Any) -> None:
        """As in diffusers: networks visit the accelerator one by one.

        Raises:
            ValueError: the base is no diffusers pipeline; it is small, move it with `to`.
        """
        self._diffusers("enable_model_cpu_offload")(*args, **kwargs)

    def enable_sequential_cpu_offload(self, *args: Any, **kwargs: Any) -> None:
        """As in diffusers: layers visit the accelerator one by one."""
        self._diffusers("enable_sequential_cpu_offload")(*args, **kwargs)

    def _diffusers(self, name: str) -> Any:
        found = getattr(self.base, name, None)
        if found is None:
            raise ValueError(f"{type(self.base).__name__} has no {name}; move it with to('cuda')")
        return found

    def set_progress_bar_config(self, **kwargs: Any) -> None:
        """As in diffusers: settings of tqdm, as disable=True."""
        self._bar = kwargs

    @property
    def interrupt(self) -> bool:
        """Whether the running call was asked to stop; set `pipe._interrupt = True` from a callback."""
        return self._interrupt

    # ---- before a run

    @strict
    def estimate(
        self,
        num_frames: int,
        *,
        schedule: Any = None,
        memory: Any = AUTO,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        height: int | None = None,
        width: int | None = None,
        given_frames: int = 0,
    ) -> dict[str, Any]:
        """What a video will cost, without running the network.

        Args:
            num_frames: pictures N.
            schedule, memory, num_inference_steps, guidance_scale, height, width: as in a call.
            given_frames: pictures of the `video` it goes on from.

        Returns:
            JSON-ready dict: `latent_frames, ar_steps, model_calls` (with guidance, each asks twice), `frame_tokens`,
            at the last step `memory_tokens, memory_bytes, tokens_per_call`, and, where the network's config tells its
            sizes, `flops_per_step, flops_per_frame, total_flops, kv_bytes` (bfloat16 keys and values).

        Raises:
            ValueError: as a call.
        """
        check_count("num_frames", num_frames)
        plan = make_plan(self.carrier, schedule, memory, num_inference_steps, height, width)
        asked = self.carrier.default_guidance if guidance_scale is None else guidance_scale
        return expected_cost(self.carrier, plan, num_frames, given_frames, asked)

    # ---- a run

    @strict
    @torch.no_grad()
    def __call__(
        self,
        prompt: str | list[str] | None = None,
        video: Any = None,
        image: Any = None,
        num_frames: int = 64,
        *,
        schedule: Any = None,
        memory: Any = AUTO,
        sampler: Any = None,
        actions: Any = None,
        poses: Any = None,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        negative_prompt: str | None = None,
        prompt_embeds: Tensor | None = None,
        negative_prompt_embeds: Tensor | None = None,
        conditioning: dict[str, Any] | None = None,
        num_videos_per_prompt: int = 1,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        seeds: int | Sequence[int] | Tensor | None = None,
        height: int | None = None,
        width: int | None = None,
        trained_length: Any = None,
        history: VideoHistory | Sequence[VideoHistory] | None = None,
        return_history: bool = False,
        output_type: str = "pil",
        output_path: str | Path | Sequence[str | Path] | None = None,
        fps: float = 8,
        resume: bool = True,
        overwrite: bool = False,
        checkpoint_every: int = 1,
        callback_on_step_end: Callable[..., dict[str, Tensor] | None] | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",),
        return_dict: bool = True,
    ) -> VideoContinuationOutput | tuple[Any, ...]:
        """Makes one video per prompt (and per `num_videos_per_prompt`).

        Args:
            prompt: text or texts, for networks that read them.
            video: pictures that the video goes on from, in any form of `to_video`; where one latent frame stands for
                several pictures, the first ones are left out if the number does not fit. They start all videos.
            image: one picture instead of `video`.
            num_frames: pictures N of each video, those of `video` and `history` not counted.
            schedule: a `WindowSchedule`, a preset's name, dict(name=..., numbers), or None for the network's own.
            memory: a `FrameMemory`, a name, dict(name=..., sizes), None for no memory, or "auto": what the schedule's
                references ask for. Frame worlds have their own, of which dict(keep=256) bounds the size.
            sampler: kind of step, dict(kind=..., eta=...), a `SlotSampler`, or None for the network's own.
            actions, poses: one row per latent frame, those of the given video first (of the new frames alone with
                `history`). Rows beyond the end are allowed; without them a chunk that reaches beyond it holds the
                last row, as in a run that ends there.
            num_inference_steps: sub-steps of an autoregressive step, for schedules that leave them open.
            guidance_scale: classifier-free guidance, 1 switches it off; None is what the network's own pipeline takes
                where none is named (5 for Wan, 3 for LTX), 1 for bare networks and those without texts.
            negative_prompt: what to avoid.
            prompt_embeds, negative_prompt_embeds: [B or 1, S, D] instead of texts.
            conditioning: more inputs of the carrier's `condition`, as true_cfg_scale or image_embeds of FramePack.
            num_videos_per_prompt: videos per prompt, with seeds of their own.
            generator: draws the seeds; a list has one per video. seeds: the int64 seeds themselves, see `row_seeds`.
            height, width: pixels; default those of the given pictures, else the network's own.
            trained_length: latent frames that the network was trained to see at once, or a dict of `TrainedLength`
                saying what happens beyond: an error, or a shorter memory.
            history: of an earlier call with the same settings; the frames made then and now are those of one long
                run: latents bit for bit, pictures too where the codec's caches go along (Wan's), elsewhere up to what
                a codec sees beyond two latent frames. return_history: also return that of this call.
            output_type: "pil", "np", "pt" or "latent".
            output_path: write frames there as they are finished and return paths: a file in .mp4 or .gif, or a path
                without ending for a folder of PNG files; see `VideoWriter`.
            fps: of the file. resume: go on with an unfinished video that is there. overwrite: replace a finished one.
            checkpoint_every: autoregressive steps between two saved states, with `output_path`.
            callback_on_step_end: called as callback(pipe, step, levels, {"latents": ...}) after every denoising step;
                `levels` [n] are the noise levels that the frames in work stand at now, returned latents replace the
                frames [1, C, n, h, w]. `pipe._interrupt = True` ends the call; the autoregressive step on its way is
                made again when the video goes on.
            callback_on_step_end_tensor_inputs: out of "latents".
            return_dict: an object, or a tuple (frames or paths, stats).

        Returns:
            `VideoContinuationOutput`.

        Raises:
            ValueError: an argument that cannot be used, with what is allowed; frames that came out as no numbers;
                parts on disk that belong to other settings.
        """
        # 1. Check and complete the arguments
        check_output(output_type, output_path, callback_on_step_end_tensor_inputs)
        for name, value in (
            ("num_frames", num_frames), ("checkpoint_every", checkpoint_every), ("height", height), ("width", width),
            ("num_videos_per_prompt", num_videos_per_prompt), ("num_inference_steps", num_inference_steps),
        ):  # fmt: skip
            if value is not None or name not in ("height", "width", "num_inference_steps"):
                check_count(name, value)
        carrier = self.carrier
        if guidance_scale is None:
            guidance_scale = carrier.default_guidance
        begin = read_start(carrier, video, image, history, height, width)
        past, going_on = begin.past, bool(begin.past)
        prompts = texts_of(prompt, prompt_embeds, num_videos_per_prompt, len(past) or None)
        carrier.check_texts(prompts)
        plan = make_plan(carrier, schedule, memory, num_inference_steps, begin.height, begin.width)
        steps, guard = pick_sampler(carrier, sampler), make_guard(trained_length)
        check_window(carrier, plan, guard)
        if begin.pixels is not None and plan.memory is None:
            raise ValueError(
                f"nothing shows the given pictures to the network: schedule {plan.schedule.name!r} comes without a "
                "memory; write for instance memory=dict(name='window', last=4)"
            )
        if plan.schedule.references.reverse and (going_on or return_history):
            raise ValueError("a video made from its end cannot be part of a chain; leave history out")

        # 2. Seeds, lengths, and what a run that goes on must share with the one it continues
        if going_on and (seeds is not None or generator is not None):
            raise ValueError("a history has its seed; leave seeds and generator out")
        row = [one.seed for one in past] if going_on else row_seeds(len(prompts), generator, seeds)
        begun = time.perf_counter()
        begin.encode(carrier)
        encoded = time.perf_counter() - begun
        shared = {
            "carrier": carrier.name, "carrier_settings": describe_carrier(carrier), "model": fingerprint(carrier),
            "latent_shape": list(plan.shape),
            "schedule": describe_schedule(plan.schedule), "memory": describe_memory(plan.memory),
            "sampler": {"class": type(steps).__name__, "kind": steps.kind, "eta": steps.eta},
            "trained_length": None if guard is None else vars(guard).copy(),
        }  # fmt: skip
        begin.check(carrier, shared, output_type)
        given, before, shown = begin.latents, begin.frames, begin.shown
        frames = carrier.latent_frames(shown + num_frames, after=before > 0)
        tables = [begin.tables(i, actions, poses, frames) for i in range(len(prompts))]
        settings = {
            **shared, "num_frames": num_frames, "height": plan.height, "width": plan.width, "guidance_scale":
            guidance_scale, "negative_prompt": negative_prompt, "given": digest(given), "num_shown": shown,
            "embeds": digest(prompt_embeds, negative_prompt_embeds),
            "conditioning": {key: _told(value) for key, value in sorted((conditioning or {}).items())},
            "actions": digest(tables[0][0]), "poses": digest(tables[0][1]),
        }  # fmt: skip
        carrier.steer(*tables[0])  # what does not fit raises here, before the texts are encoded
        own = [
            {**settings, "prompt": text, "seed": seed, "history": begin.digest(i)}
            for i, (text, seed) in enumerate(zip(prompts, row, strict=True))
        ]
        stream = VideoStream(
            own, num_frames, output_type=output_type, output_path=output_path, fps=fps, resume=resume,
            overwrite=overwrite, checkpoint_every=checkpoint_every,
        )  # fmt: skip
        stream.seconds |= {"total": begun, "encode": encoded}

        # 3. Make the videos one by one
        carrier.follow(plan.schedule)
        self._interrupt = False
        accounts: list[MemoryAccount | None] = [None] * len(prompts)
        kept: list[VideoHistory | None] = [None] * len(prompts)
        ar_steps = calls = new_frames = 0
        for i in stream.missing(lambda: self._interrupt):
            embeds, unwanted = (_row(one, i) for one in (prompt_embeds, negative_prompt_embeds))
            seen = begin.picture(i)
            carrier.reset()
            with stream.timed("encode"):
                carrier.condition(
                    prompts[i], negative_prompt, guidance_scale, batch=1, prompt_embeds=embeds,
                    negative_prompt_embeds=unwanted, image=None if seen is None else seen.to(carrier.device),
                    **(conditioning or {}),
                )  # fmt: skip
            carrier.steer(*tables[i])
            placed = [None if one is None else one.to(carrier.device) for one in tables[i]]
            if plan.memory is not None:
                plan.memory.reset()
            noise = FrameNoise(torch.tensor([row[i]], device=carrier.device), plan.shape)
            run = ContinuationRun(
                carrier, plan.schedule, steps, noise, num_frames=frames, memory=plan.memory, history=given,
                actions=placed[0], poses=placed[1], guard=guard,
                on_sub_step=self._reporter(callback_on_step_end, callback_on_step_end_tensor_inputs),
            )  # fmt: skip
            decoder = None
            if output_type != "latent":
                decoder = CountedDecoder(carrier.decoder(), num_frames, getattr(carrier.pipe, "vae", None))
            with stream.film(i, run, decoder) as film:
                fresh = stream.resumed[i] is None
                if fresh and going_on:
                    run.resume(past[i].rollout)
                    if decoder is not None and past[i].decoder:
                        decoder.load(past[i].decoder, given=0)
                elif fresh and decoder is not None and given is not None and carrier.temporal_ratio > 1:
                    decoder.skip(given[0])
                first, asked = run.index, run.calls
                if fresh and going_on and decoder is not None:  # pictures made by the earlier call and not handed out
                    film.add(Step(run.index, torch.zeros(()), torch.zeros(carrier.latent_channels, 0, 1, 1)))
                with tqdm(total=run.total, initial=min(run.index, run.total), **self._bar) as bar:
                    stream.roll(film, run, run.advance, stopped=lambda: self._interrupt, bar=bar)
            ar_steps, calls = ar_steps + run.index - first, calls + run.calls - asked
            pictures = min(num_frames, carrier.pictures(run.emitted, after=before > 0) - shown)
            new_frames += pictures
            accounts[i] = run.account
            if return_history:
                kept[i] = VideoHistory(
                    row[i], shown + pictures, before, plan.shape, shared,
                    run.state_dict(), {} if decoder is None else decoder.state(), *tables[i],
                    seen if carrier.reads_picture else None,
                )  # fmt: skip

        # 4. Hand over
        carrier.reset()
        if hasattr(self.base, "maybe_free_model_hooks"):
            self.base.maybe_free_model_hooks()
        out, paths, seconds = stream.close(), stream.paths, stream.seconds
        stats = {
            "carrier": carrier.name, "schedule": plan.schedule.name, "num_frames": num_frames, "latent_frames": frames,
            "ar_steps": ar_steps, "model_calls": calls,
            "memory": [None if one is None else vars(one) for one in accounts], "seconds": seconds,
            "seconds_per_frame": seconds["total"] / new_frames if new_frames else None, "settings": settings,
            "seeds": row, "resumed": stream.resumed, "interrupted": self._interrupt, "versions": versions(),
        }  # fmt: skip
        if not return_dict:
            return (out if paths is None else paths, stats)
        return VideoContinuationOutput(frames=out, paths=paths, history=kept if return_history else None, stats=stats)

    def _reporter(self, callback: Any, names: Sequence[str]) -> Callable[[int, Tensor, Tensor], Tensor]:
        def report(step: int, levels: Tensor, latents: Tensor) -> Tensor:
            new = call_back(self, callback, names, step, levels, latents)
            if self._interrupt:
                raise Interrupted
            return new

        return report


def _row(embeds: Tensor | None, i: int) -> Tensor | None:
    """Those of video i; one row serves all."""
    return embeds if embeds is None or len(embeds) == 1 else embeds[i : i + 1]


def _told(value: Any) -> str | None:
    return digest(value) if isinstance(value, Tensor) else repr(value)
