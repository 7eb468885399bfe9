"""Sparse attention: both implementations give what the listed and the newer slots give, and nothing else is read."""

from dataclasses import replace

import pytest
import torch

from mediaspec.kernels.sparse_attention import key_list, sparse_attention
from mediaspec.kernels.sparse_attention.cases import cases, make_case, run
from mediaspec.kernels.tree_attention import tree_attention

from .attention_truth import ORACLE, close, numbers, sparse_truth
from .conftest import DEVICE, NUMPY_NOISE

BOTH = pytest.mark.parametrize("impl", ["reference", "triton"])


@pytest.mark.filterwarnings(NUMPY_NOISE)
@pytest.mark.parametrize("case", cases(device=DEVICE), ids=lambda case: case.name)
def test_both_give_the_truth(case):
    out, lse = sparse_truth(case)
    for impl in ("reference", "triton"):
        found = run(case, impl)
        close(found.out, out, 1e-5)
        close(found.lse, lse, 1e-5)


@BOTH
@pytest.mark.filterwarnings(NUMPY_NOISE)
def test_oracle(impl):
    case = ORACLE["topk_sparse"]
    inputs, expected = case["inputs"], case["expected"]
    dtype = torch.float64 if impl == "reference" else torch.float32
    q, k, v = (numbers(inputs[name])[None].to(DEVICE, dtype) for name in ("q_decode", "k", "v"))
    # the query stands at the last text token, whose key it reads
    lengths = torch.tensor([k.shape[2] - 1], device=DEVICE)
    index = torch.tensor(expected["selected_per_kv_head"], device=DEVICE)[None]
    newer = torch.tensor([inputs["visual"]], device=DEVICE)
    sparse = sparse_attention(q, k, v, lengths, index, newer, need_lse=True, impl=impl)
    dense = tree_attention(q, k, v, lengths, need_lse=True, impl=impl)
    tolerance = 1e-10 if impl == "reference" else 2e-6
    close(sparse.out[0, :, 0], numbers(expected["sparse_out"]), tolerance)
    close(dense.out[0, :, 0], numbers(expected["dense_out"]), tolerance)
    close((sparse.lse - dense.lse).exp()[0, :, 0], numbers(expected["kept_mass_per_head"]), tolerance)


@BOTH
@pytest.mark.filterwarnings(NUMPY_NOISE)
def test_a_full_list_is_dense_attention(impl):
    case = make_case(3, [40, 300], 4, 2, 2, 8, device=DEVICE)
    index = torch.arange(300, device=DEVICE).expand(2, 2, -1).contiguous()
    dense = tree_attention(case.queries, case.keys, case.values, case.lengths, impl=impl)
    close(run(replace(case, index=index), impl).out, dense.out)


@BOTH
@pytest.mark.filterwarnings(NUMPY_NOISE)
def test_what_is_not_listed_is_not_read(impl):
    case = make_case(1, [50, 70], 5, 2, 1, 8, device=DEVICE)
    keys, values = torch.full_like(case.keys, torch.nan), torch.full_like(case.values, torch.nan)
    for b, (n, newer) in enumerate(zip(case.lengths.tolist(), case.newer.tolist())):
        needed = [j for j in case.index[b, 0].tolist() if j >= 0] + list(range(newer, n + 1)) + [0]
        keys[b, :, needed], values[b, :, needed] = case.keys[b, :, needed], case.values[b, :, needed]
    assert torch.equal(run(replace(case, keys=keys, values=values), impl).out, run(case, impl).out)


@BOTH
@pytest.mark.filterwarnings(NUMPY_NOISE)
def test_rows_do_not_depend_on_their_surroundings(impl):
    case = make_case(3, [280, 500], 270, 2, 1, 16, drafted=20, device=DEVICE)
    whole = run(case, impl)
    row = {
        name: value[:1] for name, value in vars(case).items() if isinstance(value, torch.Tensor)
    }  # fmt: skip
    alone = replace(case, **row)
    assert torch.equal(run(alone, impl).out, whole.out[:1]), "other rows"
    wider = torch.nn.functional.pad(case.index, (0, 300), value=-1)
    assert torch.equal(run(replace(case, index=wider), impl).out, whole.out), "more -1"
    for i in (0, 2):
        one = replace(case, queries=case.queries[:, :, i : i + 1], lengths=case.lengths + i)
        assert torch.equal(run(one, impl).out, whole.out[:, :, i : i + 1]), "one position at a time"


def test_key_list():
    joined = torch.tensor([[[5, 3, 5, -1, 0, 3]], [[-1, -1, -1, -1, -1, -1]], [[4, 3, 2, 1, 0, 9]]])
    wanted = [[[0, 3, 5, -1, -1, -1]], [[-1] * 6], [[0, 1, 2, 3, 4, 9]]]
    assert key_list(joined).tolist() == wanted
    assert key_list(joined.int()).dtype == torch.int32
    assert key_list(joined, least=8).shape == (3, 1, 8) and key_list(joined, least=8)[0, 0, 3:].eq(-1).all()
    assert key_list(joined[..., :0]).tolist() == [[[-1]], [[-1]], [[-1]]]
    with pytest.raises(ValueError, match="give int64 or int32"):
        key_list(joined.float())


def test_wrong_arguments():
    case = make_case(1, [9, 9], 3, 2, 1, 8)
    with pytest.raises(ValueError, match=r"\[2, 1, K\]"):
        run(replace(case, index=case.index[0]))
    with pytest.raises(ValueError, match="one slot for every row"):
        run(replace(case, newer=case.newer[:1]))
    with pytest.raises(ValueError, match="do not fit into"):
        run(replace(case, lengths=case.lengths + 1))


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("listed", [1, 256, 1000])
def test_triton_on_the_device(group, listed, dtype, tolerance):
    for count in (1, 9):
        case = make_case(count, [4097, 65, 2, 1000], listed, group, 2, 128, drafted=9, dtype=dtype, device="cuda")
        out, lse = sparse_truth(case)
        found = run(case, "triton")
        close(found.out, out, tolerance)
        close(found.lse, lse, tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_positions_alone_on_the_device(dtype):
    case = make_case(9, [280, 4000], 700, 4, 2, 128, drafted=70, dtype=dtype, device="cuda")
    whole = run(case)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for i in range(9):
            one = replace(case, queries=case.queries[:, :, i : i + 1], lengths=case.lengths + i)
            out = run(one).out
            torch.cuda.set_sync_debug_mode("default")
            assert torch.equal(out, whole.out[:, :, i : i + 1])
            torch.cuda.set_sync_debug_mode("error")
    finally:
        torch.cuda.set_sync_debug_mode("default")
