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
    frame_table,
    make_guard,
    pick_sampler,
    texts_of,
)
from .continuation_loading import load_base
from .continuation_output import VideoContinuationOutput
from .continuation_plan import expected_cost, make_plan
from .continuation_run import ContinuationRun, CountedDecoder, Interrupted, MemoryAccount
from .keywords import nearest, strict
from .samplers import Step
from .seeds import row_seeds
from .versions import versions
from .video_frames import Frames
from .video_history import VideoHistory
from .video_input import to_video
from .video_writer import VideoWriter, video_paths

__all__ = ["VideoContinuationOutput", "VideoContinuationPipeline"]

OUTPUT_TYPES = ("pil", "np", "pt", "latent")


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
        if output_type not in OUTPUT_TYPES:
            raise ValueError(f"output_type={output_type!r}; {nearest(output_type, OUTPUT_TYPES)}")
        unknown = set(callback_on_step_end_tensor_inputs) - {"latents"}
        if unknown:
            raise ValueError(f"callback_on_step_end_tensor_inputs has {sorted(unknown)}; allowed is 'latents'")
        for name, value in (
            ("num_frames", num_frames), ("checkpoint_every", checkpoint_every), ("height", height), ("width", width),
            ("num_videos_per_prompt", num_videos_per_prompt), ("num_inference_steps", num_inference_steps),
        ):  # fmt: skip
            if value is not None or name not in ("height", "width", "num_inference_steps"):
                check_count(name, value)
        if output_path is not None and output_type == "latent":
            raise ValueError("output_type='latent' returns latents and writes no pictures; leave output_path out")
        if sum(one is not None for one in (video, image, history)) > 1:
            raise ValueError("give one of video, image and history; each is what the video goes on from")
        if guidance_scale is None:
            guidance_scale = self.carrier.default_guidance
        past = [history] if isinstance(history, VideoHistory) else list(history or [])
        prompts = texts_of(prompt, prompt_embeds, num_videos_per_prompt, len(past) or None)
        pixels = None
        if video is not None or image is not None:
            pixels = to_video(video if image is None else image, height, width, "video" if image is None else "image")
            if image is not None and pixels.shape[2] > 1:
                raise ValueError(f"image holds {pixels.shape[2]} pictures; give them as video")
            pixels = pixels[:, :, (pixels.shape[2] - 1) % self.carrier.temporal_ratio :]
            height, width = pixels.shape[3:]
        if past:
            ratio = self.carrier.spatial_ratio
            height, width = height or past[0].latent_shape[1] * ratio, width or past[0].latent_shape[2] * ratio
        plan = make_plan(self.carrier, schedule, memory, num_inference_steps, height, width)
        steps, guard, carrier = pick_sampler(self.carrier, sampler), make_guard(trained_length), self.carrier
        if pixels is not None and plan.memory is None:
            raise ValueError(
                f"nothing shows the given pictures to the network: schedule {plan.schedule.name!r} comes without a "
                "memory; write for instance memory=dict(name='window', last=4)"
            )
        if plan.schedule.references.reverse and (past or return_history):
            raise ValueError("a video made from its end cannot be part of a chain; leave history out")

        # 2. Seeds, lengths, and what a run that goes on must share with the one it continues
        if past and (seeds is not None or generator is not None):
            raise ValueError("a history has its seed; leave seeds and generator out")
        row = [one.seed for one in past] if past else row_seeds(len(prompts), generator, seeds)
        begun = time.perf_counter()
        given = None if pixels is None else carrier.encode(pixels.to(carrier.device)).float()
        seconds = {"total": begun, "encode": time.perf_counter() - begun, "denoise": 0.0, "decode": 0.0, "write": 0.0}
        shared = {
            "carrier": carrier.name, "carrier_settings": describe_carrier(carrier), "model": fingerprint(carrier),
            "latent_shape": list(plan.shape),
            "schedule": describe_schedule(plan.schedule), "memory": describe_memory(plan.memory),
            "sampler": {"class": type(steps).__name__, "kind": steps.kind, "eta": steps.eta},
            "trained_length": None if guard is None else vars(guard).copy(),
        }  # fmt: skip
        for one in past:
            one.check(shared)
        if output_type != "latent" and carrier.temporal_ratio > 1 and not all(one.decoder for one in past):
            raise ValueError("the history was made with output_type='latent', without pictures; go on with the same")
        if past and len({(one.pictures, one.given) for one in past}) > 1:
            raise ValueError("the histories are of videos of different lengths; go on with them one by one")
        before = 0 if given is None else given.shape[2]
        shown = 0
        if past:
            before, shown = past[0].given, past[0].pictures
        frames = carrier.latent_frames(shown + num_frames, after=before > 0)
        start = before + int(past[0].rollout["emitted"]) if past else 0
        settings = {
            **shared, "num_frames": num_frames, "height": plan.height, "width": plan.width, "guidance_scale":
            guidance_scale, "negative_prompt": negative_prompt, "given": digest(given), "num_shown": shown,
            "embeds": digest(prompt_embeds, negative_prompt_embeds),
            "conditioning": {key: _told(value) for key, value in sorted((conditioning or {}).items())},
        }  # fmt: skip
        tables = []
        for i in range(len(prompts)):
            old = past[i] if past else None
            tables.append((
                frame_table(actions, "actions", before + frames, None if old is None else old.actions, start, before),
                frame_table(poses, "poses", before + frames, None if old is None else old.poses, start, before),
            ))  # fmt: skip
        settings["actions"], settings["poses"] = (digest(one) for one in tables[0])
        carrier.steer(*tables[0])  # what does not fit raises here, before anything is on disk

        paths = None if output_path is None else video_paths(output_path, len(prompts))  # type: ignore[arg-type]
        writers: list[VideoWriter | None] = [None] * len(prompts)
        for i, path in enumerate(paths or []):
            own = {**settings, "prompt": prompts[i], "seed": row[i], "history": _digest_history(past, i)}
            writers[i] = VideoWriter(path, own, fps=fps, resume=resume, overwrite=overwrite)

        # 3. Make the videos one by one
        carrier.follow(plan.schedule)
        self._interrupt = False
        videos: list[Frames] = []
        resumed: list[int | None] = []
        accounts: list[MemoryAccount | None] = []
        kept: list[VideoHistory | None] = []
        ar_steps = calls = new_frames = 0
        for i, (text, seed, writer) in enumerate(zip(prompts, row, writers, strict=True)):
            if self._interrupt or (writer is not None and writer.complete):
                resumed.append(None)
                accounts.append(None)
                kept.append(None)
                continue
            begun = time.perf_counter()
            embeds, unwanted = (_row(one, i) for one in (prompt_embeds, negative_prompt_embeds))
            seen = past[i].image if past else None if pixels is None else pixels[:, :, -1]
            carrier.reset()
            carrier.condition(
                text, negative_prompt, guidance_scale, batch=1, prompt_embeds=embeds, negative_prompt_embeds=unwanted,
                image=None if seen is None else seen.to(carrier.device), **(conditioning or {}),
            )  # fmt: skip
            seconds["encode"] += time.perf_counter() - begun
            carrier.steer(*tables[i])
            placed = [None if one is None else one.to(carrier.device) for one in tables[i]]
            if plan.memory is not None:
                plan.memory.reset()
            noise = FrameNoise(torch.tensor([seed], device=carrier.device), plan.shape)
            run = ContinuationRun(
                carrier, plan.schedule, steps, noise, num_frames=frames, memory=plan.memory, history=given,
                actions=placed[0], poses=placed[1], guard=guard,
                on_sub_step=self._reporter(callback_on_step_end, callback_on_step_end_tensor_inputs),
            )  # fmt: skip
            decoder = None
            if output_type != "latent":
                network = getattr(carrier.pipe, "vae", None)
                decoder = CountedDecoder(carrier.decoder(), num_frames, network)
            film = Frames(decoder, num_frames, output_type, writer, seconds)
            went_on = film.restore(run)  # type: ignore[arg-type]
            resumed.append(went_on)
            if went_on is None and past:
                run.resume(past[i].rollout)
                if decoder is not None and past[i].decoder:
                    decoder.load(past[i].decoder, given=0)
            elif went_on is None and decoder is not None and given is not None and carrier.temporal_ratio > 1:
                decoder.skip(given[0])
            first, asked = run.index, run.calls
            self._roll(run, film, seconds, checkpoint_every, went_on is None and bool(past))
            ar_steps, calls = ar_steps + run.index - first, calls + run.calls - asked
            pictures = min(num_frames, carrier.pictures(run.emitted, after=before > 0) - shown)
            new_frames += pictures
            if run.done:
                film.finish()
            videos.append(film)
            accounts.append(run.account)
            kept.append(None)
            if return_history:
                kept[-1] = VideoHistory(
                    seed, shown + pictures, before, plan.shape, shared,
                    run.state_dict(), {} if decoder is None else decoder.state(), *tables[i],
                    seen if carrier.reads_picture else None,
                )  # fmt: skip

        # 4. Hand over
        carrier.reset()
        if hasattr(self.base, "maybe_free_model_hooks"):
            self.base.maybe_free_model_hooks()
        seconds["total"] = time.perf_counter() - seconds["total"]
        stats = {
            "carrier": carrier.name, "schedule": plan.schedule.name, "num_frames": num_frames, "latent_frames": frames,
            "ar_steps": ar_steps, "model_calls": calls,
            "memory": [None if one is None else vars(one) for one in accounts], "seconds": seconds,
            "seconds_per_frame": seconds["total"] / new_frames if new_frames else None, "settings": settings,
            "seeds": row, "resumed": resumed, "interrupted": self._interrupt, "versions": versions(),
        }  # fmt: skip
        out = None if paths is not None else Frames.joined(videos, output_type)
        if not return_dict:
            return (out if paths is None else paths, stats)
        return VideoContinuationOutput(frames=out, paths=paths, history=kept if return_history else None, stats=stats)

    def _roll(
        self, run: ContinuationRun, film: Frames, seconds: dict[str, float], checkpoint_every: int, chained: bool
    ) -> None:
        """Makes steps until the video is done or the call is interrupted."""
        if chained and film.output_type != "latent":  # pictures that the earlier call made and did not hand out
            film.add(Step(run.index, torch.zeros(()), torch.zeros(run.carrier.latent_channels, 0, 1, 1)))
        saved = True
        with tqdm(total=run.total, initial=min(run.index, run.total), **self._bar) as bar:
            while not run.done and not self._interrupt:
                begun = time.perf_counter()
                try:
                    step = run.advance()
                except Interrupted:
                    break
                finally:
                    seconds["denoise"] += time.perf_counter() - begun
                film.add(step)
                saved = run.done or run.index % checkpoint_every == 0
                if saved:
                    film.keep(run)  # type: ignore[arg-type]
                bar.update()
        if not saved:
            film.keep(run)  # type: ignore[arg-type]

    def _reporter(self, callback: Any, names: Sequence[str]) -> Callable[[int, Tensor, Tensor], Tensor]:
        def report(step: int, levels: Tensor, latents: Tensor) -> Tensor:
            returned = None if callback is None else callback(self, step, levels, {name: latents for name in names})
            if returned is not None and not isinstance(returned, dict):
                raise TypeError(
                    f"the callback returned {returned!r}; return a dict of the tensors it was given, or None"
                )
            new: Tensor = (returned or {}).get("latents", latents)
            if new.shape != latents.shape:
                raise ValueError(f"the callback returned latents {tuple(new.shape)}; return {tuple(latents.shape)}")
            if self._interrupt:
                raise Interrupted
            return new

        return report


def _row(embeds: Tensor | None, i: int) -> Tensor | None:
    """Those of video i; one row serves all."""
    return embeds if embeds is None or len(embeds) == 1 else embeds[i : i + 1]


def _told(value: Any) -> str | None:
    return digest(value) if isinstance(value, Tensor) else repr(value)


def _digest_history(past: Sequence[VideoHistory], i: int) -> str | None:
    return digest(*past[i].rollout.values()) if past else None
