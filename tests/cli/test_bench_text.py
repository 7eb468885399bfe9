"""`mediaspec bench text` on a tiny model: rows, peers, files, clear errors. No test looks at how fast it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from tests.pipelines.test_text_generation import make_tokenizer
from tests.targets.test_causal_lm import make_model


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("language") / "tiny"
    make_model(num_hidden_layers=2).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def rows_of(result) -> list[dict]:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.strip().splitlines()[-1])


def test_rows_peers_and_files(command, language_model, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    result = command(
        "bench", "text", "--model", language_model, "--tasks", "chat,copy", "--num-prompts", 1, "--repeats", 1,
        "--max-new-tokens", 5, "--rules", "coupled:num_draft_tokens=3,exact", "--drafters", "ngram",
        "--json", "--out", tmp_path / "bench",
    )  # fmt: skip
    rows = rows_of(result)
    labels = [
        "plain", "coupled:num_draft_tokens=3/default/ngram", "exact/default/ngram", "hf_generate", "hf_prompt_lookup",
        "hf_assisted",
    ]  # fmt: skip
    assert [(row["task"], row["label"]) for row in rows] == [
        (task, one) for task in ("chat", "copy") for one in labels
    ]
    by_label = {row["label"]: row for row in rows if row["task"] == "copy"}
    assert by_label["plain"]["ratio_to_plain"] == 1.0 == by_label["plain"]["tokens_per_call"]
    assert by_label[labels[1]]["guarantee"] == "exact-tokens" and by_label[labels[1]]["settings"]["rule"] == "coupled"
    assert by_label["hf_assisted"]["settings"]["assistant_layers"] == 1
    for row in rows:
        assert (row["equal_to_plain"], row["texts"], row["prompts"]) == (1, 1, 1), row["label"]
        assert row["seconds"] > row["prefill_seconds"] > 0 and row["ratio_to_best_peer"] > 0
        assert row["best_peer"] in ("hf_generate", "hf_prompt_lookup", "hf_assisted")
        assert row["batch_size"] == 1 and row["max_new_tokens"] == 5 and row["model"] == str(language_model)
        assert {"foreign_cores", "steal_cores", "quiet"} <= row["machine_watch"].keys()
        assert {"versions", "machine", "dtype", "threads", "seed", "git"} <= row["provenance"].keys()
    assert "default" not in {row["policy"] for row in rows} or "policy" not in by_label[labels[2]]["settings"]
    assert json.loads((tmp_path / "bench" / "bench_text.json").read_text()) == rows
    assert Image.open(tmp_path / "bench" / "text_speed.png").format == "PNG"
    assert "| copy | `exact` |" in result.stdout
    printed = command("eval", "report", tmp_path / "bench" / "bench_text.json")
    assert printed.exit_code == 0 and "| copy | `exact` |" in printed.stdout


def test_batches_leave_out_peers_that_cannot(command, language_model) -> None:
    result = command(
        "bench", "text", "--model", language_model, "--tasks", "chat", "--num-prompts", 3, "--repeats", 1,
        "--max-new-tokens", 4, "--batch-size", 2, "--drafters", "ngram", "--rules", "coupled:num_draft_tokens=3",
        "--temperature", 0.8, "--json",
    )  # fmt: skip
    rows = rows_of(result)
    assert [row["rule"] for row in rows] == ["plain", "coupled:num_draft_tokens=3", "hf_generate"]
    assert rows[1]["equal_to_plain"] == rows[1]["texts"] == 3  # the coupled rule: plain's tokens for the same seeds
    assert "hf_prompt_lookup is left out" in result.stderr and "hf_assisted is left out" in result.stderr


def test_lossy_attention_stands_beside_and_says_so(command, language_model) -> None:
    lossy = "light_transfer:w_sink=1,w_recent=4,w_last=4"
    result = command(
        "bench", "text", "--model", language_model, "--tasks", "copy", "--num-prompts", 1, "--repeats", 1,
        "--max-new-tokens", 12, "--rules", "plain", "--peers", "none", "--attention", f"none,{lossy}", "--json",
    )  # fmt: skip
    plain, lazy = rows_of(result)
    assert (plain["attention"], lazy["attention"]) == ("none", lossy) and lazy["label"] == f"plain+{lossy}"
    assert lazy["guarantee"] == "lossy" and 0 < lazy["settings"]["kv_share"] < 1
    assert plain["equal_to_plain"] == 1 and lazy["texts"] == 1 and "promises" not in result.stderr
    assert plain["ratio_to_best_peer"] is None and f"under `{lossy}`" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rules", "coupld"), "did you mean 'coupled'"),
        (("--policies", "surviv"), "survival"),
        (("--policies", "ucb:scalee=2"), "scale"),
        (("--drafters", "ngrm"), "ngram"),
        (("--drafters", "ngram,,suffix"), "commas"),
        (("--tasks", "chat,poems"), "chat, copy, long"),
        (("--peers", "hf_generat"), "hf_generate"),
        (("--num-prompts", 0), "at least 1"),
        (("--max-new-tokens", 1), ">= 2"),
        (("--repeats", 0), "at least 1"),
        (("--assistant-layers", 2), "smaller number"),
        (("--tasks", "long"), "positions"),
        (("--dtype", "int8"), "bfloat16"),
    ],
)
def test_errors_name_the_way_out(command, language_model, arguments, message) -> None:
    run = ("bench", "text", "--model", language_model, "--num-prompts", 1, "--tasks", "chat", "--repeats", 1)
    result = command(*run, "--max-new-tokens", 3, *arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
