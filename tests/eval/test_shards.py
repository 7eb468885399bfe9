"""Feature files: round trip, merging equal to one pass, broken files."""

from pathlib import Path

import numpy as np
import pytest
import torch

from mediaspec.eval.frechet import frechet_distance
from mediaspec.eval.shards import FeatureShard, merge

FACTS = {"features": {"name": "toy", "sha256": "0"}, "rule": "exact"}


def rows(n: int, size: int = 9, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(n, size)).astype(np.float32))


def names(n: int) -> list[str]:
    return [f"{i:06d}" for i in range(n)]


@pytest.mark.parametrize("world", [2, 3, 7])
def test_merged_equals_unsharded(tmp_path: Path, world: int) -> None:
    """Workers take every world-th picture; joining their files in any order gives the bits of one file over all."""
    x, ids = rows(100), names(100)
    whole = FeatureShard.of(ids, x, FACTS)
    files = []
    for rank in reversed(range(world)):
        files.append(tmp_path / f"{rank}.npz")
        FeatureShard.of(ids[rank::world], x[rank::world], FACTS).save(files[-1])
    joined = merge([FeatureShard.load(file) for file in files])
    assert joined.ids == whole.ids and joined.facts == whole.facts
    assert torch.equal(joined.rows, whole.rows)
    assert joined.moments.count == 100
    assert torch.equal(joined.moments.total, whole.moments.total) and torch.equal(
        joined.moments.outer, whole.moments.outer
    )
    other = FeatureShard.of(ids, rows(100, seed=5), FACTS).moments
    assert frechet_distance(joined.moments, other) == frechet_distance(whole.moments, other)


def test_round_trip(tmp_path: Path) -> None:
    shard = FeatureShard.of(names(5), rows(5), FACTS)
    shard.save(tmp_path / "deep" / "a.npz")
    again = FeatureShard.load(tmp_path / "deep" / "a.npz")
    assert again.ids == shard.ids and again.facts == shard.facts and torch.equal(again.rows, shard.rows)
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["a.npz"]


def test_what_must_not_be_merged() -> None:
    a = FeatureShard.of(names(3), rows(3), FACTS)
    with pytest.raises(ValueError, match="in two shards"):
        merge([a, a])
    with pytest.raises(ValueError, match="different features"):
        merge([a, FeatureShard.of(["x", "y"], rows(2), {"features": {"name": "other"}})])
    with pytest.raises(ValueError, match="nothing to merge"):
        merge([])


def test_ids_and_rows_must_match() -> None:
    with pytest.raises(ValueError, match="one distinct id per row"):
        FeatureShard.of(["a", "a"], rows(2), FACTS)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    FeatureShard.of(names(5), rows(5), FACTS).save(tmp_path / "a.npz")
    data = (tmp_path / "a.npz").read_bytes()
    for content in (data[: len(data) // 2], b"", b"text"):
        (tmp_path / "b.npz").write_bytes(content)
        with pytest.raises(ValueError, match="b.npz is no feature file"):
            FeatureShard.load(tmp_path / "b.npz")
    with pytest.raises(ValueError, match="c.npz is no feature file"):
        FeatureShard.load(tmp_path / "c.npz")
