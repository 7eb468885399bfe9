"""Text-image score of emoji-64: a small network reads the caption's attributes off a picture.

The captions of emoji-64 are a closed grammar, so "does the picture show its caption" has an exact meaning: concept,
second concept, style, background and size. The reader gives log-probabilities of each attribute; their sum is the
caption's log-likelihood, which ranks any set of captions for a picture (retrieval), and its parts give plain
accuracies. It is a classifier trained on rendered pictures, not CLIP, and is never called CLIP score. `labels.json`
beside the weights states its own accuracy on rendered pictures that were not trained on: the ceiling of every figure.

    caption = phrase [" on a " COLOUR " background"] [", " STYLE " style"]
    phrase  = article ["small " | "mirrored "] concept  |  article concept " beside " article concept
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..pipelines.keywords import nearest

__all__ = [
    "ATTRIBUTES",
    "CaptionReader",
    "Reading",
    "ReaderNet",
    "Vocabulary",
    "caption_scores",
    "load_reader",
    "parse_caption",
]

FOLDER = Path(__file__).resolve().parent.parent / "models" / "emoji64" / "retrieval"
ATTRIBUTES = ("concept", "other", "style", "background", "size")
_CAPTION = re.compile(r"^(?P<phrase>.+?)(?: on a (?P<background>[a-z]+) background)?(?:, (?P<style>[a-z]+) style)?$")


@dataclass(frozen=True)
class Vocabulary:
    """The words each attribute can take, in class order; "" stands for none (no second object, normal size)."""

    concept: tuple[str, ...]
    other: tuple[str, ...]
    style: tuple[str, ...]
    background: tuple[str, ...]
    size: tuple[str, ...]

    @staticmethod
    def of(
        concepts: Iterable[str], styles: Iterable[str], backgrounds: Iterable[str], sizes: Iterable[str]
    ) -> Vocabulary:
        """The first style and background are those meant when a caption names none."""
        concepts = tuple(concepts)
        return Vocabulary(concepts, ("", *concepts), tuple(styles), tuple(backgrounds), tuple(sizes))

    def sizes(self) -> list[int]:
        """Number of classes per attribute."""
        return [len(getattr(self, name)) for name in ATTRIBUTES]


@dataclass(frozen=True)
class Reading:
    """What a caption says, all attributes filled in."""

    concept: str
    other: str
    style: str
    background: str
    size: str

    def indices(self, vocabulary: Vocabulary) -> list[int]:
        """Class index per attribute."""
        return [getattr(vocabulary, name).index(getattr(self, name)) for name in ATTRIBUTES]


def parse_caption(text: str, vocabulary: Vocabulary) -> Reading:
    """Reads a caption.

    Args:
        text: for example "a small cat on a blue background, flat style".
        vocabulary: from `CaptionReader.vocabulary`.

    Raises:
        ValueError: the caption is outside the grammar; the message names the nearest word.
    """
    match = _CAPTION.match(text.strip())
    if match is None:
        raise ValueError(
            f"cannot read the caption {text!r}; write it as 'a red apple on a blue background, flat style'"
        )
    background = match["background"] or vocabulary.background[0]
    style = match["style"] or vocabulary.style[0]
    size, other, phrase = "", "", match["phrase"]
    for word in vocabulary.size:
        for article in ("a ", "an ", ""):
            if word and phrase.startswith(f"{article}{word} "):
                size, phrase = word, phrase[len(article) + len(word) + 1 :]
    if " beside " in phrase:
        phrase, other = phrase.split(" beside ", 1)
    concept, other = _noun(phrase, vocabulary), _noun(other, vocabulary) if other else ""
    reading = Reading(concept, other, style, background, size)
    for name in ATTRIBUTES:
        allowed, word = getattr(vocabulary, name), getattr(reading, name)
        if word not in allowed:
            raise ValueError(f"{text!r} has the {name} {word!r}; {nearest(word, _few(allowed, word))}")
    return reading


def _noun(phrase: str, vocabulary: Vocabulary) -> str:
    for article in ("a ", "an "):
        if phrase not in vocabulary.concept and phrase.startswith(article):
            return phrase[len(article) :]
    return phrase


def _few(allowed: Sequence[str], word: str) -> list[str]:
    """At most ten of the allowed words, the closest first, so that an error stays readable."""
    import difflib

    return (difflib.get_close_matches(word, allowed, n=10, cutoff=0.3) or list(allowed))[:10]


class ReaderNet(nn.Module):
    """Five strided convolutions and one linear head per attribute, 0.9 M parameters.

    Heads see the mean over the whole 4x4 map and over its left and right halves, so that they can tell the two objects
    of a pair apart.

    Args:
        classes: classes per attribute, in the order of `ATTRIBUTES`.
    """

    def __init__(self, classes: Sequence[int]) -> None:
        super().__init__()
        plan = [(3, 32, 2), (32, 64, 2), (64, 128, 2), (128, 128, 1), (128, 192, 2)]
        self.body = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(i, o, 3, s, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True))
                for i, o, s in plan
            )
        )
        self.heads = nn.ModuleList(nn.Linear(3 * 192, n) for n in classes)

    def forward(self, images: Tensor) -> list[Tensor]:
        """float [n, 3, 64, 64] in -1..1 -> logits [n, classes] per attribute."""
        x = self.body(images)
        middle = x.shape[-1] // 2
        pooled = torch.cat([x.mean((2, 3)), x[..., :middle].mean((2, 3)), x[..., middle:].mean((2, 3))], 1)
        return [head(pooled) for head in self.heads]


class CaptionReader:
    """Reads attributes off pictures.

    Args:
        net: trained network.
        vocabulary: its classes.
        facts: training record from `labels.json`: held-out accuracies, steps, seed.
    """

    side = 64

    def __init__(self, net: ReaderNet, vocabulary: Vocabulary, facts: dict[str, object] | None = None) -> None:
        self.net, self.vocabulary, self.facts = net.eval(), vocabulary, facts or {}

    @torch.inference_mode()
    def read(self, images: Tensor, batch_size: int = 256) -> list[Tensor]:
        """Attribute log-probabilities.

        Args:
            images: [n, 3, 64, 64] uint8.

        Returns:
            per attribute [n, classes] float32.

        Raises:
            ValueError: another dtype or size.
        """
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1:] != (3, self.side, self.side):
            raise ValueError(
                f"pictures are {images.dtype} {tuple(images.shape)}; the emoji-64 reader takes uint8 [n, 3, 64, 64]"
            )
        parts = [self.net(chunk.float() / 127.5 - 1) for chunk in torch.split(images, batch_size)]
        return [F.log_softmax(torch.cat(column).float(), -1) for column in zip(*parts, strict=True)]


def load_reader(folder: str | Path | None = None) -> CaptionReader:
    """Loads the reader that ships with emoji-64.

    Args:
        folder: holds model.safetensors and labels.json; default: the package's own.

    Raises:
        FileNotFoundError: the folder lacks a file.
    """
    from safetensors.torch import load_file

    root = Path(folder) if folder is not None else FOLDER
    for file in ("model.safetensors", "labels.json"):
        if not (root / file).is_file():
            raise FileNotFoundError(
                f"{root / file} is missing; train the reader with tools/emoji64/train_retrieval.py"
            )
    facts = json.loads((root / "labels.json").read_text())
    words = facts.pop("vocabulary")
    vocabulary = Vocabulary.of(words["concept"], words["style"], words["background"], words["size"])
    net = ReaderNet(vocabulary.sizes())
    net.load_state_dict(
        {k: v.float() if v.is_floating_point() else v for k, v in load_file(root / "model.safetensors").items()}
    )
    return CaptionReader(net, vocabulary, facts)


def caption_scores(
    reader: CaptionReader, images: Tensor, captions: Sequence[str], rounds: int = 200, seed: int = 0
) -> dict[str, dict[str, float]]:
    """How well pictures show their captions.

    Args:
        reader: from `load_reader`.
        images: [n, 3, 64, 64] uint8.
        captions: n captions of the grammar.
        rounds: bootstrap resamples of the pictures.
        seed: of the resampling and of the half split.

    Returns:
        metric -> {"value", "error" (bootstrap standard error), "floor" (absolute difference of two random halves)}.
        Metrics: concept_top1, concept_top5 (first object), pair_top1 (both objects, pairs only), style, background,
        size, all (every attribute right), recall_at_1 and recall_at_5 (own caption among all distinct captions of the
        run, ties count against it), caption_nats (mean log-likelihood). "pool" holds the number of distinct captions.

    Raises:
        ValueError: counts differ, or a caption is outside the grammar.
    """
    if len(images) != len(captions) or not len(captions):
        raise ValueError(
            f"{len(images)} pictures and {len(captions)} captions; give one caption per picture, at least one"
        )
    readings = [parse_caption(text, reader.vocabulary) for text in captions]
    pool = sorted(set(readings), key=lambda r: (r.concept, r.other, r.style, r.background, r.size))
    place = {reading: i for i, reading in enumerate(pool)}
    own = torch.tensor([place[r] for r in readings])
    truth = torch.tensor([r.indices(reader.vocabulary) for r in readings])
    logp = reader.read(images)
    pool_index = torch.tensor([r.indices(reader.vocabulary) for r in pool])
    likelihood = sum(logp[a][:, pool_index[:, a]] for a in range(len(ATTRIBUTES)))
    assert isinstance(likelihood, Tensor)
    mine = likelihood.gather(1, own[:, None])
    rank = (likelihood >= mine).sum(1) - 1
    right = torch.stack([logp[a].argmax(1) == truth[:, a] for a in range(len(ATTRIBUTES))], 1)
    top5 = (logp[0].topk(min(5, logp[0].shape[1]), 1).indices == truth[:, :1]).any(1)
    pairs = truth[:, 1] > 0
    columns: dict[str, tuple[Tensor, Tensor]] = {
        "concept_top1": (right[:, 0], torch.ones_like(pairs)),
        "concept_top5": (top5, torch.ones_like(pairs)),
        "pair_top1": (right[:, 0] & right[:, 1], pairs),
        "style": (right[:, 2], torch.ones_like(pairs)),
        "background": (right[:, 3], torch.ones_like(pairs)),
        "size": (right[:, 4], torch.ones_like(pairs)),
        "all": (right.all(1), torch.ones_like(pairs)),
        "recall_at_1": (rank < 1, torch.ones_like(pairs)),
        "recall_at_5": (rank < 5, torch.ones_like(pairs)),
        "caption_nats": (mine[:, 0], torch.ones_like(pairs)),
    }
    out: dict[str, dict[str, float]] = {"pool": {"value": float(len(pool)), "error": 0.0, "floor": 0.0}}
    for name, (values, used) in columns.items():
        if bool(used.any()):
            out[name] = _summary(values[used].double().numpy(), rounds, seed)
    return out


def _summary(values: np.ndarray, rounds: int, seed: int) -> dict[str, float]:
    rng = np.random.default_rng(seed)
    means = [float(values[rng.integers(len(values), size=len(values))].mean()) for _ in range(rounds)]
    order = rng.permutation(len(values))
    half = max(len(values) // 2, 1)
    floor = abs(float(values[order[:half]].mean()) - float(values[order[-half:]].mean()))
    return {"value": float(values.mean()), "error": float(np.std(means)), "floor": floor}
