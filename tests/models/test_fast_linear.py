import logging

import pytest
import torch
import torch.nn.functional as F

from mediaspec.models import fast_linear
from mediaspec.models.fast_linear import PreparedLinear, half_exact

SIZES = [(7, 5), (576, 192), (192, 512), (33, 65)]


def half_weight(out: int, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(out)
    return (torch.randn(out, size, generator=generator) / size**0.5).half().float()


def inputs(rows: int, size: int) -> torch.Tensor:
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize("kind", ["auto", "half", "onednn", "plain"])
@pytest.mark.parametrize(("out", "size"), SIZES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_are_those_of_float32(kind: str, out: int, size: int, with_bias: bool) -> None:
    weight, bias = half_weight(out, size), torch.linspace(-1, 1, out) if with_bias else None
    layer = PreparedLinear(weight, bias=bias, kind=kind)
    for shape in [(1, size), (2, size), (3, 4, size), (40, size)]:
        x = inputs(40, size)[: shape[0] * (shape[1] if len(shape) == 3 else 1)].view(shape)
        expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        result = layer(x)
        assert result.dtype == torch.float32
        torch.testing.assert_close(result.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["half", "onednn"])
@pytest.mark.parametrize(("out", "size"), SIZES)
def test_a_row_does_not_depend_on_its_neighbours(kind: str, out: int, size: int) -> None:
    """Plain decoding multiplies 2 rows, verification 12: their tokens must agree."""
    layer, x = PreparedLinear(half_weight(out, size), kind=kind), inputs(16, size)
    whole = layer(x)
    for rows in (1, 2, 6, 12):
        torch.testing.assert_close(layer(x[:rows].contiguous()), whole[:rows], atol=2e-6, rtol=0)


def test_half_is_taken_only_for_weights_it_keeps_exactly() -> None:
    exact, inexact = half_weight(8, 8), torch.full((8, 8), 0.1)
    assert half_exact(exact) and not half_exact(inexact) and not half_exact(torch.full((2, 2), 1e6))
    assert PreparedLinear(exact).kind == "half"
    assert PreparedLinear(inexact).kind == "onednn"
    with pytest.raises(ValueError, match="exactly representable"):
        PreparedLinear(inexact, kind="half")


def test_bfloat16_and_float16() -> None:
    weight, x = half_weight(64, 48), inputs(3, 48)
    expected = F.linear(x, weight)
    for dtype, tolerance in ((torch.bfloat16, 5e-2), (torch.float16, 5e-3)):
        layer = PreparedLinear(weight, dtype)
        torch.testing.assert_close(layer(x), expected, atol=tolerance, rtol=tolerance)
        assert layer(x.to(dtype)).dtype == dtype
    assert PreparedLinear(weight, torch.bfloat16).kind in ("onednn", "plain")
    with pytest.raises(ValueError, match="computes in float32"):
        PreparedLinear(weight, torch.bfloat16, kind="half")


def test_a_weight_is_read_once() -> None:
    weight = half_weight(6, 6)
    layer, x = PreparedLinear(weight), inputs(2, 6)
    before = layer(x)
    weight.zero_()
    torch.testing.assert_close(layer(x), before, atol=0, rtol=0)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"\[out, in\]"):
        PreparedLinear(torch.zeros(3))
    with pytest.raises(ValueError, match="allowed are auto"):
        PreparedLinear(torch.zeros(3, 3), kind="fast")
    assert PreparedLinear(torch.zeros(4, 3), kind="plain").describe() == "3 -> 4, float32, plain"


def test_without_the_operators_it_falls_back_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fast_linear, "_half_trial", lambda: "built without FBGEMM")
    monkeypatch.setattr(fast_linear, "_onednn_trial", lambda dtype: "built without oneDNN")
    fast_linear._say_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        layers = [PreparedLinear(half_weight(6, 6)) for _ in range(2)]
    assert [layer.kind for layer in layers] == ["plain", "plain"]
    assert "built without oneDNN" in layers[0].describe()
    assert len([record for record in caplog.records if "unprepared" in record.message]) == 1
    with pytest.raises(ValueError, match="built without oneDNN"):
        PreparedLinear(half_weight(6, 6), kind="onednn")
    fast_linear._say_once.cache_clear()
