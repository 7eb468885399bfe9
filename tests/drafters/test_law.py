"""Whole images drawn with each drafter have exactly the target's law: all 81 of them counted against it."""

import itertools

import pytest
import torch

from mediaspec.core.engine import Engine
from mediaspec.core.tree import TreeSpec
from mediaspec.drafters import EagleDrafter, JacobiDrafter, ModelDrafter
from mediaspec.rules.exact import ExactRule
from mediaspec.testing.check_rule import chi_square_p_value
from tests.drafters.heads import toy_head
from tests.toy import ToyTarget

TARGET = ToyTarget(vocab_size=3, num_tokens=4)
TREE = TreeSpec.from_paths([(0,), (1,), (0, 0), (0, 1), (1, 0)])
ROWS = 6000  # sees a total-variation error of about 0.03
CASES = {
    "eagle": (lambda: EagleDrafter(toy_head(TARGET)), None),
    "eagle tree": (lambda: EagleDrafter(toy_head(TARGET)), TREE),
    "model": (lambda: ModelDrafter(ToyTarget(3, 4, gap=0.8)), None),
    "model tree": (lambda: ModelDrafter(ToyTarget(3, 4, gap=0.8)), TREE),
    "jacobi fresh": (lambda: JacobiDrafter(window=3, init="random", redraft="fresh"), None),
    "jacobi maximal": (lambda: JacobiDrafter(window=3, init="random", redraft="maximal"), None),
    "jacobi gumbel": (lambda: JacobiDrafter(window=3, init="random", redraft="gumbel"), None),
    "jacobi sample": (lambda: JacobiDrafter(window=2, init="sample", redraft="maximal"), None),
}


def image_law() -> torch.Tensor:
    law = []
    for image in itertools.product(range(3), repeat=4):
        rows = [torch.softmax(TARGET.logits(list(image[:i])), -1)[image[i]] for i in range(4)]
        law.append(torch.stack(rows).prod())
    return torch.stack(law)


@pytest.mark.parametrize("name", CASES)
def test_law_of_whole_images(name):
    make, tree = CASES[name]
    result = Engine(TARGET, ExactRule(), make()).decode(
        torch.zeros(ROWS), torch.arange(ROWS) + 5, num_draft_tokens=3, tree=tree
    )
    index = (result.tokens * torch.tensor([27, 9, 3, 1])).sum(1)
    counts = torch.bincount(index, minlength=81)
    # fails a right drafter with probability 1e-4
    assert chi_square_p_value(counts, image_law()) > 1e-4
    assert result.stats.accepted_per_position[0] > 0
