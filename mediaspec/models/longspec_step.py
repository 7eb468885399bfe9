"""The inference form of a `LongSpecHead`, and the ring buffer it keeps its own keys in.

At one row a draft step is memory traffic plus operator overhead and must stay far below a target pass: norm weights
move into the matrices behind them, queries and keys are turned together, query heads that share a key head become
rows of one product, and masks of a chain are views of one table.

Letters: R rows, N positions of one pass, C hidden size, H query heads, Hkv key heads, D head size, W window, M spare
slots, S = W + M slots of the ring, Vd draft vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .fast_linear import PreparedLinear

if TYPE_CHECKING:
    from .longspec import LongSpecHead

__all__ = ["Cached", "LongSpecStep", "Ring"]

FEWEST_POSITIONS = 4096


class Ring:
    """Own keys and values of the last W committed tokens and of up to M draft nodes: all the state there is.

    The token at position p lies in slot p mod S. Draft nodes lie behind the newest token (position r): node j in slot
    (r + j) mod S, which for a chain is its own position. Nothing is erased: what a query sees follows from r alone, so
    nodes of a rejected branch are out of sight until they are overwritten.

    Args:
        rows: R; heads: Hkv; head_dim: D; window: W; spare: M >= 1.
        dtype, device: of the keys.

    Example:
        >>> ring = Ring(rows=1, heads=3, head_dim=64, window=512, spare=8)
        >>> ring.nbytes == 2 * 520 * 3 * 64 * 4
        True
    """

    def __init__(
        self,
        rows: int,
        heads: int,
        head_dim: int,
        window: int,
        spare: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.window, self.spare, self.size = window, spare, window + spare
        self.keys = torch.zeros(rows, heads, self.size, head_dim, dtype=dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        # what the query at position p sees of slot s depends on (p - s) mod S: one doubled row serves all p as a view
        age = (-torch.arange(2 * self.size, device=device)) % self.size
        row = torch.zeros(2 * self.size, dtype=dtype, device=device)
        self._doubled = row.masked_fill_(age >= window, float("-inf"))
        self._slots = torch.arange(self.size, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return 2 * self.keys.numel() * self.keys.element_size()

    def select(self, rows: Tensor) -> None:
        """Keeps or repeats rows, int64 [R']."""
        self.keys, self.values = self.keys.index_select(0, rows), self.values.index_select(0, rows)

    def write(self, first: Tensor | int, keys: Tensor, values: Tensor) -> None:
        """Stores N tokens [R, Hkv, N, D] from index `first` on ([R] int64, or an int where rows stand alike)."""
        count = keys.shape[2]
        if isinstance(first, int):
            slot = first % self.size
            if slot + count <= self.size:
                self.keys[:, :, slot : slot + count] = keys
                self.values[:, :, slot : slot + count] = values
                return
            first = torch.full((len(keys),), first, device=keys.device)
        self.scatter(first[:, None] + torch.arange(count, device=keys.device), keys, values)

    def scatter(self, index: Tensor, keys: Tensor, values: Tensor) -> None:
        """Stores tokens at indices [R, N] int64; an index that occurs twice must come with equal tokens."""
        where = (index % self.size)[:, None, :, None].expand(keys.shape)
        self.keys.scatter_(2, where, keys)
        self.values.scatter_(2, where, values)

    def chain_mask(self, position: int) -> Tensor:
        """[1, 1, 1, S] additive: what the token at `position` sees, itself included; a view for most positions."""
        slot = position % self.size
        row = self._doubled[self.size - slot : 2 * self.size - slot]
        if position + 1 < self.window:
            row = row.masked_fill(self._slots > position, float("-inf"))
        return row[None, None, None]

    def mask(self, positions: Tensor) -> Tensor:
        """[R, 1, N, S] additive: what chain tokens at `positions` [R, N] see, each at its own place in the ring."""
        age = (positions[..., None] - self._slots) % self.size
        return self._additive((age < self.window) & (age <= positions[..., None]))[:, None]

    def tree_mask(self, root: Tensor, depth: int, seen: Tensor) -> Tensor:
        """What nodes at one depth of a tree see: committed tokens in the window by position, and their ancestors.

        Args:
            root: [R] int64 position of the newest committed token.
            depth: of the nodes, at least 1.
            seen: [R or 1, N, n] bool: which of nodes 1..n each of the N nodes sees (ancestors and itself).

        Returns:
            [R, 1, N, S] additive.
        """
        age = ((root[:, None] - self._slots) % self.size)[:, None]
        visible = (age < self.window - depth) & (age <= root[:, None, None])
        node = ((self._slots - root[:, None]) % self.size)[:, None].expand(-1, seen.shape[1], -1)
        inside = (node >= 1) & (node <= seen.shape[2])
        among = seen.expand(len(root), -1, -1).gather(2, (node - 1).clamp(0, seen.shape[2] - 1))
        return self._additive(visible | (inside & among))[:, None]

    def _additive(self, visible: Tensor) -> Tensor:
        mask = torch.zeros(visible.shape, dtype=self.keys.dtype, device=visible.device)
        return mask.masked_fill_(~visible, float("-inf"))


@dataclass(frozen=True)
class Cached:
    """The target's keys and values that a pass reads: views, never copies.

    Args:
        keys, values: [R, Hkv, n, D]; n = 0 is allowed.
        mask: [R, 1, 1, n] additive, None where all rows see all.
    """

    keys: Tensor
    values: Tensor
    mask: Tensor | None = None


class LongSpecStep:
    """Runs tokens against a `Ring` and the target's cache.

    Args:
        head: the trained head; its weights are read now, later changes are not seen.
        embed: int64 [R, N] -> [R, N, C], the target's embedding.
        rows: [Vd, C] the target's output rows of `head.draft_ids`; bias: [Vd] or None.
        softcap: c of c tanh(logits / c), where the target has it.
        dtype: what the matrices are kept and multiplied in. None: float16 numbers multiplied in float32 for a
            float32 head on the CPU (rounding a draft head's weights changes nothing but a little agreement, and halves
            the memory traffic), else the head's dtype.

    Raises:
        ValueError: the rows do not fit the head.
    """

    def __init__(
        self,
        head: LongSpecHead,
        embed: Callable[[Tensor], Tensor],
        rows: Tensor,
        bias: Tensor | None = None,
        softcap: float | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        config, device = head.config, head.device
        assert config.draft_vocab_size is not None
        if rows.shape != (config.draft_vocab_size, config.hidden_size):
            raise ValueError(
                f"output rows have shape {list(rows.shape)}, this head drafts with "
                f"[{config.draft_vocab_size}, {config.hidden_size}]"
            )
        self.dtype, self.device = head.dtype, device
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads, config.num_key_value_heads, config.head_dim,
        )  # fmt: skip
        self.window, self.eps, self.softcap = config.window, config.rms_norm_eps, softcap
        self.embed, self.embed_scale, self.draft_ids = embed, config.embed_scale, head.draft_ids
        # float32: x / |x| with sqrt(C) in the weights, 2 small operators; F.rms_norm runs 6 on the CPU
        self.direct = self.dtype == torch.float32
        gain = math.sqrt(config.hidden_size) if self.direct else 1.0
        kept = dtype if dtype is not None else self.dtype
        rounded = dtype is None and self.direct and device.type == "cpu"

        def prepared(weight: Tensor, bias: Tensor | None = None) -> PreparedLinear:
            return PreparedLinear((weight.half() if rounded else weight).to(self.dtype), kept, bias=bias)

        def folded(norm: nn.RMSNorm, weight: Tensor, bias: Tensor | None = None) -> PreparedLinear:
            return prepared(weight.float() * (norm.weight.float() * gain), bias)

        with torch.no_grad():
            self.wqkv = folded(head.attention_norm, head.wqkv.weight, head.wqkv.bias)
            self.wo = prepared(head.wo.weight)
            self.cross_q = folded(head.cross_norm, head.cross_q.weight, head.cross_q.bias)
            self.cross_o = prepared(head.cross_o.weight)
            self.w13 = folded(head.mlp_norm, torch.cat([head.w1.weight, head.w3.weight]))
            self.w2 = prepared(head.w2.weight)
            self.normed = head.norm is not None
            self.output = folded(head.norm, rows, bias) if head.norm is not None else prepared(rows, bias)
        frequencies, factor = config.frequencies()
        self._frequencies, self._factor = frequencies.to(device), factor
        self.cos = self.sin = torch.empty(0, device=device)
        self.reach(min(config.max_position_embeddings, FEWEST_POSITIONS))

    def reach(self, positions: int) -> None:
        """Makes the rotary table long enough for positions below `positions`; it is shared by all rows and runs."""
        if positions > len(self.cos):
            angles = torch.arange(2 * positions, device=self.device)[:, None].float() * self._frequencies
            cos, sin = angles.cos() * self._factor, angles.sin() * self._factor
            # x * cos + (halves swapped) * sin
            self.cos = torch.cat([cos, cos], 1).to(self.dtype)
            self.sin = torch.cat([-sin, sin], 1).to(self.dtype)

    def new_ring(self, rows: int, spare: int) -> Ring:
        return Ring(rows, self.kv_heads, self.head_dim, self.window, spare, self.dtype, self.device)

    def project(self, tokens: Tensor, positions: Tensor | int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Everything about tokens that depends on nothing but them.

        Args:
            tokens: [R, N] int64.
            positions: [R, N] int64, or the first of N positions that all rows share.

        Returns:
            Residual stream [R, N, C], turned queries [R, H, N, D], turned keys and values [R, Hkv, N, D].
        """
        (rows, count), both = tokens.shape, self.heads + self.kv_heads
        x = self.embed(tokens).to(self.dtype) * self.embed_scale
        parts = self.wqkv(self._unit(x)).view(rows, count, both + self.kv_heads, self.head_dim).transpose(1, 2)
        turned = self._turn(parts[:, :both], positions, count)
        return x, turned[:, : self.heads], turned[:, self.heads :], parts[:, both:]

    def logits(
        self, x: Tensor, queries: Tensor, positions: Tensor | int, ring: Ring, mask: Tensor, cached: Cached
    ) -> Tensor:
        """The rest of the block for tokens whose own keys are in the ring.

        Args:
            x, queries: of the N tokens, from `project`; positions: likewise.
            mask: [R or 1, 1, N, S] additive, from the ring.
            cached: what the target keeps.

        Returns:
            [R, N, Vd].
        """
        count = x.shape[1]
        x = x + self.wo(self._attend(queries, ring.keys, ring.values, mask))
        if cached.keys.shape[2]:
            q = self.cross_q(self._unit(x)).view(len(x), count, self.heads, self.head_dim).transpose(1, 2)
            q = self._turn(q, positions, count).to(cached.keys.dtype)
            x = x.add_(self.cross_o(self._attend(q, cached.keys, cached.values, cached.mask).to(self.dtype)))
        gate, up = self.w13(self._unit(x)).chunk(2, dim=-1)
        x = x.add_(self.w2(F.silu(gate).mul_(up)))
        logits = self.output(self._unit(x) if self.normed else x)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def _unit(self, x: Tensor) -> Tensor:
        """x divided by its norm (float32) or RMS (half precision); the weights behind carry the rest."""
        if self.direct:
            return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_(min=1e-12)
        return F.rms_norm(x, x.shape[-1:], eps=self.eps)

    def _turn(self, x: Tensor, positions: Tensor | int, count: int) -> Tensor:
        """Rotates x [R, heads, N, D]; see `longspec_attention.rotate_halves`."""
        if isinstance(positions, int):
            cos, sin = self.cos[positions : positions + count], self.sin[positions : positions + count]
        else:
            cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        return torch.addcmul(x * cos, x.roll(self.head_dim // 2, -1), sin)

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
        """[R, H, N, D] queries over [R, Hkv, n, D] -> [R, N, H * D]; query heads of one key head are rows together."""
        rows, heads, count, size = queries.shape
        group = heads // keys.shape[1]
        q = queries.reshape(rows, keys.shape[1], group * count, size)
        if mask is not None and mask.shape[2] > 1 and group > 1:
            mask = mask.repeat(1, 1, group, 1)
        seen = F.scaled_dot_product_attention(q, keys, values, mask)
        return seen.view(rows, heads, count, size).transpose(1, 2).reshape(rows, count, heads * size)
