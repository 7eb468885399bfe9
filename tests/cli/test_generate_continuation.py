"""`mediaspec generate continuation`: errors speak of options, not of Python."""

from __future__ import annotations

from pathlib import Path

import pytest

from mediaspec.cli.continuation import on_command_line
from mediaspec.pipelines.video_history import VideoHistory
from tests.pipelines.tiny_worlds import frame_world

SHORT = ("--num-inference-steps", 1, "--num-frames", 4, "--context", 5, "--device", "cpu")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("worlds") / "panoroom" / "pack_k2"
    frame_world("pack_k2").save_pretrained(folder)
    return folder


def test_errors_name_options(command, world: Path, tmp_path: Path) -> None:
    def told(*more: object) -> str:
        failed = command("generate", "continuation", world, *SHORT, *more)
        assert failed.exit_code == 2, failed.output
        return failed.stderr

    out = ("--out", tmp_path / "out")
    assert command("generate", "continuation", world, *SHORT, *out).exit_code == 0
    other = told(*out, "--seed", 3)
    assert "seed=0 (asked: 3)" in other and "--out" in other and "overwrite" not in other
    assert "--threads 0" in told("--threads", 0)
    none = told("--memory", "none", "--out", tmp_path / "none")
    assert "--memory none" in none and "--keep" in none
    assert "--memory none" in told("--memory", "none", "--estimate")
    (tmp_path / "file").write_text("")
    assert "cannot write to" in told("--out", tmp_path / "file")


def test_advice_is_for_the_command() -> None:
    made = on_command_line("p holds work; finish it, choose another output_path, or write resume=False to begin again")
    assert made == "p holds work; finish it, or choose another --out"
    assert on_command_line("p is taken; choose another output_path") == "p is taken; choose another --out"


def test_a_history_names_only_what_differs() -> None:
    history = VideoHistory.__new__(VideoHistory)
    history.settings = {"memory": {"name": "frame_cache", "keep": 16}, "height": 64}
    with pytest.raises(ValueError, match=r"made with memory\.keep=16 \(now: None\); go on") as caught:
        history.check({"memory": {"name": "frame_cache", "keep": None}, "height": 64})
    assert "frame_cache" not in str(caught.value)
