"""All that a video needs to go on in another call or another process: chained runs are one long run.

    first = pipe(num_frames=64, seeds=0, return_history=True, ...)
    first.history[0].save("walk.history")
    more = pipe(num_frames=64, history=VideoHistory.load("walk.history"), ...)

A history holds what the memory holds, which may be all frames or a constant number of them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["VideoHistory"]


@dataclass
class VideoHistory:
    """The end of one video.

    Args:
        seed: of its noise.
        pictures: handed out so far.
        given: latent frames that came before it (the encoded `video` or `image`).
        latent_shape: (C, h, w).
        settings: what a call that goes on must share: network, schedule, memory, size.
        rollout: window and memory, `memory.arvdm.Rollout.state_dict`.
        decoder: of the codec and of pictures that were made and not handed out.
        actions, poses: tables [1, N, ...] by frame id, or None.
        image: [1, 3, H, W] in -1..1 that the network looks at beside the frames (FramePack), or None.
    """

    seed: int
    pictures: int
    given: int
    latent_shape: tuple[int, ...]
    settings: dict[str, Any]
    rollout: dict[str, Tensor]
    decoder: dict[str, Any]
    actions: Tensor | None = None
    poses: Tensor | None = None
    image: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of window and memory."""
        return sum(value.nbytes for value in self.rollout.values())

    def check(self, settings: dict[str, Any]) -> None:
        """Raises ValueError when a call has other settings, naming them."""
        changed = [name for name in settings if self.settings.get(name) != settings[name]]
        if changed:
            told = ", ".join(_difference(name, self.settings.get(name), settings[name]) for name in changed)
            raise ValueError(f"the history was made with {told}; go on with the same, or start a video of its frames")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes one file, all of it or nothing."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        with open(part, "wb") as stream:
            torch.save({one.name: getattr(self, one.name) for one in fields(self)}, stream)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(part, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: str | torch.device = "cpu") -> VideoHistory:
        """Reads what `save` wrote.

        Raises:
            ValueError: there is no such file, or it is damaged or something else.
        """
        if not Path(path).is_file():
            raise ValueError(f"there is no history {path}; save one with out.history[0].save(path)")
        try:
            found = torch.load(path, map_location=device, weights_only=True)
            return cls(**found)
        except Exception as error:
            raise ValueError(f"{path} is damaged or no history ({str(error).splitlines()[0]})") from error


def _difference(name: str, then: Any, now: Any) -> str:
    """Two values of a setting for an error; of dictionaries only the entries that differ."""
    if isinstance(then, dict) and isinstance(now, dict):
        keys = [key for key in {**then, **now} if then.get(key) != now.get(key)]
        return ", ".join(_difference(f"{name}.{key}", then.get(key), now.get(key)) for key in keys)
    return f"{name}={then!r} (now: {now!r})"
