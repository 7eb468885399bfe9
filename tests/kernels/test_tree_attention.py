"""Tree attention: both implementations give the truth, and no row's bits depend on what it does not see."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from mediaspec.core.kv import KVStore
from mediaspec.core.tree import TreeSpec
from mediaspec.kernels.lse_merge import lse_merge
from mediaspec.kernels.tree_attention import SPLIT, ancestor_words, tree_attention
from mediaspec.kernels.tree_attention.cases import Case, cases, make_case, make_tree, run

from .attention_truth import ORACLE, close, numbers, tree_truth
from .conftest import DEVICE, NUMPY_NOISE

BOTH = pytest.mark.parametrize("impl", ["reference", "triton"])
LENGTHS = [1, 63, 64, 65, 4097]


def compare(case: Case, impls: tuple[str, ...] = ("reference", "triton"), tolerance: float = 1e-5) -> None:
    out, lse = tree_truth(case)
    for impl in impls:
        found = run(case, impl)
        assert found.out.dtype == case.queries.dtype
        close(found.out, out, tolerance)
        close(found.lse, lse, tolerance)


@pytest.mark.filterwarnings(NUMPY_NOISE)
@pytest.mark.parametrize("case", cases(device=DEVICE), ids=lambda case: case.name)
def test_both_give_the_truth(case):
    compare(case)


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("count", [1, 9, 69])
def test_reference_at_all_sizes(count, group, tree):
    for lengths in ([1], [63], [64], [65], [4097], [65, 1, 64, 63]):
        compare(make_case(count, lengths, group, 1, 8, tree, seed=group), ("reference",))


@pytest.mark.filterwarnings(NUMPY_NOISE)
@pytest.mark.parametrize(
    ("count", "group", "lengths"), [(1, 4, [4097]), (9, 8, [63, 1]), (69, 1, [64]), (16, 4, [260])]
)
def test_triton_at_some_sizes(count, group, lengths):
    compare(make_case(count, lengths, group, 1, 8, tree=True, device=DEVICE), ("triton",))


@BOTH
@pytest.mark.filterwarnings(NUMPY_NOISE)
def test_integers_of_other_types(impl):
    case = make_case(5, [20, 7], 2, 1, 8, tree=True, device=DEVICE)
    other = replace(case, lengths=case.lengths.int(), words=case.words.view(torch.uint64), depths=case.depths.int())
    assert torch.equal(run(replace(other, window=9), impl).out, run(replace(case, window=9), impl).out)


@pytest.mark.slow
@pytest.mark.filterwarnings(NUMPY_NOISE)
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("count", [1, 9, 69])
def test_triton_at_all_sizes(count, group, tree):
    compare(make_case(count, LENGTHS, group, 1, 16, tree, device=DEVICE, seed=count), ("triton",))


@pytest.mark.slow
@pytest.mark.filterwarnings(NUMPY_NOISE)
@pytest.mark.parametrize("size", [5, 40, 64, 256])
def test_triton_at_other_head_sizes(size):
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 4e-3)):
        case = make_case(9, [65, 300], 4, 2, size, tree=True, dtype=dtype, device=DEVICE)
        compare(case, ("triton",), tolerance)


def test_sixteen_bit_caches_are_computed_in_float32():
    for dtype, tolerance in ((torch.float16, 1e-3), (torch.bfloat16, 8e-3)):
        case = make_case(9, [65, 1100], 4, 2, 16, tree=True, dtype=dtype)
        compare(case, ("reference",), tolerance)
        exact = run(replace(case, queries=case.queries.float(), keys=case.keys.float(), values=case.values.float()))
        close(run(case).lse, exact.lse, 2e-6)


# The oracle


def oracle_case(device: str, dtype: torch.dtype) -> Case:
    inputs, expected = ORACLE["tree"]["inputs"], ORACLE["tree"]["expected"]
    q, k, v = (numbers(inputs[name])[None, None].to(device, dtype) for name in ("q", "k", "v"))
    words = torch.tensor(expected["mask_bits"], device=device)[None, :, None]
    return Case("oracle", q, k, v, torch.tensor([inputs["prefix_len"]], device=device), words)


@BOTH
@pytest.mark.filterwarnings(NUMPY_NOISE)
def test_oracle(impl):
    expected = ORACLE["tree"]["expected"]
    case = oracle_case(DEVICE, torch.float64) if impl == "reference" else oracle_case(DEVICE, torch.float32)
    tolerance = 1e-11 if impl == "reference" else 2e-6
    found = run(case, impl)
    close(found.out[0, 0], numbers(expected["out"]), tolerance)
    close(found.lse[0, 0], numbers(expected["lse"]), tolerance)
    # every path from the root, run as a chain
    for node, seen in enumerate(expected["mask"]):
        path = [j for j, bit in enumerate(seen) if bit]
        slots = list(range(11)) + [11 + j for j in path]
        chain = replace(
            case, queries=case.queries[:, :, path], keys=case.keys[:, :, slots], values=case.values[:, :, slots],
            words=None,
        )  # fmt: skip
        close(run(chain, impl).out[0, 0, -1], numbers(expected["out"])[node], tolerance)


def test_oracle_of_the_two_halves():
    """Prefix and draft apart, as a maskless kernel and a masked one would compute them, then merged."""
    expected, case = ORACLE["tree"]["expected"], oracle_case("cpu", torch.float64)
    whole = run(case)
    draft = replace(case, keys=case.keys[:, :, 11:], values=case.values[:, :, 11:], lengths=torch.tensor([0]))
    alone = run(draft)
    prefix = case.queries @ case.keys[:, :, :11].mT / 2
    outs = torch.stack([prefix.softmax(-1) @ case.values[:, :, :11], alone.out])
    lse = torch.stack([prefix.logsumexp(-1), alone.lse])
    out, joint = lse_merge(outs, lse)
    assert float((out - whole.out).abs().max()) < 1e-12 and float((joint - whole.lse).abs().max()) < 1e-12
    close((lse[0] - lse[1]).sigmoid()[0, 0], numbers(expected["sigmoid_weight_prefix"]), 1e-11)


def test_words():
    expected = ORACLE["tree"]["expected"]
    assert ancestor_words(torch.tensor(expected["mask"]).bool())[:, 0].tolist() == expected["mask_bits"]
    spec = TreeSpec(tuple(ORACLE["tree"]["inputs"]["parent"][1:]))
    assert torch.equal(ancestor_words(spec.ancestor_tensor(torch.device("cpu")))[:, 0],
                       torch.tensor(expected["mask_bits"]))  # fmt: skip
    chain = ancestor_words(torch.ones(64, 64).tril().bool())[:, 0].tolist()
    assert chain == [(1 << i + 1) - 1 for i in range(63)] + [-1]
    mask, _ = make_tree(torch.Generator().manual_seed(0), 2, 130)
    words = ancestor_words(mask)
    assert words.shape == (2, 130, 3)
    for i, j in ((129, 128), (129, 64), (129, 63), (100, 70), (63, 63), (127, 127), (64, 0)):
        assert bool(words[1, i, j // 64] >> (j % 64) & 1) == bool(mask[1, i, j])
    assert words[:, :, 2].any(), "bits beyond the second word are in use"
    with pytest.raises(ValueError, match="give bool"):
        ancestor_words(mask.int())


# What a row's bits depend on


def seen_by(case: Case) -> torch.Tensor:
    """[1, M, M] bool on the CPU: the mask that the case's words pack."""
    count, words = case.queries.shape[2], case.words[0].tolist()
    return torch.tensor([[[bool(words[i][j // 64] >> (j % 64) & 1) for j in range(count)] for i in range(count)]])


@BOTH
@pytest.mark.filterwarnings(NUMPY_NOISE)
@pytest.mark.parametrize("group", [1, 3])
def test_a_chain_is_plain_decoding(impl, group):
    """Across the border of a piece, in ragged rows, with slots to spare."""
    case = make_case(7, [SPLIT - 3, 60], group, 1, 16, spare=16, device=DEVICE)
    whole = run(case, impl)
    for i in (0, 4, 6):
        one = replace(case, queries=case.queries[:, :, i : i + 1], lengths=case.lengths + i)
        found = run(one, impl)
        assert torch.equal(found.out, whole.out[:, :, i : i + 1])
        assert torch.equal(found.lse, whole.lse[:, :, i : i + 1])


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_a_chain_is_plain_decoding_at_real_head_sizes(group, size):
    case = make_case(9, [250, 1000, 61], group, 3, size, spare=16, seed=size)
    whole = run(case)
    for i in range(9):
        found = run(replace(case, queries=case.queries[:, :, i : i + 1], lengths=case.lengths + i))
        assert torch.equal(found.out, whole.out[:, :, i : i + 1])
        assert torch.equal(found.lse, whole.lse[:, :, i : i + 1])


@BOTH
@pytest.mark.filterwarnings(NUMPY_NOISE)
def test_other_rows_later_positions_and_spare_slots_change_nothing(impl):
    case = make_case(11, [70, 300], 3, 1, 16, tree=True, device=DEVICE)
    whole = run(case, impl).out
    alone = replace(case, **{name: getattr(case, name)[:1] for name in
                             ("queries", "keys", "values", "lengths", "words", "depths")})  # fmt: skip
    assert torch.equal(run(alone, impl).out, whole[:1]), "other rows"
    narrow = replace(alone, keys=alone.keys[:, :, :96], values=alone.values[:, :, :96])
    assert torch.equal(run(narrow, impl).out, whole[:1]), "spare slots"
    few = replace(case, queries=case.queries[:, :, :5], words=case.words[:, :5], depths=case.depths[:, :5])
    assert torch.equal(run(few, impl).out, whole[:, :, :5]), "later positions"


@BOTH
@pytest.mark.filterwarnings(NUMPY_NOISE)
@pytest.mark.parametrize("count", [9, 70])
def test_removing_a_node_leaves_those_that_do_not_see_it(impl, count):
    case = make_case(count, [60], 2, 1, 16, tree=True, device=DEVICE, seed=count)
    whole = run(case, impl)
    mask = seen_by(case)
    for node in (1, 8) if count == 9 else (35,):
        keys, values = case.keys.clone(), case.values.clone()
        keys[:, :, 60 + node], values[:, :, 60 + node] = 1e3, -1e4
        without = mask.clone()
        without[:, :, node] = False
        gone = replace(case, keys=keys, values=values, words=ancestor_words(without).to(DEVICE))
        found = run(gone, impl)
        others = ~mask[0, :, node].to(DEVICE)
        assert 0 < others.sum() < count
        assert torch.equal(found.out[:, :, others], whole.out[:, :, others])
        assert torch.equal(found.lse[:, :, others], whole.lse[:, :, others])
        assert not torch.equal(found.out, whole.out)


@BOTH
@pytest.mark.filterwarnings(NUMPY_NOISE)
def test_rows_that_fill_up_need_no_bit(impl):
    case = make_case(9, [0, 20], 2, 1, 8, tree=True, device=DEVICE)
    store = torch.randn(2, 2, 1, 48, 8, generator=torch.Generator().manual_seed(9)).to(DEVICE)
    store[0, :, :, :29], store[1, :, :, :29] = case.keys, case.values
    padded = replace(
        case, queries=F.pad(case.queries, (0, 0, 0, 7)), keys=store[0], values=store[1],
        words=F.pad(case.words, (0, 0, 0, 7)), depths=None,
    )  # fmt: skip
    found = run(padded, impl)
    assert torch.equal(found.out[:, :, :9], run(case, impl).out)
    assert not found.out.isnan().any() and not found.lse.isnan().any()


@BOTH
@pytest.mark.filterwarnings(NUMPY_NOISE)
def test_empty_prefix_and_extreme_logits(impl):
    case = make_case(3, [0, 0], 2, 1, 8, device=DEVICE)
    found = run(case, impl)
    first = case.values[:, :, 0].expand(-1, 2, -1)
    assert torch.equal(found.out[:, :, 0], first), "the root of an empty cache sees itself alone"
    wide = replace(case, queries=400 * case.queries)
    out, lse = tree_truth(wide)
    found = run(wide, impl)
    close(found.out, out, 1e-4)
    close(found.lse, lse, 1e-5)


@pytest.mark.filterwarnings(NUMPY_NOISE)
def test_the_kernel_reads_nothing_behind_the_new_positions():
    case = make_case(5, [7, 90], 2, 1, 8, device=DEVICE)
    keys, values = case.keys.clone(), case.values.clone()
    keys[0, :, 12:], values[0, :, 12:] = torch.nan, torch.nan
    assert torch.equal(run(replace(case, keys=keys, values=values), "triton").out, run(case, "triton").out)


# With the store


@BOTH
@pytest.mark.filterwarnings(NUMPY_NOISE)
@pytest.mark.parametrize("tree", [None, TreeSpec.from_widths([3, 2, 1])])
def test_over_a_store(impl, tree):
    g = torch.Generator().manual_seed(3)
    count = 4 if tree is None else tree.num_nodes + 1
    store = KVStore(2, 2, 2, 8, 64, device=DEVICE)
    store.write(1, store.plan(30), *torch.randn(2, 2, 2, 30, 8, generator=g).to(DEVICE))
    store.advance(torch.tensor([30, 21], device=DEVICE), [30, 21])
    store.hide(torch.tensor([[True, True, False], [False, False, False]], device=DEVICE))
    slots = store.plan(count, tree)
    keys, values = store.write(1, slots, *torch.randn(2, 2, 2, count, 8, generator=g).to(DEVICE))
    queries = torch.randn(2, 4, count, 8, generator=g).to(DEVICE)
    words = None if tree is None else ancestor_words(tree.ancestor_tensor(store.lengths.device))[None]
    found = tree_attention(queries, keys, values, store.lengths, words, hidden=store.hidden_slots, impl=impl)
    wanted = F.scaled_dot_product_attention(queries, keys, values, slots.mask, enable_gqa=True)
    close(found.out, wanted, 2e-6)
    assert found.lse is None


def test_wrong_arguments():
    case = make_case(9, [5, 6], 2, 1, 8, tree=True)
    wrong = {
        r"give \[B, H, M, D\]": {"keys": case.keys[:1]},
        "give one dtype": {"keys": case.keys.half()},
        "one for every row": {"lengths": case.lengths[:1]},
        "do not fit into 15 slots": {"lengths": case.lengths + 1},
        r"give \[2 or 1, 9, 1\]": {"words": case.words[:, :8]},
        "as `ancestor_words` makes them": {"words": case.words.int()},
        "needs depths": {"window": 4, "depths": None},
        r"depths have shape \(2, 4\)": {"depths": case.depths[:, :4]},
        "15 or more": {"hidden": torch.zeros(2, 4, dtype=torch.bool)},
        "softcap=0": {"softcap": 0.0},
        "window=0": {"window": 0},
        "one logit per query head": {"sinks": torch.zeros(3)},
        "goes through": {"queries": case.queries[:, :, :1].expand(-1, -1, 1025, -1)},
    }
    for message, change in wrong.items():
        with pytest.raises(ValueError, match=message):
            run(replace(case, **change))
    with pytest.raises(ValueError, match="impl='reference'"):
        run(oracle_case("cpu", torch.float64), "triton")
    wide = make_case(1, [2], 1, 1, 300)
    with pytest.raises(ValueError, match="wider than 256"):
        run(wide, "triton")


# On a device


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)]
)
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("count", [1, 9, 69])
def test_triton_on_the_device(count, group, tree, dtype, tolerance):
    for size in (64, 128) if group == 4 else (128,):
        case = make_case(count, LENGTHS, group, 2, size, tree, dtype, "cuda", seed=count)
        compare(case, ("triton", "reference"), tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [16, 80, 96, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_head_sizes_on_the_device(size, dtype):
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    compare(make_case(9, [65, 4097], 8, 2, size, True, dtype, "cuda"), ("triton",), tolerance)


@pytest.mark.gpu
def test_cases_on_the_device():
    for case in cases(64, device="cuda"):
        # peaked logits of some 40 carry 2e-5 of rounding into every weight
        compare(case, ("triton", "reference"), 5e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("group", "size"), [(1, 64), (4, 128), (8, 128)])
def test_bits_on_the_device(group, size, dtype):
    """A chain is plain decoding; rows, spare slots and foreign nodes change nothing."""
    case = make_case(17, [SPLIT - 5, 4097, 60], group, 2, size, dtype=dtype, device="cuda")
    whole = run(case)
    for i in range(17):
        one = replace(case, queries=case.queries[:, :, i : i + 1], lengths=case.lengths + i)
        assert torch.equal(run(one).out, whole.out[:, :, i : i + 1])
    short = replace(case, queries=case.queries[2:], lengths=case.lengths[2:],
                    keys=case.keys[2:, :, :77], values=case.values[2:, :, :77])  # fmt: skip
    assert torch.equal(run(short).out, whole.out[2:])
    tree = make_case(69, [300], group, 2, size, tree=True, dtype=dtype, device="cuda")
    mask = seen_by(tree)
    whole = run(tree)
    for node in (1, 30, 68):
        keys, values = tree.keys.clone(), tree.values.clone()
        keys[:, :, 300 + node], values[:, :, 300 + node] = 100.0, -100.0
        others = ~mask[0, :, node].cuda()
        assert torch.equal(run(replace(tree, keys=keys, values=values)).out[:, :, others], whole.out[:, :, others])


@pytest.mark.gpu
def test_no_host_sync_and_one_graph_on_the_device():
    case = make_case(9, [1000, 65], 4, 2, 128, tree=True, dtype=torch.bfloat16, device="cuda")
    wanted = run(case).out
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(case)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(case).out
    graph.replay()
    assert torch.equal(found, wanted)
    # other lengths, the same graph
    case.lengths.copy_(torch.tensor([300, 64]))
    graph.replay()
    assert torch.equal(found, run(case).out)
