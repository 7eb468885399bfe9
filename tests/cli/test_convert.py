"""`mediaspec convert llamagen`: files with published names become a folder that draws, or one clear line says why not.

The files are real checkpoints of real classes at toy size, one token per 2 x 2 pixels; the two tables of published
sizes get toy entries so that the command's own path runs.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration, T5TokenizerFast

import mediaspec
from mediaspec.models.llamagen import LlamaGenConfig, LlamaGenGPT, LlamaGenVQ, LlamaGenVQConfig, gpt, vq

CODES, WIDTH, PIXELS = 24, 16, 8
SIZES = {"n_layer": 2, "n_head": 2, "dim": 32, "multiple_of": 16}
VQ_SIZES = {"ch": 8, "ch_mult": (1, 2), "num_res_blocks": 1, "z_channels": 8, "norm_groups": 8}
CAPTIONS = ["A red Apple on a blue background", "a cat beside a dog", "An OLD car, flat style", "photo of a Kangaroo"]


@pytest.fixture(autouse=True)
def toy_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpt.GPT_PRESETS, "GPT-toy", SIZES)
    monkeypatch.setitem(vq.VQ_PRESETS, "VQ-16", VQ_SIZES)


def transformer(condition: str, vocab: int = CODES) -> LlamaGenGPT:
    torch.manual_seed(0)
    model = LlamaGenGPT(
        LlamaGenConfig(
            **SIZES, vocab_size=vocab, block_size=16, condition=condition, num_classes=7, caption_dim=WIDTH,
            cls_token_num=120 if condition == "text" else 1,
        )
    ).eval()  # fmt: skip
    # zero by default; this small, laws differ a little from position to position and shared noise is often right
    torch.nn.init.normal_(model.output.weight, std=0.05)
    return model


def image_tokenizer(codes: int = CODES) -> LlamaGenVQ:
    torch.manual_seed(1)
    return LlamaGenVQ(LlamaGenVQConfig(**VQ_SIZES, codebook_size=codes)).eval()


def t5_tokenizer() -> T5TokenizerFast:
    """Unigram pieces in the order of the published T5 files: pad 0, end 1, unknown 2, pieces, 100 sentinels."""
    words = sorted({f"\u2581{word}" for caption in CAPTIONS for word in caption.split()})
    letters = sorted({letter for word in words for letter in word})
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    pieces += [(word, -4.0) for word in words if len(word) > 1] + [(letter, -8.0) for letter in letters]
    pieces += [(f"<extra_id_{i}>", 0.0) for i in reversed(range(100))]
    return T5TokenizerFast(vocab=pieces, extra_ids=100)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text and a class transformer, a tokenizer and a T5, as they are published."""
    folder = tmp_path_factory.mktemp("published")
    text = {**transformer("text").state_dict(), "freqs_cis": torch.zeros(136, 8, 2)}
    torch.save({"model": text, "steps": 3, "args": argparse.Namespace(lr=1e-4)}, folder / "t2i_XL_stage1_256.pt")
    torch.save(transformer("class").state_dict(), folder / "c2i_B_256.pt")
    save_file(transformer("class").state_dict(), folder / "c2i_B_256.safetensors")
    codes = {**image_tokenizer().state_dict(), "quantize.codebook_used": torch.zeros(65536)}
    torch.save({"model": codes}, folder / "vq_ds16.pt")
    torch.manual_seed(2)
    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=256, d_model=WIDTH, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    )
    t5.save_pretrained(folder / "t5")
    t5_tokenizer().save_pretrained(folder / "t5")
    return folder


def arguments(files: Path, out: Path, kind: str = "class", **changes: object) -> list[object]:
    given: dict[str, object] = {
        "gpt": files / ("c2i_B_256.pt" if kind == "class" else "t2i_XL_stage1_256.pt"),
        "vq": files / "vq_ds16.pt",
        "image-size": PIXELS,
        "out": out,
    }
    if kind == "text":
        given["text-encoder"] = files / "t5"
    given |= {name.replace("_", "-"): value for name, value in changes.items()}
    options = [part for name, value in given.items() if value is not None for part in (f"--{name}", value)]
    return ["convert", "llamagen", *options]


def refused(command, arguments: list[object], out: Path) -> str:
    """The one line of a run that must fail and leave nothing."""
    before = sorted(out.parent.rglob("*"))
    result = command(*arguments)
    assert result.exit_code == 2, result.output
    assert sorted(out.parent.rglob("*")) == before, "something was left behind"
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "Traceback" not in result.output
    return lines[0]


def test_a_class_model_becomes_a_folder_that_draws(command, files: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "c2i"
    result = command(*arguments(files, out, preset="GPT-toy", condition="class"))
    assert result.exit_code == 0, result.output
    assert str(out) in result.stdout and [p.name for p in out.parent.iterdir()] == ["c2i"]
    pipe = mediaspec.AutoPipeline.from_pretrained(out)
    assert type(pipe).__name__ == "ClassToImagePipeline" and not hasattr(pipe, "text_encoder")
    assert (pipe.config.guidance_scale, pipe.config.top_k, pipe.config.top_p) == (4.0, 2000, 1.0)
    assert pipe.transformer.config.num_classes == 7 and pipe.transformer.config.block_size == 16
    for name, value in transformer("class").state_dict().items():
        assert torch.equal(pipe.transformer.state_dict()[name], value), name
    drawn = pipe([2, 5], seeds=7, output_type="tokens")
    assert drawn.stats["settings"]["rule"] == "coupled" and drawn.stats["settings"]["drafter"] == "jacobi"
    assert drawn.stats["guarantee"] == "exact-tokens" and drawn.stats["tokens_per_call"] > 1
    assert torch.equal(drawn.images, pipe([2, 5], seeds=7, output_type="tokens", rule="plain").images)


def test_a_text_model_takes_encoder_and_tokenizer_along(command, files: Path, tmp_path: Path) -> None:
    out = tmp_path / "t2i"
    result = command(*arguments(files, out, "text", rule="exact", num_draft_tokens=3))
    assert result.exit_code == 0, result.output
    assert "GPT-toy, text" in result.stdout and "sounds like a 256 pixel model" in result.stderr
    pipe = mediaspec.AutoPipeline.from_pretrained(out)
    assert (pipe.config.guidance_scale, pipe.config.top_k, pipe.config.num_draft_tokens) == (7.5, 1000, 3)
    assert type(pipe.tokenizer) is T5TokenizerFast and not hasattr(pipe.text_encoder, "decoder")
    drawn = pipe("a cat beside a dog", seeds=3)
    assert drawn.images[0].size == (PIXELS, PIXELS) and drawn.stats["settings"]["rule"] == "exact"
    assert (
        command("generate", "image", "a cat", "--model", out, "--out", tmp_path / "drawn", "--seed", 1).exit_code == 0
    )


def test_captions_reach_t5_as_written(command, files: Path, tmp_path: Path) -> None:
    assert command(*arguments(files, tmp_path / "t2i", "text")).exit_code == 0
    pipe = mediaspec.AutoPipeline.from_pretrained(tmp_path / "t2i")
    prompt = "An OLD Kangaroo"
    ids = t5_tokenizer()(prompt)["input_ids"]
    assert pipe.tokenizer(prompt)["input_ids"] == ids and ids[-1] == 1 and ids.count(1) == 1
    assert ids != pipe.tokenizer(prompt.lower())["input_ids"], "the case was lost"
    # left padding: the last positions hold what T5 says of the caption and its end, all others are masked zeros
    condition = pipe.encode_prompt([prompt], [None], True)
    expected = pipe.text_encoder(input_ids=torch.tensor([ids])).last_hidden_state[0]
    assert condition.features.shape[1:] == (120, WIDTH)
    assert torch.equal(condition.features[0, -len(ids) :], expected)
    assert not condition.features[0, : -len(ids)].any()
    assert condition.mask[0].tolist() == [False] * (120 - len(ids)) + [True] * len(ids)
    # 120 tokens with the end fit, one more does not
    word = pipe.tokenizer("a")["input_ids"][:-1]
    assert len(word) == 1
    pipe(" ".join(["a"] * 119), seeds=0, output_type="tokens")
    with pytest.raises(ValueError, match="has 121 tokens, this model reads 120"):
        pipe(" ".join(["a"] * 120), seeds=0)
    with pytest.warns(UserWarning, match="never saw"):
        pipe("a cat \u00df", seeds=0, output_type="tokens")


def test_a_sentencepiece_file_alone_is_a_tokenizer(command, files: Path, tmp_path: Path) -> None:
    """The older T5 folders hold `spiece.model`, with SentencePiece's own normaliser in it, and no tokenizer.json."""
    spm = pytest.importorskip("sentencepiece")
    pytest.importorskip("google.protobuf")
    t5 = tmp_path / "t5"
    t5.mkdir()
    for name in ("config.json", "model.safetensors"):
        (t5 / name).write_bytes((files / "t5" / name).read_bytes())
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(CAPTIONS * 8), model_prefix=str(t5 / "spiece"), vocab_size=60, num_threads=1,
        pad_id=0, eos_id=1, unk_id=2, bos_id=-1, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    result = command(*arguments(files, tmp_path / "t2i", "text", text_encoder=t5))
    assert result.exit_code == 0, result.output
    loaded = AutoTokenizer.from_pretrained(tmp_path / "t2i" / "tokenizer")
    for prompt in ("An OLD Kangaroo", "a  cat", "\uff21 cat"):
        expected = spm.SentencePieceProcessor(str(t5 / "spiece.model")).encode(prompt)
        assert loaded(prompt)["input_ids"] == [*expected, 1], prompt


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_halves_the_folder(command, files: Path, tmp_path: Path, dtype: str) -> None:
    out = tmp_path / "half"
    result = command(*arguments(files, out, gpt=files / "c2i_B_256.safetensors", dtype=dtype, drafter="none"))
    assert result.exit_code == 0 and dtype in result.stdout, result.output
    with safe_open(out / "transformer" / "model.safetensors", framework="pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {getattr(torch, dtype)}  # noqa: SIM118
    with safe_open(out / "vq" / "model.safetensors", framework="pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.float32}  # noqa: SIM118
    assert mediaspec.AutoPipeline.from_pretrained(out)(1, seeds=0).stats["settings"]["drafter"] == "none"


def test_the_name_of_the_file_tells_the_image_size(command, files: Path, tmp_path: Path) -> None:
    from mediaspec.pipelines.conversion import image_size_of

    assert image_size_of(Path("t2i_XL_stage2_512.pt"), None) == 512
    assert image_size_of(Path("c2i_3B_384.pt"), None) == 384
    nameless = tmp_path / "weights.pt"
    nameless.write_bytes((files / "c2i_B_256.pt").read_bytes())
    line = refused(command, arguments(files, tmp_path / "out", gpt=nameless, image_size=None), tmp_path / "out")
    assert "--image-size" in line and "256, 384, 512" in line
    assert command(*arguments(files, tmp_path / "out", image_size=None)).exit_code == 0
    assert mediaspec.AutoPipeline.from_pretrained(tmp_path / "out").transformer.config.block_size == 128**2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"preset": "GPT-B"}, ["does not fit", "which is GPT-toy"]),
        ({"preset": "GPT-Toy"}, ["did you mean 'GPT-toy'"]),
        ({"condition": "text"}, ["is a class model", "condition='class'"]),
        ({"text_encoder": "google/flan-t5-xl"}, ["is a class model", "leave the text encoder"]),
        ({"condition": "words"}, ["Allowed are class, text"]),
        ({"dtype": "fp16"}, ["did you mean 'float16'"]),
        ({"drafter": "eagle"}, ["Allowed are jacobi, none"]),
        ({"rule": "coupld"}, ["coupled"]),
        ({"rule": "cool_sd:delta=-3"}, ["delta"]),
        ({"rule": "plain"}, ["--drafter none"]),
        ({"rule": "exact@jacobi"}, ["--drafter"]),
        ({"num_draft_tokens": -1}, ["num_draft_tokens=-1"]),
        ({"image_size": 9}, ["no multiple", "256, 384, 512"]),
    ],
)
def test_wrong_choices_say_what_to_write(command, files: Path, tmp_path: Path, changes, words) -> None:
    line = refused(command, arguments(files, tmp_path / "out", **changes), tmp_path / "out")
    for word in words:
        assert word in line


def test_wrong_files_are_named(command, files: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    short = tmp_path / "c2i_B_256.pt"
    short.write_bytes((files / "c2i_B_256.pt").read_bytes()[:-5000])
    assert "truncated" in refused(command, arguments(files, out, gpt=short), out)
    short.with_suffix(".safetensors").write_bytes((files / "c2i_B_256.safetensors").read_bytes()[:-5000])
    assert "truncated" in refused(command, arguments(files, out, gpt=short.with_suffix(".safetensors")), out)
    assert "is no file" in refused(command, arguments(files, out, vq=tmp_path / "missing.pt"), out)
    swapped = arguments(files, out, gpt=files / "vq_ds16.pt", vq=files / "c2i_B_256.pt")
    assert "goes to --vq" in refused(command, swapped, out)
    assert "This is a GPT" in refused(command, arguments(files, out, vq=files / "c2i_B_256.pt"), out)
    assert "goes to --vq" in refused(command, arguments(files, out, gpt=files / "vq_ds16.pt"), out)
    torch.save(image_tokenizer(codes=32).state_dict(), tmp_path / "other.pt")
    line = refused(command, arguments(files, out, vq=tmp_path / "other.pt"), out)
    assert "24 image tokens" in line and "32 codes" in line


def test_a_wrong_text_encoder_is_explained(command, files: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    line = refused(command, arguments(files, out, "text", text_encoder="somebody/not-cached-t5"), out)
    assert "somebody/not-cached-t5" in line and "--text-encoder" in line
    assert "--text-encoder" in refused(command, arguments(files, out, "text", text_encoder=tmp_path / "no"), out)
    config = T5Config(vocab_size=256, d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "narrow")
    line = refused(command, arguments(files, out, "text", text_encoder=tmp_path / "narrow"), out)
    assert "width 8" in line and "width 16" in line
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((files / "t5" / name).read_bytes())
    assert "no usable tokenizer" in refused(command, arguments(files, out, "text", text_encoder=bare), out)
    t5_tokenizer().save_pretrained(bare)
    (bare / "model.safetensors").write_bytes((files / "t5" / "model.safetensors").read_bytes()[:-100])
    assert "cannot be loaded" in refused(command, arguments(files, out, "text", text_encoder=bare), out)


def test_an_occupied_folder_stays_as_it_is(command, files: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("precious")
    assert "exists already" in refused(command, arguments(files, out), out)
    assert (out / "mine.txt").read_text() == "precious"
    (out / "mine.txt").unlink()
    (tmp_path / ".out.partial").mkdir()
    assert ".out.partial" in refused(command, arguments(files, out), out)
    (tmp_path / ".out.partial").rmdir()
    assert command(*arguments(files, out)).exit_code == 0  # an empty folder may be there
    assert (out / "model_index.json").is_file() and not (tmp_path / ".out.partial").exists()


def test_when_the_system_refuses_to_write_nothing_is_left(command, files: Path, tmp_path: Path) -> None:
    """A limit on file sizes breaks the write where a full disk would: in the middle of a weight file."""
    out = tmp_path / "out"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        line = refused(command, arguments(files, out), out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "nothing is left" in line
    assert command(*arguments(files, out)).exit_code == 0


def test_a_full_disk_is_noticed_before_writing(tmp_path: Path) -> None:
    from mediaspec.pipelines.conversion import _appearing

    with pytest.raises(ValueError, match="GB left, the pipeline needs 1000000"), _appearing(tmp_path / "x", 10**18):
        raise AssertionError("must not begin")
    assert not list(tmp_path.iterdir())


def test_the_package_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mediaspec", "convert", "llamagen", "--help"],
        capture_output=True, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0 and "--text-encoder" in done.stdout, done.stderr
