"""Draft trees by beam search, against the worked case of LongSpec and an exhaustive search."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mediaspec.core.kv import KVStore
from mediaspec.core.tree import TreeSpec
from mediaspec.core.types import Warp
from mediaspec.drafters.beam import Front, grow_beam
from mediaspec.kernels.verify_tree import verify_tree

CASES = json.loads((Path(__file__).parents[1] / "data" / "longspec_cases.json").read_text())


def test_beam_tree_case() -> None:
    inputs, expected = CASES["beam_tree"]["inputs"], CASES["beam_tree"]["expected"]
    vocab = inputs["vocab"]
    paths: dict[int, str] = {0: ""}
    fronts: list[Front] = []

    def expand(front: Front) -> Tensor:
        fronts.append(front)
        rows = []
        for i in range(front.tokens.shape[1]):
            row = front.first + i
            if front.depth:
                above = [n + 1 for n in front.seen[0, i].nonzero()[:, 0].tolist() if n + 1 != row]
                before = paths[max(above, default=0)]
                paths[row] = f"{before},{int(front.tokens[0, i])}".lstrip(",")
            # the case lists the prefixes that lead to its tree; nothing may come from any other one
            rows.append(inputs["logits_by_prefix"].get(paths[row], [-100.0 * (1 + v) for v in range(vocab)]))
        return torch.tensor([rows])

    beam = grow_beam(inputs["widths"], expand, torch.tensor([3]))
    assert beam.tokens[0].tolist() == expected["tokens"][1:]
    assert beam.parents[0].tolist() == expected["parent"][1:]
    assert list(beam.depth) == expected["depth"][1:]
    assert torch.allclose(beam.scores[0], torch.tensor(expected["cum_logp"][1:]), atol=1e-5)
    assert 1 + beam.tokens.shape[1] == expected["verify_tokens"]
    assert len(fronts) == len(inputs["widths"]), "the last level is never expanded"
    for front in fronts[1:]:
        mask = torch.tensor(expected["mask"])[front.first : front.first + front.tokens.shape[1], 1:]
        assert torch.equal(front.seen[0], mask[:, : front.seen.shape[2]].bool())


def _table(seed: int, rows: int, vocab: int) -> Tensor:
    """Logits of every row behind every last token and depth: [rows, 4, vocab, vocab]."""
    return torch.randn(rows, 4, vocab, vocab, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("seed", range(3))
def test_wide_beams_find_the_likeliest_paths_of_every_row(seed: int) -> None:
    rows, vocab, depth = 2, 4, 3
    table = _table(seed, rows, vocab)
    tokens = torch.tensor([1, 2])

    def expand(front: Front) -> Tensor:
        return table[torch.arange(rows)[:, None], front.depth, front.tokens]

    beam = grow_beam((4, 16, 10), expand, tokens)
    for row in range(rows):
        law = table[row].log_softmax(-1)
        scored = []
        for path in itertools.product(range(vocab), repeat=depth):
            last, total = int(tokens[row]), 0.0
            for level, token in enumerate(path):
                total += float(law[level, last, token])
                last = token
            scored.append((total, path))
        best = sorted(scored, reverse=True)[:10]
        assert torch.allclose(beam.scores[row, 20:], torch.tensor([score for score, _ in best]), atol=1e-5)
        for node, (_, path) in zip(range(20, 30), best, strict=True):
            back, at = [], node
            while at >= 0:
                back.append(int(beam.tokens[row, at]))
                at = int(beam.parents[row, at]) - 1
            assert tuple(reversed(back)) == path


def test_ties_go_to_the_earlier_node_and_the_lower_token() -> None:
    beam = grow_beam((3, 4), lambda front: torch.zeros(1, front.tokens.shape[1], 3), torch.tensor([0]))
    assert beam.tokens[0].tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert beam.parents[0].tolist() == [0, 0, 0, 1, 1, 1, 2]


@pytest.mark.parametrize("count", [1, 3, 6, 9])
def test_the_best_nodes_are_a_tree_in_level_order(count: int) -> None:
    table = _table(7, 1, 6)
    beam = grow_beam((2, 3, 4), lambda front: table[:1, front.depth][:, front.tokens[0]], torch.tensor([0]))
    tree, order = beam.best(count)
    assert tree.num_nodes == count == len(order)
    kept = beam.scores[0, order]
    left = [node for node in range(9) if node not in order.tolist()]
    assert not left or float(beam.scores[0, left].max()) <= float(kept.min())
    for row, (node, parent) in enumerate(zip(order.tolist(), tree.parents, strict=True), 1):
        above = int(beam.parents[0, node])
        assert (above == 0 and parent == 0) or order[parent - 1] == above - 1
        assert tree.depth[row] == beam.depth[node]
    assert len({(parent, int(beam.tokens[0, node])) for node, parent in zip(order, tree.parents)}) == count


@pytest.mark.parametrize(("widths", "message"), [((), "at least 1"), ((2, 0), "at least 1"), ((7,), "7 wide")])
def test_refuses_impossible_widths(widths: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grow_beam(widths, lambda front: torch.zeros(1, front.tokens.shape[1], 6), torch.tensor([0]))


class TestTreeCase:
    """The nine-node tree of the worked case through the core's own tree tables, store mask and verifier."""

    inputs, expected = CASES["tree"]["inputs"], CASES["tree"]["expected"]
    tree = TreeSpec(tuple(CASES["tree"]["inputs"]["parent"][1:]))

    def test_topology(self) -> None:
        assert list(self.tree.depth) == self.expected["depth"]
        mask = self.tree.ancestor_tensor(torch.device("cpu"))
        assert mask.int().tolist() == self.expected["mask"]
        assert [sum(1 << j for j, on in enumerate(row) if on) for row in mask.tolist()] == self.expected["mask_bits"]

    def test_attention(self) -> None:
        n = self.inputs["prefix_len"]
        q, k, v = (torch.tensor(self.inputs[name], dtype=torch.float64) for name in "qkv")
        store = KVStore(1, 1, 1, 4, 20, torch.float64)
        store.write(0, store.plan(n), k[None, None, :n], v[None, None, :n])
        store.advance(torch.tensor([n]))
        slots = store.plan(9, self.tree)
        keys, values = store.write(0, slots, k[None, None, n:], v[None, None, n:])
        assert slots.positions[0].tolist() == self.expected["positions"]
        out = F.scaled_dot_product_attention(q[None, None], keys, values, slots.mask)[0, 0]
        assert torch.allclose(out, torch.tensor(self.expected["out"], dtype=torch.float64), atol=1e-10)

    def test_verification(self) -> None:
        choices = torch.tensor(self.inputs["target_argmax"])
        verdict = verify_tree(
            F.one_hot(choices, 10).float()[None, None],
            torch.tensor(self.inputs["tokens"])[None, 1:],
            torch.tensor([self.tree.max_depth]),
            self.tree.tables(torch.device("cpu")),
            Warp(temperature=0),
            draft_probs=None,
            seeds=torch.tensor([0]),
            start=torch.tensor([12]),
            mode="match",
        )
        path = [node for node in verdict.path[0].tolist() if node >= 0]
        assert [0, *path] == self.expected["accepted_path"]
        emitted = [self.inputs["tokens"][node] for node in path] + [int(verdict.next_token)]
        assert emitted == self.expected["emitted"]
        alive = [all(self.inputs["tokens"][n] == choices[p] for n, p in self._edges(row)) for row in range(9)]
        assert [int(one) for one in alive] == self.expected["alive"]

    def _edges(self, row: int) -> list[tuple[int, int]]:
        edges = []
        while row:
            parent = self.inputs["parent"][row]
            edges.append((row, parent))
            row = parent
        return edges
