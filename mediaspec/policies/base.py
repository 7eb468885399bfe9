"""The policy: which arm a round runs, chosen before the round from the outcomes of earlier rounds alone.

The loop calls three methods, all host-side and without a device sync:

    policy.begin(drafters, model="smollm2")               # a decode begins: arms, learned state of this model
    choice = policy.choose(rows, length)                  # before a round
    policy.observe(choice, Outcome(accepted, seconds=s))  # after it

A policy is one file with one subclass of `DraftPolicy`: a `name`, a constructor decorated with `register_to_config`
that passes the common settings on, a learner (plain lists and numbers, so that it saves itself) and two methods,
`_pick` and `_learn`. `make_policy("<name>", ...)` finds it once its module is imported.

    @dataclass
    class Counts(Learner):
        rounds: list[float]

    class RoundRobinPolicy(DraftPolicy):
        name = "round_robin"

        def _fresh(self):
            return Counts([0.0] * len(self.arms))

        def _pick(self, rows, costs, usable):
            return min(usable, key=lambda arm: self.learner.rounds[arm])

        def _learn(self, choice, outcome, costs):
            self.learner.rounds[choice.index] += 1

Letters: A arms, B rows that take part in the round, K draft length.
"""

from __future__ import annotations

import difflib
import inspect
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from ..core.arm import Arm, make_arms
from ..core.component import ConfigMixin, SchedulerMixin, register_to_config
from ..core.outcome import Choice, Outcome
from .cost import CostTable
from .off_switch import OffSwitch
from .stream import Stream

__all__ = ["Choice", "DraftPolicy", "Learner", "Outcome", "check_count", "check_number"]

STATE_NAME = "policy_state.json"
REFRESH = 256
"""Rounds after which plain decoding is measured again: its cost decides whether speculation pays."""


@dataclass
class Learner:
    """What a policy has learned, a dataclass of numbers, lists and dicts: `asdict` saves it."""


@dataclass
class _Memory:
    """Everything learned about one model with one set of arms."""

    arms: tuple[Arm, ...]
    costs: CostTable
    switch: OffSwitch
    learner: Learner
    stream: Stream
    rounds: int = 0
    used: int = 0
    drafter: str | None = None
    measures: bool = False
    anchors: list[int] = field(default_factory=list)  # arms that are still to be measured first
    idle: frozenset[int] = frozenset()


class DraftPolicy(SchedulerMixin, ConfigMixin):
    """Base of all policies.

    Args:
        lengths: draft lengths the arms are made of (with every drafter the loop offers); None: the policy's own.
        arms: the arms themselves instead, dicts as `Arm.to_dict`; a tree is given as the parents of its nodes.
        costs: cost of a round per arm in any unit; None measures. Given costs make decisions independent of the
            clock, so that a run repeats itself on any machine.
        probe_every: rounds between probes of what was turned off, at least; 0 never turns an arm off.
        seed: of the policy's own random numbers.

    Raises:
        ValueError: settings out of range.
    """

    registry: ClassVar[dict[str, type[DraftPolicy]]] = {}

    name: ClassVar[str] = ""
    has_compatibles = False
    default_lengths: ClassVar[tuple[int, ...]] = (2, 4, 8)
    adaptive: ClassVar[bool] = True
    """False: never measures, turns nothing off."""
    switching: ClassVar[bool] = True
    """False: turns off and probes by rules of its own instead of `OffSwitch`."""

    @register_to_config
    def __init__(
        self,
        lengths: Sequence[int] | None = None,
        arms: Sequence[Mapping[str, Any]] | None = None,
        costs: Sequence[float] | None = None,
        probe_every: int = 32,
        seed: int = 0,
    ) -> None:
        self._settle(lengths, arms, costs, probe_every, seed)

    def _settle(
        self,
        lengths: Sequence[int] | None,
        arms: Sequence[Mapping[str, Any]] | None,
        costs: Sequence[float] | None,
        probe_every: int,
        seed: int,
    ) -> None:
        """Checks and keeps the common settings; every constructor ends with it."""
        check_count("probe_every", probe_every, 0, 32)
        check_count("seed", seed, None, 0)
        if lengths is not None and arms is not None:
            raise ValueError("give either lengths (with every drafter) or arms, not both")
        for length in lengths or ():
            check_count("a draft length", length, 0, 4)
        self._lengths = tuple(lengths) if lengths is not None else self.default_lengths
        self._given = None if arms is None else tuple(Arm.from_dict(arm) for arm in arms)
        if self._given is not None:
            if not self._given:
                raise ValueError(f"arms is empty; leave it out or list dicts such as {Arm('ngram', 4).to_dict()}")
            twice = next((arm for i, arm in enumerate(self._given) if arm in self._given[:i]), None)
            if twice is not None:
                raise ValueError(f"arm {twice.to_dict()} is listed twice")
        self._costs = None if costs is None else list(costs)
        self._every, self._seed = probe_every, seed
        self._models: dict[tuple[str, tuple[Arm, ...]], _Memory] = {}
        self._memory: _Memory | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.name:
            known = DraftPolicy.registry.setdefault(cls.name, cls)
            if known.__qualname__ != cls.__qualname__:
                raise TypeError(f"{cls.__name__} cannot be named {cls.name!r}: {known.__name__} has that name")

    # What a policy defines.

    def _fresh(self) -> Learner:
        """A learner that knows nothing, for `self.arms`."""
        raise TypeError(f"{type(self).__name__} must define _fresh, _pick and _learn")

    def _pick(self, rows: tuple[int, ...], costs: list[float], usable: list[int]) -> int:
        """Index of the arm for the next round, one of `usable`; costs [A]."""
        raise TypeError(f"{type(self).__name__} must define _fresh, _pick and _learn")

    def _learn(self, choice: Choice, outcome: Outcome, costs: list[float]) -> None:
        """Takes a round's outcome; costs [A] as of now."""
        raise TypeError(f"{type(self).__name__} must define _fresh, _pick and _learn")

    def _request(self) -> None:
        """A decode begins: what was learned of the last one becomes the prior of this one."""

    def _allocate(self, index: int, rows: tuple[int, ...], costs: list[float]) -> tuple[int, tuple[int, ...] | None]:
        """The arm to run instead of `index` and its draft length per row, None for the arm's own in every row."""
        return index, None

    # What the loop calls.

    @property
    def arms(self) -> tuple[Arm, ...]:
        """The arms since `begin`."""
        return self._now().arms

    @property
    def learner(self) -> Any:
        return self._now().learner

    def begin(
        self, drafters: Sequence[str] = (), *, model: str = "default", limits: Mapping[str, int] | None = None
    ) -> None:
        """A decode begins.

        Args:
            drafters: names of the drafters the loop can run, most trusted first.
            model: what the learned state belongs to, e.g. a model's name or fingerprint.
            limits: longest draft a drafter can make, by name.

        Raises:
            ValueError: an arm names a drafter that is not there.
        """
        if isinstance(drafters, str):
            raise ValueError(f"drafters must be a list of names; write [{drafters!r}]")
        if not isinstance(model, str):
            raise ValueError(f"model must be a name, got {model!r}")
        arms = self._given if self._given is not None else self._arms(list(drafters), limits)
        for arm in arms:
            if arm.drafter is not None and arm.drafter not in drafters:
                near = difflib.get_close_matches(arm.drafter, list(drafters), 1, cutoff=0.0)
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise ValueError(f"an arm needs the drafter {arm.drafter!r}; {hint}there are {list(drafters)}")
        self._enter(model, tuple(arms))
        memory = self._now()
        memory.drafter = None
        self._request()

    def choose(self, rows: Sequence[int], length: int = 0, ready: Collection[str] | None = None) -> Choice:
        """The arm of the next round.

        Args:
            rows: ids of the rows that will take part (any integers that stay with a row).
            length: longest context among them in tokens, prefix included.
            ready: drafters that have something to propose now (a lookup without a match has not); None: all.
        """
        memory = self._now()
        taking = tuple(rows)
        if ready is not None:
            memory.idle = frozenset(i for i, arm in enumerate(memory.arms) if not arm.off and arm.drafter not in ready)
            if len(memory.idle) == len(memory.arms):  # no plain arm to fall back to
                memory.idle = frozenset()
        if not taking:
            raise ValueError("rows is empty; name the rows that take part in the round, e.g. [0]")
        costs = memory.costs.costs(len(taking), length)
        index, probe = self._next(memory, taking, costs)
        lengths = None
        if not probe:
            index, lengths = self._allocate(index, taking, costs)
        arm = memory.arms[index]
        entering = arm.drafter is not None and arm.drafter != memory.drafter
        return Choice(arm, index, taking, length, lengths, probe, entering)

    def observe(self, choice: Choice, outcome: Outcome) -> None:
        """Takes the outcome of the round that ran `choice`.

        Raises:
            ValueError: counts that do not fit the choice, or seconds that are no positive number.
        """
        memory = self._now()
        self._check(choice, outcome, memory)
        memory.rounds += 1
        memory.drafter = choice.arm.drafter
        if choice.arm.off:
            memory.used = memory.rounds
        rows = len(choice.rows)
        if outcome.seconds is not None:
            memory.costs.observe(choice.index, rows, choice.length, outcome.seconds, choice.entering)
        costs = memory.costs.costs(rows, choice.length)
        if not outcome.shortened(choice.arm.depth):
            memory.switch.observe(choice.index, 1.0 + sum(outcome.accepted) / rows, costs)
        self._learn(choice, outcome, costs)

    # Saving.

    def state_dict(self) -> dict[str, Any]:
        """Everything learned, as JSON numbers, lists and dicts."""
        models = []
        for (model, arms), memory in self._models.items():
            models.append(
                {
                    "model": model, "arms": [arm.to_dict() for arm in arms],
                    "rounds": memory.rounds, "used": memory.used, "drafter": memory.drafter,
                    "anchors": list(memory.anchors),
                    "drawn": memory.stream.drawn, "learner": asdict(memory.learner),
                    "costs": memory.costs.state_dict(), "switch": memory.switch.state_dict(),
                }
            )  # fmt: skip
        here = next((i for i, memory in enumerate(self._models.values()) if memory is self._memory), None)
        return {"policy": self.name, "version": 2, "models": models, "current": here}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues exactly where `state_dict` was taken.

        Raises:
            ValueError: the state is of another policy or damaged.
        """
        if not isinstance(state, Mapping) or state.get("policy") != self.name or state.get("version") != 2:
            found = state.get("policy") if isinstance(state, Mapping) else state
            raise ValueError(f"this is not a state of policy {self.name!r} (version 2) but of {found!r}")
        self._models, self._memory = {}, None
        try:
            for saved in state["models"]:
                self._enter(str(saved["model"]), tuple(Arm.from_dict(arm) for arm in saved["arms"]))
                memory = self._now()
                memory.rounds, memory.used = (int(saved[key]) for key in ("rounds", "used"))
                memory.anchors = [int(index) for index in saved["anchors"]]
                memory.drafter, memory.stream.drawn = saved["drafter"], int(saved["drawn"])
                memory.learner = self._restored(memory.learner, saved["learner"])
                memory.costs.load_state_dict(saved["costs"])
                memory.switch.load_state_dict(saved["switch"])
            here = state["current"]
            self._memory = None if here is None else list(self._models.values())[here]
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            self._models, self._memory = {}, None
            raise ValueError(f"a saved state of policy {self.name!r} is damaged: {error!r}") from error

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:
        """Writes the settings (`scheduler_config.json`) and what was learned (`policy_state.json`)."""
        super().save_pretrained(save_directory, **kwargs)
        text = json.dumps(self.state_dict(), indent=1) + "\n"
        (Path(save_directory) / STATE_NAME).write_text(text, encoding="utf-8")

    @classmethod
    def from_pretrained(cls, path: Any, subfolder: str | None = None, **overrides: Any) -> Any:
        """Loads settings and, where the folder has it, what was learned."""
        policy = super().from_pretrained(path, subfolder=subfolder, **overrides)
        file = (Path(path) / subfolder if subfolder else Path(path)) / STATE_NAME
        if file.is_file():
            try:
                state = json.loads(file.read_text(encoding="utf-8"))
            except json.JSONDecodeError as error:
                raise ValueError(f"{file} is damaged ({error}); delete it to start without learned state") from error
            policy.load_state_dict(state)
        return policy

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Builds the policy from a saved config; an unknown key is an error."""
        cls.check_settings(config)
        return super().from_config(config, *args, **kwargs)

    @classmethod
    def check_settings(cls, given: Mapping[str, Any]) -> None:
        """Raises ValueError for a setting this policy does not have, offering the nearest one."""
        allowed = [name for name in inspect.signature(cls.__init__).parameters if name != "self"]
        for key in given:
            if key not in allowed and not key.startswith("_"):
                near = difflib.get_close_matches(key, allowed, 1, cutoff=0.0)[0]
                raise ValueError(f"{cls.__name__} has no setting {key!r}; did you mean {near!r}? It has {allowed}")

    # Inside.

    def _arms(self, drafters: list[str], limits: Mapping[str, int] | None) -> tuple[Arm, ...]:
        return make_arms(drafters, self._lengths, limits=limits)

    def _now(self) -> _Memory:
        if self._memory is None:
            raise ValueError("no decode has begun: call policy.begin(drafters, model=...) first")
        return self._memory

    def _enter(self, model: str, arms: tuple[Arm, ...]) -> None:
        memory = self._models.get((model, arms))
        if memory is None:
            costs = CostTable(arms, self._costs)
            switch = OffSwitch(len(arms), costs.plain, self._every if self.adaptive and self.switching else 0)
            memory = _Memory(arms, costs, switch, Learner(), Stream(self._seed))
            memory.measures = self.adaptive and self._costs is None and len(arms) > 1
            memory.anchors = costs.anchors() if memory.measures else []
            self._models[model, arms] = self._memory = memory
            memory.learner = self._fresh()
        self._memory = memory

    def _next(self, memory: _Memory, rows: tuple[int, ...], costs: list[float]) -> tuple[int, bool]:
        """Index of the arm, and whether the round is there to learn."""
        place = next((number for number, arm in enumerate(memory.anchors) if arm not in memory.idle), None)
        if place is not None:  # one that waits for a match does not hold up the others
            return memory.anchors.pop(place), True
        plain = memory.costs.plain
        if memory.measures and plain is not None and memory.rounds - memory.used >= REFRESH:
            return plain, True
        probe = memory.switch.probe(costs)
        if probe is not None and probe not in memory.idle:
            return probe, True
        usable = [index for index, is_open in enumerate(memory.switch.open) if is_open and index not in memory.idle]
        usable = usable or [index for index in range(len(memory.arms)) if index not in memory.idle]
        return self._pick(rows, costs, usable), False

    def _check(self, choice: Choice, outcome: Outcome, memory: _Memory) -> None:
        rows, accepted, depth = len(choice.rows), outcome.accepted, choice.arm.depth
        if choice.index >= len(memory.arms) or memory.arms[choice.index] is not choice.arm:
            raise ValueError("this choice is not of the current decode; observe what the last `choose` returned")
        if len(accepted) != rows:
            raise ValueError(f"accepted has {len(accepted)} entries for {rows} row(s); give one per row of the choice")
        if min(accepted) < 0 or max(accepted) > depth:
            raise ValueError(f"accepted must lie in 0..{depth} (the arm's draft length), got {list(accepted)}")
        if choice.lengths is not None and any(map(_exceeds, accepted, choice.lengths)):
            raise ValueError(f"accepted {list(accepted)} exceeds the lengths of the choice, {list(choice.lengths)}")
        seconds, limit = outcome.seconds, outcome.limit
        if seconds is not None and not 0.0 < seconds < math.inf:
            raise ValueError(
                f"seconds must be positive and finite, got {seconds}; leave it out if it was not measured"
            )
        if limit is not None and (len(limit) != rows or any(map(_exceeds, accepted, limit))):
            raise ValueError(
                f"limit must hold one length per row, none below what was accepted; got {list(limit)} with "
                f"accepted {list(accepted)}"
            )

    @staticmethod
    def _restored(fresh: Learner, saved: Mapping[str, Any]) -> Learner:
        shape = asdict(fresh)
        if set(shape) != set(saved):
            raise KeyError(f"fields {sorted(saved)} instead of {sorted(shape)}")
        for key, value in shape.items():
            if isinstance(value, list) and len(value) != len(saved[key]):
                raise KeyError(f"{key} has {len(saved[key])} entries instead of {len(value)}")
        return type(fresh)(**saved)


def _exceeds(accepted: int, limit: int) -> bool:
    return accepted > limit


def check_count(name: str, value: object, least: int | None, example: int) -> None:
    """Raises ValueError for anything but an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
        bound = "" if least is None else f" of at least {least}"
        raise ValueError(f"{name} must be an integer{bound}, got {value!r}; write {example}")


def check_number(name: str, value: object, low: float, high: float, example: float) -> None:
    """Raises ValueError for anything but a number in [low, high]."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ValueError(f"{name} must be a number from {low} to {high}, got {value!r}; write {name}={example}")
