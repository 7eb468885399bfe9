"""A key/value store in which lazy layers keep a sink and a recent window only: LightTransfer, arXiv:2410.13846.

Full layers have a slot per position as in `KVStore`; lazy layers a `Ring`. During the prefill every layer attends to
everything, so the first token is exact; a layer's memory is cut as soon as it is known to be lazy and serves the next
layer, so that at most P + 1 layers hold all keys at once (for a prompt of one pass, see `selection`). All rows of a
batch share one lazy set, from the mean ratio of the rows. What a row writes then depends on the others' prompts.

Letters: R rows, N positions of a pass, Hkv key heads, S slots of a ring, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.kv import KVStore, Slots
from ..core.prompt import TokenPrompt
from ..core.tree import TreeSpec
from .logits import LogitForm
from .ring import Ring
from .selection import LayerSelection, LightTransfer

__all__ = ["LayerGroup", "StreamingReport", "StreamingSlots", "StreamingStore"]

SLACK = 32  # ring slots beyond the window, even for short drafts: the order of sums is the same for all draft lengths


@dataclass(frozen=True)
class StreamingSlots(Slots):
    """`Slots` of the full layers, and those of the lazy ones (None while a prefill decides)."""

    ring: Slots | None = None


@dataclass(frozen=True)
class StreamingReport:
    """What the prefill decided.

    Args:
        lazy_layers: in ascending order; ratios: lazy ratio of every judged layer, mean over rows and heads; errors:
            its change of output (`output_error`), where layers were judged by it.
        kv_bytes: bytes of the store; peak_bytes: the most it held during the prefill; full_kv_bytes: of a store that
            keeps everything.
        prompt_lengths: per row.
    """

    lazy_layers: tuple[int, ...]
    ratios: dict[int, float]
    errors: dict[int, float]
    kv_bytes: int
    peak_bytes: int
    full_kv_bytes: int
    prompt_lengths: tuple[int, ...]


class LayerGroup:
    """Layers with equally many slots, as lists: a layer can leave without moving the others."""

    def __init__(self) -> None:
        self.place: dict[int, int] = {}
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def add(self, layer: int, keys: Tensor, values: Tensor) -> None:
        self.place[layer] = len(self.keys)
        self.keys.append(keys)
        self.values.append(values)

    def get(self, layer: int) -> tuple[Tensor, Tensor]:
        place = self.place[layer]
        return self.keys[place], self.values[place]

    def put(self, layer: int, keys: Tensor, values: Tensor) -> None:
        place = self.place[layer]
        self.keys[place], self.values[place] = keys, values

    def pop(self, layer: int) -> tuple[Tensor, Tensor]:
        place = self.place.pop(layer)
        self.place = {other: at - (at > place) for other, at in self.place.items()}
        return self.keys.pop(place), self.values.pop(place)

    @property
    def nbytes(self) -> int:
        return 2 * sum(keys.numel() * keys.element_size() for keys in self.keys)


class StreamingStore(KVStore):
    """Keys and values of one run under LightTransfer.

    Args:
        settings: of the policy.
        layers, rows, heads, head_dim, capacity, dtype, device: as of `KVStore`.
        windows: layers that slide by themselves; they are neither judged nor counted.
        slack: inputs of the longest pass behind the prompt.
        tell: is given the report at the end of the prefill.

    Raises:
        ValueError: settings that do not fit the model; a pass longer than `slack`; a rollback beyond what a ring has.
    """

    def __init__(
        self,
        settings: LightTransfer,
        layers: int,
        rows: int,
        heads: int,
        head_dim: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        *,
        windows: Sequence[int] = (),
        slack: int = 1,
        tell: Callable[[StreamingReport], None] | None = None,
    ) -> None:
        self.settings, self.layers, self._tell = settings, layers, tell
        self._able = tuple(layer for layer in range(layers) if layer not in windows)
        self._keep, self._fixed = settings.choose(layers, windows)
        self._shape, self._capacity, self._dtype = (rows, heads, head_dim), capacity, dtype
        self.ring = Ring.sized(settings.w_sink, settings.w_recent, max(slack, SLACK))
        self.full, self.lazy = LayerGroup(), LayerGroup()
        self._spare: list[tuple[Tensor, Tensor]] = []
        self._selection: LayerSelection | None = None
        self._peak = 0
        self._prompt: tuple[int, ...] = (0,) * rows
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        self.host_lengths = [0] * rows
        self._newest = [-1] * rows
        self.hidden_slots = None
        self.watch = self.sight = None

    @property
    def rows(self) -> int:
        return self._shape[0]

    @property
    def heads(self) -> int:
        return self._shape[1]

    @property
    def head_dim(self) -> int:
        return self._shape[2]

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def capacity(self) -> int:
        return self._capacity

    @property
    def nbytes(self) -> int:
        spare = 2 * sum(keys.numel() * keys.element_size() for keys, _ in self._spare)
        return self.full.nbytes + self.lazy.nbytes + spare

    @property
    def full_nbytes(self) -> int:
        """Bytes of a store that keeps everything."""
        rows, heads, size = self._shape
        each = torch.empty((), dtype=self._dtype).element_size()
        return 2 * self.layers * rows * heads * self._capacity * size * each

    @property
    def filling(self) -> bool:
        """Whether a prefill is deciding which layers are lazy."""
        return self._selection is not None

    def hide(self, padding: Tensor) -> None:
        raise ValueError("a streaming store has no padding slots; give prompts as a TokenPrompt")

    def reserve(self, capacity: int) -> None:
        self._capacity = max(self._capacity, capacity)

    def begin(self, prompt: TokenPrompt, chunk: int) -> int:
        """Starts a prefill on an empty store; returns how many positions to run per pass.

        Where nothing can be left out (P = L, or windows as long as the text), passes are those of a `KVStore`, of
        `chunk` positions, and so are the bits.
        """
        lengths = prompt.host_lengths
        short = self._fixed is None and max(lengths) <= self.settings.w_sink + self.settings.w_recent
        if self._keep == len(self._able) or short or self.ring.size >= self._capacity:
            for layer in range(self.layers):
                self.full.add(layer, *self._new(self._capacity))
            self._peak = self.nbytes
            self._prompt = lengths
            return chunk
        total = prompt.ids.shape[1]
        self._selection = LayerSelection(self.settings, self._able, self._keep, prompt.lengths, total)
        self._prompt = lengths
        return self.settings.chunk

    def finish(self) -> None:
        """Ends the prefill; the lengths are those of the prompts again."""
        chosen, self._selection = self._selection, None
        self._spare.clear()
        self._newest = [length - 1 for length in self._prompt]
        if self._tell is not None:
            lazy, none = tuple(sorted(self.lazy.place)), dict[int, float]()
            known = (none, none) if chosen is None else (chosen.ratios, chosen.errors)
            ratios, errors = (dict(sorted(one.items())) for one in known)
            sizes = (self.nbytes, self._peak, self.full_nbytes)
            self._tell(StreamingReport(lazy, ratios, errors, *sizes, self._prompt))

    def judge(self, layer: int, queries: Tensor, form: LogitForm) -> None:
        """Called behind a layer's attention in the prefill, with its [R, H, N, D] queries: cuts what is lazy."""
        selection, first = self._selection, max(self.host_lengths)
        assert selection is not None
        last = first + queries.shape[2] >= selection.total
        if self._fixed is not None:
            given = [layer] if layer in self._fixed and last else []
        elif layer in self.full.place:
            keys, values = (part[:, :, : first + queries.shape[2]] for part in self.full.get(layer))
            one = selection.look(layer, queries, keys, values, first, form, self.sight)
            given = [] if one is None else [one]
        else:
            given = []
        if layer == self.layers - 1 and not last and self._fixed is None:
            given += selection.close()
        for one in given:
            self._cut(one, selection.lengths.clamp(max=first + queries.shape[2]))

    def plan(self, count: int, tree: TreeSpec | None = None) -> Slots:
        if self.filling:
            first = max(self.host_lengths)
            positions = self.lengths[:, None] + torch.arange(count, device=self.lengths.device)
            return StreamingSlots(first, None, positions, first + count, None)
        slots = super().plan(count, tree)
        ring = None
        if self.lazy.keys:
            self._newest = [max(old, n + count - 1) for old, n in zip(self._newest, self.host_lengths, strict=True)]
            for newest, length in zip(self._newest, self.host_lengths, strict=True):
                if self.ring.lost(newest, length):
                    raise ValueError(
                        f"a pass at position {length}, after one that reached {newest}, would miss keys that the ring "
                        f"of {self.ring.length} slots has overwritten: allocate the cache with more `extra` positions"
                    )
            ring = self.ring.plan(self.lengths, self.host_lengths, count, tree, self._dtype)
        return StreamingSlots(slots.start, slots.index, slots.positions, slots.live, slots.mask, ring)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.lazy.get(layer) if layer in self.lazy.place else self.full.get(layer)

    def write(self, layer: int, slots: Slots, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """As `KVStore.write`; a lazy layer returns its live ring slots, in a prefill with the pass's own behind."""
        if layer in self.lazy.place:
            if self.filling:
                return self._turn(layer, keys, values)
            assert isinstance(slots, StreamingSlots) and slots.ring is not None
            return super().write(layer, slots.ring, keys, values)
        if layer not in self.full.place:
            self.full.add(layer, *(self._spare.pop() if self._spare else self._new(self._capacity)))
            self._peak = max(self._peak, self.nbytes)
        return super().write(layer, slots, keys, values)

    def filled(self, count: int) -> Tensor:
        """[R, S + N] positions of what `write` returns for a lazy layer in a prefill; -1 where there is nothing."""
        selection, first = self._selection, max(self.host_lengths)
        assert selection is not None
        held = self.ring.held(selection.lengths.clamp(max=first) - 1)
        own = torch.arange(first, first + count, device=held.device)
        return torch.cat([held, own.expand(len(held), -1)], 1)

    @torch.inference_mode()  # slots made in a prefill are inference tensors
    def commit(self, path: Tensor, counts: Tensor) -> None:
        order = torch.arange(path.shape[1], device=path.device)
        source, target = self.lengths[:, None] + path, self.lengths[:, None] + order
        for group, place in ((self.full, lambda at: at), (self.lazy, self.ring.slot)):
            for part in (*group.keys, *group.values):
                shape = (self.rows, self.heads, path.shape[1], self.head_dim)
                read, put = (place(at)[:, None, :, None].expand(shape) for at in (source, target))
                part.scatter_(2, put, part.gather(2, read))
        self.lengths = self.lengths + counts

    def select(self, rows: Tensor, host_rows: list[int] | None = None) -> None:
        host_rows = rows.tolist() if host_rows is None else host_rows
        for group in (self.full, self.lazy):
            group.keys = [part.index_select(0, rows) for part in group.keys]
            group.values = [part.index_select(0, rows) for part in group.values]
        self._shape = (len(host_rows), *self._shape[1:])
        self.lengths = self.lengths.index_select(0, rows)
        self.host_lengths = [self.host_lengths[row] for row in host_rows]
        self._newest = [self._newest[row] for row in host_rows]

    def _new(self, slots: int) -> tuple[Tensor, Tensor]:
        rows, heads, size = self._shape
        keys = torch.zeros(rows, heads, slots, size, dtype=self._dtype, device=self.lengths.device)
        return keys, torch.zeros_like(keys)

    def _cut(self, layer: int, lengths: Tensor) -> None:
        """Moves a layer of rows with `lengths` [R] keys from full slots to a ring; its memory serves later layers."""
        keys, values = self.full.pop(layer)
        at = self.ring.held(lengths - 1).clamp(min=0)[:, None, :, None]
        at = at.expand(-1, self.heads, -1, self.head_dim)
        self.lazy.add(layer, keys.gather(2, at), values.gather(2, at))
        self._peak = max(self._peak, self.nbytes + 2 * keys.numel() * keys.element_size())
        unused = self.layers - len(self.full.keys) - len(self.lazy.keys)
        if len(self._spare) < unused:
            self._spare.append((keys, values))

    def _turn(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Moves a ring on by a prefill's chunk [R, Hkv, N, D]; returns the slots before it with the chunk behind."""
        selection, first, count = self._selection, max(self.host_lengths), keys.shape[2]
        assert selection is not None
        held = self.ring.held(selection.lengths.clamp(max=first + count) - 1)
        fresh = (held >= first)[:, None, :, None]
        at = (held - first).clamp(0, count - 1)[:, None, :, None].expand(-1, self.heads, -1, self.head_dim)
        old_keys, old_values = self.lazy.get(layer)
        moved = torch.where(fresh, keys.gather(2, at), old_keys), torch.where(fresh, values.gather(2, at), old_values)
        self.lazy.put(layer, *moved)
        return torch.cat([old_keys, keys], 2), torch.cat([old_values, values], 2)
