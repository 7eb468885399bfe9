"""The closed form of slashes: what constant queries and keys attend to, without an attention map."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mediaspec.attention.logits import LogitForm
from mediaspec.attention.rope_profile import Rotary, closed_form, rank_one
from mediaspec.attention.strip import strip_pass

SIZE, TOTAL = 16, 300


def rotary(layout: str, pairs: int = SIZE // 2) -> Rotary:
    return Rotary(100.0 ** (-torch.arange(pairs, dtype=torch.float64) / pairs), layout)


def vectors(seed: int) -> Tensor:
    return torch.randn(2, SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("pairs", [8, 4])
def test_rotation_is_undone_and_keeps_products(layout: str, pairs: int) -> None:
    turn, x = rotary(layout, pairs), vectors(0)[:, None].expand(2, 5, SIZE)
    at = torch.tensor([0, 3, 99, 100, 250])
    turned = turn.turn(x, at)
    torch.testing.assert_close(turn.undo(turned, at), x)
    torch.testing.assert_close(turned[:, 0], x[:, 0])
    torch.testing.assert_close(turned[..., 2 * pairs :], x[..., 2 * pairs :])
    # only distances matter
    later = turn.turn(x, at + 7)
    torch.testing.assert_close((turned[0, 2] * turned[1, 1]).sum(), (later[0, 2] * later[1, 1]).sum())


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("pairs", [8, 5])
def test_constant_queries_and_keys_have_the_closed_form(layout: str, pairs: int) -> None:
    turn, query, key = rotary(layout, pairs), vectors(1), vectors(2)
    at = torch.arange(TOTAL)
    keys = turn.turn(key[:, None].expand(-1, TOTAL, -1), at)[None]
    last = turn.turn(query[:, None], at[-1:])[None]
    form = LogitForm(SIZE**-0.5)
    measured = strip_pass(last, keys, torch.tensor([TOTAL]), form).offsets[0].double()
    profile = closed_form(query, key, turn, TOTAL, form.scaling)
    assert float((measured - profile).abs().max()) < 1e-6
    assert measured.topk(5).indices.tolist() == profile.topk(5).indices.tolist()
    wrong = closed_form(query, key, rotary({"half": "interleaved"}.get(layout, "half"), pairs), TOTAL, form.scaling)
    assert float((wrong - profile).abs().sum()) > 0.1


def test_a_sink_key_has_its_own_term() -> None:
    turn, query, key = rotary("half"), vectors(1), vectors(2)
    sink = 2 * query  # at position 0 no rotation; seen from far away at the last distance
    at = torch.arange(TOTAL)
    keys = turn.turn(key[:, None].expand(-1, TOTAL, -1), at)
    keys[:, 0] = sink
    last = turn.turn(query[:, None], at[-1:])[None]
    measured = strip_pass(last, keys[None], torch.tensor([TOTAL]), LogitForm(0.25)).offsets[0].double()
    profile = closed_form(query, key, turn, TOTAL, 0.25, sink)
    assert float((measured - profile).abs().max()) < 1e-6
    assert float((measured - closed_form(query, key, turn, TOTAL, 0.25)).abs().max()) > 1e-3


def test_rank_one_indicators() -> None:
    """One direction, two equal ones, noise around one: shares by hand."""
    noise = 0.01 * torch.randn(4000, SIZE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    one = torch.ones(4000, SIZE, dtype=torch.float64) + noise
    two = torch.zeros(4000, SIZE, dtype=torch.float64)
    two[::2, 0], two[1::2, 1] = 1.0, 1.0
    found = rank_one(torch.stack([x.T @ x for x in (one, two)]))
    assert float(found.share[0]) > 0.999 and abs(float(found.share[1]) - 0.5) < 1e-9
    assert found.components.tolist() == [1, 2]
    assert float(found.effective[0]) < 1.01 and abs(float(found.effective[1]) - 2) < 1e-6


def test_an_unknown_layout_is_refused() -> None:
    with pytest.raises(ValueError, match="'half' and 'interleaved'"):
        rotary("halves")
