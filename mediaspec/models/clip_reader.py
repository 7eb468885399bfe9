"""A small network that reads subject, place and motion off the frames of a moving-emoji clip.

The captions of moving-emoji are a closed grammar, "a yellow taxi moves left on a grey road", so whether frames show
their caption has an exact answer. Subject and place are read off every single frame; motion off the up to 13 frames
around it. Trained on rendered clips (`tools/moving_emoji/train_reader.py`), never on generated ones.
N frames, C classes of an attribute.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

__all__ = ["ATTRIBUTES", "ClipReader", "load_clip_reader"]

ATTRIBUTES = ("subject", "motion", "place")
FOLDER = Path(__file__).with_name("moving_emoji") / "reader"


class ClipReader(nn.Module):
    """Reads clips of 64 x 64 frames at 8 frames a second.

    Args:
        subjects: noun phrases, in class order.
        motions: verb phrases.
        places: prepositional phrases.
        width: length of a frame's feature vector.

    Example:
        >>> reader = load_clip_reader()                                      # doctest: +SKIP
        >>> reader.score(frames, "a red apple spins on green grass")["all"]  # doctest: +SKIP
    """

    def __init__(self, subjects: list[str], motions: list[str], places: list[str], width: int = 128) -> None:
        super().__init__()
        self.words: dict[str, list[str]] = {"subject": subjects, "motion": motions, "place": places}

        def halve(a: int, b: int) -> list[nn.Module]:
            return [nn.Conv2d(a, b, 3, 2, 1), nn.GroupNorm(4, b), nn.SiLU()]

        self.frame = nn.Sequential(
            *halve(3, 24), *halve(24, 48), *halve(48, 64), nn.Conv2d(64, 64, 3, 1, 1), nn.GroupNorm(4, 64), nn.SiLU()
        )
        self.vector = nn.Sequential(nn.Conv2d(64, 24, 1), nn.Flatten(), nn.Linear(24 * 64, width), nn.SiLU())
        # subject: which, wherever it is (largest answer over the 8 x 8 places); place: from the whole picture
        self.subject = nn.Sequential(nn.Conv2d(64, 96, 3, 1, 1), nn.SiLU(), nn.Conv2d(96, len(subjects), 1))
        self.place = nn.Linear(width, len(places))
        self.motion = nn.Sequential(
            nn.Conv1d(width, 96, 5, padding=2, padding_mode="replicate"),
            nn.SiLU(),
            nn.Conv1d(96, 96, 5, padding=4, dilation=2, padding_mode="replicate"),
            nn.SiLU(),
            nn.Conv1d(96, len(motions), 1),
        )

    def forward(self, clips: Tensor) -> dict[str, Tensor]:
        """Class logits per frame.

        Args:
            clips: [B, N, 3, 64, 64] float in 0..1.

        Returns:
            Per attribute [B, N, C].
        """
        b, n = clips.shape[:2]
        maps = self.frame(clips.flatten(0, 1) * 2 - 1)
        vectors = self.vector(maps)
        motion = self.motion(vectors.unflatten(0, (b, n)).transpose(1, 2)).transpose(1, 2)
        return {
            "subject": self.subject(maps).flatten(2).logsumexp(-1).unflatten(0, (b, n)),
            "motion": motion,
            "place": self.place(vectors).unflatten(0, (b, n)),
        }

    @torch.no_grad()
    def read(self, frames: np.ndarray | Tensor, chunk: int = 256) -> dict[str, Tensor]:
        """Class probabilities of every frame.

        Args:
            frames: [N, 64, 64, 3] uint8 RGB, neighbours in time, N >= 1. A single frame says nothing about motion.
            chunk: frames per pass; passes overlap by 6 frames on both sides, so the answer does not depend on it.

        Returns:
            ``{"subject": [N, C], "motion": [N, C], "place": [N, C]}`` float32; the classes are `self.words`.

        Raises:
            ValueError: other shape or dtype, no frames.
        """
        given = torch.as_tensor(np.asarray(frames) if not isinstance(frames, Tensor) else frames)
        if given.ndim != 4 or given.shape[1:] != (64, 64, 3) or given.dtype != torch.uint8 or not len(given):
            raise ValueError(
                f"frames have shape {tuple(given.shape)} and dtype {given.dtype}; give [N, 64, 64, 3] uint8, N >= 1"
            )
        device, overlap = self.place.weight.device, 6
        parts: dict[str, list[Tensor]] = {name: [] for name in ATTRIBUTES}
        for start in range(0, len(given), chunk):
            first, last = max(0, start - overlap), min(len(given), start + chunk + overlap)
            some = given[first:last].to(device, self.place.weight.dtype).permute(0, 3, 1, 2) / 255
            logits = self(some[None])
            for name in ATTRIBUTES:
                kept = logits[name][0, start - first : start - first + min(chunk, len(given) - start)]
                parts[name].append(kept.float().softmax(-1).cpu())
        return {name: torch.cat(found) for name, found in parts.items()}

    def parse(self, caption: str) -> dict[str, int]:
        """Class index of every attribute a caption names.

        Raises:
            ValueError: the caption is not "<a subject> <motion> <place>" in known words.
        """
        text = caption.strip().removeprefix("an ").removeprefix("a ")
        for i, subject in enumerate(self.words["subject"]):
            for k, place in enumerate(self.words["place"]):
                if text.startswith(subject + " ") and text.endswith(" " + place):
                    motion = text[len(subject) + 1 : -len(place) - 1]
                    if motion in self.words["motion"]:
                        return {"subject": i, "motion": self.words["motion"].index(motion), "place": k}
        example = " ".join(["a", *(self.words[name][0] for name in ATTRIBUTES)])
        raise ValueError(
            f"cannot read the caption {caption!r}; write it as {example!r}, with a subject of "
            f"{self.words['subject']}, a motion of {self.words['motion']} and a place of {self.words['place']}"
        )

    def score(self, frames: np.ndarray | Tensor, caption: str) -> dict[str, Tensor]:
        """How well every frame shows a caption.

        Args:
            frames: as for `read`.
            caption: of the grammar.

        Returns:
            The probability of the caption's own class per attribute and frame, [N] each, and under "all" the
            geometric mean of the three.
        """
        found, wanted = self.read(frames), self.parse(caption)
        out = {name: found[name][:, wanted[name]] for name in ATTRIBUTES}
        product = torch.stack([out[name] for name in ATTRIBUTES]).clamp_min(1e-12).prod(0)
        return out | {"all": product ** (1 / 3)}


    def kind_of_motion(self, frames: np.ndarray | Tensor, caption: str) -> Tensor:
        """[N] probability of the caption's kind of motion: left and right, or up and down, at any speed; spinning, ...

        Args:
            frames, caption: as for `score`.
        """
        words = self.words["motion"]

        def kind(motion: str) -> str:
            if "left" in motion or "right" in motion:
                return "across"
            return "up and down" if "up" in motion or "down" in motion else motion

        wanted = kind(words[self.parse(caption)["motion"]])
        same = [i for i, motion in enumerate(words) if kind(motion) == wanted]
        return self.read(frames)["motion"][:, same].sum(1)


def load_clip_reader(folder: str | Path = FOLDER, device: str | torch.device = "cpu") -> ClipReader:
    """Loads the shipped reader, or one that `tools/moving_emoji/train_reader.py` wrote.

    Raises:
        ValueError: config.json or model.safetensors is missing.
    """
    folder = Path(folder)
    config, weights = folder / "config.json", folder / "model.safetensors"
    for path in (config, weights):
        if not path.is_file():
            raise ValueError(f"{path} is missing; install mediaspec from a complete source or train a reader")
    words: dict[str, Any] = json.loads(config.read_text(encoding="utf-8"))
    reader = ClipReader(words["subjects"], words["motions"], words["places"], words["width"])
    reader.load_state_dict({name: value.float() for name, value in load_file(weights).items()})
    return reader.to(device).eval().requires_grad_(False)
