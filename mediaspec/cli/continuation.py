"""`mediaspec generate continuation`: videos that go on for as long as one likes, on disk frame by frame."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from .errors import plain_errors, set_threads
from .text import torch_dtype, usable_device

__all__ = ["continuation"]

FORMATS = {"png": "", "mp4": ".mp4", "gif": ".gif"}
ADVICE = {
    "choose another output_path, or write overwrite=True": "write the same settings, or choose another --out",
    "choose another output_path, or write resume=False to begin again": "or choose another --out",
    "choose another output_path": "choose another --out",
    "out.history[0].save(path)": "--save-history",
    "memory=dict(name='window', last=4)": "--memory window:last=4",
    "give one of video, image and history": "give one of --video, --image and --history",
    "chain; leave history out": "chain; leave --history and --save-history out",
    "a frame model reads no prompts; steer it with actions= and poses=":
        "--prompt and --negative-prompt: a frame world reads no texts; steer it with --actions",
    "or write to a .gif or to a path without ending, which becomes a folder of PNG files":
        "or write --format gif or png",
}  # fmt: skip
"""What errors of the pipeline advise, and what that is on the command line."""
OPTIONS = {
    "num_videos_per_prompt": "--num-videos", "height": "--height", "width": "--width", "fps": "--fps",
    **{
        name: "--" + name.replace("_", "-")
        for name in ("num_frames", "num_inference_steps", "guidance_scale", "negative_prompt", "checkpoint_every",
                     "trained_length")
    },
}  # fmt: skip
"""Arguments of the pipeline by the option that sets them. Words of everyday use count where a value follows."""


def continuation(
    model: Annotated[str, typer.Argument(help="panoroom/pack_k2 or another frame world, folder, or repository.")],
    out: Annotated[Path, typer.Option(help="Folder of the videos; run again to go on.")] = Path("out"),
    num_frames: Annotated[int, typer.Option(help="New frames per video.")] = 64,
    prompt: Annotated[list[str] | None, typer.Option(help="Caption; give it once per video.")] = None,
    video: Annotated[Path | None, typer.Option(help="Movie, GIF or folder of pictures to go on from.")] = None,
    image: Annotated[Path | None, typer.Option(help="Picture to go on from.")] = None,
    history: Annotated[Path | None, typer.Option(help="What an earlier run saved with --save-history.")] = None,
    save_history: Annotated[bool, typer.Option("--save-history", help="Write OUT/*.history, to go on later.")] = False,
    schedule: Annotated[
        str | None, typer.Option(help="Preset of the window: fifo, outpainting:delta=6,last=3, ... or JSON.")
    ] = None,
    memory: Annotated[
        str, typer.Option(help="auto, none, a name with settings as in sink_window:sink=1,last=8, or JSON.")
    ] = "auto",
    keep: Annotated[
        int | None, typer.Option(help="Frame worlds: older frames that are held. Default all: memory grows.")
    ] = None,
    actions: Annotated[
        str | None, typer.Option(help="Frame worlds: as right*20,left*20 (repeated), or a JSON file of numbers.")
    ] = None,
    poses: Annotated[
        Path | None, typer.Option(help="Frame worlds, with --video: JSON file of poses, given frames first.")
    ] = None,
    room: Annotated[int, typer.Option(help="Frame worlds without --video: seed of the room to start in.")] = 200_000,
    context: Annotated[int, typer.Option(help="Frame worlds without --video: frames of the room to show.")] = 16,
    seed: Annotated[int, typer.Option(help="Seed of video 0; video k gets seed + k.")] = 0,
    num_videos: Annotated[int, typer.Option(help="Videos per prompt.")] = 1,
    num_inference_steps: Annotated[
        int | None, typer.Option(help="Denoising steps of a step of the window, where its schedule leaves them open.")
    ] = None,
    guidance_scale: Annotated[
        float | None, typer.Option(help="Classifier-free guidance; 1 is off. Default the model's own.")
    ] = None,
    negative_prompt: Annotated[str | None, typer.Option(help="What to avoid.")] = None,
    height: Annotated[int | None, typer.Option(help="Pixels. Default the model's own.")] = None,
    width: Annotated[int | None, typer.Option(help="Pixels. Default the model's own.")] = None,
    trained_length: Annotated[
        int | None, typer.Option(help="Latent frames the network may see at once; beyond it is an error.")
    ] = None,
    fps: Annotated[float, typer.Option(help="Frames per second of the file.")] = 8,
    format: Annotated[str, typer.Option("--format", help="png for a folder of frames, mp4 or gif.")] = "png",
    checkpoint_every: Annotated[int, typer.Option(help="Steps of the window between two saved states.")] = 16,
    estimate: Annotated[bool, typer.Option("--estimate", help="Only say what the video will cost.")] = False,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, ...; default: cuda where there is one.")] = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads of torch.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Last line of stdout is one JSON object.")] = False,
) -> None:
    """Continue a video, a picture, a room or a prompt with MODEL into OUT, with a memory of what left the window.

    Killed at any moment and run again, the command finishes with the same videos as an undisturbed run.
    """
    with plain_errors("Run the same command again to go on."):
        if format not in FORMATS:
            raise ValueError(f"--format {format}; write one of {', '.join(FORMATS)}")
        if keep is not None and memory != "auto":
            raise ValueError("--keep belongs to the memory of frame worlds; leave --memory out, or write it in there")
        set_threads(threads)
        pipe = load(model, dtype, usable_device(device), quiet=as_json)
        call: dict[str, Any] = {
            "num_frames": num_frames, "schedule": parse_choice("--schedule", schedule), "guidance_scale":
            guidance_scale, "num_inference_steps": num_inference_steps, "height": height, "width": width,
            "memory": parse_choice("--memory", memory) if keep is None else {"keep": keep},
        }  # fmt: skip
        if pipe.carrier.name == "frame_dit":
            from .walk import steer

            if memory == "none" and schedule is None:
                raise ValueError(
                    "--memory none: a frame world sees the past only through the memory it was trained with; leave "
                    "--memory out, or bound it with --keep"
                )

            call |= steer(pipe, model, video, image, history, actions, poses, room, context, num_frames)
        elif actions is not None or poses is not None:
            raise ValueError(f"--actions and --poses are for frame worlds, not for {pipe.carrier.name} models")
        elif image is not None or video is not None:
            call |= {"video": video, "image": image}
        try:
            report = expect(pipe, call) if estimate else run(
                pipe, call, out, FORMATS[format], history, save_history, prompt=prompt or None, seed=seed,
                num_videos=num_videos, negative_prompt=negative_prompt, trained_length=trained_length, fps=fps,
                checkpoint_every=checkpoint_every,
            )  # fmt: skip
        except ValueError as error:
            raise ValueError(on_command_line(str(error))) from error
        if as_json:
            typer.echo(json.dumps(report))


def load(model: str, dtype: str, device: str, quiet: bool) -> Any:
    """The pipeline of MODEL on its device."""
    from ..eval.generation import quiet_loading
    from ..pipelines.video_continuation import VideoContinuationPipeline

    with quiet_loading():
        pipe = VideoContinuationPipeline.from_pretrained(model, torch_dtype=torch_dtype(dtype))
    shown = False if quiet else None  # None: only on a terminal
    pipe.set_progress_bar_config(unit="step", file=sys.stderr, disable=shown, dynamic_ncols=True)
    try:
        return pipe.to(device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"--device {device} cannot be used here ({reason}); write cpu") from error


def expect(pipe: Any, call: dict[str, Any]) -> dict[str, Any]:
    """What the video will cost, also printed."""
    shown = call.get("video") if call.get("video") is not None else call.get("image")
    if isinstance(shown, Path):
        from ..pipelines.video_input import read_video_file

        shown = read_video_file(shown)
    given = 0 if shown is None else len(shown)
    names = ("num_frames", "schedule", "memory", "num_inference_steps", "guidance_scale", "height", "width")
    report: dict[str, Any] = pipe.estimate(**{name: call[name] for name in names}, given_frames=given)
    for name, value in report.items():
        typer.echo(f"{name}: {value}")
    return report


def run(
    pipe: Any, call: dict[str, Any], out: Path, ending: str, history: Path | None, save_history: bool, *,
    prompt: list[str] | None, seed: int, num_videos: int, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """Makes the videos and reports; arguments as on the command line."""
    from ..pipelines.video_history import VideoHistory

    if history is not None:
        call["history"] = [VideoHistory.load(history, pipe.device)]
    else:
        call["seeds"] = seed
    made = pipe(
        prompt, output_path=out / f"video{ending}", num_videos_per_prompt=num_videos, return_history=save_history,
        **call, **more,
    )  # fmt: skip
    histories = []
    for path, one in zip(made.paths, made.history or [], strict=False):
        if one is not None:
            histories.append(path.with_name(f"{path.stem}.history"))
            one.save(histories[-1])
    stats = made.stats
    used = [one for one in stats["memory"] if one is not None]
    report = {
        "video": str(made.paths[0]),
        "videos": [str(path) for path in made.paths],
        "num_frames": stats["num_frames"],
        "made": len(used),
        "seconds": round(stats["seconds"]["total"], 4),
        "seconds_per_frame": None if stats["seconds_per_frame"] is None else round(stats["seconds_per_frame"], 6),
        "memory_tokens": max((one["most_tokens"] for one in used), default=0),
        "memory_bytes": max((one["most_bytes"] for one in used), default=0),
        "memory_frames": max((one["most_frames"] for one in used), default=0),
        "peak_rss_bytes": peak_rss(),
        "ar_steps": stats["ar_steps"],
        "model_calls": stats["model_calls"],
        "resumed": stats["resumed"],
        "histories": [str(path) for path in histories],
        "seeds": stats["seeds"],
        "settings": stats["settings"],
    }
    for path in report["videos"]:
        typer.echo(path)
    typer.echo(
        f"{report['made']} made, {len(made.paths) - report['made']} already there; {report['num_frames']} frames "
        f"each, {report['seconds']:.1f} s; memory {report['memory_tokens']} tokens, {report['memory_bytes']} bytes"
    )
    return report


def on_command_line(text: str) -> str:
    """An error of the pipeline with advice for the command.

    Example:
        >>> on_command_line("out/video is there already; choose another output_path, or write overwrite=True")
        'out/video is there already; write the same settings, or choose another --out'
        >>> on_command_line("num_frames=0; write a whole number from 1 on")
        '--num-frames 0; write a whole number from 1 on'
    """
    for call, option in ADVICE.items():
        text = text.replace(call, option)
    for name, option in OPTIONS.items():
        text = re.sub(rf"(?<![\w.-]){name}=", f"{option} ", text)
        if "_" in name:
            text = re.sub(rf"(?<![\w.-]){name}\b", option, text)
    return text


def peak_rss() -> int | None:
    """Most bytes of memory that this process has held; None where the system does not tell."""
    try:
        import resource
    except ImportError:
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def parse_choice(option: str, text: str | None) -> Any:
    """A name, "name:key=value,key=value", or a JSON object; numbers and lists as in JSON.

    Raises:
        ValueError: something else.

    Example:
        >>> parse_choice("--memory", "sink_window:sink=1,last=8")
        {'name': 'sink_window', 'sink': 1, 'last': 8}
    """
    if text is None or text == "none":
        return None
    if text.startswith("{"):
        try:
            return json.loads(text)
        except ValueError as error:
            raise ValueError(f"{option} {text!r} is no JSON object ({error})") from error
    name, _, rest = text.partition(":")
    if not rest:
        return name
    found: dict[str, Any] = {"name": name}
    for pair in rest.split(","):
        key, sign, value = pair.partition("=")
        if not sign or not key.strip():
            raise ValueError(f"{option} {text!r}; write name:key=value,key=value, or a JSON object")
        try:
            found[key.strip()] = json.loads(value)
        except ValueError:
            found[key.strip()] = value.strip()
    return found
