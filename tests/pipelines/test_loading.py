"""Saving and loading keep every part; whatever cannot be loaded says why."""

from __future__ import annotations

import json
from pathlib import Path

import diffusers
import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_file, save_file

import mediaspec
from mediaspec.core.component import register_to_config
from mediaspec.drafters import JacobiDrafter
from mediaspec.models.eagle import EagleHead
from mediaspec.models.llamagen import LlamaGenGPT
from mediaspec.pipelines import AutoPipeline, ClassToImagePipeline, TextToImagePipeline
from mediaspec.pipelines.loading import DOWNLOAD_KEYWORDS, LOADING_KEYWORDS
from mediaspec.rules import AcceptanceRule, CoolSDRule, CoupledRule, ExactRule

from . import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "pipe"
    tiny.text_pipeline(rule=CoolSDRule(delta=1.3), guidance_scale=2.5, num_draft_tokens=3).save_pretrained(path)
    return path


def load(path, **keywords):
    pipe = AutoPipeline.from_pretrained(path, **keywords)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def tokens(pipe, **keywords) -> torch.Tensor:
    return pipe("a red apple", seeds=[3], output_type="tokens", **keywords).images


def test_a_round_trip_keeps_rule_drafter_defaults_and_pictures(folder) -> None:
    pipe = load(folder)
    assert type(pipe) is TextToImagePipeline
    assert isinstance(pipe.rule, CoolSDRule) and pipe.rule.config.delta == 1.3
    assert isinstance(pipe.drafter, EagleHead) and pipe.config.guidance_scale == 2.5
    original = tiny.text_pipeline(rule=CoolSDRule(delta=1.3), guidance_scale=2.5, num_draft_tokens=3)
    ours, theirs = (p("a red apple", seeds=[3]) for p in (pipe, original))
    assert ours.images[0].tobytes() == theirs.images[0].tobytes()
    assert {k: v for k, v in ours.stats["settings"].items()} == theirs.stats["settings"]


@pytest.mark.parametrize("drafter", [JacobiDrafter(window=5, init="above"), tiny.gpt(seed=4, layers=1), None])
def test_every_kind_of_drafter_comes_back(tmp_path, drafter) -> None:
    tiny.text_pipeline(rule=CoupledRule(), drafter=drafter).save_pretrained(tmp_path)
    pipe = load(tmp_path)
    assert type(pipe.drafter) is type(drafter)
    if isinstance(drafter, JacobiDrafter):
        assert pipe.drafter.config.window == 5 and pipe.drafter.config.init == "above"
    assert torch.equal(tokens(pipe), tokens(pipe, rule="plain"))
    again = tmp_path / "again"
    pipe.save_pretrained(again)
    assert type(load(again).drafter) is type(drafter)


def test_the_class_pipeline_comes_back(tmp_path) -> None:
    tiny.class_pipeline(drafter=JacobiDrafter()).save_pretrained(tmp_path)
    pipe = load(tmp_path)
    assert type(pipe) is ClassToImagePipeline and isinstance(pipe.rule, ExactRule)
    assert pipe(3, seeds=1).stats["tokens"] == 16


def test_parts_and_defaults_are_replaced_while_loading(folder) -> None:
    pipe = load(folder, rule=CoupledRule(), drafter=JacobiDrafter(window=4), guidance_scale=1.0)
    settings = pipe("a cat", seeds=0).stats["settings"]
    assert settings["rule"] == "coupled" and settings["drafter"] == "jacobi" and settings["guidance_scale"] == 1.0
    assert load(folder, drafter=None).drafter is None
    pipe = load(folder, rule="exact", drafter="jacobi")
    assert isinstance(pipe.rule, ExactRule) and isinstance(pipe.drafter, JacobiDrafter)
    other = tiny.gpt(seed=8)
    assert load(folder, transformer=other).transformer is other


def test_dtype_reaches_every_network(folder) -> None:
    pipe = load(folder, dtype=torch.bfloat16)
    for part in ("transformer", "vq", "text_encoder", "drafter"):
        assert getattr(pipe, part).dtype == torch.bfloat16, part
    stats = pipe("a cat", seeds=1).stats
    assert stats["tokens"] == 16 and stats["settings"]["dtype"] == "bfloat16"
    mixed = load(folder, dtype={"default": torch.float32, "drafter": torch.bfloat16})
    assert mixed.transformer.dtype == torch.float32 and mixed.drafter.dtype == torch.bfloat16


def test_half_precision_files_load_as_float32(tmp_path) -> None:
    tiny.text_pipeline().to(torch.float16).save_pretrained(tmp_path)
    pipe = load(tmp_path)
    for part in ("transformer", "vq", "text_encoder", "drafter"):
        assert getattr(pipe, part).dtype == torch.float32, part


@pytest.mark.parametrize(
    "keyword, nearest", [("guidence_scale", "guidance_scale"), ("draftr", "drafter"), ("torch_dtyp", "torch_dtype")]
)
def test_a_misspelt_keyword_is_refused(folder, keyword: str, nearest: str) -> None:
    for loader in (AutoPipeline, TextToImagePipeline):
        with pytest.raises(TypeError, match=f"{keyword!r}; did you mean {nearest!r}"):
            loader.from_pretrained(folder, **{keyword: 1})


def test_a_misspelt_keyword_of_saving_is_refused(folder, tmp_path) -> None:
    with pytest.raises(TypeError, match="'varient'; did you mean 'variant'"):
        load(folder).save_pretrained(tmp_path / "out", varient="fp16")


def test_a_variant_is_saved_and_loaded(folder, tmp_path) -> None:
    load(folder, dtype=torch.float16).save_pretrained(tmp_path, variant="fp16")
    assert list((tmp_path / "drafter").glob("*fp16*"))
    pipe = load(tmp_path, variant="fp16")
    assert torch.equal(tokens(pipe, rule="plain"), tokens(pipe, rule="coupled"))


def test_loading_keywords_are_ones_that_diffusers_takes() -> None:
    source = Path(diffusers.pipelines.pipeline_utils.__file__).read_text()
    for keyword in {*LOADING_KEYWORDS} | {*DOWNLOAD_KEYWORDS}:
        assert f'kwargs.pop("{keyword}"' in source, keyword


def test_names_and_folders_that_hold_nothing_are_refused(folder, tmp_path) -> None:
    with pytest.raises(ValueError, match="did you mean 'emoji-64'"):
        AutoPipeline.from_pretrained("emoji64")
    with pytest.raises(ValueError, match="model_index.json"):
        AutoPipeline.from_pretrained(tmp_path)
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline"}))
    with pytest.raises(ValueError, match="FluxPipeline, which mediaspec cannot run"):
        AutoPipeline.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds a TextToImagePipeline, not a ClassToImagePipeline"):
        ClassToImagePipeline.from_pretrained(folder)
    with pytest.raises(ValueError, match="neither an embedded model"):
        AutoPipeline.from_pretrained("./no/such/folder")
    with pytest.raises(TypeError, match="from_pretrained"):
        AutoPipeline()


@pytest.mark.parametrize("part", ["drafter", "transformer"])
def test_truncated_weights_are_a_clear_error(folder, tmp_path, part: str) -> None:
    load(folder).save_pretrained(tmp_path)
    weights = next((tmp_path / part).glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match=f"damaged weights: .*{part}/model.safetensors "):
        load(tmp_path)


@pytest.mark.parametrize("part", ["drafter", "transformer", "vq", "text_encoder"])
def test_weights_that_lack_tensors_or_fit_no_config_are_a_clear_error(folder, tmp_path, part: str) -> None:
    load(folder).save_pretrained(tmp_path)
    file = next((tmp_path / part).glob("*.safetensors"))
    whole = load_file(file)
    name = sorted(whole)[-1]
    save_file({key: value for key, value in whole.items() if key != name}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"damaged weights: .*{part} lacks [12] tensors of .*{name.split('.')[-1]}"):
        load(tmp_path)
    save_file({**whole, name: torch.zeros(3, 3)}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="damaged weights: .* other shapes"):
        load(tmp_path)
    assert load(tmp_path, **{part: getattr(load(folder), part)}) is not None  # a replaced part is not looked at


@pytest.mark.parametrize("name", ["model_index.json", "tokenizer/tokenizer.json"])
def test_a_damaged_json_file_is_named(folder, tmp_path, name: str) -> None:
    load(folder).save_pretrained(tmp_path)
    file = tmp_path / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ValueError, match=f"damaged file: .*{name}"):
        load(tmp_path)


def test_pictures_of_a_broken_vq_are_an_error(folder) -> None:
    pipe = load(folder)
    with torch.no_grad():
        pipe.vq.quantize.embedding.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="vq decoded NaN"):
        pipe("a cat", seeds=1)


def test_a_drafter_of_another_model_is_refused_while_loading(folder) -> None:
    with pytest.raises(ValueError, match="vocab"):
        load(folder, drafter=tiny.gpt(vocab=12))


def test_a_foreign_rule_must_be_imported_before_it_is_loaded(folder, tmp_path) -> None:
    load(folder).save_pretrained(tmp_path)
    index = json.loads((tmp_path / "model_index.json").read_text())
    index["rule"] = ["no_such_library.rules", "Rule"]
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="import no_such_library.rules"):
        load(tmp_path)


class HalfRule(AcceptanceRule):
    """Accepts half of what it could: a third party's rule in one class."""

    name = "half_of_tests"
    lossless = True

    @register_to_config
    def __init__(self, share: float = 0.5) -> None: ...

    def linear(self, length, device=None):
        return torch.full((length,), self.config.share, device=device), torch.zeros(length, device=device)


def test_a_third_partys_rule_is_saved_and_loaded(folder, tmp_path) -> None:
    pipe = load(folder, rule=HalfRule(share=0.25))
    assert pipe("a cat", seeds=1).stats["settings"]["rule"] == "half_of_tests"
    pipe.save_pretrained(tmp_path)
    back = load(tmp_path)
    assert type(back.rule) is HalfRule and back.rule.config.share == 0.25


class LooseDrafter:
    needs = frozenset()

    def propose(self, *arguments): ...

    def observe(self, *arguments): ...


def test_parts_that_cannot_be_saved_are_refused_instead_of_dropped(folder, tmp_path) -> None:
    pipe = load(folder)
    pipe.register_modules(drafter=LooseDrafter())
    with pytest.raises(ValueError, match="drafter=LooseDrafter cannot be saved"):
        pipe.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_lazy_names_of_the_package_lead_here() -> None:
    assert mediaspec.AutoPipeline is AutoPipeline and mediaspec.TextToImagePipeline is TextToImagePipeline


def test_diffusers_alone_cannot_load_it_which_is_why_auto_pipeline_exists(folder) -> None:
    with pytest.raises(Exception, match="TextToImagePipeline"):
        DiffusionPipeline.from_pretrained(folder)


def test_saved_module_paths_are_importable_names(folder) -> None:
    index = json.loads((folder / "model_index.json").read_text())
    assert index["rule"] == ["mediaspec.rules.cool_sd", "CoolSDRule"]
    assert index["drafter"] == ["mediaspec.models.eagle", "EagleHead"]
    assert index["transformer"] == ["mediaspec.models.llamagen.gpt", "LlamaGenGPT"]
    assert index["vq"] == ["mediaspec.models.llamagen.vq", "LlamaGenVQ"]
    assert isinstance(load(folder).transformer, LlamaGenGPT)


@pytest.mark.filterwarnings("ignore")
def test_model_offload_leaves_results_alone_and_the_drafter_resident(folder) -> None:
    pipe = load(folder)
    before = pipe("a red apple", seeds=[3])
    pipe.enable_model_cpu_offload(device="cpu")  # the hooks are the same, only the device to move to differs
    assert "drafter" not in pipe.model_cpu_offload_seq
    for _ in range(2):
        after = pipe("a red apple", seeds=[3])
        assert after.images[0].tobytes() == before.images[0].tobytes()
    assert hasattr(pipe.transformer, "_hf_hook")


def test_layer_wise_offload_is_refused(folder) -> None:
    pipe = load(folder)
    for offload in (pipe.enable_sequential_cpu_offload, pipe.enable_group_offload):
        with pytest.raises(ValueError, match="enable_model_cpu_offload"):
            offload()


def drafter_of(pipe) -> str:
    return pipe("a cat", seeds=1).stats["settings"]["drafter"]


def test_the_default_drafter_is_saved_and_gives_way_to_any_other_choice(tmp_path) -> None:
    pipe = tiny.text_pipeline(rule=ExactRule(), default_drafter="jacobi")
    assert drafter_of(pipe) == "jacobi"
    assert pipe("a cat", seeds=1, drafter="eagle").stats["settings"]["drafter"] == "eagle"
    assert pipe("a cat", seeds=1, tree=[2, 1]).stats["settings"]["drafter"] == "eagle"  # windows are chains
    pipe.save_pretrained(tmp_path)
    assert drafter_of(load(tmp_path)) == "jacobi"
    assert drafter_of(load(tmp_path, drafter=tiny.head())) == "eagle"
    back = load(tmp_path)
    back.register_modules(drafter=tiny.head())
    assert drafter_of(back) == "eagle"
