"""Runs the attention diagnostics on a transformers decoder: one ordinary prefill, watched from the side.

    >>> from mediaspec.eval.inspection import inspect_model
    >>> report = inspect_model(model, ids)                    # doctest: +SKIP
    >>> [(head.layer, head.head) for head in report.sinks()]  # doctest: +SKIP

Letters: n prompt tokens, L layers.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..attention.collector import Collector
from ..attention.diagnostics import AttentionReport, Settings, diagnose
from ..attention.rope_profile import Rotary
from ..core.prompt import TokenPrompt
from ..targets.causal_lm import CausalLMTarget

__all__ = ["inspect_model", "prompt_hash", "rotary_of"]


@torch.inference_mode()
def inspect_model(
    model: PreTrainedModel, ids: Tensor, *, name: str = "", settings: Settings | None = None
) -> AttentionReport:
    """The report of all heads on one prompt.

    The model attends as it always does in this library; queries are kept on the side, and row sums, probabilities and
    moments are computed from them and the stored keys in float32.

    Args:
        model: a causal language model in evaluation mode.
        ids: [n] int64 prompt, at least 2 tokens.
        name: of the model, for the report; default: the name or path it was loaded from.
        settings: strip rows and thresholds.

    Raises:
        ValueError: the model is none the library can drive, or the prompt is too short.
    """
    if ids.dim() != 1 or len(ids) < 2 or ids.dtype != torch.int64:
        raise ValueError(f"ids are {ids.dtype} of shape {list(ids.shape)}; give one prompt, int64 [n] with n >= 2")
    settings = settings if settings is not None else Settings()
    target = CausalLMTarget(model, num_tokens=1, fast=False)  # one prefill does not repay preparing weights
    prompt = TokenPrompt.from_padded(ids.to(target.device)[None])
    layers = target.config.num_hidden_layers
    rotary = [rotary_of(model, layer) for layer in range(layers)]
    collector = Collector([len(ids)], settings.rows, rotary)
    cache = target.new_cache(rows=1, extra=0)
    cache.watch = collector
    target.prefill(prompt, cache)
    return diagnose(
        [collector.layers[layer] for layer in range(layers)],
        cache.keys,
        cache.values,
        len(ids),
        rotary=rotary,
        settings=settings,
        model=name or str(model.config._name_or_path),
        prompt_sha256=prompt_hash(ids),
    )


def prompt_hash(ids: Tensor) -> str:
    """sha256 of token ids as little-endian int64: the same on every machine."""
    return hashlib.sha256(ids.cpu().numpy().astype("<i8").tobytes()).hexdigest()


def rotary_of(model: PreTrainedModel, layer: int) -> Rotary | None:
    """The frequencies and the pairing with which a layer rotates; None where the model does not show both.

    Frequencies are the module's own buffer (scaled rotations included), the pairing is what the model's own
    `rotate_half` does with four numbers.
    """
    config = model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None)
    names = ["inv_freq"] if kinds is None else [f"{kinds[layer]}_inv_freq", "inv_freq"]
    buffers = (getattr(module, name, None) for name in names for module in model.modules())
    frequencies = next((one for one in buffers if isinstance(one, Tensor)), None)
    layout = _layout(sys.modules[type(model.base_model).__module__])
    if frequencies is None or layout is None:
        return None
    return Rotary(frequencies.float(), layout)


def _layout(source: Any) -> str | None:
    rotate = getattr(source, "rotate_half", None)
    if rotate is None:
        return None
    turned = rotate(torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist()
    return {(-3.0, -4.0, 1.0, 2.0): "half", (-2.0, 1.0, -4.0, 3.0): "interleaved"}.get(tuple(turned))
