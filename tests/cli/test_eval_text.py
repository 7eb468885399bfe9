"""`mediaspec eval text` on a tiny model: perplexity, needles, lossy attention beside full, clear errors."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.pipelines.test_text_generation import make_tokenizer
from tests.targets.test_causal_lm import VOCAB, make_model


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("language") / "tiny"
    model = make_model(num_hidden_layers=4)
    model.config.max_position_embeddings = 512
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def object_of(result) -> dict:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.strip().splitlines()[-1])


def test_full_attention_alone(command, language_model, tmp_path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{(7 * k * k + k) % (VOCAB - 3)}" for k in range(320)))
    result = command(
        "eval", "text", "--model", language_model, "--attention", "none", "--lengths", "80,160", "--texts", 2,
        "--scored", 32, "--text-file", text, "--depths", 0, "--json",
    )  # fmt: skip
    found = object_of(result)
    assert [(row["attention"], row["length"]) for row in found["rows"]] == [("none", 80), ("none", 160)]
    for row in found["rows"]:
        assert row["scored_tokens"] == 64 and row["perplexity"] > 1 and math.isfinite(row["perplexity"])
        assert row["perplexity_change"] is None and row["needle"] is None and row["kv_bytes"] > 0
    assert "| `none` | 160 |" in result.stdout and found["settings"]["scored"] == 32
    assert {"versions", "machine", "git"} <= found["provenance"].keys()
    (tmp_path / "eval.json").write_text(result.stdout)
    printed = command("eval", "report", tmp_path / "eval.json")
    assert printed.exit_code == 0 and "| `none` | 160 |" in printed.stdout


def test_needles_are_asked_for(command, language_model) -> None:
    found = object_of(
        command(
            "eval", "text", "--model", language_model, "--attention", "none", "--lengths", 400, "--texts", 0,
            "--depths", 2, "--needles", 1, "--json",
        )
    )  # fmt: skip
    needle = found["rows"][0]["needle"]
    assert needle["of"] == 2 and list(needle["by_depth"]) == ["0.25", "0.75"]
    assert needle["right"] == 0  # a model of random numbers knows no numbers
    assert found["rows"][0]["perplexity"] is None and found["rows"][0]["kv_ratio"] is None


def test_a_lossy_policy_acts_on_what_is_scored_and_is_taken_off(command, language_model) -> None:
    """The scored tokens stand behind the prompt, where the lazy layers have dropped most of it."""
    lossy = "light_transfer:w_sink=2,w_recent=16,w_last=8,min_head_ratio=0"
    run = ("eval", "text", "--model", language_model, "--lengths", 300, "--texts", 1, "--scored", 48, "--depths", 1)
    found = object_of(command(*run, "--needles", 1, "--attention", f"{lossy},none", "--json"))
    full, lazy = found["rows"]
    assert full["attention"] == "none" and lazy["attention"] == lossy  # full attention first, to compare with
    assert lazy["perplexity"] != full["perplexity"] and lazy["kv_ratio"] < 0.75
    change = lazy["perplexity_change"]
    assert change["value"] == pytest.approx(lazy["perplexity"] / full["perplexity"] - 1, abs=1e-4)
    assert change["error"] > 0 and full["perplexity_change"] is None and full["summary"] is None
    assert len(lazy["summary"]["lazy_layers"]) == 2 and lazy["summary"]["guarantee"] == "lossy"
    assert full["needle"]["of"] == lazy["needle"]["of"] == 1
    alone = object_of(command(*run, "--needles", 1, "--attention", "none", "--json"))
    assert alone["rows"][0]["perplexity"] == full["perplexity"]
    wrong = command(*run, "--attention", "light_transfer:w_recnt=16")
    assert wrong.exit_code == 2 and "w_recent" in wrong.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--lengths", "many"), "2048,8192"),
        (("--lengths", "300,600"), "512 positions"),
        (("--lengths", "64", "--scored", 64), "smaller --scored"),
        (("--texts", 0, "--depths", 0), "some text or some depth"),
        (("--text-file", "missing.txt"), "is no file"),
        (("--attention", "none,,light_transfer"), "empty entry"),
    ],
)
def test_errors_name_the_way_out(command, language_model, arguments, message) -> None:
    run = ("eval", "text", "--model", language_model, "--attention", "none", "--lengths", 300, "--depths", 0)
    result = command(*run, "--scored", 16, "--texts", 1, *arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
