"""`mediaspec generate image`: pictures, manifest, JSON line, resumption after SIGKILL, clear errors."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import PIL.Image
import pytest

from mediaspec.eval.manifest import read_manifest
from mediaspec.pipelines import AutoPipeline

ROOT = Path(__file__).resolve().parents[2]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def report(result) -> dict:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.strip().splitlines()[-1])


def test_pictures_manifest_and_json(command, model, tmp_path) -> None:
    out = tmp_path / "out"
    line = report(command(
        "generate", "image", "a red apple", "a cat", "--out", out, "--seed", 7, "--num-images", 2, "--rule", "cool_sd",
        "--delta", 1.1, "--batch-size", 3, "--model", model, "--json",
    ))  # fmt: skip
    assert line["images"] == [str(out / f"{i:06d}.png") for i in range(4)]
    assert line["tokens"] == 64 and line["tokens_per_call"] == pytest.approx(64 / line["target_calls"], abs=1e-4)
    assert line["drift"] > 0 and line["guarantee"] == "bounded-drift" and line["made"] == 4
    assert line["seconds"] > 0 and line["tokens_per_second"] > 0
    rows = read_manifest(out)
    made = [(row["prompt"], row["seed"]) for row in rows]
    assert made == [("a red apple", 7), ("a red apple", 8), ("a cat", 9), ("a cat", 10)]
    assert sum(r["stats"]["target_calls"] for r in rows) == line["target_calls"]
    settings = json.loads((out / "settings.json").read_text())["settings"]
    assert (settings["rule"], settings["rule_settings"], settings["model"]) == ("cool_sd", {"delta": 1.1}, "tiny")
    pipe = AutoPipeline.from_pretrained(model)
    alone = pipe("a cat", seeds=9, rule=pipe.rule.from_config({**pipe.rule.config, "delta": 1.1})).images[0]
    assert PIL.Image.open(out / "000002.png").tobytes() == alone.tobytes()


def test_a_second_run_makes_nothing_and_says_the_same(command, model, tmp_path) -> None:
    arguments = ("generate", "image", "a cat", "--out", tmp_path, "--num-images", 3, "--model", model, "--json")
    first = report(command(*arguments))
    before = contents(tmp_path)
    second = report(command(*arguments))
    assert contents(tmp_path) == before and second["made"] == 0
    for key in ("images", "tokens", "target_calls", "tokens_per_call", "drift", "guarantee"):
        assert first[key] == second[key]


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_the_batch_size_changes_no_file(command, model, tmp_path, batch: int) -> None:
    prompts = ("a cat", "a red apple on a blue background", "a dog", "a green car", "a small dog")
    for name, size in (("one", 1), ("many", batch)):
        options = ("--out", tmp_path / name, "--model", model, "--batch-size", size)
        result = command("generate", "image", *prompts, *options)
        assert result.exit_code == 0, result.output
    assert contents(tmp_path / "one") == contents(tmp_path / "many")


def test_prompts_from_text_and_json_lines(command, model, tmp_path) -> None:
    text = tmp_path / "prompts.txt"
    text.write_text("a cat\n\na dog\n")
    assert command("generate", "image", "--prompts", text, "--out", tmp_path / "t", "--model", model).exit_code == 0
    assert [r["prompt"] for r in read_manifest(tmp_path / "t")] == ["a cat", "a dog"]
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"prompt": "a cat", "id": "cat", "seed": 70, "negative_prompt": "a dog"}\n"a dog"\n')
    assert command("generate", "image", "--prompts", lines, "--out", tmp_path / "j", "--model", model).exit_code == 0
    rows = read_manifest(tmp_path / "j")
    made = [(row["id"], row["seed"], row.get("negative_prompt")) for row in rows]
    assert made == [("cat", 70, "a dog"), ("000001", 1, None)]


def test_shards_make_the_same_pictures(command, model, tmp_path) -> None:
    prompts = ("a cat", "a dog", "a car")
    assert command("generate", "image", *prompts, "--out", tmp_path / "one", "--model", model).exit_code == 0
    for rank in range(2):
        options = ("--out", tmp_path / "two", "--model", model, "--shard", f"{rank}/2")
        result = command("generate", "image", *prompts, *options)
        assert result.exit_code == 0, result.output
    assert read_manifest(tmp_path / "one") == read_manifest(tmp_path / "two")


def test_a_torchrun_worker_takes_its_shard(command, model, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    options = ("--out", tmp_path, "--model", model, "--shard-by", "index", "--json")
    line = report(command("generate", "image", "a cat", "a dog", "a car", *options))
    assert line["images"] == [str(tmp_path / "000001.png")] and (tmp_path / "manifest-1-of-2.jsonl").exists()


def test_a_config_file_gives_defaults_and_options_win(command, model, tmp_path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(f"model: {model}\nrule: cool_sd\ndelta: 1.4\nnum_images: 2\nseed: 5\n")
    out = tmp_path / "out"
    assert command("generate", "image", "a cat", "--config", config, "--delta", 1.2, "--out", out).exit_code == 0
    settings = json.loads((out / "settings.json").read_text())["settings"]
    assert settings["rule_settings"] == {"delta": 1.2} and [r["seed"] for r in read_manifest(out)] == [5, 6]


def test_every_packaged_preset_is_readable_and_runs(command, model, tmp_path) -> None:
    presets = sorted((ROOT / "mediaspec/configs").glob("*.yaml"))
    assert presets
    for preset in presets:
        out = tmp_path / preset.stem
        result = command("generate", "image", "a cat", "--config", preset.stem, "--model", model, "--out", out)
        assert result.exit_code == 0, result.output
        assert len(read_manifest(out)) == 1


def test_traces_are_drawn_and_resumed(command, model, tmp_path) -> None:
    arguments = ("generate", "image", "a cat", "a dog", "--out", tmp_path, "--model", model, "--json")
    plain = report(command(*arguments))
    traced = report(command(*arguments, "--trace"))
    assert plain["traces"] == [] and traced["traces"] == [str(tmp_path / f"trace/00000{i}.png") for i in range(2)]
    assert traced["made"] == 2 and PIL.Image.open(traced["traces"][0]).width > 1000
    assert report(command(*arguments, "--trace"))["made"] == 0


ZYGOTE = textwrap.dedent("""
    # imports once, then forks one child per line of stdin, so that a kill costs milliseconds instead of an import
    import os, sys
    sys.path.insert(0, {root!r})
    import torch, mediaspec.pipelines, mediaspec.eval.generation
    from mediaspec.cli import app
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(1, 2)
            torch.set_num_threads(1)
            app(line.rstrip("\\n").split("\\t"))
            os._exit(0)
        print(pid, flush=True)
        print(os.waitpid(pid, 0)[1], flush=True)
""")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_sigkill_at_random_moments_changes_nothing(command, model, tmp_path) -> None:
    colours = ("red", "blue", "green")
    prompts = [f"a {c} {thing}" for c in colours for thing in ("cat", "dog", "car", "apple")]
    options = ["--num-images", "2", "--model", str(model), "--batch-size", "2", "--rule", "cool_sd", "--device", "cpu"]
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    whole = command("generate", "image", *prompts, *options, "--out", undisturbed, "--json")
    assert report(whole)["made"] == 24
    arguments = ["generate", "image", *prompts, *options, "--out", str(killed)]
    zygote = subprocess.Popen(
        [sys.executable, "-c", ZYGOTE.format(root=str(ROOT))], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT,
        text=True,
    )  # fmt: skip
    assert zygote.stdin is not None and zygote.stdout is not None
    draw, kills, manifest = random.Random(1), 0, killed / "manifest.jsonl"
    try:
        for _ in range(40):
            zygote.stdin.write("\t".join(arguments) + "\n")
            zygote.stdin.flush()
            pid = int(zygote.stdout.readline())
            have = manifest.read_bytes().count(b"\n") if manifest.exists() else 0
            wanted, deadline = have + draw.randint(1, 3) * 2, time.monotonic() + 20
            while time.monotonic() < deadline and wanted < 24:
                if manifest.exists() and manifest.read_bytes().count(b"\n") >= wanted:
                    break
                time.sleep(0.001)
            if wanted < 24:
                time.sleep(draw.random() * 0.03)
                os.kill(pid, signal.SIGKILL)
            status = int(zygote.stdout.readline())
            kills += os.WIFSIGNALED(status)
            if not os.WIFSIGNALED(status):
                assert os.WEXITSTATUS(status) == 0
                break
    finally:
        zygote.stdin.close()
        zygote.wait(30)
        zygote.stdout.close()
    assert kills >= 4
    final = report(command(*arguments, "--json"))
    assert contents(killed) == contents(undisturbed) and final["made"] < 24


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["a cat", "--rule", "cool-sd2"], "there is no"),
        (["a cat", "--rule", "exact", "--delta", "1.2"], "delta"),
        (["a cat", "--rule", "cool_sd:detla=1.2"], "did you mean 'delta'"),
        (["a cat", "--rule", "exact,cool_sd"], "one rule"),
        (["a cat", "--drafter", "eagel"], "did you mean 'eagle'"),
        (["a cat", "--dtype", "fp8"], "dtype 'fp8'"),
        (["a cat", "--num-images", "0"], "--num-images"),
        (["a cat", "--batch-size", "0"], "batch_size"),
        (["a cat", "--shard", "3/2"], "--shard"),
        (["a cat", "--shard-by", "rank"], "--shard-by index"),
        (["a cat", "--shard-by", "index"], "RANK"),
        (["a cat", "--tree", "x"], "--tree"),
        (["a cat", "--temperature", "-1"], "temperature"),
        (["a cat", "--temperature", "nan"], "temperature=nan"),
        (["a cat", "--temperature", "1e-40"], "0 is greedy"),
        (["a cat", "--guidance-scale", "inf"], "write a finite number"),
        (["a cat", "--top-p", "0"], "top_p"),
        (["a cat", "--delta", "2", "--eps", "0.1"], "give one"),
        (["a cat", "--rule", "cool_sd:eps=0.1", "--delta", "2"], "give one"),
        (["a cat", "--rule", "lantern++", "--delta", "0.5"], "write lam="),
        (["a cat", "--rule", "cool_sd:delta=fast"], "cannot be made"),
        (["a cat", "--device", "foo"], "device 'foo' cannot be used here"),
        (["a cat", "--seed", str(2**63 - 1), "--num-images", "2"], "no int64"),
        (["a cat", "--shard", "\u00b2/3"], "--shard"),
        (["a cat", "--config", "no-such"], "no such file or preset"),
        (["a cat", "--prompts", "x.txt"], "one of the two"),
        ([], "captions as arguments"),
        (["--prompts", "no-such.txt"], "is no file"),
        ([""], "prompt 0 is empty"),
    ],
)
def test_bad_input_is_one_line_and_code_2(command, model, tmp_path, monkeypatch, arguments, message: str) -> None:
    monkeypatch.delenv("RANK", raising=False)
    result = command("generate", "image", *arguments, "--model", model, "--out", tmp_path / "out")
    assert result.exit_code == 2 and "Traceback" not in result.output
    assert message in result.stderr, result.stderr


def test_unknown_config_keys_are_refused(command, model, tmp_path) -> None:
    (tmp_path / "c.yaml").write_text("guidance: 3\n")
    options = ("--config", tmp_path / "c.yaml", "--model", model, "--out", tmp_path)
    result = command("generate", "image", "a cat", *options)
    assert result.exit_code == 2 and "did you mean 'guidance_scale'" in result.stderr


@pytest.mark.parametrize(
    "line", ["seed: abc", 'num_images: "3"', "batch_size: 2.5", "seed: null", "rule: 5", "top_k: 1.5", "seed: true"]
)
def test_config_values_of_the_wrong_kind_are_refused(command, model, tmp_path, line: str) -> None:
    (tmp_path / "c.yaml").write_text(line)
    result = command(
        "generate", "image", "a cat", "--config", tmp_path / "c.yaml", "--model", model, "--out", tmp_path / "out"
    )
    assert result.exit_code == 2 and f"{line.split(':')[0]} is " in result.stderr, result.stderr


def test_a_rule_on_the_command_line_drops_the_strength_of_the_config(command, model, tmp_path) -> None:
    base = ("generate", "image", "a cat", "--model", model, "--config", "fast", "--json")
    made = command(*base, "--rule", "exact", "--out", tmp_path / "a")
    assert report(made)["guarantee"] == "exact-law"
    assert command(*base, "--eps", "0.05", "--out", tmp_path / "b").exit_code == 0
    settings = json.loads((tmp_path / "b/settings.json").read_text())["settings"]
    assert settings["rule"] == "cool_sd" and settings["rule_settings"] == {"eps": 0.05}


def test_prompt_files_of_other_editors(command, model, tmp_path) -> None:
    (tmp_path / "p.txt").write_bytes(b"\xef\xbb\xbfa cat\r\na dog\r\n")
    (tmp_path / "p.jsonl").write_text('{"prompt": "a cat\u2028a dog"}\n', encoding="utf-8")
    (tmp_path / "x.txt").write_bytes(b"\xff\xfea")
    base = ("generate", "image", "--model", model)
    for name, prompts in (("p.txt", ["a cat", "a dog"]), ("p.jsonl", ["a cat\u2028a dog"])):
        out = tmp_path / f"{name}-out"
        assert command(*base, "--prompts", tmp_path / name, "--out", out).exit_code == 0
        assert [row["prompt"] for row in read_manifest(out)] == prompts
    result = command(*base, "--prompts", tmp_path / "x.txt", "--out", tmp_path / "x")
    assert result.exit_code == 2 and "no UTF-8 text" in result.stderr


def test_another_model_or_rule_in_the_same_folder_is_refused(command, model, tmp_path) -> None:
    base = ("generate", "image", "a cat", "--model", model, "--out", tmp_path)
    assert command(*base, "--rule", "exact").exit_code == 0
    before = contents(tmp_path)
    result = command(*base, "--rule", "coupled")
    assert result.exit_code == 2 and "rule: 'exact' there, 'coupled' now" in result.stderr
    result = command(*base, "--rule", "exact", "--seed", 3)
    assert result.exit_code == 2 and "seed 0, now it is 3" in result.stderr
    assert contents(tmp_path) == before


def test_an_unwritable_folder_is_one_line(command, model, tmp_path) -> None:
    (tmp_path / "file").write_text("x")
    result = command("generate", "image", "a cat", "--model", model, "--out", tmp_path / "file" / "out")
    assert result.exit_code == 2 and "cannot write to" in result.stderr and "--out" in result.stderr


def test_a_missing_model_is_one_line(command, tmp_path) -> None:
    result = command("generate", "image", "a cat", "--model", "emoji-46", "--out", tmp_path / "out")
    assert result.exit_code == 2 and "emoji-64" in result.stderr


def test_unknown_words_are_a_warning_line(command, model, tmp_path) -> None:
    result = command("generate", "image", "a red aple", "--model", model, "--out", tmp_path / "out")
    assert result.exit_code == 0 and "drift from the model's own law" in result.stdout
    lines = [line for line in result.stderr.splitlines() if "warning:" in line]
    assert len(lines) == 1 and "'aple' (near: apple)" in lines[0] and "text_to_image.py" not in result.stderr


def test_version_and_help_answer(command) -> None:
    from mediaspec import __version__

    assert command("--version").stdout.strip() == f"mediaspec {__version__}"
    assert "generate" in command("--help").stdout and "--trace" in command("generate", "image", "--help").stdout
