"""`mediaspec inspect`: JSON, heat maps, a pattern to draft with, clear errors; SmolLM2 where it is installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from mediaspec.attention.diagnostics import AttentionReport, Settings
from mediaspec.attention.strip import LazyWindow
from mediaspec.drafters import SparseDrafter
from mediaspec.eval.inspection import inspect_model, prompt_hash
from tests.attention.models import HEADS, LAYERS, VOCAB, attentions, make_model

WORDS = [f"w{place}" for place in range(VOCAB)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    make_model().save_pretrained(path)
    words = Tokenizer(WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(path)
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    ids = torch.randint(3, VOCAB, (100,), generator=torch.Generator().manual_seed(1)).tolist()
    path.write_text(" ".join(WORDS[one] for one in ids))
    return path


def test_report_maps_and_pattern(command, folder: Path, text: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "out"
    sizes = ("--tokens", 80, "--rows", 16, "--epsilon", 0.1)
    done = command("inspect", folder, "--prompt-file", text, "--out", out, *sizes, "--json")
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout.strip().splitlines()[-1])
    assert data == json.loads((out / "inspect.json").read_text())
    assert (out / "inspect.png").read_bytes()[:4] == b"\x89PNG"
    assert data["model"] == str(folder) and data["tokens"] == 80 and data["rows"] == 16 and data["dtype"] == "float32"
    ids = torch.tensor([WORDS.index(word) for word in text.read_text().split()[:80]])
    assert data["prompt_sha256"] == prompt_hash(ids)
    assert data["cost"]["full_matrix_of_one_layer_mb"] == round(HEADS * 80 * 80 * 4 / 1e6, 1)
    report = AttentionReport.from_dict(data)
    law = attentions(make_model(), ids)[:, :, -16:]
    assert len(report.heads) == LAYERS * HEADS
    for one in report.heads:
        assert one.sink_score == pytest.approx(float(law[one.layer, one.head, :, 0].mean()), abs=2e-5)
    assert SparseDrafter(ratio=0, pattern=out / "inspect.json").pattern == report.pattern()


def test_a_summary_for_people(command, folder: Path, text: Path, tmp_path: Path) -> None:
    done = command("inspect", folder, "--prompt-file", text, "--out", tmp_path / "out", "--no-plot")
    assert done.exit_code == 0, done.output
    assert "warning: " in done.stderr and "has only 100 tokens" in done.stderr
    for word in ("sink heads", "slash heads", "lazy heads", "patterns keep", "MB above the model"):
        assert word in done.stdout
    assert not (tmp_path / "out" / "inspect.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", 0], "at least 1 row"),
        (["--kappa", 1.5], "--kappa 1.5"),
        (["--dtype", "int8"], "float32, bfloat16, float16"),
    ],
)
def test_wrong_values(command, folder: Path, text: Path, tmp_path: Path, arguments: list, message: str) -> None:
    done = command("inspect", folder, "--prompt-file", text, "--out", tmp_path, *arguments)
    assert done.exit_code == 2 and message in done.stderr


def test_texts_that_are_missing_or_empty(command, folder: Path, tmp_path: Path) -> None:
    done = command("inspect", folder, "--prompt-file", tmp_path / "none.txt", "--out", tmp_path)
    assert done.exit_code == 2 and "none.txt" in done.stderr
    (tmp_path / "empty.txt").write_text("")
    done = command("inspect", folder, "--prompt-file", tmp_path / "empty.txt", "--out", tmp_path)
    assert done.exit_code == 2 and "holds 0 token(s)" in done.stderr


def smollm2() -> str:
    from mediaspec.models.smollm2 import resolve

    try:
        return resolve("smollm2")
    except ValueError as error:
        pytest.skip(str(error))


def own_text(path: Path) -> Path:
    root = Path(__file__).resolve().parents[2]
    path.write_text("".join((root / name).read_text() for name in ("LICENSE", "CONTRIBUTING.md", "README.md")))
    return path


@pytest.mark.slow
def test_smollm2_at_4k_tokens(tmp_path: Path) -> None:
    """Under two minutes and below the attention of one layer: 9 heads x 4096 x 4096 x 4 bytes = 604 MB."""
    smollm2()
    text, out = own_text(tmp_path / "text.txt"), tmp_path / "out"
    line = [sys.executable, "-m", "mediaspec", "inspect", "smollm2", "--prompt-file", text, "--out", out, "--no-plot"]
    # a process of its own, whose peak is that of the measurement
    done = subprocess.run([*map(str, line), "--json"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout.strip().splitlines()[-1])
    assert data["tokens"] == 4096 and data["cost"]["seconds"] < 120
    assert data["cost"]["peak_mb"] < data["cost"]["full_matrix_of_one_layer_mb"] == 604.0
    assert len(data["summary"]["sinks"]) > 50 and len(data["summary"]["lazy"]) > 80


@pytest.mark.slow
def test_smollm2_agrees_with_eager_attention(tmp_path: Path) -> None:
    """All 270 heads on 300 tokens, against the attention matrices that transformers returns."""
    folder = smollm2()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(own_text(tmp_path / "text.txt").read_text(), return_tensors="pt").input_ids[0, :300]
    law = attentions(model, ids)[:, :, -64:]
    report = inspect_model(model, ids, settings=Settings(lazy=LazyWindow(32, 4, 60)))
    kept = torch.isin(torch.arange(300), torch.tensor([0, 1, 2, 3, *range(240, 300)]))
    at, key = torch.arange(236, 300), torch.arange(300)
    for one in report.heads:
        rows = law[one.layer, one.head]
        assert one.sink_score == pytest.approx(float(rows[:, 0].mean()), abs=1e-4)
        assert one.lazy_ratio == pytest.approx(float(rows[-32:, kept].sum(1).mean()), abs=1e-4)
        for distance, score in one.slash:
            diagonal = rows.diagonal(236 - distance)[max(4 - (236 - distance), 0) :]
            assert score == pytest.approx(float(diagonal.sum() / 64), abs=1e-4)
        assert one.pattern_mass == pytest.approx(float((rows * one.pattern.mask(at, key)).sum() / 64), abs=1e-4)
