"""Restricted passes: what they see, that they read nothing else, and what they leave behind."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mediaspec.attention.restriction import Visible, Window
from mediaspec.core.kv import KVStore
from mediaspec.core.prompt import TokenPrompt
from mediaspec.core.tree import TreeSpec
from mediaspec.targets.causal_lm import CausalLMTarget
from mediaspec.targets.kv_attention import attention
from mediaspec.targets.restricted import joined, parted_attention
from tests.attention.models import KEY_HEADS, LAYERS, make_model, tokens

LENGTHS = [[30], [30, 30], [30, 12, 21]]


class Layers:
    """The same choice in layers 0 and 2, everything in layer 1."""

    def __init__(self, choice: Callable[[], Visible]) -> None:
        self.choice, self.asked = choice, 0

    def visible(self, layer: int) -> Visible:
        self.asked += 1
        return None if layer == 1 else self.choice()


def start(lengths: list[int], dtype: torch.dtype = torch.float32) -> tuple[CausalLMTarget, KVStore]:
    target = CausalLMTarget(make_model().to(dtype), 20)
    ids = torch.stack([tokens(max(lengths), seed=row) for row in range(len(lengths))])
    cache = target.new_cache(len(lengths), 8)
    target.prefill(TokenPrompt(ids, torch.tensor(lengths), tuple(lengths)), cache)
    return target, cache


def some_keys(lengths: list[int], heads: int) -> Tensor:
    """[R, heads, 6] different positions per row and head, fewer in the last row."""
    rows = []
    for row, length in enumerate(lengths):
        draw = torch.Generator().manual_seed(row)
        rows.append(torch.stack([torch.randperm(length, generator=draw)[:6] for _ in range(heads)]))
    at = torch.stack(rows)
    at[-1, :, 4:] = -1
    return at


def seen_keys(choice: Visible, row: int, length: int, heads: int = KEY_HEADS) -> Tensor:
    """[heads, length] bool, the committed keys of a row that a layer may read."""
    seen = torch.zeros(heads, length, dtype=torch.bool)
    if isinstance(choice, Window):
        if choice.rows is not None and not choice.rows[row]:
            return ~seen
        key = torch.arange(length)
        return ((key < choice.sink) | (key >= length - choice.recent)).expand(heads, -1)
    assert choice is not None
    for head, at in enumerate(choice[row].expand(heads, -1)):
        seen[head, at[at >= 0]] = True
    return seen


def poison(cache: KVStore, choice: Visible, lengths: list[int]) -> None:
    """Whatever must not be read becomes a key and a value that nobody survives."""
    for layer in (0, 2):
        for row, length in enumerate(lengths):
            hidden = ~seen_keys(choice, row, length)
            if isinstance(choice, Tensor):
                hidden[:, 0] = False  # what -1 points at, with weight 0
            cache.keys[layer, row, :, :length][hidden] = float("nan")
            cache.values[layer, row, :, :length][hidden] = float("nan")


def choices(lengths: list[int]) -> dict[str, Visible]:
    return {
        "window": Window(2, 5),
        "no sink": Window(0, 4),
        "new keys alone": Window(0, 0),
        "keys": some_keys(lengths, 1),
        "keys per head": some_keys(lengths, KEY_HEADS),
    }


def masked(target: CausalLMTarget, cache: KVStore, choice: Visible, lengths: list[int], ids: Tensor) -> Tensor:
    """Logits of the same pass with a mask over all keys, by a pass of our own."""
    before = cache.keys.clone(), cache.values.clone()
    rows, count = ids.shape
    live = max(lengths) + count

    def attend(self: object, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, *_: object) -> Tensor:
        mask = torch.full((rows, q.shape[1], count, live), float("-inf"), dtype=q.dtype)
        for row, length in enumerate(lengths):
            heads = torch.ones(KEY_HEADS, length, dtype=torch.bool)
            heads = heads if layer == 1 else seen_keys(choice, row, length)
            whole = heads.repeat_interleave(q.shape[1] // KEY_HEADS, 0)[:, None].expand(-1, count, -1)
            mask[row, :, :, :length].masked_fill_(whole, 0.0)
            own = torch.ones(count, count).tril() > 0
            mask[row, :, :, length : length + count] = torch.where(own, 0.0, float("-inf"))
        return attention(q, k, v, mask, scale)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mediaspec.targets.kv_attention.KVPass.attend", attend)
        logits = target.score(ids, cache).logits
    cache.keys.copy_(before[0])
    cache.values.copy_(before[1])
    return logits


@pytest.mark.parametrize("name", choices([30]))
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@torch.inference_mode()
def test_sees_the_named_keys_and_reads_no_others(lengths: list[int], name: str) -> None:
    target, cache = start(lengths)
    choice = choices(lengths)[name]
    ids = torch.stack([tokens(4, seed=9 + row) for row in range(len(lengths))])
    wanted = masked(target, cache, choice, lengths, ids)
    poison(cache, choice, lengths)
    restriction = Layers(lambda: choice)
    with target.restricted(cache, restriction):
        whole = target.score(ids, cache).logits
        steps = []
        for place in range(4):
            steps.append(target.score(ids[:, place : place + 1], cache).logits)
            cache.advance(torch.ones_like(cache.lengths), [1] * len(lengths))
    torch.testing.assert_close(whole, wanted, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(torch.cat(steps, 1), wanted, atol=2e-5, rtol=1e-4)
    assert restriction.asked == LAYERS, "a layer is asked once per round"


@torch.inference_mode()
def test_rows_that_are_not_restricted_see_everything() -> None:
    lengths = [30, 12, 21]
    target, cache = start(lengths)
    ids = torch.stack([tokens(3, seed=9 + row) for row in range(3)])
    choice = Window(2, 5, (True, False, True))
    wanted = masked(target, cache, choice, lengths, ids)
    with target.restricted(cache, Layers(lambda: choice)):
        got = target.score(ids, cache).logits
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(target.score(ids, cache).logits[1], wanted[1], atol=2e-5, rtol=1e-4)
    assert float((target.score(ids, cache).logits[0] - wanted[0]).abs().max()) > 0.01


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@torch.inference_mode()
def test_tree_nodes_equal_their_chains(lengths: list[int]) -> None:
    target, cache = start(lengths)
    tree = TreeSpec.from_paths([(0,), (1,), (0, 0), (1, 0)])
    ids = torch.stack([tokens(5, seed=9 + row) for row in range(len(lengths))])
    for choice in (Window(2, 5), some_keys(lengths, 1)):
        restriction = Layers(lambda choice=choice: choice)  # type: ignore[misc]
        with target.restricted(cache, restriction):
            nodes = target.score(ids, cache, tree).logits
            for path in ([0, 1, 3], [0, 2, 4]):
                chain = target.score(ids[:, path], cache).logits
                torch.testing.assert_close(nodes[:, path], chain, atol=2e-5, rtol=1e-4)


@torch.inference_mode()
def test_the_joined_and_the_parted_way_agree() -> None:
    draw = torch.Generator().manual_seed(0)
    queries = torch.randn(2, 4, 3, 8, generator=draw)
    parts = []
    for count, shape in ((5, None), (7, (2, 1, 3, 7)), (4, (2, 2, 1, 4))):
        mask = None if shape is None else torch.where(torch.rand(shape, generator=draw) < 0.5, 0.0, float("-inf"))
        keys, values = (torch.randn(2, 2, count, 8, generator=draw) for _ in range(2))
        parts.append((keys, values, mask))
    keys, values, mask = joined(parts, 2)
    torch.testing.assert_close(
        parted_attention(queries, parts, 0.4), attention(queries, keys, values, mask, 0.4), atol=1e-6, rtol=1e-5
    )


def test_other_dtypes() -> None:
    target, cache = start([30, 12], torch.bfloat16)
    exact, other = start([30, 12])
    ids = torch.stack([tokens(3), tokens(3, seed=4)])
    found = []
    for one, store in ((target, cache), (exact, other)):
        with one.restricted(store, Layers(lambda: Window(1, 6))):
            found.append(one.score(ids, store).logits.float())
    assert float((found[0] - found[1]).abs().mean()) < 0.1


def test_retracing_shows_queries_and_writes_nothing() -> None:
    lengths = [30, 3]
    target, cache = start(lengths)
    keys, shown = cache.keys.clone(), {}

    def watch(layer, queries, keys, slots, form):  # type: ignore[no-untyped-def]
        shown[layer] = (queries.shape, keys.shape[2], slots.positions[0].tolist(), form.scaling)

    cache.watch = watch
    target.retrace(torch.full((2, 8), 7), cache)
    assert torch.equal(keys, cache.keys) and cache.lengths.tolist() == cache.host_lengths == lengths
    assert shown == {layer: ((2, 4, 8, 8), 30, list(range(22, 30)), 8**-0.5) for layer in range(LAYERS)}
    shown.clear()
    with target.restricted(cache, Layers(lambda: Window(1, 6))):
        target.score(torch.full((2, 1), 7), cache)
    assert not shown, "draft passes are not shown"


def test_wrong_choices_are_refused() -> None:
    target, cache = start([30, 12])
    for wrong in (torch.zeros(2, 3, 4, dtype=torch.int64), torch.zeros(2, 1, 4), torch.zeros(1, 1, 4).long()):
        choice = Layers(lambda wrong=wrong: wrong)  # type: ignore[misc]
        with pytest.raises(ValueError, match="visible keys"), target.restricted(cache, choice):
            target.score(torch.full((2, 1), 7), cache)
    with pytest.raises(ValueError, match="0 or more"):
        Window(-1, 3)
    cache.hide(torch.zeros(2, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="hidden slots"), target.restricted(cache, Layers(lambda: None)):
        pass
