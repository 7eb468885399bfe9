"""Feature shards on disk: their texts cut into pieces, packed into rows, read row by row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

__all__ = ["Piece", "Shards", "Slots", "pack", "pieces"]


@dataclass(frozen=True)
class Piece:
    """Positions [first, stop) of the packed stream of one shard, all of one text; stop - first - 1 slots."""

    shard: str
    first: int
    stop: int

    @property
    def slots(self) -> int:
        return self.stop - self.first - 1


@dataclass(frozen=True)
class Slots:
    """A batch of rows; slot i of a piece stands for its position i and holds token i + 1.

    Args:
        tokens: [R, N] int64 token i + 1.
        features: [R, N, F * D] fp16 at position i.
        following: [R, N, F * D] fp16 at position i + 1: the last layer's part gives the law of token i + 2.
        label: [R, N] int64 token i + 2, -1 where the piece ends.
        own: [R, N] bool, the target wrote token i + 2.
        positions: [R, N] int64.
        local: [R, N] int64 slots since the piece's beginning.
        real: [R, N] bool, False in the rest of a row that no piece fills.
    """

    tokens: Tensor
    features: Tensor
    following: Tensor
    label: Tensor
    own: Tensor
    positions: Tensor
    local: Tensor
    real: Tensor


class Shards:
    """The shard files of a folder; small tensors are kept in memory, features are read where they are needed.

    Args:
        folder: with `shard_*.safetensors`.

    Raises:
        ValueError: the folder has none.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._small: dict[str, dict[str, Tensor]] = {}
        self._files: dict[str, Any] = {}
        self.rescan()
        if not self._small:
            raise ValueError(f"{folder} holds no shard_*.safetensors; collect features of the target first")

    def rescan(self) -> None:
        """Takes up files that have come since."""
        for path in sorted(self.folder.glob("shard_*.safetensors")):
            if path.name not in self._small:
                self._open(path.name)

    def _open(self, name: str) -> None:
        self._files[name] = file = safe_open(self.folder / name, framework="pt")
        self._small[name] = {key: file.get_tensor(key) for key in ("tokens", "starts", "positions", "answer")}

    def names(self) -> list[str]:
        return sorted(self._small)

    def small(self, name: str) -> dict[str, Tensor]:
        if name not in self._small:
            self._open(name)
        return self._small[name]

    def features(self, name: str, first: int, stop: int) -> Tensor:
        """[stop - first, F * D] fp16."""
        part: Tensor = self._files[name].get_slice("features")[first:stop]
        return part

    def frequencies(self, vocab_size: int, text_share: float) -> Tensor:
        """[V] float64 how often every token occurs, tokens the target did not write counted with `text_share`.

        Tokens that do not occur follow in the order of their ids: byte-pair vocabularies number frequent ones first.
        """
        counts = torch.linspace(1e-3, 0.0, vocab_size, dtype=torch.float64)
        for small in self._small.values():
            weight = torch.where(small["answer"] == 1, 1.0, text_share).double()
            counts.scatter_add_(0, small["tokens"].long(), weight)
        return counts

    def scale(self, size: int, limit: int = 4096) -> float:
        """Median root mean square of the last feature, the usual scale of the target's last hidden states."""
        name = self.names()[0]
        part = self.features(name, 0, min(limit, len(self.small(name)["tokens"])))
        return float(part[:, -size:].float().pow(2).mean(-1).sqrt().median())

    def read(self, rows: list[list[Piece]], length: int) -> Slots:
        """The slots of packed rows, `length` per row."""
        width = self._files[rows[0][0].shard].get_slice("features").get_shape()[1]
        shape = (len(rows), length)
        ints = {key: torch.zeros(shape, dtype=torch.int64) for key in ("tokens", "positions", "local")}
        label, own = torch.full(shape, -1), torch.zeros(shape, dtype=torch.bool)
        real = torch.zeros(shape, dtype=torch.bool)
        features = torch.zeros(*shape, width, dtype=torch.float16)
        following = torch.zeros(*shape, width, dtype=torch.float16)
        for r, row in enumerate(rows):
            at = 0
            for piece in row:
                small, n, first = self.small(piece.shard), piece.slots, piece.first
                here, stop = slice(at, at + n), piece.stop
                ints["tokens"][r, here] = small["tokens"][first + 1 : stop].long()
                ints["positions"][r, here] = small["positions"][first : stop - 1].long()
                ints["local"][r, here] = torch.arange(n)
                label[r, at : at + n - 1] = small["tokens"][first + 2 : stop].long()
                own[r, at : at + n - 1] = small["answer"][first + 2 : stop] == 1
                # the law behind the last token is of the same kind as the one before
                own[r, at + n - 1] = small["answer"][stop - 1] == 1
                real[r, here] = True
                part = self.features(piece.shard, first, stop)
                features[r, here], following[r, here] = part[:-1], part[1:]
                at += n
        return Slots(label=label, own=own, real=real, features=features, following=following, **ints)


def pieces(shards: Shards, names: list[str], length: int, wanted: Callable[[int], bool]) -> list[Piece]:
    """The texts whose number in their shard is `wanted`, cut into pieces of at most `length` slots.

    A slot needs the token behind it, so pieces overlap by one position: every position but a text's last is a slot of
    one piece. Fewer than 4 slots are left out.
    """
    found = []
    for name in names:
        starts = shards.small(name)["starts"].tolist()
        for text, (begin, end) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
            if wanted(text):
                cuts = range(begin, end - 1, length)
                found += [Piece(name, first, min(first + length + 1, end)) for first in cuts]
    return [piece for piece in found if piece.slots >= 4]


def pack(order: list[Piece], length: int, window: int = 16) -> list[list[Piece]]:
    """Rows of at most `length` slots, pieces in the given order: first fit among the last `window` open rows."""
    rows: list[list[Piece]] = []
    room: list[int] = []
    for piece in order:
        for i in range(max(len(rows) - window, 0), len(rows)):
            if room[i] >= piece.slots:
                rows[i].append(piece)
                room[i] -= piece.slots
                break
        else:
            rows.append([piece])
            room.append(length - piece.slots)
    return rows
