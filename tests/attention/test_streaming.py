"""LightTransfer on a real class: which layers, what they see, how much is kept, and what does not change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from mediaspec.attention.register import LightTransferPolicy, attach_policy
from mediaspec.attention.selection import LayerSelection, LightTransfer
from mediaspec.attention.streaming import StreamingStore
from mediaspec.core.kv import KVStore
from mediaspec.core.prompt import TokenPrompt
from mediaspec.core.tree import TreeSpec
from mediaspec.targets.causal_lm import CausalLMTarget
from mediaspec.testing.check_target import check_target
from tests.attention.models import VOCAB, attentions, make_model

LAYERS, NEW, SINK, RECENT = 6, 40, 2, 10
SMALL: dict[str, Any] = dict(w_sink=SINK, w_recent=RECENT, w_last=8)


def prompt(lengths: list[int], seed: int = 1) -> TokenPrompt:
    ids = torch.randint(3, VOCAB, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(seed))
    return TokenPrompt(ids, torch.tensor(lengths), tuple(lengths))


def streaming(model: PreTrainedModel, **settings: Any) -> tuple[CausalLMTarget, LightTransferPolicy]:
    policy = LightTransferPolicy(LightTransfer(**{**SMALL, **settings}))
    attach_policy(model, policy)
    return CausalLMTarget(model, NEW), policy


def started(target: CausalLMTarget, given: TokenPrompt, extra: int = 8) -> tuple[StreamingStore, Tensor]:
    cache = target.new_cache(len(given), extra)
    logits = target.prefill(given, cache).logits
    assert isinstance(cache, StreamingStore)
    return cache, logits


@pytest.fixture
def windowed() -> Callable[..., Tensor]:
    """A model's own forward over one text in which some layers, from some position on, see sink and recent alone."""
    since: dict[int, int] = {}

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **more: Any) -> tuple[Tensor, None]:
        total = query.shape[2]
        q, k = torch.arange(total)[:, None], torch.arange(total)
        seen = k <= q
        if module.layer_idx in since:
            seen = seen & ((q < since[module.layer_idx]) | (k > q - RECENT) | (k < SINK))
        group = query.shape[1] // key.shape[1]
        weights = query @ key.repeat_interleave(group, 1).transpose(2, 3) * more["scaling"]
        law = weights.masked_fill(~seen, float("-inf")).softmax(-1)
        return (law @ value.repeat_interleave(group, 1)).transpose(1, 2).contiguous(), None

    AttentionInterface.register("windowed_reference", attend)

    def logits(model: PreTrainedModel, ids: Tensor, lazy: dict[int, int]) -> Tensor:
        since.clear()
        since.update(lazy)
        before = model.config._attn_implementation
        model.set_attn_implementation("windowed_reference")
        with torch.no_grad():
            found = model(input_ids=ids[None], use_cache=False).logits[0]
        model.set_attn_implementation(before)
        return found

    return logits


def test_layers_are_those_whose_attention_maps_are_laziest() -> None:
    model = make_model(num_hidden_layers=LAYERS)
    given = prompt([70, 45])
    per_row = []
    for row, length in enumerate(given.host_lengths):
        law = attentions(model, given.ids[row, :length])[:, :, -8:]
        key = torch.arange(length)
        per_row.append(law[..., (key < SINK) | (key >= length - RECENT)].sum(-1).mean((1, 2)))
    wanted = torch.stack(per_row).mean(0)
    target, policy = streaming(model, full_layers=2, judge="mass")
    cache, _ = started(target, given)
    report = policy.last
    assert report is not None and list(report.ratios) == list(range(LAYERS)) and not report.errors
    torch.testing.assert_close(torch.tensor(list(report.ratios.values())), wanted, atol=1e-5, rtol=1e-4)
    assert report.lazy_layers == tuple(sorted(wanted.argsort(descending=True)[:4].tolist()))
    assert sorted(cache.lazy.place) == list(report.lazy_layers)


@pytest.mark.parametrize("chunk", [16384, 32])
@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_layers_are_those_whose_output_changes_least(family: str, chunk: int) -> None:
    """Against attention maps, values and hidden states of the model's own forward, row by row."""
    more: dict[str, Any] = dict(layer_types=["full_attention"] * LAYERS) if family == "Gemma2" else {}
    model = make_model(family, num_hidden_layers=LAYERS, **more)
    given = prompt([70, 45])
    plain = CausalLMTarget(model, NEW)
    dense = plain.new_cache(2, 1)
    plain.prefill(given, dense)
    per_row = []
    for row, length in enumerate(given.host_lengths):
        with torch.no_grad():
            output = model(
                input_ids=given.ids[row : row + 1, :length], output_attentions=True, output_hidden_states=True
            )
        key = torch.arange(length)
        kept = (key < SINK) | (key >= length - RECENT)
        found = []
        for layer, law in enumerate(output.attentions):
            law = law[0, :, -8:]
            few = law * kept
            values = dense.values[layer, row, :, :length].repeat_interleave(2, 0)
            change = ((law - few / few.sum(-1, keepdim=True)) @ values).transpose(0, 1).flatten(1)
            scale = (law @ values).transpose(0, 1).flatten(1)
            if family == "Llama":
                with torch.no_grad():
                    change = model.model.layers[layer].self_attn.o_proj(change)
                scale = output.hidden_states[layer][0, -8:]
            found.append(float((change.norm(dim=1) / scale.norm(dim=1)).mean()))
        per_row.append(torch.tensor(found))
    wanted = torch.stack(per_row).mean(0)
    target, policy = streaming(model, full_layers=4, chunk=chunk, margin=99.0)
    started(target, given)
    assert policy.last is not None
    torch.testing.assert_close(torch.tensor(list(policy.last.errors.values())), wanted, atol=1e-5, rtol=1e-3)
    assert policy.last.lazy_layers == tuple(sorted(wanted.argsort()[:2].tolist()))
    assert all(not layer._forward_pre_hooks for layer in model.base_model.layers)


@pytest.mark.parametrize("lengths", [[70, 70], [70, 33, 9]])
@pytest.mark.parametrize("keep", [0, 3])
def test_texts_see_full_prompts_first_and_windows_afterwards(
    windowed: Callable[..., Tensor], lengths: list[int], keep: int
) -> None:
    """Prefill logits are the dense model's; scores behind it, with rejections, those of a masked dense model."""
    model = make_model(num_hidden_layers=LAYERS)
    given = prompt(lengths)
    tokens = prompt([NEW] * len(lengths), seed=9).ids
    target, policy = streaming(model, full_layers=keep)
    cache, first = started(target, given)
    assert policy.last is not None and len(policy.last.lazy_layers) == LAYERS - keep
    wanted = []
    for row, length in enumerate(lengths):
        text = torch.cat([given.ids[row, :length], tokens[row]])
        wanted.append(windowed(model, text, {layer: length for layer in policy.last.lazy_layers})[length - 1 :])
        torch.testing.assert_close(first[row, 0], wanted[row][0], atol=2e-5, rtol=1e-4)
    counts = [0] * len(lengths)
    while max(counts) < NEW - 6:
        target.score(prompt([6] * len(lengths), seed=3).ids, cache)  # rejected altogether
        ahead = torch.stack([row[count : count + 6] for row, count in zip(tokens, counts, strict=True)])
        got = target.score(ahead, cache).logits
        for row, count in enumerate(counts):
            torch.testing.assert_close(got[row], wanted[row][count + 1 : count + 7], atol=2e-4, rtol=1e-4)
        moved = [1 + (row + counts[row]) % 5 for row in range(len(lengths))]
        cache.advance(torch.tensor(moved), moved)
        counts = [count + more for count, more in zip(counts, moved, strict=True)]


def test_a_prompt_of_several_passes_gives_layers_up_early(windowed: Callable[..., Tensor]) -> None:
    model = make_model(num_hidden_layers=LAYERS)
    given = prompt([90, 61])
    target, policy = streaming(model, full_layers=2, chunk=16, margin=0.0)
    cache = target.new_cache(2, 8)
    assert isinstance(cache, StreamingStore)
    cuts: dict[int, int] = {}
    cut = cache._cut

    def noted(layer: int, lengths: Tensor) -> None:
        cuts[layer] = min(max(cache.host_lengths) + 16, 90)
        cut(layer, lengths)

    cache._cut = noted  # type: ignore[method-assign]
    first = target.prefill(given, cache).logits
    assert policy.last is not None and len(cuts) == 4 and set(cuts) == set(policy.last.lazy_layers)
    assert min(cuts.values()) < 90, "no layer was given up before the last pass"
    tokens = prompt([5, 5], seed=9).ids
    scored = target.score(tokens, cache).logits
    for row, length in enumerate(given.host_lengths):
        text = torch.cat([given.ids[row, :length], tokens[row]])
        since = {layer: min(at, length) for layer, at in cuts.items()}
        wanted = windowed(model, text, since)[length - 1 :]
        torch.testing.assert_close(first[row, 0], wanted[0], atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(scored[row], wanted[1:], atol=2e-5, rtol=1e-4)


def test_a_margin_keeps_layers_until_the_last_pass() -> None:
    """Two chunks must agree, and by how much: ratios of three layers, one to give up."""

    def closing(margin: float, *chunks: list[float]) -> list[list[int]]:
        settings = LightTransfer(w_sink=1, w_recent=2, w_last=2, judge="mass", margin=margin)
        selection = LayerSelection(settings, (0, 1, 2), 2, torch.tensor([99]), 99)
        given = []
        for chunk in chunks:
            selection._seen = {layer: ratio for layer, ratio in enumerate(chunk) if layer not in selection._gone}
            given.append(selection.close())
        return given

    assert closing(0.05, [0.9, 0.5, 0.6], [0.8, 0.7, 0.5], [0.9, 0.1, 0.1]) == [[], [0], []]
    assert closing(0.05, [0.9, 0.5, 0.6], [0.7, 0.8, 0.5], [0.9, 0.1, 0.1]) == [[], [], []]
    assert closing(0.05, [0.9, 0.5, 0.88], [0.9, 0.5, 0.6]) == [[], []]
    assert closing(0.0, [0.9, 0.5, 0.88], [0.9, 0.5, 0.6]) == [[], [0]]


@pytest.mark.parametrize("chunk", [16384, 64])
def test_memory_of_a_prefill(chunk: int) -> None:
    """One pass holds P + 1 full layers at most; what is left holds P."""
    model = make_model(num_hidden_layers=8)
    given = prompt([400])
    target, policy = streaming(model, full_layers=2, chunk=chunk, margin=0.0)
    cache, _ = started(target, given)
    report = policy.last
    assert report is not None and report.full_kv_bytes == 2 * 8 * 2 * (400 + NEW + 8) * 8 * 4
    if chunk > 400:
        assert report.peak_bytes < (2 + 2) / 8 * report.full_kv_bytes
    assert report.kv_bytes == cache.nbytes == cache.full.nbytes + cache.lazy.nbytes
    assert report.kv_bytes < (2 + 6 * 48 / 448 + 0.01) / 8 * report.full_kv_bytes


@pytest.mark.parametrize(
    "settings", [dict(full_layers=LAYERS), dict(w_recent=200), dict(full_layers=0, w_recent=66)], ids=str
)
def test_bits_do_not_change_where_nothing_is_left_out(settings: dict[str, Any]) -> None:
    """P = L; a window longer than prompt and text; a prompt too short to judge by."""
    given, tokens = prompt([68, 60]), prompt([NEW, NEW], seed=9).ids
    plain = CausalLMTarget(make_model(num_hidden_layers=LAYERS), NEW)
    target, _ = streaming(make_model(num_hidden_layers=LAYERS), **settings)
    caches = [one.new_cache(2, 8) for one in (plain, target)]
    dense, got = (one.prefill(given, cache).logits for one, cache in zip((plain, target), caches, strict=True))
    assert torch.equal(dense, got)
    for start in range(0, NEW, 5):
        part = tokens[:, start : start + 5]
        dense, got = (one.score(part, cache).logits for one, cache in zip((plain, target), caches, strict=True))
        assert torch.equal(dense, got)
        for cache in caches:
            cache.advance(torch.tensor([3, 4]), [3, 4])
    assert not caches[1].lazy.keys  # type: ignore[attr-defined]


@pytest.mark.parametrize("rows", [1, 2])
def test_a_ring_that_has_not_turned_gives_the_same_bits(rows: int) -> None:
    given, tokens = prompt([70] * rows), prompt([20] * rows, seed=9).ids
    plain = CausalLMTarget(make_model(num_hidden_layers=LAYERS), 200)
    model = make_model(num_hidden_layers=LAYERS)
    attach_policy(model, LightTransferPolicy(LightTransfer(lazy_layers=(1, 3, 4), w_recent=100)))
    target = CausalLMTarget(model, 200)
    caches = [one.new_cache(rows, 8) for one in (plain, target)]
    both = list(zip((plain, target), caches, strict=True))
    dense, got = (one.prefill(given, cache).logits for one, cache in both)
    assert torch.equal(dense, got) and sorted(caches[1].lazy.place) == [1, 3, 4]  # type: ignore[attr-defined]
    for start in range(0, 20, 4):
        dense, got = (one.score(tokens[:, start : start + 4], cache).logits for one, cache in both)
        assert torch.equal(dense, got)
        for cache in caches:
            cache.advance(torch.full((rows,), 4), [4] * rows)


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Gemma2"])
def test_the_conformance_suite(family: str) -> None:
    """Blocks, ragged rollback, selection and trees, with layers that keep three recent keys."""
    more: dict[str, Any] = {}
    if family == "Qwen2":
        more = dict(use_sliding_window=True, sliding_window=5, max_window_layers=3, num_hidden_layers=5)
    if family == "Gemma2":
        more = dict(sliding_window=5, head_dim=16, attn_logit_softcapping=2.0, num_hidden_layers=4)
    lazy = {"Llama": (0, 2), "Qwen2": (1, 2), "Gemma2": (3,)}[family]
    model = make_model(family, **more)
    attach_policy(model, LightTransferPolicy(LightTransfer(w_sink=1, w_recent=3, lazy_layers=lazy)))

    def condition(rows: int) -> TokenPrompt:
        whole = prompt([9, 4, 7, 1])
        return whole.select(torch.arange(rows))

    check_target(CausalLMTarget(model, 24), condition, token_ids=range(3, VOCAB), atol=2e-4)


def test_layers_that_slide_are_neither_judged_nor_counted() -> None:
    slides: dict[str, Any] = dict(use_sliding_window=True, sliding_window=5, max_window_layers=4)
    model = make_model("Qwen2", num_hidden_layers=LAYERS, **slides)
    target, policy = streaming(model)
    started(target, prompt([50]))
    assert policy.last is not None and list(policy.last.ratios) == [0, 1, 2, 3]
    assert len(policy.last.lazy_layers) == 2 and max(policy.last.lazy_layers) < 4
    model = make_model("Mistral", sliding_window=6)
    target, policy = streaming(model)
    cache, _ = started(target, prompt([50]))
    assert not cache.lazy.keys and policy.last is not None and policy.last.kv_bytes == policy.last.full_kv_bytes


def test_rows_fork_and_leave() -> None:
    """One prefill for several texts; a row keeps its keys when others go."""
    model = make_model(num_hidden_layers=LAYERS)
    target, _ = streaming(model, lazy_layers=(0, 1, 4))
    cache, _ = started(target, prompt([50, 31]))
    cache.select(torch.tensor([1, 0, 1]))
    tokens = prompt([12, 12, 12], seed=5).ids
    whole = target.score(tokens[:, :6], cache).logits
    cache.advance(torch.tensor([2, 6, 4]), [2, 6, 4])
    cache.select(torch.tensor([2]), [2])
    got = target.score(tokens[2:, 4:10], cache).logits
    other, _ = started(target, prompt([50, 31]).select(torch.tensor([1])))
    torch.testing.assert_close(target.score(tokens[2:, :6], other).logits, whole[2:], atol=2e-5, rtol=1e-4)
    other.advance(torch.tensor([4]), [4])
    torch.testing.assert_close(target.score(tokens[2:, 4:10], other).logits, got, atol=2e-5, rtol=1e-4)


def test_a_tree_path_moves_through_the_ring() -> None:
    tree = TreeSpec.from_widths([2, 1, 1])
    model = make_model(num_hidden_layers=LAYERS)
    target, _ = streaming(model, lazy_layers=(0, 1, 2, 3, 4, 5))
    given, inputs = prompt([50, 31]), prompt([tree.num_nodes + 1] * 2, seed=5).ids
    cache, _ = started(target, given, extra=12)
    path = torch.tensor([[0, 2, 4, 6], [0, 1, 3, 5]])
    for turn in range(11):  # the last pass writes over the end of the ring
        target.score((inputs + turn) % 47 + 3, cache, tree)
        cache.commit(path, torch.tensor([4, 3]))
        cache.set_host_lengths([n + more for n, more in zip(cache.host_lengths, (4, 3), strict=True)])
    got = target.score(inputs[:, :2], cache).logits
    chain, _ = started(target, given, extra=12)
    for turn in range(11):
        target.score(((inputs + turn) % 47 + 3).gather(1, path), chain)
        chain.advance(torch.tensor([4, 3]), [4, 3])
    torch.testing.assert_close(got, target.score(inputs[:, :2], chain).logits, atol=2e-4, rtol=1e-4)


def test_what_it_cannot_do_is_refused() -> None:
    target, _ = streaming(make_model(num_hidden_layers=LAYERS), lazy_layers=(0, 1))
    cache, _ = started(target, prompt([60]))
    with pytest.raises(ValueError, match="more `extra` positions"):
        target.score(prompt([45]).ids, cache)  # 44 slots of the ring are behind the sink, 10 of them the window
    with pytest.raises(ValueError, match="padding"):
        cache.hide(torch.zeros(1, 3, dtype=torch.bool))
    for wrong, word in ((dict(full_layers=9), "full_layers=9"), (dict(lazy_layers=(7,)), r"\[7\]")):
        model = make_model(num_hidden_layers=LAYERS)
        target, _ = streaming(model, **wrong)
        with pytest.raises(ValueError, match=word):
            target.new_cache(1, 4)
    both: dict[str, Any] = dict(full_layers=1, lazy_layers=(0,))
    for wrong in (dict(w_recent=0), dict(w_sink=-1), dict(min_head_ratio=2.0), dict(judge="sum"), both):
        with pytest.raises(ValueError):
            LightTransfer(**wrong)


def test_a_head_that_looks_far_back_keeps_its_layer() -> None:
    model = make_model(num_hidden_layers=LAYERS)
    target, policy = streaming(model, full_layers=0, min_head_ratio=1.0)
    cache, _ = started(target, prompt([60]))
    assert policy.last is not None and policy.last.lazy_layers == () and len(cache.full.keys) == LAYERS


def test_the_store_is_a_kv_store() -> None:
    target, _ = streaming(make_model(num_hidden_layers=LAYERS))
    cache, _ = started(target, prompt([60]))
    assert isinstance(cache, KVStore) and (cache.rows, cache.heads, cache.head_dim) == (1, 2, 8)
    assert cache.dtype == torch.float32 and cache.capacity == 60 + NEW + 8
