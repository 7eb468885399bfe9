"""Attention with a frame bias: every route against explicit logits, and the stored cases."""

import doctest
import importlib
import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from mediaspec.kernels.tiara_bias import MODES, ROUTES, FrameLayout, choose_route, framed_attention
from mediaspec.kernels.tiara_bias.cases import Case, cases, make_case, run
from mediaspec.kernels.tiara_bias.flex import with_flex
from mediaspec.kernels.tiara_bias.layout import same_set
from mediaspec.kernels.tiara_bias.lse import attend
from mediaspec.kernels.tiara_bias.subtract import MOST, subtract_frame

from .conftest import DEVICE, NUMPY_NOISE
from .test_kernel_compile import HARNESS, names_of_compiled

STORED = json.loads((Path(__file__).parents[1] / "data" / "tiara_joint_cases.json").read_text())
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
TORCH_ROUTES = ("dense", "columns", "split", "subtract")


def truth(case: Case) -> torch.Tensor:
    """The definition, token by token in float64, with loops where the code under test has index arithmetic."""
    layout, length = case.layout, case.q.shape[2]
    scale = case.q.shape[-1] ** -0.5 if case.scale is None else case.scale
    logits = scale * case.q.double() @ case.k.double().transpose(-1, -2)
    place = {layout.start + i: divmod(i, layout.tokens) for i in range(layout.frames * layout.tokens)}
    wide = layout.width or layout.tokens
    for i, (frame, at) in place.items():
        column = frame if case.delta.shape[-1] == layout.frames and length != layout.frames else i
        for j, (other, spot) in place.items():
            (y, x), (v, u) = divmod(at, wide), divmod(spot, wide)
            near = abs(y - v) <= case.radius and abs(x - u) <= case.radius
            if i == j or (frame == other and (case.mode == "frame" or (case.mode == "neighbourhood" and near))):
                logits[:, :, i, j] -= case.delta[:, :, column].double().to(logits.device)
    if case.key_mask is not None:
        logits = logits.masked_fill(~case.key_mask[:, None, None], -math.inf)
    return logits.softmax(-1) @ case.v.double()


def stored_joint(dtype: torch.dtype) -> Case:
    """Two text tokens, then three frames of four, from the stored numbers."""
    group = STORED["joint"]
    q, k, v = (torch.tensor(group[name], dtype=torch.float64)[None, None].to(dtype) for name in "qkv")
    delta = torch.tensor(group["delta"], dtype=torch.float64)[None, None].to(dtype)
    return Case("joint", q, k, v, delta, FrameLayout(3, 4, 2, width=2))


def gap(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double().to(found.device)).abs().max())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("route", TORCH_ROUTES)
def test_stored_joint(route, dtype):
    case = stored_joint(dtype)
    wanted = torch.tensor(STORED["joint"]["out"], dtype=torch.float64)
    assert gap(run(case, route)[0, 0], wanted) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("route", ["dense", "subtract"])
def test_stored_self_token(route, dtype):
    whole = stored_joint(dtype)
    q, k, v, delta = (x[:, :, 2:] for x in (whole.q, whole.k, whole.v, whole.delta))
    case = Case("self", q, k, v, delta, FrameLayout(3, 4, width=2), "self_token")
    wanted = torch.tensor(STORED["joint"]["self_token_out"], dtype=torch.float64)
    assert gap(run(case, route)[0, 0], wanted) < TOLERANCE[dtype]


@pytest.mark.parametrize("stored", STORED["subtract_amplification"], ids=lambda one: f"m{one['mass']}-d{one['delta']}")
def test_stored_amplification(stored):
    """c that the route reports gives the stored factor, and an error put into O_all grows by it."""
    mass, delta = stored["mass"], stored["delta"]
    # one query dimension: own frame's logit ln m, the other's ln (1 - m); O_all and O_S differ by the other's value
    q = torch.ones(1, 1, 2, 1, dtype=torch.float64)
    k = torch.tensor([math.log(mass), math.log1p(-mass)], dtype=torch.float64).view(1, 1, 2, 1)
    v = torch.zeros(1, 1, 2, 1, dtype=torch.float64)
    bias = torch.tensor([[[delta, 0.0]]], dtype=torch.float64)
    _, excess = subtract_frame(q, k, v, bias, FrameLayout(2, 1), 1.0, None)
    c = float(excess[0, 0, 0])
    assert (1 + c) / (1 - c) == pytest.approx(stored["factor"], rel=1e-9)
    limit = choose_route(q, FrameLayout(2, 1), delta_limit=delta)
    assert (limit.name == "subtract") == (1 - math.exp(-delta) <= MOST)


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_routes_agree(case):
    wanted = truth(case)
    for route in TORCH_ROUTES if case.mode == "frame" else ("dense", "subtract"):
        assert gap(run(case, route), wanted) < TOLERANCE[torch.float32], route
    assert gap(run(case), wanted) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_routes_agree_in_other_dtypes(dtype):
    for case in cases(dtype=dtype)[1:6]:
        wanted = truth(case)
        for route in TORCH_ROUTES:
            found = run(case, route)
            assert found.dtype == dtype and gap(found, wanted) < TOLERANCE[dtype], (case.name, route)


@pytest.mark.slow  # 15 s: torch loads its compiler
@pytest.mark.filterwarnings("ignore")
def test_flex_agrees():
    for case in cases():
        if case.name in ("text-both", "masked", "neighbourhood-text-first", "self_token-per-token"):
            scale = case.q.shape[-1] ** -0.5
            found = with_flex(
                case.q, case.k, case.v, case.delta, case.layout, case.mode, case.radius, scale, case.key_mask,
                compiled=False,
            )  # fmt: skip
            assert gap(found, truth(case)) < TOLERANCE[torch.float32], case.name


INTERPRETED = pytest.mark.skipif(
    DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET", "0") in ("", "0"), reason="Triton cannot run here"
)


def first_row(case: Case) -> Case:
    """One row and two heads of it: the interpreter takes a second for a few programs."""
    names = ("q", "k", "v", "delta", "key_mask")
    return replace(case, **{name: None if (x := getattr(case, name)) is None else x[-1:] for name in names})


@INTERPRETED
@pytest.mark.filterwarnings(NUMPY_NOISE)
@pytest.mark.parametrize(("size", "dtype"), [(32, torch.float32), (40, torch.float16), (128, torch.float16)])
def test_triton_agrees(size, dtype):
    """bfloat16 is for a device: the interpreter multiplies its bits as integers."""
    pytest.importorskip("triton")
    for case in cases(size, DEVICE, dtype):
        if case.name in ("masked", "strong", "neighbourhood-per-token", "self_token-text-first"):
            case = first_row(case)
            assert gap(run(case, "triton"), truth(case)) < TOLERANCE[dtype], case.name


@INTERPRETED
@pytest.mark.filterwarnings(NUMPY_NOISE)
def test_triton_crosses_tiles():
    """Frames longer and shorter than a tile, borders inside of tiles, tiles without a video row."""
    pytest.importorskip("triton")
    for layout, behind in ((FrameLayout(3, 71, 90), 3), (FrameLayout(11, 17, 1), 130)):
        case = make_case(layout, behind, 1, 1, 32, device=DEVICE)
        assert gap(run(case, "triton"), run(case, "dense")) < TOLERANCE[torch.float32]


COMPILED = (
    HARNESS
    + """
from mediaspec.kernels.tiara_bias.cases import cases, run
size = int(sys.argv[2])
for dtype, name in ((torch.bfloat16, "neighbourhood-masked"), (torch.bfloat16, "video"), (torch.float32, "masked")):
    run(next(case for case in cases(size, dtype=dtype) if case.name == name), "triton")
print(" ".join(sorted(compiled)))
"""
)


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "size"), [(90, 128), (80, 128), (80, 40)])
def test_triton_compiles(capability, size):
    pytest.importorskip("triton")
    assert names_of_compiled(COMPILED, capability, size) == {"_framed_kernel"}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [32, 64, 128])
def test_routes_agree_on_a_device(size, dtype):
    for case in cases(size, "cuda", dtype):
        wanted = truth(case)
        for route in ROUTES:
            if case.mode != "frame" and route in ("columns", "split"):
                continue
            assert gap(run(case, route), wanted) < TOLERANCE[dtype], (case.name, route)


def test_log_sum_exp_is_that_of_the_logits():
    case = cases()[5]
    out, lse = attend(case.q, case.k, case.v, 0.25, case.key_mask)
    logits = 0.25 * case.q.double() @ case.k.double().transpose(-1, -2)
    logits = logits.masked_fill(~case.key_mask[:, None, None], -math.inf)
    assert gap(lse, logits.logsumexp(-1)) < 2e-5
    assert gap(out, logits.softmax(-1) @ case.v.double()) < 2e-5


def test_zero_bias_is_plain_attention():
    for case in cases():
        if case.name == "none":
            plain = F.scaled_dot_product_attention(case.q, case.k, case.v)
            assert torch.equal(run(case, "subtract"), plain)


def test_text_queries_are_plain():
    case = make_case(FrameLayout(3, 5, 4), 6, most=3.0)
    plain = F.scaled_dot_product_attention(case.q, case.k, case.v)
    for route in TORCH_ROUTES:
        found = run(case, route)
        for rows in (slice(0, 4), slice(19, None)):
            assert torch.allclose(found[:, :, rows], plain[:, :, rows], atol=1e-6), route
        assert not torch.allclose(found[:, :, 4:19], plain[:, :, 4:19], atol=1e-3), route


def test_set_of_a_neighbourhood():
    layout = FrameLayout(2, 6, 1, width=3)
    rows = torch.arange(14)
    near = same_set(layout, "neighbourhood", 1, rows, rows)
    assert near[1].nonzero().flatten().tolist() == [1, 2, 4, 5]  # a corner of frame 0
    assert near[8].nonzero().flatten().tolist() == [7, 8, 9, 10, 11, 12]  # the middle column of frame 1
    assert not near[0].any() and not near[13].any()
    assert same_set(layout, "frame", 0, rows, rows)[3].nonzero().flatten().tolist() == [1, 2, 3, 4, 5, 6]


def test_subtract_gives_way_where_it_would_lose_digits():
    """Queries that look at themselves alone: c = 0.99 and more, and the route hands over to a stable one."""
    q = 40 * torch.eye(6, 8)[None, None]
    v = torch.randn(1, 1, 6, 8, generator=torch.Generator().manual_seed(0))
    case = Case("", q, q / 40, v, torch.full((1, 1, 6), 9.0), FrameLayout(6, 1, width=1))
    out, excess = subtract_frame(q, q / 40, v, case.delta, case.layout, 8**-0.5, None)
    wanted = run(replace(case, **{name: getattr(case, name).double() for name in ("q", "k", "v", "delta")}), "dense")
    assert float(excess.max()) > 0.99 and gap(out, wanted) > 2e-5
    for mode in MODES:
        assert gap(run(replace(case, mode=mode), "subtract"), wanted) < 2e-5, mode


def test_self_token_in_16_bits_keeps_its_logits_wide():
    """Own logits of 20 to 60: rounded to bfloat16 their masses would be off by a tenth."""
    case = make_case(FrameLayout(3, 6, width=3), 0, 1, 1, 32, dtype=torch.bfloat16)
    case = replace(case, q=4 * case.q, k=4 * case.q, mode="self_token")
    assert gap(run(case, "subtract", 1.5), truth(case)) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("route", ["dense", "columns"])
def test_gradients(route):
    case = make_case(FrameLayout(3, 4, 1), 1, 1, 1, 8, dtype=torch.float64)
    q, delta = case.q.clone().requires_grad_(), case.delta.double().requires_grad_()
    framed_attention(q, case.k, case.v, delta, case.layout, route=route).square().sum().backward()
    wanted_q, wanted_delta = q.grad.clone(), delta.grad.clone()
    q.grad = delta.grad = None
    out = framed_attention(q, case.k, case.v, delta, case.layout)  # auto keeps to routes with a gradient
    out.square().sum().backward()
    assert gap(q.grad, wanted_q) < 1e-9 and gap(delta.grad, wanted_delta) < 1e-9
    with pytest.raises(ValueError, match="no_grad"):
        framed_attention(q, case.k, case.v, delta, case.layout, route="subtract")


@pytest.mark.parametrize(
    "module", ["kernels.tiara_bias", "kernels.tiara_bias.layout", "attention.frame_row"], ids=lambda name: name
)
def test_examples(module):
    result = doctest.testmod(importlib.import_module(f"mediaspec.{module}"))
    assert result.attempted > 0 and result.failed == 0


def test_choice_says_why(monkeypatch):
    q = torch.zeros(1, 1, 12, 8)
    layout = FrameLayout(3, 4, width=2)
    assert choose_route(q, layout, delta_limit=0.7).name == "subtract"
    assert choose_route(q, layout, delta_limit=1.7).name == "split"
    assert choose_route(q, layout).name == "split"
    assert choose_route(q, layout, mode="self_token", delta_limit=5.0).name == "dense"
    assert "0.7" in choose_route(q, layout, delta_limit=0.7).reason
    assert choose_route(q, layout, needs_grad=True).name == "columns"
    monkeypatch.setenv("MEDIASPEC_KERNELS", "reference")
    assert choose_route(q, layout, delta_limit=5.0).name == "split"
    monkeypatch.setenv("MEDIASPEC_KERNELS", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose_route(q, layout, delta_limit=5.0).name == "triton"
    assert choose_route(q.double(), layout, delta_limit=5.0).name == "split"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"route": "fast"}, "unknown, known are"),
        ({"route": "columns", "mode": "self_token"}, "whole frames"),
        ({"route": "flex"}, "CUDA"),
        ({"mode": "block"}, "write one of"),
        ({"mode": "neighbourhood", "layout": FrameLayout(3, 4)}, "width"),
        ({"layout": FrameLayout(4, 4)}, "need 16 tokens"),
        ({"delta": torch.zeros(1, 1, 5)}, "3 frames or 12 tokens"),
        ({"key_mask": torch.zeros(1, 11, dtype=torch.bool)}, "key_mask"),
        ({"k": torch.zeros(1, 1, 11, 8)}, "three times"),
        ({"v": torch.zeros(1, 1, 12, 8, dtype=torch.float64)}, "one floating dtype"),
    ],
)
def test_refusals(change, words):
    q = torch.zeros(1, 1, 12, 8)
    given = {"k": q, "v": q, "delta": torch.zeros(1, 1, 3), "layout": FrameLayout(3, 4, width=2), **change}
    with pytest.raises(ValueError, match=words):
        framed_attention(q, **given)


def test_layout_refusals():
    for wrong in ({"frames": 0, "tokens": 4}, {"frames": 2, "tokens": 4, "width": 3}, {"frames": 1, "tokens": 0}):
        with pytest.raises(ValueError):
            FrameLayout(**wrong)


def test_compiles_without_breaks():
    """The route that serves every step has no host sync: it traces as one graph."""
    case = make_case(FrameLayout(3, 4, 1), 1)
    traced = torch.compile(
        lambda q, k, v, delta: framed_attention(q, k, v, delta, case.layout, delta_limit=1.5),
        fullgraph=True,
        backend="eager",
    )
    with torch.no_grad():
        assert torch.equal(traced(case.q, case.k, case.v, case.delta), run(case, delta_limit=1.5))
