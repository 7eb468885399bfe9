"""The edited temporal attention: the Triton kernel agrees with the reference, and what both promise."""

import doctest
from dataclasses import replace

import pytest
import torch

import mediaspec.kernels.tiara_temporal as op
from mediaspec.kernels.tiara_temporal import make_plan, tiara_temporal
from mediaspec.kernels.tiara_temporal.cases import cases, make_case, run, windowed_bins

from .conftest import DEVICE, NUMPY_NOISE
from .test_kernel_compile import HARNESS, names_of_compiled

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}

# the interpreter computes with numpy, which has no bfloat16 product
CASES = [case for case in cases(device=DEVICE) if case.name != "bfloat16" or DEVICE == "cuda"]


def compare(case):
    (wanted, means), (given, found) = run(case, "reference"), run(case, "triton")
    assert given.dtype == wanted.dtype == case.v.dtype and given.shape == wanted.shape
    torch.testing.assert_close(given.float(), wanted.float(), rtol=0, atol=TOLERANCE[case.q.dtype])
    if case.q.numel():
        torch.testing.assert_close(found, means, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings(NUMPY_NOISE)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_triton_agrees(case):
    compare(case)


@pytest.mark.filterwarnings(NUMPY_NOISE)
@pytest.mark.parametrize(("frames", "size"), [(5, 3), (7, 40), (16, 16), (17, 8), (32, 33)])
def test_triton_agrees_at_other_sizes(frames, size):
    compare(make_case("", 2, 3, frames, size, cap=True, booster=0.4, corner=True, device=DEVICE, seed=frames))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("frames", "size"), [(16, 24), (16, 40), (24, 80), (32, 160), (21, 128)])
def test_triton_agrees_on_the_device(frames, size, dtype):
    compare(make_case("", 300, 8, frames, size, cap=True, booster=0.4, dtype=dtype, device="cuda"))


def test_without_a_bias_it_is_attention():
    case = make_case("", 3, 2, 9, 20)
    plan = replace(case.plan, alpha=0.0)
    out, none = tiara_temporal(case.q, case.k, case.v, plan)
    assert none is None
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(case.q, case.k, case.v))


def test_directions_carry_the_energies():
    bins = windowed_bins(12, 5, 7)
    plan = make_plan(bins, 3, 6, alpha=1.0, booster=1.0, dtype=torch.float64)
    rows = torch.randn(4, 12, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    power = torch.einsum("mij,ijk->mik", rows.to(bins.dtype), bins).abs().square()
    square = torch.einsum("mij,icj->mic", rows, plan.basis).square()
    energy = torch.einsum("mic,iec->mei", square, plan.shares)
    for index, part in enumerate((power[..., 3:6], power[..., :6], power[..., 6:])):
        torch.testing.assert_close(energy[:, index], part.sum(-1))
    assert plan.shares[:, 0].min() >= 0 and plan.shares[:, 0].max() <= 1 and plan.directions == 6


@pytest.mark.parametrize("pool", ["heads", "space"])
def test_pooling_shares_the_bias(pool):
    case = make_case("", 6, 2, 9, 20, seed=1)
    arguments = case.q, case.k, case.v, case.plan
    pooled, _ = tiara_temporal(*arguments, pool=pool, videos=2)
    assert not torch.allclose(pooled, tiara_temporal(*arguments)[0], atol=1e-4)
    if pool == "space":  # videos do not mix
        alone, _ = tiara_temporal(*(one[3:] for one in arguments[:3]), case.plan, pool=pool)
        torch.testing.assert_close(pooled[3:], alone)
    same = [one[:1, :1].expand(6, 2, -1, -1) for one in arguments[:3]]  # equal matrices: the average is each of them
    torch.testing.assert_close(
        tiara_temporal(*same, case.plan, pool=pool, videos=2)[0], tiara_temporal(*same, case.plan)[0]
    )


def test_not_a_number_stays_in_its_matrix():
    case = make_case("", 3, 2, 9, 20)
    q = case.q.clone()
    q[1, 0, 4, 0] = torch.nan
    out, _ = tiara_temporal(q, case.k, case.v, case.plan)
    assert out[1, 0, 4].isnan().all() and out[[0, 2]].isfinite().all() and out[1, 1].isfinite().all()


def test_wrong_arguments():
    case = make_case("", 3, 2, 9, 20)
    with pytest.raises(ValueError, match=r"give \[R, H, N, D\]"):
        tiara_temporal(case.q, case.k[:, :, :5], case.v, case.plan)
    with pytest.raises(ValueError, match="make a plan for 5 frames"):
        tiara_temporal(*(one[:, :, :5] for one in (case.q, case.k, case.v)), case.plan)
    with pytest.raises(ValueError, match="make it torch.float64"):
        tiara_temporal(*(one.double() for one in (case.q, case.k, case.v)), case.plan)
    with pytest.raises(ValueError, match="no whole number of rows"):
        tiara_temporal(case.q, case.k, case.v, case.plan, pool="space", videos=2)
    with pytest.raises(ValueError, match="pool='time' is unknown"):
        tiara_temporal(case.q, case.k, case.v, case.plan, pool="time")
    with pytest.raises(ValueError, match="impl='reference'"):
        tiara_temporal(case.q, case.k, case.v, case.plan, pool="heads", impl="triton")
    for trained in range(3):  # values alone, as a LoRA on to_v has it
        given = [one.clone().requires_grad_(index == trained) for index, one in enumerate((case.q, case.k, case.v))]
        with pytest.raises(ValueError, match="no backward pass"):
            tiara_temporal(*given, case.plan, impl="triton")
    long = make_case("", 1, 1, 33, 4)
    with pytest.raises(ValueError, match="up to 32 frames"):
        run(long, "triton")


def test_examples():
    result = doctest.testmod(op)
    assert result.attempted > 0 and result.failed == 0


COMPILE = (
    HARNESS
    + """
from mediaspec.kernels.tiara_temporal.cases import make_case, run

frames, size = int(sys.argv[2]), int(sys.argv[3])
for dtype in (torch.float16, torch.bfloat16, torch.float32):
    run(make_case("", 2, 3, frames, size, dtype=dtype), "triton")
run(make_case("", 2, 3, frames, size, cap=True, booster=0.5, corner=True, dtype=torch.bfloat16), "triton")
print(" ".join(sorted(compiled)))
"""
)


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "frames", "size"), [(90, 16, 40), (80, 32, 160), (80, 21, 256)])
def test_kernel_compiles(capability, frames, size):
    pytest.importorskip("triton")
    assert names_of_compiled(COMPILE, capability, frames, size) == {"_tiara_kernel"}
