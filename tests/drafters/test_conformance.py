"""Every drafter through the conformance suite, with and without guidance."""

import pytest

from mediaspec.core.tree import TreeSpec
from mediaspec.drafters import EagleDrafter, JacobiDrafter, ModelDrafter
from mediaspec.testing.check_drafter import check_drafter
from tests.drafters.heads import toy_condition, toy_head
from tests.toy import ToyTarget

TARGET = ToyTarget(vocab_size=7, num_tokens=9)
# ragged: nodes with 3, 2, 1 and no children on one level
TREE = TreeSpec.from_paths([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0)])

WITH_MODEL = {
    "eagle": lambda: EagleDrafter(toy_head(TARGET)),
    "eagle guided": lambda: EagleDrafter(toy_head(TARGET, guided=True)),
    "model": lambda: ModelDrafter(ToyTarget(vocab_size=7, num_tokens=9, gap=0.8)),
}


@pytest.mark.parametrize("guidance", [None, 2.0])
@pytest.mark.parametrize("name", WITH_MODEL)
def test_drafters_with_a_model(name, guidance):
    condition = toy_condition(1 if guidance is None else 2)
    check_drafter(
        WITH_MODEL[name], TARGET, condition, guidance_scale=guidance, budgets=(1, 11), trees=(TREE,), rows=64
    )


@pytest.mark.parametrize("guidance", [None, 2.0])
@pytest.mark.parametrize(
    ("init", "redraft"),
    [("left", "maximal"), ("above", "fresh"), ("random", "maximal"), ("random", "gumbel"), ("sample", "gumbel")],
)
def test_jacobi(init, redraft, guidance):
    condition = toy_condition(1 if guidance is None else 2)
    check_drafter(
        lambda: JacobiDrafter(window=4, init=init, redraft=redraft),
        TARGET,
        condition,
        guidance_scale=guidance,
        budgets=(1, 6),
        rows=64,
    )
