"""The `mediaspec` command: generate, convert, bench, eval, inspect, demo and doctor, one file each.

A command module is imported with its siblings but may import torch only inside its functions, so `--help` and
`--version` answer at once.
"""

from __future__ import annotations

from typing import Annotated

import typer

from . import bench, continuation, convert, demo, doctor, eval, generate, inspect, text, video

__all__ = ["app", "main"]

app = typer.Typer(
    name="mediaspec",
    help="Speculative decoding for generative media, with a stated guarantee.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
generate.app.command(name="text")(text.text)
generate.app.command(name="video")(video.video)
generate.app.command(name="continuation")(continuation.continuation)
app.add_typer(generate.app, name="generate")
app.add_typer(convert.app, name="convert")
app.add_typer(bench.app, name="bench")
app.add_typer(eval.app, name="eval")
app.command(name="inspect")(inspect.inspect)
app.command(name="demo")(demo.demo)
app.command(name="doctor")(doctor.doctor)


def _version(asked: bool) -> None:
    if asked:
        from .. import __version__

        typer.echo(f"mediaspec {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Speculative decoding for generative media, with a stated guarantee."""


def main() -> None:
    """Entry point of the `mediaspec` script."""
    app()
