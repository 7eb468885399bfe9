"""Quality of rules: pictures through the manifest, features once per picture, distances with floor and error.

    OUT/<rule>/                  pictures and manifest of one rule, resumable
    OUT/reference/               a second plain pass with other seeds, unless a reference is given
    OUT/<rule>.<features>.npz    feature rows and partial sums, made again only when the pictures changed

The default reference is plain decoding of the same model with other seeds: it asks what a rule changes about the
model, not how good the model is, and the row of `plain` is then the floor at full size. With `--reference` (a folder
of real pictures, or a .npz) it asks for the distance to those, and the rule's ratio to plain is the figure to look
at. Distances shrink with the number of pictures, so all rules are measured with the same number.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from .clip import ClipScorer
from .drift import drift_summary
from .features import FeatureExtractor, extract
from .frechet import bootstrap_frechet, frechet_distance, frechet_rows, half_floor
from .kid import kernel_distance, kid_half_floor
from .manifest import read_manifest
from .retrieval import CaptionReader, caption_scores
from .shards import FeatureShard

__all__ = ["MIN_IMAGES", "PictureSet", "compare", "feature_file", "folder_features", "rule_row", "slug"]

MIN_IMAGES = 2048
"""Below this the bias of a 1280-dimensional Fréchet distance exceeds the differences between rules."""


@dataclass(frozen=True)
class PictureSet:
    """Pictures of one rule: folder and manifest rows in index order."""

    folder: Path
    rows: Sequence[Mapping[str, Any]]

    @staticmethod
    def of(folder: str | Path) -> PictureSet:
        """Reads a folder that `generate_images` finished; missing, changed or extra pictures are an error."""
        return PictureSet(Path(folder), read_manifest(folder, check=True))

    def images(self) -> Tensor:
        """[n, 3, H, W] uint8."""
        return torch.stack([load_picture(self.folder / row["file"]) for row in self.rows])

    def digest(self) -> str:
        """Hash over the names and hashes of all pictures."""
        return hashlib.sha256("\n".join(f"{r['id']} {r['sha256']}" for r in self.rows).encode()).hexdigest()


def slug(label: str) -> str:
    """A rule's label as a folder name; distinct labels give distinct names."""
    safe = re.sub(r"[^A-Za-z0-9.+=_-]", "_", label)
    return safe if safe == label else f"{safe}-{hashlib.sha256(label.encode()).hexdigest()[:6]}"


def load_picture(path: Path) -> Tensor:
    """[3, H, W] uint8 RGB."""
    with Image.open(path) as picture:
        return torch.from_numpy(np.array(picture.convert("RGB"))).permute(2, 0, 1).contiguous()


def feature_file(
    pictures: PictureSet, path: Path, extractor: FeatureExtractor, facts: Mapping[str, Any]
) -> FeatureShard:
    """Features of a picture set, from `path` if they belong to these very pictures, else extracted and stored
    there."""
    wanted = {**facts, "features": extractor.describe(), "pictures": pictures.digest()}
    if path.is_file():
        try:
            shard = FeatureShard.load(path)
        except ValueError:
            shard = None
        if shard is not None and shard.facts == wanted:
            return shard
    rows = extract(extractor, (load_picture(pictures.folder / row["file"]) for row in pictures.rows))
    shard = FeatureShard.of([row["id"] for row in pictures.rows], rows, wanted)
    shard.save(path)
    return shard


def folder_features(folder: str | Path, extractor: FeatureExtractor) -> FeatureShard:
    """Features of all PNG files directly in a folder, in name order. Sub-folders and other formats are not read.

    Raises:
        ValueError: no PNG there, or pictures of different sizes.
    """
    files = sorted(Path(folder).glob("*.png"))
    if not files:
        raise ValueError(f"{folder} holds no PNG files; give a folder of pictures or a .npz of features")
    sizes = set()
    for file in files:
        with Image.open(file) as picture:
            sizes.add(picture.size)
    if len(sizes) > 1:
        raise ValueError(
            f"{folder} holds pictures of {len(sizes)} sizes, such as {sorted(sizes)[:3]}; a reference has one"
        )
    rows = extract(extractor, (load_picture(file) for file in files))
    return FeatureShard.of([file.stem for file in files], rows, {"features": extractor.describe()})


def compare(
    shard: FeatureShard, reference: FeatureShard, *, rounds: int = 20, seed: int = 0
) -> tuple[dict[str, Any], np.ndarray]:
    """Fréchet and kernel distance of two feature sets, with floors and errors.

    Args:
        shard, reference: same extractor.
        rounds: bootstrap resamples for the Fréchet distance.
        seed: of resampling, halves and subsets.

    Returns:
        {"frechet": {value, error, floor}, "kid": {value, error, floor, subset_mean, subset_std, subset_size}} and the
        resampled Fréchet distances [rounds], which are paired between shards of equal size. The floor is the distance
        between random halves of `shard`, biased upward by their smaller size.

    Raises:
        ValueError: different extractors.
    """
    mine, other = shard.facts.get("features"), reference.facts.get("features")
    if mine != other:
        raise ValueError(f"features differ: {mine} and {other}; extract both sets alike")
    values = bootstrap_frechet(shard.rows, reference.rows, rounds, seed)
    smaller, width = min(len(shard.rows), len(reference.rows)), shard.rows.shape[1]
    # The same number either way; the sums need no pass over the rows, the rows are faster where the sums are singular.
    enough = smaller >= width
    distance = (
        frechet_distance(shard.moments, reference.moments) if enough else frechet_rows(shard.rows, reference.rows)
    )
    size = max(2, min(1000, smaller // 2))
    kid = kernel_distance(shard.rows, reference.rows, subset_size=size, seed=seed)
    kid_floor, _ = kid_half_floor(shard.rows, seed)
    return {
        "frechet": {
            "value": distance,
            "error": float(values.std(ddof=1)),
            "floor": half_floor(shard.rows, seed),
        },
        "kid": {
            "value": kid.value,
            # Subsets without replacement vary like sqrt(1/m - 1/n); the full estimate like sqrt(1/n).
            "error": kid.subset_std * (size / max(smaller - size, 1)) ** 0.5,
            "floor": kid_floor,
            "subset_mean": kid.subset_mean,
            "subset_std": kid.subset_std,
            "subset_size": kid.subset_size,
        },
    }, values


def rule_row(
    label: str,
    pictures: PictureSet,
    *,
    reader: CaptionReader | None = None,
    clip: ClipScorer | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """What can be said of one rule's pictures without a reference: drift, tokens per call, caption and CLIP scores."""
    stats = [row["stats"] for row in pictures.rows]
    tokens = sum(int(s["tokens"]) for s in stats)
    row: dict[str, Any] = {
        "rule": label,
        "images": len(stats),
        "guarantee": stats[0]["guarantee"],
        "tokens_per_call": round(tokens / max(1, sum(int(s["target_calls"]) for s in stats)), 4),
        "drift": drift_summary([float(s["drift"]) for s in stats], tokens // len(stats)).as_dict(),
        "pictures_sha256": pictures.digest(),
    }
    prompts = [str(r["prompt"]) for r in pictures.rows]
    if reader is not None:
        row["captions"] = caption_scores(reader, pictures.images(), prompts, seed=seed)
    if clip is not None:
        scores = torch.cat(
            [clip.scores(x, prompts[k * 64 : k * 64 + 64]) for k, x in enumerate(torch.split(pictures.images(), 64))]
        )
        halves = scores[torch.from_numpy(np.random.default_rng(seed).permutation(len(scores)))].tensor_split(2)
        row["clip_score"] = {
            "value": float(scores.mean()),
            "error": float(scores.std()) / len(scores) ** 0.5 if len(scores) > 1 else 0.0,
            "floor": abs(float(halves[0].mean()) - float(halves[-1].mean())),
            "model": clip.name,
        }
    return row
