"""The merge: both implementations agree, joined parts are the whole, and empty parts leave no trace."""

from dataclasses import replace

import pytest
import torch

from mediaspec.kernels.lse_merge import lse_merge
from mediaspec.kernels.lse_merge.cases import cases, run
from mediaspec.kernels.tree_attention import tree_attention

from .attention_truth import ORACLE, close, numbers
from .conftest import DEVICE, NUMPY_NOISE

BOTH = pytest.mark.parametrize("impl", ["reference", "triton"])


def compare(case):
    wanted, given = run(case, "reference"), run(case, "triton")
    assert given[0].dtype == wanted[0].dtype
    torch.testing.assert_close(given[0], wanted[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(given[1], wanted[1], rtol=1e-6, atol=1e-5)


@pytest.mark.filterwarnings(NUMPY_NOISE)
@pytest.mark.parametrize("case", cases(device=DEVICE), ids=lambda case: case.name)
def test_triton_agrees(case):
    compare(case)


@pytest.mark.filterwarnings(NUMPY_NOISE)
@pytest.mark.parametrize(("parts", "size"), [(1, 16), (8, 5), (17, 40)])
def test_triton_agrees_at_other_sizes(parts, size):
    for case in cases(parts, 1, 3, 2, size, device=DEVICE, seed=parts):
        if case.name in ("sinks", "unread"):
            compare(case)


@pytest.mark.gpu
@pytest.mark.parametrize("parts", [1, 16, 65, 300])
@pytest.mark.parametrize("size", [64, 80, 128, 256])
def test_triton_agrees_on_the_device(parts, size):
    for case in cases(parts, 3, 8, 9, size, device="cuda"):
        compare(case)


def shaped(part: str, device: str = "cpu", dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp of one part of the oracle as [1, 1, M, D] and [1, 1, M]."""
    expected = ORACLE["lse_merge"]["expected"]
    return (
        numbers(expected[f"{part}out"])[None, None].to(device, dtype),
        numbers(expected[f"{part}lse"])[None, None].to(device, dtype),
    )


@BOTH
@pytest.mark.filterwarnings(NUMPY_NOISE)
def test_oracle(impl):
    device, dtype = (DEVICE, torch.float32) if impl == "triton" else ("cpu", torch.float64)
    one, two = shaped("part1_", device, dtype), shaped("part2_", device, dtype)
    outs, lse = torch.stack([one[0], two[0]]), torch.stack([one[1], two[1]])
    out, joint = lse_merge(outs, lse, impl=impl)
    tolerance = 1e-6 if impl == "triton" else 1e-10
    close(out, shaped("")[0], tolerance)
    close(joint, shaped("")[1], tolerance)
    nothing = torch.full_like(lse[1], -torch.inf)
    out, joint = lse_merge(torch.stack([one[0], 0 * two[0]]), torch.stack([one[1], nothing]), impl=impl)
    expected = ORACLE["lse_merge"]["expected"]
    assert float((out - one[0]).abs().max()) == expected["empty_part_out_err"] == 0
    assert float((joint - one[1]).abs().max()) == expected["empty_part_lse_err"] == 0


def test_oracle_parts_and_large_logits():
    case = ORACLE["lse_merge"]
    q, k, v = (numbers(case["inputs"][name])[None, None] for name in ("q", "k", "v"))

    def part(queries, first, last):
        """The prefix kernel, one query at a time, the last key in the slot of the query itself."""
        found = [
            tree_attention(queries[:, :, i : i + 1], k[:, :, first:last], v[:, :, first:last],
                           torch.tensor([last - first - 1]), need_lse=True)
            for i in range(queries.shape[2])
        ]  # fmt: skip
        return torch.cat([one.out for one in found], 2), torch.cat([one.lse for one in found], 2)

    split = case["inputs"]["split"]
    for name, first, last in (("part1_", 0, split), ("part2_", split, 10), ("", 0, 10)):
        out, lse = part(q, first, last)
        close(out, shaped(name)[0], 1e-11)
        close(lse, shaped(name)[1], 1e-11)
    pieces = [part(60 * q, 0, split), part(60 * q, split, 10)]
    out, lse = lse_merge(*map(torch.stack, zip(*pieces)))
    close(out, part(60 * q, 0, 10)[0], 1e-12)
    close(lse[0, 0], numbers(case["expected"]["large_logit_lse"]), 1e-9)


@BOTH
@pytest.mark.filterwarnings(NUMPY_NOISE)
def test_empty_parts_leave_no_trace(impl):
    case = next(case for case in cases(20, 1, 2, 2, device=DEVICE) if case.name == "sinks")
    out, lse = run(case, impl)
    more = (12, *case.outs.shape[1:])
    padded = replace(
        case,
        outs=torch.cat([case.outs, torch.full(more, torch.nan, device=DEVICE)]),
        lse=torch.cat([case.lse, torch.full(more[:-1], -torch.inf, device=DEVICE)]),
    )
    for got, wanted in zip(run(padded, impl), (out, lse)):
        assert torch.equal(got, wanted)


@BOTH
@pytest.mark.filterwarnings(NUMPY_NOISE)
def test_nothing_seen_gives_zero_and_a_sink_takes_its_mass_once(impl):
    found = {case.name: case for case in cases(device=DEVICE)}
    out, lse = run(found["nothing"], impl)
    assert not out.any() and torch.isneginf(lse).all()
    out, lse = run(found["only-sinks"], impl)
    assert not out.any()
    torch.testing.assert_close(lse, found["only-sinks"].sinks[None, :, None].expand_as(lse))
    (out, lse), (bare, bare_lse) = run(found["sinks"], impl), run(found["plain"], impl)
    left = torch.sigmoid(bare_lse - found["sinks"].sinks[:, None])
    torch.testing.assert_close(out, bare * left[..., None], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, bare_lse - left.log(), rtol=1e-5, atol=1e-5)


def test_wrong_arguments():
    case = cases()[1]
    with pytest.raises(ValueError, match=r"give \[S, B, H, M, D\]"):
        lse_merge(case.outs[0], case.lse[0])
    with pytest.raises(ValueError, match="keep both in float32"):
        lse_merge(case.outs.half(), case.lse)
    with pytest.raises(ValueError, match="one logit per query head"):
        lse_merge(case.outs, case.lse, torch.zeros(3))
    with pytest.raises(ValueError, match="impl='reference'"):
        lse_merge(case.outs.double(), case.lse.double(), impl="triton")
