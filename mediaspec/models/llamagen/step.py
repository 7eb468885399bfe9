"""The inference form of a `LlamaGenGPT`: the same weights, few operators, keys and values in a `KVStore`.

With few rows a layer costs reading its weights plus 2 to 5 microseconds per operator. Per layer there remain four
matrix products (q|k|v and w1|w3 are one each) and about a dozen small operators:

    norm      the residual stream is a view of a buffer with one more column, which holds sqrt(eps * dim); so
              x / |buffer row| * sqrt(dim) is RMSNorm in one norm and one division (F.rms_norm runs six on the CPU)
    rotation  q|k|v is viewed as complex numbers and multiplied in place by one table row per position that holds the
              rotation for all heads of q (times 1 / sqrt(D)) and k, and ones for v
    cache     views of the written and of the live slots are made once per call for all layers, as is the mask
    attention in float32 on the CPU a row's result is the same whatever is computed beside it (`row_attention`)

Letters: R rows, N positions in one pass, M = R * N, H heads, D head size, C condition positions, S image positions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.kv import KVStore, Slots
from ..fast_linear import PreparedLinear, half_exact
from ..row_attention import RowAttention

if TYPE_CHECKING:
    from .gpt import LlamaGenGPT, TransformerBlock

__all__ = ["LlamaGenStep", "weights_version"]


def weights_version(gpt: LlamaGenGPT) -> tuple[object, ...]:
    """Changes whenever a parameter is replaced, moved, cast or written in place. About 0.1 ms for 200 parameters."""
    return tuple((p.data_ptr(), 0 if p.is_inference() else p._version, p.dtype, p.device) for p in gpt.parameters())


class _Layer:
    """Prepared matrices of one block; `norms` are the gains still to be applied, None where the matrices hold them."""

    def __init__(self, block: TransformerBlock, scale: float, fold: bool, dtype: torch.dtype, kind: str) -> None:
        attention, ffn = block.attention, block.feed_forward
        gains = [norm.weight.detach().float() * scale for norm in (block.attention_norm, block.ffn_norm)]

        def prepare(weight: Tensor, gain: Tensor | None = None) -> PreparedLinear:
            return PreparedLinear(weight if gain is None else weight.float() * gain, dtype, kind=kind)

        before, inside = gains if fold else (None, None)
        self.norms = (None, None) if fold else (gains[0], gains[1])
        self.wqkv = prepare(attention.wqkv.weight, before)
        self.wo = prepare(attention.wo.weight)
        self.w2 = prepare(ffn.w2.weight)
        if attention.wqkv.weight.device.type == "cpu":
            self.w13 = [prepare(torch.cat([ffn.w1.weight, ffn.w3.weight]), inside)]
        else:  # a fused copy would double the memory of the largest matrices
            self.w13 = [prepare(ffn.w1.weight, inside), prepare(ffn.w3.weight, inside)]

    def gate_up(self, y: Tensor) -> tuple[Tensor, Tensor]:
        if len(self.w13) == 2:
            return self.w13[0](y), self.w13[1](y)
        gate, up = self.w13[0](y).chunk(2, dim=1)
        return gate, up


class LlamaGenStep:
    """Runs embeddings through all blocks of a model whose weights it has prepared.

    Args:
        gpt: the model; its weights are read now (see `weights_version`).
        dtype: what matrices are kept in (torch.bfloat16 halves their traffic); None is the model's dtype.
        kind: how, one of `mediaspec.models.fast_linear.KINDS`.

    Raises:
        ValueError: weights are NaN, infinite or on the meta device, or the kind cannot run.
    """

    def __init__(self, gpt: LlamaGenGPT, dtype: torch.dtype | None = None, kind: str = "auto") -> None:
        config = gpt.config
        self.dtype, self.device = gpt.dtype, gpt.tok_embeddings.weight.device
        self.dim, self.eps = config.dim, config.norm_eps
        self.heads, self.kv_heads, self.head_dim = config.n_head, config.kv_heads, config.head_dim
        _check(gpt)
        kept = self.dtype if dtype is None else dtype
        with torch.inference_mode():
            # gains folded into a matrix save an operator but make it inexact in fp16, where the fastest form is lost
            exact = kept != torch.bfloat16 and half_exact(*(p.detach() for p in gpt.layers.parameters()))
            fold = self.device.type == "cpu" and not (exact and kind in ("auto", "half"))
            scale = math.sqrt(self.dim)
            self.layers = [_Layer(cast("TransformerBlock", block), scale, fold, kept, kind) for block in gpt.layers]
            self.output = PreparedLinear(gpt.output.weight, kept, kind=kind)
            self.output_gain = gpt.norm.weight.detach().float() * scale
            self.embeddings = gpt.tok_embeddings.weight.detach()
            self.floor = torch.tensor(math.sqrt(self.eps * self.dim), device=self.device)
            cos, sin = gpt.rope_table()
            turn = torch.complex(cos, sin)
            unit = torch.ones_like(turn).repeat(1, self.kv_heads)
            queries, keys = turn.repeat(1, self.heads), turn.repeat(1, self.kv_heads)
            self.rotation = torch.cat([queries / math.sqrt(self.head_dim), keys, unit], dim=1)

    def embed(self, tokens: Tensor) -> Tensor:
        """[R, N] int64 -> [R, N, dim] in the model's dtype."""
        return F.embedding(tokens, self.embeddings)

    def head(self, hidden: Tensor) -> Tensor:
        """[R, N, dim], before the final norm -> logits [R, N, V] float32."""
        hidden = hidden.float()
        norm = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True)
        return self.output((hidden / norm.hypot_(self.floor)).mul_(self.output_gain))

    def __call__(self, embeddings: Tensor, store: KVStore, slots: Slots) -> Tensor:
        """The last layer's output before the final norm.

        Args:
            embeddings: [R, N, dim].
            store: receives keys and values of the N positions; its lengths do not move.
            slots: what `store.plan` gave.

        Returns:
            [R, N, dim] in the model's dtype.
        """
        rows, count, dim = embeddings.shape
        wide = torch.empty(rows * count, dim + 1, device=self.device)
        wide[:, dim] = self.floor
        x = wide[:, :dim]
        x.copy_(embeddings.view(-1, dim))
        # positions behind the grid (finished rows) repeat its last one
        turn = self.rotation[slots.positions.clamp(max=len(self.rotation) - 1)].flatten(0, 1)
        cached = _NewSlots(store, slots, count)
        # q, k and v as [R, H, N, D] views of the product, each made by one operator
        size, width = self.head_dim, (self.heads + 2 * self.kv_heads) * self.head_dim
        stride = (count * width, size, width, 1)
        q_shape, kv_shape = (rows, self.heads, count, size), (rows, self.kv_heads, count, size)
        k_start, v_start = self.heads * size, (self.heads + self.kv_heads) * size
        attend: Callable[[int, Tensor], Tensor] = (
            RowAttention(store, slots, count)
            if RowAttention.serves(store, self.heads, count)
            else functools.partial(_fused_attention, store, slots)
        )
        norm = torch.linalg.vector_norm
        for number, layer in enumerate(self.layers):
            gain, ffn_gain = layer.norms
            y = x / norm(wide, dim=1, keepdim=True)
            qkv = layer.wqkv(y if gain is None else y.mul_(gain))
            qkv.view(torch.complex64).mul_(turn)
            q = qkv.as_strided(q_shape, stride, 0)
            cached.write(number, qkv.as_strided(kv_shape, stride, k_start), qkv.as_strided(kv_shape, stride, v_start))
            x.add_(layer.wo(attend(number, q)))
            y = x / norm(wide, dim=1, keepdim=True)
            gate, up = layer.gate_up(y if ffn_gain is None else y.mul_(ffn_gain))
            x.add_(layer.w2(F.silu(gate).mul_(up)))
        return x.to(self.dtype, copy=True, memory_format=torch.contiguous_format).view(rows, count, dim)

    def describe(self) -> str:
        """How the matrices of the first block and of the output are kept."""
        return f"{len(self.layers)} layers, {self.layers[0].wqkv.describe()}; output {self.output.describe()}"


class _NewSlots:
    """Per-layer views of the slots one pass writes, made with a few operators for all layers."""

    def __init__(self, store: KVStore, slots: Slots, count: int) -> None:
        self.index: Tensor | None = None
        if slots.start is not None:
            self.keys = store.keys.narrow(3, slots.start, count).unbind(0)
            self.values = store.values.narrow(3, slots.start, count).unbind(0)
        else:
            assert slots.index is not None
            self.keys, self.values = store.keys.unbind(0), store.values.unbind(0)
            self.index = slots.index.expand(-1, store.keys.shape[2], -1, store.keys.shape[4])

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Stores [R, H, N, D]."""
        if self.index is None:
            self.keys[layer].copy_(keys)
            self.values[layer].copy_(values)
        else:
            self.keys[layer].scatter_(2, self.index, keys.to(self.keys[layer].dtype))
            self.values[layer].scatter_(2, self.index, values.to(self.values[layer].dtype))


def _fused_attention(store: KVStore, slots: Slots, layer: int, queries: Tensor) -> Tensor:
    """[R, H, N, D] queries -> [R * N, H * D]."""
    keys, values = store.keys[layer][:, :, : slots.live], store.values[layer][:, :, : slots.live]
    seen = F.scaled_dot_product_attention(
        queries.to(keys.dtype), keys, values, slots.mask, scale=1.0, enable_gqa=keys.shape[1] != queries.shape[1]
    )
    return seen.transpose(1, 2).flatten(2).flatten(0, 1)


def _check(gpt: LlamaGenGPT) -> None:
    """Refuses weights that cannot be prepared. One reduction per parameter, at load only."""
    for name, parameter in gpt.named_parameters():
        if parameter.device.type == "meta":
            raise ValueError(
                f"weight {name} is on the meta device (sequential offload or an unfinished load); this target needs "
                f"its weights resident: use enable_model_cpu_offload() or load without device_map"
            )
        if not parameter.detach().isfinite().all():
            raise ValueError(
                f"weight {name} holds NaN or infinite values; the checkpoint is damaged or overflowed in its dtype"
            )
