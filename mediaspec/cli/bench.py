"""`mediaspec bench`: speed as a ratio to plain decoding, with drift beside it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from . import bench_text
from .errors import plain_errors

__all__ = ["app"]

app = typer.Typer(help="Time rules against plain decoding.", no_args_is_help=True)
app.command(name="text")(bench_text.text)

RULES = "plain,exact,coupled,cool_sd,lantern++,gsd"


@app.callback()
def _bench() -> None:
    """Time rules against plain decoding."""


@app.command()
def image(
    rules: Annotated[
        str, typer.Option(help="E.g. plain,exact,cool_sd:delta=1.1,coupled@jacobi:num_draft_tokens=8.")
    ] = RULES,
    repeats: Annotated[int, typer.Option(help="Timed rounds over all rules; a warm-up round comes first.")] = 5,
    batch_size: Annotated[int, typer.Option(help="Pictures per call.")] = 1,
    num_images: Annotated[int | None, typer.Option(help="Pictures per rule in all, instead of --repeats.")] = None,
    peer: Annotated[bool, typer.Option(help="Also time transformers' generate on the same weights.")] = True,
    prompts: Annotated[
        Path | None, typer.Option(help="Captions: one a line, or .jsonl. Default: the model's held-out ones.")
    ] = None,
    model: Annotated[str, typer.Option(help="Embedded name, folder or repository.")] = "emoji-64",
    seed: Annotated[int, typer.Option(help="Picture k gets seed + k.")] = 0,
    drafter: Annotated[
        str | None, typer.Option(help="Drafter of entries that name none; default: the saved one.")
    ] = None,
    num_draft_tokens: Annotated[int | None, typer.Option(help="Tokens drafted per round.")] = None,
    guidance_scale: Annotated[float | None, typer.Option(help="Classifier-free guidance; 1 is off.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_k: Annotated[int | None, typer.Option(help="0 keeps all tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="1 keeps all tokens.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, ...; auto: cuda where there is one.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Folder for bench.json and speed_drift.png.")] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Where the speed-drift plot goes; default: OUT/speed_drift.png.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Last line of stdout is the JSON list.")] = False,
) -> None:
    """Time rules in turn, median over repeats.

    Nothing else should run meanwhile; what did is measured and reported.
    """
    with plain_errors():
        if num_images is not None:
            repeats = -(-num_images // batch_size) if batch_size > 0 else 0
        values = {
            "model": model, "num_draft_tokens": num_draft_tokens, "guidance_scale": guidance_scale, "dtype": dtype,
            "temperature": temperature, "top_k": top_k, "top_p": top_p, "device": device, "drafter": drafter,
        }  # fmt: skip
        _writable(out, plot)
        rows = measure(rules, values, repeats=repeats, batch_size=batch_size, seed=seed, prompts=prompts, peer=peer)
        write(rows, out, plot, title=f"{model}, batch {batch_size}")
        if as_json:
            typer.echo(json.dumps(rows))
        else:
            from ..eval.report import bench_table

            typer.echo(bench_table(rows))


def measure(
    rules: str,
    values: dict[str, Any],
    *,
    repeats: int,
    batch_size: int,
    seed: int,
    prompts: Path | None,
    peer: bool,
    load: Any = None,
) -> list[dict[str, Any]]:
    """Rows of the speed table.

    Args:
        rules: rule list.
        values: model, dtype, device, drafter and sampling as on the command line.
        repeats, batch_size, seed, prompts, peer: as on the command line.
        load: makes the pipeline from `RunSettings`; default `eval.generation.load_pipeline`.
    """
    from ..eval.generation import load_pipeline
    from ..eval.rulespec import RuleSpec, check_names, parse_rules
    from ..eval.runners import PEER, peer_runner, pipeline_runner
    from ..eval.speed import MachineWatch, Run, interleave, provenance, summarise
    from ..rules import available_rules
    from .eval import captions_of, rule_run_settings

    specs = parse_rules(rules)
    check_names(specs, ["plain", PEER, *available_rules()])
    if "plain" not in [spec.text for spec in specs]:
        specs.insert(0, RuleSpec("plain", "plain"))  # the ratio's numerator
    if peer and PEER not in [spec.name for spec in specs]:
        specs.append(RuleSpec(PEER, PEER))
    settings = {spec.text: rule_run_settings(spec, values) for spec in specs if spec.name != PEER}
    texts = captions_of(values["model"], prompts, max(1, repeats * batch_size))
    plain = settings["plain"]
    pipe = (load or load_pipeline)(plain)
    runners = [
        peer_runner(pipe, plain) if spec.name == PEER else pipeline_runner(pipe, spec.text, settings[spec.text])
        for spec in specs
    ]

    def show(repeat: int, label: str, run: Run) -> None:
        typer.echo(f"repeat {repeat + 1}/{repeats}  {label}  {run.seconds:.3f} s", err=True)

    with MachineWatch() as watch:
        runs = interleave(runners, texts, repeats=repeats, batch_size=batch_size, seed=seed, on_run=show)
    for sentence in watch.warnings():
        typer.echo(f"warning: {sentence}", err=True)
    record = {**provenance(plain.device, plain.dtype, seed), "batch_size": batch_size, "model": values["model"]}
    return [
        {**row, "batch_size": batch_size, "machine_watch": watch.as_dict(), "provenance": record}
        for row in summarise(runs)
    ]


def _writable(out: Path | None, plot: Path | None) -> None:
    """Refuses an unwritable place before anything is timed."""
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    for folder in {out, plot.parent if plot is not None else None} - {None}:
        assert folder is not None
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            raise ValueError(f"{folder} is no folder that can be written to; create it, or choose another place")


def write(rows: list[dict[str, Any]], out: Path | None, plot: Path | None, title: str) -> None:
    """Files of a run: OUT/bench.json, and the plot."""
    from ..eval.report import plot_speed_drift

    if out is not None:
        (out / "bench.json").write_text(json.dumps(rows, indent=1) + "\n")
        plot = plot if plot is not None else out / "speed_drift.png"
    if plot is not None:
        plot_speed_drift(rows, plot, title)
