"""`mediaspec eval`: quality of rules, partial results of several workers, and tables."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from . import eval_memory, eval_text, eval_video
from .errors import plain_errors

__all__ = ["app"]

app = typer.Typer(
    help="Measure pictures, texts and videos: distances, caption scores, perplexity, consistency over time.",
    no_args_is_help=True,
)
app.command(name="memory")(eval_memory.memory)
app.command(name="text")(eval_text.text)
app.command(name="video")(eval_video.video)

RULES = "plain,exact,cool_sd:delta=1.1"


@app.command()
def image(
    rules: Annotated[
        str, typer.Option(help="Rules to measure, e.g. plain,exact,cool_sd:delta=1.1,coupled@jacobi.")
    ] = RULES,
    num_images: Annotated[int, typer.Option(help="Pictures per rule.")] = 2048,
    out: Annotated[Path, typer.Option(help="Folder of pictures, manifests and features; run again to go on.")] = Path(
        "eval"
    ),
    prompts: Annotated[
        Path | None, typer.Option(help="Captions: one a line, or .jsonl. Default: the model's held-out ones.")
    ] = None,
    features: Annotated[str, typer.Option(help="efficientnet, inception (true FID) or clip.")] = "efficientnet",
    weights: Annotated[
        Path | None, typer.Option(help="Weights of inception or folder of clip, where not in a cache.")
    ] = None,
    reference: Annotated[
        Path | None, typer.Option(help="Folder of PNGs or a .npz; default: a second plain pass with other seeds.")
    ] = None,
    captions: Annotated[bool, typer.Option(help="Score captions with the emoji-64 reader (that model only).")] = True,
    model: Annotated[str, typer.Option(help="Embedded name, folder or repository.")] = "emoji-64",
    seed: Annotated[int, typer.Option(help="Picture k gets seed + k.")] = 0,
    batch_size: Annotated[int, typer.Option(help="Pictures decoded together; changes no picture.")] = 16,
    num_draft_tokens: Annotated[int | None, typer.Option(help="Tokens drafted per round.")] = None,
    guidance_scale: Annotated[float | None, typer.Option(help="Classifier-free guidance; 1 is off.")] = None,
    temperature: Annotated[float | None, typer.Option()] = None,
    top_k: Annotated[int | None, typer.Option()] = None,
    top_p: Annotated[float | None, typer.Option()] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, ...; auto: cuda where there is one.")] = "auto",
    bootstrap: Annotated[int, typer.Option(help="Resamples for the error of the Frechet distance.")] = 20,
    shard: Annotated[
        str | None, typer.Option(help="i/n: make this worker's pictures and features only; then eval merge.")
    ] = None,
    i_know: Annotated[
        bool, typer.Option("--i-know", help="Allow fewer than 2,048 pictures, too few for a distance.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Last line of stdout is one JSON object.")] = False,
) -> None:
    """Generate pictures per rule and measure them."""
    with plain_errors("Run the same command again to go on."):
        values = {
            "model": model, "num_draft_tokens": num_draft_tokens, "guidance_scale": guidance_scale, "dtype": dtype,
            "temperature": temperature, "top_k": top_k, "top_p": top_p, "device": device,
        }  # fmt: skip
        result = evaluate(
            rules, num_images, out, values, prompts=prompts, features=features, weights=weights, reference=reference,
            captions=captions, seed=seed, batch_size=batch_size, bootstrap=bootstrap, shard=shard, i_know=i_know,
        )  # fmt: skip
        if as_json:
            typer.echo(json.dumps(result))
        elif "shards" in result:
            for path in result["shards"]:
                typer.echo(path)
        else:
            from ..eval.report import eval_table

            typer.echo(eval_table(result))


@app.command()
def merge(
    files: Annotated[list[Path], typer.Argument(help="Feature files (.npz) of the workers.")],
    out: Annotated[Path, typer.Option(help="The joined file.")] = Path("merged.npz"),
    as_json: Annotated[bool, typer.Option("--json", help="Last line of stdout is one JSON object.")] = False,
) -> None:
    """Join feature files of several workers; the result equals that of one worker, bit for bit."""
    with plain_errors():
        from ..eval.shards import FeatureShard
        from ..eval.shards import merge as join

        joined = join([FeatureShard.load(file) for file in files])
        joined.save(out)
        facts = {"file": str(out), "images": len(joined.ids), "features": joined.facts["features"]}
        typer.echo(json.dumps(facts) if as_json else f"{out}: {facts['images']} images")


@app.command()
def distance(
    file: Annotated[Path, typer.Argument(help="Feature file (.npz) of the pictures.")],
    reference: Annotated[Path, typer.Argument(help="Feature file (.npz) of the reference.")],
    bootstrap: Annotated[int, typer.Option(help="Resamples for the error.")] = 20,
    i_know: Annotated[bool, typer.Option("--i-know", help="Allow fewer than 2,048 pictures.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Last line of stdout is one JSON object.")] = False,
) -> None:
    """Frechet and kernel distance of two feature files, with floor and error."""
    with plain_errors():
        from ..eval.quality import compare
        from ..eval.shards import FeatureShard

        shards = [FeatureShard.load(path) for path in (file, reference)]
        refuse_few(min(len(s.ids) for s in shards), i_know)
        measured, _ = compare(*shards, rounds=bootstrap)
        result = {
            **measured,
            "images": len(shards[0].ids),
            "reference": len(shards[1].ids),
            "features": shards[0].facts["features"],
        }
        if as_json:
            typer.echo(json.dumps(result))
            return
        title = result["features"]["title"]
        for name, key in ((title, "frechet"), ("KID", "kid")):
            entry = measured[key]
            typer.echo(f"{name}: {entry['value']:.5g} ± {entry['error']:.2g}, half against half {entry['floor']:.3g}")


@app.command()
def report(files: Annotated[list[Path], typer.Argument(help="JSON of mediaspec bench and mediaspec eval.")]) -> None:
    """Print result files as markdown tables."""
    with plain_errors():
        from ..eval.report import report as tables

        typer.echo(tables(files))


def refuse_few(count: int, i_know: bool) -> None:
    """Raises ValueError for too few pictures, unless told to go on."""
    from ..eval.quality import MIN_IMAGES

    if count < MIN_IMAGES and not i_know:
        raise ValueError(
            f"{count} pictures are too few: with fewer than {MIN_IMAGES} the bias of a Frechet distance exceeds what "
            "rules differ by; raise --num-images, or write --i-know to get the number all the same"
        )


def evaluate(
    rules: str,
    num_images: int,
    out: Path,
    values: dict[str, Any],
    *,
    prompts: Path | None,
    features: str,
    weights: Path | None,
    reference: Path | None,
    captions: bool,
    seed: int,
    batch_size: int,
    bootstrap: int,
    shard: str | None,
    i_know: bool,
) -> dict[str, Any]:
    """Generates, extracts and measures; arguments as on the command line."""
    from ..eval.clip import load_clip
    from ..eval.features import load_extractor
    from ..eval.quality import PictureSet, compare, feature_file, folder_features, rule_row, slug
    from ..eval.retrieval import load_reader, parse_caption
    from ..eval.rulespec import check_names, parse_rules
    from ..eval.shards import FeatureShard
    from ..eval.speed import provenance
    from ..rules import available_rules
    from .generate import parse_shard, run_settings

    rank, world = parse_shard(shard)
    refuse_few(num_images, i_know or world > 1)
    if num_images < 4 or bootstrap < 2:
        raise ValueError(
            f"--num-images is {num_images} and --bootstrap {bootstrap}; give at least 4 pictures (two halves with a "
            "covariance) and 2 resamples (a spread)"
        )
    specs = parse_rules(rules)
    check_names(specs, ["plain", *available_rules()])
    settings = {spec.text: rule_run_settings(spec, values) for spec in specs}
    plain = run_settings({**values, "rule": "plain"})
    for one in settings.values():
        one.call_keywords()  # refuses wrong rule settings before hours of work
    texts = captions_of(values["model"], prompts, num_images)
    reader = None
    if captions and values["model"] == "emoji-64":
        reader = load_reader()
        try:
            for text in set(texts):
                parse_caption(text, reader.vocabulary)
        except ValueError as error:
            raise ValueError(
                f"{error}. --no-captions measures prompts outside the grammar without the reader"
            ) from error
    clip = load_clip(weights) if features == "clip" else None
    extractor = clip.extractor() if clip is not None else load_extractor(features, weights)

    def pictures(label: str, wanted: Any, first_seed: int) -> PictureSet:
        rows = _generate(out / label, label, wanted, texts, first_seed, batch_size, (rank, world))
        return PictureSet(out / label, rows)

    base, what = None, "plain decoding of the same model, other seeds"
    if reference is not None:
        base = FeatureShard.load(reference) if reference.suffix == ".npz" else folder_features(reference, extractor)
        what = str(reference)
        refuse_few(len(base.ids), i_know)
    name = f"{features}.npz" if world == 1 else f"{features}.{rank}-of-{world}.npz"
    measured: dict[str, tuple[PictureSet, FeatureShard]] = {}
    for label, wanted in settings.items():
        found = pictures(slug(label), wanted, seed)
        measured[label] = (found, feature_file(found, out / f"{slug(label)}.{name}", extractor, {"rule": label}))
    if base is None:
        # 2^40 apart: no picture of the reference shares its random numbers with a measured one.
        found = pictures("reference", plain, seed + (1 << 40))
        base = feature_file(found, out / f"reference.{name}", extractor, {"rule": "plain"})
    if world > 1:
        folders = [slug(label) for label in settings] + ([] if reference is not None else ["reference"])
        return {"shards": [str(out / f"{folder}.{name}") for folder in folders]}
    rows, resampled = [], {}
    for label, (found, features_) in measured.items():
        distances, resampled[label] = compare(features_, base, rounds=bootstrap, seed=seed)
        rows.append({**rule_row(label, found, reader=reader, clip=clip, seed=seed), **distances})
    add_ratios(rows, resampled)
    return {
        "rules": rows,
        "num_images": num_images,
        "reference": {"what": what, "count": len(base.ids)},
        "features": extractor.describe(),
        "reader": None if reader is None else reader.facts.get("rendered_held_out_accuracy"),
        "settings": {label: one.record() for label, one in settings.items()},
        "provenance": provenance(plain.device, plain.dtype, seed),
    }


def rule_run_settings(spec: Any, values: dict[str, Any]) -> Any:
    """RunSettings of one entry of `--rules`: its own settings win over those of the command line."""
    from .generate import run_settings

    written = ",".join(f"{key}={value}" for key, value in spec.rule_settings().items())
    rule = f"{spec.name}:{written}" if written else spec.name
    drafter = spec.drafter if spec.drafter is not None else values.get("drafter")
    return run_settings(
        {**values, "rule": rule, "drafter": None if spec.name == "plain" else drafter, **spec.call_settings()}
    )


def add_ratios(rows: list[dict[str, Any]], resampled: dict[str, Any]) -> None:
    """Adds each rule's Frechet distance over plain's, with a paired bootstrap error, where plain was measured."""
    plain = next((row["frechet"]["value"] for row in rows if row["rule"] == "plain"), None)
    if not plain:
        return
    for row in rows:
        spread = (resampled[row["rule"]] / resampled["plain"]).std(ddof=1)
        row["frechet_ratio"] = {"value": row["frechet"]["value"] / plain, "error": float(spread)}


def captions_of(model: str, path: Path | None, count: int) -> list[str]:
    from ..eval.prompts import held_out_prompts, spread
    from .generate import read_prompts

    if path is None:
        return spread(held_out_prompts(model), count)
    found = []
    for number, entry in enumerate(read_prompts(None, path)):
        text = entry if isinstance(entry, str) else entry.get("prompt")
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{path}, prompt {number} is {entry!r}; write a caption, or an object with prompt")
        found.append(text)
    return spread(found, count)


def _generate(
    folder: Path, label: str, wanted: Any, texts: list[str], seed: int, batch_size: int, shard: tuple[int, int]
) -> list[dict[str, Any]]:
    """This worker's manifest rows, in order."""
    from tqdm import tqdm

    from ..eval.generation import generate_images
    from ..eval.manifest import make_items

    items = make_items(list(texts), seed=seed)
    with tqdm(total=len(items), desc=label, unit="image", file=sys.stderr, disable=None) as bar:

        def show(done: int, total: int) -> None:
            bar.total, bar.n = total, done
            bar.refresh()

        return generate_images(items, folder, wanted, batch_size=batch_size, shard=shard, on_batch=show).rows
