"""Llama-like decoders of transformers for few positions on the CPU, without their modules.

A pass over a handful of positions is 25 small operations and seven products per layer, and the modules' Python and
unfused operations cost nearly as much as the products (SmolLM2-135M, one position, 2 cores: 10.6 of 26.6 ms). Here
query, key and value matrices are one product, gate and up another, norms are one operation, and rotations are prepared
once per pass. The model stays the owner of its weights; a trial pass at the first use must agree with the modules.

Letters: R rows, N positions, D hidden size, H query heads, K key heads, S head size.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .fast_linear import MOST_ROWS, PreparedLinear, weights_mark

__all__ = ["DecoderStep"]

FAMILIES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
PRODUCTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TOLERANCE = 1e-3
"""Largest deviation of the trial's logits, in units of their own spread."""
logger = logging.getLogger(__name__)

Attend = Callable[[int, Tensor, Tensor, Tensor, float, "int | None"], Tensor]
"""(layer, queries [R, H, N, S], keys [R, K, N, S], values, scaling, window) -> [R, N, H, S]."""


@dataclass(frozen=True)
class _Layer:
    """One decoder layer: norm weights and products."""

    before: Tensor
    qkv: PreparedLinear
    out: PreparedLinear
    after: Tensor
    wide: PreparedLinear
    down: PreparedLinear
    act: Callable[[Tensor], Tensor]
    scaling: float
    window: int | None
    norms: tuple[Tensor, Tensor] | None


class DecoderStep:
    """The prepared decoder of one model.

    Args:
        model: one of `FAMILIES`, float32 or bfloat16 on the CPU, nothing hooked to its modules.
    """

    _known: weakref.WeakKeyDictionary[nn.Module, tuple[Any, DecoderStep | None]] = weakref.WeakKeyDictionary()

    def __init__(self, model: Any) -> None:
        config, body = model.config, model.model
        self.eps: float = config.rms_norm_eps
        self.heads, self.key_heads = config.num_attention_heads, config.num_key_value_heads
        self.size: int = body.layers[0].self_attn.head_dim
        self.rotary, self.norm = body.rotary_emb, body.norm.weight.detach()
        self.table = body.embed_tokens.weight.detach()
        self.head = _joined(model.lm_head)
        self.layers = [self._layer(layer, config) for layer in body.layers]

    @classmethod
    def of(cls, model: Any) -> DecoderStep | None:
        """The model's own, made at the first call and again when its weights have changed; None where it is none of
        the families, does not stand on the CPU, or the trial fails (said once)."""
        if type(model).__name__ not in FAMILIES or not type(model).__module__.startswith("transformers."):
            return None
        if any(one._forward_hooks or one._forward_pre_hooks or "forward" in vars(one) for one in model.modules()):
            return None  # somebody listens to the modules or replaced one, so they have to run
        mark = weights_mark(model)
        if mark is None:
            return None
        known = cls._known.get(model)
        if known is None or known[0] != mark:
            known = cls._known[model] = (mark, cls._made(model))
        return known[1]

    @classmethod
    def _made(cls, model: Any) -> DecoderStep | None:
        products = [getattr(layer.self_attn, name) for layer in model.model.layers for name in PRODUCTS[:4]]
        products += [getattr(layer.mlp, name) for layer in model.model.layers for name in PRODUCTS[4:]]
        plain = all(type(one) is nn.Linear for one in (*products, model.lm_head))  # no adapter, no quantized matrix
        if not plain or model.dtype not in (torch.float32, torch.bfloat16):
            return None
        with torch.inference_mode():
            step = cls(model)
            deviation = step._deviation(model)
        if deviation <= (TOLERANCE if model.dtype == torch.float32 else 0.2):
            return step
        logger.warning(
            f"{type(model).__name__} runs with its own modules: the prepared decoder's logits deviate by "
            f"{deviation:.1e} of their spread"
        )
        return None

    def serves(self, rows: int, positions: int) -> bool:
        """Whether a pass is small enough to be faster this way."""
        return rows * positions <= MOST_ROWS

    def __call__(
        self, tokens: Tensor, positions: Tensor, attend: Attend, features: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """One pass.

        Args:
            tokens, positions: [R, N] int64.
            attend: stores keys and values and attends, for every layer in turn.
            features: layers whose outputs are wanted.

        Returns:
            logits [R, N, V], hidden [R, N, D] behind the final norm, and [R, N, F * D] or None.
        """
        rows, count = tokens.shape
        x = F.embedding(tokens, self.table)
        cos, sin = self.rotary(x, positions)
        half = self.size // 2
        cos = cos[:, :, None]
        sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)[:, :, None]
        turned, heard = self.heads + self.key_heads, []
        for number, layer in enumerate(self.layers):
            mixed = layer.qkv(_normed(x, layer.before, self.eps)).view(rows, count, -1, self.size)
            turning, values = mixed[:, :, :turned], mixed[:, :, turned:]
            if layer.norms is not None:
                pair = (turning[:, :, : self.heads], turning[:, :, self.heads :])
                turning = torch.cat([_normed(part, weight, self.eps) for part, weight in zip(pair, layer.norms)], 2)
            turning = torch.addcmul(turning * cos, turning.roll(half, -1), sin).transpose(1, 2)
            seen = attend(
                number, turning[:, : self.heads], turning[:, self.heads :], values.transpose(1, 2),
                layer.scaling, layer.window,
            )  # fmt: skip
            x = x + layer.out(seen.reshape(rows, count, -1))
            gate, up = layer.wide(_normed(x, layer.after, self.eps)).chunk(2, -1)
            x = x + layer.down(layer.act(gate).mul_(up))
            if number in features:
                heard.append(x)
        hidden = _normed(x, self.norm, self.eps)
        return self.head(hidden), hidden, torch.cat(heard, -1) if features else None

    def _layer(self, layer: Any, config: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        norms = None
        if hasattr(attention, "q_norm"):
            norms = attention.q_norm.weight.detach(), attention.k_norm.weight.detach()
        window = getattr(attention, "sliding_window", None)
        if type(layer).__name__.startswith("Mistral"):
            window = config.sliding_window
        return _Layer(
            before=layer.input_layernorm.weight.detach(),
            qkv=_joined(attention.q_proj, attention.k_proj, attention.v_proj),
            out=_joined(attention.o_proj),
            after=layer.post_attention_layernorm.weight.detach(),
            wide=_joined(mlp.gate_proj, mlp.up_proj),
            down=_joined(mlp.down_proj),
            act=mlp.act_fn,
            scaling=attention.scaling,
            window=window,
            norms=norms,
        )

    def _deviation(self, model: Any) -> float:
        """Largest difference of both ways' logits over four positions, relative to the logits' standard deviation."""
        tokens = (torch.arange(4)[None] * 7 + 1) % self.table.shape[0]
        wanted = model(input_ids=tokens, use_cache=False).logits
        positions = torch.arange(4)[None]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None) -> Tensor:
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
            return seen.transpose(1, 2)

        got = self(tokens, positions, attend)[0]
        return float((got - wanted).abs().max() / wanted.float().std().clamp(min=1e-6))


def _joined(*linears: nn.Linear) -> PreparedLinear:
    """The products of several layers over the same input as one."""
    biases = [one.bias for one in linears]
    bias = None
    if any(one is not None for one in biases):
        parts = [one.weight.new_zeros(len(one.weight)) if one.bias is None else one.bias for one in linears]
        bias = torch.cat([part.detach() for part in parts])
    weight = linears[0].weight if len(linears) == 1 else torch.cat([one.weight.detach() for one in linears])
    return PreparedLinear(weight.detach(), bias=bias)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x over its root mean square, times `weight`: a third of the time of `F.rms_norm` for few rows."""
    if x.dtype is not torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * length.square_().mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_() * weight
