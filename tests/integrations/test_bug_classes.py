"""One test per class of bug that users of speculative decoders report, in the order of the specification's table.

Tiny models of real classes, float32 on the CPU. Classes about features that this library does not have are tested at
the nearest place that it has, which the test's first line names.
"""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StaticCache,
    StoppingCriteriaList,
    StopStringCriteria,
    T5Config,
    T5ForConditionalGeneration,
)

from mediaspec import enable
from mediaspec.attention.ring import Ring
from mediaspec.core.engine import Engine, Round
from mediaspec.core.tree import TreeSpec
from mediaspec.core.types import DecodeState, Draft, Warp
from mediaspec.drafters import ModelDrafter, NgramDrafter
from mediaspec.integrations.generate import speculative
from mediaspec.policies import FixedPolicy
from mediaspec.rules import make_rule
from mediaspec.targets.causal_lm import CausalLMTarget
from tests.integrations.fuzz import FuzzDrafter, random_tree
from tests.integrations.laws import law_of_tokens
from tests.integrations.test_generate import Listener, both, letters, repeating, small
from tests.targets.test_causal_lm import VOCAB, make_model, own_logits, prompt, prompts, tokens_of

GREEDY = Warp(temperature=0.0)
NEW = 16


def plain(model: PreTrainedModel, rows: int, **settings: Any) -> Tensor:
    """[rows, NEW] what plain `generate` writes, greedy and without stops."""
    ids, mask = prompts(rows)
    shared: dict[str, Any] = dict(max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0, **settings)
    model.generation_config.eos_token_id = None
    tokens: Tensor = model.generate(input_ids=ids, attention_mask=mask, **shared)[:, 9:]
    return tokens


def fast(model: PreTrainedModel, rows: int, drafter: Any, **settings: Any) -> Tensor:
    """The same through this library."""
    own: dict[str, Any] = dict(custom_generate=speculative, drafter=drafter)
    return plain(model, rows, **own, **settings)


@pytest.mark.parametrize("family", ["Llama", "Qwen2-sliding", "Gemma2"])
def test_wrong_positions_after_a_rejected_block(family: str) -> None:
    """Positions come from the rows' own lengths, whatever was rejected: random accept lengths, ragged rows, and after
    every round the cached keys and values are those of plain decoding."""
    model = make_model(family)
    right = plain(model, 4)
    stored: dict[str, Any] = {}

    def keep(step: Round) -> None:
        stored["cache"] = step.state.cache

    def compare(step: Round) -> None:
        cache, known = step.state.cache, stored["cache"]
        assert cache is not None
        for live, row in enumerate(step.rows):
            held = cache.host_lengths[live]
            assert held == prompt(4).host_lengths[row] + step.lengths[row] - 1
            for layer in range(model.config.num_hidden_layers):
                for one, other in zip(cache.layer(layer), known.layer(layer), strict=True):
                    gap = (one[live, :, :held] - other[row, :, :held]).abs().max()
                    assert float(gap) < 1e-4, (step.index, row, layer)

    target = CausalLMTarget(model, NEW)
    seeds = torch.arange(4)
    Engine(target, make_rule("coupled")).decode(prompt(4), seeds, warp=GREEDY, on_round=keep)
    for seed in range(3):
        drafter = FuzzDrafter(right, VOCAB, seed)
        out = Engine(target, make_rule("coupled"), drafter).decode(
            prompt(4), seeds, warp=GREEDY, num_draft_tokens=4, on_round=compare
        )
        assert torch.equal(out.tokens, right)
        assert 1.2 < out.stats.tokens_per_call < 4.0  # blocks of every length were accepted and rejected


class ArgmaxWithSoftLaw(ModelDrafter):
    """The bug itself: drafts are argmax tokens, and the reported law is the one they were not drawn from."""

    def propose(self, state: DecodeState, budget: int, tree: TreeSpec | None = None) -> Draft:
        soft = super().propose(state, budget, tree)
        assert soft.probs is not None
        return Draft(soft.probs.argmax(-1), soft.lengths, soft.probs)


def test_draft_greedy_while_target_samples_or_the_reverse() -> None:
    """Laws of both rules under greedy and under sampled drafts; the same test finds the bug where it is built in."""
    model = make_model(vocab_size=7, eos_token_id=None)
    target = CausalLMTarget(small(vocab=7), 4)
    for rule, warp in (("exact", GREEDY), ("exact", Warp(temperature=1.7)), ("coupled", Warp(temperature=1.7))):
        assert law_of_tokens(model, rows=2000, rule=rule, drafter=ModelDrafter(target, warp)) > 0.001
    assert law_of_tokens(model, rows=2000, rule="exact", drafter=ArgmaxWithSoftLaw(target)) < 1e-9
    model = make_model()
    right = plain(model, 3)
    for rule in ("exact", "coupled"):
        sampled = ModelDrafter(CausalLMTarget(small(), NEW), Warp(temperature=1.0))
        assert torch.equal(right, fast(model, 3, sampled, rule=rule))


EVERYTHING: dict[str, Any] = dict(
    do_sample=True, temperature=0.9, top_k=6, top_p=0.95, min_p=0.02, typical_p=0.97, epsilon_cutoff=1e-3,
    repetition_penalty=1.3, no_repeat_ngram_size=3, sequence_bias=[[[5], 0.7], [[4, 6], -1.0]],
    bad_words_ids=[[3, 3]], suppress_tokens=[0], renormalize_logits=True, eos_token_id=None, pad_token_id=0,
)  # fmt: skip


@pytest.mark.parametrize(("rule", "shape"), [("exact", {}), ("exact", dict(tree=[2, 1])), ("coupled", {})])
def test_penalties_min_p_and_bias_ignored_in_verify(rule: str, shape: dict[str, Any]) -> None:
    """Every processor on, chi-square against the law that transformers' own processors give."""
    model = make_model(vocab_size=7, eos_token_id=None)
    assert law_of_tokens(model, rows=3000, given=EVERYTHING, rule=rule, drafter=small(vocab=7), **shape) > 0.001


def test_stop_token_or_stop_string_inside_an_accepted_block() -> None:
    """The model drafts for itself, so stops lie at every place of accepted blocks and trees. Nothing behind one is in
    the ids, the scores, the stream, the counts or what a lookup drafter remembers."""
    model, tokenizer = make_model(), letters()
    ids, mask = prompts(1)
    free = plain(model, 1)[0].tolist()
    for place in range(6):
        stop, end = free[place], free.index(free[place]) + 1
        for shape in (dict(num_draft_tokens=4), dict(tree=[2, 1, 1])):
            memory, stream = NgramDrafter(memory=50), Listener()
            out = model.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, eos_token_id=stop,
                pad_token_id=0, custom_generate=speculative, drafter=model, token_stream=stream, output_scores=True,
                return_dict_in_generate=True, **shape,
            )  # fmt: skip
            assert out.sequences[0, 9:].tolist() == free[:end]
            assert len(out.scores) == end == out.stats["tokens"]
            assert [step[0] for step in stream.got[1:]] == free[:end] and stream.ended == 1
            model.generate(
                input_ids=ids, max_new_tokens=NEW, do_sample=False, eos_token_id=stop, pad_token_id=0,
                custom_generate=speculative, drafter=memory, num_draft_tokens=4,
            )  # fmt: skip
            assert memory._older.tolist() == [*free[:end], -1]
        text = tokenizer.decode(free[place : place + 2])
        criteria = StoppingCriteriaList([StopStringCriteria(tokenizer, [text])])
        for shape in (dict(num_draft_tokens=4), dict(tree=[2, 1, 1])):
            one, other = both(model, 1, model, stopping_criteria=criteria, eos_token_id=None, **shape)
            assert torch.equal(one, other)


def test_output_longer_than_max_length_or_negative_draft_length() -> None:
    """Budgets from one token to two beyond a block, as new tokens and as total length, chains and trees."""
    model = make_model()
    for room in range(1, 7):
        for shape in (dict(num_draft_tokens=4), dict(tree=[2, 1, 1, 1]), {}):
            for limit in (dict(max_new_tokens=room), dict(max_length=9 + room, max_new_tokens=None)):
                one, other = both(model, 3, model, **limit, **shape)
                assert torch.equal(one, other) and other.shape[1] <= 9 + room
    for drafter in ("ngram", "suffix", "lazy", "sparse"):
        one, other = both(model, 2, drafter, max_new_tokens=1)
        assert torch.equal(one, other)


@pytest.mark.parametrize("drafter", ["ngram", "suffix"])
def test_missing_eos_id_crashes_lookup(drafter: str) -> None:
    model = make_model(eos_token_id=None, pad_token_id=None)
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    ids, _ = prompts(1)
    shared: dict[str, Any] = dict(input_ids=ids, max_new_tokens=NEW, do_sample=False)
    wanted = model.generate(**shared)
    assert torch.equal(wanted, model.generate(custom_generate=speculative, drafter=drafter, **shared))


def test_static_sliding_and_ring_caches_cannot_roll_back() -> None:
    """Sliding windows shorter than the text, with rejected blocks; a ring of window plus draft gives what it gives
    without drafts, one of the window alone has lost keys; a cache of someone else is refused."""
    for family in ("Qwen2-sliding", "Mistral"):
        model = make_model(family)
        right = plain(model, 3)
        for seed in range(2):
            assert torch.equal(right, fast(model, 3, FuzzDrafter(right, VOCAB, seed), num_draft_tokens=4))

    model = make_model()
    with enable(model, attention="light_transfer", w_sink=2, w_recent=5, w_last=4):
        right = fast(model, 3, "none")  # lossy: other tokens than the model's own
        for seed in range(2):
            assert torch.equal(right, fast(model, 3, FuzzDrafter(right, VOCAB, seed), num_draft_tokens=4))
    window, draft = 5, 3
    assert not any(Ring(2, window, 2 + window + draft).lost(20 + draft, 21 + kept) for kept in range(draft))
    assert Ring(2, window, 2 + window).lost(20 + draft, 21)

    ids, _ = prompts(1)
    foreign = StaticCache(config=model.config, max_cache_len=64)
    with pytest.raises(ValueError, match="a cache was passed|past_key_values"):
        model.generate(input_ids=ids, max_new_tokens=4, custom_generate=speculative, past_key_values=foreign)


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_batches_unsupported_or_rows_mixed(rows: int) -> None:
    """Ragged prompts, rows that stop at different times, per-row ends in the middle of blocks; rows alone and together
    write the same."""
    model = repeating(make_model())
    stops = [4, 11, 19, 23, 30, 41]
    right = plain(model, rows)
    for shape in (dict(num_draft_tokens=3), dict(tree=[2, 2])):
        one, other = both(model, rows, model, eos_token_id=stops, pad_token_id=0, **shape)
        assert torch.equal(one, other)
        fuzz = FuzzDrafter(right, VOCAB, seed=rows)
        one, other = both(model, rows, fuzz, eos_token_id=stops, pad_token_id=0, max_new_tokens=NEW, **shape)
        assert torch.equal(one, other)
    assert rows == 1 or len({int((row[9:] != 0).sum()) for row in one}) > 1


def test_vocabulary_padding_or_tokenizer_mismatch() -> None:
    """Draft heads padded beyond and short of the target's: tokens of the target, its law, and no id outside of it."""
    model = make_model()
    for vocab in (VOCAB + 14, VOCAB - 6):
        for shape in (dict(num_draft_tokens=4), dict(tree=[3, 2])):
            one, other = both(model, 3, small(vocab), **shape)
            assert torch.equal(one, other)
    tiny = make_model(vocab_size=7, eos_token_id=None)
    for vocab in (16, 5):
        assert law_of_tokens(tiny, rows=1500, rule="exact", drafter=small(vocab=vocab)) > 0.001


def test_greedy_output_differs_from_plain() -> None:
    """float32: never. bfloat16: only where the two best ids are within rounding of each other, which a bug is not."""
    for seed in range(2):
        model = repeating(make_model(seed=seed))
        for drafter in ("ngram", small(), "sparse"):
            assert torch.equal(plain(model, 3), fast(model, 3, drafter))
    half = repeating(make_model()).to(torch.bfloat16)
    ids, mask = prompts(3)
    shared: dict[str, Any] = dict(
        input_ids=ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    half.generation_config.eos_token_id = None
    one = half.generate(**shared)
    other = half.generate(custom_generate=speculative, drafter=half, num_draft_tokens=4, **shared)
    for row in range(3):
        apart = (one.sequences[row, 9:] != other.sequences[row, 9:]).nonzero()
        if len(apart):
            best = one.logits[int(apart[0])][row].float().topk(2).values
            assert float(best[0] - best[1]) < 0.1


def test_reuse_with_stale_or_uninitialised_draft_caches() -> None:
    """There is no prefix cache here; what outlives a round is the draft model's own cache, and what outlives a call is
    a drafter object. Acceptance is the same with and without reuse, and the draft cache holds exactly the text."""
    model = repeating(make_model())
    ids, mask = prompts(3)

    def calls(drafter: Any, which: slice) -> tuple[int, list[int]]:
        out = model.generate(
            input_ids=ids[which], attention_mask=mask[which], max_new_tokens=NEW, do_sample=False, eos_token_id=None,
            custom_generate=speculative, drafter=drafter, num_draft_tokens=4, return_dict_in_generate=True,
        )  # fmt: skip
        return out.stats["target_calls"], out.stats["accepted_per_position"]

    model.generation_config.eos_token_id = None
    drafter = ModelDrafter(CausalLMTarget(small(), NEW))
    fresh = [calls(ModelDrafter(CausalLMTarget(small(), NEW)), one) for one in (slice(0, 3), slice(1, 2))]
    assert [calls(drafter, one) for one in (slice(0, 3), slice(1, 2), slice(0, 3))] == [*fresh, fresh[0]]

    target, own = CausalLMTarget(model, NEW), CausalLMTarget(small(), NEW)
    inner = ModelDrafter(own)
    right = plain(model, 3)

    def check(step: Round) -> None:
        run = inner._run
        if run is None or step.index == 0:
            return
        held = run.cache.host_lengths
        for live, row in enumerate(step.rows):
            text = torch.cat([ids[row][mask[row] == 1], right[row]])[: held[live]]
            alone = CausalLMTarget(small(), NEW)
            cache = alone.new_cache(1, 8)
            alone.prefill(type(prompt(1)).from_padded(text[None]), cache)
            for layer in range(own.config.num_hidden_layers):
                for one, other in zip(run.cache.layer(layer), cache.layer(layer), strict=True):
                    torch.testing.assert_close(
                        one[live, :, : held[live]], other[0, :, : held[live]], atol=1e-5, rtol=1e-4
                    )

    policy = _Alternating()
    Engine(target, make_rule("coupled"), {"small": inner, "fuzz": FuzzDrafter(right, VOCAB, 0)}).decode(
        prompt(3), torch.arange(3), warp=GREEDY, policy=policy, on_round=check
    )


class _Alternating(FixedPolicy):
    """Two drafters in turn, so that each has rounds it did not draft."""

    name = ""

    def _arms(self, drafters: list[str], limits: Any) -> Any:
        from mediaspec.core.arm import Arm

        return tuple(Arm(name, 3) for name in drafters)

    def _pick(self, rows: Any, costs: Any, usable: Any) -> int:
        return (self._now().rounds // 2) % 2


def test_trees_wider_than_one_with_scheduling() -> None:
    """There are no pages and no overlap scheduling here; random trees with random accepted paths in ragged batches,
    whose nodes are moved together in the store, are what is left of the class."""
    for family in ("Llama", "Mistral"):
        model = make_model(family)
        right = plain(model, 4)
        for seed in range(4):
            tree = random_tree(seed, 3 + 3 * seed)
            assert torch.equal(right, fast(model, 4, FuzzDrafter(right, VOCAB, seed, wrong=0.15), tree=tree))


class Brackets(LogitsProcessor):
    """A grammar: "(" one to three letters ")" and the end. It refuses to be asked about any other text."""

    OPEN, CLOSE, END, LETTERS = 3, 4, 2, list(range(5, 30))

    def __init__(self, columns: int, alone: bool) -> None:
        self.columns, self.alone, self.asked = columns, alone, 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        out = torch.full_like(scores, float("-inf"))
        for row, text in enumerate(input_ids[:, self.columns :].tolist()):
            self.asked += 1
            out[row, self.follow(text)] = scores[row, self.follow(text)]
        return out

    def follow(self, text: list[int]) -> list[int]:
        written = text
        while not self.alone and written and written[-1] == 0:
            written = written[:-1]  # padding: a row that has ended, or is not asked about
        if not written:
            return [self.OPEN]
        assert written[0] == self.OPEN and self.END not in written[:-1], f"asked about {text}"
        if written[-1] == self.END:
            assert not self.alone, f"asked about {text}, which has ended"
            return [0]
        if self.CLOSE in written:
            assert written[-1] == self.CLOSE, f"asked about {text}"
            return [self.END]
        assert all(one in self.LETTERS for one in written[1:]) and len(written) <= 4, f"asked about {text}"
        return (
            [self.CLOSE] if len(written) == 4 else self.LETTERS if len(written) == 1 else [*self.LETTERS, self.CLOSE]
        )


@pytest.mark.parametrize("rows", [1, 3])
def test_grammar_matchers_asked_after_termination(rows: int) -> None:
    """The nearest to a matcher are processors and `prefix_allowed_tokens_fn`. Drafts of a model that knows no grammar
    leave it, and drafts that follow it reach its end inside of a block: neither may be told to the matcher."""
    model = make_model()
    for drafter in (model, small(), NgramDrafter()):
        for shape in (dict(num_draft_tokens=6), dict(tree=[3, 2, 1, 1])):
            if "tree" in shape and isinstance(drafter, NgramDrafter):
                continue
            matcher = Brackets(9, alone=rows == 1)
            settings = dict(eos_token_id=2, pad_token_id=0, logits_processor=LogitsProcessorList([matcher]))
            one, other = both(model, rows, drafter, max_new_tokens=8, **settings, **shape)
            assert torch.equal(one, other) and bool((other[:, 9] == 3).all()) and matcher.asked > 0
    right = plain(model, rows, logits_processor=LogitsProcessorList([Brackets(9, False)]), forced_eos_token_id=None)
    copies = FuzzDrafter(right, VOCAB, 1, wrong=0.0)  # drafts beyond the end of the grammar
    settings = dict(eos_token_id=2, pad_token_id=0, logits_processor=LogitsProcessorList([Brackets(9, rows == 1)]))
    one, other = both(model, rows, copies, max_new_tokens=NEW, num_draft_tokens=7, **settings)
    assert torch.equal(one, other)

    matcher = Brackets(0, alone=rows == 1)

    def allowed(batch: int, ids: Tensor) -> list[int]:
        return matcher.follow(ids[9:].tolist())

    one, other = both(
        model, rows, model, max_new_tokens=8, num_draft_tokens=6, eos_token_id=2, pad_token_id=0,
        prefix_allowed_tokens_fn=allowed,
    )  # fmt: skip
    assert torch.equal(one, other)


def test_random_generator_not_rewound_on_roll_back() -> None:
    """Noise is a function of seed and position: rejected drafts use none up, in any number and of any shape; the
    global generator is read once per call, for the rows' seeds."""
    model = make_model()
    model.generation_config.eos_token_id = None
    ids, mask = prompts(3)
    shared: dict[str, Any] = dict(
        input_ids=ids, attention_mask=mask, max_new_tokens=NEW, do_sample=True, top_k=0, eos_token_id=None,
        custom_generate=speculative,
    )  # fmt: skip
    right = model.generate(drafter="none", row_seeds=[7, 8, 9], **shared)[:, 9:]
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    for wrong in (0.0, 0.3, 1.0):
        for shape in (dict(num_draft_tokens=1), dict(num_draft_tokens=5), dict(tree=[3, 2])):
            drafter = FuzzDrafter(right, VOCAB, 3, wrong=wrong)
            out = model.generate(drafter=drafter, row_seeds=[7, 8, 9], **shared, **shape)
            assert torch.equal(out[:, 9:], right)
    assert torch.equal(before, torch.random.get_rng_state())
    model.generate(drafter="ngram", **shared)
    after = torch.random.get_rng_state()
    torch.manual_seed(5)
    torch.randint(2**63 - 1, (3,))
    assert torch.equal(after, torch.random.get_rng_state())


def test_mask_builder_off_by_one_for_padded_rows() -> None:
    """Padding of every width on either side against the model's own forward over the bare prompt, for blocks and for
    trees; encoder-decoder models, whose masks have two sides, are refused."""
    model = make_model("Qwen2")
    tree = TreeSpec.from_widths([2, 1])
    for left in (True, False):
        ids, mask = prompts(8)
        if not left:
            order = (1 - mask).argsort(dim=1, stable=True)
            ids, mask = ids.gather(1, order), mask.gather(1, order)
        target = CausalLMTarget(model, NEW)
        cache = target.new_cache(8, 12)
        first = target.prefill(type(prompt(1)).from_padded(ids, mask), cache).logits
        tokens = tokens_of(8, 5)
        block = target.score(tokens, cache).logits
        grown = target.score(tokens, cache, tree).logits
        for row in range(8):
            wanted = own_logits(model, row, tokens[row])
            torch.testing.assert_close(first[row, 0], wanted[0], atol=2e-5, rtol=1e-4)
            torch.testing.assert_close(block[row], wanted[1:], atol=2e-5, rtol=1e-4)
            path = own_logits(model, row, tokens[row, [0, 2, 4]])
            torch.testing.assert_close(grown[row, [0, 2, 4]], path[1:], atol=2e-5, rtol=1e-4)
    config = T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, decoder_start_token_id=0)
    encoder_decoder = T5ForConditionalGeneration(config)
    with pytest.raises(ValueError, match="not supported|decoder-only"):
        encoder_decoder.generate(input_ids=torch.tensor([[3, 4]]), max_new_tokens=3, custom_generate=speculative)


class LogitMemory(TorchDispatchMode):
    """The most bytes that tensors with V as last dimension held at one time, weights left out."""

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.vocab, self.hidden, self.now, self.peak = vocab, hidden, 0, 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(one, Tensor) and one.dim() and one.shape[-1] == self.vocab and self.hidden not in one.shape:
                self._count(one)
        return out

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self.seen:
            return
        self.seen.add(storage.data_ptr())
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, storage.data_ptr(), storage.nbytes())

    def _free(self, pointer: int, size: int) -> None:
        self.seen.discard(pointer)
        self.now -= size


@pytest.mark.parametrize("drafter", ["ngram", "model"])
def test_memory_of_logits_for_all_draft_rows_at_full_vocabulary(drafter: str) -> None:
    """V = 152,000. A prompt of 64 tokens has logits for its last position alone, and a round holds a few copies of the
    K + 1 scored rows: logits, their law, the noise. No law of the draft is kept where rule and draft share noise."""
    vocab, hidden, length = 152_000, 8, 3
    sizes: dict[str, Any] = dict(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, eos_token_id=None,
    )  # fmt: skip
    model = make_model(**sizes)
    model.generation_config.eos_token_id = None
    ids = torch.randint(3, vocab, (1, 64), generator=torch.Generator().manual_seed(1))
    chosen = make_model(seed=2, **sizes) if drafter == "model" else NgramDrafter(2)
    with LogitMemory(vocab, hidden) as memory:
        model.generate(
            input_ids=ids, max_new_tokens=6, do_sample=True, top_k=0, custom_generate=speculative, drafter=chosen,
            num_draft_tokens=length, row_seeds=[1],
        )  # fmt: skip
    rows = memory.peak / (4 * vocab)
    assert length + 1 <= rows <= 6 * (length + 1), f"{rows:.1f} rows of logits at one time"
    assert memory.now <= 2 * 4 * vocab  # and nothing of them stays
