"""Texts of a tiny model: the same in a batch and alone, with any drafter, with own limits; and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from mediaspec.pipelines.text_generation import TextGenerationPipeline
from tests.targets.test_causal_lm import VOCAB, make_model

WORDS = [f"w{number}" for number in range(VOCAB - 3)]
CHAT = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}{% if add_generation_prompt %}w0{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    ids = {word: number for number, word in enumerate(["<pad>", "<s>", "</s>", *WORDS])}
    inner = Tokenizer(models.WordLevel(ids, unk_token="w1"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = CHAT
    return tokenizer


@pytest.fixture(scope="module")
def pipe() -> TextGenerationPipeline:
    return TextGenerationPipeline(make_model(), make_tokenizer())


def test_a_text_depends_on_its_prompt_and_seed_alone(pipe: TextGenerationPipeline) -> None:
    prompts = ["w4 w5 w6", "w9", "w4 w4 w8 w7 w1"]
    together = pipe(prompts, max_new_tokens=12, num_texts_per_prompt=2, seeds=5)
    assert len(together.texts) == 6 and together.stats["seeds"] == list(range(5, 11))
    assert together.stats["guarantee"] == "exact-tokens" and together.stats["settings"]["rule"] == "coupled"
    for row, drafter in ((3, "suffix"), (4, "none"), (0, make_model(seed=4, num_hidden_layers=1))):
        alone = pipe(prompts[row // 2], max_new_tokens=12, seeds=[5 + row], drafter=drafter)
        assert alone.tokens[0] == together.tokens[row] and alone.texts[0] == together.texts[row]


def test_greedy_texts_are_those_of_generate_and_limits_belong_to_rows(pipe: TextGenerationPipeline) -> None:
    prompts = ["w4 w5 w6", "w9 w9 w2"]
    out = pipe(prompts, max_new_tokens=[4, 11], temperature=0.0)
    for prompt, tokens, limit in zip(prompts, out.tokens, (4, 11), strict=True):
        ids = pipe.tokenizer(prompt, return_tensors="pt")["input_ids"]
        wanted = pipe.model.generate(input_ids=ids, max_new_tokens=limit, do_sample=False)[0, ids.shape[1] :]
        assert tokens == wanted.tolist()
    assert max(map(len, out.tokens)) <= 11 and len(out.tokens[0]) <= 4


def test_chats_go_through_the_template(pipe: TextGenerationPipeline) -> None:
    chat = [{"role": "w7", "content": "w8 w9"}]
    as_chat, as_text = pipe(chat, max_new_tokens=6, seeds=1), pipe("w7 w8 w9 w0", max_new_tokens=6, seeds=1)
    assert as_chat.tokens == as_text.tokens
    assert pipe([chat, chat], max_new_tokens=6, seeds=[1, 1]).tokens == 2 * as_text.tokens


def test_new_ids_are_told_as_they_come(pipe: TextGenerationPipeline) -> None:
    told: dict[int, list[int]] = {0: [], 1: []}
    out = pipe(["w4 w5", "w6"], max_new_tokens=9, seeds=3, on_text=lambda row, ids: told[row].extend(ids))
    assert [told[0], told[1]] == out.tokens


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(max_new_tokens=0), "max_new_tokens"), (dict(max_new_tokens=[3]), "one per text"),
        (dict(drafter="eagle"), "ngram"), (dict(rule="coupld"), "coupled"), (dict(num_texts_per_prompt=0), ">= 1"),
        (dict(temperature=-1.0), "temperature"),
    ],
)  # fmt: skip
def test_wrong_settings_are_refused(pipe: TextGenerationPipeline, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pipe(["w4", "w5"], **settings)
    with pytest.raises(ValueError, match="no tokens"):
        pipe("")
    with pytest.raises(TypeError, match="max_new_tokens"):
        pipe("w4", max_tokens=3)


def test_the_command_writes_texts(tmp_path: Path, pipe: TextGenerationPipeline) -> None:
    from mediaspec.cli import app

    pipe.model.save_pretrained(tmp_path)
    pipe.tokenizer.save_pretrained(tmp_path)
    arguments = ["generate", "text", "w4 w5", "w6", "--model", str(tmp_path), "--max-new-tokens", "7", "--seed", "3"]
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout.strip().splitlines()[-1])
    out = pipe(["w4 w5", "w6"], max_new_tokens=7, seeds=3)
    assert report["texts"] == out.texts and report["tokens"] == sum(map(len, out.tokens))
    assert report["guarantee"] == "exact-tokens" and report["settings"]["drafter"] == "NgramDrafter"
    wrong = CliRunner().invoke(app, [*arguments, "--drafter", "nothing-here"])
    assert wrong.exit_code == 2 and "nothing-here" in wrong.output
