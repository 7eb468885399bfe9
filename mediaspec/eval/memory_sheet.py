"""What memories recall, to look at: one revisit frame of a few rooms, the truth and every memory's own rollout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from .memory_metrics import frame_psnr
from .memory_rollout import group_rooms, roll_out_batch
from .memory_run import WEIGHTS, find_trained
from .sheet import contact_sheet
from .worlds import TEST_SEED, Episode, make_episode, recall_frames

__all__ = ["memory_sheet", "revisit_frame"]


def revisit_frame(episode: Episode, reach: int) -> int | None:
    """The last frame that only memory can get right, with the needle in it where there is one; None without any.

    Args:
        episode: the walk; reach: as of `recall_frames`.
    """
    asked = np.flatnonzero(recall_frames(episode, reach)).tolist()
    shown = [t for t in asked if t in episode.needles]
    return next(reversed(shown or asked), None)


def memory_sheet(
    world: str, protocol: str, memories: Mapping[str, str], *, rooms: int = 4, steps: int = 10, seed: int = 0,
    root: str | Path = WEIGHTS, settings: Mapping[str, Any] | None = None, history_noise: float = 0.0,
    keep: int | None = None, size: int = 128,
) -> Image.Image:  # fmt: skip
    """A row of pictures per room: the truth, then the same frame as each memory made it, with its PSNR.

    Rooms are rolled out anew, on the noise of the evaluation, so that pictures and rows belong together.

    Args:
        world, protocol, settings: of `make_episode`.
        memories: caption -> memory; of several trainings the first is shown.
        rooms: held-out rooms, the first of the evaluation's.
        steps, seed, history_noise, keep: of `roll_out`.
        root: folder of weights.
        size: pixels along a picture.

    Raises:
        ValueError: no room asks for anything that was seen before, or a memory has no weights.
    """
    models = {caption: find_trained(world, memory, root)[0] for caption, memory in memories.items()}
    reach = max(one.model.config.window + one.model.config.num_frames for one in models.values())
    episodes, at = [], {}
    for room in range(TEST_SEED, TEST_SEED + rooms):
        episode = make_episode(world, protocol, room, **(settings or {}))
        asked = revisit_frame(episode, reach)
        if asked is not None:
            episodes.append(episode)
            at[room] = asked
    made: dict[tuple[int, str], np.ndarray] = {}
    for group in group_rooms(episodes, max(rooms, 1)):
        for caption, one in models.items():
            rollouts = roll_out_batch(
                one.model, one.codec, group, steps=steps, seed=seed, real=False, history_noise=history_noise,
                keep=keep,
            )  # fmt: skip
            for episode, rollout in zip(group, rollouts):
                made[episode.seed, caption] = rollout.own[at[episode.seed]]
    pictures: list[Image.Image] = []
    captions: list[str] = []
    for episode in episodes:
        frame = at[episode.seed]
        pictures.append(_picture(episode.frames[frame]))
        captions.append(f"room {episode.seed}, frame {frame}, last seen {episode.horizon[frame]} ago")
        for caption in models:
            recalled = made[episode.seed, caption]
            pictures.append(_picture(recalled))
            captions.append(f"{caption} {frame_psnr(recalled, episode.frames[frame]):.1f} dB")
    if not pictures:
        raise ValueError("no room asks for anything that was seen before; give longer walks or more rooms")
    return contact_sheet(pictures, captions, columns=1 + len(models), size=size)


def _picture(frame: np.ndarray) -> Image.Image:
    return Image.fromarray((np.clip(frame, 0, 1) * 255 + 0.5).astype(np.uint8))
