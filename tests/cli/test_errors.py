"""How commands fail."""

from __future__ import annotations

import pytest
import typer

from mediaspec.cli.errors import plain_errors


@pytest.mark.parametrize("kind", [ValueError, TypeError, OSError, ImportError, ModuleNotFoundError])
def test_what_the_user_can_mend_is_one_line(kind: type[Exception], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as left, plain_errors():
        raise kind("write: pip install 'mediaspec[video]'")
    assert left.value.exit_code == 2
    assert capsys.readouterr().err == "error: write: pip install 'mediaspec[video]'\n"


def test_a_fault_of_ours_keeps_its_traceback() -> None:
    with pytest.raises(KeyError), plain_errors():
        raise KeyError("x")
