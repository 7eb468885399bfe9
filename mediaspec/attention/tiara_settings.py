"""Settings of TiARA (arXiv:2412.17254): a frozen dataclass, checked when it is made, and its window."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import torch
from torch import Tensor

__all__ = ["TiARA", "blackman"]

_CHOICES = {
    "window": ("symmetric", "periodic"),
    "boundary": ("circular", "reflect", "zero"),
    "grid": ("frames", "padded"),
    "pool": (None, "heads", "space"),
    "mode": ("frame", "self_token", "neighbourhood"),
}


@dataclass(frozen=True)
class TiARA:
    """Settings of the edit. The published ones are alpha 5 to 7 and a Blackman window of 7 to 9 frames.

    Args:
        alpha: the most that is taken from the own logit, natural units. 0 measures and changes nothing, in models
            with joint attention too.
        window_length: L, taps of the Blackman window; a symmetric window's end taps are zero, so 7 sees 5 frames.
        window: "symmetric" divides by L - 1, "periodic" by L (as torch and scipy.signal.get_window do by default).
        boundary: what stands beyond the clip's ends: "circular" (as published), "reflect", "zero". Clips whose ends
            differ in noise, as in a FIFO queue, want "reflect".
        grid: M = N ("frames"), or N + 2h ("padded").
        phi1, phi2: first bin of fast motion and first bin of abnormal motion; None: round(N/4) and round(N/2).
        pool: None: a bias per position, head and frame; "heads" or "space": from A averaged over heads or positions.
        layers: which temporal attentions: None for all, a regular expression searched in module names, or indices in
            order of execution.
        steps: (first, last) denoising steps, both included; floats are fractions of the schedule.
        corner_frames, corner_strength: r and beta: entries with |i - j| >= N - r lose beta. Temporal attention only;
            joint attention refuses them.
        cap: bounds delta by the value that empties the band from phi1 on; beyond it the edit adds flicker. The cap is
            ours, not published.
        booster: gamma; delta is multiplied by 1 + gamma times the share of energy from phi2 on.
        joint_alpha: alpha in models with joint space-time attention, where the same-frame block carries the image too.
        mass_floor: share of its own-frame mass that a row keeps at least, joint attention only.
        mode: what counts as own in joint attention: the "frame", the token ("self_token"), or its "neighbourhood".
        radius: of the neighbourhood, in tokens.
        refresh: denoising steps between two measurements of rho, joint attention only.
        queries_per_frame: sampled for rho, joint attention only.
        route: how the edit is carried out; "auto" chooses. Temporal attention knows "processor" and "hook".

    Raises:
        ValueError: a value out of range.

    Example:
        >>> TiARA.safe(alpha=5.0).cap
        True
    """

    alpha: float = 6.0
    window_length: int = 7
    window: Literal["symmetric", "periodic"] = "symmetric"
    boundary: Literal["circular", "reflect", "zero"] = "circular"
    grid: Literal["frames", "padded"] = "frames"
    phi1: int | None = None
    phi2: int | None = None
    pool: Literal["heads", "space"] | None = None
    layers: str | Sequence[int] | None = None
    steps: tuple[float, float] | None = None
    corner_frames: int = 0
    corner_strength: float = 0.0
    cap: bool = False
    booster: float = 0.0
    joint_alpha: float = 0.7
    mass_floor: float = 0.5
    mode: Literal["frame", "self_token", "neighbourhood"] = "frame"
    radius: int = 1
    refresh: int = 4
    queries_per_frame: int = 32
    route: str = "auto"

    @classmethod
    def paper(cls, **changes: Any) -> TiARA:
        """The published method, without the cap."""
        return cls(**{"cap": False, **changes})

    @classmethod
    def safe(cls, **changes: Any) -> TiARA:
        """With the spectral cap, so that a calm row is never pushed into a comb that flickers."""
        return cls(**{"cap": True, **changes})

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"TiARA {name}={value!r} is unknown; allowed are {', '.join(map(repr, allowed))}")
        for name in ("alpha", "corner_strength", "booster", "joint_alpha"):
            _check_number(name, getattr(self, name), 0.0, math.inf, "a finite number >= 0")
        _check_number("mass_floor", self.mass_floor, 0.0, 1.0, "a share from 0 to below 1")
        for name, least in (("window_length", 1), ("corner_frames", 0), ("radius", 0), ("refresh", 1)):
            _check_count(name, getattr(self, name), least)
        _check_count("queries_per_frame", self.queries_per_frame, 1)
        for name in ("phi1", "phi2"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name), 1)
        if self.phi1 is not None and self.phi2 is not None and self.phi1 >= self.phi2:
            raise ValueError(f"TiARA phi1={self.phi1} is not below phi2={self.phi2}; the band of fast motion is empty")
        if self.phi2 == 1:
            raise ValueError("TiARA phi2=1 leaves no bin for fast motion; write 2 or more")
        if not isinstance(self.cap, bool):
            raise ValueError(f"TiARA cap={self.cap!r}; write True or False")
        if not isinstance(self.route, str) or not self.route:
            raise ValueError(f"TiARA route={self.route!r}; write 'auto' or the name of a route")
        if float(blackman(self.window_length, self.window).sum()) <= 0:
            raise ValueError(
                f"TiARA window_length={self.window_length} with window={self.window!r} has only zero taps; write 3 or "
                "more (7 is the default)"
            )
        object.__setattr__(self, "layers", _check_layers(self.layers))
        object.__setattr__(self, "steps", _check_steps(self.steps))

    def settings(self) -> dict[str, Any]:
        """All fields by name, as summaries show them."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    def bands(self, frames: int) -> tuple[int, int]:
        """phi1 and phi2 for N frames.

        Raises:
            ValueError: a given phi2 beyond N, or a window with more taps than frames.

        Example:
            >>> TiARA().bands(16)
            (4, 8)
        """
        first, last = self.phi1, self.phi2
        if first is None:
            first = max(1, round(frames / 4))
            first = first if last is None else min(first, last - 1)
        if last is None:
            last = max(first + 1, round(frames / 2))
        if last > max(frames, 2):
            wrong = f"phi1={self.phi1}, so phi2={last}," if self.phi2 is None else f"phi2={last}"
            raise ValueError(
                f"TiARA {wrong} exceeds the {frames} bins of {frames} frames; write phi2 of at most {frames}"
            )
        taps = int((blackman(self.window_length, self.window) > 0).sum())
        if taps > frames:
            raise ValueError(
                f"TiARA window_length={self.window_length} reads {taps} frames and the clip has {frames}; write a "
                "smaller window_length"
            )
        return first, last

    def pick(self, names: Sequence[str], kind: str = "attentions") -> list[str]:
        """The names that `layers` means, in the given order.

        Args:
            names: of all candidates, in order of execution; kind: what they are, for messages.

        Raises:
            ValueError: a pattern that matches none, or an index beyond the last.

        Example:
            >>> TiARA(layers=[1]).pick(["down", "mid", "up"]), TiARA(layers="^d|up").pick(["down", "mid", "up"])
            (['mid'], ['down', 'up'])
        """
        layers = self.layers
        if layers is None:
            return list(names)
        if not isinstance(layers, str):
            if max(layers) >= len(names):
                raise ValueError(f"TiARA layers={list(layers)}: there are {len(names)} {kind}, 0 to {len(names) - 1}")
            return [names[index] for index in sorted(set(layers))]
        kept = [name for name in names if re.search(layers, name)]
        if not kept:
            raise ValueError(
                f"TiARA layers={layers!r} matches none of the {len(names)} {kind}; their names are like {names[0]!r}"
            )
        return kept

    def at_step(self, index: int, total: int | None) -> bool:
        """Whether denoising step `index` of `total` is edited.

        Raises:
            ValueError: `steps` are fractions and the number of steps is not known.
        """
        if self.steps is None:
            return True
        low, high = self.steps
        if isinstance(low, float):
            if total is None:
                raise ValueError(
                    f"TiARA steps={self.steps} are fractions and the number of denoising steps is not known; enable "
                    "the pipeline rather than its model, call handle.set_step(index, total), or give step numbers"
                )
            at = index / max(total - 1, 1)
            return low - 1e-9 <= at <= high + 1e-9
        return low <= index <= high


def _check_number(name: str, value: Any, low: float, high: float, wanted: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value < high:
        raise ValueError(f"TiARA {name}={value!r}; write {wanted}")


def _check_count(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"TiARA {name}={value!r}; write a whole number >= {least}")


def _check_layers(layers: Any) -> str | tuple[int, ...] | None:
    if layers is None:
        return None
    if isinstance(layers, str):
        try:
            re.compile(layers)
        except re.error as wrong:
            raise ValueError(f"TiARA layers={layers!r} is not a regular expression: {wrong}") from None
        return layers
    found = tuple(layers) if isinstance(layers, Sequence) else None
    if not found or any(isinstance(one, bool) or not isinstance(one, int) or one < 0 for one in found):
        raise ValueError(f"TiARA layers={layers!r}; write None, a regular expression or a list of indices from 0")
    return found


def _check_steps(steps: Any) -> tuple[float, float] | None:
    if steps is None:
        return None
    pair = tuple(steps) if isinstance(steps, Sequence) and not isinstance(steps, str) else ()
    whole = all(isinstance(one, int) and not isinstance(one, bool) for one in pair)
    share = all(isinstance(one, float) and 0.0 <= one <= 1.0 for one in pair)
    if len(pair) != 2 or not (whole or share) or not 0 <= pair[0] <= pair[1]:
        raise ValueError(
            f"TiARA steps={steps!r}; write (first, last) step numbers from 0, or two fractions from 0.0 to 1.0"
        )
    return pair


def blackman(length: int, kind: str = "symmetric", dtype: torch.dtype = torch.float64) -> Tensor:
    """[L] Blackman window, never below 0.

    Args:
        length: L; kind: "symmetric" divides by L - 1, "periodic" by L.

    Example:
        >>> [round(tap, 2) for tap in blackman(5).tolist()]
        [0.0, 0.34, 1.0, 0.34, 0.0]
    """
    if length == 1:
        return torch.ones(1, dtype=dtype)
    angle = 2 * math.pi * torch.arange(length, dtype=torch.float64) / (length if kind == "periodic" else length - 1)
    taps = 0.42 - 0.5 * angle.cos() + 0.08 * (2 * angle).cos()
    return taps.masked_fill(taps < 1e-12, 0.0).to(dtype)  # rounding leaves 1e-17 at the ends
