"""Numbers of an independent program, and how to compare with them."""

from __future__ import annotations

import json
from pathlib import Path

CASES = json.loads((Path(__file__).parents[1] / "data" / "arvdm_cases.json").read_text())


def assert_like(given, wanted, relative: float = 1e-6, absolute: float = 1e-9, where: str = "") -> None:
    """The same nested numbers, each within the tolerance; keys that only `given` has are ignored."""
    if isinstance(wanted, dict):
        for key in wanted:
            assert_like(given[key], wanted[key], relative, absolute, f"{where}/{key}")
    elif isinstance(wanted, list):
        assert len(given) == len(wanted), where
        for place, (one, other) in enumerate(zip(given, wanted)):
            assert_like(one, other, relative, absolute, f"{where}/{place}")
    else:
        assert abs(given - wanted) <= absolute + relative * abs(wanted), f"{where}: {given} is not {wanted}"
