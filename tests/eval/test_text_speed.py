"""Timing of texts: turns, ratios per token, the best peer; what is timed is what it says; the tasks themselves."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from mediaspec.eval.text_runners import PrefillWatch, Sampling, first_layers, own_modules, peer_runner
from mediaspec.eval.text_runners import text_runner as pipeline_runner
from mediaspec.eval.text_speed import PLAIN, TextRun, TextRunner, interleave_texts, summarise_texts
from mediaspec.eval.text_tasks import LONG, TASKS, TextPrompt, task_prompts
from mediaspec.eval.text_tasks.documents import KINDS, document, prose
from mediaspec.pipelines.text_generation import TextGenerationPipeline
from tests.pipelines.test_text_generation import make_tokenizer
from tests.targets.test_causal_lm import make_model

Log = list[tuple[str, tuple[str, ...], tuple[int, ...]]]
PROMPTS = [TextPrompt(f"p{k}", f"w{k + 4} w5 w{k + 6}") for k in range(3)]


def recorder(
    label: str, seconds: Sequence[float], log: Log, tokens: Sequence[int] = (1, 2, 3, 4, 5), peer: bool = False
) -> TextRunner:
    """Reports given seconds, one of which is always the prompt's; the first call is the warm-up."""
    left = [99.0, *seconds]

    def run(prompts: Sequence[TextPrompt], seeds: Sequence[int]) -> TextRun:
        log.append((label, tuple(prompt.name for prompt in prompts), tuple(seeds)))
        return TextRun(left.pop(0) + 1.0, 1.0, [list(tokens) for _ in prompts], 2, 2.5, "exact-tokens")

    return TextRunner(label, run, {"rule": label, "policy": "none", "drafter": "none"}, peer)


def test_configurations_take_turns_on_the_same_work() -> None:
    log: Log = []
    runners = [recorder(label, [1.0] * 4, log) for label in (PLAIN, "a", "b")]
    runs = interleave_texts(runners, PROMPTS, repeats=2, batch_size=2, seed=10)
    assert [label for label, _, _ in log[:3]] == [PLAIN, "a", "b"] and len(log) == 3 + 12
    turns = [log[3 + 3 * k : 6 + 3 * k] for k in range(4)]
    for number, turn in enumerate(turns):
        assert {label for label, _, _ in turn} == {PLAIN, "a", "b"}
        names, seeds = (("p0", "p1"), (10, 11)) if number % 2 == 0 else (("p2",), (12,))
        assert {work for _, *work in ((l, p, s) for l, p, s in turn) for work in [tuple(work)]} == {(names, seeds)}
    assert [turn[0][0] for turn in turns] == [PLAIN, "a", "b", PLAIN]
    assert [len(repeat) for repeat in runs["a"]] == [2, 2]


def test_ratios_are_per_token_paired_and_without_the_prompt() -> None:
    """Repeat 2 is twice as slow for all; row a decodes twice as fast; peer y beats x although its text is longer."""
    log: Log = []
    runners = [
        recorder(PLAIN, [4, 8, 4], log),
        recorder("a", [2, 4, 2], log),
        recorder("x", [4, 8, 4], log, peer=True),
        recorder("y", [6, 12, 6], log, tokens=range(9), peer=True),
    ]
    plain, row, x, y = summarise_texts(interleave_texts(runners, PROMPTS[:1], repeats=3), runners, "chat")
    assert plain["ratio_to_plain"] == 1.0 and row["ratio_to_plain"] == 2.0 and row["ratio_quartiles"] == [2.0, 2.0]
    assert y["ratio_to_plain"] == pytest.approx(4 / 4 / (6 / 8), abs=1e-4)
    assert row["best_peer"] == "y" and row["ratio_to_best_peer"] == pytest.approx(6 / 8 / (2 / 4))
    assert row["ratio_with_prefill"] == pytest.approx(5 / 3, abs=1e-4)
    assert row["ratio_with_prefill_to_best_peer"] == pytest.approx(7 / 9 / (3 / 5), abs=1e-4)
    assert row["seconds"] == 3.0 and row["prefill_seconds"] == 1.0 and row["seconds_per_token"] == 0.5
    assert (row["tokens"], row["target_calls"], row["tokens_per_call"], row["repeats"]) == (5, 2, 2.5, 3)
    assert (row["equal_to_plain"], row["texts"]) == (3, 3) and (y["equal_to_plain"], y["texts"]) == (0, 3)
    assert x["peer"] and not row["peer"] and row["task"] == "chat" and row["rule"] == "a"


def test_a_prompt_counts_by_its_length() -> None:
    """Sums, not means of ratios: 4 times as fast on a short text and as fast on a long one is hardly faster."""
    log: Log = []
    runners = [recorder(PLAIN, [0.4, 4.0], log), recorder("a", [0.1, 4.0], log)]
    row = summarise_texts(interleave_texts(runners, PROMPTS[:2], repeats=1), runners, "chat")[1]
    assert row["ratio_to_plain"] == pytest.approx(4.4 / 4.1, abs=1e-4) and row["ratio_to_best_peer"] is None


def test_refusals() -> None:
    log: Log = []
    with pytest.raises(ValueError, match="at least 1"):
        interleave_texts([recorder("a", [], log)], PROMPTS, repeats=0)
    with pytest.raises(ValueError, match="not distinct"):
        interleave_texts([recorder("a", [], log), recorder("a", [], log)], PROMPTS)
    with pytest.raises(ValueError, match="ratios need"):
        summarise_texts({"a": []}, [], "chat")
    single = [recorder(PLAIN, [1.0], log, tokens=[4])]
    with pytest.raises(ValueError, match="no decoding to time"):
        summarise_texts(interleave_texts(single, PROMPTS[:1], repeats=1), single, "chat")


@pytest.fixture(scope="module")
def pipe() -> TextGenerationPipeline:
    pipe = TextGenerationPipeline(make_model(num_hidden_layers=2), make_tokenizer())
    pipe.set_progress_bar_config(disable=True)
    return pipe


def test_every_way_of_decoding_gives_the_same_greedy_tokens(pipe: TextGenerationPipeline) -> None:
    sampling = Sampling(max_new_tokens=6)
    stock = own_modules(pipe.model)
    runners = [
        pipeline_runner(pipe, PLAIN, {"rule": PLAIN}, {"rule": PLAIN}, sampling),
        pipeline_runner(pipe, "ours", {"rule": "coupled"}, {"rule": "coupled", "drafter": "ngram"}, sampling),
        peer_runner(stock, pipe.tokenizer, "hf_generate", sampling),
        peer_runner(stock, pipe.tokenizer, "hf_prompt_lookup", sampling, {"prompt_lookup_num_tokens": 4}),
        peer_runner(stock, pipe.tokenizer, "hf_assisted", sampling, assistant=first_layers(stock, 1)),
    ]
    rows = summarise_texts(interleave_texts(runners, PROMPTS, repeats=1), runners, "chat")
    assert [(row["equal_to_plain"], row["texts"]) for row in rows] == [(3, 3)] * 5
    assert rows[0]["tokens_per_call"] == 1.0 and rows[2]["tokens_per_call"] == 1.0
    assert rows[0]["target_calls"] == rows[2]["target_calls"] == rows[0]["tokens"]
    assert all(row["tokens_per_call"] >= 1.0 for row in rows) and rows[4]["settings"]["assistant_layers"] == 1
    assert all(0 < row["prefill_seconds"] < row["seconds"] for row in rows)
    assert [row["peer"] for row in rows] == [False, False, True, True, True]
    both = peer_runner(stock, pipe.tokenizer, "hf_generate", sampling).run(PROMPTS, [0, 1, 2])
    alone = [peer_runner(stock, pipe.tokenizer, "hf_generate", sampling).run([one], [0]) for one in PROMPTS]
    assert both.tokens == [run.tokens[0] for run in alone]  # padding on the left changes nothing


def test_the_watch_ends_with_the_pass_that_reads_the_last_position(pipe: TextGenerationPipeline) -> None:
    """Some versions read long prompts in chunks: the watch must not stop at the first."""
    model, marks = pipe.model, []
    hook = model.register_forward_hook(lambda *_: marks.append(time.perf_counter()))
    with PrefillWatch(model, 1100) as watch, torch.no_grad():
        for width in (512, 512, 76, 1, 1):
            model(input_ids=torch.ones(1, width, dtype=torch.int64), use_cache=False)
    hook.remove()
    assert watch.calls == 5 and watch.ended is not None and marks[2] <= watch.ended <= marks[3]
    assert not model._forward_hooks


def test_peers_share_weights_and_nothing_else(pipe: TextGenerationPipeline) -> None:
    stock, small = own_modules(pipe.model), first_layers(pipe.model, 1)
    ours: Any = dict(pipe.model.named_parameters())
    assert all(weight is ours[name] for name, weight in stock.named_parameters())
    assert not set(map(id, stock.modules())) & set(map(id, pipe.model.modules()))
    assert small.config.num_hidden_layers == 1 and pipe.model.config.num_hidden_layers == 2
    assert all(weight is ours[name] for name, weight in small.named_parameters())
    for count in (0, 2):
        with pytest.raises(ValueError, match="smaller"):
            first_layers(pipe.model, count)


def test_tasks_are_what_they_say() -> None:
    sizes = {task: task_prompts(task) for task in TASKS}
    assert [len(prompts) for prompts in sizes.values()] == [24, 16, len(LONG)]
    for prompts in sizes.values():
        assert len({prompt.name for prompt in prompts}) == len({prompt.prompt for prompt in prompts}) == len(prompts)
    for prompt in sizes["copy"]:
        assert prompt.expected is not None
        head, text = prompt.prompt.split("\n\n", 1)
        wanted, given = re.findall(r"\w+", prompt.expected.lower()), set(re.findall(r"\w+", text.lower()))
        assert sum(word in given for word in wanted) >= 0.75 * len(wanted), prompt.name
        assert (prompt.expected == text) == ("word for word." in head or "without any change" in head), prompt.name
    for prompt in sizes["long"]:
        assert 700 < len(prompt.prompt.split()) < 6100
        assert prompt.expected is None or prompt.prompt.count(prompt.expected) >= 1
    assert task_prompts("long", 2) == sizes["long"][:2]
    with pytest.raises(ValueError, match="chat, copy, long"):
        task_prompts("chatt")
    with pytest.raises(ValueError, match="24 prompts"):
        task_prompts("chat", 25)


@pytest.mark.parametrize("kind", KINDS)
def test_facts_are_answered_by_one_paragraph(kind: str) -> None:
    text = document(kind, 3, 6000)
    assert len({fact.question for fact in text.facts.values()}) == len(text.facts) > 20
    for place, fact in text.facts.items():
        assert fact.answer in text.paragraphs[place]
        rare = fact.about.removeprefix("the settings of type ").removeprefix("the night with ")
        telling = [k for k, paragraph in enumerate(text.paragraphs) if rare in paragraph and fact.answer in paragraph]
        assert place in telling and len(telling) == 1, (rare, fact.answer)


def test_texts_are_the_same_on_every_machine() -> None:
    """Numbers quoted for these texts are about these very characters."""
    whole = "\0".join(prompt.prompt for task in TASKS for prompt in task_prompts(task)) + prose(0, 3000)
    assert hashlib.sha256(whole.encode()).hexdigest()[:16] == "14f3c6bd3126c4f2"
    with pytest.raises(ValueError, match="minutes, story"):
        document("poem", 0, 10)
