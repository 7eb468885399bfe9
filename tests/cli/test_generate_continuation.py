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


def test_errors_name_what_was_typed_and_leave_no_file_behind(command, world: Path, tmp_path: Path) -> None:
    base = ("generate", "continuation", world, *SHORT, "--out", tmp_path / "new" / "out")
    for given, message in (
        (("--schedule", "fifo"), "--num-inference-steps 1, and the steps of schedule 'fifo' follow from its settings "
         "(frames, parts, lookahead); leave --num-inference-steps out"),
        (("--schedule", "fifo", "--estimate"), "leave --num-inference-steps out"),
        (("--prompt", "a ball"), "--prompt and --negative-prompt: a frame world reads no texts"),
        (("--negative-prompt", "a ball"), "--prompt and --negative-prompt: a frame world reads no texts"),
        (("--num-frames", 0), "--num-frames 0; write"),
        (("--guidance-scale", 3), "--guidance-scale 3.0; a frame"),
        (("--checkpoint-every", 0), "--checkpoint-every 0; write"),
        (("--num-videos", 0), "--num-videos 0; write"),
        (("--height", 32), "--height 32"),
        (("--fps", 0), "--fps 0.0; it"),
        (("--history", tmp_path / "none", "--actions", "left", "--poses", tmp_path / "p.json"), "--poses"),
    ):  # fmt: skip
        failed = command(*base, *given)
        assert failed.exit_code == 2 and message in failed.stderr, failed.output
        assert not list(tmp_path.iterdir()), given
    (tmp_path / "p.json").write_text("[[0, 512], [8, 512], [16, 512], [24, 512]]")
    failed = command(*base, "--history", tmp_path / "none", "--actions", "left", "--poses", tmp_path / "p.json")
    assert failed.exit_code == 2 and "there is no history" in failed.stderr and not (tmp_path / "new").exists()


def test_weights_that_are_not_shipped_name_their_training(command, tmp_path: Path) -> None:
    for kind in (("continuation", "vizdoom/pack_k4"), ("video", "a taxi", "--model", "vizdoom/pack_k4")):
        failed = command("generate", *kind, "--device", "cpu", "--out", tmp_path / "out")
        assert failed.exit_code == 2 and "not part of the package" in failed.stderr, failed.output
        assert "tools/arvdm/train_frame_dit.py --world vizdoom --memory pack_k4" in failed.stderr
        assert not list(tmp_path.iterdir())


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
