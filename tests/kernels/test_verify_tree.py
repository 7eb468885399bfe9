"""Tree verification: both implementations agree on every case, and the reference means what the contract says."""

from dataclasses import replace

import pytest
import torch

from mediaspec.kernels.sample import Warp
from mediaspec.kernels.verify_chain.cases import cases as chain_cases
from mediaspec.kernels.verify_chain.cases import run as run_chain
from mediaspec.kernels.verify_tree import verify_tree
from mediaspec.kernels.verify_tree.cases import Case, cases, make_tree, run

from .conftest import DEVICE, NUMPY_NOISE


def compare(case: Case) -> None:
    expected, given = run(case, "reference"), run(case, "triton")
    assert torch.equal(given.num_accepted, expected.num_accepted)
    assert torch.equal(given.next_token, expected.next_token)
    assert torch.equal(given.path, expected.path)
    torch.testing.assert_close(given.drift, expected.drift, rtol=1e-4, atol=1e-5)
    assert (given.choices is None) == (expected.choices is None)
    if expected.choices is not None:
        assert torch.equal(given.choices, expected.choices)


@pytest.mark.filterwarnings(NUMPY_NOISE)
@pytest.mark.parametrize("case", cases(37, device=DEVICE), ids=lambda case: case.name)
def test_triton_agrees(case):
    compare(case)


@pytest.mark.filterwarnings(NUMPY_NOISE)
@pytest.mark.parametrize(("vocab", "batch"), [(6, 1), (70, 3)])
def test_triton_agrees_at_other_sizes(vocab, batch):
    for case in cases(vocab, batch, device=DEVICE, seed=vocab):
        if case.name in ("exact", "omega-band", "guided", "match-all"):
            compare(case)


@pytest.mark.gpu
@pytest.mark.parametrize(("vocab", "batch"), [(1000, 3), (16384, 2), (65536, 1)])
def test_triton_agrees_on_the_device(vocab, batch):
    for case in cases(vocab, batch, device="cuda"):
        compare(case)


@pytest.mark.parametrize("case", cases(37, batch=3), ids=lambda case: case.name)
def test_path_is_a_path_of_the_tree(case):
    verdict = run(case)
    for b in range(3):
        n, at = int(verdict.num_accepted[b]), 0
        assert n <= int(case.depth_limit[b])
        for level, node in enumerate(verdict.path[b].tolist()):
            if level >= n:
                assert node == -1
                continue
            assert int(case.tree.parents[node - 1]) == at
            at = node


def test_a_tree_of_single_children_is_a_chain():
    for case in chain_cases(37, batch=2, length=3):
        if case.name not in (
            "exact",
            "omega",
            "omega-band",
            "ensemble",
            "ragged",
            "guided",
            "forced",
            "point-omega",
            "match",
        ):
            continue
        tree = make_tree([0, 1, 2])
        given = verify_tree(
            case.target_logits, case.tokens, case.lengths, tree, case.warp, draft_probs=case.draft_probs,
            seeds=case.seeds, start=case.start, scale=case.scale, offset=case.offset, residual=case.residual,
            guidance=case.guidance, allowed=case.allowed, forced=case.forced, mode=case.mode,
        )  # fmt: skip
        expected = run_chain(case)
        assert torch.equal(given.num_accepted, expected.num_accepted), case.name
        assert torch.equal(given.next_token, expected.next_token), case.name
        torch.testing.assert_close(given.drift, expected.drift, rtol=1e-4, atol=1e-5)


def test_choices_and_log_laws_do_not_change_the_decision():
    for case in cases(37):
        if case.name in ("exact", "guided", "point"):
            lean, full = run(case), run(case, need_choices=True, need_probs=True)
            assert torch.equal(lean.path, full.path) and torch.equal(lean.next_token, full.next_token)
            assert full.choices.shape == (2, 9) and full.target_probs.shape == (2, 9, 37)


def test_forced_root_takes_the_forced_child():
    case = next(case for case in cases(37) if case.name == "forced")
    verdict = run(replace(case, uniforms=torch.ones(2, case.tree.levels, 3)))
    assert int(verdict.path[0, 0]) == 1 + case.tokens[0].tolist().index(int(case.forced[0, 0]))
    assert float(verdict.drift[0, 0]) == 0
    refused = next(case for case in cases(37) if case.name == "refused")
    verdict = run(refused)
    assert verdict.num_accepted.tolist() == [0, 0] and torch.equal(verdict.next_token, refused.forced[:, 0])


def test_undefined_laws_are_reported():
    verdict = run(next(case for case in cases(37) if case.name == "broken"))
    assert int(verdict.next_token[0]) == -1 and int(verdict.num_accepted[0]) == 0
    assert verdict.path[0].tolist() == [-1, -1, -1] and not bool(verdict.drift[0].any())


def test_shapes_are_checked():
    case = next(case for case in cases(6) if case.name == "exact")
    with pytest.raises(ValueError, match="tree of N\\+1 rows"):
        run(replace(case, tree=make_tree([0, 0])))
    with pytest.raises(ValueError, match="scale has shape"):
        run(replace(case, scale=torch.ones(2)))
    with pytest.raises(ValueError, match="draft_probs has shape"):
        run(replace(case, draft_probs=case.draft_probs[..., :3]))


def test_greedy_follows_the_best_child():
    logits = torch.tensor([[0.0, 1, 2, 3], [3.0, 0, 0, 0], [0.0, 5, 0, 0]])[None, None]
    verdict = verify_tree(
        logits, torch.tensor([[1, 3]]), torch.tensor([1]), make_tree([0, 0]), Warp(temperature=0.0), draft_probs=None,
        seeds=torch.tensor([0]), start=torch.tensor([0]),
    )  # fmt: skip
    assert verdict.path.tolist() == [[2]] and verdict.next_token.tolist() == [1]
