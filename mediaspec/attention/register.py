"""Which attention policy a model has: policies by name, and models they are attached to.

A policy makes the key/value store of a run; a target asks for it in `new_cache`. The table holds models weakly and
nothing is written into them.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ..core.kv import KVStore
from .selection import LightTransfer
from .streaming import StreamingReport, StreamingStore

__all__ = ["AttentionPolicy", "LightTransferPolicy", "attach_policy", "detach_policy", "make_policy", "policy_of"]


class AttentionPolicy(Protocol):
    """What keeps keys and values in another way than a slot per position."""

    name: str
    guarantee: str

    def new_store(
        self,
        layers: int,
        rows: int,
        heads: int,
        head_dim: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        windows: Sequence[int],
        slack: int,
    ) -> KVStore:
        """The store of one run; arguments as of `KVStore`.

        Args:
            windows: layers with a sliding window; slack: inputs of the longest pass behind the prompt.
        """
        ...

    def summary(self) -> dict[str, Any]: ...


class LightTransferPolicy:
    """Lazy layers keep a sink and a recent window (arXiv:2410.13846).

    Args:
        settings: of the policy.
    """

    name = "light_transfer"
    guarantee = "lossy"

    def __init__(self, settings: LightTransfer) -> None:
        self.settings = settings
        self.last: StreamingReport | None = None
        self.runs = 0

    def new_store(
        self,
        layers: int,
        rows: int,
        heads: int,
        head_dim: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        windows: Sequence[int],
        slack: int,
    ) -> KVStore:
        return StreamingStore(
            self.settings,
            layers,
            rows,
            heads,
            head_dim,
            capacity,
            dtype,
            device,
            windows=windows,
            slack=slack,
            tell=self._note,
        )

    def summary(self) -> dict[str, Any]:
        """Settings and what the latest run did; its fields are None before the first one."""
        last = self.last
        report: dict[str, Any] = {
            "attention": self.name,
            "guarantee": self.guarantee,
            "settings": {one.name: getattr(self.settings, one.name) for one in fields(self.settings)},
            "runs": self.runs,
            "lazy_layers": None if last is None else list(last.lazy_layers),
            "ratios": None if last is None else dict(last.ratios),
            "errors": None if last is None else dict(last.errors),
            "kv_bytes": None if last is None else last.kv_bytes,
            "full_kv_bytes": None if last is None else last.full_kv_bytes,
            "kv_share": None if last is None else last.kv_bytes / last.full_kv_bytes,
            "prefill_peak_share": None if last is None else last.peak_bytes / last.full_kv_bytes,
            "prompt_lengths": None if last is None else list(last.prompt_lengths),
        }
        return report

    def _note(self, report: StreamingReport) -> None:
        self.last, self.runs = report, self.runs + 1


_attached: WeakKeyDictionary[nn.Module, AttentionPolicy] = WeakKeyDictionary()


def policy_of(model: nn.Module) -> AttentionPolicy | None:
    """The policy attached to this very model object, if any."""
    return _attached.get(model)


def attach_policy(model: nn.Module, policy: AttentionPolicy) -> None:
    """Gives a model a policy.

    Raises:
        ValueError: it has one already.
    """
    if model in _attached:
        raise ValueError(
            f"attention={_attached[model].name!r} is already enabled on this model; call remove() on its handle first"
        )
    _attached[model] = policy


def detach_policy(model: nn.Module, policy: AttentionPolicy) -> None:
    """Takes `policy` away again; nothing happens where the model has another or none."""
    if _attached.get(model) is policy:
        del _attached[model]


def make_policy(name: str, settings: dict[str, Any]) -> AttentionPolicy:
    """A policy by name.

    Raises:
        ValueError: an unknown name or setting, with the nearest valid one; a setting out of range.

    Example:
        >>> make_policy("light_transfer", {"full_layers": 3}).guarantee
        'lossy'
    """
    if name != LightTransferPolicy.name:
        raise ValueError(f"no attention policy named {name!r}; there is {LightTransferPolicy.name!r}")
    known = [one.name for one in fields(LightTransfer)]
    for setting in settings:
        if setting not in known:
            near = difflib.get_close_matches(setting, known, 1, cutoff=0.0)[0]
            raise ValueError(f"{name} has no setting {setting!r}; did you mean {near!r}? It takes {', '.join(known)}")
    return LightTransferPolicy(LightTransfer(**settings))
