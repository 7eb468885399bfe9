"""The text pipeline's call: settings, seeds, batches, outputs, callbacks, errors."""

from __future__ import annotations

import copy
import json
import pickle
import threading

import numpy as np
import PIL.Image
import pytest
import torch

from mediaspec.core.tree import TreeSpec
from mediaspec.drafters import JacobiDrafter
from mediaspec.pipelines import ImagePipelineOutput
from mediaspec.rules import CoolSDRule, CoupledRule, ExactRule, make_rule

from . import tiny

PROMPTS = ["a red apple", "a blue cat on a green background", "a dog"]


@pytest.fixture(scope="module")
def pipe():
    return tiny.text_pipeline()


def tokens(pipe, prompt, **keywords) -> torch.Tensor:
    return pipe(prompt, output_type="tokens", **keywords).images


def test_output_types_show_the_same_picture(pipe) -> None:
    made = {kind: pipe("a cat", seeds=3, output_type=kind).images for kind in ("pil", "np", "pt", "tokens")}
    assert isinstance(made["pil"][0], PIL.Image.Image) and made["pil"][0].size == (8, 8)
    assert made["np"].shape == (1, 8, 8, 3) and made["np"].dtype == np.float32
    assert made["pt"].shape == (1, 3, 8, 8) and made["pt"].min() >= 0 and made["pt"].max() <= 1
    assert made["tokens"].shape == (1, 16) and made["tokens"].dtype == torch.int64
    assert np.array_equal(made["np"], made["pt"].permute(0, 2, 3, 1).numpy())
    assert np.array_equal(np.asarray(made["pil"][0]), (made["np"][0] * 255).round().astype(np.uint8))


def test_the_tuple_has_images_first_and_stats_last(pipe) -> None:
    images, stats = pipe("a cat", seeds=0, return_dict=False)
    assert len(images) == 1 and stats["tokens"] == 16
    images, trace, stats = pipe("a cat", seeds=0, return_dict=False, return_trace=True)
    assert trace.kind.shape == trace.drift.shape == trace.round.shape == (1, 16) and stats["tokens"] == 16
    output = pipe("a cat", seeds=0)
    assert isinstance(output, ImagePipelineOutput) and output.trace is None and "trace" not in output


@pytest.mark.parametrize("rule", ["plain", "exact", "coupled", "cool_sd"])
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_a_mixed_batch_equals_single_runs(pipe, rule: str, guidance: float) -> None:
    prompts = [*PROMPTS, PROMPTS[0]]
    negatives = [None, "a car", None, None]
    seeds = [5, 6, 7, 8]
    keywords = {"rule": rule, "guidance_scale": guidance, "top_k": 12}
    batch = tokens(pipe, prompts, negative_prompt=negatives, seeds=seeds, **keywords)
    for row, (prompt, negative, seed) in enumerate(zip(prompts, negatives, seeds, strict=True)):
        assert torch.equal(batch[row], tokens(pipe, prompt, negative_prompt=negative, seeds=seed, **keywords)[0])


def test_pixels_and_per_image_numbers_do_not_depend_on_the_batch(pipe) -> None:
    together = pipe(PROMPTS, seeds=[5, 6, 7], rule="cool_sd", output_type="pt")
    for row, prompt in enumerate(PROMPTS):
        alone = pipe(prompt, seeds=5 + row, rule="cool_sd", output_type="pt")
        assert torch.equal(together.images[row], alone.images[0])
        many, one = together.stats, alone.stats
        assert many["calls_per_image"][row] == one["calls_per_image"][0] == one["target_calls"]
        assert many["drift"]["per_image"][row] == pytest.approx(one["drift"]["per_image"][0], abs=1e-5)


@pytest.mark.parametrize("drafter", ["eagle", "jacobi", tiny.gpt(seed=9, layers=1)])
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_the_coupled_rule_gives_the_tokens_of_plain_sampling(pipe, drafter, guidance: float) -> None:
    keywords = {"seeds": [1, 2, 3], "guidance_scale": guidance, "temperature": 0.9}
    plain = pipe(PROMPTS, rule="plain", output_type="tokens", **keywords)
    coupled = pipe(PROMPTS, rule="coupled", drafter=drafter, output_type="tokens", **keywords)
    assert torch.equal(plain.images, coupled.images)
    assert plain.stats["guarantee"] == coupled.stats["guarantee"] == "exact-tokens"
    assert plain.stats["tokens_per_call"] == 1.0 and plain.stats["target_calls"] == 16
    assert coupled.stats["target_calls"] <= 16


def test_images_per_prompt_share_a_prefill_and_nothing_else(pipe) -> None:
    made = tokens(pipe, PROMPTS[:2], num_images_per_prompt=2, seeds=[1, 2, 3, 4])
    for row, number in enumerate([0, 0, 1, 1]):
        assert torch.equal(made[row], tokens(pipe, PROMPTS[number], seeds=row + 1)[0])
    assert torch.equal(made, tokens(pipe, PROMPTS[:2], num_images_per_prompt=2, seeds=1))


def test_generators_decide_the_pictures(pipe) -> None:
    one = pipe(PROMPTS[:2], generator=torch.Generator().manual_seed(4), output_type="tokens")
    again = pipe(PROMPTS[:2], generator=torch.Generator().manual_seed(4), output_type="tokens")
    named = pipe(PROMPTS[:2], seeds=one.stats["seeds"], output_type="tokens")
    assert torch.equal(one.images, again.images) and torch.equal(one.images, named.images)
    fresh = pipe("a cat", output_type="tokens")
    assert torch.equal(fresh.images, pipe("a cat", seeds=fresh.stats["seeds"], output_type="tokens").images)


def test_a_negative_prompt_changes_guided_pictures_only(pipe) -> None:
    seeds = [1, 2, 3, 4]
    for guidance, changes in ((3.0, True), (1.0, False)):
        keywords = {"seeds": seeds, "guidance_scale": guidance, "rule": "plain"}
        without = tokens(pipe, ["a cat"] * 4, **keywords)
        assert torch.equal(without, tokens(pipe, ["a cat"] * 4, negative_prompt="a red car", **keywords)) != changes


def test_greedy_ignores_seeds(pipe) -> None:
    made = tokens(pipe, ["a cat"] * 3, seeds=[1, 2, 3], temperature=0.0)
    assert torch.equal(made[0], made[1]) and torch.equal(made[0], made[2])


def test_stats_are_complete_and_json_ready(pipe) -> None:
    rule = CoolSDRule(delta=1.2)
    stats = pipe(PROMPTS, seeds=0, rule=rule, num_draft_tokens=3).stats
    assert json.loads(json.dumps(stats)) == stats
    assert stats["tokens"] == 48 and stats["tokens_per_image"] == [16, 16, 16]
    assert stats["tokens_per_call"] == pytest.approx(48 / sum(stats["calls_per_image"]))
    assert stats["target_calls"] == stats["rounds"] + 1 == max(stats["calls_per_image"])
    assert len(stats["accepted_per_position"]) == len(stats["tested_per_position"]) == 3
    assert stats["drift"]["max"] == max(stats["drift"]["per_image"]) > 0
    assert stats["drift"]["mean"] == pytest.approx(sum(stats["drift"]["per_image"]) / 3)
    assert stats["guarantee"] == rule.guarantee and stats["seeds"] == [0, 1, 2] and not stats["interrupted"]
    settings = stats["settings"]
    assert settings["rule"] == "cool_sd" and settings["rule_settings"]["delta"] == 1.2
    assert settings["drafter"] == "eagle" and settings["num_draft_tokens"] == 3 and settings["guidance_scale"] == 3.0
    assert settings["dtype"] == "float32" and settings["device"] == "cpu"
    phases = stats["seconds"]
    assert {"total", "encode", "prefill", "draft", "target", "verify", "commit", "decode"} <= set(phases)
    assert sum(v for k, v in phases.items() if k != "total") <= phases["total"]
    assert set(stats["versions"]) == {"mediaspec", "torch", "diffusers", "transformers"}


def test_a_lossless_rule_reports_no_drift(pipe) -> None:
    stats = pipe(PROMPTS, seeds=0, rule="exact").stats
    assert stats["drift"]["per_image"] == [0.0, 0.0, 0.0] and stats["guarantee"] == "exact-law"


def test_speculation_can_be_switched_off_in_each_way(pipe) -> None:
    plain = pipe("a cat", seeds=1, rule="plain", output_type="tokens")
    for keywords in ({"num_draft_tokens": 0}, {"drafter": "none"}):
        other = pipe("a cat", seeds=1, output_type="tokens", **keywords)
        assert torch.equal(plain.images, other.images) and other.stats["settings"]["rule"] == "plain"


def test_a_tree_is_drafted(pipe) -> None:
    for tree in ([2, 1], TreeSpec.from_widths([2, 1])):
        coupled = pipe(PROMPTS, seeds=1, rule="coupled", tree=tree, output_type="tokens")
        assert torch.equal(coupled.images, tokens(pipe, PROMPTS, seeds=1, rule="plain"))
        assert coupled.stats["settings"]["tree"] == [0, 0, 1, 2] and coupled.stats["settings"]["num_draft_tokens"] == 2


def test_the_lantern_rules_get_the_codebook(pipe) -> None:
    stats = pipe("a cat", seeds=1, rule="lantern++").stats
    assert stats["settings"]["rule_settings"]["variant"] == "lantern++" and stats["tokens"] == 16


def test_callbacks_see_every_round(pipe) -> None:
    seen = []

    def watch(inner, step, committed, tensors):
        assert inner is pipe
        known = (tensors["tokens"] >= 0).sum(1)
        assert committed == known.min() and torch.equal(tensors["progress"], known / 16)
        seen.append((step, known.tolist(), tensors["num_accepted"].tolist()))
        return tensors

    output = pipe(
        PROMPTS, seeds=1, rule="coupled", output_type="tokens", callback_on_step_end=watch,
        callback_on_step_end_tensor_inputs=["tokens", "num_accepted", "progress"],
    )
    assert [step for step, *_ in seen] == list(range(output.stats["rounds"] + 1))
    assert seen[0][1:] == ([1, 1, 1], [0, 0, 0]) and seen[-1][1] == [16, 16, 16]
    accepted = sum(sum(more) for _, _, more in seen)
    assert accepted == sum(output.stats["accepted_per_position"])


def test_a_callback_can_interrupt(pipe) -> None:
    def stop(inner, step, committed, tensors):
        inner._interrupt = step == 3
        return {}

    whole = tokens(pipe, PROMPTS, seeds=1)
    output = pipe(PROMPTS, seeds=1, callback_on_step_end=stop, output_type="tokens")
    assert output.stats["interrupted"] and output.stats["rounds"] == 3
    assert output.stats["tokens"] == int((output.images >= 0).sum()) < 48
    known = output.images >= 0
    assert torch.equal(output.images[known], whole[known])
    picture = pipe("a cat", seeds=1, callback_on_step_end=stop, output_type="np")
    assert np.all(picture.images[0, -2:, -2:] == 0.5)
    assert not pipe("a cat", seeds=1).stats["interrupted"]


def test_edited_tokens_are_refused(pipe) -> None:
    def edit(inner, step, committed, tensors):
        tensors["tokens"][:, 0] = 3 - tensors["tokens"][:, 0].clamp(max=3)
        return tensors

    with pytest.raises(ValueError, match="cannot be edited"):
        pipe(PROMPTS, seeds=1, callback_on_step_end=edit)


def test_an_unknown_callback_tensor_is_refused(pipe) -> None:
    with pytest.raises(ValueError, match="latents.*tokens, num_accepted, progress"):
        pipe("a cat", callback_on_step_end=lambda *a: {}, callback_on_step_end_tensor_inputs=["latents"])


def test_the_progress_bar_counts_tokens(pipe, capsys) -> None:
    pipe.set_progress_bar_config(disable=False)
    try:
        pipe(PROMPTS, seeds=1)
    finally:
        pipe.set_progress_bar_config(disable=True)
    shown = capsys.readouterr().err
    assert "48/48" in shown and "accepted/round" in shown


@pytest.mark.parametrize(
    "keywords, kind, message",
    [
        ({"guidence_scale": 2.0}, TypeError, "did you mean 'guidance_scale'"),
        ({"num_inference_steps": 2}, TypeError, "unexpected keyword argument 'num_inference_steps'"),
        ({"rule": "cool-sd"}, ValueError, "did you mean 'cool_sd'"),
        ({"rule": 3}, TypeError, "AcceptanceRule"),
        ({"drafter": "eagel"}, ValueError, "did you mean 'eagle'"),
        ({"drafter": "model"}, ValueError, "needs a LlamaGenGPT"),
        ({"drafter": 3}, TypeError, "propose"),
        ({"output_type": "latent"}, ValueError, "output_type='latent'"),
        ({"num_images_per_prompt": 0}, ValueError, "num_images_per_prompt"),
        ({"num_draft_tokens": -1}, ValueError, "num_draft_tokens"),
        ({"temperature": -1.0}, ValueError, "temperature"),
        ({"top_k": -3}, ValueError, "top_k"),
        ({"top_p": 0.0}, ValueError, "top_p"),
        ({"guidance_scale": float("nan")}, ValueError, "finite"),
        ({"seeds": [1, 2]}, ValueError, "2 seeds"),
        ({"tree": [0]}, ValueError, "widths"),
        ({"tree": "3,2"}, ValueError, "write a TreeSpec"),
        ({"tree": 3}, ValueError, "write a TreeSpec"),
        ({"top_k": 2.0}, ValueError, "integer >= 0"),
        ({"temperature": 1e-40}, ValueError, "0 is greedy"),
        ({"callback_on_step_end": lambda *_: True}, TypeError, "callback returned True"),
        ({"tree": [2], "drafter": "jacobi"}, ValueError, "chain"),
    ],
)
def test_bad_settings_are_refused(pipe, keywords: dict, kind: type, message: str) -> None:
    with pytest.raises(kind, match=message):
        pipe("a cat", **keywords)


def test_a_top_k_beyond_the_vocabulary_is_off(pipe) -> None:
    assert torch.equal(tokens(pipe, "a cat", seeds=1, top_k=999), tokens(pipe, "a cat", seeds=1, top_k=0))


def test_a_rule_without_a_drafter_is_refused_only_when_asked_for() -> None:
    pipe = tiny.text_pipeline(drafter=None)
    assert pipe("a cat", seeds=1).stats["settings"]["rule"] == "plain"
    with pytest.raises(ValueError, match="no drafter"):
        pipe("a cat", rule="exact")
    assert pipe("a cat", rule="exact", drafter="jacobi").stats["settings"]["drafter"] == "jacobi"


def test_a_drafter_of_another_vocabulary_is_refused(pipe) -> None:
    with pytest.raises(ValueError, match="vocab"):
        pipe("a cat", drafter=tiny.gpt(vocab=12))


def test_parts_of_other_models_are_refused() -> None:
    with pytest.raises(ValueError, match="ClassToImagePipeline"):
        tiny.TextToImagePipeline(tiny.gpt(condition="class"), tiny.vq(), tiny.text_encoder(), tiny.tokenizer())
    with pytest.raises(ValueError, match="width 16"):
        model = tiny.gpt()
        model.config.caption_dim = 24
        tiny.TextToImagePipeline(model, tiny.vq(), tiny.text_encoder(), tiny.tokenizer())


def test_broken_weights_are_a_clear_error(pipe) -> None:
    broken = tiny.text_pipeline()
    with torch.no_grad():
        broken.transformer.output.weight[:, 0] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        broken("a cat", seeds=1)


def test_changed_weights_are_seen(pipe) -> None:
    changed = tiny.text_pipeline()
    before = tokens(changed, PROMPTS, seeds=1, rule="plain")
    with torch.no_grad():
        changed.transformer.output.weight.mul_(-1)
    after = tokens(changed, PROMPTS, seeds=1, rule="plain")
    assert not torch.equal(before, after)
    assert torch.equal(tokens(changed, PROMPTS, seeds=1, rule="coupled"), after)


def test_a_changed_vq_is_seen_by_rules_that_compare_codes() -> None:
    own = tiny.text_pipeline(rule=make_rule("lantern", k=4, delta=0.9))
    own("a cat", seeds=1)
    before = own.rule.neighbours
    own("a cat", seeds=2)
    assert own.rule.neighbours is before  # not made again for every call
    with torch.no_grad():
        own.vq.quantize.embedding.weight.copy_(own.vq.quantize.embedding.weight.flip(0) ** 3)
    own("a cat", seeds=1)
    assert not torch.equal(own.rule.neighbours, before)
    other = tiny.gpt(seed=5)
    own.transformer = other
    assert own("a cat", seeds=1, rule="lantern").stats["guarantee"] == "unbounded"


def test_a_used_pipeline_is_copied_and_pickled(pipe) -> None:
    expected = tokens(pipe, PROMPTS, seeds=1)
    for twin in (copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):
        assert torch.equal(tokens(twin, PROMPTS, seeds=1), expected)


@pytest.mark.parametrize("drafter", ["eagle", "jacobi"])
def test_calls_in_two_threads_do_not_mix(drafter: str) -> None:
    """The first call is held after its second round until the second call has run."""
    own = tiny.text_pipeline(drafter=JacobiDrafter() if drafter == "jacobi" else "eagle")
    alone = [tokens(own, PROMPTS[:count], seeds=count) for count in (2, 1)]
    reached, go_on, found = threading.Event(), threading.Event(), []

    def hold(pipe, step, committed, tensors):
        if step == 2:
            reached.set()
            go_on.wait(60)
        return tensors

    def first() -> None:
        found.append(tokens(own, PROMPTS[:2], seeds=2, callback_on_step_end=hold))

    thread = threading.Thread(target=first)
    thread.start()
    assert reached.wait(60)
    second = tokens(own, PROMPTS[:1], seeds=1)
    go_on.set()
    thread.join(60)
    assert found and torch.equal(found[0], alone[0]) and torch.equal(second, alone[1])


def test_components_are_swapped_like_schedulers(pipe) -> None:
    own = tiny.text_pipeline(rule=CoupledRule(), drafter=JacobiDrafter(window=4))
    assert own("a cat", seeds=1).stats["settings"]["rule"] == "coupled"
    own.rule = ExactRule()
    assert own("a cat", seeds=1).stats["settings"]["rule"] == "exact"
    assert own.config.rule == ("mediaspec.rules.exact", "ExactRule")
