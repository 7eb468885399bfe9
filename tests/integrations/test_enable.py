"""One line on, one line off: what an enabled policy changes, reports, and gives back."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import mediaspec
from mediaspec.attention.register import policy_of
from mediaspec.drafters import LazyDrafter
from mediaspec.pipelines.text_generation import TextGenerationPipeline
from tests.attention.models import make_model, tokens

LAYERS, NEW = 6, 12
SMALL: dict[str, Any] = dict(w_sink=2, w_recent=10, w_last=8)
GREEDY: dict[str, Any] = dict(max_new_tokens=NEW, do_sample=False, pad_token_id=0)


@pytest.fixture
def model() -> PreTrainedModel:
    model = make_model(num_hidden_layers=LAYERS)
    model.generation_config.eos_token_id = None
    return model


def inputs() -> dict[str, Tensor]:
    """Two prompts of 60 and 45 tokens, padded on the left."""
    mask = torch.ones(2, 60, dtype=torch.int64)
    mask[1, :15] = 0
    return {"input_ids": torch.stack([tokens(60), tokens(60, seed=2)]) * mask, "attention_mask": mask}


class Listener:
    def __init__(self) -> None:
        self.heard: list[Tensor] = []

    def put(self, value: Tensor) -> None:
        self.heard.append(value)

    def end(self) -> None:
        self.heard.append(torch.tensor([-1]))


def test_generate_changes_and_is_given_back(model: PreTrainedModel) -> None:
    ids = inputs()
    before = model.generate(**ids, **GREEDY)
    logits = model(**ids).logits
    handle = mediaspec.enable(model, attention="light_transfer", **SMALL)
    assert handle.summary()["lazy_layers"] is None and handle.summary()["runs"] == 0
    lossy = model.generate(**ids, **GREEDY)
    assert torch.equal(lossy[:, :61], before[:, :61]), "the first token comes from full attention"
    assert not torch.equal(lossy, before)
    through = model.generate(
        **ids, **GREEDY, custom_generate=mediaspec.speculative, drafter="ngram", return_dict_in_generate=True
    )
    assert torch.equal(through.sequences, lossy), "drafts are verified by the same lossy model"
    assert through.stats["guarantee"] == "lossy"
    assert torch.equal(model(**ids).logits, logits), "the model itself is not touched"
    handle.remove()
    handle.remove()
    assert "generate" not in model.__dict__ and policy_of(model) is None and not handle.summary()["enabled"]
    assert torch.equal(model.generate(**ids, **GREEDY), before)
    assert torch.equal(model.generate(**ids, **GREEDY, custom_generate=mediaspec.speculative), before)


def test_the_summary_says_what_was_left_out(model: PreTrainedModel) -> None:
    with mediaspec.enable(model, attention="light_transfer", full_layers=4, **SMALL) as handle:
        model.generate(**inputs(), **GREEDY)
        found = handle.summary()
    assert found["attention"] == "light_transfer" and found["guarantee"] == "lossy" and found["runs"] == 1
    assert len(found["lazy_layers"]) == 2 and sorted(found["ratios"]) == list(range(LAYERS))
    worst = max(found["errors"][layer] for layer in found["lazy_layers"])
    assert all(found["errors"][layer] >= worst for layer in range(LAYERS) if layer not in found["lazy_layers"])
    assert found["kv_share"] == found["kv_bytes"] / found["full_kv_bytes"] < min(found["prefill_peak_share"], 1)
    assert found["prompt_lengths"] == [60, 45] and found["settings"]["w_recent"] == 10


def test_streams_and_assistants_of_plain_generate(model: PreTrainedModel) -> None:
    listener = Listener()
    with mediaspec.enable(model, attention="light_transfer", **SMALL):
        plain = model.generate(**inputs(), **GREEDY)
        streamed = model.generate(**inputs(), **GREEDY, streamer=listener)
        helped = model.generate(**inputs(), **GREEDY, assistant_model=make_model(num_hidden_layers=1))
    assert torch.equal(streamed, plain) and torch.equal(helped, plain)
    assert torch.equal(torch.stack(listener.heard[1:-1], 1), plain[:, 60:])


def test_settings_that_leave_nothing_out_change_no_token(model: PreTrainedModel) -> None:
    before = model.generate(**inputs(), **GREEDY)
    for settings in (dict(full_layers=LAYERS), dict(w_recent=500)):
        with mediaspec.enable(model, attention="light_transfer", **settings) as handle:
            assert torch.equal(model.generate(**inputs(), **GREEDY), before)
            assert handle.summary()["kv_share"] == 1 and handle.summary()["lazy_layers"] == []


def test_other_models_are_not_concerned(model: PreTrainedModel) -> None:
    """Neither a copy nor one of the same class, and a forgotten handle keeps no model alive."""
    other = make_model(num_hidden_layers=LAYERS)
    with mediaspec.enable(model, attention="light_transfer", **SMALL):
        twin = copy.deepcopy(model)
        assert policy_of(twin) is None and policy_of(other) is None and "generate" not in other.__dict__
        assert twin.generate.model is twin  # type: ignore[attr-defined]
    before = model.generate(**inputs(), **GREEDY)
    assert torch.equal(twin.generate(**inputs(), **GREEDY), before)
    reference = policy_count()
    mediaspec.enable(other, attention="light_transfer")
    assert policy_count() == reference + 1
    del other
    gc.collect()
    assert policy_count() == reference


def policy_count() -> int:
    from mediaspec.attention import register

    return len(register._attached)


def test_the_pipeline_and_the_lazy_drafter(model: PreTrainedModel) -> None:
    """A pipeline over the model is lossy while enabled; a lossless drafter of the same idea refuses to run on it."""

    class Words:
        eos_token_id = None

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [int(word) for word in text.split()]}

        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            return " ".join(map(str, ids))

    pipe = TextGenerationPipeline(model, Words(), drafter="none")  # type: ignore[arg-type]
    text = " ".join(map(str, tokens(60).tolist()))
    settings: dict[str, Any] = dict(max_new_tokens=NEW, temperature=0.0, seeds=0)
    plain = pipe(text, **settings).tokens
    lazy = LazyDrafter(2, **SMALL)
    assert pipe(text, drafter=lazy, **settings).tokens == plain
    with mediaspec.enable(model, attention="light_transfer", **SMALL) as handle:
        assert pipe(text, **settings).tokens != plain and handle.summary()["runs"] == 1
        with pytest.raises(ValueError, match=r"handle\.remove\(\)"):
            pipe(text, drafter=lazy, **settings)
    assert pipe(text, **settings).tokens == plain


def test_wrong_requests(model: PreTrainedModel) -> None:
    for attention, settings, word in (
        ("lighttransfer", {}, "light_transfer"),
        ("light_transfer", {"w_recents": 3}, "did you mean 'w_recent'"),
        ("light_transfer", {"full_layers": 99}, "full_layers=99"),
        ("light_transfer", {"w_recent": 0}, "w_recent=0"),
    ):
        with pytest.raises(ValueError, match=word):
            mediaspec.enable(model, attention=attention, **settings)
        assert policy_of(model) is None and "generate" not in model.__dict__
    with mediaspec.enable(model, attention="light_transfer"), pytest.raises(ValueError, match="already enabled"):
        mediaspec.enable(model, attention="light_transfer")
    with pytest.raises(TypeError, match=r"pipe\.model"):
        mediaspec.enable("a model", attention="light_transfer")  # type: ignore[arg-type]
