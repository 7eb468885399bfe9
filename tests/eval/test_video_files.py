"""Reading and writing videos: every format, the same frames, clear errors for broken files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mediaspec.eval import video_files
from mediaspec.eval.video_files import encode_gif, encode_mp4, find_videos, read_video, write_frames
from tests.eval.clips import moving_square


def test_arrays_and_pictures_come_back_bit_equal(tmp_path: Path) -> None:
    clip = moving_square(11, 24)
    write_frames(tmp_path / "a.npz", clip, 12)
    np.save(tmp_path / "b.npy", clip)
    np.save(tmp_path / "c.npy", clip / 255.0)
    (tmp_path / "d").mkdir()
    for number, frame in enumerate(clip):
        Image.fromarray(frame).save(tmp_path / "d" / f"frame{number}.png")  # 10 sorts behind 9
    found = find_videos(tmp_path)
    assert list(found) == ["a", "b", "c", "d"]
    for name, path in found.items():
        video = read_video(path)
        np.testing.assert_array_equal(video.frames, clip, err_msg=name)
        assert video.fps == (12 if name == "a" else 8)
    assert read_video(tmp_path / "b.npy", fps=25).fps == 25
    assert list(find_videos(tmp_path / "d")) == ["d"]  # a folder of pictures alone is one video


def test_gif(tmp_path: Path) -> None:
    clip = moving_square(5, 24)
    (tmp_path / "a.gif").write_bytes(encode_gif(clip, 10))
    video = read_video(tmp_path / "a.gif")
    assert video.frames.shape == clip.shape and video.fps == pytest.approx(10)
    assert np.abs(video.frames.astype(int) - clip).mean() < 6


@pytest.mark.parametrize("side", [32, 33])
def test_mp4(tmp_path: Path, side: int) -> None:
    pytest.importorskip("imageio_ffmpeg")
    clip = moving_square(6, side)
    encode_mp4(clip, 8, tmp_path / "a.mp4")
    video = read_video(tmp_path / "a.mp4")
    assert video.frames.shape == (6, side + side % 2, side + side % 2, 3) and video.fps == pytest.approx(8)
    assert np.abs(video.frames[:, :side, :side].astype(int) - clip).mean() < 8


def test_broken_files_are_named(tmp_path: Path) -> None:
    clip = moving_square(4, 16)
    write_frames(tmp_path / "whole.npz", clip, 8)
    data = (tmp_path / "whole.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(data[: len(data) // 2])
    (tmp_path / "cut.gif").write_bytes(encode_gif(clip, 8)[:9])
    (tmp_path / "cut.npy").write_bytes(b"\x93NUMPY")
    (tmp_path / "note.txt").write_text("no video")
    np.save(tmp_path / "flat.npy", clip[0])
    np.save(tmp_path / "nan.npy", np.full((2, 4, 4, 3), np.nan))
    for name in ("cut.npz", "cut.gif", "cut.npy", "note.txt", "flat.npy", "nan.npy"):
        with pytest.raises(ValueError, match=name.split(".")[0]):
            read_video(tmp_path / name)
    if video_files.have_ffmpeg():
        (tmp_path / "cut.mp4").write_bytes(b"not a video")
        with pytest.raises(ValueError, match="cut.mp4"):
            read_video(tmp_path / "cut.mp4")


def test_folders_that_cannot_be_measured(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no folder"):
        find_videos(tmp_path / "missing")
    with pytest.raises(ValueError, match="holds no videos"):
        find_videos(tmp_path)
    clip = moving_square(2, 8)
    np.save(tmp_path / "a.npy", clip)
    (tmp_path / "a.gif").write_bytes(encode_gif(clip, 8))
    with pytest.raises(ValueError, match="one name"):
        find_videos(tmp_path)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clip = moving_square(3, 8)
    write_frames(tmp_path / "a.npz", clip, 8)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(video_files.np, "savez_compressed", full)
    with pytest.raises(OSError, match="No space"):
        write_frames(tmp_path / "a.npz", clip[:1], 8)
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]
    np.testing.assert_array_equal(read_video(tmp_path / "a.npz").frames, clip)
    with pytest.raises(ValueError, match="uint8"):
        write_frames(tmp_path / "b.npz", clip / 255.0, 8)
