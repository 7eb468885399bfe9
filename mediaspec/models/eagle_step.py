"""The inference form of an `EagleHead`: folded norms, fused projections, one embedding look-up per token.

At one row a draft step is memory traffic plus operator overhead, and it must stay far below a target pass. Norm
weights move into the matrices behind them, the embedding half of the first matrix becomes a table over the vocabulary,
queries and keys are rotated together as complex numbers: some 25 operators, and D^2 weights fewer to read.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.kv import KVStore, Slots
from .fast_linear import PreparedLinear

if TYPE_CHECKING:
    from .eagle import EagleHead

__all__ = ["EagleStep"]


class EagleStep:
    """Runs draft slots against a one-layer `KVStore` over image tokens.

    Args:
        head: the trained head; its weights are read now, later changes are not seen.
        embeddings: [V, D], the target's embedding of every token.
        dtype: what the matrices are kept and multiplied in. None: float16 numbers multiplied in float32 for a
            float32 head on the CPU (a draft's law is whatever its tokens were drawn from, so rounding a weight by
            2^-11 costs nothing but a little agreement, and it halves the memory traffic), else the head's dtype.

    Raises:
        ValueError: the embedding table does not fit the head.
    """

    def __init__(self, head: EagleHead, embeddings: Tensor, dtype: torch.dtype | None = None) -> None:
        config, device = head.config, head.device
        size = config.hidden_size
        if embeddings.shape != (config.vocab_size, size):
            raise ValueError(
                f"embeddings have shape {list(embeddings.shape)}, this head drafts for [{config.vocab_size}, {size}]"
            )
        self.dtype = head.dtype
        self.heads, self.head_dim, self.eps = config.num_attention_heads, config.head_dim, config.rms_norm_eps
        # float32: x / |x| with sqrt(D) in the weights, 3 small operators; F.rms_norm runs 6 on the CPU
        self.direct = self.dtype == torch.float32
        gain = math.sqrt(size) if self.direct else 1.0
        kept = dtype if dtype is not None else self.dtype
        rounded = dtype is None and self.direct and device.type == "cpu"

        def prepared(weight: Tensor) -> PreparedLinear:
            return PreparedLinear((weight.half() if rounded else weight).to(self.dtype), kept)

        def folded(norm: nn.RMSNorm, *weights: Tensor) -> PreparedLinear:
            return prepared(torch.cat(weights).float() * (norm.weight.float() * gain))

        with torch.no_grad():
            by_token, by_hidden = head.fc.weight.split(size, dim=1)
            self.table = F.linear(head.embed_norm(embeddings.to(self.dtype)), by_token)
            self.enter = folded(head.hidden_norm, by_hidden)
            self.wqkv = folded(head.attention_norm, head.wqkv.weight)
            self.wo = prepared(head.wo.weight)
            self.w13 = folded(head.ffn_norm, head.w1.weight, head.w3.weight)
            self.w2 = prepared(head.w2.weight)
            self.out_scale = head.out_scale.detach()
            scale = float(head.logit_scale.detach())
        self.logit_scale = None if scale == 1.0 else scale
        assert config.max_positions is not None
        cos, sin = head.rotary(config.max_positions)
        turn = torch.complex(cos, sin)
        # one product per slot turns queries and keys and leaves values alone: [positions, 3 * D / 2]
        turns = turn.repeat(1, self.heads)
        self.rotation = torch.cat([turns, turns, torch.ones_like(turns)], 1)

    def _unit(self, x: Tensor) -> Tensor:
        """x divided by its norm (float32) or RMS (half precision); the weights behind carry the rest.

        A zero row gives NaN, a law that no draft survives; it takes a head whose input vanishes.
        """
        if self.direct:
            return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return F.rms_norm(x, x.shape[-1:], eps=self.eps)

    def __call__(self, tokens: Tensor, hidden: Tensor, store: KVStore, slots: Slots) -> Tensor:
        """Predicted hidden states of N slots.

        Args:
            tokens: [R, N] int64, the token of every slot.
            hidden: [R, N, D], the (true or predicted) hidden state that predicted it.
            store: where keys and values go; its lengths do not move.
            slots: what `store.plan` gave, or a tree level's own plan; `positions` are image positions. Without a mask
                it is one slot per row, the same for all rows, that stands at its own position `start`.

        Returns:
            [R, N, D].
        """
        (rows, count), size, dim = tokens.shape, self.head_dim, self.heads * self.head_dim
        x = self.enter(self._unit(hidden)).add_(torch.embedding(self.table, tokens))
        last = self.rotation.shape[0] - 1
        if slots.mask is None and slots.start is not None:
            turn = self.rotation[min(slots.start, last)]
        else:
            turn = self.rotation[slots.positions.clamp(max=last)]
        qkv = self.wqkv(self._unit(x)).float()
        qkv.view(torch.complex64).mul_(turn)
        qkv = qkv.to(self.dtype)
        shape, stride = (rows, self.heads, count, size), (count * 3 * dim, size, 3 * dim, 1)
        q, k, v = (qkv.as_strided(shape, stride, at) for at in (0, dim, 2 * dim))
        keys, values = store.write(0, slots, k, v)
        seen = F.scaled_dot_product_attention(q, keys, values, slots.mask)
        x.add_(self.wo(seen.transpose(1, 2).reshape(rows, count, dim)))
        gate, up = self.w13(self._unit(x)).chunk(2, dim=-1)
        x.add_(self.w2(F.silu(gate).mul_(up)))
        return torch.addcmul(hidden, x, self.out_scale)
