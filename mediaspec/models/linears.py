"""The matrices of a whole model prepared for few rows (`fast_linear`), put in place while it decodes.

Instances are changed, never classes: a module's own `forward` is shadowed by an attribute and bared again.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from .fast_linear import PreparedLinear

__all__ = ["PreparedLinears"]

MOST = 48
"""Rows of one product up to which the prepared form is the faster one (fp16 tiles against F.linear, 2 cores)."""


class PreparedLinears:
    """Prepared forms of every `nn.Linear` of a model on the CPU; empty elsewhere.

    Args:
        model: in inference; weights that are changed later are noticed and prepared again at the next `attach`.

    Example:
        >>> net = nn.Sequential(nn.Linear(8, 8))
        >>> linears = PreparedLinears(net)
        >>> linears.attach(); y = net(torch.ones(1, 8)); linears.detach()
        >>> "forward" in vars(net[0])
        False
    """

    _known: weakref.WeakKeyDictionary[nn.Module, PreparedLinears] = weakref.WeakKeyDictionary()

    def __init__(self, model: nn.Module) -> None:
        # other libraries that place or quantize weights hook modules or subclass nn.Linear: those are left alone
        self._modules = [
            weakref.ref(one)
            for one in model.modules()
            if type(one) is nn.Linear and "forward" not in vars(one) and not hasattr(one, "_hf_hook")
        ]
        self._ready: dict[int, tuple[Any, _Forward]] = {}
        self._users = 0

    @classmethod
    def of(cls, model: nn.Module) -> PreparedLinears:
        """The model's own, made at the first call."""
        known = cls._known.get(model)
        if known is None:
            known = cls._known[model] = cls(model)
        return known

    def attach(self) -> None:
        """Puts the prepared products in place until as many calls of `detach`."""
        self._users += 1
        if self._users > 1:
            return
        for index, reference in enumerate(self._modules):
            module = reference()
            if module is None or module.weight.device.type != "cpu" or not module.weight.is_floating_point():
                continue
            version = 0 if module.weight.is_inference() else module.weight._version
            mark = (module.weight.data_ptr(), version, module.weight.dtype)
            if self._ready.get(index, (None,))[0] != mark:
                self._ready[index] = (mark, _Forward(module))
            module.forward = self._ready[index][1]  # type: ignore[method-assign]

    def detach(self) -> None:
        self._users -= 1
        if self._users:
            return
        for reference in self._modules:
            module = reference()
            if module is not None:
                vars(module).pop("forward", None)


class _Forward:
    """What stands in for one module's `forward`."""

    def __init__(self, module: nn.Linear) -> None:
        self.weight, self.bias = module.weight.detach(), None if module.bias is None else module.bias.detach()
        self.few = PreparedLinear(self.weight, bias=self.bias)

    def __call__(self, x: Tensor) -> Tensor:
        if x.numel() <= MOST * x.shape[-1]:
            return self.few(x)
        return F.linear(x, self.weight, self.bias)
