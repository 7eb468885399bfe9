"""The walks of memory tests: needle, palindrome, turn back, loop.

Each function makes the episode of one room. `seed` gives the room; where a walk has open choices (first yaw,
direction), they are drawn from a generator of their own, so that a room looks the same under every protocol.
"""

from __future__ import annotations

import math

import numpy as np

from .episode import Episode, memory_horizon
from .panoroom import PanoRoom
from .raymaze import FORWARD, HEADINGS, LEFT, MOVES, RIGHT, STRIDE, RayMaze, heading_angle

__all__ = [
    "explore", "loop", "mine_loop", "needle", "needle_actions", "palindrome", "palindrome_actions", "pano_episode",
    "turn_back",
]  # fmt: skip

QUARTER = HEADINGS // 4
CELL_STEPS = round(2 / STRIDE)
LOOP_GAP = 22
LOOP_MEMORY, LOOP_ASKED = 48, 16


def needle_actions(hold: int, turn: int, dwell: int, tail: int) -> list[int]:
    """Hold, turn right, dwell, turn back, hold: `hold + 2 turn + dwell + tail` actions in -1..1."""
    return [0] * hold + [1] * turn + [0] * dwell + [-1] * turn + [0] * tail


def palindrome_actions(frames: int) -> list[int]:
    """A sweep of `frames` frames to the right and the same frames in reverse order: `2 frames - 1` frames in all."""
    return [1] * (frames - 1) + [-1] * (frames - 1)


def pano_episode(room: PanoRoom, protocol: str, yaw: int, actions: list[int], context: int) -> Episode:
    """The episode of any walk in a room; actions in -1..1 as `PanoRoom.rollout` takes them."""
    yaws, frames = room.rollout(yaw, actions)
    horizon, fresh = memory_horizon(yaws.tolist(), room.visible)
    places = {t: room.needle_place(int(one)) for t, one in enumerate(yaws)}
    return Episode(
        "panoroom", protocol, room.seed, frames.astype(np.float32), np.array([0, *actions], dtype=np.int64) + 1,
        np.stack([yaws, np.full(len(yaws), room.width)], axis=1).astype(np.float64), context, horizon, fresh,
        needles={t: place for t, place in places.items() if place is not None},
    )  # fmt: skip


def needle(
    seed: int, *, hold: int = 8, turn: int = 12, dwell: int = 12, tail: int = 8, width: int = 512,
    needle_in_view: bool = True,
) -> Episode:  # fmt: skip
    """PanoRoom: look, turn away until nothing of the first view is left, dwell, turn back.

    Args:
        seed: of the room; also of the first yaw and, by turns, of the direction.
        hold, turn, dwell, tail: frames of each part. The view is left completely after 8 turns.
        width: of the room.
        needle_in_view: draw the first yaw so that the needle is seen whole at the start, and therefore asked for at
            the end; else any yaw.

    Raises:
        ValueError: no turn, negative frames, or nothing that is asked.
    """
    if min(hold, dwell, tail) < 0 or turn < 1:
        raise ValueError(f"hold={hold}, turn={turn}, dwell={dwell}, tail={tail}; write turn >= 1, the others >= 0")
    room = PanoRoom(seed, width)
    rng = np.random.default_rng([seed, 1])
    yaw = int(rng.integers(0, width))
    if needle_in_view:
        yaw = (room.needle_x - int(rng.integers(0, room.view - 7))) % width
    sign = 1 if rng.integers(0, 2) else -1
    actions = [sign * action for action in needle_actions(hold, turn, dwell, tail)]
    return pano_episode(room, "needle", yaw, actions, hold + turn + dwell + 1)


def palindrome(seed: int, *, frames: int = 64, context: int | None = None, width: int = 1024) -> Episode:
    """PanoRoom: a sweep and the same frames in reverse; with 64 frames, 112 are given and 15 asked.

    Args:
        seed: of the room, the first yaw and the direction.
        frames: of the sweep; the episode has 2 frames - 1.
        context: frames given; by default all but the last 15 (less where the way back is shorter).
        width: of the room; `8 frames + 56` columns are seen, and where the room has fewer, the way back is not the
            first revisit.

    Raises:
        ValueError: a sweep of one frame, or a context that leaves nothing to ask.
    """
    if frames < 2 or (context is not None and not 1 <= context < 2 * frames - 1):
        raise ValueError(
            f"frames={frames}, context={context}; write frames >= 2 and a context of 1 to 2 frames - 2, or None"
        )
    room = PanoRoom(seed, width)
    rng = np.random.default_rng([seed, 2])
    yaw, sign = int(rng.integers(0, width)), 1 if rng.integers(0, 2) else -1
    total = 2 * frames - 1
    given = max(frames, total - 15) if context is None else context
    return pano_episode(room, "palindrome", yaw, [sign * action for action in palindrome_actions(frames)], given)


def maze_episode(maze: RayMaze, protocol: str, walk: np.ndarray, actions: list[int], context: int) -> Episode:
    """The episode of a walk [N, 3] through a maze; actions[t] led to pose t, N of them."""
    frames = np.stack([maze.render(x, y, heading_angle(int(h))) for x, y, h in walk])
    horizon, fresh = memory_horizon(walk.tolist(), lambda pose: maze.visible(pose[0], pose[1], int(pose[2])))
    sights = [maze.look(x, y, heading_angle(int(h))) for x, y, h in walk]
    poses = walk.copy()
    poses[:, 2] = 2 * math.pi * walk[:, 2] / HEADINGS
    light = np.stack([(1 / (1 + 0.15 * s.depth)) * np.where(s.face % 2 == 0, 1.0, 0.75) for s in sights])
    return Episode(
        "raymaze", protocol, maze.seed, frames.astype(np.float32), np.array(actions, dtype=np.int64), poses, context,
        horizon, fresh, wall_colours=np.stack([maze.colour_index[s.x, s.y, s.face] for s in sights]),
        extras={"palette": maze.palette, "light": light},
    )  # fmt: skip


def turn_back(seed: int, *, length: int = 16, look: bool = True, cells: int = 5) -> Episode:
    """RayMaze: walk a corridor, turn by 180 degrees, walk back; the turn and the way back are asked.

    Args:
        seed: of the maze and the corridor.
        length: forward actions; less where the maze has no straight way that long.
        look: first turn once around. Without, most of what the way back shows was never seen, and nothing is recall.
        cells: along a side.
    """
    maze = RayMaze(seed, cells)
    rng = np.random.default_rng([seed, 3])
    ways = []
    for x in range(cells):
        for y in range(cells):
            for quarter, (dx, dy) in enumerate(MOVES):
                squares = 0
                while not maze.wall[2 * x + 1 + dx * (squares + 1), 2 * y + 1 + dy * (squares + 1)]:
                    squares += 1
                ways.append((round(squares / STRIDE), x, y, quarter))
    fit = [way for way in ways if way[0] >= length] or [way for way in ways if way[0] == max(ways)[0]]
    steps, x, y, quarter = fit[int(rng.integers(0, len(fit)))]
    steps = min(steps, length)
    side = RIGHT if rng.integers(0, 2) else LEFT
    actions = [side] * (HEADINGS if look else 0) + [FORWARD] * steps + [side] * (HEADINGS // 2) + [FORWARD] * steps
    walk = maze.poses((2 * x + 1.5, 2 * y + 1.5, QUARTER * quarter), actions)
    return maze_episode(maze, "turn_back", walk, [side, *actions], len(walk) - steps - HEADINGS // 2)


def explore(maze: RayMaze, frames: int, rng: np.random.Generator) -> tuple[np.ndarray, list[int]]:
    """A walk from cell to cell that now and then turns back: poses [frames, 3] and the actions that led to them.

    At a cell with other ways out it goes back with probability 1/4, which makes the revisits that tests need.
    """
    pose = (2 * int(rng.integers(0, maze.cells)) + 1.5, 2 * int(rng.integers(0, maze.cells)) + 1.5, 0)
    walk, actions = [pose], [RIGHT]
    while len(walk) < frames:
        x, y, heading = walk[-1]
        ahead = heading // QUARTER
        free = [q for q, (dx, dy) in enumerate(MOVES) if not maze.wall[int(x) + dx, int(y) + dy]]
        back = (ahead + 2) % 4
        onward = [q for q in free if q != back]
        if not onward or (back in free and rng.random() < 0.25):
            onward = [back]
        turn = (onward[int(rng.integers(0, len(onward)))] - ahead) % 4
        side = {1: RIGHT, 3: LEFT}.get(turn, RIGHT if rng.integers(0, 2) else LEFT)
        for action in [side] * (QUARTER * min(turn, 4 - turn)) + [FORWARD] * CELL_STEPS:
            walk.append(maze.step(walk[-1], action))
            actions.append(action)
    return np.array(walk[:frames]), actions[:frames]


def mine_loop(walk: np.ndarray, actions: list[int], rng: np.random.Generator, reach: int = 8) -> int | None:
    """First asked frame of a revisit in a walk; None where there is none.

    A revisit is a pair i < j of at least 22 frames apart, in the same square and at most 15 degrees from each other.
    The 16 asked frames begin where the last turn before j begins (at most 15 frames before j); the 48 frames before
    them are memory and hold i, more than `reach` frames before the first asked one.
    """
    found = []
    squares = np.floor(walk[:, :2])
    for j in range(LOOP_MEMORY, len(walk)):
        start = j
        while start > j - LOOP_ASKED + 1 and start > 1 and actions[start] == FORWARD:
            start -= 1
        while start > j - LOOP_ASKED + 1 and start > 1 and actions[start - 1] != FORWARD:
            start -= 1
        if start < LOOP_MEMORY or start + LOOP_ASKED > len(walk):
            continue
        i = np.arange(start - LOOP_MEMORY, min(start - reach, j - LOOP_GAP + 1))
        apart = np.abs((walk[i, 2] - walk[j, 2] + HEADINGS / 2) % HEADINGS - HEADINGS / 2)
        if ((squares[i] == squares[j]).all(1) & (apart <= 1)).any():
            found.append(start)
    return found[int(rng.integers(0, len(found)))] if found else None


def loop(seed: int, *, frames: int = 300, cells: int = 5) -> Episode:
    """RayMaze: 48 frames of memory, then 16 asked ones that come back to a place and direction seen before.

    Args:
        seed: of the maze and the walk.
        frames: of the walk that is searched for revisits; further walks follow where one has none.
        cells: along a side.
    """
    maze = RayMaze(seed, cells)
    for attempt in range(64):
        rng = np.random.default_rng([seed, 4, attempt])
        walk, actions = explore(maze, frames, rng)
        start = mine_loop(walk, actions, rng)
        if start is not None:
            part = slice(start - LOOP_MEMORY, start + LOOP_ASKED)
            return maze_episode(maze, "loop", walk[part], actions[part], LOOP_MEMORY)
    raise ValueError(f"no revisit in 64 walks of {frames} frames; give more frames, 300 by default")
