"""The noise levels of a sliding window of frames, and the three conditions that make them a video sampler.

A video that is generated step by step keeps w frames in work. An autoregressive step appends `delta` frames of pure
noise, moves slot j from level t_in[j] to t_out[j] in `m_ar` sub-steps, hands out the first `delta` frames and slides
on. Two numbers and the list t_in say which method it is (Meta-ARVDM, arXiv:2503.10704): a queue, a pyramid, chunks.
The conditions:

    monotone    t_in and t_out never fall from one slot to the next, and t_out[j] < t_in[j]
    circular    t_out[j + delta] = t_in[j]: what a slot hands on is what the next one expects
    boundary    t_out[j] = 0 for the first delta slots, t_in[j] = T for the last delta

Then t_out follows from t_in, and t_in[0 .. w - delta) are the only free numbers. Levels are fractions u = t / T of
the noisiest level. w slots, slot 0 the oldest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from .references import NO_REFERENCES, ReferenceRule

__all__ = ["WindowSchedule", "staircase", "warp"]

STRICT, EQUAL = 1e-9, 1e-7
"""Tolerances of the order and of the equalities between levels."""


def staircase(stages: int, delta: int) -> list[float]:
    """t_in of `stages * delta` slots: block s of `delta` slots at level (s + 1) / stages.

    Example:
        >>> staircase(2, 2)
        [0.5, 0.5, 1.0, 1.0]
    """
    if stages < 1 or delta < 1:
        raise ValueError(f"stages={stages}, delta={delta}; both must be at least 1")
    return [(s + 1) / stages for s in range(stages) for _ in range(delta)]


def warp(level: float, shift: float) -> float:
    """The timestep shift of flow matching: shift * s / (1 + (shift - 1) * s), with 0 and 1 where they were.

    Example:
        >>> warp(0.25, 5.0)
        0.625
    """
    return shift * level / (1 + (shift - 1) * level)


@dataclass(frozen=True)
class WindowSchedule:
    """Levels of a window before and after an autoregressive step.

    Nothing but shapes is checked when it is made, so that the predicates can also say what is wrong with levels found
    elsewhere; `validate` raises, and `generate` calls it.

    Args:
        w: frames in the window.
        delta: frames that a step finishes, 1 to w.
        t_in: w levels at the start of a step, slot 0 (the oldest frame) first.
        m_ar: sub-steps of a step.
        t_out: w levels at the end; None is the only list that fits the conditions.
        clean_level: level that counts as finished; above 0 only for laws and likelihoods.
        noise_level: level that counts as pure noise.
        progress: m_ar falling numbers, 1 first: the share of the way from t_out to t_in that is left before each
            sub-step. None is even.
        shift: timestep shift of flow models, applied to the levels of the sub-steps (`warp`).
        net_frames: window frames that the network takes in one call; None is all of them.
        lookahead: finished frames that are shown in front of the window, for half-overlapping calls (FIFO).
        references: which finished frames the network sees.
        name: of the method.
        note: one sentence for tables.

    Raises:
        ValueError: a wrong number of slots, or a number out of range.

    Example:
        >>> queue = WindowSchedule(4, 1, staircase(4, 1), 1).validate()
        >>> queue.t_out, queue.updates_per_frame
        ((0.0, 0.25, 0.5, 0.75), 4)
    """

    w: int
    delta: int
    t_in: tuple[float, ...]
    m_ar: int
    t_out: tuple[float, ...] = ()
    clean_level: float = 0.0
    noise_level: float = 1.0
    progress: tuple[float, ...] | None = None
    shift: float = 1.0
    net_frames: int | None = None
    lookahead: int = 0
    references: ReferenceRule = field(default=NO_REFERENCES)
    name: str = "custom"
    note: str = ""

    def __post_init__(self) -> None:
        if self.w < 1 or not 1 <= self.delta <= self.w:
            raise ValueError(
                f"w={self.w}, delta={self.delta}; a window has at least 1 frame and finishes 1 to w of them"
            )
        if self.m_ar < 1:
            raise ValueError(f"m_ar={self.m_ar}; an autoregressive step has at least 1 sub-step")
        object.__setattr__(self, "t_in", tuple(float(t) for t in self.t_in))
        wanted = (
            tuple(self.t_out) if self.t_out else (self.clean_level,) * self.delta + self.t_in[: self.w - self.delta]
        )
        object.__setattr__(self, "t_out", tuple(float(t) for t in wanted))
        for name in ("t_in", "t_out"):
            levels = getattr(self, name)
            if len(levels) != self.w:
                raise ValueError(f"{name} has {len(levels)} levels for {self.w} slots; give one per slot")
            bad = [t for t in levels if not 0.0 <= t <= 1.0]
            if bad:
                raise ValueError(f"{name} contains {bad[0]}; levels are fractions of the noisiest one, 0 to 1")
        if not 0.0 <= self.clean_level < self.noise_level <= 1.0:
            raise ValueError(
                f"clean_level={self.clean_level}, noise_level={self.noise_level}; need 0 <= clean < noise <= 1"
            )
        self._check_sub_steps()
        if self.net_frames is not None and not 1 <= self.net_frames <= self.w:
            raise ValueError(f"net_frames={self.net_frames}; the network takes 1 to w={self.w} window frames per call")
        if self.lookahead and (self.net_frames is None or not 0 < self.lookahead < self.net_frames):
            raise ValueError(
                f"lookahead={self.lookahead}, net_frames={self.net_frames}; fewer frames than a call's fit in front"
            )

    def _check_sub_steps(self) -> None:
        if not self.shift > 0:
            raise ValueError(f"shift={self.shift}; it must be positive, 1.0 changes nothing")
        if self.progress is None:
            return
        left = tuple(float(p) for p in self.progress)
        falling = all(a > b for a, b in zip(left, (*left[1:], 0.0)))
        if len(left) != self.m_ar or left[0] != 1.0 or not falling:
            raise ValueError(
                f"progress={left}; give m_ar={self.m_ar} falling numbers that start at 1 and stay above 0"
            )
        object.__setattr__(self, "progress", left)

    # ---- the three conditions

    def is_monotone(self) -> bool:
        """Levels never fall from one slot to the next, and every slot is denoised."""
        return self._not_monotone() is None

    def is_circular(self) -> bool:
        """What slot j + delta puts out is what slot j takes in."""
        return self._not_circular() is None

    def has_zero_t_boundary(self) -> bool:
        """The first delta slots leave clean, the last delta slots enter as noise."""
        return self._not_at_boundary() is None

    def validate(self) -> WindowSchedule:
        """This schedule, if all three conditions hold.

        Raises:
            ValueError: naming the condition, the first failing slot and its levels.
        """
        for reason in (self._not_monotone(), self._not_circular(), self._not_at_boundary()):
            if reason is not None:
                raise ValueError(f"schedule {self.name!r} is {reason}")
        return self

    def _not_monotone(self) -> str | None:
        for name in ("t_in", "t_out"):
            levels = getattr(self, name)
            for j in range(self.w - 1):
                if levels[j + 1] - levels[j] < -STRICT:
                    return (
                        f"not monotone: {name} falls from {levels[j]:g} in slot {j} to {levels[j + 1]:g} in slot "
                        f"{j + 1}; older frames must be at most as noisy"
                    )
        for j, (start, end) in enumerate(zip(self.t_in, self.t_out)):
            if not end < start - STRICT:
                return f"not monotone: slot {j} goes from {start:g} to {end:g}; every slot must lose noise in a step"
        return None

    def _not_circular(self) -> str | None:
        for j in range(self.w - self.delta):
            if abs(self.t_out[j + self.delta] - self.t_in[j]) > EQUAL:
                return (
                    f"not circular: slot {j + self.delta} ends at {self.t_out[j + self.delta]:g} and becomes slot "
                    f"{j}, which starts at {self.t_in[j]:g}; the two must be equal"
                )
        return None

    def _not_at_boundary(self) -> str | None:
        for j in range(self.delta):
            if abs(self.t_out[j] - self.clean_level) > EQUAL:
                return f"off its boundary: slot {j} leaves at {self.t_out[j]:g}, not clean ({self.clean_level:g})"
        for j in range(self.w - self.delta, self.w):
            if abs(self.t_in[j] - self.noise_level) > EQUAL:
                return f"off its boundary: slot {j} enters at {self.t_in[j]:g}, not as noise ({self.noise_level:g})"
        return None

    # ---- what follows from it

    @property
    def free_levels(self) -> int:
        """Levels that the conditions leave open."""
        return self.w - self.delta

    @property
    def steps_per_frame(self) -> int:
        """Autoregressive steps from pure noise to a finished frame."""
        return math.ceil(self.w / self.delta)

    @property
    def updates_per_frame(self) -> int:
        """Denoising updates that a frame gets in all."""
        return self.m_ar * self.steps_per_frame

    @property
    def calls_per_step(self) -> int:
        """Network calls of one autoregressive step."""
        return self.m_ar * len(self.pieces())

    def level(self, m: int) -> tuple[float, ...]:
        """Levels of all slots before sub-step m, 0 <= m <= m_ar; `level(m_ar)` is t_out."""
        if not 0 <= m <= self.m_ar:
            raise ValueError(f"sub-step {m} of a schedule with m_ar={self.m_ar}; allowed are 0 to {self.m_ar}")
        if m == 0:
            return self.t_in
        if m == self.m_ar:
            return self.t_out
        if self.progress is None:
            done = m / self.m_ar
            levels = tuple(a + (b - a) * done for a, b in zip(self.t_in, self.t_out))
        else:
            left = self.progress[m]
            levels = tuple(b + (a - b) * left for a, b in zip(self.t_in, self.t_out))
        if self.shift == 1.0:
            return levels
        # warping the way between the ends of a slot, not the ends themselves, keeps the schedule circular
        low, high = self.t_out, self.t_in
        return tuple(b + (a - b) * warp((t - b) / (a - b), self.shift) for t, a, b in zip(levels, high, low))

    def pieces(self) -> list[tuple[int, int, int]]:
        """Calls of one sub-step, from the noisy end to the clean one.

        Returns:
            (start, kept, end): slots [start, end) go in and [kept, end) are moved; with lookahead the first calls'
            `start` lies before slot 0, among the finished frames.

        Example:
            >>> WindowSchedule(8, 1, staircase(8, 1), 1, net_frames=4, lookahead=2).pieces()
            [(4, 6, 8), (2, 4, 6), (0, 2, 4), (-2, 0, 2)]
        """
        size = self.net_frames or self.w
        moved = size - self.lookahead
        ends = range(self.w, 0, -moved)
        return [(max(end - size, -self.lookahead), max(end - moved, 0), end) for end in ends]

    def with_(self, **changes: object) -> WindowSchedule:
        """A copy with some settings changed; t_out is worked out again unless it is given."""
        return replace(self, **{"t_out": (), **changes})  # type: ignore[arg-type]
