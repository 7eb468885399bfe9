"""Which seed a picture gets."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mediaspec.pipelines.seeds import row_seeds


def test_an_int_counts_up_and_a_list_is_taken_as_it_is() -> None:
    assert row_seeds(3, seeds=7) == [7, 8, 9]
    assert row_seeds(2, seeds=[-5, 2**63 - 1]) == [-5, 2**63 - 1]
    assert row_seeds(2, seeds=torch.tensor([4, 2])) == [4, 2]


def test_one_generator_draws_all_seeds_and_goes_on() -> None:
    generator = torch.Generator().manual_seed(3)
    first, second = row_seeds(2, generator), row_seeds(2, generator)
    assert row_seeds(4, torch.Generator().manual_seed(3)) == first + second
    assert len(set(first + second)) == 4


def test_a_list_of_generators_gives_one_seed_each() -> None:
    made = row_seeds(2, [torch.Generator().manual_seed(s) for s in (1, 2)])
    assert made == row_seeds(1, torch.Generator().manual_seed(1)) + row_seeds(1, torch.Generator().manual_seed(2))


def test_numbers_and_arrays_of_numpy_are_seeds() -> None:
    assert row_seeds(2, seeds=np.int64(5)) == row_seeds(2, seeds=torch.tensor(5)) == [5, 6]
    assert row_seeds(2, seeds=np.arange(2)) == row_seeds(2, seeds=[np.int64(0), np.int64(1)]) == [0, 1]


def test_entropy_gives_new_seeds() -> None:
    assert row_seeds(2) != row_seeds(2)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"seeds": [1, 2]}, "2 seeds were given for 3"),
        ({"seeds": "7"}, "write an int"),
        ({"seeds": [1, 2, 2**63]}, "no int64"),
        ({"seeds": [1, 2, 3.0]}, "no int64"),
        ({"seeds": True}, "write an int"),
        ({"seeds": 2**63 - 1}, "no int64"),
        ({"generator": [torch.Generator()]}, "1 generators were given for 3"),
        ({"generator": torch.Generator(), "seeds": 1}, "both given"),
    ],
)
def test_wrong_seeds_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        row_seeds(3, **arguments)
