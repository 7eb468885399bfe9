"""A drafter that draws by another law than the run's: where processors change the logits, the run's own warp is the
identity, and a head had best draw at the temperature that they apply."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..core.pilot import drafter_name
from ..core.tree import TreeSpec
from ..core.types import DecodeState, Draft, Drafter, TargetOutput, Verdict, Warp

__all__ = ["Warped"]


class Warped:
    """Passes everything on to a drafter, and draws with a warp of its own.

    Args:
        drafter: draws with `state.warp`, and reports the law it drew from.
        warp: temperature, top-k and top-p of the drafts.
    """

    def __init__(self, drafter: Drafter, warp: Warp) -> None:
        self.drafter, self.warp, self.name = drafter, warp, drafter_name(drafter)

    def __getattr__(self, name: str) -> Any:
        if name == "drafter":  # not there yet while a copy is made
            raise AttributeError(name)
        return getattr(self.drafter, name)

    @property
    def needs(self) -> frozenset[str]:
        return self.drafter.needs

    def begin(self, state: DecodeState, output: TargetOutput, extra: int) -> None:
        self.drafter.begin(state, output, extra)

    def propose(self, state: DecodeState, budget: int, tree: TreeSpec | None = None) -> Draft:
        return self.drafter.propose(replace(state, warp=self.warp), budget, tree)

    def observe(self, state: DecodeState, draft: Draft | None, verdict: Verdict, output: TargetOutput) -> None:
        self.drafter.observe(state, draft, verdict, output)

    def select(self, rows: Any) -> None:
        self.drafter.select(rows)
