"""Seconds per phase of a run. On CUDA events bracket the phases and are read once at the end: timing never syncs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["Clock"]


class Clock:
    """Adds up wall-clock seconds under names: `with clock("verify"): ...`, then `clock.seconds()`."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.totals: dict[str, float] = {}
        self.events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if self.cuda:
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            stop.record()
            self.events.append((name, start, stop))
        else:
            begin = time.perf_counter()
            yield
            self.totals[name] = self.totals.get(name, 0.0) + time.perf_counter() - begin

    def seconds(self) -> dict[str, float]:
        if self.events:
            torch.cuda.synchronize()
            for name, start, stop in self.events:
                self.totals[name] = self.totals.get(name, 0.0) + start.elapsed_time(stop) / 1000.0
            self.events.clear()
        return dict(self.totals)
