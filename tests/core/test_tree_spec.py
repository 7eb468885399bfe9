"""Topology of draft trees."""

from __future__ import annotations

import pytest
import torch

from mediaspec.core.tree import TreeSpec


def test_widths_and_paths_describe_the_same_tree() -> None:
    tree = TreeSpec.from_widths([2, 1])
    assert tree == TreeSpec.from_paths([(1, 0), (0,), (1,), (0, 0)])
    assert tree.children == ((1, 2), (3,), (4,), (), ())
    assert tree.internal == (0, 1, 2)
    assert tree.levels() == [[0], [1, 2], [3, 4]]


def test_chain_is_a_tree_of_width_one() -> None:
    assert TreeSpec.chain(3) == TreeSpec.from_widths([1, 1, 1])
    assert torch.equal(TreeSpec.chain(2).ancestor_tensor(torch.device("cpu")), torch.ones(3, 3).tril().bool())


def test_tables_number_internal_rows() -> None:
    tables = TreeSpec.from_widths([2, 1]).tables(torch.device("cpu"))
    assert tables.internal.tolist() == [0, 1, 2, -1, -1]
    assert tables.children.tolist() == [[1, 2], [3, -1], [4, -1], [-1, -1], [-1, -1]]


@pytest.mark.parametrize("parents", [(), (1,), (0, 0, 2, 1), (0, 3)])
def test_impossible_trees_are_refused(parents: tuple[int, ...]) -> None:
    with pytest.raises(ValueError):
        TreeSpec(parents)


def test_a_path_needs_its_parent_and_elder_sibling() -> None:
    with pytest.raises(ValueError, match="elder sibling"):
        TreeSpec.from_paths([(1,)])
