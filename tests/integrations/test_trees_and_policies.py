"""Trees, trained heads and policies inside `generate`: nothing of them may show in the tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from mediaspec.core.tree import TreeSpec
from mediaspec.drafters import LongSpecDrafter, NgramDrafter
from mediaspec.integrations.generate import SpeculativeOutput, speculative
from mediaspec.integrations.options import Speculation, resolve
from mediaspec.pipelines.draft_trees import likely_tree
from mediaspec.policies import FixedPolicy, SurvivalPolicy, available_policies
from tests.drafters.test_eagle3 import make_head as eagle3_head
from tests.integrations.laws import law_of_tokens
from tests.integrations.test_generate import NEW, SAMPLING, both, repeating, small
from tests.models.test_longspec import make_head as longspec_head
from tests.targets.test_causal_lm import make_model, prompts

TREES = ([2, 1], [(0,), (1,), (2,), (0, 0), (0, 1), (0, 0, 0)])


def drafter_of(name: str, model: PreTrainedModel) -> Any:
    """Anything that can be named, with untrained heads where heads are needed."""
    if name == "model":
        return small()
    if name == "eagle3":
        return eagle3_head(model, 30)
    if name == "longspec":
        return longspec_head(model, 8)
    return LongSpecDrafter(longspec_head(model, 8), beam=(2, 3, 3)) if name == "beam" else name


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("name", ["lazy", "sparse", "eagle3", "longspec"])
def test_chains_of_every_drafter_give_the_tokens_of_generate(name: str, rows: int) -> None:
    model = repeating(make_model())
    plain, fast = both(model, rows, drafter_of(name, model), num_draft_tokens=3, max_new_tokens=12)
    assert torch.equal(plain, fast)


@pytest.mark.parametrize(
    ("name", "rows"),
    [("model", 1), ("model", 3), ("lazy", 3), ("sparse", 3), ("eagle3", 3), ("longspec", 3), ("beam", 1)],
)
def test_trees_give_the_tokens_of_generate(name: str, rows: int) -> None:
    model = repeating(make_model())
    for tree in TREES:
        plain, fast = both(model, rows, drafter_of(name, model), tree=tree, max_new_tokens=10)
        assert torch.equal(plain, fast)


@pytest.mark.parametrize(
    "settings",
    [
        dict(repetition_penalty=1.7), dict(no_repeat_ngram_size=2), dict(bad_words_ids=[[7], [8, 9]]),
        dict(min_new_tokens=7, eos_token_id=[4, 11, 19, 23, 30], pad_token_id=0),
    ],
    ids=lambda one: "+".join(one),
)  # fmt: skip
def test_processors_see_every_nodes_own_path(settings: dict[str, Any]) -> None:
    """The model drafts for itself: its first children are right, so that paths of several nodes are accepted, and what
    a processor is told about a node decides whether they may be."""
    model = repeating(make_model())
    for rows in (1, 4):
        plain, fast = both(model, rows, model, tree=[3, 2, 1], max_new_tokens=12, **settings)
        assert torch.equal(plain, fast)


@pytest.mark.parametrize("settings", [dict(do_sample=True, temperature=0.7, top_k=12), SAMPLING])
def test_coupled_sampling_with_trees_gives_the_tokens_of_plain_decoding(settings: dict[str, Any]) -> None:
    model = repeating(make_model())
    ids, mask = prompts(3)
    shared = dict(
        input_ids=ids, attention_mask=mask, max_new_tokens=NEW, custom_generate=speculative, row_seeds=[101, 5, 77],
        **settings,
    )  # fmt: skip
    plain = model.generate(drafter="none", **shared)
    for name in ("model", "eagle3", "longspec"):
        assert torch.equal(plain, model.generate(drafter=drafter_of(name, model), tree=[2, 2, 1], **shared))


@pytest.mark.parametrize(("rule", "name"), [("exact", "model"), ("exact", "eagle3"), ("coupled", "model")])
def test_the_law_of_trees_with_all_processors_on(rule: str, name: str) -> None:
    """Chi-square over all 3-token continuations of 2,500 rows, threshold p > 0.001, fixed seeds."""
    model = make_model(vocab_size=7, eos_token_id=None)
    drafter = small(vocab=7) if name == "model" else eagle3_head(model, 4)
    assert law_of_tokens(model, rule=rule, drafter=drafter, tree=[2, 2]) > 0.001


def test_scores_and_logits_of_tree_paths() -> None:
    model = make_model()
    model.generation_config.eos_token_id = None
    ids, mask = prompts(3)
    shared = dict(
        input_ids=ids, attention_mask=mask, max_new_tokens=9, do_sample=False, repetition_penalty=1.5,
        return_dict_in_generate=True, output_scores=True, output_logits=True,
    )  # fmt: skip
    plain = model.generate(**shared)
    for drafter in (model, small()):
        fast = model.generate(custom_generate=speculative, drafter=drafter, tree=[3, 2], **shared)
        assert isinstance(fast, SpeculativeOutput) and torch.equal(plain.sequences, fast.sequences)
        for name in ("scores", "logits"):
            for one, other in zip(getattr(plain, name), getattr(fast, name), strict=True):
                torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    assert fast.stats["tree"] == list(TreeSpec.from_widths([3, 2]).parents) and fast.stats["num_draft_tokens"] == 2


def run(model: PreTrainedModel, rows: int = 3, **settings: Any) -> tuple[Tensor, dict[str, Any]]:
    ids, mask = prompts(rows)
    output = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, custom_generate=speculative,
        return_dict_in_generate=True, **settings,
    )  # fmt: skip
    return output.sequences, output.stats


@pytest.mark.parametrize("policy", [*sorted(set(available_policies()) - {"fixed", "round_robin"}), None])
def test_policies_choose_among_drafters_and_no_token_changes(policy: str | None) -> None:
    model = repeating(make_model())
    plain, _ = both(model, 3)
    several: Any = {"big": model, "ngram": "ngram", "small": small()}
    tokens, stats = run(model, drafter=several, policy=policy)
    assert torch.equal(plain, tokens)
    assert stats["policy"] == (policy or "survival") and stats["drafter"] == ["big", "ngram", "small"]
    assert stats["num_draft_tokens"] is None and sum(stats["arms"].values()) == stats["target_calls"] - 1
    tokens, stats = run(model, drafter=several, policy=policy or "survival", tree=[2, 1], num_draft_tokens=3)
    assert torch.equal(plain, tokens) and set(stats["arms"]) <= {
        "plain", *(f"{name}:{count}" for name in several for count in (1, 2, 3)), "big:tree4", "small:tree4"
    }  # fmt: skip


def test_policies_by_object_and_by_name() -> None:
    model = repeating(make_model())
    plain, _ = both(model, 3)
    tokens, stats = run(model, drafter=["ngram", model], policy=FixedPolicy(3, "model"))
    assert torch.equal(plain, tokens) and stats["arms"] == {"model:3": stats["target_calls"] - 1}
    tokens, stats = run(model, drafter=model, policy="fixed")
    assert torch.equal(plain, tokens) and stats["policy"] == "fixed" and stats["num_draft_tokens"] == 5
    costs = [1.0, 1.1, 1.2, 1.3]
    tokens, stats = run(model, drafter=model, policy=SurvivalPolicy(max_draft_tokens=3, costs=costs))
    assert torch.equal(plain, tokens) and set(stats["arms"]) <= {"plain", "model:1", "model:2", "model:3"}
    _, stats = run(model, drafter=model, policy="survival", num_draft_tokens=2)
    assert set(stats["arms"]) <= {"plain", "model:1", "model:2"}
    _, stats = run(model, drafter=model, policy="ucb", num_draft_tokens=3)
    assert set(stats["arms"]) <= {"plain", "model:2", "model:3"}
    _, stats = run(model, drafter="none", policy="survival")
    assert stats["drafter"] == "none" and stats["target_calls"] == NEW


def test_a_policy_keeps_what_it_learned_for_the_next_call_of_the_model() -> None:
    """The second call warms nothing up: no arm is tried for the sake of measuring it alone."""
    model = make_model()
    ids, _ = prompts(1)
    policy = SurvivalPolicy(max_draft_tokens=4, costs=[1.0, 1.1, 1.2, 1.3, 1.4])
    for _ in range(2):
        model.generate(
            input_ids=ids, max_new_tokens=NEW, do_sample=False, custom_generate=speculative, drafter=model,
            policy=policy,
        )  # fmt: skip
    assert policy.learner.old_risk[0][0] > 0 and policy.arms[-1].num_draft_tokens == 4
    assert policy.choose([0]).arm.num_draft_tokens == 4


def test_names_of_trees_in_other_libraries() -> None:
    paths = "[(0,), (1,), (0, 0)]"
    wanted = TreeSpec.from_paths([(0,), (1,), (0, 0)])
    assert resolve(speculative_token_tree=paths).tree == wanted
    assert resolve(speculative_config={"speculative_token_tree": paths, "num_speculative_tokens": 2}).tree == wanted
    assert resolve(tree=wanted).tree is wanted and resolve(tree_widths=[2, 1]).tree == TreeSpec.from_widths([2, 1])
    sglang = resolve(speculative_algorithm="EAGLE3", speculative_num_steps=3, speculative_eagle_topk=4,
                     speculative_num_draft_tokens=16)  # fmt: skip
    assert sglang == Speculation("eagle3", 3, likely_tree(4, 3, 15), None, {})
    chain = resolve(speculative_algorithm="EAGLE", speculative_num_steps=3, speculative_eagle_topk=1,
                    speculative_num_draft_tokens=4)  # fmt: skip
    assert chain == Speculation("eagle3", 3, None, None, {})
    assert resolve(speculative_num_draft_tokens=5).tokens == 4
    with pytest.raises(ValueError, match="tree and tree_widths describe"):
        resolve(tree=wanted, tree_widths=[2])
    with pytest.raises(ValueError, match="children per level"):
        resolve(tree_widths=["a"])  # type: ignore[list-item]


def test_names_of_schedules_batches_and_folders(tmp_path: Any) -> None:
    assert resolve(num_assistant_tokens=9, num_assistant_tokens_schedule="constant").policy is None
    moving = resolve(num_assistant_tokens=9, num_assistant_tokens_schedule="heuristic")
    assert (moving.policy, moving.tokens) == ("survival", 9)
    with pytest.raises(ValueError, match="heuristic_transient"):
        resolve(num_assistant_tokens_schedule="fast")
    config = {"method": "ngram", "disable_by_batch_size": 4}
    assert resolve(speculative_config=config, batch=4).drafter == "ngram"
    assert resolve(speculative_config=config, batch=5).tokens == 0
    with pytest.raises(ValueError, match="Medusa"):
        resolve(speculative_config={"method": "medusa"})
    model, folder = make_model(), str(tmp_path / "small")
    small().save_pretrained(folder)
    eagle3_head(model, 30).save_pretrained(tmp_path / "head")
    plain, _ = both(model, 2)
    for names in (
        dict(speculative_config={"model": folder, "num_speculative_tokens": 3}),
        dict(speculative_draft_model_path=str(tmp_path / "head"), speculative_algorithm="EAGLE3"),
    ):
        tokens, stats = run(model, 2, **names)
        assert torch.equal(plain, tokens)
    assert stats["drafter"] == "eagle3"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(drafter="ngram", tree=[2, 1]), "makes no trees"), (dict(tree=[2, 1]), "makes no trees"),
        (dict(drafter="egle3"), "eagle3"), (dict(drafter="eagle3"), "no trained head"),
        (dict(drafter=["ngram", "suffix"], num_draft_tokens=4), "survival"),
        (dict(drafter=["ngram", "suffix"], policy="fixed"), "survival"),
        (dict(policy="survivl"), "survival"), (dict(policy=FixedPolicy(2), num_draft_tokens=2), "was given"),
        (dict(policy=SurvivalPolicy(), drafter="ngram", tree_widths=[2]), "makes no trees"),
        (dict(policy=FixedPolicy(2, "ngrm"), drafter="ngram"), "ngram"),
    ],
)  # fmt: skip
def test_contradictions_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(make_model(), 1, **settings)
    with pytest.raises(TypeError, match="policy is a int"):
        run(make_model(), 1, policy=3)


def test_a_lookup_drafter_among_several_still_remembers() -> None:
    model, lookup = make_model(), NgramDrafter(6, memory=100)
    run(model, 2, drafter={"memory": lookup, "small": small()})
    assert len(lookup._older) > NEW
