"""What the emoji-64 trainers share: two-process data parallelism, wall-clock schedules, checkpoints and logs.

A CPU with few cores trains faster as several single-thread processes than as one multi-thread one: there is one
synchronisation per step instead of one per operator, and a busy neighbour costs its share, not the whole machine.
Start a trainer with ``OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 tools/emoji64/train_vq.py ...``; a plain
``python`` start is one process.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def start_workers() -> tuple[int, int]:
    """Join the process group that torchrun describes.

    Returns:
        ``(rank, world size)``; (0, 1) without torchrun.
    """
    if "RANK" not in os.environ:
        return 0, 1
    dist.init_process_group("gloo")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    return dist.get_rank(), dist.get_world_size()


def average(tensors: Iterable[Tensor], world: int) -> None:
    """Replace tensors by their mean over the processes, in one transfer."""
    kept = list(tensors)
    if world == 1 or not kept:
        return
    flat = torch.cat([t.reshape(-1) for t in kept])
    dist.all_reduce(flat)
    flat /= world
    at = 0
    for t in kept:
        t.copy_(flat[at : at + t.numel()].view_as(t))
        at += t.numel()


def average_gradients(model: nn.Module, world: int) -> None:
    """Average all gradients over the processes."""
    average([p.grad for p in model.parameters() if p.grad is not None], world)


def agree(value: float, world: int) -> float:
    """The first process's number, on every process (clocks and stop decisions must not differ)."""
    if world == 1:
        return value
    t = torch.tensor([value], dtype=torch.float64)
    dist.broadcast(t, 0)
    return float(t)


def schedule(progress: float, warmup: float = 0.02, hold: float = 0.0, floor: float = 0.0) -> float:
    """Learning-rate factor: linear warm-up, an optional constant part, then a cosine to `floor`.

    Args:
        progress: fraction of the wall-clock budget used, 0..1.
        warmup: fraction spent rising.
        hold: fraction up to which the rate stays at its peak.
        floor: factor at the end.
    """
    if progress < warmup:
        return max(progress, 1e-3) / warmup
    start = max(warmup, hold)
    if progress < start:
        return 1.0
    x = min((progress - start) / max(1 - start, 1e-9), 1.0)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * x))


def save_checkpoint(path: Path, state: Any) -> None:
    """Write a checkpoint beside its place and rename it there, so that a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".tmp")
    torch.save(state, beside)
    beside.replace(path)


class Log:
    """Appends one JSON object per line and prints it; silent on all processes but the first."""

    def __init__(self, path: Path, rank: int) -> None:
        self.path, self.rank = path, rank
        if rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)

    def __call__(self, **values: Any) -> None:
        if self.rank:
            return
        line = json.dumps(
            {"time": round(time.time(), 1)}
            | {k: round(v, 5) if isinstance(v, float) else v for k, v in values.items()}
        )
        with self.path.open("a") as f:
            f.write(line + "\n")
        print(line, flush=True)
