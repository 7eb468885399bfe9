"""The inference form of an `Eagle3Head`: folded gains, fused projections, the target's output rows at half width.

A draft step at one row is the traffic of its matrices plus some 25 operators. States travel as vectors of length 1, so
that a norm is two operators; what that leaves out stands in the matrices. Queries and keys are rotated together, as
complex numbers; a key head's queries go through attention as positions of one head. Only distances count in a rotary
embedding, so a slot is rotated by its place in the head's own store, wherever that begins in the text.

Letters: R rows, N slots, D hidden size, F feature layers, H query and K key heads, W draft vocabulary.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.kv import KVStore, Slots
from .eagle3 import rotary
from .fast_linear import PreparedLinear

if TYPE_CHECKING:
    from .eagle3 import Eagle3Head

__all__ = ["Eagle3Step"]


class Eagle3Step:
    """Runs draft slots against a one-layer float32 `KVStore`.

    Args:
        head: the trained head; its weights are read now, later changes are not seen.
        embeddings: [V, D], the target's embedding of every token; kept as it is.
        output: [V, D], the target's output matrix; the draft vocabulary's rows are copied.
        dtype: what the matrices are kept and multiplied in. None: on the CPU float16 numbers multiplied in float32 (a
            draft's law is whatever its tokens were drawn from, so rounding a weight by 2^-11 costs nothing but a
            little agreement, and it halves the memory traffic), elsewhere the embeddings' dtype.

    Raises:
        ValueError: the matrices do not fit the head.
    """

    def __init__(self, head: Eagle3Head, embeddings: Tensor, output: Tensor, dtype: torch.dtype | None = None) -> None:
        config, device = head.config, embeddings.device
        size = config.hidden_size
        for name, matrix in (("embeddings", embeddings), ("the output matrix", output)):
            if matrix.shape[1] != size or matrix.shape[0] < config.vocab_size:
                raise ValueError(
                    f"{name} have shape {list(matrix.shape)}, this head drafts for [{config.vocab_size}, {size}]"
                )
        assert config.head_dim is not None
        self.config, self.table, self.device = config, embeddings.detach(), device
        self.heads, self.key_heads, self.head_dim = (
            config.num_attention_heads, config.num_key_value_heads, config.head_dim,
        )  # fmt: skip
        rounded = dtype is None and device.type == "cpu"
        kept = torch.float32 if rounded else dtype if dtype is not None else embeddings.dtype

        def prepared(weight: Tensor) -> PreparedLinear:
            return PreparedLinear(weight.half().float() if rounded else weight, kept)

        def floats(*parameters: Tensor) -> list[Tensor]:
            return [p.detach().to(device).float() for p in parameters]

        length = math.sqrt(size)  # of a vector at unit scale
        with torch.inference_mode():
            embed_gain, state_gain, ffn_gain, out_gain = floats(
                head.embed_norm.weight, head.state_gain, head.ffn_norm.weight, head.out_gain
            )
            mix, wq, wk, wv, wo = floats(*(one.weight for one in (head.mix, head.wq, head.wk, head.wv, head.wo)))
            w1, w2, w3, fc, levels = floats(
                head.w1.weight, head.w2.weight, head.w3.weight, head.fc.weight, head.feature_gain
            )
            both = torch.cat([embed_gain, state_gain]) * length
            enter = torch.cat([mix / length, self._paired(wq), self._paired(wk), wv])
            self.enter = prepared(enter * both)
            self.wo = prepared(wo / length)
            self.w13 = prepared(torch.cat([w1, w3]) * (ffn_gain * length))
            self.w2 = prepared(w2 / length)
            self.fc = prepared(fc * levels.flatten())  # its result is brought to length 1: a factor would be lost
            self.draft_ids = head.draft_ids.detach().to(device)
            rows = output.detach().index_select(0, self.draft_ids).float()
            self.rows = prepared(rows * (out_gain * length))
            # the norm of an embedding, sqrt(sum x^2 + eps D), is that of the module: rows may be tiny, or zero
            self.floor = torch.tensor(math.sqrt(config.rms_norm_eps * size), device=device)
        self._turns = torch.empty(0, 0, device=device)

    def _paired(self, weight: Tensor) -> Tensor:
        """Rows of every head as pairs (j, j + head_dim / 2) side by side, which is what complex numbers turn."""
        return weight.unflatten(0, (-1, 2, self.head_dim // 2)).transpose(1, 2).flatten(0, 2)

    def reserve(self, slots: int) -> None:
        """Makes the rotary table reach `slots` slots."""
        if len(self._turns) >= slots:
            return
        with torch.inference_mode():
            cos, sin = rotary(self.config, torch.arange(slots, device=self.device))
            turn = torch.complex(cos, sin)
            values = torch.ones_like(turn).repeat(1, self.key_heads)
            queries = turn.repeat(1, self.heads) / math.sqrt(self.head_dim)
            self._turns = torch.cat([queries, turn.repeat(1, self.key_heads), values], 1)

    def fuse(self, features: Tensor) -> Tensor:
        """The target's features [R, N, F * D] as states [R, N, D]."""
        levels = features.float().unflatten(-1, (-1, self.config.hidden_size))
        return _straight(self.fc(_straight(levels).flatten(-2)))

    def logits(self, states: Tensor) -> Tensor:
        """States [R, N, D] to float32 draft logits [R, N, W]."""
        return self.rows(states)

    def __call__(self, tokens: Tensor, states: Tensor, store: KVStore, slots: Slots) -> Tensor:
        """New states of N slots.

        Args:
            tokens: [R, N] int64, the token that every slot holds.
            states: [R, N, D], `fuse`d features or what this call returned for the slot before.
            store: where keys and values go; its lengths do not move.
            slots: what `store.plan` gave, or a tree level's own plan. Without a mask it is one slot per row, the same
                for all rows, that stands at its own position `start`.

        Returns:
            [R, N, D], every vector of length 1.
        """
        (rows, count), size = tokens.shape, self.config.hidden_size
        token = F.embedding(tokens, self.table).float()
        token = token / torch.linalg.vector_norm(token, dim=-1, keepdim=True).hypot_(self.floor)
        out = self.enter(torch.cat([token, states], -1))
        x = states + out[..., :size]
        if slots.mask is None and slots.start is not None:
            turn = self._turns[slots.start]
        else:
            turn = self._turns[slots.positions]
        qkv = out[..., size:].contiguous()
        torch.view_as_complex(qkv.unflatten(-1, (-1, 2))).mul_(turn)
        qkv = qkv.unflatten(-1, (-1, self.head_dim))
        q, k, v = qkv.split([self.heads, self.key_heads, self.key_heads], 2)
        keys, values = store.write(0, slots, k.transpose(1, 2), v.transpose(1, 2))
        # [R, K, G * N, head_dim]: the queries of one key head, group by group
        group = self.heads // self.key_heads
        q = q.unflatten(2, (self.key_heads, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)
        mask = slots.mask if slots.mask is None or count == 1 else slots.mask.repeat(1, 1, group, 1)
        seen = F.scaled_dot_product_attention(q, keys, values, mask, scale=1.0)
        seen = seen.unflatten(2, (group, count)).permute(0, 3, 1, 2, 4).reshape(rows, count, -1)
        x.add_(self.wo(seen))
        gate, up = self.w13(_straight(x)).chunk(2, dim=-1)
        x.add_(self.w2(F.silu(gate).mul_(up)))
        return _straight(x)


def _straight(x: Tensor) -> Tensor:
    """x over its length; zeros, which stand where a row has nothing yet, stay zeros."""
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_(min=1e-12)
