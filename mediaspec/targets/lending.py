"""A model lent to our attention, and given back as it was, however many runs borrow it at a time.

The attention implementation belongs to the model, not to a run: the first borrower sets it, the last one restores it,
and passes through the model's modules take turns.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel

from .kv_attention import NAME

__all__ = ["Loan"]


class Loan:
    """The one loan of a model.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        ...                      num_attention_heads=2)
        >>> model = LlamaForCausalLM(config)
        >>> with Loan.of(model).lent(), Loan.of(model).lent():
        ...     model.config._attn_implementation
        'mediaspec'
        >>> model.config._attn_implementation
        'sdpa'
    """

    _known: weakref.WeakKeyDictionary[PreTrainedModel, Loan] = weakref.WeakKeyDictionary()
    _making = threading.Lock()

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = weakref.ref(model)
        self.lock = threading.RLock()
        self._users = 0
        self._before: str | dict[str, str] = ""

    @classmethod
    def of(cls, model: PreTrainedModel) -> Loan:
        """The model's own, made at the first call."""
        with cls._making:
            known = cls._known.get(model)
            if known is None:
                known = cls._known[model] = cls(model)
            return known

    @contextmanager
    def lent(self) -> Iterator[None]:
        """While open, the model attends as `kv_attention` says."""
        model = self._model()
        assert model is not None, "the borrower holds the model"
        with self.lock:
            if self._users == 0:
                self._before = _implementations(model)
                model.set_attn_implementation(NAME)
            self._users += 1
        try:
            yield
        finally:
            with self.lock:
                self._users -= 1
                if self._users == 0:
                    model.set_attn_implementation(self._before)


def _implementations(model: PreTrainedModel) -> str | dict[str, str]:
    """The model's attention implementation, and those of its parts where it has some."""
    config: Any = model.config
    parts = {key: getattr(config, key, None) for key in getattr(config, "sub_configs", {})}
    found = {key: part._attn_implementation for key, part in parts.items() if part is not None}
    top: str = config._attn_implementation
    return {"": top, **found} if found else top
