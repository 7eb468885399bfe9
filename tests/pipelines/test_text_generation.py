"""Texts of a tiny model: the same in a batch and alone, with any drafter, with own limits; and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from typer.testing import CliRunner

from mediaspec import AutoPipeline
from mediaspec.drafters import NgramDrafter
from mediaspec.pipelines.draft_trees import draft_tree, likely_tree
from mediaspec.pipelines.text_generation import TextGenerationPipeline
from mediaspec.policies import FixedPolicy, SurvivalPolicy
from mediaspec.rules import ExactRule
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


def make_bytes() -> PreTrainedTokenizerFast:
    """A token per byte, so that one character takes several."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {token: number for number, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    inner = Tokenizer(models.BPE(ids, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module")
def pipe() -> TextGenerationPipeline:
    made = TextGenerationPipeline(make_model(), make_tokenizer())
    made.set_progress_bar_config(disable=True)
    return made


@pytest.fixture(scope="module")
def small() -> Any:
    return make_model(seed=4, num_hidden_layers=1)


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


def test_new_text_is_told_as_it_comes(pipe: TextGenerationPipeline) -> None:
    told: dict[int, list[str]] = {0: [], 1: []}
    out = pipe(["w4 w5", "w6"], max_new_tokens=9, seeds=3, on_text=lambda row, piece: told[row].append(piece))
    assert ["".join(told[0]), "".join(told[1])] == out.texts
    assert len(told[0]) > 1 and "".join(told[0][:2]) == out.texts[0][: len("".join(told[0][:2]))]


PENALTIES: list[dict[str, Any]] = [
    dict(repetition_penalty=1.8), dict(no_repeat_ngram_size=2),
    dict(repetition_penalty=1.3, no_repeat_ngram_size=3),
]  # fmt: skip


@pytest.mark.parametrize("settings", PENALTIES)
def test_penalties_are_those_of_generate_and_no_row_sees_another(
    pipe: TextGenerationPipeline, small: Any, settings: dict[str, Any]
) -> None:
    """Plain `generate` alone has no padding; here rows of a ragged batch have none either."""
    prompts = ["w4 w5 w4 w5 w6", "w9", "w4 w4 w8"]
    for drafting in (dict(drafter="ngram"), dict(drafter=small, tree=[2, 1, 1]), dict(drafter=pipe.model)):
        out = pipe(prompts, max_new_tokens=14, temperature=0.0, **settings, **drafting)
        for prompt, tokens in zip(prompts, out.tokens, strict=True):
            ids = pipe.tokenizer(prompt, return_tensors="pt")["input_ids"]
            wanted = pipe.model.generate(input_ids=ids, max_new_tokens=14, do_sample=False, **settings)
            assert tokens == wanted[0, ids.shape[1] :].tolist()


def test_sampling_with_everything_on_does_not_depend_on_drafter_or_batch(
    pipe: TextGenerationPipeline, small: Any
) -> None:
    settings = dict(max_new_tokens=14, temperature=0.9, top_p=0.9, top_k=20, min_p=0.05, repetition_penalty=1.3)
    prompts = ["w4 w5 w4 w5 w6", "w9", "w4 w4 w8"]
    plain = pipe(prompts, seeds=3, rule="plain", num_texts_per_prompt=2, **settings)
    assert plain.stats["settings"]["drafter"] == "none" and plain.stats["target_calls"] == 14
    for drafting in (
        dict(drafter="suffix"), dict(drafter=small, num_draft_tokens=3), dict(drafter=pipe.model, tree=[3, 1]),
        dict(drafter=["ngram", small]), dict(drafter={"a": small, "b": "suffix"}, policy="ucb"),
    ):  # fmt: skip
        out = pipe(prompts, seeds=3, num_texts_per_prompt=2, **settings, **drafting)
        assert out.tokens == plain.tokens
    for row in range(3):
        alone = pipe(prompts[row], seeds=[3 + 2 * row], drafter=small, tree=[2, 2], **settings)
        assert alone.tokens[0] == plain.tokens[2 * row]


def test_stop_strings_end_a_text_where_they_are_completed(pipe: TextGenerationPipeline, small: Any) -> None:
    free = pipe("w4 w5 w6", max_new_tokens=16, temperature=0.0)
    words = free.texts[0].split()
    for place in range(1, 7):
        stop = f"{words[place]} {words[place + 1]}"
        first = next(i for i in range(len(words) - 1) if f"{words[i]} {words[i + 1]}" == stop)
        for drafting in (dict(num_draft_tokens=1), dict(num_draft_tokens=4), dict(tree=[2, 1, 1]), {}):
            told: list[str] = []
            out = pipe(
                ["w4 w5 w6", "w9 w9"], max_new_tokens=16, temperature=0.0, stop=["nothing", stop], drafter=pipe.model,
                on_text=lambda row, piece, told=told: told.append(piece) if row == 0 else None, **drafting,
            )  # fmt: skip
            assert out.tokens[0] == free.tokens[0][: first + 2]
            assert out.texts[0].split() == words[:first] and "".join(told) == out.texts[0]
    assert len(out.tokens[1]) == 16


def test_characters_and_stop_strings_of_several_tokens() -> None:
    """Ids of random bytes: broken characters are held back until they are whole or the text ends."""
    pipe = TextGenerationPipeline(make_model(vocab_size=259), make_bytes())
    pipe.set_progress_bar_config(disable=True)
    head = pipe.model.get_output_embeddings()
    letters = pipe.tokenizer("aé€b")["input_ids"]
    with torch.no_grad():
        head.weight[letters] *= 3.0  # many texts with é (two bytes) and € (three)
    told: list[str] = []
    for seed in range(8):
        told.clear()
        out = pipe("a€", max_new_tokens=24, seeds=seed, on_text=lambda _, piece: told.append(piece), drafter="suffix")
        assert "".join(told) == out.texts[0]
        stop = pipe.tokenizer.decode(out.tokens[0])[3:5]
        if "\ufffd" in stop:
            continue
        told.clear()
        cut = pipe("a€", max_new_tokens=24, seeds=seed, stop=stop, on_text=lambda _, piece: told.append(piece))
        assert cut.tokens[0] == out.tokens[0][: len(cut.tokens[0])]
        assert cut.texts[0] == out.texts[0][: out.texts[0].index(stop)] == "".join(told)
        assert stop in pipe.tokenizer.decode(cut.tokens[0])
        assert stop not in pipe.tokenizer.decode(cut.tokens[0][:-1])


def test_trees_are_refused_where_nobody_can_grow_them_and_read_in_every_notation(
    pipe: TextGenerationPipeline, small: Any
) -> None:
    with pytest.raises(ValueError, match="makes no trees"):
        pipe("w4", drafter="ngram", tree=[2, 2])
    mixed = pipe(["w4 w4"], max_new_tokens=20, seeds=1, drafter=["ngram", small], tree=[2, 2], policy="survival")
    assert mixed.tokens == pipe(["w4 w4"], max_new_tokens=20, seeds=1, rule="plain").tokens
    assert draft_tree([2, 1]) == draft_tree([(0,), (1,), (0, 0), (1, 0)]) == draft_tree("[2, 1]")
    assert draft_tree(None) is None and draft_tree(likely_tree(2, 2, 3)) == likely_tree(2, 2, 3)
    assert likely_tree(1, 4, 9).parents == (0, 1, 2, 3)
    assert likely_tree(3, 2, 100).num_nodes == 12
    for number in (1, 2, 5, 9, 30):
        tree = likely_tree(4, 5, number)
        assert tree.num_nodes == number and tree.max_depth <= 5 and max(map(len, tree.children)) <= 4
    with pytest.raises(ValueError, match="at least 1"):
        likely_tree(0, 1, 1)
    for wrong in ("[2,", [2, (0,)], [], [[]], 3):
        with pytest.raises(ValueError, match="tree="):
            draft_tree(wrong)  # type: ignore[arg-type]


def test_a_policy_learns_from_call_to_call() -> None:
    pipe = TextGenerationPipeline(make_model(), make_tokenizer())
    pipe.set_progress_bar_config(disable=True)
    from mediaspec.pipelines.speculation import Speculation, prepare
    from mediaspec.targets.causal_lm import CausalLMTarget

    pipe("w4 w5", max_new_tokens=20, seeds=1, drafter="ngram")
    known = prepare(Speculation("ngram"), CausalLMTarget(pipe.model, 4))
    assert known.policy is not None and known.policy._now().rounds > 3
    fresh = prepare(Speculation("ngram"), CausalLMTarget(pipe.model, 4))  # the first one is at work now
    assert fresh.policy is not known.policy and fresh.policy is not None and fresh.policy._memory is None
    with known.at_work(CausalLMTarget(pipe.model, 4)):
        pass
    assert prepare(Speculation("ngram"), CausalLMTarget(pipe.model, 4)).policy is known.policy
    own = SurvivalPolicy(max_draft_tokens=2, costs=[1.0, 1.1, 1.2])
    out = pipe("w4 w5", max_new_tokens=20, seeds=1, drafter="ngram", policy=own)
    assert own._now().rounds == out.stats["target_calls"] - 1 == sum(out.stats["arms"].values())
    assert out.stats["settings"]["policy"] == "survival" and out.stats["settings"]["num_draft_tokens"] is None


@pytest.mark.parametrize("drafter", ["model", "names", "mapping", None])
def test_a_saved_pipeline_comes_back_and_is_a_transformers_model(
    tmp_path: Path, pipe: TextGenerationPipeline, small: Any, drafter: str | None
) -> None:
    given = {"model": small, "names": ["ngram", "suffix"], "mapping": {"s": small, "n": "ngram"}, None: None}[drafter]
    made = TextGenerationPipeline(pipe.model, pipe.tokenizer, ExactRule(), given, SurvivalPolicy(max_draft_tokens=3))
    made.save_pretrained(tmp_path)
    back = AutoPipeline.from_pretrained(tmp_path)
    assert isinstance(back, TextGenerationPipeline) and type(back.rule) is ExactRule
    assert type(back.policy) is SurvivalPolicy and back.policy.config.max_draft_tokens == 3
    if drafter == "model":
        assert torch.equal(back.drafter.get_output_embeddings().weight, small.get_output_embeddings().weight)
    elif drafter == "mapping":
        assert list(back.drafter) == ["s", "n"] and back.drafter["n"] == "ngram"
    else:
        assert back.drafter == given
    back.set_progress_bar_config(disable=True)
    settings = dict(max_new_tokens=8, seeds=3, policy=FixedPolicy(2)) if drafter == "model" else dict(seeds=3)
    wanted = TextGenerationPipeline(pipe.model, pipe.tokenizer, ExactRule(), given)
    wanted.set_progress_bar_config(disable=True)
    if drafter == "model":  # a fixed length: under the exact rule a policy's choices move the tokens
        assert back("w4 w5", **settings).tokens == wanted("w4 w5", **settings).tokens
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(plain.get_output_embeddings().weight, pipe.model.get_output_embeddings().weight)
    other = AutoPipeline.from_pretrained(tmp_path, rule="coupled", drafter="none", policy=None)
    assert other.rule.name == "coupled" and other.drafter == "none" and other.policy is None


def test_folders_of_language_models_and_others(tmp_path: Path, pipe: TextGenerationPipeline) -> None:
    pipe.model.save_pretrained(tmp_path / "model")
    pipe.tokenizer.save_pretrained(tmp_path / "model")
    loaded = AutoPipeline.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    assert isinstance(loaded, TextGenerationPipeline) and loaded.model.dtype == torch.bfloat16
    with pytest.raises(TypeError, match="drafter"):
        AutoPipeline.from_pretrained(tmp_path / "model", draftr="ngram")
    with pytest.raises(ValueError, match="cannot be saved"):
        TextGenerationPipeline(pipe.model, pipe.tokenizer, drafter=NgramDrafter()).save_pretrained(tmp_path / "x")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model_index.json").write_text(json.dumps({"_class_name": "TextToImagePipeline"}))
    with pytest.raises(ValueError, match="AutoPipeline"):
        TextGenerationPipeline.from_pretrained(tmp_path / "other")
    with pytest.raises(TypeError, match="sequence|drafter is a int"):
        pipe("w4", drafter=3)


def test_a_callback_follows_and_may_interrupt(pipe: TextGenerationPipeline, capsys: Any) -> None:
    seen: list[tuple[int, int, list[list[int]]]] = []

    def follow(which: Any, index: int, least: int, tensors: dict[str, Any]) -> dict[str, Any]:
        assert which is pipe and set(tensors) == {"tokens", "num_accepted"}
        seen.append((index, least, tensors["tokens"].tolist()))
        if len(seen) == 4:
            pipe._interrupt = True
        return tensors

    names = ["tokens", "num_accepted"]
    pipe.set_progress_bar_config(desc="texts")
    out = pipe(
        ["w4 w5", "w6"], max_new_tokens=12, seeds=3, drafter="none",
        callback_on_step_end=follow, callback_on_step_end_tensor_inputs=names,
    )  # fmt: skip
    assert "texts" in capsys.readouterr().err and pipe.interrupt
    pipe.set_progress_bar_config(disable=True)
    assert [index for index, _, _ in seen] == [0, 1, 2, 3] and [least for _, least, _ in seen] == [1, 2, 3, 4]
    assert out.tokens == [row[:4] for row in seen[-1][2]] and out.stats["interrupted"]
    whole = pipe(["w4 w5", "w6"], max_new_tokens=12, seeds=3)
    assert not whole.stats["interrupted"] and [row[:4] for row in whole.tokens] == out.tokens
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(max_new_tokens=0), "max_new_tokens"), (dict(max_new_tokens=[3]), "one per text"),
        (dict(drafter="egle"), "ngram"), (dict(rule="coupld"), "coupled"), (dict(num_texts_per_prompt=0), ">= 1"),
        (dict(temperature=-1.0), "temperature"), (dict(min_p=1.5), "min_p"), (dict(repetition_penalty=0.0), "above 0"),
        (dict(no_repeat_ngram_size=-1), ">= 0"), (dict(stop=["x", ""]), "stop="), (dict(stop=3), "stop="),
        (dict(num_draft_tokens=-1), ">= 0"), (dict(num_draft_tokens=True), ">= 0"), (dict(tree=[2, 1]), "no trees"),
        (dict(tree="[2,"), "children per level"), (dict(policy="survivl"), "survival"),
        (dict(drafter="eagle3"), "no trained head"), (dict(drafter=["ngram", "suffix"], num_draft_tokens=3), "fixed"),
        (dict(policy=FixedPolicy(2), num_draft_tokens=3), "num_draft_tokens was given"),
        (dict(callback_on_step_end=print, callback_on_step_end_tensor_inputs=["text"]), "tokens"),
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
    assert report["guarantee"] == "exact-tokens" and report["settings"]["drafter"] == "ngram"
    assert report["settings"]["policy"] == "survival"
    fixed = CliRunner().invoke(app, [*arguments, "--drafter", str(tmp_path), "--tree", "[2, 1]", "--json"])
    told = json.loads(fixed.stdout.strip().splitlines()[-1])
    assert told["texts"] == out.texts and told["settings"]["tree"] == [0, 0, 1, 2]
    wrong = CliRunner().invoke(app, [*arguments, "--drafter", "nothing-here"])
    assert wrong.exit_code == 2 and "nothing-here" in wrong.output
