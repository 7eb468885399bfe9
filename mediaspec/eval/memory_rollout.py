"""Rolling a frame model out over episodes, on its own history and on the real one, and its denoising errors.

Noise comes from a generator of the room's own, so that all memories and both histories are compared on equal noise.
Rooms whose episodes have equal length and context go through the network as one batch (`group_rooms`): a small model
spends most of a one-row call on launching it. A room's result does not depend on its batch, up to float rounding.

`memory.arvdm.generate` makes the same frames bit for bit (tests/pipelines/test_video_continuation.py), and the loop
stands here as well because a rollout also goes on real history, shows it noised or cut, times what the model does
without the bookkeeping around it, and counts a diverged model's frames instead of refusing them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..models.frame_dit import FrameDiT, History, Memory
from ..models.patch_codec import PatchCodec
from .memory_metrics.cost import kv_bytes
from .memory_metrics.loss_gap import nats_of_errors, snr_grid
from .rollout_noise import normal_rows, room_noise
from .shown_history import ShownHistory
from .worlds import Episode

__all__ = [
    "Rollout", "batch_history", "chunk_nats", "denoising_nats", "denoising_nats_batch", "episode_history",
    "flow_levels", "group_rooms", "make_chunk", "part", "roll_out", "roll_out_batch", "room_noise", "time_frames",
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
    model: FrameDiT, memory: Memory, poses: Tensor, actions: Tensor,
    generator: torch.Generator | Sequence[torch.Generator], steps: int = 10, shift: float = 2.0,
) -> Tensor:  # fmt: skip
    """The next frames: [B, w, C, G, G] latents.

    Args:
        model: in evaluation mode.
        memory: what it reads, from `FrameCache.read`.
        poses: [B, w, P]; actions: [B, w].
        generator: of the noise, one for all rows or one per row.
        steps: network calls.
        shift: of `flow_levels`.
    """
    c = model.config
    b, w = actions.shape
    x = normal_rows((b, w, c.channels, c.grid, c.grid), generator)
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
        memory_tokens: kept tokens that the last AR step read; a packed one counts once.
        attended_tokens: those that attention saw, more where packed ones are unpacked.
        read_bytes: of the keys and values of `attended_tokens`; kept_bytes: of everything the cache holds at the end.
        seconds_per_frame: of a one-row AR step on the own history (read, network calls, write), the median over steps
            after the first (over all where there is one); None where rooms shared their calls, see `time_frames`.
    """

    own: np.ndarray
    real: np.ndarray
    memory_tokens: int
    attended_tokens: int
    read_bytes: int
    kept_bytes: int
    seconds_per_frame: float | None


def group_rooms(episodes: Iterable[Episode], size: int) -> Iterator[list[Episode]]:
    """Batches of up to `size` episodes of equal length and context, handed out as soon as they are full.

    Raises:
        ValueError: a size below 1.
    """
    if size < 1:
        raise ValueError(f"batch={size} is not allowed; write 1 room or more, as 10")
    open_groups: dict[tuple[int, int], list[Episode]] = {}
    for episode in episodes:
        alike = len(episode), episode.context
        group = open_groups.setdefault(alike, [])
        group.append(episode)
        if len(group) == size:
            yield open_groups.pop(alike)
    yield from open_groups.values()


def batch_history(codec: PatchCodec, episodes: Sequence[Episode]) -> History:
    """Whole episodes as latents, one row each.

    Raises:
        ValueError: none, or of different lengths or contexts.
    """
    if len({(len(episode), episode.context) for episode in episodes}) != 1:
        told = ", ".join(f"{len(episode)} with {episode.context} given" for episode in episodes)
        raise ValueError(
            f"a batch of episodes of {told or 'no'} frames; give episodes of one length and context, see group_rooms"
        )
    # encoded one by one: a room's latents are then the same bits in every batch
    latents = torch.stack([codec.encode(torch.from_numpy(episode.frames)) for episode in episodes])
    poses = torch.stack([torch.from_numpy(episode.poses).float() for episode in episodes])
    actions = torch.stack([torch.from_numpy(episode.actions) for episode in episodes])
    return History(latents, poses, actions, torch.zeros(actions.shape))


def episode_history(codec: PatchCodec, episode: Episode) -> History:
    """The whole episode as latents of one row."""
    return batch_history(codec, [episode])


def part(history: History, start: int, stop: int) -> History:
    """Frames start..stop - 1."""
    return History(*(value[:, start:stop] for value in vars(history).values()))


def _noises(seed: int, episodes: Sequence[Episode], start: int) -> list[torch.Generator]:
    return [room_noise(seed, episode, start) for episode in episodes]


def _shown(model: FrameDiT, seed: int, episodes: Sequence[Episode], noise: float, keep: int | None) -> ShownHistory:
    # numbers below zero, so that no history gets the noise of a chunk
    return ShownHistory(model, noise=noise, keep=keep, draw=lambda start: _noises(seed, episodes, -1 - start))


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
    return roll_out_batch(
        model, codec, [episode], steps=steps, shift=shift, seed=seed, real=real, history_noise=history_noise,
        keep=keep,
    )[0]  # fmt: skip


def roll_out_batch(
    model: FrameDiT, codec: PatchCodec, episodes: Sequence[Episode], *, steps: int = 10, shift: float = 2.0,
    seed: int = 0, real: bool = True, history_noise: float = 0.0, keep: int | None = None,
) -> list[Rollout]:  # fmt: skip
    """`roll_out` of several episodes at once, in their order.

    Args:
        episodes: of equal length and context, see `group_rooms`; all others as of `roll_out`.

    Raises:
        ValueError: as of `roll_out`, or episodes that do not fit each other.
    """
    truth = batch_history(codec, episodes)
    rows, total, context, w = len(episodes), len(episodes[0]), episodes[0].context, model.config.num_frames
    if context >= total:
        raise ValueError(f"all {total} frames of the episode are given; ask for at least one, with less context")
    made: dict[str, list[Tensor]] = {"own": [], "real": []}
    seconds, tokens, attended, kept = [], 0, 0, 0
    # one history after the other: the keys and values of one alone are held
    for name in ("own", "real") if real else ("own",):
        cache = _shown(model, seed, episodes, history_noise, keep)
        cache.write(part(truth, 0, context))
        for start in range(context, total, w):
            # the last chunk may be short: the model is asked for whole chunks, with the last action held
            index = torch.arange(start, start + w).clamp(max=total - 1)
            poses, actions, asked = truth.poses[:, index], truth.actions[:, index], min(w, total - start)
            noise = _noises(seed, episodes, start)
            begin = time.perf_counter()
            memory = cache.read(poses)
            frames = make_chunk(model, memory, poses, actions, noise, steps, shift)[:, :asked]
            if name == "own":
                cache.write(History(frames, poses[:, :asked], actions[:, :asked], torch.zeros(rows, asked)))
                seconds.append((time.perf_counter() - begin) / w)
                tokens, attended = memory.tokens, memory.attended
            else:
                cache.write(part(truth, start, start + asked))
            made[name].append(frames)
        if name == "own":
            kept = cache.nbytes // rows

    def pictures(name: str) -> list[np.ndarray]:
        new = torch.cat(made[name], dim=1)
        return [
            np.concatenate([episode.frames[:context], codec.decode(latents).numpy()])
            for episode, latents in zip(episodes, new)
        ]

    own = pictures("own")
    read = kv_bytes(attended, model.config.hidden_size, model.config.num_hidden_layers)
    per_frame = statistics.median(seconds[1:] or seconds) if rows == 1 else None
    return [
        Rollout(*both, tokens, attended, read, kept, per_frame) for both in zip(own, pictures("real") if real else own)
    ]


def time_frames(
    model: FrameDiT, codec: PatchCodec, episode: Episode, *, chunks: int = 4, steps: int = 10, shift: float = 2.0,
    seed: int = 0, history_noise: float = 0.0, keep: int | None = None,
) -> float:  # fmt: skip
    """Seconds per frame of a one-row AR step: `Rollout.seconds_per_frame` over the first chunks of a room alone.

    Args:
        chunks: AR steps, at least 1; the first one warms up. All others as of `roll_out`.
    """
    stop = episode.context + chunks * model.config.num_frames
    short = replace(
        episode, frames=episode.frames[:stop], actions=episode.actions[:stop], poses=episode.poses[:stop],
        horizon=episode.horizon[:stop], fresh=episode.fresh[:stop],
    )  # fmt: skip
    made = roll_out(
        model, codec, short, steps=steps, shift=shift, seed=seed, real=False, history_noise=history_noise, keep=keep
    )
    assert made.seconds_per_frame is not None
    return made.seconds_per_frame


@torch.no_grad()
def chunk_nats(
    model: FrameDiT, memory: Memory, clean: Tensor, poses: Tensor, actions: Tensor,
    generator: torch.Generator | Sequence[torch.Generator], points: int = 10,
) -> np.ndarray:  # fmt: skip
    """Half the snr integral of the model's squared error on real chunks: [B, w] nats.

    Args:
        model: in evaluation mode; memory: what it reads.
        clean: [B, w, C, G, G]; poses: [B, w, P]; actions: [B, w].
        generator: of the noise, one for all rows or one per row.
        points: noise levels of the integral.
    """
    levels, weights = snr_grid(*NATS_LEVELS, points)
    noise = normal_rows(clean.shape, generator)
    errors = []
    for u in levels:
        noisy = (1 - u) * clean + u * noise
        found = model(noisy.float(), torch.full(actions.shape, float(u)), poses, actions, memory)
        errors.append((found - clean).square().sum((2, 3, 4)).double().numpy())
    return nats_of_errors(np.stack(errors), weights)


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
    return denoising_nats_batch(
        model, codec, [episode], [asked], points=points, seed=seed, with_memory=with_memory,
        history_noise=history_noise, keep=keep,
    )[0]  # fmt: skip


@torch.no_grad()
def denoising_nats_batch(
    model: FrameDiT, codec: PatchCodec, episodes: Sequence[Episode], asked: Sequence[np.ndarray], *, points: int = 10,
    seed: int = 0, with_memory: bool = True, history_noise: float = 0.0, keep: int | None = None,
) -> list[float]:  # fmt: skip
    """`denoising_nats` of several episodes at once, in their order.

    Args:
        episodes: of equal length and context, see `group_rooms`; asked: [N] bool of each. All others as of
            `denoising_nats`.
    """
    truth = batch_history(codec, episodes)
    total, context, w = len(episodes[0]), episodes[0].context, model.config.num_frames
    wanted = np.stack([np.asarray(one, dtype=bool) for one in asked])
    nats = np.zeros(wanted.shape)
    shown = _shown(model, seed, episodes, history_noise, keep)
    shown.write(part(truth, 0, context))
    for start in range(context, total, w):
        stop = min(start + w, total)
        if wanted[:, start:stop].any():  # a chunk that no room asks for only becomes history
            index = torch.arange(start, start + w).clamp(max=total - 1)
            clean, poses, actions = truth.latents[:, index], truth.poses[:, index], truth.actions[:, index]
            memory = shown.read(poses) if with_memory else Memory()
            noise = _noises(seed, episodes, start)
            nats[:, start:stop] = chunk_nats(model, memory, clean, poses, actions, noise, points)[:, : stop - start]
        shown.write(part(truth, start, stop))
    wanted[:, :context] = False
    return [float(row[counted].mean()) for row, counted in zip(nats, wanted)]
