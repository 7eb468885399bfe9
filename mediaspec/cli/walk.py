"""A walk for a frame world on the command line: which frames are given, and the actions and poses that follow."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

__all__ = ["parse_actions", "steer"]

NAMES = {
    "panoroom": {"left": 0, "hold": 1, "right": 2},
    "raymaze": {"left": 0, "right": 1, "forward": 2},
    "vizdoom": {"left": 0, "right": 1, "forward": 2, "hold": 3},
}
WALKS = {"panoroom": "right*48,left*48", "raymaze": "forward*8,right*6"}
"""Where --actions says nothing: sweeps that show again what was seen, and rounds."""


def steer(
    pipe: Any, model: str, video: Path | None, image: Path | None, history: Path | None, actions: str | None,
    poses: Path | None, room: int, context: int, num_frames: int,
) -> dict[str, Any]:  # fmt: skip
    """`video`, `actions` and `poses` of a call.

    With a video of one's own, or a history, the poses come from a file. Without, the walk begins in a room of the
    model's world, which also says where the actions lead; its first `context` frames are given.

    Raises:
        ValueError: something is missing, or does not fit.
    """
    from ..pipelines.video_input import to_video

    world = world_of(pipe, model)
    more = pipe.carrier.model.config.num_frames - 1  # the last chunk may reach beyond the end
    if video is not None or image is not None or history is not None:
        if poses is None or actions is None:
            raise ValueError(
                "a video, picture or history of your own needs --actions and --poses (a JSON list of rows, given "
                "frames first; with --history those of the new frames)"
            )
        table = read_json("--poses", poses)
        walk: dict[str, Any] = {"actions": parse_actions(actions, len(table), world), "poses": table}
        if video is not None or image is not None:
            pixels = to_video(video if video is not None else image)[0].permute(1, 2, 3, 0)
            walk["video"] = (pixels / 2 + 0.5).numpy()
        return walk
    if poses is not None:
        raise ValueError("--poses belongs to --video, --image or --history; a room of the world has its own")
    if context < 1:
        raise ValueError(f"--context {context}; write 1 or more, the model must see where it is")
    total = context + num_frames + more
    ids = parse_actions(actions or WALKS.get(world, "hold"), total, world)
    return {"actions": ids, **walk_of(world, room, ids, context)}


def world_of(pipe: Any, model: str) -> str:
    """The world of a model: by its name or folder, else by what its poses are."""
    for part in reversed(Path(model).parts):
        if part in NAMES:
            return part
    return "panoroom" if pipe.carrier.model.config.position == "column" else "raymaze"


def parse_actions(text: str, count: int, world: str) -> list[int]:
    """Action ids of `count` frames; what is given is repeated until it suffices.

    Args:
        text: "right*20,left*20", numbers likewise, or a JSON file with a list of them.

    Raises:
        ValueError: an unknown action, or none at all.

    Example:
        >>> parse_actions("right*2,hold", 5, "panoroom")
        [2, 2, 1, 2, 2]
    """
    names, ids = NAMES[world], []
    parts = read_json("--actions", Path(text)) if text.endswith(".json") else text.split(",")
    for part in parts:
        name, _, times = (one.strip() for one in str(part).partition("*"))
        if name not in names and name not in {str(one) for one in names.values()}:
            raise ValueError(
                f"--actions has {name!r}; the actions of {world} are {', '.join(names)} (0 to {len(names) - 1})"
            )
        if times and not times.isdecimal():
            raise ValueError(f"--actions has {str(part).strip()!r}; write name*times, as right*20")
        ids += [names[name] if name in names else int(name)] * (int(times) if times else 1)
    if not ids:
        raise ValueError(f"--actions {text!r} holds no action; write for instance {WALKS['panoroom']}")
    return [ids[i % len(ids)] for i in range(count)]


def walk_of(world: str, room: int, ids: list[int], context: int) -> dict[str, Any]:
    """Poses [N, P] of a walk in a room, and pictures of its first `context` frames.

    Raises:
        ValueError: a world that cannot be drawn here, or an action that it does not know.
    """
    import numpy as np

    from ..eval.worlds import PanoRoom, RayMaze
    from ..eval.worlds.raymaze import HEADINGS, heading_angle

    if world == "panoroom":
        pano = PanoRoom(room)
        yaws = pano.yaws(0, [one - 1 for one in ids[1:]])
        poses = np.stack([yaws, np.full(len(yaws), pano.width)], axis=1).astype(np.float64)
        frames = [pano.frame(int(yaw)) for yaw in yaws[:context]]
    elif world == "raymaze":
        maze = RayMaze(room)
        places = maze.poses((1.5, 1.5, 0), ids[1:])
        frames = [maze.render(x, y, heading_angle(int(h))) for x, y, h in places[:context]]
        poses = places.copy()
        poses[:, 2] = 2 * math.pi * places[:, 2] / HEADINGS
    else:
        raise ValueError(f"rooms of {world} are not drawn here; give --video, --actions and --poses")
    return {"video": np.stack(frames).astype(np.float32), "poses": poses}


def read_json(option: str, path: Path) -> list[Any]:
    """A JSON list.

    Raises:
        ValueError: no such file, or something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{option} {path} cannot be read ({error}); give a JSON list, one entry per frame") from error
    if not isinstance(found, list) or not found:
        raise ValueError(f"{option} {path} holds no list; give a JSON list, one entry per frame")
    return found
