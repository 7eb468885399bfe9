"""A saved tiny pipeline and a way to run commands in this process."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from mediaspec.rules import CoolSDRule
from tests.pipelines import tiny


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    tiny.text_pipeline(rule=CoolSDRule(delta=1.2), num_draft_tokens=3).save_pretrained(folder)
    return folder


@pytest.fixture
def command():
    from mediaspec.cli import app

    def run(*arguments: object):
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return run
