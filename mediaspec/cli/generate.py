"""`mediaspec generate image`: pictures and a resumable manifest."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from .errors import plain_errors

__all__ = ["app"]

app = typer.Typer(help="Generate pictures, texts and videos.", no_args_is_help=True)

# keys of a --config file, by the option's name, and their kinds; the file gives defaults, the command line wins
CONFIG_KEYS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("model", "rule", "drafter", "negative_prompt", "dtype", "device"), str),
    **dict.fromkeys(("num_draft_tokens", "top_k", "seed", "num_images", "batch_size"), int),
    **dict.fromkeys(("delta", "eps", "guidance_scale", "temperature", "top_p"), (int, float)),
    "tree": (int, str, list),
}
KINDS = {str: "text", int: "a whole number", (int, float): "a number", (int, str, list): "widths such as 3,2,1"}
DEFAULTS = {"model": "emoji-64", "seed": 0, "num_images": 1, "batch_size": 8, "dtype": "float32", "device": "auto"}


@app.callback()
def _generate() -> None:
    """Generate pictures, texts and videos."""


@app.command()
def image(
    prompts: Annotated[list[str] | None, typer.Argument(help="Captions (class numbers for class models).")] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option("--prompts", help="Captions from a file: text, one a line, or JSON lines with prompt, id, seed."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the pictures; run again to go on.")] = Path("out"),
    seed: Annotated[int | None, typer.Option(help="Seed of picture 0; picture k gets seed + k. Default 0.")] = None,
    num_images: Annotated[int | None, typer.Option(help="Pictures per prompt. Default 1.")] = None,
    rule: Annotated[
        str | None, typer.Option(help="plain, exact, coupled, cool_sd, lantern++, ...; also cool_sd:delta=1.1.")
    ] = None,
    delta: Annotated[float | None, typer.Option(help="Relaxation of cool_sd (implies --rule cool_sd).")] = None,
    eps: Annotated[float | None, typer.Option(help="Drift allowed per step, instead of delta.")] = None,
    drafter: Annotated[str | None, typer.Option(help="eagle, model, jacobi, none; default: the saved one.")] = None,
    num_draft_tokens: Annotated[int | None, typer.Option(help="Tokens drafted per round; 0 switches it off.")] = None,
    tree: Annotated[str | None, typer.Option(help="Draft tree as widths, e.g. 3,2,1.")] = None,
    guidance_scale: Annotated[float | None, typer.Option(help="Classifier-free guidance; 1 is off.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_k: Annotated[int | None, typer.Option(help="0 keeps all tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="1 keeps all tokens.")] = None,
    negative_prompt: Annotated[str | None, typer.Option(help="Text of the unconditional branch.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Pictures decoded together. Default 8.")] = None,
    model: Annotated[str | None, typer.Option(help="Embedded name, folder or repository. Default emoji-64.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16. Default float32.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, ...; default: cuda where there is one.")] = None,
    config: Annotated[str | None, typer.Option(help="YAML file with defaults, or a packaged preset.")] = None,
    shard: Annotated[str | None, typer.Option(help="i/n: this is worker i of n and takes every n-th picture.")] = None,
    shard_by: Annotated[str | None, typer.Option(help="index: the shard of this torchrun worker.")] = None,
    trace: Annotated[bool, typer.Option("--trace", help="Also draw how tokens came about, in OUT/trace.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Last line of stdout is one JSON object.")] = False,
) -> None:
    """Generate pictures of PROMPTS into OUT.

    Killed at any moment and run again, the command finishes with the same files as an undisturbed run.
    """
    given = {
        "model": model, "rule": rule, "delta": delta, "eps": eps, "drafter": drafter, "tree": tree, "seed": seed,
        "num_draft_tokens": num_draft_tokens, "guidance_scale": guidance_scale, "temperature": temperature,
        "top_k": top_k, "top_p": top_p, "negative_prompt": negative_prompt, "num_images": num_images,
        "batch_size": batch_size, "dtype": dtype, "device": device,
    }  # fmt: skip
    with plain_errors("Run the same command again to go on."):
        options = {name: value for name, value in given.items() if value is not None}
        file = read_config(config) if config else {}
        # a rule on the command line brings its own strength, and delta and eps stand for each other
        replaced = ("delta", "eps") if {"rule", "delta", "eps"} & set(options) else ()
        values = {**DEFAULTS, **{k: v for k, v in file.items() if k not in replaced}, **options}
        part = parse_shard(shard, shard_by)
        run(read_prompts(prompts, prompt_file), out, values, shard=part, trace=trace, as_json=as_json)


def run(
    prompts: list[str | dict[str, Any]],
    out: Path,
    values: dict[str, Any],
    *,
    shard: tuple[int, int],
    trace: bool,
    as_json: bool,
) -> None:
    """Generates and reports; arguments as on the command line, defaults filled in."""
    from tqdm import tqdm

    from ..eval.generation import generate_images
    from ..eval.manifest import make_items

    if values["num_images"] < 1:
        raise ValueError(f"--num-images must be at least 1, got {values['num_images']}")
    settings = run_settings(values)
    items = make_items(
        prompts, seed=values["seed"], num_images=values["num_images"], negative_prompt=values.get("negative_prompt")
    )
    with tqdm(total=len(items), unit="image", file=sys.stderr, disable=None if not as_json else False) as bar:

        def show(done: int, wanted: int) -> None:
            bar.total, bar.n = wanted, done
            bar.refresh()

        result = generate_images(
            items, out, settings, batch_size=values["batch_size"], shard=shard, trace=trace, on_batch=show
        )
    report = summary(result, out)
    if as_json:
        typer.echo(json.dumps(report))
        return
    for path in report["images"]:
        typer.echo(path)
    typer.echo(
        f"{result.made} made, {len(result.rows) - result.made} already there; {report['tokens']} tokens in "
        f"{report['target_calls']} target calls = {report['tokens_per_call']:.2f} per call; "
        f"{report['tokens_per_second']:.1f} tokens/s"
    )
    per_token = sum(row["stats"]["drift"] for row in result.rows) / max(report["tokens"], 1)
    typer.echo(
        f"guarantee {report['guarantee']}; drift from the model's own law (summed total variation) "
        f"{report['drift']:.4g} per picture, {report['drift_max']:.4g} at most, {per_token:.4f} per token"
    )


def summary(result: Any, out: Path) -> dict[str, Any]:
    """The `--json` object. Counts and drift are over all wanted pictures, seconds over those this run made."""
    stats = [row["stats"] for row in result.rows]
    tokens, calls = sum(s["tokens"] for s in stats), sum(s["target_calls"] for s in stats)
    drifts = [s["drift"] for s in stats]
    return {
        "images": [str(out / row["file"]) for row in result.rows],
        "tokens": tokens,
        "target_calls": calls,
        "tokens_per_call": round(tokens / max(calls, 1), 4),
        "drift": sum(drifts) / max(len(drifts), 1),
        "drift_max": max(drifts, default=0.0),
        "guarantee": stats[0]["guarantee"] if stats else "exact-tokens",
        "seconds": round(result.seconds, 4),
        "tokens_per_second": round(result.tokens / result.seconds, 2) if result.seconds else 0.0,
        "made": result.made,
        "seconds_by_phase": {name: round(value, 4) for name, value in result.phases.items()},
        "traces": [str(out / name) for row in result.rows for name in row.get("extra", {})],
    }


def run_settings(values: dict[str, Any]) -> Any:
    """RunSettings from option values."""
    from ..eval.generation import RunSettings
    from ..eval.rulespec import parse_rules

    rule, drafter, extra = values.get("rule"), values.get("drafter"), {}
    if rule is not None:
        specs = parse_rules(rule)
        if len(specs) != 1:
            raise ValueError(f"--rule takes one rule, got {rule!r}; `mediaspec bench image --rules` compares several")
        rule, extra = specs[0].name, dict(specs[0].settings)
        drafter = drafter if drafter is not None else specs[0].drafter
    relaxed = {key: values[key] for key in ("delta", "eps") if values.get(key) is not None}
    if relaxed and rule is None:
        rule = "cool_sd"
    if {"delta", "eps"} <= {*extra, *relaxed}:
        raise ValueError("delta and eps were both given, but eps replaces the schedule that delta scales; give one")
    device = values["device"]
    if device == "auto":
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    return RunSettings(
        model=values["model"], rule=rule, rule_settings={**extra, **relaxed}, drafter=drafter,
        tree=parse_tree(values.get("tree")), dtype=values["dtype"], device=device,
        **{k: values.get(k) for k in ("num_draft_tokens", "guidance_scale", "temperature", "top_k", "top_p")},
    )  # fmt: skip


def read_config(name: str) -> dict[str, Any]:
    """A YAML mapping from a file or from the packaged presets.

    Raises:
        ValueError: no such file or preset, no mapping, or an unknown key (the nearest valid one is named).
    """
    from importlib import resources

    import yaml

    from ..pipelines.keywords import nearest

    folder = resources.files("mediaspec") / "configs"
    packaged = folder / f"{name}.yaml"
    if Path(name).is_file():
        text = Path(name).read_text(encoding="utf-8")
    elif packaged.is_file():
        text = packaged.read_text(encoding="utf-8")
    else:
        names = [p.name.removesuffix(".yaml") for p in folder.iterdir() if p.name.endswith(".yaml")]
        raise ValueError(f"--config {name}: no such file or preset; {nearest(name, names)}")
    try:
        values = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"--config {name} is no YAML: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"--config {name} must hold `key: value` lines, got {type(values).__name__}")
    for key in values:
        if key not in CONFIG_KEYS:
            raise ValueError(f"--config {name} has an unknown key {key!r}; {nearest(str(key), CONFIG_KEYS)}")
        kind, value = CONFIG_KEYS[key], values[key]
        if isinstance(value, bool) or not isinstance(value, kind):
            raise ValueError(f"--config {name}: {key} is {value!r}; write {KINDS[kind]}, or leave the line out")
    return values


def read_prompts(prompts: list[str] | None, path: Path | None) -> list[str | dict[str, Any]]:
    """Prompts of the command line or of a file (JSON lines where the name ends in .jsonl, else one caption a line)."""
    if bool(prompts) == (path is not None):
        raise ValueError("give captions as arguments or in a file with --prompts, one of the two")
    if path is None:
        return list(prompts or [])
    if not path.is_file():
        raise ValueError(f"--prompts {path} is no file")
    # editors on Windows begin a file with a mark; JSON strings may hold separators at which splitlines() would cut
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").split("\n")]
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompts {path} is no UTF-8 text ({error}); save it as UTF-8") from error
    found: list[str | dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        if path.suffix != ".jsonl":
            found.append(line)
            continue
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}, line {number} is no JSON: {error}") from error
        if not isinstance(entry, (str, dict)):
            raise ValueError(
                f"{path}, line {number}: write a string or an object with prompt, id, seed, negative_prompt"
            )
        found.append(entry)
    if not found:
        raise ValueError(f"{path} holds no prompts")
    return found


def parse_shard(text: str | None, by: str | None = None) -> tuple[int, int]:
    """Reads `i/n`, or with by="index" torchrun's RANK and WORLD_SIZE; (0, 1) where both are omitted."""
    if by is not None:
        if by != "index" or text is not None:
            raise ValueError(f"--shard-by {by}: write --shard-by index, and then no --shard")
        try:
            text = f"{os.environ['RANK']}/{os.environ['WORLD_SIZE']}"
        except KeyError:
            raise ValueError("--shard-by index reads torchrun's RANK and WORLD_SIZE; or write --shard i/n") from None
    if text is None:
        return 0, 1
    rank, slash, world = text.partition("/")
    if not (slash and rank.isdecimal() and world.isdecimal() and int(rank) < int(world)):
        raise ValueError(f"--shard {text}: write i/n with 0 <= i < n, for instance 0/4")
    return int(rank), int(world)


def parse_tree(value: Any) -> tuple[int, ...] | None:
    """Widths of a draft tree from "3,2,1" or a list."""
    if value is None:
        return None
    try:
        parts = value.split(",") if isinstance(value, str) else [value] if isinstance(value, int) else list(value)
        return tuple(int(part) for part in parts)
    except (TypeError, ValueError):
        raise ValueError(f"--tree {value!r}: write the number of children per level, e.g. 3,2,1") from None
