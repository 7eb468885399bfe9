"""Endless training batches of the worlds, as latents: past frames, and the next few to be made.

A PanoRoom is encoded once as a whole strip (a turn is a whole cell, so a frame is a slice of its latents), in three
milliseconds; walks through mazes and games are rendered into a pool that is renewed while training goes on. Batch k is
a function of (seed, k) alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mediaspec.eval.worlds import WORLDS, PanoRoom, RayMaze
from mediaspec.eval.worlds.protocols import explore, needle_actions, palindrome_actions
from mediaspec.eval.worlds.raymaze import HEADINGS, heading_angle
from mediaspec.models.frame_dit import History
from mediaspec.models.frame_positions import pose_distance
from mediaspec.models.patch_codec import PatchCodec, fit_codec

Clip = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Frames [N, 64, 64, 3] float32, poses [N, P], actions [N]."""
CHUNK = 4


@dataclass(frozen=True)
class Batch:
    """Args: past, what came before; latents [B, w, C, G, G], poses [B, w, P] and actions [B, w] of the next frames."""

    past: History
    latents: Tensor
    poses: Tensor
    actions: Tensor


def pano_walk(rng: np.random.Generator) -> tuple[list[int], int, int]:
    """Actions of a random walk, the width of its room, and the first frame of the chunk to be learnt."""
    kind = rng.choice(3, p=(0.5, 0.3, 0.2))
    if kind == 0:
        hold, turn, dwell, tail = (int(rng.integers(a, b)) for a, b in ((3, 12), (8, 17), (2, 14), (3, 10)))
        actions, width, back = needle_actions(hold, turn, dwell, tail), 512, hold + turn + dwell
    elif kind == 1:
        sweep = int(rng.integers(14, 65))
        actions, width, back = palindrome_actions(sweep), 1024, sweep
    else:
        actions, width, back = [], int(rng.choice([512, 1024])), 8
        while len(actions) < 80:
            actions += [int(rng.integers(-1, 2))] * int(rng.integers(2, 14))
        actions = actions[: int(rng.integers(24, 80))]
    total = len(actions) + 1
    first = back + 1 if rng.random() < 0.75 else 1
    return actions, width, int(rng.integers(min(first, total - CHUNK), total - CHUNK + 1))


class PanoBatches:
    """Batches of rooms.

    Args:
        codec: of the frames; seed: of everything; rooms: training seeds are 0..rooms - 1.
    """

    def __init__(self, codec: PatchCodec, seed: int, rooms: int = WORLDS["panoroom"].train_seeds) -> None:
        self.codec, self.seed, self.rooms = codec, seed, rooms

    def batch(self, number: int, size: int) -> Batch:
        """Batch `number`: `size` rooms that share the rhythm of one walk, each with its own direction and start."""
        rng = np.random.default_rng([self.seed, 10, number])
        actions, width, first = pano_walk(rng)
        worlds = [PanoRoom(int(seed), width) for seed in rng.integers(0, self.rooms, size)]
        signs = np.where(rng.integers(0, 2, size) == 1, 1, -1)
        starts = np.array(
            [
                (w.needle_x - int(rng.integers(0, 57))) % width if rng.random() < 0.6 else int(rng.integers(0, width))
                for w in worlds
            ]
        )
        strips = np.stack([np.roll(w.strip, -(s % 8), axis=1) for w, s in zip(worlds, starts)])
        cells = self.codec.encode(torch.from_numpy(strips).float())  # [B, C, 8, width / 8]
        path = np.concatenate([[0], np.cumsum(actions)])[: first + CHUNK]
        acts = np.array([0, *actions])[: first + CHUNK]
        yaws = (starts[:, None] + 8 * signs[:, None] * path) % width
        at = (yaws // 8)[:, :, None] + np.arange(8)
        columns = torch.from_numpy(at % (width // 8))
        rows = torch.arange(size)[:, None, None]
        frames = cells.permute(0, 3, 1, 2)[rows, columns].permute(0, 1, 3, 4, 2).contiguous()
        poses = torch.from_numpy(np.stack([yaws, np.full_like(yaws, width)], axis=-1)).float()
        return _cut(frames, poses, torch.from_numpy(signs[:, None] * acts + 1), first)


def _cut(frames: Tensor, poses: Tensor, actions: Tensor, first: int) -> Batch:
    past = History(frames[:, :first], poses[:, :first], actions[:, :first], torch.zeros(len(frames), first))
    new = slice(first, first + CHUNK)
    return Batch(past, frames[:, new], poses[:, new], actions[:, new])


def maze_clip(seed: int, frames: int = 300) -> Clip:
    """A walk through a training maze."""
    maze = RayMaze(seed % WORLDS["raymaze"].train_seeds)
    walk, actions = explore(maze, frames, np.random.default_rng([seed, 5]))
    pictures = np.stack([maze.render(x, y, heading_angle(int(h))) for x, y, h in walk]).astype(np.float32)
    poses = walk.copy()
    poses[:, 2] *= 2 * np.pi / HEADINGS
    return pictures, poses, np.array(actions)


def doom_clip(seed: int, frames: int = 300) -> Clip:
    """Random walking and turning, every action held for a while, in ViZDoom."""
    from mediaspec.eval.worlds.vizdoom import DoomWorld

    rng = np.random.default_rng([seed, 6])
    actions: list[int] = []
    while len(actions) < frames - 1:
        action, count = int(rng.choice(3, p=(0.35, 0.35, 0.3))), int(rng.integers(3, 14))
        actions += [action] * count
        if action < 2 and rng.random() < 0.5:  # look back, as tests do
            actions += [1 - action] * count
    poses, pictures = DoomWorld(seed % WORLDS["vizdoom"].train_seeds).rollout(actions[: frames - 1])
    return pictures, poses, np.array([3, *actions])[: len(pictures)]


def clip_seed(training: int, number: int) -> int:
    """The seed of clip `number` of a training: 64 bits mixed from both, so that no two trainings share their clips.

    The world of a clip is its seed modulo the world's training seeds: any of them, and never a test world.
    """
    return int(np.random.SeedSequence([training, 13, number]).generate_state(1, np.uint64)[0])


class ClipBatches:
    """Batches cut out of a pool of walks.

    Args:
        codec: of the frames; seed: of everything.
        make: `clip_seed` -> clip.
        size: of the pool; every second batch one clip is renewed.
        most: longest past.
    """

    def __init__(
        self, codec: PatchCodec, seed: int, make: Callable[[int], Clip], size: int = 256, most: int = 64
    ) -> None:
        self.codec, self.seed, self.make, self.size, self.most = codec, seed, make, size, most
        self._pool: dict[int, tuple[int, Tensor, Tensor, Tensor]] = {}

    def _clip(self, slot: int, made: int) -> tuple[Tensor, Tensor, Tensor]:
        """What lies in a slot of the pool once `made` clips have been made."""
        number = made - 1 - (made - 1 - slot) % self.size
        if slot not in self._pool or self._pool[slot][0] != number:
            frames, poses, actions = self.make(clip_seed(self.seed, number))
            latents = self.codec.encode(torch.from_numpy(frames)).half()
            self._pool[slot] = number, latents, torch.from_numpy(poses).float(), torch.from_numpy(actions)
        return self._pool[slot][1:]

    def batch(self, number: int, size: int) -> Batch:
        """Batch `number`; three of four rows are asked for a view that an older frame of the past is close to."""
        rng = np.random.default_rng([self.seed, 11, number])
        past = int(rng.integers(1, self.most + 1)) if rng.random() < 0.2 else int(rng.integers(24, self.most + 1))
        rows = []
        for slot in rng.integers(0, self.size, size):
            latents, poses, actions = self._clip(int(slot), self.size + number // 2)
            first = int(rng.integers(past, len(latents) - CHUNK + 1))
            if rng.random() < 0.75:
                for candidate in rng.integers(past, len(latents) - CHUNK + 1, 12):
                    old = poses[candidate - past : max(candidate - 12, candidate - past)]
                    if len(old) and float(pose_distance("pose", old, poses[candidate + 1]).min()) < 0.4:
                        first = int(candidate)
                        break
            cut = slice(first - past, first + CHUNK)
            rows.append((latents[cut].float(), poses[cut], actions[cut]))
        frames, poses, actions = (torch.stack(list(column)) for column in zip(*rows))
        return _cut(frames, poses, actions, past)


def new_codec(world: str, components: int = 40, episodes: int = 400) -> PatchCodec:
    """The codec of a world, fitted to training frames; cells of PanoRoom's needle count four times."""
    if world == "panoroom":
        rng = np.random.default_rng(7)
        frames, weights = [], []
        for seed in range(episodes):
            room = PanoRoom(seed)
            near = (room.needle_x - int(rng.integers(0, 57))) % room.width
            for yaw in (near, int(rng.integers(0, room.width))):
                frames.append(room.frame(yaw))
                weight = np.ones((8, 8))
                columns = (room.needle_x + np.arange(8) - yaw) % room.width
                for cell in {int(column) // 8 for column in columns if column < room.view}:
                    weight[3:5, cell] = 4.0
                weights.append(weight)
        shown = torch.from_numpy(np.stack(frames)).float()
        return fit_codec(shown, components, weights=torch.from_numpy(np.stack(weights)))
    clips = [clip_maker(world)(seed)[0][::5] for seed in range(max(episodes // 10, 1))]
    return fit_codec(torch.from_numpy(np.concatenate(clips)), components)


def clip_maker(world: str) -> Callable[[int], Clip]:
    return {"raymaze": maze_clip, "vizdoom": doom_clip}[world]


def new_batches(world: str, codec: PatchCodec, seed: int, pool: int = 256) -> PanoBatches | ClipBatches:
    """The batches of a world."""
    if world == "panoroom":
        return PanoBatches(codec, seed)
    return ClipBatches(codec, seed, clip_maker(world), size=pool)
