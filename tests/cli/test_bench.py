"""`mediaspec bench image` on a tiny pipeline: rows, peer, files, clear errors. No test looks at how fast it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image


@pytest.fixture
def captions(tmp_path) -> Path:
    path = tmp_path / "captions.txt"
    path.write_text("a red apple\na cat\n")
    return path


def rows_of(result) -> list[dict]:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.strip().splitlines()[-1])


def test_rows_and_peer(command, model, captions, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    rules = "plain,exact,coupled@jacobi:num_draft_tokens=4,cool_sd:delta=1.5,exact:tree=2x1"
    rows = rows_of(
        command(
            "bench", "image", "--rules", rules, "--repeats", 2, "--batch-size", 2, "--model", model,
            "--prompts", captions, "--out", tmp_path / "bench", "--json",
        )
    )  # fmt: skip
    assert [row["rule"] for row in rows] == [
        "plain", "exact", "coupled@jacobi:num_draft_tokens=4", "cool_sd:delta=1.5", "exact:tree=2x1", "hf_generate",
    ]  # fmt: skip
    by_rule = {row["rule"]: row for row in rows}
    assert by_rule["plain"]["ratio_to_plain"] == 1.0 and by_rule["plain"]["tokens_per_call"] == 1.0
    assert by_rule["hf_generate"]["tokens_per_call"] == 1.0 and by_rule["hf_generate"]["target_calls"] == 16
    assert by_rule["exact"]["drift"] == 0 and by_rule["exact"]["guarantee"] == "exact-law"
    assert by_rule["coupled@jacobi:num_draft_tokens=4"]["guarantee"] == "exact-tokens"
    assert by_rule["coupled@jacobi:num_draft_tokens=4"]["settings"]["num_draft_tokens"] == 4
    assert by_rule["coupled@jacobi:num_draft_tokens=4"]["settings"]["drafter"] == "jacobi"
    assert by_rule["cool_sd:delta=1.5"]["drift"] > 0 and by_rule["cool_sd:delta=1.5"]["guarantee"] == "bounded-drift"
    assert by_rule["exact:tree=2x1"]["settings"]["tree"]
    for row in rows:
        assert row["seconds"] > 0 and row["repeats"] == 2 and row["batch_size"] == 2
        assert {"versions", "machine", "dtype", "threads", "seed", "git"} <= row["provenance"].keys()
        assert {"foreign_cores", "steal_cores", "quiet"} <= row["machine_watch"].keys()
    assert json.loads((tmp_path / "bench" / "bench.json").read_text()) == rows
    assert Image.open(tmp_path / "bench" / "speed_drift.png").format == "PNG"


def test_plain_is_added_and_num_images_sets_the_repeats(command, model, captions) -> None:
    rows = rows_of(
        command(
            "bench", "image", "--rules", "exact", "--num-images", 3, "--batch-size", 2, "--no-peer", "--model", model,
            "--prompts", captions, "--json",
        )
    )  # fmt: skip
    assert [row["rule"] for row in rows] == ["plain", "exact"] and rows[0]["repeats"] == 2


def test_a_table_without_json(command, model, captions) -> None:
    result = command(
        "bench", "image", "--rules", "plain", "--repeats", 1, "--no-peer", "--model", model, "--prompts", captions
    )
    assert result.exit_code == 0 and "| `plain` | 1.00x |" in result.stdout


def test_prompt_files_without_captions_are_refused(command, model, tmp_path) -> None:
    (tmp_path / "p.jsonl").write_text('{"text": "a cat"}')
    result = command("bench", "image", "--model", model, "--prompts", tmp_path / "p.jsonl", "--repeats", 1)
    assert result.exit_code == 2 and "write a caption" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rules", "exactt"), "did you mean 'exact'"),
        (("--rules", "cool_sd:detla=2"), "delta"),
        (("--rules", "exact@eagel"), "eagle"),
        (("--repeats", 0), "at least 1"),
        (("--prompts", "missing.txt"), "is no file"),
    ],
)
def test_errors_name_the_way_out(command, model, captions, arguments, message) -> None:
    result = command("bench", "image", "--model", model, "--prompts", captions, "--repeats", 1, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_an_unwritable_place_is_refused_before_timing(command, model, captions, tmp_path) -> None:
    result = command(
        "bench",
        "image",
        "--model",
        model,
        "--prompts",
        captions,
        "--plot",
        tmp_path / "nowhere" / "p.png",
        "--repeats",
        1,
    )
    assert result.exit_code == 2 and "no folder that can be written to" in result.stderr


def test_the_peer_draws_the_same_law(model) -> None:
    """Greedy decoding: transformers' generate gives the very tokens of our plain loop."""
    import torch

    from mediaspec.eval.runners import _condition
    from mediaspec.models.llamagen.hf_generate import hf_generate_images
    from mediaspec.pipelines import AutoPipeline

    pipe = AutoPipeline.from_pretrained(model)
    pipe.set_progress_bar_config(disable=True)
    prompts = ["a red apple", "a cat on a blue background"]
    ours = pipe(prompts, rule="plain", seeds=[0, 1], temperature=0.0, output_type="tokens").images
    condition, mask = _condition(pipe, prompts)
    guidance = pipe.config["guidance_scale"]
    theirs = hf_generate_images(pipe.transformer, condition, mask, guidance_scale=guidance, do_sample=False)
    assert torch.equal(ours, theirs)
