"""Which drafter runs in a round, how deep, and with which tree: fixed for a run, or chosen anew by a policy.

A policy sees the past alone (accepted counts and seconds of earlier rounds, and which drafters have something to
propose on the committed text), so a choice among lossless settings leaves the output law unchanged
(arXiv:2505.15141). Drafters that did not run still observe every round. B rows, K draft length.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from .arm import Arm
from .ending import Ends
from .outcome import Choice, Outcome
from .tree import TreeSpec
from .types import DecodeState, Draft, Drafter, TargetOutput, Verdict

__all__ = ["Pilot", "Plan", "Policy", "drafter_name"]


class Policy(Protocol):
    """What the loop asks of a policy; `mediaspec.policies` has them."""

    @property
    def arms(self) -> tuple[Arm, ...]: ...

    def begin(
        self, drafters: Sequence[str] = (), *, model: str = "default", limits: Mapping[str, int] | None = None
    ) -> None: ...

    def choose(self, rows: Sequence[int], length: int = 0, ready: Collection[str] | None = None) -> Choice: ...

    def observe(self, choice: Choice, outcome: Outcome) -> None: ...


@dataclass(frozen=True)
class Plan:
    """One round: `drafter` None decodes plainly; `lengths` [B] int64 cuts the drafts of single rows.

    What the policy is told afterwards hangs on its `choice`: the live `rows`, and the drafts that could count before
    the end of each (`room`).
    """

    drafter: Drafter | None
    budget: int
    tree: TreeSpec | None = None
    lengths: Tensor | None = None
    choice: Choice | None = None
    rows: tuple[int, ...] = ()
    room: tuple[int, ...] = ()


def drafter_name(drafter: Drafter) -> str:
    """What policies call a drafter: its attribute `name`, else its class's name without "Drafter", in small letters.

    Example:
        >>> from mediaspec.drafters import NgramDrafter
        >>> drafter_name(NgramDrafter())
        'ngram'
    """
    given = getattr(drafter, "name", None)
    return given if isinstance(given, str) else type(drafter).__name__.removesuffix("Drafter").lower()


class Pilot:
    """Holds the drafters of a run and asks the policy before every round.

    Args:
        drafters: by name.
        budget: K without a policy, 0 for none; tree: likewise.
        policy: chooses; None runs the one drafter with `budget` and `tree`.
        model: what the policy's learned state belongs to.

    Raises:
        ValueError: several drafters and nobody to choose among them; a policy's arm that names none of them.
    """

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        budget: int,
        tree: TreeSpec | None,
        policy: Policy | None,
        model: str = "default",
    ) -> None:
        self.policy = policy if drafters and budget else None
        if self.policy is None and len(drafters) > 1 and budget:
            raise ValueError(f"there are {len(drafters)} drafters ({', '.join(drafters)}); pass a policy to choose")
        self.drafters = dict(drafters) if budget else {}
        self.fixed = Plan(next(iter(self.drafters.values()), None), budget, tree)
        arms: tuple[Arm, ...] = ()
        if self.policy is not None:
            limits = {name: one.max_draft_tokens for name, one in drafters.items() if hasattr(one, "max_draft_tokens")}
            self.policy.begin(list(drafters), model=model, limits=limits)
            arms = self.policy.arms
            odd = next((arm.rule for arm in arms if arm.rule is not None), None)
            if odd is not None:
                raise ValueError(
                    f"an arm asks for the rule {odd!r}, but a run has one rule; leave it out of the arm and write "
                    f"rule={odd!r} for the run"
                )
        trees = [arm.tree for arm in arms if arm.tree is not None] + ([tree] if tree is not None else [])
        self.nodes = max([arm.depth for arm in arms] + [one.num_nodes for one in trees] + [budget if not arms else 0])
        self.depth = max([arm.depth for arm in arms] + [budget if not arms else 0])
        """Most scored positions behind the newest token, and most drafts of one row that a round can accept."""
        self.features: tuple[int, ...] = ()
        for drafter in self.drafters.values():
            layers = tuple(getattr(drafter, "feature_layers", ()))
            if layers and self.features not in ((), layers):
                raise ValueError(f"drafters read different layers, {self.features} and {layers}; use one of them")
            self.features = layers or self.features
        self.used: dict[str, int] = {}
        self._since = 0.0

    def begin(self, state: DecodeState, output: TargetOutput) -> None:
        """After the prefill."""
        for drafter in self.drafters.values():
            drafter.begin(state, output, self.nodes + 1)

    def select(self, rows: Tensor) -> None:
        for drafter in self.drafters.values():
            drafter.select(rows)

    def plan(self, state: DecodeState, active: Sequence[int], ends: Ends, context: int) -> Plan:
        """The next round; `context` is the longest one among the rows in tokens. Its time begins here."""
        if self.policy is None:
            return self.fixed
        self._since = time.perf_counter()
        live = tuple(row for row, over in enumerate(ends.finished(state.host_lengths)) if not over)
        ready = [name for name, one in self.drafters.items() if not hasattr(one, "ready") or one.ready(state)]
        choice = self.policy.choose([active[row] for row in live], context, ready)
        arm, lengths = choice.arm, None
        if choice.lengths is not None:
            wanted = dict(zip(live, choice.lengths, strict=True))
            lengths = torch.tensor([wanted.get(row, 0) for row in range(state.rows)], device=state.lengths.device)
        shape = str(arm.depth) if arm.tree is None else f"tree{arm.tree.num_nodes}"
        label = "plain" if arm.off else f"{arm.drafter}:{shape}"
        self.used[label] = self.used.get(label, 0) + 1
        drafter = None if arm.drafter is None else self.drafters[arm.drafter]
        tree = None if getattr(drafter, "chains_only", False) else arm.tree  # a chain of the same depth instead
        room = tuple(ends.host[row] - 1 - state.host_lengths[row] for row in live)
        return Plan(drafter, arm.depth, tree, lengths, choice, live, room)

    def observe(self, state: DecodeState, draft: Draft | None, verdict: Verdict, output: TargetOutput) -> None:
        """Shows a round to every drafter, before its tokens are committed."""
        for drafter in self.drafters.values():
            drafter.observe(state, draft, verdict, output)

    def learn(self, plan: Plan, accepted: Sequence[int]) -> None:
        """Tells the policy what a round gave, on the host after its sync: [B] accepted drafts before any cut."""
        if plan.choice is None or self.policy is None:
            return
        seconds = time.perf_counter() - self._since
        most = plan.choice.arm.depth
        mine = [accepted[row] for row in plan.rows]
        limit = [max(min(most, room), got) for room, got in zip(plan.room, mine, strict=True)]
        cut = limit if min(limit, default=most) < most else None
        self.policy.observe(plan.choice, Outcome(mine, seconds, cut))

    @staticmethod
    def cut(draft: Draft, lengths: Tensor | None) -> Draft:
        """A draft with the lengths a policy allots to single rows."""
        return draft if lengths is None else replace(draft, lengths=torch.minimum(draft.lengths, lengths))
