"""Every Python example of the README runs, and every command it shows exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = sorted(set(re.findall(r"^mediaspec ((?:[a-z]+ ?)+)", README, re.MULTILINE)))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda text: text.strip().splitlines()[-1][:40])
def test_python_examples_run(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {}
    exec(compile(example, "README.md", "exec"), scope)
    assert "out" in scope


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_exist(command: str) -> None:
    from mediaspec.cli import app

    result = CliRunner().invoke(app, [*command.split(), "--help"])
    assert result.exit_code == 0, result.output


def test_the_readme_has_no_unfilled_gap() -> None:
    assert not re.search(r"[A-Z]+-GOES?-HERE|NOT-HERE", README)


def test_the_rule_of_the_contributing_guide_passes_its_suite() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    exec(compile("\n".join(blocks), "CONTRIBUTING.md", "exec"), {})
