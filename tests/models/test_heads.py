"""Finding the trained head that belongs to a model, and loading heads from folders."""

from __future__ import annotations

import gc
import json
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from mediaspec.integrations.generate import speculative
from mediaspec.models import heads
from mediaspec.models.eagle3 import Eagle3Head
from mediaspec.models.longspec import LongSpecHead
from mediaspec.targets.causal_lm import CausalLMTarget
from tests.targets.test_causal_lm import make_model


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model whose two heads are shipped, in fp16, among those of another one."""
    model, other = make_model(), make_model(seed=1)
    monkeypatch.setattr(heads, "HEADS", tmp_path)
    for name, owner in (("first", other), ("second", model)):
        folder = tmp_path / name
        Eagle3Head.from_target(owner, torch.arange(3, 30)).half().save_pretrained(folder / "eagle3")
        description = heads.describe_target(CausalLMTarget(owner, 1))
        (folder / "target.json").write_text(json.dumps(description))
    LongSpecHead.from_target(model, window=8).half().save_pretrained(tmp_path / "second" / "longspec")
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_model_finds_its_heads_in_any_dtype(shipped: Any, dtype: torch.dtype) -> None:
    target = CausalLMTarget(shipped.to(dtype), 4)
    assert heads.shipped_names(target) == ["eagle3", "longspec"]
    head = heads.shipped_head("longspec", target)
    assert type(head) is LongSpecHead and head.dtype == dtype and not head.training
    assert heads.head_kind(head) == "longspec" and heads.head_kind(shipped) is None and heads.head_kind(3) is None
    noisy = make_model().to(dtype)
    with torch.no_grad():
        noisy.get_input_embeddings().weight *= 1.005  # what a quantised copy or a little fine-tuning changes
    assert heads.shipped_names(CausalLMTarget(noisy, 4)) == ["eagle3", "longspec"]


def test_other_models_find_none(shipped: Any) -> None:
    for wrong in (make_model(seed=2), make_model(vocab_size=44), make_model(num_hidden_layers=3)):
        target = CausalLMTarget(wrong, 4)
        assert heads.shipped_names(target) == []
        with pytest.raises(ValueError, match="eagle3 for first, eagle3 for second, longspec for second"):
            heads.shipped_head("longspec", target)
    with pytest.raises(ValueError, match="no trained head 'longspec'"):
        heads.shipped_head("longspec", CausalLMTarget(make_model(seed=1), 4))
    assert "embedding" in heads.describe_target(CausalLMTarget(shipped, 1))


def test_folders(shipped: Any, tmp_path: Path) -> None:
    target = CausalLMTarget(shipped, 4)
    found = heads.load_head(tmp_path / "second" / "eagle3", target)
    assert type(found) is Eagle3Head and found.dtype == torch.float32
    assert heads.load_head(tmp_path, target) is None
    shipped.save_pretrained(tmp_path / "model")
    assert heads.load_head(tmp_path / "model", target) is None
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "config.json").write_text(json.dumps({"model_type": "mediaspec_eagle9_head"}))
    with pytest.raises(ValueError, match="'eagle9', which this version cannot run; did you mean 'eagle"):
        heads.load_head(tmp_path / "odd", target)


def test_by_default_a_shipped_head_drafts_beside_lookup(shipped: Any) -> None:
    from mediaspec.drafters import Eagle3Drafter
    from mediaspec.pipelines.speculation import Speculation, prepare

    target = CausalLMTarget(shipped, 4)
    assert list(prepare(Speculation(), target).drafters) == ["eagle3", "ngram"]
    assert list(prepare(Speculation(tokens=3), target).drafters) == ["eagle3"]
    named = prepare(Speculation("EAGLE3"), target)
    assert type(named.drafters["eagle3"]) is Eagle3Drafter
    again = prepare(Speculation("eagle3"), CausalLMTarget(shipped, 9))
    first, second = (one.drafters["eagle3"] for one in (named, again))
    assert first is not second and first.head is second.head  # type: ignore[attr-defined]
    assert first._prepared is second._prepared  # type: ignore[attr-defined]
    assert list(prepare(Speculation(), CausalLMTarget(make_model(seed=2), 4)).drafters) == ["ngram"]


def test_a_model_is_freed_after_its_head_has_drafted(shipped: Any) -> None:
    """What calls keep per model (prepared heads, policies) must not keep the model."""
    model, reference = make_model(), None
    reference = weakref.ref(model)
    for kind in ("eagle3", "longspec"):
        ids = torch.tensor([[5, 6, 7, 8]])
        model.generate(input_ids=ids, max_new_tokens=6, do_sample=False, custom_generate=speculative, drafter=kind)
    del model
    gc.collect()
    assert reference() is None


def test_what_is_shipped_is_packaged() -> None:
    """Every file beside the code reaches an installed package."""
    root = Path(heads.__file__).resolve().parents[1]
    text = (root.parent / "pyproject.toml").read_text()
    patterns = re.findall(r'"([^"]+)"', text.split("package-data]", 1)[1].split("]", 1)[0])
    found = {path for pattern in patterns for path in root.glob(pattern) if path.is_file()}
    there = {path for path in root.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert not there - found, f"no package-data pattern for {sorted(map(str, there - found))}"
