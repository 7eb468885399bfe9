"""Which layers become lazy, decided while a prefill climbs them (arXiv:2410.13846, algorithm 1).

The last w prompt queries of every row judge a layer as soon as it has run. A prompt that fits one pass gives the
paper's algorithm: never more than P + 1 layers hold all keys. A longer prompt runs in chunks through all layers; a
layer's true ratio is then known in the last chunk only, and before it a layer is given up early when the tails of two
successive chunks agree that it is among the L - P laziest by a margin. What is given up does not come back.

Letters: R rows, N positions of a pass, H query heads, Hkv key heads, w judging queries, C slots, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .laziness import JUDGES, Laziness, score, weigh
from .lazy_ratio import LayerQueue
from .logits import LogitForm, strip_positions
from .output_error import LayerSight

__all__ = ["LayerSelection", "LightTransfer"]


@dataclass(frozen=True)
class LightTransfer:
    """Settings of LightTransfer.

    Args:
        full_layers: P, layers that keep all keys, out of those without a sliding window; None: half, rounded up. The
            paper uses half for reading and three quarters for looking things up.
        w_sink, w_recent: first and last keys a lazy layer keeps. The paper's 1020 recent keys leave 0.56 of the bytes
            at 8k tokens with half the layers lazy, 508 leave 0.53 at the same score (its table on the window).
        w_last: prompt queries that judge.
        judge: "output": the layers whose output changes least without the other keys become lazy (`output_error`);
            "mass": those with the largest lazy ratio, as in the paper.
        min_head_ratio: a layer with a key head below this stays full, so that one head that looks far back is not
            averaged away; 0 is off, 0.5 suits retrieval.
        lazy_layers: a fixed set instead of a choice per prompt (for models tuned so).
        margin: lead over the marginal layer that lets a layer go before the prompt's last chunk, in logarithms of
            errors or in ratios; None: 0.25 and 0.05.
        chunk: longest prompt that is run in one pass.

    Raises:
        ValueError: a value out of range, or both `full_layers` and `lazy_layers`.

    Example:
        >>> LightTransfer(full_layers=2).choose(6, windows=[])
        (2, None)
    """

    full_layers: int | None = None
    w_sink: int = 4
    w_recent: int = 508
    w_last: int = 32
    judge: str = "output"
    min_head_ratio: float = 0.0
    lazy_layers: tuple[int, ...] | None = None
    margin: float | None = None
    chunk: int = 16384

    def __post_init__(self) -> None:
        for name, least in (("w_sink", 0), ("w_recent", 1), ("w_last", 1), ("chunk", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}; write an integer >= {least}")
        if self.judge not in JUDGES:
            raise ValueError(f"judge={self.judge!r}; write one of {', '.join(map(repr, JUDGES))}")
        if not 0 <= self.min_head_ratio <= 1 or (self.margin is not None and self.margin < 0):
            raise ValueError(
                f"min_head_ratio={self.min_head_ratio} is a share of attention from 0 to 1, margin={self.margin} at "
                f"least 0"
            )
        if self.lazy_layers is not None:
            object.__setattr__(self, "lazy_layers", tuple(sorted(set(self.lazy_layers))))
            if self.full_layers is not None:
                raise ValueError("full_layers says how many to choose and lazy_layers which; give one of them")

    def choose(self, layers: int, windows: Sequence[int]) -> tuple[int, frozenset[int] | None]:
        """P and the fixed lazy set for a model of `layers` layers, of which `windows` are sliding already.

        Raises:
            ValueError: more full layers than there are, or a lazy layer that does not exist or slides.
        """
        able = [layer for layer in range(layers) if layer not in windows]
        if self.lazy_layers is not None:
            wrong = [layer for layer in self.lazy_layers if layer not in able]
            if wrong:
                raise ValueError(f"layers {wrong} cannot be lazy; layers without a sliding window are {able}")
            return len(able) - len(self.lazy_layers), frozenset(self.lazy_layers)
        keep = -(-len(able) // 2) if self.full_layers is None else self.full_layers
        if not 0 <= keep <= len(able):
            raise ValueError(f"full_layers={keep}; the model has {len(able)} layers without a sliding window")
        return keep, None


@dataclass
class LayerSelection:
    """The choice of one prefill.

    Args:
        settings: of the policy.
        layers: those that may become lazy; keep: P of them stay full.
        lengths: [R] int64 prompt lengths; total: positions of the prefill, with padding.
    """

    settings: LightTransfer
    layers: tuple[int, ...]
    keep: int
    lengths: Tensor
    total: int
    ratios: dict[int, float] = field(default_factory=dict)
    errors: dict[int, float] = field(default_factory=dict)
    _gone: set[int] = field(default_factory=set)
    _early: frozenset[int] = frozenset()
    _seen: dict[int, float] = field(default_factory=dict)
    _tails: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    _queue: LayerQueue | None = None

    def look(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        first: int,
        form: LogitForm,
        sight: LayerSight | None = None,
    ) -> int | None:
        """Judges a layer by its [R, H, N, D] queries at positions `first` on; returns the layer to give up now.

        Args:
            keys, values: [R, Hkv, C, D] all of the layer's, this pass's included.
            form: of its logits; sight: of the layer, None where the model shows none.
        """
        if layer not in self.layers or layer in self._gone:
            return None
        stop = first + queries.shape[2]
        lengths = self.lengths.clamp(max=stop)
        tails = {"queries": self._tail(layer, "queries", queries, first, lengths)}
        residual: Tensor | None = None
        if sight is not None and self.settings.judge == "output":
            tails["residual"] = self._tail(layer, "residual", sight.residual[:, None], first, lengths)
            residual = tails["residual"][:, 0]
        kept = self.settings.w_sink, self.settings.w_recent
        found = weigh(self.settings.judge, tails["queries"], keys, values, lengths, *kept, form, sight, residual)
        heads, error = self._host(found)
        ratio = sum(heads) / len(heads)
        keep = min(heads) < self.settings.min_head_ratio
        if stop < self.total:
            self._tails.update({(layer, kind): tail for kind, tail in tails.items()})
            if not keep:
                self._seen[layer] = score(ratio, error)
            return None
        self.ratios[layer] = ratio
        if error is not None:
            self.errors[layer] = error
        self._forget(layer)
        if self._queue is None:
            self._queue = LayerQueue(self.keep)
        given = self._queue.push(layer, score(ratio, error), keep)
        if given is not None:
            self._gone.add(given)
        return given

    def close(self) -> list[int]:
        """Ends a chunk that is not the last; the layers to give up early."""
        seen, self._seen = self._seen, {}
        order = sorted(seen, key=lambda layer: (-seen[layer], layer))
        spare = len(self.layers) - self.keep - len(self._gone)
        usual = 0.25 if self.settings.judge == "output" else 0.05
        margin = usual if self.settings.margin is None else self.settings.margin
        bar = seen[order[spare]] + margin if spare < len(order) else float("-inf")
        ahead = frozenset(layer for layer in order[: max(spare, 0)] if seen[layer] >= bar)
        given = sorted(ahead & self._early)
        self._early = ahead - set(given)
        for layer in given:
            self._gone.add(layer)
            self._forget(layer)
        return given

    def _forget(self, layer: int) -> None:
        for kind in ("queries", "residual"):
            self._tails.pop((layer, kind), None)

    def _tail(self, layer: int, kind: str, given: Tensor, first: int, lengths: Tensor) -> Tensor:
        """[R, X, w, D] of `given` [R, X, N, D] at the last w positions, from this pass and the end of the last one."""
        count = self.settings.w_last
        at = strip_positions(lengths, count)
        rows, heads, _, size = given.shape

        def pick(source: Tensor, place: Tensor) -> Tensor:
            index = place.clamp(0, source.shape[2] - 1)[:, None, :, None]
            return source.gather(2, index.expand(rows, heads, count, size))

        tail = pick(given, at - first)
        if (layer, kind) not in self._tails:
            return tail
        before = self.lengths.clamp(max=first)[:, None]
        earlier = pick(self._tails[layer, kind], at - before + count)
        return torch.where((at < before)[:, None, :, None], earlier, tail)

    @staticmethod
    def _host(found: Laziness) -> tuple[list[float], float | None]:
        """The one read of a layer, means over rows: memory can be given back once the host knows which layer's."""
        heads = found.ratio.mean(0)
        if found.error is None:
            return heads.tolist(), None
        *ratios, error = torch.cat([heads, found.error.mean()[None]]).tolist()
        return ratios, error
