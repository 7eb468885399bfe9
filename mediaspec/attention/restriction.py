"""Which committed keys a pass reads, and who looks on: the seam between drafters that save reading and a target.

A drafter that runs the target's own weights over fewer keys (`lazy`, `sparse`) opens a restriction around the draft
passes of one round. The target then reads only the named keys of the store, plus everything behind the lengths at
which the restriction was opened: drafts of this round, and the inputs of the pass, under the pass's own mask.

    with target.restricted(state.cache, restriction):
        logits = target.score(tokens, state.cache).logits

What the target's verification sees is handed over by `KVStore.watch`: it lives as long as the store, so one run.

Letters: R rows, N positions, H query heads, Hkv key heads, S slots, K keys, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor

from ..core.kv import Slots
from .logits import LogitForm

__all__ = ["Restriction", "Visible", "Watch", "Window"]


@dataclass(frozen=True)
class Window:
    """The first `sink` and the last `recent` committed keys of a row.

    Args:
        sink, recent: numbers of keys, at least 0.
        rows: [R] which rows are restricted; None: all. A layer with rows of both kinds is read whole and masked.

    Raises:
        ValueError: a negative number.
    """

    sink: int
    recent: int
    rows: tuple[bool, ...] | None = None

    def __post_init__(self) -> None:
        if self.sink < 0 or self.recent < 0:
            raise ValueError(f"sink={self.sink} and recent={self.recent} are numbers of keys; give 0 or more")


Visible: TypeAlias = "Window | Tensor | None"
"""None: all keys. A Tensor: [R, Hkv or 1, K] int64 positions of committed keys (below the row's length), each at most
once, -1 where a row has fewer. Rows must see at least one key: the pass's own inputs count."""


class Restriction(Protocol):
    """What the layers of a target may read during the draft passes of one round.

    `visible` is asked once per layer and round, so what is gathered for a tensor of positions is gathered once.
    Layers with a sliding window are not asked: they read their window.
    """

    def visible(self, layer: int) -> Visible: ...


class Watch(Protocol):
    """Is shown the attention of every unrestricted pass, layer by layer, once its keys are in the store.

    Args:
        layer: index; queries: [R, H, N, D] with rotation, not scaled.
        keys: [R, Hkv, live, D] view of the layer's live slots, this pass's inputs included; for chains, by position.
        slots: positions and mask of the pass; a sliding window is in `form` and not in the mask.
        form: what makes logits of the products.
    """

    def __call__(self, layer: int, queries: Tensor, keys: Tensor, slots: Slots, form: LogitForm) -> None: ...
