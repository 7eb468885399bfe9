"""`mediaspec eval video`: measures long videos, and what an attention setting or a prompt blend changes in them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from .errors import plain_errors
from .text import usable_device

__all__ = ["video"]


def video(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Folders of finished videos (mp4, gif, npz, npy, folders of png), the first one is the baseline; or "
            "one folder that this command filled, to see it again."
        ),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Captions to make videos of: one a line, .jsonl, or .json with prompts.")
    ] = None,
    timelines: Annotated[
        Path | None, typer.Option(help="Multi-prompt videos: a timeline file, a folder of them, or .json with pairs.")
    ] = None,
    model: Annotated[
        str, typer.Option(help="moving-emoji, or folder or repository of a diffusers video pipeline.")
    ] = ("moving-emoji"),
    num_frames: Annotated[int, typer.Option(help="Frames per video.")] = 128,
    samplers: Annotated[str, typer.Option(help="Long samplers, e.g. freenoise,fifo.")] = "freenoise",
    attention: Annotated[
        str, typer.Option(help="Settings, e.g. none,tiara:paper,tiara:safe,tiara:alpha=3,window_length=9.")
    ] = "none,tiara:safe",
    blends: Annotated[str, typer.Option(help="With --timelines: promptblend,linear,cut.")] = "promptblend,linear,cut",
    seeds: Annotated[int, typer.Option(help="Videos per prompt and setting.")] = 1,
    seed: Annotated[int, typer.Option(help="First seed; a prompt has the same ones under every setting.")] = 0,
    steps: Annotated[
        str | None,
        typer.Option(
            help="Denoising steps: a number, or by sampler as in freenoise=16,fifo=32. Default as in generate video."
        ),
    ] = None,
    sampler_settings: Annotated[
        list[str] | None, typer.Option(help="Keywords of a sampler, e.g. fifo:lookahead=false; may be repeated.")
    ] = None,
    guidance_scale: Annotated[
        float | None, typer.Option(help="Classifier-free guidance; 1 is off. Default 4 for moving-emoji, else 7.5.")
    ] = None,
    negative_prompt: Annotated[str | None, typer.Option()] = None,
    height: Annotated[int | None, typer.Option(help="Pixels.")] = None,
    width: Annotated[int | None, typer.Option(help="Pixels.")] = None,
    fps: Annotated[float | None, typer.Option(help="Frames per second; default 8, or what the files say.")] = None,
    limit: Annotated[int | None, typer.Option(help="Only the first so many prompts, timelines or videos.")] = None,
    captions: Annotated[
        Path | None, typer.Option(help="Of finished videos: .json that maps names (without ending) to texts.")
    ] = None,
    reference: Annotated[
        Path | None, typer.Option(help="Folder of good videos for the Frechet distance of clips.")
    ] = None,
    feature_every: Annotated[int, typer.Option(help="EfficientNet-Lite0 reads every so many-th frame.")] = 4,
    flow: Annotated[str, typer.Option(help="auto, blocks (needs nothing), farneback or dis (OpenCV).")] = "auto",
    flow_every: Annotated[int, typer.Option(help="Warping compares every so many-th pair of frames.")] = 1,
    flow_side: Annotated[int, typer.Option(help="Longer side in pixels at which flow is found.")] = 256,
    lite0: Annotated[bool, typer.Option(help="Consistency on EfficientNet-Lite0 features.")] = True,
    shots: Annotated[bool, typer.Option(help="Cuts and clip distance on TransNetV2 features.")] = True,
    reader: Annotated[bool, typer.Option(help="Text alignment with the caption reader of moving-emoji.")] = True,
    out: Annotated[Path, typer.Option(help="Folder of videos and rows; run again to go on.")] = Path("video-eval"),
    shard: Annotated[str | None, typer.Option(help="i/n: make and measure this worker's part only.")] = None,
    report: Annotated[bool, typer.Option("--report", help="Write report.html with clips, plots and tables.")] = False,
    show: Annotated[int, typer.Option(help="Prompts that the report shows with their clips.")] = 4,
    vbench: Annotated[
        Path | None, typer.Option(help="Write the videos as VBench looks for them, one folder each.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, ...; auto: cuda where there is one.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Last line of stdout is one JSON object.")] = False,
) -> None:
    """Measure videos: consistency, flicker, warping error, motion, cuts, text, with paired statistics.

    Either of finished folders, or of videos made here, each prompt and seed with and without an attention setting.
    """
    with plain_errors("Run the same command again to go on."):
        result = evaluate(
            folders or [], prompts=prompts, timelines=timelines, out=out, samplers=samplers, attention=attention,
            blends=blends, seeds=seeds, seed=seed, fps=fps, limit=limit, captions=captions, reference=reference,
            score={
                "feature_every": feature_every, "flow": flow, "flow_every": flow_every, "flow_side": flow_side,
                "frames": lite0, "shots": shots,
            },
            use_reader=reader, shard=shard, steps=steps, sampler_settings=sampler_settings or [],
            maker={
                "model": model, "num_frames": num_frames, "guidance_scale": guidance_scale,
                "negative_prompt": negative_prompt, "height": height, "width": width, "dtype": dtype,
                "device": device,
            },
        )  # fmt: skip
        if report:
            from ..eval.video_report import write_report

            result["report"] = str(write_report(out_folder(folders or [], out), result, show))
        if vbench is not None:
            result["vbench"] = _write_vbench(vbench, out_folder(folders or [], out), result["rows"])
        typer.echo(tables(result))
        if report:
            typer.echo(f"\nreport: {result['report']}")
        if as_json:
            typer.echo(json.dumps({key: value for key, value in result.items() if key != "rows"}))


def tables(result: dict[str, Any]) -> str:
    """The result as markdown."""
    from ..eval.report import markdown
    from ..eval.video_compare import group_table, paired_table

    parts = [group_table(result["groups"], result["scorer"])]
    parts += [paired_table(one) for one in result["comparisons"]]
    if result["frechet"]:
        cells = [
            [f"`{one['group']}`", f"`{one['to']}`", f"{one['value']:.4g}", f"{one['floor']:.4g}",
             f"{one['clips'][0]} / {one['clips'][1]}"]
            for one in result["frechet"]
        ]  # fmt: skip
        parts.append(markdown(["group", "to", result["frechet"][0]["title"], "half against half", "clips"], cells))
    return "\n\n".join(parts)


def out_folder(folders: list[Path], out: Path) -> Path:
    """Where rows are: --out, or the one folder given that this command filled before."""
    return folders[0] if _filled(folders) else out


def _filled(folders: list[Path]) -> bool:
    from ..eval.video_rows import read_run

    return len(folders) == 1 and read_run(folders[0]) is not None


def evaluate(
    folders: list[Path],
    *,
    prompts: Path | None,
    timelines: Path | None,
    out: Path,
    samplers: str,
    attention: str,
    blends: str,
    seeds: int,
    seed: int,
    fps: float | None,
    limit: int | None,
    captions: Path | None,
    reference: Path | None,
    score: dict[str, Any],
    use_reader: bool,
    shard: str | None,
    steps: str | None,
    maker: dict[str, Any],
    sampler_settings: Sequence[str] = (),
    pipe: Any = None,
) -> dict[str, Any]:
    """Makes or finds videos, measures them and compares; arguments as on the command line, `pipe` is a loaded base
    pipeline."""
    from ..eval.video_rows import read_rows, read_run
    from .generate import parse_shard

    if sum([bool(folders), prompts is not None, timelines is not None]) != 1:
        raise ValueError(
            "give one of: folders of videos, --prompts FILE, --timelines FILE; as in `mediaspec eval video out1 out2` "
            "or `mediaspec eval video --prompts prompts.txt --samplers freenoise --attention none,tiara:safe`"
        )
    rank_world = parse_shard(shard)
    if limit is not None and limit < 1:
        raise ValueError(f"--limit is {limit}; give at least 1, or leave it out")
    if _filled(folders):
        settings = read_run(folders[0]) or {}
        return finish(_baseline_first(read_rows(folders[0]), settings), folders[0], settings, None, None)
    from ..eval.video_score import ScoreSettings

    wanted = ScoreSettings(**score)
    if folders:
        texts = None if captions is None else _captions(captions)
        return _finished(folders, out, wanted, fps, limit, texts, reference, use_reader)
    return _made(
        prompts, timelines, out, wanted, maker, samplers=samplers, attention=attention, blends=blends, seeds=seeds,
        seed=seed, fps=8.0 if fps is None else fps, limit=limit, reference=reference, use_reader=use_reader,
        shard=rank_world, steps=steps, sampler_settings=sampler_settings, pipe=pipe,
    )  # fmt: skip


def _finished(
    folders: list[Path], out: Path, wanted: Any, fps: float | None, limit: int | None,
    captions: dict[str, str] | None, reference: Path | None, use_reader: bool,
) -> dict[str, Any]:  # fmt: skip
    from ..eval.video_rows import VideoRows
    from ..eval.video_run import score_folders
    from ..eval.video_score import VideoScorer

    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{folder} is no folder; give folders of videos")
    scorer = VideoScorer(wanted, _reader(captions.values()) if captions and use_reader else None)
    settings = {"folders": [str(folder.resolve()) for folder in folders]}
    rows = VideoRows(out, settings)
    found = score_folders(folders, rows, scorer, fps=fps, captions=captions, limit=limit, on_row=_progress())
    return finish(found, out, settings, scorer, reference)


def _made(
    prompts: Path | None, timelines: Path | None, out: Path, wanted: Any, maker: dict[str, Any], *, samplers: str,
    attention: str, blends: str, seeds: int, seed: int, fps: float, limit: int | None, reference: Path | None,
    use_reader: bool, shard: tuple[int, int], steps: str | None, sampler_settings: Sequence[str], pipe: Any,
) -> dict[str, Any]:  # fmt: skip
    from ..eval.video_maker import MakerSettings, VideoMaker
    from ..eval.video_metrics.flow import resolve_flow
    from ..eval.video_plan import (
        parse_attention,
        parse_names,
        parse_sampler_settings,
        plan_jobs,
        read_prompts,
        read_timelines,
    )
    from ..eval.video_rows import VideoRows
    from ..eval.video_run import run_jobs
    from ..eval.video_score import VideoScorer
    from ..integrations.enable import enable
    from ..pipelines.samplers import SAMPLERS
    from ..pipelines.timeline import BLENDS
    from .video import DEFAULTS

    if not fps > 0:
        raise ValueError(f"--fps is {fps}; give a positive number")
    resolve_flow(wanted.flow)
    names = parse_names(samplers, sorted(SAMPLERS), "--samplers")
    one, by_sampler = _steps(steps, names)
    defaults = DEFAULTS.get(maker["model"], {})
    if one is None and "num_inference_steps" in defaults:  # fifo's steps are the length of its queue
        tuned = {name: int(defaults["num_inference_steps"]) for name in names if name != "fifo"}
        by_sampler = {**tuned, **by_sampler}
    if maker["guidance_scale"] is None:
        maker = {**maker, "guidance_scale": defaults.get("guidance_scale")}
    made = MakerSettings(
        **{**maker, "device": usable_device(maker["device"])}, num_inference_steps=one, sampler_steps=by_sampler,
        sampler_settings=parse_sampler_settings(sampler_settings, names),
    )  # fmt: skip
    content: Any
    if timelines is not None:
        content = read_timelines(timelines, made.num_frames, limit)
        blend_names = parse_names(blends, BLENDS, "--blends")
    else:
        assert prompts is not None
        content, blend_names = read_prompts(prompts, limit), None
    jobs = plan_jobs(content, names, parse_attention(attention), blends=blend_names, seeds=seeds, seed=seed)
    jobs = [job for job in jobs if job.number % shard[1] == shard[0]]
    if not jobs:
        raise ValueError(f"--shard {shard[0]}/{shard[1]} has no prompt; write at most as many shards as prompts")
    texts = [text for one in content for text in ([one] if isinstance(one, str) else one.texts)]
    reader = _reader(texts) if use_reader and made.model == "moving-emoji" and pipe is None else None
    scorer = VideoScorer(wanted, reader)
    settings = {**made.record(), "fps": fps, "seeds": seeds, "seed": seed}
    rows = VideoRows(out, settings, shard)
    found = run_jobs(jobs, rows, lambda: VideoMaker(made, enable, pipe), scorer, fps=fps, on_row=_progress())
    return finish(found, out, settings, scorer, reference, made.device)


def _baseline_first(rows: list[dict[str, Any]], settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Stored rows of finished folders in the order in which the folders were given; others as they are."""
    from ..eval.video_run import folder_names

    names = folder_names([Path(one) for one in settings.get("folders", [])])
    return sorted(rows, key=lambda row: names.index(row["group"]) if row["group"] in names else len(names))


def finish(
    rows: list[dict[str, Any]], folder: Path, settings: dict[str, Any], scorer: Any, reference: Path | None,
    device: str = "cpu",
) -> dict[str, Any]:  # fmt: skip
    """Tables and statistics of measured rows, written to result.json too; `device` made the videos."""
    from ..eval.speed import provenance
    from ..eval.video_compare import compare_groups, frechet_of_groups, summarise_groups
    from ..eval.video_run import load_clip_rows

    if not rows:
        raise ValueError(f"{folder} holds no measured videos yet; run the command that fills it")
    earlier = _result(folder)
    describe = scorer.describe() if scorer is not None else earlier.get("scorer")
    if describe is None:
        raise ValueError(f"{folder} holds rows and no result yet; let the command that fills it come to its end")
    base = None
    if reference is not None:
        base = _reference_clips(reference, scorer)
    groups = sorted({row["group"] for row in rows}, key=[row["group"] for row in rows].index)
    ordered = [row for group in groups for row in rows if row["group"] == group]
    result: dict[str, Any] = {
        "groups": summarise_groups(ordered),
        "comparisons": compare_groups(ordered),
        "frechet": frechet_of_groups(ordered, lambda own: load_clip_rows(folder, own), base),
        "settings": settings,
        "scorer": describe,
        "provenance": provenance(device, settings.get("dtype", "float32"), int(settings.get("seed") or 0))
        if scorer is not None else earlier.get("provenance"),
        "out": str(folder),
    }  # fmt: skip
    (folder / "result.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    return {**result, "rows": ordered}


def _result(folder: Path) -> dict[str, Any]:
    path = folder / "result.json"
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found


def _reference_clips(folder: Path, scorer: Any) -> Any:
    """TransNetV2 rows of all clips of a folder of videos."""
    import numpy as np

    from ..eval.video_features import CLIP_FRAMES, clip_rows
    from ..eval.video_files import find_videos, read_video

    if scorer is None or scorer.shots is None:
        raise ValueError("--reference compares TransNetV2 features of clips; leave --no-shots out")
    found = []
    for path in find_videos(folder).values():
        frames = read_video(path).frames
        if len(frames) >= CLIP_FRAMES:
            found.append(clip_rows(scorer.shots(frames)[1]))
    if not found:
        raise ValueError(f"{folder} holds no video of {CLIP_FRAMES} frames; give longer ones as --reference")
    return np.concatenate(found)


def _reader(texts: Iterable[str]) -> Any:
    """The caption reader of moving-emoji, if it knows the texts."""
    from ..eval.video_text import load_text_reader

    reader = load_text_reader()
    if reader is not None:
        try:
            for text in set(texts):
                reader.check(text)
        except ValueError as error:
            raise ValueError(f"{error}. --no-reader measures captions outside the grammar without it") from error
    return reader


def _captions(path: Path) -> dict[str, str]:
    if not path.is_file():
        raise ValueError(f"--captions {path} is no file")
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError as error:
        raise ValueError(f"--captions {path} is no JSON: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(one, str) for one in found.values()):
        raise ValueError(f'--captions {path} must map names of videos to texts, as in {{"0001": "a red ball"}}')
    return found


def _steps(text: str | None, samplers: list[str]) -> tuple[int | None, dict[str, int]]:
    """--steps: one number, or some by sampler."""
    if text is None:
        return None, {}
    if text.isdigit() and int(text) > 0:
        return int(text), {}
    found = {}
    for piece in text.split(","):
        name, sign, value = piece.strip().partition("=")
        if not sign or not value.isdigit() or int(value) < 1 or name not in samplers:
            raise ValueError(
                f"--steps is {text!r}; write a number, or one per sampler of --samplers, as in "
                f"{','.join(f'{one}=16' for one in samplers)}"
            )
        found[name] = int(value)
    return None, found


def _progress() -> Callable[[int, int, dict[str, Any]], None]:
    from tqdm import tqdm

    bar = tqdm(total=0, unit="video", file=sys.stderr, disable=None)

    def show(done: int, total: int, row: dict[str, Any]) -> None:
        bar.total, bar.n = total, done
        bar.set_postfix_str(row["group"][:40], refresh=False)
        bar.refresh()
        if done == total:
            bar.close()

    return show


def _write_vbench(target: Path, folder: Path, rows: list[dict[str, Any]]) -> list[str]:
    """One VBench folder per group."""
    from ..eval.vbench import write_vbench
    from ..eval.video_plan import slug

    paths = []
    for group in dict.fromkeys(row["group"] for row in rows):
        counts: dict[str, int] = {}
        videos = []
        for row in (one for one in rows if one["group"] == group):
            text = row.get("prompt") or row["item"].replace("/", "_")
            videos.append((text, counts.setdefault(text, 0), folder / row["file"]))
            counts[text] += 1
        paths.append(str(write_vbench(target / slug(group), videos)))
    return paths
