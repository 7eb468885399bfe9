"""The strip pass equals sums over the full attention matrix."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mediaspec.attention.logits import LogitForm
from mediaspec.attention.slash import slash_samples, slash_scores
from mediaspec.attention.strip import LazyWindow, StripSums, diagonal_sums, strip_lse, strip_pass

HEADS, SIZE = 4, 8


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def full_matrix(queries: Tensor, keys: Tensor, form: LogitForm, length: int) -> Tensor:
    """[H, rows, n] probabilities in float64 of one row's last queries, by the textbook."""
    rows = min(queries.shape[1], length)
    keys = keys[:, :length].double().repeat_interleave(queries.shape[0] // keys.shape[0], 0)
    logits = queries[:, -rows:].double() @ keys.transpose(1, 2) * form.scaling
    if form.softcap is not None:
        logits = form.softcap * torch.tanh(logits / form.softcap)
    at, key = torch.arange(length - rows, length)[:, None], torch.arange(length)
    seen = (key <= at) & (key > at - (form.window or length + 1))
    logits = logits.masked_fill(~seen, float("-inf"))
    if form.sinks is not None:
        column = form.sinks.double()[:, None, None].expand(-1, rows, 1)
        return torch.cat([logits, column], 2).softmax(2)[..., :-1]
    return logits.softmax(2)


def check(sums: StripSums, queries: Tensor, keys: Tensor, form: LogitForm, lazy: LazyWindow) -> None:
    for row, length in enumerate(sums.lengths.tolist()):
        law = full_matrix(queries[row], keys[row], form, length)
        rows = law.shape[1]
        at = torch.arange(length - rows, length)
        offsets = torch.zeros(HEADS, keys.shape[2], dtype=torch.float64)
        for r, position in enumerate(at.tolist()):
            offsets[:, : position + 1] += law[:, r, : position + 1].flip(1)

        def same(got: Tensor, wanted: Tensor) -> None:
            torch.testing.assert_close(got.double(), wanted, atol=3e-5, rtol=1e-5)

        same(sums.columns[row, :, :length], law.sum(1))
        assert float(sums.columns[row, :, length:].abs().sum()) == 0
        same(sums.offsets[row], offsets)
        same(sums.entropy[row], -torch.special.xlogy(law, law).sum((1, 2)))
        first = torch.zeros(HEADS, rows, 4, dtype=torch.float64)
        first[:, :, : min(4, length)] = law[:, :, :4]
        same(sums.leading[row, :, -rows:], first)
        key = torch.arange(length)
        kept = (key < lazy.sink) | (key >= length - lazy.recent)
        same(sums.lazy[row], law[:, -lazy.last :, kept].sum(2).mean(1))
        near = law.sum(2) * 0
        for r, position in enumerate(at.tolist()):
            near[:, r] = law[:, r, max(position - 31, 0) :].sum(1)
        same(sums.recent_mass(32)[row], near.mean(1))
        assert int(sums.rows[row]) == rows


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("rows", [1, 32, 64])
@pytest.mark.parametrize("total", [64, 65, 1000])
def test_sums_equal_the_full_matrix(total: int, rows: int, group: int) -> None:
    queries, keys = random(3, HEADS, rows, SIZE), random(3, HEADS // group, total, SIZE, seed=1)
    lengths = torch.tensor([total, total - 1, 33])
    form, lazy = LogitForm(0.9), LazyWindow(last=8, sink=2, recent=20)
    check(strip_pass(queries, keys, lengths, form, lazy=lazy), queries, keys, form, lazy)


@pytest.mark.parametrize(
    "form",
    [
        LogitForm(1.0, softcap=2.0),
        LogitForm(1.0, window=9),
        LogitForm(0.7, sinks=torch.tensor([0.5, -3.0, 2.0, 0.0])),
        LogitForm(0.7, 3.0, 40, torch.tensor([0.5, -3.0, 2.0, 0.0])),
    ],
    ids=["softcap", "window", "learned sink", "all"],
)
def test_every_term_of_the_logits_counts(form: LogitForm) -> None:
    queries, keys, lazy = random(2, HEADS, 32, SIZE), random(2, 2, 150, SIZE, seed=1), LazyWindow(16, 4, 30)
    lengths = torch.tensor([150, 20])
    check(strip_pass(queries, keys, lengths, form, lazy=lazy, tile=64), queries, keys, form, lazy)


def test_given_row_sums_are_used_and_agree() -> None:
    queries, keys, lengths = random(1, HEADS, 8, SIZE), random(1, 2, 70, SIZE, seed=1), torch.tensor([70])
    lse = strip_lse(queries, keys, lengths, LogitForm(1.0), tile=16)
    hidden = ~torch.ones(8, 70, dtype=torch.bool).tril(62)
    direct = (queries @ keys.repeat_interleave(2, 1).transpose(2, 3)).masked_fill(hidden, float("-inf"))
    torch.testing.assert_close(lse, direct.logsumexp(-1))
    twice = strip_pass(queries, keys, lengths, LogitForm(1.0), lse=lse + 1)
    once = strip_pass(queries, keys, lengths, LogitForm(1.0), lse=lse)
    torch.testing.assert_close(twice.columns * torch.e, once.columns)


def test_half_precision_is_summed_in_float32() -> None:
    queries, keys = random(1, HEADS, 64, SIZE).bfloat16(), random(1, 2, 500, SIZE, seed=1).bfloat16()
    form, lazy = LogitForm(1.0), LazyWindow()
    sums = strip_pass(queries, keys, torch.tensor([500]), form)
    assert sums.columns.dtype == torch.float32
    check(sums, queries, keys, form, lazy)


def test_memory_of_a_strip_is_a_tile_not_a_matrix() -> None:
    """No tensor of the pass is larger than a tile of probabilities or one of its vectors per head."""
    queries, keys, total = random(1, HEADS, 64, SIZE), random(1, 2, 2048, SIZE, seed=1), 2048
    largest = 0

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):  # sees every operator's result
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            result = function(*arguments, **(keywords or {}))
            if isinstance(result, Tensor):
                largest = max(largest, result.untyped_storage().nbytes())
            return result

    with Sizes():
        strip_pass(queries, keys, torch.tensor([total]), LogitForm(1.0))
    assert largest < HEADS * 64 * total * 4 / 8, f"{largest} bytes in one tensor"


def test_diagonals_of_one_entry_each() -> None:
    for rows, width in ((3, 5), (5, 3), (1, 4)):
        for row in range(rows):
            for column in range(width):
                mass = torch.zeros(rows, width)
                mass[row, column] = 1
                assert diagonal_sums(mass).argmax() == column + rows - 1 - row


def test_slash_scores_without_the_sinks_columns() -> None:
    """A head that only looks at key 0 has no slash, whatever the diagonals say."""
    keys = torch.zeros(1, 1, 40, 2)
    keys[0, 0, 0, 0] = 30.0
    queries = torch.tensor([1.0, 0.0]).expand(1, 1, 16, 2)
    sums = strip_pass(queries, keys, torch.tensor([40]), LogitForm(1.0))
    assert float(slash_scores(sums, without_sinks=False).max()) > 0.9
    assert float(slash_scores(sums).max()) < 1e-5
    assert slash_samples(sums)[0].tolist() == [16] * 25 + list(range(15, 0, -1))


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of the key heads"):
        strip_pass(random(1, 4, 2, 8), random(1, 3, 5, 8), torch.tensor([5]), LogitForm(1.0))
    with pytest.raises(ValueError, match="there are 5 keys"):
        strip_pass(random(1, 4, 2, 8), random(1, 2, 5, 8), torch.tensor([6]), LogitForm(1.0))
    with pytest.raises(ValueError, match="positive"):
        LogitForm(1.0, window=0)
