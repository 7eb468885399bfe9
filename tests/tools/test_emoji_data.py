"""The emoji-64 data set: grammar, splits, drawing and the caption tokenizer."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools" / "emoji64"))

import captions
import concepts
import render
from render import Spec


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> render.Renderer:
    """A renderer over home-made icon sets: every icon is a red bar in the left half, half transparent."""
    pytest.importorskip("resvg_py")
    data = tmp_path_factory.mktemp("icons")
    body = '<rect x="4" y="8" width="16" height="48" fill="#ff0000" fill-opacity="0.5"/>'
    for package in render.PACKAGES.values():
        names = set(concepts.concepts().values()) - {"cat-face"}
        icons = {n: {"body": body} for n in names} | {"cat": {"body": body}}
        folder = data / package / "package"
        folder.mkdir(parents=True)
        aliases = {"cat-face": {"parent": "cat"}}
        (folder / "icons.json").write_text(json.dumps({"icons": icons, "aliases": aliases, "width": 64, "height": 64}))
    return render.Renderer(data)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (Spec("red apple", says_style=False), "a red apple"),
        (Spec("red apple", background="blue", says_style=False), "a red apple on a blue background"),
        (Spec("cat", "flat"), "a cat, flat style"),
        (Spec("owl", "flat", size="small"), "a small owl, flat style"),
        (Spec("owl"), "an owl, shaded style"),
        (Spec("unicorn", says_style=False), "a unicorn"),
        (Spec("umbrella", says_style=False), "an umbrella"),
        (Spec("grapes", "fluent", background="gray"), "grapes on a gray background, fluent style"),
        (Spec("cat", "flat", other="eggplant"), "a cat beside an eggplant, flat style"),
        (Spec("car", background="yellow", size="mirrored", says_style=False), "a mirrored car on a yellow background"),
    ],
)
def test_captions_follow_the_grammar(spec: Spec, text: str) -> None:
    assert render.caption(spec) == text


def test_a_caption_means_one_picture() -> None:
    specs = render.single_specs()
    texts = [render.caption(s) for s in specs]
    assert len(set(texts)) == len(specs)


def test_concepts_have_icons_and_words_that_training_shows() -> None:
    names = concepts.concepts()
    assert len(set(names.values())) == len(names)
    assert set(names) >= concepts.HELD_OUT_CONCEPTS
    trained = {w for n in names if n not in concepts.HELD_OUT_CONCEPTS for w in n.split()}
    assert {w for n in concepts.HELD_OUT_CONCEPTS for w in n.split()} <= trained


def test_samples_are_reproducible_and_splits_disjoint() -> None:
    train = [render.sample_spec(i, seed=3) for i in range(400)]
    held = [render.sample_spec(i, seed=3, split="held_out") for i in range(100)]
    assert train == [render.sample_spec(i, seed=3) for i in range(400)]
    assert not any(render.held_out(s) for s in train)
    assert all(render.held_out(s) for s in held)
    with pytest.raises(ValueError, match="'train' and 'held_out'"):
        render.sample_spec(0, split="test")


def test_sampling_shares() -> None:
    """Shares of the four kinds within 4 standard deviations of what is left after held-out draws are redrawn."""
    n = 3000
    kinds = Counter()
    for i in range(n):
        s = render.sample_spec(i, seed=11)
        kinds["pair" if s.other else "size" if s.size else "colour" if s.background != "white" else "plain"] += 1
    known = 1 - len(concepts.HELD_OUT_CONCEPTS) / len(concepts.concepts())
    weights = {
        "plain": 0.45 * known,
        "colour": 0.35 * known * 0.9,
        "size": 0.1 * known * 0.97,
        "pair": 0.1 * known**2 * 0.9,
    }
    total = sum(weights.values())
    for kind, weight in weights.items():
        p = weight / total
        assert abs(kinds[kind] / n - p) < 4 * (p * (1 - p) / n) ** 0.5, kind


def test_drawing(renderer: render.Renderer) -> None:
    plain = renderer.draw(Spec("cat"))
    assert plain.shape == (64, 64, 3) and plain.dtype == np.uint8
    assert tuple(plain[0, 0]) == (255, 255, 255)
    assert abs(plain[32, 12].astype(int) - (255, 128, 128)).max() <= 1
    blue = renderer.draw(Spec("dog", background="blue"))
    assert tuple(blue[0, 63]) == concepts.BACKGROUNDS["blue"]
    np.testing.assert_array_equal(renderer.draw(Spec("cat", size="mirrored")), plain[:, ::-1])
    small = renderer.draw(Spec("cat", size="small"))
    assert (small[:12] == 255).all() and (small[:, :12] == 255).all() and (small[32, 16:24] != 255).any()
    pair = renderer.draw(Spec("cat", other="dog"))
    np.testing.assert_array_equal(pair[:, :32], pair[:, 32:])


def test_tokenizer_knows_every_caption(tmp_path: Path) -> None:
    tokenizer = captions.build_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    loaded = type(tokenizer).from_pretrained(tmp_path)
    texts = captions.prompts("train", 200) + captions.prompts("held_out", 200)
    ids = loaded(texts, padding="max_length", max_length=captions.MAX_LENGTH).input_ids
    assert {len(row) for row in ids} == {captions.MAX_LENGTH}
    assert not any(loaded.unk_token_id in row for row in ids)
    assert all(row[-1] == loaded.eos_token_id for row in ids)
    assert any(row[0] == loaded.pad_token_id for row in ids)
    assert ids == tokenizer(texts, padding="max_length", max_length=captions.MAX_LENGTH).input_ids


def test_an_article_may_be_left_out() -> None:
    assert captions.without_article("an owl on a red background") == "owl on a red background"
    assert captions.without_article("grapes") == "grapes"
