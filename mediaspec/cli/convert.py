"""`mediaspec convert llamagen`: published checkpoint files to a pipeline folder, in one command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .errors import plain_errors

__all__ = ["app"]

app = typer.Typer(help="Turn published checkpoints into pipeline folders.", no_args_is_help=True)


@app.callback()
def _convert() -> None:
    """Turn published checkpoints into pipeline folders."""


@app.command()
def llamagen(
    gpt: Annotated[Path, typer.Option(help="Transformer file, e.g. t2i_XL_stage2_512.pt.")],
    vq: Annotated[Path, typer.Option(help="Image tokenizer file, e.g. vq_ds16_t2i.pt.")],
    out: Annotated[Path, typer.Option(help="New folder of the pipeline.")],
    preset: Annotated[
        str | None, typer.Option(help="GPT-B, -L, -XL, -XXL, -XXXL, -1B, -3B or -7B; default: read off the weights.")
    ] = None,
    condition: Annotated[str | None, typer.Option(help="text or class; default: read off the weights.")] = None,
    text_encoder: Annotated[
        str | None, typer.Option(help="T5 folder or repository of a text model; default: google/flan-t5-xl.")
    ] = None,
    image_size: Annotated[
        int | None, typer.Option(help="256, 384 or 512 pixels; default: read off the name of --gpt.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="float16, bfloat16 or float32 of transformer and text encoder; default: the files' own."),
    ] = None,
    rule: Annotated[
        str, typer.Option(help="Saved acceptance rule: coupled, exact, cool_sd:delta=1.1, ...")
    ] = "coupled",
    drafter: Annotated[str, typer.Option(help="jacobi (needs no trained head) or none.")] = "jacobi",
    num_draft_tokens: Annotated[int, typer.Option(help="Tokens drafted per round.")] = 8,
) -> None:
    """Write a pipeline folder from published LlamaGen files.

    The folder carries LlamaGen's own sampling: class models top-k 2000 and guidance 4, text models top-k 1000 and
    guidance 7.5. It appears when it is complete.
    """
    with plain_errors("Nothing was written."):
        chosen = parse_rule(rule)
        from ..pipelines.conversion import convert_llamagen

        done = convert_llamagen(
            gpt, vq, out, preset=preset, condition=condition, text_encoder=text_encoder, image_size=image_size,
            dtype=dtype, rule=chosen, drafter=drafter, num_draft_tokens=num_draft_tokens,
        )  # fmt: skip
        typer.echo(
            f"{done.folder}: {done.preset}, {done.condition}, {done.image_size} pixels a side, "
            f"{done.dtype}, {done.nbytes / 1e9:.2f} GB; rule {rule}, drafter {drafter}"
        )
        caption = "207" if done.condition == "class" else '"a red apple on a table"'
        typer.echo(f"try: mediaspec generate image {caption} --model {done.folder}")
        if done.condition == "text":
            typer.echo("Captions reach the text encoder as written; the published text models learnt lower-case ones.")


def parse_rule(text: str) -> Any:
    """The rule written as `name` or `name:key=value,...`.

    Raises:
        ValueError: several rules, an unknown one, or settings that belong to other options.
    """
    from ..eval.rulespec import parse_rules
    from ..rules import make_rule

    specs = parse_rules(text)
    if len(specs) != 1 or specs[0].name == "plain":
        raise ValueError(f"--rule {text}: give one acceptance rule; a pipeline without speculation is --drafter none")
    if specs[0].drafter is not None or specs[0].call_settings():
        raise ValueError(f"--rule {text}: write the drafter as --drafter and the draft length as --num-draft-tokens")
    return make_rule(specs[0].name, **specs[0].rule_settings())
