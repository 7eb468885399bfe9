"""Shows an attention policy the layer that is running: the stream it adds to and its output matrix.

Only forward hooks of modules, and only while open; a model whose layers look different shows nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..attention.output_error import LayerSight
from ..core.kv import KVStore

__all__ = ["layers_in_sight"]


@contextmanager
def layers_in_sight(model: nn.Module, store: KVStore) -> Iterator[None]:
    """While open, `store.sight` is the `LayerSight` of the layer at work, or None.

    Layers that norm what attention gives before it is added (Gemma 2 and 3) have another output matrix than the one
    on show and are left out.
    """
    layers = getattr(getattr(model, "base_model", None), "layers", None)
    hooks: list[RemovableHandle] = []
    for layer in layers if isinstance(layers, nn.ModuleList) else ():
        project = getattr(getattr(layer, "self_attn", None), "o_proj", None)
        if isinstance(project, nn.Module) and not hasattr(layer, "pre_feedforward_layernorm"):
            hooks.append(layer.register_forward_pre_hook(_Note(store, project), with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        store.sight = None


class _Note:
    """Leaves a layer's sight with the store when the layer is called."""

    def __init__(self, store: KVStore, project: nn.Module) -> None:
        self.store, self.project = store, project

    def __call__(self, layer: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        residual = given[0] if given else named.get("hidden_states")
        fits = isinstance(residual, Tensor) and residual.dim() == 3 and torch.is_floating_point(residual)
        self.store.sight = LayerSight(residual, self.project) if fits else None  # type: ignore[arg-type]
