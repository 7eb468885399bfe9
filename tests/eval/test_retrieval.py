"""Caption reader: grammar, scores with known answers, and the shipped weights on rendered pictures."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mediaspec.eval.retrieval import (
    FOLDER,
    CaptionReader,
    ReaderNet,
    Reading,
    Vocabulary,
    caption_scores,
    load_reader,
    parse_caption,
)

WORDS = Vocabulary.of(
    ["bread", "cat", "ice cream", "owl"], ["shaded", "flat"], ["white", "blue"], ["", "small", "mirrored"]
)
DATA = Path(__file__).resolve().parents[1] / "data" / "emoji64_reader"


@pytest.mark.parametrize(
    ("text", "reading"),
    [
        ("a cat", Reading("cat", "", "shaded", "white", "")),
        ("bread", Reading("bread", "", "shaded", "white", "")),
        ("an owl on a blue background", Reading("owl", "", "shaded", "blue", "")),
        ("an ice cream, flat style", Reading("ice cream", "", "flat", "white", "")),
        ("a small cat on a blue background, flat style", Reading("cat", "", "flat", "blue", "small")),
        ("mirrored bread, shaded style", Reading("bread", "", "shaded", "white", "mirrored")),
        ("a cat beside an ice cream, flat style", Reading("cat", "ice cream", "flat", "white", "")),
        ("bread beside an owl", Reading("bread", "owl", "shaded", "white", "")),
    ],
)
def test_grammar(text: str, reading: Reading) -> None:
    assert parse_caption(text, WORDS) == reading


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a cta", "did you mean 'cat'"),
        ("a cat on a bleu background", "background 'bleu'"),
        ("a cat, flatt style", "did you mean 'flat'"),
        ("a cat beside a dog", "the other 'dog'"),
    ],
)
def test_words_outside_the_grammar(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_caption(text, WORDS)


def tiny_reader(seed: int = 0) -> CaptionReader:
    torch.manual_seed(seed)
    return CaptionReader(ReaderNet(WORDS.sizes()), WORDS)


def noise(n: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, (n, 3, 64, 64), dtype=np.uint8))


def caption_of(reader: CaptionReader, picture: torch.Tensor) -> str:
    """The caption an untrained reader likes best, so that its answers are right by construction."""
    best = [int(part.argmax()) for part in reader.read(picture[None])]
    words = [
        getattr(WORDS, a)[i] for a, i in zip(("concept", "other", "style", "background", "size"), best, strict=True)
    ]
    concept, other, style, background, size = words
    text = f"{size} {concept}".strip() + (f" beside {other}" if other else "")
    return text + (f" on a {background} background" if background != "white" else "") + f", {style} style"


def test_scores_of_captions_read_off_the_pictures_are_perfect() -> None:
    reader, pictures = tiny_reader(), noise(6)
    captions = [caption_of(reader, picture) for picture in pictures]
    scores = caption_scores(reader, pictures, captions)
    for metric in ("concept_top1", "concept_top5", "style", "background", "size", "all", "recall_at_1", "recall_at_5"):
        assert scores[metric]["value"] == 1.0 and scores[metric]["error"] == 0.0 and scores[metric]["floor"] == 0.0
    assert scores["pool"]["value"] == len(set(captions))
    assert scores["caption_nats"]["value"] < 0


def test_scores_by_hand() -> None:
    """One right and one wrong concept: accuracy 1/2, and the mean log-likelihood is the sum over attributes."""
    reader, pictures = tiny_reader(), noise(2)
    right = caption_of(reader, pictures[0])
    logp = reader.read(pictures)
    reading = parse_caption(caption_of(reader, pictures[1]), WORDS)
    other = next(c for c in WORDS.concept if c != reading.concept)
    wrong = caption_of(reader, pictures[1]).replace(reading.concept, other, 1)
    scores = caption_scores(reader, pictures, [right, wrong])
    assert scores["concept_top1"]["value"] == 0.5 and scores["all"]["value"] == 0.5
    assert scores["concept_top1"]["error"] == pytest.approx(0.5 / 2**0.5, rel=0.2)
    indices = [parse_caption(text, WORDS).indices(WORDS) for text in (right, wrong)]
    nats = [sum(float(logp[a][row, i]) for a, i in enumerate(index)) for row, index in enumerate(indices)]
    assert scores["caption_nats"]["value"] == pytest.approx(sum(nats) / 2, rel=1e-5)


def test_equal_captions_do_not_compete() -> None:
    """Retrieval is among distinct meanings: "a cat" and "a cat, shaded style" are one."""
    scores = caption_scores(tiny_reader(), noise(3), ["a cat", "a cat, shaded style", "an owl"])
    assert scores["pool"]["value"] == 2


def test_refusals() -> None:
    reader = tiny_reader()
    with pytest.raises(ValueError, match="one caption per picture"):
        caption_scores(reader, noise(2), ["a cat"])
    with pytest.raises(ValueError, match="64, 64"):
        reader.read(noise(1)[..., :32])
    with pytest.raises(FileNotFoundError, match="train_retrieval.py"):
        load_reader("/nowhere")


def rendered() -> tuple[torch.Tensor, list[str]]:
    """32 rendered pictures from the held-out stream, tiles of one sheet, with their captions."""
    sheet = np.array(Image.open(DATA / "pictures.png").convert("RGB"))
    tiles = sheet.reshape(4, 64, 8, 64, 3).transpose(0, 2, 4, 1, 3).reshape(32, 3, 64, 64)
    return torch.from_numpy(tiles), json.loads((DATA / "captions.json").read_text())


def test_the_shipped_reader_reads_rendered_pictures() -> None:
    pictures, captions = rendered()
    reader = load_reader()
    scores = caption_scores(reader, pictures, captions)
    assert scores["concept_top1"]["value"] >= 0.9 and scores["recall_at_1"]["value"] >= 0.9
    assert scores["background"]["value"] >= 0.9 and scores["style"]["value"] >= 0.9
    wrong = caption_scores(reader, pictures, captions[1:] + captions[:1])
    assert wrong["concept_top1"]["value"] < 0.1 and wrong["recall_at_1"]["value"] < 0.2
    assert wrong["caption_nats"]["value"] < scores["caption_nats"]["value"] - 5


def test_the_shipped_reader_is_small_and_says_how_good_it_is() -> None:
    assert (FOLDER / "model.safetensors").stat().st_size < 2_000_000
    facts = load_reader().facts["rendered_held_out_accuracy"]
    assert isinstance(facts, dict) and facts["concept"] > 0.95 and facts["all"] > 0.85


def test_a_lost_picture_scores_worse_the_more_it_is_damaged() -> None:
    """Blending the pictures with noise lowers the likelihood of their captions step by step."""
    pictures, captions = rendered()
    reader, values = load_reader(), []
    for share in (0.0, 0.3, 0.6, 0.9):
        mixed = pictures.float() * (1 - share) + noise(32).float() * share
        values.append(caption_scores(reader, mixed.round().to(torch.uint8), captions)["caption_nats"]["value"])
    assert values == sorted(values, reverse=True) and values[0] > values[-1] + 5
