"""Frames on disk: every kind of file, and the same bytes whenever a run is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

from mediaspec.pipelines import video_writer
from mediaspec.pipelines.video_writer import VideoWriter, video_paths

FRAMES = torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def make(path: Path, settings: dict[str, Any] | None = None, **options: Any) -> Path:
    """Writes six frames two by two and saves a state after each pair, as the pipeline does."""
    writer = VideoWriter(path, settings or {"seed": 0}, **options)
    if writer.complete:
        return writer.path
    state = writer.state()
    done = 0 if state is None else state["done"]
    assert done == writer.count
    while done < 6:
        writer.write(FRAMES[done : done + 2])
        done += 2
        writer.save({"done": done, "tensor": FRAMES[:1]})
    return writer.finish()


def test_a_folder_of_png_files(tmp_path: Path) -> None:
    path = make(tmp_path / "clip")
    files = sorted(path.glob("*.png"))
    assert [file.name for file in files] == [f"{i:06d}.png" for i in range(6)]
    read = np.stack([np.asarray(PIL.Image.open(file)) for file in files])
    np.testing.assert_array_equal(read, (FRAMES * 255).round().byte().permute(0, 2, 3, 1).numpy())
    assert sorted(file.name for file in tmp_path.iterdir()) == ["clip"]


def test_a_gif(tmp_path: Path) -> None:
    with PIL.Image.open(make(tmp_path / "clip.gif", fps=4)) as movie:
        assert movie.n_frames == 6 and movie.info["duration"] == 250
    assert sorted(file.name for file in tmp_path.iterdir()) == ["clip.gif", "clip.gif.json"]


def test_an_mp4(tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    import imageio.v2 as imageio

    path = make(tmp_path / "clip.mp4")
    with imageio.get_reader(path) as movie:
        read = np.stack([frame for frame in movie])  # list() would ask for a length, which is infinite
    assert read.shape == (6, 8, 8, 3)
    assert path.read_bytes() == make(tmp_path / "again.mp4").read_bytes()


@pytest.mark.parametrize("name", ["clip", "clip.gif"])
def test_a_kill_at_any_rename_or_picture_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    class Killed(BaseException):
        pass

    whole = make(tmp_path / "whole" / name)
    rename, save, remove = os.replace, PIL.Image.Image.save, video_writer.shutil.rmtree
    for fatal in range(0, 1000, 1 if name == "clip" else 3):
        left = [fatal]

        def count(function: Any, left: list[int] = left) -> Any:
            def counted(*args: Any, **kwargs: Any) -> Any:
                if left[0] == 0:
                    raise Killed
                left[0] -= 1
                return function(*args, **kwargs)

            return counted

        path = tmp_path / str(fatal) / name
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", count(rename))
            patch.setattr(PIL.Image.Image, "save", count(save))
            patch.setattr(video_writer.shutil, "rmtree", count(remove))
            try:
                make(path)
            except Killed:
                pass
            else:
                break
        make(path)
        files = sorted(file.name for file in whole.iterdir()) if whole.is_dir() else [name]
        for file in files:
            wanted, found = (whole / file, path / file) if whole.is_dir() else (whole, path)
            assert found.read_bytes() == wanted.read_bytes(), fatal
    assert fatal > 15


def test_other_settings_are_refused_and_named(tmp_path: Path) -> None:
    path = tmp_path / "clip.gif"
    VideoWriter(path, {"seed": 5})  # nothing was made with these
    VideoWriter(path, {"seed": 0}).write(FRAMES)
    with pytest.raises(ValueError, match=r"seed=0 \(asked: 1\)"):
        VideoWriter(path, {"seed": 1})
    make(path, {"seed": 1}, resume=False)
    with pytest.raises(ValueError, match="overwrite=True"):
        VideoWriter(path, {"seed": 2})
    make(path, {"seed": 2}, overwrite=True)
    assert VideoWriter(path, {"seed": 2}).complete
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "thesis").write_text("years of work")
    with pytest.raises(ValueError, match="folder with other files"):
        VideoWriter(tmp_path / "papers", {"seed": 2}, overwrite=True)
    foreign = tmp_path / "other.gif"
    foreign.write_bytes(b"a file of somebody")
    with pytest.raises(ValueError, match="is there already"):
        VideoWriter(foreign, {"seed": 2})
    assert foreign.read_bytes() == b"a file of somebody"


def test_damaged_parts_cost_time_but_not_the_video(tmp_path: Path) -> None:
    whole = make(tmp_path / "whole.gif").read_bytes()
    for damage in ("state", "frame", "last"):
        path = tmp_path / f"{damage}.gif"
        writer = VideoWriter(path, {"seed": 0})
        writer.write(FRAMES[:4])
        writer.save({"done": 4})
        if damage == "state":
            (writer.parts / "state.pt").write_bytes(b"half")
        elif damage == "frame":
            (writer.frames / "000001.png").unlink()
        else:
            (writer.frames / "000005.tmp").write_bytes(b"half")
        if damage == "last":
            make(path)
        else:
            with pytest.warns(UserWarning, match="from the beginning"):
                make(path)
        assert path.read_bytes() == whole
    path = tmp_path / "unreadable.gif"
    writer = VideoWriter(path, {"seed": 0})
    writer.write(FRAMES)
    (writer.frames / "000002.png").write_bytes(b"no picture")
    with pytest.raises(ValueError, match="000002.png cannot be read"):
        writer.finish()


def test_parts_that_a_kill_left_behind_a_finished_video_stand_in_nobodys_way(tmp_path: Path) -> None:
    path = make(tmp_path / "clip.gif")
    parts = tmp_path / "clip.gif.parts"

    def leave(settings: str | None) -> None:
        (parts / "frames").mkdir(parents=True)
        (parts / "state.pt").write_bytes(b"state")
        if settings is not None:
            (parts / "settings.json").write_text(settings)

    for settings in ((tmp_path / "clip.gif.json").read_text(), None):
        leave(settings)
        assert VideoWriter(path, {"seed": 0}).complete and not parts.exists()
    leave((tmp_path / "clip.gif.json").read_text())
    make(path, {"seed": 1}, overwrite=True)
    assert VideoWriter(path, {"seed": 1}).complete
    leave('{"seed": 2}')  # begun by somebody else: stays
    assert VideoWriter(path, {"seed": 1}).complete and parts.exists()


def test_parts_without_readable_settings_are_not_mixed_with_others(tmp_path: Path) -> None:
    writer = VideoWriter(tmp_path / "clip.gif", {"seed": 0})
    writer.write(FRAMES[:2])
    (writer.parts / "settings.json").write_text("{")
    with pytest.raises(ValueError, match="settings that cannot be read.*resume=False"):
        VideoWriter(tmp_path / "clip.gif", {"seed": 1})
    make(tmp_path / "clip.gif", {"seed": 1}, resume=False)


@pytest.mark.skipif(sys.platform == "win32", reason="there are no such locks")
def test_two_processes_do_not_write_one_video(tmp_path: Path) -> None:
    writer = VideoWriter(tmp_path / "clip.gif", {"seed": 0})
    assert not writer.parts.exists()
    writer.open()
    lock = writer.parts / "lock"
    VideoWriter(tmp_path / "clip.gif", {"seed": 0}).open()  # one process may begin again
    del writer
    code = f"import fcntl; f = open({str(lock)!r}, 'wb'); fcntl.lockf(f, 2); print('held', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match="another process is writing"):
            VideoWriter(tmp_path / "clip.gif", {"seed": 0}).open()
        other.communicate("\n")
    make(tmp_path / "clip.gif")


def test_parts_are_taken_away_as_long_as_nothing_is_in_them(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    first = VideoWriter(tmp_path / "a" / "b" / "clip.gif", {"seed": 0})
    first.withdraw()  # not begun
    first.open()
    assert first.frames.is_dir()
    first.withdraw()
    assert not list((tmp_path / "a").iterdir())
    first.open()
    first.write(FRAMES[:1])
    first.withdraw()
    assert VideoWriter(first.path, {"seed": 0}).parts.exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot write to .*file: it is a file"):
        VideoWriter(tmp_path / "file" / "clip.gif", {})


@pytest.mark.skipif(sys.platform == "win32", reason="there is no limit on the size of files")
def test_a_full_disk_while_ffmpeg_writes_costs_no_frame(tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    import resource

    frames = torch.rand(40, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    writer = VideoWriter(tmp_path / "clip.mp4", {"seed": 0})
    writer.write(frames)
    writer.save({})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
    try:
        with pytest.raises(OSError):
            writer.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "clip.mp4").exists()
    again = VideoWriter(tmp_path / "clip.mp4", {"seed": 0})
    assert again.state() == {} and again.count == 40
    assert again.finish().stat().st_size > 8192


def test_odd_sizes_become_an_mp4(tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    writer = VideoWriter(tmp_path / "clip.mp4", {})
    writer.write(FRAMES[:, :, :7, :5])
    assert writer.finish().exists()


def test_paths_of_several_videos(tmp_path: Path) -> None:
    assert video_paths("a/clip.mp4", 1) == [Path("a/clip.mp4")]
    assert video_paths("a/clip.mp4", 2) == [Path("a/clip-0000.mp4"), Path("a/clip-0001.mp4")]
    assert video_paths("a/clip", 2) == [Path("a/clip-0000"), Path("a/clip-0001")]
    with pytest.raises(ValueError, match="2 videos"):
        video_paths(["a", "a"], 2)
    with pytest.raises(ValueError, match="fps=0"):
        VideoWriter(tmp_path / "x.gif", {}, fps=0)
    with pytest.raises(ValueError, match="no frame"):
        VideoWriter(tmp_path / "x.gif", {}).finish()


def test_an_mp4_without_ffmpeg_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "imageio_ffmpeg", None)
    with pytest.raises(ValueError, match=r"mediaspec\[video\]"):
        VideoWriter(tmp_path / "x.mp4", {})
    assert not list(tmp_path.iterdir())
