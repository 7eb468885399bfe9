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

from .lazy_ratio import LayerQueue, kept_keys, lazy_ratio
from .logits import LogitForm, strip_positions
from .strip import strip_lse

__all__ = ["LayerSelection", "LightTransfer"]

TILE = 1024  # keys per step of the row sums: 9 heads and 32 rows make 1.2 MB


@dataclass(frozen=True)
class LightTransfer:
    """Settings of LightTransfer.

    Args:
        full_layers: P, layers that keep all keys, out of those without a sliding window; None: half, rounded up. The
            paper uses half for reading and three quarters for looking things up.
        w_sink, w_recent: first and last keys a lazy layer keeps. The paper's 1020 recent keys leave 0.56 of the bytes
            at 8k tokens with half the layers lazy, 508 leave 0.53 at the same score (its table on the window).
        w_last: prompt queries that judge.
        min_head_ratio: a layer with a key head below this stays full, so that one head that looks far back is not
            averaged away; 0 is off, 0.5 suits retrieval.
        lazy_layers: a fixed set instead of a choice per prompt (for models tuned so).
        margin: lead over the marginal layer that lets a layer go before the prompt's last chunk.
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
    min_head_ratio: float = 0.0
    lazy_layers: tuple[int, ...] | None = None
    margin: float = 0.05
    chunk: int = 16384

    def __post_init__(self) -> None:
        for name, least in (("w_sink", 0), ("w_recent", 1), ("w_last", 1), ("chunk", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}; write an integer >= {least}")
        if not 0 <= self.min_head_ratio <= 1 or self.margin < 0:
            raise ValueError(
                f"min_head_ratio={self.min_head_ratio} and margin={self.margin} compare shares of attention; write "
                f"numbers from 0 to 1"
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
    _gone: set[int] = field(default_factory=set)
    _early: frozenset[int] = frozenset()
    _seen: dict[int, float] = field(default_factory=dict)
    _tails: dict[int, Tensor] = field(default_factory=dict)
    _queue: LayerQueue | None = None

    def look(self, layer: int, queries: Tensor, keys: Tensor, first: int, form: LogitForm) -> int | None:
        """Judges a layer by its [R, H, N, D] queries at positions `first` on; returns the layer to give up now.

        `keys` [R, Hkv, C, D] are all of the layer's, this pass's included.
        """
        if layer not in self.layers or layer in self._gone:
            return None
        stop = first + queries.shape[2]
        lengths = self.lengths.clamp(max=stop)
        tail = self._tail(layer, queries, first, lengths)
        lse = strip_lse(tail, keys, lengths, form, TILE)
        kept, at = kept_keys(keys, lengths, self.settings.w_sink, self.settings.w_recent)
        heads = self._host(lazy_ratio(tail, kept, at, lse, lengths, form).mean(0))
        ratio = sum(heads) / len(heads)
        keep = min(heads) < self.settings.min_head_ratio
        if stop < self.total:
            self._tails[layer] = tail
            self._seen[layer] = 0.0 if keep else ratio
            return None
        self.ratios[layer] = ratio
        self._tails.pop(layer, None)
        if self._queue is None:
            self._queue = LayerQueue(self.keep)
        given = self._queue.push(layer, ratio, keep)
        if given is not None:
            self._gone.add(given)
        return given

    def close(self) -> list[int]:
        """Ends a chunk that is not the last; the layers to give up early."""
        seen, self._seen = self._seen, {}
        order = sorted(seen, key=lambda layer: (-seen[layer], layer))
        spare = len(self.layers) - self.keep - len(self._gone)
        bar = seen[order[spare]] + self.settings.margin if spare < len(order) else 0.0
        ahead = frozenset(layer for layer in order[: max(spare, 0)] if seen[layer] >= bar)
        given = sorted(ahead & self._early)
        self._early = ahead - set(given)
        self.ratios.update({layer: seen[layer] for layer in given})
        for layer in given:
            self._gone.add(layer)
            self._tails.pop(layer, None)
        return given

    def _tail(self, layer: int, queries: Tensor, first: int, lengths: Tensor) -> Tensor:
        """[R, H, w, D] queries at the last w positions before `lengths`, of this pass and the end of the last one."""
        count = self.settings.w_last
        at = strip_positions(lengths, count)
        rows, heads, _, size = queries.shape

        def pick(source: Tensor, place: Tensor) -> Tensor:
            index = place.clamp(0, source.shape[2] - 1)[:, None, :, None]
            return source.gather(2, index.expand(rows, heads, count, size))

        tail = pick(queries, at - first)
        if layer not in self._tails:
            return tail
        before = self.lengths.clamp(max=first)[:, None]
        earlier = pick(self._tails[layer], at - before + count)
        return torch.where((at < before)[:, None, :, None], earlier, tail)

    @staticmethod
    def _host(heads: Tensor) -> list[float]:
        """The one read of a layer: memory can be given back only once the host knows which layer's."""
        values: list[float] = heads.tolist()
        return values
