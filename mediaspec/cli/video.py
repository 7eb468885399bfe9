"""`mediaspec generate video`: long and multi-prompt videos and a resumable manifest."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from .errors import plain_errors
from .text import torch_dtype, usable_device

__all__ = ["video"]

SAMPLERS = ("freenoise", "fifo", "freelong", "outpaint", "plain")
PRESETS = ("safe", "paper")
NUM_FRAMES = 64
DEFAULTS = {"moving-emoji": {"guidance_scale": 4.0, "num_inference_steps": 20}}
"""What a shipped model was tuned with; fifo keeps its own number of steps, the length of its queue."""


def video(
    prompts: Annotated[list[str] | None, typer.Argument(help="Captions, one video each.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the videos; run again to go on.")] = Path("out"),
    num_frames: Annotated[int | None, typer.Option(help="Frames per video. Default: the timeline's, else 64.")] = None,
    sampler: Annotated[str, typer.Option(help="freenoise, fifo, freelong, outpaint or plain.")] = "freenoise",
    attention: Annotated[
        str, typer.Option(help="tiara: steadier temporal attention; none: the model's own.")
    ] = "none",
    tiara_preset: Annotated[
        str | None, typer.Option(help="safe (with the spectral cap, the default) or paper.")
    ] = None,
    alpha: Annotated[float | None, typer.Option(help="Strength of tiara. Default 6.")] = None,
    timeline: Annotated[
        Path | None, typer.Option(help="YAML or JSON file: which prompt holds in which frames; instead of PROMPTS.")
    ] = None,
    blend: Annotated[str | None, typer.Option(help="How prompts mix: promptblend, linear or cut.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of video 0; video k gets seed + k.")] = 0,
    num_videos: Annotated[int, typer.Option(help="Videos per prompt.")] = 1,
    num_inference_steps: Annotated[
        int | None, typer.Option(help="Denoising steps. Default 20 for moving-emoji, else 50; fifo 64.")
    ] = None,
    guidance_scale: Annotated[
        float | None, typer.Option(help="Classifier-free guidance; 1 is off. Default 4 for moving-emoji, else 7.5.")
    ] = None,
    negative_prompt: Annotated[str | None, typer.Option(help="What to avoid.")] = None,
    height: Annotated[int | None, typer.Option(help="Pixels. Default the model's own.")] = None,
    width: Annotated[int | None, typer.Option(help="Pixels. Default the model's own.")] = None,
    fps: Annotated[float, typer.Option(help="Frames per second of the file.")] = 8,
    format: Annotated[str, typer.Option("--format", help="mp4, gif, or png for a folder of frames.")] = "mp4",
    model: Annotated[
        str, typer.Option(help="moving-emoji, or folder or repository of a pipeline of diffusers.")
    ] = "moving-emoji",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, ...; default: cuda where there is one.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Last line of stdout is one JSON object.")] = False,
) -> None:
    """Generate videos of PROMPTS, or of a timeline of prompts, into OUT.

    Killed at any moment and run again, the command finishes with the same videos as an undisturbed run.
    """
    with plain_errors("Run the same command again to go on."):
        options: dict[str, Any] = {
            "model": model, "sampler": sampler, "num_inference_steps": num_inference_steps,
            "guidance_scale": guidance_scale, "height": height, "width": width, "fps": fps, "format": format,
            "dtype": dtype, "device": usable_device(device),
        }  # fmt: skip
        _choose("--sampler", sampler, SAMPLERS)
        for name, value in DEFAULTS.get(model, {}).items():
            if options[name] is None and (name != "num_inference_steps" or sampler != "fifo"):
                options[name] = value
        options["attention"] = tiara_settings(attention, tiara_preset, alpha, sampler)
        torch_dtype(dtype)
        captions = read_timeline(prompts, timeline, num_frames, blend, options)
        if num_videos < 1:
            raise ValueError(f"--num-videos must be at least 1, got {num_videos}")
        run(captions, out, options, seed, num_videos, negative_prompt, as_json)


def tiara_settings(attention: str, preset: str | None, alpha: float | None, sampler: str) -> dict[str, Any] | None:
    """What `--attention`, `--tiara-preset` and `--alpha` mean: settings of TiARA by preset, or None."""
    _choose("--attention", attention, ("tiara", "none"))
    if attention == "none":
        if preset is not None or alpha is not None:
            raise ValueError("--tiara-preset and --alpha belong to --attention tiara; write it, or leave them out")
        return None
    _choose("--tiara-preset", preset or "safe", PRESETS)
    chosen: dict[str, Any] = {"preset": preset or "safe"}
    if alpha is not None:
        chosen["alpha"] = alpha
    if sampler == "fifo":
        chosen["boundary"] = "reflect"  # a queue runs from clean to noisy; its ends must not be taken for neighbours
    return chosen


def read_timeline(
    prompts: list[str] | None, path: Path | None, num_frames: int | None, blend: str | None, options: dict[str, Any]
) -> list[str]:
    """Captions of the videos; puts num_frames and what belongs to a timeline into `options`."""
    from ..pipelines.timeline import Timeline

    if bool(prompts) == (path is not None):
        raise ValueError(
            "give captions (one video each) as arguments, or several prompts of one video as --timeline FILE; one of "
            "the two"
        )
    if path is None:
        if blend is not None:
            raise ValueError("--blend says how the prompts of one video mix; it needs --timeline FILE")
        options["num_frames"] = NUM_FRAMES if num_frames is None else num_frames
        return list(prompts or [])
    line = Timeline.load(path, num_frames)
    from_file = Timeline.read_options(path)
    options |= {**from_file, "num_frames": line.length, "timeline": line.record()}
    options["blend"] = blend or from_file.get("blend", "promptblend")
    return [" -> ".join(line.texts)]


def run(
    captions: list[str],
    out: Path,
    options: dict[str, Any],
    seed: int,
    num_videos: int,
    negative_prompt: str | None,
    as_json: bool,
) -> None:
    """Generates and reports; arguments as on the command line, defaults filled in."""
    from ..eval.manifest import make_items
    from ..eval.video_generation import VideoItem, VideoSettings, generate_videos

    settings = VideoSettings(**options)
    items = [
        VideoItem(item.index, item.id, item.prompt, item.seed, item.negative_prompt, format=settings.format)
        for item in make_items(captions, seed=seed, num_images=num_videos, negative_prompt=negative_prompt)
    ]

    def show(pipe: Any, done: int, wanted: int) -> None:
        quiet = None if not as_json else False  # None: only on a terminal
        pipe.set_progress_bar_config(
            desc=f"video {done + 1}/{wanted}", unit="step", file=sys.stderr, disable=quiet, dynamic_ncols=True
        )

    result = generate_videos(items, out, settings, load=load_video_pipeline, enable=enable_tiara, on_video=show)
    report: dict[str, Any] = {
        "videos": [str(out / row["stats"]["video"]) for row in result.rows],
        "strips": [str(out / item.strip) for item in items],
        "num_frames": settings.num_frames,
        "attention": _attention(list(result.attention.values())) if settings.attention is not None else None,
        "seconds": round(result.seconds, 4),
        "made": result.made,
        "seeds": [item.seed for item in items],
        "settings": settings.record(),
    }
    if as_json:
        typer.echo(json.dumps(report))
        return
    for path in report["videos"]:
        typer.echo(path)
    typer.echo(
        f"{result.made} made, {len(items) - result.made} already there; {settings.num_frames} frames each, "
        f"{result.seconds:.1f} s"
    )
    if report["attention"] is not None:
        typer.echo("tiara: " + ", ".join(f"{key} {value}" for key, value in report["attention"].items()))


def load_video_pipeline(settings: Any) -> Any:
    """The `LongVideoPipeline` of a run on its device."""
    from ..eval.generation import quiet_loading
    from ..pipelines.auto import AutoPipeline

    with quiet_loading():
        pipe = AutoPipeline.from_pretrained(settings.model, dtype=torch_dtype(settings.dtype))
    if not hasattr(pipe, "base"):
        raise ValueError(
            f"--model {settings.model} is a {type(pipe).__name__}, which makes no videos; write moving-emoji, or the "
            "folder or repository of an AnimateDiff or Wan pipeline"
        )
    try:
        return pipe.to(settings.device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"--device {settings.device} cannot be used here ({reason}); write cpu") from error


def enable_tiara(base: Any, settings: dict[str, Any]) -> Any:
    """The handle of TiARA on a base pipeline."""
    from ..attention.tiara import TiARA
    from ..integrations.enable import enable

    values = dict(settings)
    preset = getattr(TiARA, values.pop("preset"))
    return enable(base, attention=preset(**values))


def _attention(summaries: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Means over the videos; `modules` is the number that were edited."""
    if not summaries:
        return None
    keys = sorted({key for one in summaries for key in one if key != "modules"})
    means = {key: [one[key] for one in summaries if key in one] for key in keys}
    return {
        "modules": max(one["modules"] for one in summaries),
        **{key: round(sum(values) / len(values), 6) for key, values in means.items()},
    }


def _choose(option: str, value: str, allowed: tuple[str, ...]) -> None:
    from ..pipelines.keywords import nearest

    if value not in allowed:
        raise ValueError(f"{option} {value} is not known; {nearest(value, allowed)}")
