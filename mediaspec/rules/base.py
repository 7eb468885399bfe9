"""The acceptance rule: which drafted tokens stay, and what is emitted instead of the others.

A rule is one file with one subclass of `AcceptanceRule`. It needs a `name`, a constructor decorated with
`register_to_config` if it has settings, and one of two methods:

* `linear(length)`: the rule accepts x iff u Q(x) < scale_i P(x) + offset_i Q(x); verified by the fused kernels;
* `accepted_mass(p, q, first)`: any other rule, a(x) = Q(x) f(x); verified in plain torch.

Defining the class is enough: `make_rule("<name>", ...)` finds it once its module is imported, and a pipeline folder
stores it as `scheduler_config.json`. Run `mediaspec.testing.check_rule` on it.

    class HalfRule(AcceptanceRule):
        name = "half"
        lossless = True

        def linear(self, length):
            return torch.full((length,), 0.5), torch.zeros(length)

Letters: B rows, K draft length, V vocabulary; P and Q are the processed target and draft rows.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..core import rng as purposes
from ..core.component import ConfigMixin, SchedulerMixin, register_to_config
from ..core.ledger import LEDGERS
from ..core.types import Verdict
from ..core.verify import VerifyInputs, verify_chain_by_mass, verify_tree_by_mass
from ..kernels.verify_chain import Residual, verify_chain
from ..kernels.verify_tree import verify_tree

__all__ = ["GUARANTEES", "AcceptanceRule", "check_choice", "check_count"]

GUARANTEES = ("exact-tokens", "exact-law", "bounded-drift", "unbounded")


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raises ValueError offering the nearest allowed value."""
    if value not in allowed:
        near = difflib.get_close_matches(str(value), allowed, 1) or allowed[:1]
        raise ValueError(f'{name} must be one of {allowed}, got {value!r}; write {name}="{near[0]}"')


def check_count(name: str, value: object, example: int) -> None:
    """Raises ValueError for anything but an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}; write {name}={example}")


class AcceptanceRule(SchedulerMixin, ConfigMixin):
    """Base of all acceptance rules.

    Class attributes and properties a rule states about itself:

        name: key of `make_rule`; presets: further keys, each with the settings it stands for.
        lossless: the emitted law is exactly the target's.
        coupled: drafts are drawn with the target's noise and accepted when they equal the target's own draw.
        guarantee: "exact-tokens" (the very tokens of plain sampling with the same seed), "exact-law" (their law),
            "bounded-drift" (`bound` limits the one-step TV in advance) or "unbounded" (it is only measured).
        residual: "gstar" or "band", see `core.law.residual_weights`.
        ledger: "tv", "hellinger" or "none", see `core.ledger`.
        may_leave_support: tokens of target probability 0 can be emitted.
        permutation_equivariant: renaming tokens renames the result (false where a codebook or ties decide).
        monotone: raising P(x) at the cost of all others in proportion never lowers a(x).
    """

    registry: ClassVar[dict[str, tuple[type[AcceptanceRule], Mapping[str, Any]]]] = {}

    name: ClassVar[str] = ""
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    has_compatibles = False
    lossless: bool = False
    coupled: bool = False
    residual: Residual = "gstar"
    ledger: str = "tv"
    may_leave_support: bool = False
    permutation_equivariant: bool = True
    monotone: bool = True

    @register_to_config
    def __init__(self) -> None:
        pass

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not cls.name:
            return
        if cls.linear is AcceptanceRule.linear and cls.accepted_mass is AcceptanceRule.accepted_mass:
            raise TypeError(f"{cls.__name__} must define `linear` or `accepted_mass`")
        for key, settings in {cls.name: {}, **cls.presets}.items():
            known = AcceptanceRule.registry.get(key)
            if known is not None and known[0].__qualname__ != cls.__qualname__:
                raise TypeError(f"{cls.__name__} cannot be named {key!r}: {known[0].__name__} has that name")
            AcceptanceRule.registry[key] = (cls, settings)

    @property
    def guarantee(self) -> str:
        if self.lossless:
            return "exact-tokens" if self.coupled else "exact-law"
        return "unbounded"

    @classmethod
    def settings(cls) -> list[str]:
        """Names of the constructor's arguments."""
        return [name for name in inspect.signature(cls.__init__).parameters if name != "self"]

    @classmethod
    def check_settings(cls, given: Mapping[str, Any]) -> None:
        """Raises ValueError for a setting this rule does not have, offering the nearest one."""
        allowed = cls.settings()
        for key in given:
            if key not in allowed and not key.startswith("_"):
                near = difflib.get_close_matches(key, allowed, 1, cutoff=0.0)
                hint = f"did you mean {near[0]!r}? It has {allowed}" if near else "it has no settings"
                raise ValueError(f"{cls.__name__} has no setting {key!r}; {hint}")

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Builds the rule from a saved config; an unknown key is an error."""
        cls.check_settings(config)
        return super().from_config(config, *args, **kwargs)

    def prepare(self, target: object) -> None:
        """Called by a pipeline before decoding: a rule takes what it needs of the target (a codebook) here."""

    def linear(self, length: int) -> tuple[Tensor, Tensor] | None:
        """(scale, offset), each [length] on the CPU, of u Q < scale P + offset Q at the first `length` draft
        positions of a round; None for rules that are not of this form."""
        return None

    def accepted_mass(self, p: Tensor, q: Tensor, first: int = 0) -> Tensor:
        """a(x) = Q(x) f(x) at the positions first, first + 1, ... of a round.

        Args:
            p: [..., K, V] target probabilities.
            q: [..., K, V] draft probabilities.
            first: index within the round of p[..., 0, :], 0-based.

        Returns:
            [..., K, V] with 0 <= a <= q.
        """
        scale, offset = self._pair(first + p.shape[-2], p.device, p.dtype)
        relaxed = p if scale is None else scale[first:, None] * p
        return torch.minimum(q, relaxed if offset is None else relaxed + offset[first:, None] * q)

    def accept_prob(self, p: Tensor, q: Tensor, first: int = 0) -> Tensor:
        """f(x) = a(x) / Q(x), [..., K, V]; 0 where Q is 0, such a token cannot be drafted."""
        a = self.accepted_mass(p, q, first)
        return torch.where(q > 0, a / q, 0.0)

    def bound(self, length: int) -> Tensor:
        """[length] float32: the largest one-step TV this rule can cause at each draft position, whatever the rows."""
        return torch.zeros(length) if self.lossless else torch.ones(length)

    def verify(self, inputs: VerifyInputs) -> Verdict:
        """Decides one draft: kernels for coupled and linear rules, `core.verify` for the others."""
        ledger = "none" if self.lossless else (inputs.ledger or self.ledger)
        check_choice("ledger", ledger, LEDGERS)
        tree = inputs.draft.tree
        if not self.coupled and (ledger == "hellinger" or not self._linear):
            inputs = replace(inputs, ledger=ledger)
            return verify_chain_by_mass(self, inputs) if tree is None else verify_tree_by_mass(self, inputs)
        return self._verify_chain(inputs) if tree is None else self._verify_tree(inputs)

    def _verify_chain(self, inputs: VerifyInputs) -> Verdict:
        draft, length = inputs.draft, inputs.draft.tokens.shape[1]
        scale, offset = self._pair(length, inputs.start.device)
        rng, start, host = inputs.rng, inputs.start, inputs.host_start
        noise = rng.noise_from(start, host, length + 1, purposes.TARGET)
        on_the_fly = self.coupled or noise is None
        uniforms = None if on_the_fly else rng.uniforms_from(start, host, length, purposes.ACCEPT)
        decided = verify_chain(
            inputs.target_logits, draft.tokens, draft.lengths, inputs.warp,
            draft_probs=draft.probs, scale=scale, offset=offset, residual=self.residual,
            seeds=inputs.rng.seeds, start=inputs.start, guidance=inputs.guidance, allowed=inputs.allowed,
            forced=inputs.forced, noise=noise, uniforms=uniforms,
            mode="match" if self.coupled else "ratio",
            need_choices=inputs.need_choices, need_probs=inputs.need_probs,
        )  # fmt: skip
        return Verdict(
            decided.num_accepted, decided.next_token, decided.drift,
            choices=decided.choices, target_probs=decided.target_probs,
        )  # fmt: skip

    def _verify_tree(self, inputs: VerifyInputs) -> Verdict:
        draft = inputs.draft
        assert draft.tree is not None
        tables = draft.tree.tables(draft.tokens.device)
        scale, offset = self._pair(tables.levels, inputs.start.device)
        rng, start, host = inputs.rng, inputs.start, inputs.host_start
        noise = rng.noise_from(start, host, tables.levels + 1, purposes.TARGET)
        uniforms = None
        if not self.coupled and noise is not None:
            siblings = range(tables.children.shape[1])
            drawn = [rng.uniforms_from(start, host, tables.levels, purposes.ACCEPT, sibling) for sibling in siblings]
            uniforms = torch.stack(drawn, -1)
        decided = verify_tree(
            inputs.target_logits, draft.tokens, draft.lengths, tables, inputs.warp,
            draft_probs=draft.probs, scale=scale, offset=offset, residual=self.residual,
            seeds=inputs.rng.seeds, start=inputs.start, guidance=inputs.guidance, allowed=inputs.allowed,
            forced=None if inputs.forced is None else inputs.forced[:, tables.depth],
            noise=noise, uniforms=uniforms, mode="match" if self.coupled else "ratio",
            need_choices=inputs.need_choices, need_probs=inputs.need_probs,
        )  # fmt: skip
        return Verdict(
            decided.num_accepted, decided.next_token, decided.drift, path=decided.path,
            choices=decided.choices, target_probs=decided.target_probs,
        )  # fmt: skip

    @cached_property
    def _linear(self) -> bool:
        return self.linear(1) is not None

    def _pair(
        self, length: int, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor | None, Tensor | None]:
        """`linear` on the device, made once per length; None stands for all ones and all zeros."""
        cache = self.__dict__.setdefault("_pairs", {})
        key = (length, device, dtype)
        if key not in cache:
            scale, offset = self.linear(length) or (torch.ones(length), torch.zeros(length))
            relaxed, shifted = bool((scale != 1).any()), bool((offset != 0).any())
            cache[key] = (
                scale.to(device=device, dtype=dtype) if relaxed else None,
                offset.to(device=device, dtype=dtype) if shifted else None,
            )
        pair: tuple[Tensor | None, Tensor | None] = cache[key]
        return pair
