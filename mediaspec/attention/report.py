"""The report of `mediaspec inspect`: one record per query head, JSON there and back, and what it says in short."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from .pattern import HeadPattern, SparsePattern

__all__ = ["KINDS", "AttentionReport", "HeadReport"]

KINDS = ("streaming", "slash", "vertical", "diffuse")


@dataclass(frozen=True)
class HeadReport:
    """One query head.

    Args:
        layer, head, key_head: indices.
        kind: "diffuse" (attention spreads over more than n / 8 keys), "slash" (single distances hold half of the
            mass), "streaming" (sinks and the last 256 keys hold 95 %), else "vertical" (columns that depend on the
            text).
        sink_score: alpha_0 over the strip; None in a layer whose window no longer holds position 0.
        sink_set: the model's sinks that this head looks at.
        lazy_ratio: mass on the first and last keys a lazy layer would keep, mean of ratios over queries.
        recent_mass: mass on the last 256, 1024 and 4096 keys.
        slash: (distance, score) with score >= kappa, strongest first, at most 8.
        vertical_top: (key, mean mass) of the strongest columns that are neither sinks nor the strip's own.
        effective_keys: exp of the mean entropy.
        q_rank1, k_rank1: share of the largest squared singular value before rotation; None where unknown.
        closed_form_tv: total variation between the measured profile and the closed form of mean vectors.
        pattern: of its key head.
        pattern_mass: mass of this head that the pattern keeps.
    """

    layer: int
    head: int
    key_head: int
    kind: str
    sink_score: float | None
    sink_set: tuple[int, ...]
    lazy_ratio: float
    recent_mass: dict[int, float]
    slash: tuple[tuple[int, float], ...]
    vertical_top: tuple[tuple[int, float], ...]
    effective_keys: float
    q_rank1: float | None
    k_rank1: float | None
    closed_form_tv: float | None
    pattern: HeadPattern
    pattern_mass: float


@dataclass(frozen=True)
class AttentionReport:
    """All heads of a model on one prompt.

    Args:
        model: its name; prompt_sha256: of the token ids as little-endian int64; dtype: of keys and queries.
        tokens: n; rows: w really used; epsilon, kappa, lazy_at: thresholds.
        sink_set: positions that are sinks of the model.
        value_ratio: per layer, norm of the strongest sink's value over the median norm, mean over key heads.
        heads: layer by layer.
    """

    model: str
    prompt_sha256: str
    dtype: str
    tokens: int
    rows: int
    epsilon: float
    kappa: float
    lazy_at: float
    sink_set: tuple[int, ...]
    value_ratio: tuple[float, ...]
    heads: tuple[HeadReport, ...]

    def layers(self) -> list[list[HeadReport]]:
        """The heads of each layer."""
        count = self.heads[-1].layer + 1
        return [[one for one in self.heads if one.layer == layer] for layer in range(count)]

    def sinks(self) -> list[HeadReport]:
        """Heads whose mean attention on position 0 exceeds epsilon."""
        return [one for one in self.heads if one.sink_score is not None and one.sink_score > self.epsilon]

    def slashes(self, least: int = 0) -> list[HeadReport]:
        """Heads that are slash-dominant at a distance of at least `least`."""
        return [one for one in self.heads if any(distance >= least for distance, _ in one.slash)]

    def lazy(self) -> list[HeadReport]:
        """Heads with a lazy ratio of at least `lazy_at`."""
        return [one for one in self.heads if one.lazy_ratio >= self.lazy_at]

    def lazy_per_layer(self) -> list[float]:
        """Mean lazy ratio of each layer's heads; arXiv:2410.13846, section 3."""
        return [statistics.fmean(one.lazy_ratio for one in layer) for layer in self.layers()]

    def pattern(self) -> SparsePattern:
        """What the sparse drafter takes as a static pattern."""
        found = []
        for layer in self.layers():
            of = {one.key_head: one.pattern for one in layer}
            found.append(tuple(of[head] for head in sorted(of)))
        return SparsePattern(tuple(found), self.model)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: the fields, a summary, and each key head's pattern once (under "patterns")."""
        data = asdict(replace(self, heads=()))
        data["summary"] = {
            "sinks": [[one.layer, one.head, _short(one.sink_score)] for one in self.sinks()],
            "slashes": [[one.layer, one.head, *one.slash[0]] for one in self.slashes()],
            "lazy": [[one.layer, one.head, _short(one.lazy_ratio)] for one in self.lazy()],
            "lazy_per_layer": [_short(ratio) for ratio in self.lazy_per_layer()],
            "kinds": {kind: sum(one.kind == kind for one in self.heads) for kind in KINDS},
        }
        data["heads"] = [
            {key: _short(value) for key, value in vars(one).items() if key != "pattern"} for one in self.heads
        ]
        data["patterns"] = self.pattern().to_dict()["heads"]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> AttentionReport:
        """What `to_dict` gave, back from JSON."""
        patterns = SparsePattern.from_dict(data).heads
        heads = []
        for one in data["heads"]:
            one = {**one, "pattern": patterns[one["layer"]][one["key_head"]]}
            one["recent_mass"] = {int(window): mass for window, mass in one["recent_mass"].items()}
            for key in ("slash", "vertical_top"):
                one[key] = tuple((int(place), float(value)) for place, value in one[key])
            heads.append(HeadReport(**{**one, "sink_set": tuple(one["sink_set"])}))
        known = {key: data[key] for key in cls.__dataclass_fields__}
        lists = {key: tuple(data[key]) for key in ("sink_set", "value_ratio")}
        return cls(**{**known, **lists, "heads": tuple(heads)})


def _short(value: Any) -> Any:
    """Floats to five digits, inside lists and dicts too: a report is read by people and kept in a repository."""
    if isinstance(value, float):
        return round(value, 5)
    if isinstance(value, dict):
        return {key: _short(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_short(one) for one in value]
    return value
