"""How commands fail: one line on stderr and exit code 2 for wrong input, never a traceback the user can mend."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import typer

__all__ = ["plain_errors", "set_threads"]


def _show(message: Warning | str, *_: object, **__: object) -> None:
    typer.echo(f"warning: {message}", err=True)


def set_threads(threads: int | None) -> None:
    """CPU threads of torch from --threads; None leaves them.

    Raises:
        ValueError: fewer than one.
    """
    if threads is None:
        return
    if threads < 1:
        raise ValueError(f"--threads {threads}; write 1 or more")
    import torch

    torch.set_num_threads(threads)


@contextmanager
def plain_errors(after_interrupt: str = "") -> Iterator[None]:
    """Prints ValueError, TypeError and OSError as `error: ...` and leaves with code 2; Ctrl-C leaves with 130.

    So does ImportError: its message names the extra to install.

    Warnings are printed as `warning: ...`, each once, without the line of code that gave them.

    Args:
        after_interrupt: what to tell after Ctrl-C, for instance how to go on.
    """
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show
            yield
    except (ValueError, TypeError, OSError, ImportError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    except KeyboardInterrupt:
        typer.echo(f"interrupted. {after_interrupt}".rstrip(), err=True)
        raise typer.Exit(130) from None
