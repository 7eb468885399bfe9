"""Feature rows of a set of pictures with their partial sums, in one .npz: what workers leave and `eval merge` adds up.

    shard = FeatureShard.of(ids, rows, facts);  shard.save("a.npz")
    merged = merge([FeatureShard.load("a.npz"), FeatureShard.load("b.npz")])

Members of the file: ids [n] text, rows [n, D] float32 on the feature grid, count, total [D] and outer [D, D] float64,
facts (JSON: feature extractor, rule, ...). Rows serve the kernel distance, halves and resampling; the sums serve the
Fréchet distance and are exact, see `frechet`.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .frechet import Moments, on_grid

__all__ = ["FeatureShard", "merge"]

MEMBERS = ("ids", "rows", "count", "total", "outer", "facts")


@dataclass(frozen=True)
class FeatureShard:
    """Features of some pictures.

    Args:
        ids: picture names, unique; their order is the order of the rows.
        rows: [n, D] float32, multiples of `frechet.GRID`.
        moments: of the rows.
        facts: JSON-ready; "features" describes the extractor and must agree between shards that are added.
    """

    ids: tuple[str, ...]
    rows: Tensor
    moments: Moments
    facts: Mapping[str, Any]

    @staticmethod
    def of(ids: Sequence[str], rows: Tensor, facts: Mapping[str, Any]) -> FeatureShard:
        """Sums up rows [n, D]; raises ValueError when ids and rows do not match or an id is used twice."""
        if len(ids) != len(rows) or len(set(ids)) != len(ids):
            raise ValueError(
                f"{len(ids)} ids ({len(set(ids))} distinct) for {len(rows)} rows; give one distinct id per row"
            )
        snapped = on_grid(rows)
        return FeatureShard(tuple(ids), snapped, Moments.of(snapped), dict(facts))

    def save(self, path: str | Path) -> None:
        """Writes the file whole or not at all."""
        buffer = io.BytesIO()
        np.savez(
            buffer,
            ids=np.array(self.ids, dtype=np.str_),
            rows=self.rows.numpy(),
            count=np.int64(self.moments.count),
            total=self.moments.total.numpy(),
            outer=self.moments.outer.numpy(),
            facts=np.array(json.dumps(self.facts, sort_keys=True)),
        )
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_bytes(buffer.getvalue())
        os.replace(temporary, path)

    @staticmethod
    def load(path: str | Path) -> FeatureShard:
        """Reads a file of `save`.

        Raises:
            ValueError: the file is missing, cut off or something else.
        """
        try:
            with np.load(path, allow_pickle=False) as data:
                ids, rows, count, total, outer, facts = (data[name] for name in MEMBERS)
        except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile) as error:
            raise ValueError(
                f"{path} is no feature file ({error}); give a .npz that `mediaspec eval image` wrote"
            ) from error
        moments = Moments(int(count), torch.from_numpy(total), torch.from_numpy(outer))
        return FeatureShard(tuple(str(i) for i in ids), torch.from_numpy(rows), moments, json.loads(str(facts)))


def merge(shards: Sequence[FeatureShard]) -> FeatureShard:
    """Joins shards in the order of their ids; equal, bit for bit, to one shard over all pictures.

    Raises:
        ValueError: no shards, different extractors, or a picture in two shards.
    """
    if not shards:
        raise ValueError("nothing to merge; name at least one .npz file")
    features = [shard.facts.get("features") for shard in shards]
    if any(f != features[0] for f in features):
        raise ValueError(f"the shards were made with different features: {features}; extract all of them alike")
    ids = [i for shard in shards for i in shard.ids]
    if len(set(ids)) != len(ids):
        twice = sorted({i for i in ids if ids.count(i) > 1})[:5]
        raise ValueError(f"pictures {', '.join(twice)} are in two shards; give each worker its own pictures")
    order = sorted(range(len(ids)), key=lambda k: ids[k])
    moments = shards[0].moments
    for shard in shards[1:]:
        moments = moments + shard.moments
    rows = torch.cat([shard.rows for shard in shards])[torch.tensor(order)]
    common = {k: v for k, v in shards[0].facts.items() if all(s.facts.get(k) == v for s in shards)}
    return FeatureShard(tuple(ids[k] for k in order), rows, moments, common)
