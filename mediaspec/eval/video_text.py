"""How well frames show a caption, by the clip reader that ships with moving-emoji.

The reader gives the probabilities of every attribute of a clip: subject, motion, place. Averaged over frames,

    alignment = geometric mean of the probabilities of the caption's own attributes
    retrieval = 1 / rank of the caption among all captions of the reader's grammar, ties counting against it

Frames are read at their own rate, since motion is seen between neighbours.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import numpy as np
import torch

from .video_metrics.frames import check_frames

__all__ = ["ClipAlignment", "load_text_reader"]

SMALLEST = 1e-6
"""Floor of a probability: one wrong attribute must not make all other differences vanish."""

SIDE = 64


class ClipAlignment:
    """A clip reader as a scorer of captions.

    Args:
        reader: `mediaspec.models.clip_reader.ClipReader`.
        sha256: of its weights.

    Example:
        >>> reader = load_text_reader()                                       # doctest: +SKIP
        >>> reader.scores(frames, "a red apple spins on green grass")         # doctest: +SKIP
        {'alignment': 0.93, 'retrieval': 1.0, 'alignment_motion': 0.9}
    """

    def __init__(self, reader: Any, sha256: str = "unknown") -> None:
        self.reader, self.sha256 = reader, sha256

    def check(self, text: str) -> None:
        """Refuses a caption that the reader does not know.

        Raises:
            ValueError: it is outside the grammar.
        """
        self.reader.parse(text)

    def attributes(self, frames: np.ndarray) -> dict[str, np.ndarray]:
        """uint8 [T, H, W, 3] -> attribute -> [classes] float64, mean probabilities over the frames.

        Raises:
            ValueError: not such frames.
        """
        frames = _square(check_frames(frames, 1))
        return {name: np.asarray(rows, dtype=np.float64).mean(0) for name, rows in self.reader.read(frames).items()}

    def scores(self, frames: np.ndarray, text: str) -> dict[str, float]:
        """Alignment, retrieval and the alignment of the motion alone, each in 0..1.

        Args:
            frames: [T, H, W, 3] uint8, neighbours in time; other sizes are resized to the reader's.
            text: caption of the grammar.

        Raises:
            ValueError: a caption outside the grammar, or not such frames.
        """
        classes: dict[str, int] = self.reader.parse(text)
        logs = {name: np.log(np.maximum(p, SMALLEST)) for name, p in self.attributes(frames).items()}
        own = float(np.mean([logs[name][place] for name, place in classes.items()]))
        every = reduce(np.add.outer, [logs[name] for name in classes]) / len(classes)
        rank = int((every >= own - 1e-9).sum())  # the caption itself is one of them
        found = {"alignment": float(np.exp(own)), "retrieval": 1.0 / max(rank, 1)}
        if "motion" in classes:
            found["alignment_motion"] = float(np.exp(logs["motion"][classes["motion"]]))
        return found

    def describe(self) -> dict[str, Any]:
        """What belongs beside every alignment."""
        return {"name": "moving-emoji clip reader", "sha256": self.sha256}


def _square(frames: np.ndarray) -> np.ndarray:
    """The reader's 64 x 64 pixels, antialiased."""
    if frames.shape[1:3] == (SIDE, SIDE):
        return frames
    images = torch.from_numpy(np.ascontiguousarray(frames)).permute(0, 3, 1, 2).float()
    small = torch.nn.functional.interpolate(images, (SIDE, SIDE), mode="bilinear", antialias=True, align_corners=False)
    return np.asarray(small.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).numpy())


def load_text_reader() -> ClipAlignment | None:
    """The reader of moving-emoji; None where this installation has none."""
    from ..models import clip_reader
    from .features import sha256_of

    weights = clip_reader.FOLDER / "model.safetensors"
    if not weights.is_file():
        return None
    return ClipAlignment(clip_reader.load_clip_reader(), sha256_of(weights))
