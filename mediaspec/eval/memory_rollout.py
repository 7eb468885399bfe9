"""Rolling a frame model out over an episode, on its own history and on the real one, and its denoising errors.

Noise comes from a generator of the room's own, so that all memories and both histories are compared on equal noise.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..models.frame_dit import FrameDiT, History, Memory
from ..models.patch_codec import PatchCodec
from .memory_metrics.cost import kv_bytes
from .memory_metrics.loss_gap import nats_of_errors, snr_grid
from .shown_history import ShownHistory
from .worlds import Episode

__all__ = [
    "Rollout", "chunk_nats", "denoising_nats", "episode_history", "flow_levels", "make_chunk", "part", "roll_out",
    "room_noise",
]  # fmt: skip

NATS_LEVELS = (0.1, 0.95)
"""Noise levels between which nats are counted. Below 0.1 what a flow model leaves is its own precision, not memory."""


def flow_levels(steps: int, shift: float = 2.0) -> list[float]:
    """Levels 1 = u_0 > .. > u_steps = 0 of a sampler; `shift` spends more of them at noisy levels.

    Raises:
        ValueError: no steps, or a shift that is not positive.

    Example: `[round(u, 2) for u in flow_levels(4, 1.0)]` is [1.0, 0.75, 0.5, 0.25, 0.0].
    """
    if steps < 1 or shift <= 0:
        raise ValueError(
            f"{steps} steps with shift {shift}; write at least 1 step and a positive shift, as 10 and 2.0"
        )
    even = [1 - i / steps for i in range(steps + 1)]
    return [shift * u / (1 + (shift - 1) * u) for u in even]


@torch.no_grad()
def make_chunk(
    model: FrameDiT, memory: Memory, poses: Tensor, actions: Tensor, generator: torch.Generator, steps: int = 10,
    shift: float = 2.0,
) -> Tensor:  # fmt: skip
    """The next frames: [B, w, C, G, G] latents.

    Args:
        model: in evaluation mode.
        memory: what it reads, from `FrameCache.read`.
        poses: [B, w, P]; actions: [B, w].
        generator: of the noise.
        steps: network calls.
        shift: of `flow_levels`.
    """
    c = model.config
    b, w = actions.shape
    x = torch.randn(b, w, c.channels, c.grid, c.grid, generator=generator)
    levels = flow_levels(steps, shift)
    for u, lower in zip(levels, levels[1:]):
        clean = model(x, torch.full((b, w), u), poses, actions, memory)
        x = clean + (lower / u) * (x - clean)
    return x


@dataclass(frozen=True)
class Rollout:
    """What came of an episode.

    Args:
        own: [N, 64, 64, 3] float32 frames: the context as given, then made on the model's own history.
        real: the same, every chunk made on the real history.
        memory_tokens: read by the last AR step.
        read_bytes: of their keys and values; kept_bytes: of everything the cache holds at the end.
        seconds_per_frame: median over AR steps after the first (over all where there is one).
    """

    own: np.ndarray
    real: np.ndarray
    memory_tokens: int
    read_bytes: int
    kept_bytes: int
    seconds_per_frame: float


def episode_history(codec: PatchCodec, episode: Episode) -> History:
    """The whole episode as latents of one row."""
    latents = codec.encode(torch.from_numpy(episode.frames))[None]
    poses = torch.from_numpy(episode.poses).float()[None]
    return History(latents, poses, torch.from_numpy(episode.actions)[None], torch.zeros(1, len(episode)))


def room_noise(seed: int, episode: Episode, start: int) -> torch.Generator:
    """The noise of the chunk that begins at frame `start` of a room, whatever memory makes it."""
    return torch.Generator().manual_seed(((seed * 1_000_003 + episode.seed) * 4099 + start) % 2**63)


def part(history: History, start: int, stop: int) -> History:
    """Frames start..stop - 1."""
    return History(*(value[:, start:stop] for value in vars(history).values()))


def _shown(model: FrameDiT, seed: int, episode: Episode, noise: float, keep: int | None) -> ShownHistory:
    # numbers below zero, so that no history gets the noise of a chunk
    return ShownHistory(model, noise=noise, keep=keep, draw=lambda start: room_noise(seed, episode, -1 - start))


def roll_out(
    model: FrameDiT, codec: PatchCodec, episode: Episode, *, steps: int = 10, shift: float = 2.0, seed: int = 0,
    real: bool = True, history_noise: float = 0.0, keep: int | None = None,
) -> Rollout:  # fmt: skip
    """Makes the asked frames of an episode, chunk by chunk.

    Args:
        model: in evaluation mode; codec: its codec.
        episode: from `make_episode`; actions and poses of the asked frames are given to the model.
        steps, shift: of the sampler.
        seed: of the noise, together with the episode's.
        real: also make every chunk on the real history.
        history_noise: level of the noise on everything the model is shown of the past, given or its own.
        keep: newest past frames that it is shown; None is all. Both as in `ShownHistory`.

    Raises:
        ValueError: the episode asks for no frame, or a knob is outside its range.
    """
    if episode.context >= len(episode):
        raise ValueError(
            f"all {len(episode)} frames of the episode are given; ask for at least one, with less context"
        )
    truth = episode_history(codec, episode)
    w, total = model.config.num_frames, len(episode)
    own, teacher = (_shown(model, seed, episode, history_noise, keep) for _ in range(2))
    for cache in (own, teacher):
        cache.write(part(truth, 0, episode.context))
    made: dict[str, list[Tensor]] = {"own": [], "real": []}
    seconds, tokens, attended = [], 0, 0
    starts = range(episode.context, total, w)
    for start in starts:
        # the last chunk may be short: the model is asked for whole chunks, with the last action held
        index = torch.arange(start, start + w).clamp(max=total - 1)
        poses, actions, asked = truth.poses[:, index], truth.actions[:, index], min(w, total - start)
        for name, cache in (("own", own), ("real", teacher)):
            if name == "real" and not real:
                continue
            noise = room_noise(seed, episode, start)
            begin = time.perf_counter()
            memory = cache.read(poses)
            frames = make_chunk(model, memory, poses, actions, noise, steps, shift)[:, :asked]
            if name == "own":
                clean = History(frames, poses[:, :asked], actions[:, :asked], torch.zeros(1, asked))
                cache.write(clean)
                seconds.append((time.perf_counter() - begin) / w)
                tokens, attended = memory.tokens, memory.attended
            else:
                cache.write(part(truth, start, start + asked))
            made[name].append(frames[0])

    def pictures(name: str) -> np.ndarray:
        new = codec.decode(torch.cat(made[name])).numpy()
        return np.concatenate([episode.frames[: episode.context], new])

    read = kv_bytes(attended, model.config.hidden_size, model.config.num_hidden_layers)
    return Rollout(
        pictures("own"), pictures("real" if real else "own"), tokens, read, own.nbytes,
        statistics.median(seconds[1:] or seconds),
    )  # fmt: skip


@torch.no_grad()
def chunk_nats(
    model: FrameDiT, memory: Memory, clean: Tensor, poses: Tensor, actions: Tensor, generator: torch.Generator,
    points: int = 10,
) -> np.ndarray:  # fmt: skip
    """Half the snr integral of the model's squared error on one real chunk: [w] nats.

    Args:
        model: in evaluation mode; memory: what it reads.
        clean: [1, w, C, G, G]; poses: [1, w, P]; actions: [1, w].
        generator: of the noise.
        points: noise levels of the integral.
    """
    levels, weights = snr_grid(*NATS_LEVELS, points)
    noise = torch.randn(clean.shape, generator=generator)
    errors = []
    for u in levels:
        noisy = (1 - u) * clean + u * noise
        found = model(noisy.float(), torch.full(actions.shape, float(u)), poses, actions, memory)
        errors.append((found - clean).square().sum((2, 3, 4))[0].double().numpy())
    return nats_of_errors(np.stack(errors), weights)


@torch.no_grad()
def denoising_nats(
    model: FrameDiT, codec: PatchCodec, episode: Episode, asked: np.ndarray, *, points: int = 10, seed: int = 0,
    with_memory: bool = True, history_noise: float = 0.0, keep: int | None = None,
) -> float:  # fmt: skip
    """Half the snr integral of the model's squared error on real frames with real history, in nats per asked frame.

    Differences of it between memories estimate the nats that one knows and the other does not (`loss_gap`).

    Args:
        model, codec, history_noise, keep: as of `roll_out`.
        episode: the walk; asked: [N] bool, which frames count.
        points: noise levels of the integral.
        seed: of the noise, equal for all memories.
        with_memory: False lets the model see no past at all.
    """
    truth = episode_history(codec, episode)
    w, total = model.config.num_frames, len(episode)
    shown, nats = _shown(model, seed, episode, history_noise, keep), []
    shown.write(part(truth, 0, episode.context))
    for start in range(episode.context, total, w):
        count = min(w, total - start)
        index = torch.arange(start, start + w).clamp(max=total - 1)
        clean, poses, actions = truth.latents[:, index], truth.poses[:, index], truth.actions[:, index]
        memory = shown.read(poses) if with_memory else Memory()
        noise = room_noise(seed, episode, start)
        nats.append(chunk_nats(model, memory, clean, poses, actions, noise, points)[:count])
        shown.write(part(truth, start, start + count))
    return float(np.concatenate(nats)[np.asarray(asked)[episode.context :]].mean())
