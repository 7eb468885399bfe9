"""The matrices of a whole model prepared for few rows (`fast_linear`), put in place while it decodes.

Instances are changed, never classes: a module's own `forward` is shadowed by an attribute and bared again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch.nn.functional as F
from torch import Tensor, nn

from .fast_linear import MOST_ROWS, PreparedLinear, weights_mark

__all__ = ["PreparedLinears"]


class PreparedLinears:
    """Prepared forms of every `nn.Linear` of a model on the CPU; nothing where it stands elsewhere.

    Args:
        model: in inference; weights that are changed later are noticed the next time.

    Example:
        >>> net = nn.Sequential(nn.Linear(8, 8))
        >>> with PreparedLinears(net).in_place():
        ...     "forward" in vars(net[0])
        True
        >>> "forward" in vars(net[0])
        False
    """

    _known: weakref.WeakKeyDictionary[nn.Module, PreparedLinears] = weakref.WeakKeyDictionary()

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._ready: dict[nn.Linear, _Forward] = {}
        self._mark: object = None
        self._users = 0

    @classmethod
    def of(cls, model: nn.Module) -> PreparedLinears:
        """The model's own, made at the first call."""
        known = cls._known.get(model)
        if known is None:
            known = cls._known[model] = cls(model)
        return known

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While open, few rows go through the prepared products. The borrower's lock covers entering and leaving."""
        if self._users == 0:
            self._prepare()
            for module, forward in self._ready.items():
                if not _taken(module):
                    module.forward = forward  # type: ignore[method-assign, assignment]
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if self._users == 0:
                for module, forward in self._ready.items():
                    if vars(module).get("forward") is forward:
                        del module.forward

    def _prepare(self) -> None:
        """Makes the products again where a weight has changed."""
        model = self._model()
        mark = None if model is None else weights_mark(model)
        if model is not None and mark is not None and mark == self._mark:
            return
        self._mark, self._ready = mark, {}
        if model is not None and mark is not None:
            # other libraries that place or quantize weights hook modules or subclass nn.Linear: those are left alone
            linears = [one for one in model.modules() if type(one) is nn.Linear and not _taken(one)]
            self._ready = {one: _Forward(one) for one in linears if one.weight.is_floating_point()}


def _taken(module: nn.Module) -> bool:
    """Whether another library's `forward` stands in an instance."""
    return "forward" in vars(module) or hasattr(module, "_hf_hook")


class _Forward:
    """What stands in for one module's `forward`."""

    def __init__(self, module: nn.Linear) -> None:
        self.weight, self.bias = module.weight.detach(), None if module.bias is None else module.bias.detach()
        self.few = PreparedLinear(self.weight, bias=self.bias)

    def __call__(self, x: Tensor) -> Tensor:
        if x.numel() <= MOST_ROWS * x.shape[-1]:
            return self.few(x)
        return F.linear(x, self.weight, self.bias)
