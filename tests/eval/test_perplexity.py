"""Perplexity scored in blocks behind a prompt equals one pass of the model; its change has a value and an error."""

from __future__ import annotations

import math

import pytest
import torch

from mediaspec.eval.perplexity import change_of_perplexity, held_out_ids, perplexity, read_text, score_continuation
from tests.pipelines.test_text_generation import make_tokenizer
from tests.targets.test_causal_lm import VOCAB, make_model


@pytest.mark.parametrize("family", ["Llama", "Mistral"])
@pytest.mark.parametrize(("context", "block"), [(1, 16), (20, 1), (20, 7), (39, 16)])
def test_blocks_give_the_scores_of_one_pass(family: str, context: int, block: int) -> None:
    model = make_model(family, num_hidden_layers=2)
    ids = torch.randint(3, VOCAB, (40,), generator=torch.Generator().manual_seed(5))
    scores = score_continuation(model, ids, context, block)
    with torch.no_grad():
        logp = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
    wanted = -logp[:-1].gather(1, ids[1:, None])[context - 1 :, 0]
    assert scores.nll.shape == (40 - context,) and scores.kv_bytes > 0
    torch.testing.assert_close(scores.nll.float(), wanted, atol=1e-4, rtol=1e-4)
    assert perplexity([scores.nll]) == pytest.approx(math.exp(float(wanted.mean())), rel=1e-4)


def test_nothing_to_score_is_refused() -> None:
    model, ids = make_model(num_hidden_layers=1), torch.arange(3, 9)
    for context, block in ((0, 4), (6, 4), (3, 0)):
        with pytest.raises(ValueError, match="at least"):
            score_continuation(model, ids, context, block)


def test_the_change_is_that_of_the_mean_and_its_error_that_of_the_blocks() -> None:
    generator = torch.Generator().manual_seed(0)
    full = [torch.rand(640, generator=generator, dtype=torch.float64) for _ in range(3)]
    same = change_of_perplexity(full, [one + math.log(1.02) for one in full])
    assert same["value"] == pytest.approx(0.02) and same["error"] < 1e-12
    noise = [torch.randn(640, generator=generator, dtype=torch.float64) for _ in full]
    lossy = [one + 0.1 * more for one, more in zip(full, noise, strict=True)]
    change = change_of_perplexity(full, lossy, rounds=2000)
    ratio = perplexity(lossy) / perplexity(full) - 1
    assert change["value"] == pytest.approx(ratio, rel=1e-9)
    assert change["error"] == pytest.approx(0.1 / math.sqrt(3 * 640), rel=0.25)


def test_held_out_texts_have_the_wanted_lengths_and_differ() -> None:
    tokenizer = make_tokenizer()
    tokenizer.unk_token = "w1"  # every word of real text is unknown to it: lengths are what counts here
    made = held_out_ids(tokenizer, 700, 2)
    assert [len(one) for one in made] == [700, 700]
    text = " ".join(f"w{k % 40}" for k in range(100))
    first, second = held_out_ids(tokenizer, 50, 2, text)
    whole = torch.tensor(tokenizer(text)["input_ids"])
    assert torch.equal(torch.cat([first, second]), whole)
    with pytest.raises(ValueError, match="100 tokens"):
        held_out_ids(tokenizer, 51, 2, text)


def test_the_language_documentation_is_long_and_says_nothing_twice(tmp_path) -> None:
    pytest.importorskip("pydoc_data.topics")
    paragraphs = read_text("pydoc").split("\n\n")
    assert len(paragraphs) > 1500 and len(set(paragraphs)) == len(paragraphs)
    (tmp_path / "own.txt").write_text("Own words.")
    assert read_text(str(tmp_path / "own.txt")) == "Own words."
    with pytest.raises(ValueError, match="is no file"):
        read_text("missing.txt")
