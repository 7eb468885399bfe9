"""Pictures and videos in every form that diffusers takes, and files, become one tensor.

T pictures, H x W pixels.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageSequence
import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["read_video_file", "to_video"]

PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


def to_video(video: Any, height: int | None = None, width: int | None = None, name: str = "video") -> Tensor:
    """Pictures as [1, 3, T, H, W] float32 in -1..1.

    Args:
        video: a list of pictures; or np [T, H, W, 3], tensor [T, 3, H, W], both in 0..1 or uint8; one picture of each
            kind; or a path: a GIF, a movie, a picture, or a folder of pictures in the order of their names.
        height, width: pixels to resize to; None leaves the size.
        name: of the argument, for errors.

    Raises:
        ValueError: another form, no pictures, pictures of several sizes, or numbers outside 0..1.

    Example:
        >>> to_video(np.zeros((5, 8, 16, 3), np.uint8)).shape
        torch.Size([1, 3, 5, 8, 16])
    """
    if isinstance(video, (str, os.PathLike)):
        video = read_video_file(video)
    pixels = _pixels(video, name)
    if pixels.dtype == torch.uint8:
        pixels = pixels.float() / 255
    pixels = pixels.float()
    if not bool(torch.isfinite(pixels).all()):
        raise ValueError(f"{name} holds NaN or infinite values; give colours in 0..1, or uint8")
    if float(pixels.min()) < -1e-3 or float(pixels.max()) > 1 + 1e-3:
        raise ValueError(
            f"{name} reaches from {float(pixels.min()):.3g} to {float(pixels.max()):.3g}; give colours in 0..1, or "
            "uint8 in 0..255"
        )
    size = (height or pixels.shape[2], width or pixels.shape[3])
    if size != tuple(pixels.shape[2:]):
        pixels = F.interpolate(pixels, size, mode="bilinear", antialias=True)
    return (pixels.clamp(0, 1) * 2 - 1).transpose(0, 1)[None]


def _pixels(video: Any, name: str) -> Tensor:
    """[T, 3, H, W] in the video's own numbers."""
    if isinstance(video, PIL.Image.Image):
        video = [video]
    if isinstance(video, Sequence) and not isinstance(video, (str, bytes)):
        if not video:
            raise ValueError(f"{name} holds no pictures; give at least one")
        parts = [_picture(one, name) for one in video]
        if len({part.shape for part in parts}) > 1:
            raise ValueError(f"{name} has pictures of several sizes, {sorted({tuple(p.shape[1:]) for p in parts})}")
        return torch.stack(parts)
    if isinstance(video, np.ndarray) and video.ndim in (3, 4) and video.shape[-1] == 3:
        tensor = torch.from_numpy(np.ascontiguousarray(video))
        found = (tensor[None] if video.ndim == 3 else tensor).permute(0, 3, 1, 2)
    elif isinstance(video, Tensor) and video.dim() in (3, 4) and video.shape[-3] == 3:
        found = video[None] if video.dim() == 3 else video
    else:
        shape = f" of shape {tuple(video.shape)}" if hasattr(video, "shape") else ""
        raise ValueError(
            f"{name} is a {type(video).__name__}{shape}; give a list of pictures, an array [T, H, W, 3], a tensor "
            "[T, 3, H, W], or the path of a file"
        )
    if not found.shape[0]:
        raise ValueError(f"{name} holds no pictures; give at least one")
    return found


def _picture(one: Any, name: str) -> Tensor:
    """[3, H, W] of one picture."""
    if isinstance(one, PIL.Image.Image):
        return torch.from_numpy(np.array(one.convert("RGB"))).permute(2, 0, 1)
    if isinstance(one, (list, tuple)):
        raise ValueError(f"{name} is a list of lists; one video starts all videos of a call, give a flat list")
    return _pixels(one, name)[0]


def read_video_file(path: str | os.PathLike[str]) -> list[PIL.Image.Image]:
    """The pictures of a file or folder.

    Raises:
        ValueError: nothing there, or something else.
    """
    path = Path(path)
    if path.is_dir():
        files = sorted(one for one in path.iterdir() if one.suffix.lower() in PICTURES)
        if not files:
            raise ValueError(f"{path} is a folder without pictures ({', '.join(PICTURES)})")
        return [_open(one) for one in files]
    if not path.is_file():
        raise ValueError(f"there is no video {path}")
    if path.suffix.lower() in PICTURES:
        return [_open(path)]
    try:
        if path.suffix.lower() == ".gif":
            with PIL.Image.open(path) as film:
                return [frame.convert("RGB") for frame in PIL.ImageSequence.Iterator(film)]
        import imageio.v2 as imageio

        reader: Any = imageio.get_reader(path)
        with reader:
            return [PIL.Image.fromarray(np.asarray(one)) for one in reader]
    except Exception as error:
        why = f"({error})"
        if path.suffix.lower() != ".gif" and importlib.util.find_spec("imageio_ffmpeg") is None:
            why = "without ffmpeg; write: pip install 'mediaspec[video]'"  # imageio names its own extras
        raise ValueError(f"{path} cannot be read as a video {why}") from error


def _open(path: Path) -> PIL.Image.Image:
    try:
        with PIL.Image.open(path) as picture:
            return picture.convert("RGB")
    except OSError as error:
        raise ValueError(f"{path} cannot be read as a picture ({error})") from error
