"""`generate(custom_generate=speculative)` against plain `generate` of transformers, real classes at tiny size."""

from __future__ import annotations

import functools
import string
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    TopPLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

from mediaspec.drafters import ModelDrafter, NgramDrafter
from mediaspec.integrations.generate import SpeculativeOutput, speculative
from mediaspec.integrations.options import Speculation, resolve
from mediaspec.pipelines.lockstep import split_warp
from mediaspec.targets.causal_lm import CausalLMTarget
from tests.integrations.laws import law_of_tokens
from tests.targets.test_causal_lm import VOCAB, make_model, prompts

NEW = 20


def small(vocab: int = VOCAB, seed: int = 5) -> PreTrainedModel:
    return make_model(seed=seed, num_hidden_layers=1, vocab_size=vocab)


def both(model: PreTrainedModel, rows: int = 3, drafter: Any = "ngram", **settings: Any) -> tuple[Tensor, Tensor]:
    """Ids of plain and of speculative generate with the same settings."""
    ids, mask = prompts(rows)
    settings = {"max_new_tokens": NEW, "do_sample": False, **settings}
    own = ("num_draft_tokens", "rule", "row_seeds", "tree", "policy")
    extra = {key: settings.pop(key) for key in own if key in settings}
    plain = model.generate(input_ids=ids, attention_mask=mask, **settings)
    fast = model.generate(
        input_ids=ids, attention_mask=mask, custom_generate=speculative, drafter=drafter, **settings, **extra
    )
    return plain, fast


def repeating(model: PreTrainedModel) -> PreTrainedModel:
    """Makes greedy texts repeat themselves now and then, so that lookup drafts are accepted."""
    with torch.no_grad():
        model.get_output_embeddings().weight[3:9] *= 1.6
    return model


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("drafter", ["ngram", "suffix", "model", "none"])
def test_greedy_tokens_are_those_of_generate(drafter: str, rows: int) -> None:
    model = repeating(make_model())
    plain, fast = both(model, rows, small() if drafter == "model" else drafter)
    assert torch.equal(plain, fast)


SLOWLY = [pytest.param(name, marks=pytest.mark.slow) for name in ("Qwen3", "Mistral", "Gemma3")]


@pytest.mark.parametrize("family", ["Qwen2-sliding", "Gemma2", "Mixtral", *SLOWLY])
def test_greedy_tokens_of_other_families(family: str) -> None:
    plain, fast = both(make_model(family), 3, make_model(family, seed=4), num_draft_tokens=6, max_new_tokens=12)
    assert torch.equal(plain, fast)


@pytest.mark.parametrize("length", [0, 1, 3, 12])
def test_budgets_and_draft_lengths(length: int) -> None:
    """An output never gets longer than asked for, whatever the draft length."""
    model = make_model()
    for new in (1, 2, 3, length + 1, length + 2):
        plain, fast = both(model, 2, model, max_new_tokens=new, num_draft_tokens=length)
        assert torch.equal(plain, fast) and fast.shape[1] == 9 + new


def test_a_stop_token_at_every_place_of_a_block() -> None:
    """The model drafts for itself, so stops are met inside accepted blocks, as first, middle and bonus token."""
    model = make_model()
    free, _ = both(model, 8, max_new_tokens=9, eos_token_id=None, pad_token_id=0)
    for place in range(9, 15):  # row 0 stops at its first, second, ... new token, the others where they do
        stop = int(free[0, place])
        plain, fast = both(model, 8, model, max_new_tokens=9, eos_token_id=stop, pad_token_id=0, num_draft_tokens=3)
        assert torch.equal(plain, fast)
    plain, fast = both(model, 8, model, eos_token_id=[stop, int(free[1, 12])], pad_token_id=1, max_new_tokens=9)
    assert torch.equal(plain, fast)


def test_no_stop_ids_at_all() -> None:
    model = make_model(eos_token_id=None)
    model.generation_config.eos_token_id = None
    plain, fast = both(model, 3)
    assert torch.equal(plain, fast)


PROCESSORS: list[dict[str, Any]] = [
    dict(repetition_penalty=1.7),
    dict(no_repeat_ngram_size=2),
    dict(bad_words_ids=[[7], [8, 9]]),
    dict(sequence_bias=[[[5], 4.0], [[6, 7], -3.0]]),
    dict(min_new_tokens=9, eos_token_id=[4, 11, 19, 23, 30], pad_token_id=0),
    dict(min_length=15, eos_token_id=[4, 11, 19, 23, 30], pad_token_id=0),
    dict(exponential_decay_length_penalty=(3, 1.6), eos_token_id=4, pad_token_id=0),
    dict(suppress_tokens=[3, 4, 5]),
    dict(begin_suppress_tokens=list(range(3, 30))),
    dict(forced_eos_token_id=2),
    dict(encoder_repetition_penalty=1.5, encoder_no_repeat_ngram_size=2),
    dict(renormalize_logits=True, remove_invalid_values=True),
    dict(repetition_penalty=1.3, no_repeat_ngram_size=3, sequence_bias=[[[5], 2.0]], min_new_tokens=8),
]


@pytest.mark.parametrize("settings", PROCESSORS, ids=lambda one: "+".join(one))
def test_processors_are_evaluated_at_every_draft_position(settings: dict[str, Any]) -> None:
    model = repeating(make_model())
    plain, fast = both(model, 3, model, num_draft_tokens=4, max_new_tokens=12, **settings)
    assert torch.equal(plain, fast)


class OddThenEven(LogitsProcessor):
    """A user's processor: odd and even ids in turn, by the length of the text; the row number is added to the score
    of one id, so that mixed-up rows would show."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        order = torch.arange(scores.shape[1])
        out = scores.masked_fill(order % 2 == input_ids.shape[1] % 2, float("-inf"))
        out[:, 20:22] += torch.arange(len(scores))[:, None] * 2.0
        return out


def test_user_processors_and_prefix_functions_see_the_whole_batch() -> None:
    model = make_model()
    plain, fast = both(model, 3, model, max_new_tokens=9, logits_processor=LogitsProcessorList([OddThenEven()]))
    assert torch.equal(plain, fast)

    def allowed(batch: int, ids: Tensor) -> list[int]:
        return [3 + (batch * 7 + len(ids) + k) % 40 for k in range(6)]

    plain, fast = both(model, 3, model, max_new_tokens=9, prefix_allowed_tokens_fn=allowed)
    assert torch.equal(plain, fast)


class StopAfter(StoppingCriteria):
    """Stops a row once its new tokens contain two multiples of five."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return (input_ids[:, 9:] % 5 == 0).sum(1) >= 2


@pytest.mark.parametrize("eos", [None, 4])
def test_user_criteria_stop_rows_where_generate_does(eos: int | None) -> None:
    """Without stop ids, `generate` lets rows go on until all have stopped."""
    model = make_model()
    model.generation_config.eos_token_id = None
    for rows in (1, 4):
        criteria = StoppingCriteriaList([StopAfter()])
        plain, fast = both(model, rows, model, stopping_criteria=criteria, eos_token_id=eos, pad_token_id=0)
        assert torch.equal(plain, fast) and (rows > 1 or fast.shape[1] < 9 + NEW)


def test_lengths_and_times_of_criteria() -> None:
    model = make_model()
    plain, fast = both(model, 2, model, stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(14)]))
    assert torch.equal(plain, fast) and fast.shape[1] == 14
    plain, fast = both(model, 2, model, stopping_criteria=StoppingCriteriaList([MaxTimeCriteria(0.0)]))
    assert torch.equal(plain, fast) and fast.shape[1] == 10


class Listener(BaseStreamer):
    def __init__(self) -> None:
        self.got: list[list[Any]] = []
        self.ended = 0

    def put(self, value: Tensor) -> None:
        self.got.append(value.tolist())

    def end(self) -> None:
        self.ended += 1


def test_streamers_hear_what_plain_generate_tells_them() -> None:
    model = make_model()
    ids, mask = prompts(1)
    for settings in ({}, {"eos_token_id": 9}):
        plain, fast = Listener(), Listener()
        shared = dict(input_ids=ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, **settings)
        model.generate(streamer=plain, **shared)
        model.generate(custom_generate=speculative, drafter=model, token_stream=fast, **shared)
        assert plain.got == fast.got and plain.ended == fast.ended == 1
        bound = Listener()
        model.generate(custom_generate=functools.partial(speculative, streamer=bound, assistant_model=model), **shared)
        assert plain.got == bound.got
    ids, mask = prompts(3)
    shared = dict(input_ids=ids, attention_mask=mask, max_new_tokens=NEW, eos_token_id=[9, 17, 30], pad_token_id=0)
    plain, fast = Listener(), Listener()
    model.generate(streamer=plain, do_sample=False, **shared)
    model.generate(custom_generate=speculative, drafter=model, token_stream=fast, do_sample=False, **shared)
    assert plain.got == fast.got


def test_scores_and_logits() -> None:
    model = make_model()
    model.generation_config.eos_token_id = None
    ids, mask = prompts(2)
    shared = dict(
        input_ids=ids, attention_mask=mask, max_new_tokens=8, do_sample=False, repetition_penalty=1.5,
        return_dict_in_generate=True, output_scores=True, output_logits=True,
    )  # fmt: skip
    plain = model.generate(**shared)
    fast = model.generate(custom_generate=speculative, drafter=model, num_draft_tokens=3, **shared)
    assert isinstance(fast, SpeculativeOutput) and torch.equal(plain.sequences, fast.sequences)
    for name in ("scores", "logits"):
        assert len(getattr(plain, name)) == len(getattr(fast, name)) == 8
        for one, other in zip(getattr(plain, name), getattr(fast, name), strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    assert fast.stats["tokens"] == 16 and fast.stats["guarantee"] == "exact-tokens"
    assert fast.stats["num_draft_tokens"] == 3 and fast.stats["rule"] == "coupled"


SAMPLING: dict[str, Any] = dict(
    do_sample=True, temperature=0.8, top_k=0, top_p=0.9, min_p=0.02, repetition_penalty=1.4, renormalize_logits=True
)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("settings", [dict(do_sample=True, temperature=0.7, top_k=12), SAMPLING])
def test_coupled_sampling_gives_the_tokens_of_plain_decoding(settings: dict[str, Any], rows: int) -> None:
    model = repeating(make_model())
    ids, mask = prompts(rows)
    seeds = [101, 5, 77][:rows]
    shared = dict(input_ids=ids, attention_mask=mask, max_new_tokens=NEW, custom_generate=speculative, **settings)
    plain = model.generate(drafter="none", row_seeds=seeds, **shared)
    for drafter, length in ((small(), 4), ("ngram", 1), ("suffix", 9), (model, 4)):
        fast = model.generate(drafter=drafter, row_seeds=seeds, num_draft_tokens=length, **shared)
        assert torch.equal(plain, fast)
    alone = model.generate(
        drafter="ngram", row_seeds=seeds[-1:],
        **{**shared, "input_ids": ids[-1:], "attention_mask": mask[-1:]},
    )  # fmt: skip
    shortest = min(alone.shape[1], plain.shape[1])
    assert torch.equal(alone[0, 9:shortest], plain[-1, 9:shortest])


@pytest.mark.parametrize("drafter", ["model", "ngram"])
@pytest.mark.parametrize("rule", ["exact", "coupled"])
def test_the_law_of_sampled_texts_is_that_of_generate(rule: str, drafter: str) -> None:
    """All processors on: chi-square over all 3-token continuations, 2,500 rows, against the exact law computed with
    transformers' own processors; threshold p > 0.001, fixed seeds."""
    model = make_model(vocab_size=7, eos_token_id=None)
    assert law_of_tokens(model, rule=rule, drafter=small(vocab=7) if drafter == "model" else "ngram") > 0.001


def test_draft_models_draw_at_the_temperature_of_the_processors() -> None:
    """min-p stands behind the temperature, so all of it runs as processors, none as the run's warp."""
    model = make_model()
    model.generation_config.eos_token_id = None
    ids, _ = prompts(1)
    settings = dict(
        input_ids=ids, max_new_tokens=40, do_sample=True, temperature=0.4, min_p=0.01, top_k=0, rule="exact",
        row_seeds=[3], custom_generate=speculative, return_dict_in_generate=True,
    )  # fmt: skip
    settings["num_draft_tokens"] = 5
    warm = ModelDrafter(CausalLMTarget(model, 40))  # draws at temperature 1
    with_temperature, without = (model.generate(drafter=one, **settings) for one in (model, warm))
    assert with_temperature.stats["tokens_per_call"] > 3.5 > without.stats["tokens_per_call"]


def test_return_sequences_fork_after_one_prefill_and_seeds_belong_to_rows() -> None:
    model = make_model()
    ids, mask = prompts(2)
    shared = dict(max_new_tokens=8, do_sample=True, custom_generate=speculative, drafter="ngram", eos_token_id=None)
    many = model.generate(
        input_ids=ids, attention_mask=mask, num_return_sequences=3, row_seeds=[1, 2, 3, 4, 5, 6], **shared
    )
    assert many.shape == (6, 17) and len({tuple(row) for row in many[:3].tolist()}) == 3
    one = model.generate(input_ids=ids[1:], attention_mask=mask[1:], row_seeds=[5], **shared)
    assert torch.equal(one[0], many[4])
    torch.manual_seed(3)
    first = model.generate(input_ids=ids, **shared)
    torch.manual_seed(3)
    assert torch.equal(first, model.generate(input_ids=ids, **shared))
    assert not torch.equal(first, model.generate(input_ids=ids, **shared))


def test_draft_models_with_another_padded_vocabulary() -> None:
    model = make_model()
    for vocab in (VOCAB + 14, VOCAB - 6):
        plain, fast = both(model, 3, small(vocab))
        assert torch.equal(plain, fast)


def test_drafter_objects_and_names_of_other_libraries() -> None:
    model = make_model()
    plain, fast = both(model, 2, NgramDrafter(5))
    assert torch.equal(plain, fast)
    ids, _ = prompts(1)
    for names in (
        dict(prompt_lookup_num_tokens=4),
        dict(num_assistant_tokens=3),
        dict(num_speculative_tokens=3),
        dict(speculative_config={"method": "suffix", "num_speculative_tokens": 3}),
        dict(speculative_algorithm="NGRAM", speculative_num_steps=3),
    ):
        output = model.generate(
            input_ids=ids, max_new_tokens=6, do_sample=False, custom_generate=speculative,
            return_dict_in_generate=True, **names,
        )  # fmt: skip
        wanted = 4 if "prompt_lookup_num_tokens" in names else 3
        assert output.stats["num_draft_tokens"] == wanted and output.stats["drafter"] in ("ngram", "suffix")


def test_older_outputs_are_copied_from() -> None:
    model, drafter = make_model(), NgramDrafter(6, memory=100)
    model.generation_config.eos_token_id = None
    ids, _ = prompts(1)
    shared = dict(
        input_ids=ids, max_new_tokens=NEW, do_sample=False, custom_generate=speculative, return_dict_in_generate=True,
        num_draft_tokens=5,
    )  # fmt: skip
    first, again = (model.generate(drafter=drafter, **shared) for _ in range(2))
    assert torch.equal(first.sequences, again.sequences)
    assert again.stats["target_calls"] <= 2 + NEW // 5 < first.stats["target_calls"]


def letters() -> PreTrainedTokenizerFast:
    """One token per letter."""
    ids = {token: number for number, token in enumerate(["<pad>", "<s>", "</s>", *string.ascii_letters[: VOCAB - 3]])}
    inner = Tokenizer(models.BPE(ids, []))
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def test_stop_strings_that_straddle_blocks() -> None:
    """Stop strings come as a criterion: `generate` does not hand its tokenizer to a custom loop."""
    model, tokenizer = make_model(), letters()
    model.generation_config.eos_token_id = None
    ids, _ = prompts(1)
    free = model.generate(input_ids=ids, max_new_tokens=NEW, do_sample=False)[0, 9:].tolist()
    for place in range(1, 7):
        text = tokenizer.decode(free[place : place + 2])
        for length in (1, 3, 4):
            criteria = StoppingCriteriaList([StopStringCriteria(tokenizer, [text])])
            plain, fast = both(model, 1, model, stopping_criteria=criteria, num_draft_tokens=length)
            assert torch.equal(plain, fast) and fast.shape[1] <= 9 + place + 2


def test_options_resolve() -> None:
    assert resolve() == Speculation() and resolve().tokens is None
    assert resolve(num_assistant_tokens=20).tokens is None and resolve(num_assistant_tokens=7).tokens == 7
    assert resolve(num_draft_tokens=2, num_speculative_tokens=9).tokens == 2
    assert resolve(drafter="none").tokens == 0 and resolve(num_draft_tokens=0).tokens == 0
    config = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2, "num_speculative_tokens": 6}
    settings = {"max_ngram": 4, "min_ngram": 2}
    assert resolve(speculative_config=config) == Speculation("ngram", 6, None, None, settings)
    with pytest.raises(ValueError, match="prompt_lookup_max"):
        resolve(speculative_config={"prompt_lookup_maxx": 4})
    with pytest.raises(ValueError, match="ngram"):
        resolve(speculative_algorithm="ngrm")
    with pytest.raises(ValueError, match="two drafters"):
        resolve(drafter="ngram", assistant_model=object())
    with pytest.raises(ValueError, match="draft model"):
        resolve(speculative_algorithm="STANDALONE")
    with pytest.raises(ValueError, match=">= 0"):
        resolve(num_draft_tokens=-1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(num_beams=2), "num_beams"),
        (dict(output_attentions=True), "attention maps"),
        (dict(guidance_scale=2.0), "remembers"),
        (dict(drafter="ngrm"), "ngram"),
        (dict(row_seeds=[1, 2], do_sample=True), "row_seeds"),
        (dict(position_ids=torch.arange(9)[None] + 1), "position_ids"),
        (dict(rule="exat"), "exact"),
    ],
)
def test_what_cannot_be_honoured_is_refused(settings: dict[str, Any], message: str) -> None:
    ids, _ = prompts(1)
    with pytest.raises(ValueError, match=message):
        make_model().generate(input_ids=ids, max_new_tokens=4, custom_generate=speculative, **settings)
    with pytest.raises(TypeError, match="drafter is a int"):
        make_model().generate(input_ids=ids, max_new_tokens=4, custom_generate=speculative, drafter=3)


def test_a_least_number_of_tokens_stays_with_its_processor() -> None:
    kept, warp = split_warp(LogitsProcessorList([TopPLogitsWarper(0.1, min_tokens_to_keep=5)]))
    assert len(kept) == 1 and warp.top_p == 1
    kept, warp = split_warp(LogitsProcessorList([TopPLogitsWarper(0.1)]))
    assert len(kept) == 0 and warp.top_p == pytest.approx(0.1)


def test_drafters_keep_their_names_under_processors() -> None:
    model = make_model()
    settings = {"do_sample": True, "max_new_tokens": 6, "min_p": 0.1, "return_dict_in_generate": True}
    out = model.generate(
        input_ids=torch.tensor([[5, 6, 7]]),
        custom_generate=speculative,
        drafter=small(),
        num_draft_tokens=2,
        **settings,
    )
    assert out.stats["drafter"] == "model"
