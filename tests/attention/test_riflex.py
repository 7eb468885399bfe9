"""Rotary tables with another frequency: what is refused."""

import pytest
import torch

from mediaspec.attention.riflex import set_frequency


@pytest.mark.parametrize("bad", [{"num_frames": 5}, {"num_frames": 0}, {"k": 0}, {"k": 5}])
def test_tables_that_do_not_fit(bad):
    """A component of number 0 or beyond the last would change nothing without a word."""
    table = torch.ones(12, 8)
    with pytest.raises(ValueError, match="do not fit rotary tables"):
        set_frequency(table, table, **{"num_frames": 4, "k": 1, "frequency": 0.1, **bad})
