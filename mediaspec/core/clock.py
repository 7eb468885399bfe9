"""Seconds per phase of a run. On CUDA events mark the phases and are read once at the end: timing never syncs."""

from __future__ import annotations

import time

import torch

__all__ = ["Clock"]


class Clock:
    """Adds up wall-clock seconds under names: `clock.phase("verify")` ends the phase before it, None the last one."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.totals: dict[str, float] = {}
        self.events: list[tuple[str | None, torch.cuda.Event]] = []
        self.name: str | None = None
        self.since = 0.0

    def phase(self, name: str | None) -> None:
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.events.append((name, event))
            return
        now = time.perf_counter()
        if self.name is not None:
            self.totals[self.name] = self.totals.get(self.name, 0.0) + now - self.since
        self.name, self.since = name, now

    def seconds(self) -> dict[str, float]:
        if self.events:
            torch.cuda.synchronize()
            for (name, start), (_, stop) in zip(self.events, self.events[1:], strict=False):
                if name is not None:
                    self.totals[name] = self.totals.get(name, 0.0) + start.elapsed_time(stop) / 1000.0
            self.events.clear()
        return dict(self.totals)
