"""One-block draft head over a target's hidden states (EAGLE, arXiv:2401.15077; multi-step training, arXiv:2503.01840).

Letters: R rows, N slots, D hidden size of the target, H heads, T image tokens, S cache slots.
Slot i holds the embedding of image token i and the target's hidden state that predicted token i (last layer, before
the final norm); the head predicts the hidden state that predicts token i + 1. Logits come from the target's own final
norm and output matrix, so a head knows no vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers import initialization as init

if TYPE_CHECKING:
    from .eagle_step import EagleStep


class EagleHeadConfig(PretrainedConfig):
    """Sizes of an `EagleHead`.

    Args:
        hidden_size: D of the target it drafts for.
        vocab_size: V of that target; checked when the two meet, the head itself holds no vocabulary.
        num_attention_heads: H; D / H must be a multiple of 4 (row and column pairs of the 2-D rotation).
        intermediate_size: width of the SwiGLU layer; 8 D / 3 rounded up to a multiple of 64 where omitted.
        grid: (height, width) of the token grid in raster order, T = height * width; None for a 1-D sequence.
        max_positions: slots of the rotary table; T where omitted (needed without a grid).
        rope_base: base of the rotary frequencies.
        rms_norm_eps: epsilon of the norms.
        hidden_scale: root mean square of the target's hidden states; starts `EagleHead.out_scale`.
        confidence_threshold: drafting stops where the product of the head's largest probabilities falls below it; 0
            always drafts the whole budget. It changes speed only.
        guided: True for a head that reads the guided combination of both branches' hidden states and predicts guided
            logits, so that drafting runs one row per image instead of two.
    """

    model_type = "mediaspec_eagle_head"

    hidden_size: int = 384
    vocab_size: int = 1024
    num_attention_heads: int = 6
    intermediate_size: int | None = None
    grid: list[int] | tuple[int, int] | None = None
    max_positions: int | None = None
    rope_base: float = 10000.0
    rms_norm_eps: float = 1e-5
    hidden_scale: float = 1.0
    confidence_threshold: float = 0.0
    guided: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        heads = self.num_attention_heads
        if heads < 1 or self.hidden_size % (4 * heads):
            raise ValueError(
                f"hidden_size={self.hidden_size} and num_attention_heads={heads}: the head size must be a multiple of "
                f"4; write num_attention_heads={max(self.hidden_size // 64, 1)}"
            )
        if not 0 <= self.confidence_threshold < 1:
            raise ValueError(
                f"confidence_threshold={self.confidence_threshold} is a probability below 1; write 0 to draft in full"
            )
        if self.intermediate_size is None:
            self.intermediate_size = -(-8 * self.hidden_size // 192) * 64
        if self.grid is not None:
            self.grid = (int(self.grid[0]), int(self.grid[1]))
            if self.max_positions is None:
                self.max_positions = self.grid[0] * self.grid[1]
        elif self.max_positions is None:
            self.max_positions = 4096
        super().__post_init__(**kwargs)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


def rotary_table(config: EagleHeadConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines [max_positions, head_dim / 2] float32: first half of the pairs by row, second half by column.

    Without a grid all pairs turn with the position. Slot i of a grid stands at (i // width, i % width)
    (arXiv:2406.06525, 2-D rotary embedding).
    """
    pairs, count = config.head_dim // 2, config.max_positions
    assert count is not None
    index = torch.arange(count)
    if config.grid is None:
        angles = torch.outer(index.float(), config.rope_base ** (-torch.arange(pairs).float() / pairs))
    else:
        half = pairs // 2
        frequencies = config.rope_base ** (-torch.arange(half).float() / half)
        row, column = index // config.grid[1], index % config.grid[1]
        angles = torch.cat([torch.outer(row.float(), frequencies), torch.outer(column.float(), frequencies)], dim=1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns interleaved pairs of x [R, N, H, head_dim] by cos, sin [N, head_dim / 2] or [R, N, head_dim / 2]."""
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = cos.unsqueeze(-2).to(x.dtype), sin.unsqueeze(-2).to(x.dtype)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


def guided_hidden(hidden: Tensor, guidance: Tensor) -> Tensor:
    """Combines both branches' hidden states as guidance combines logits: u + s (c - u).

    Args:
        hidden: [2 B, N, D], branch fastest, conditional first.
        guidance: [B] float32 guidance scales s.

    Returns:
        [B, N, D], the input of a head with ``guided=True``.
    """
    conditional, unconditional = hidden[0::2], hidden[1::2]
    return torch.lerp(unconditional, conditional, guidance.to(hidden.dtype)[:, None, None])


class EagleHead(PreTrainedModel):
    """Predicts a target's next hidden states from token embeddings and its last ones.

    Example:
        >>> head = EagleHead(EagleHeadConfig(hidden_size=64, num_attention_heads=4, grid=(4, 4)))
        >>> cos, sin = head.rotary(16)
        >>> head(torch.randn(2, 16, 64), torch.randn(2, 16, 64), cos, sin).shape
        torch.Size([2, 16, 64])
    """

    config: EagleHeadConfig
    config_class = EagleHeadConfig
    main_input_name = "embeds"

    def __init__(self, config: EagleHeadConfig) -> None:
        super().__init__(config)
        d, inner = config.hidden_size, config.intermediate_size
        assert inner is not None
        self.embed_norm = nn.RMSNorm(d, eps=config.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(d, eps=config.rms_norm_eps)
        self.fc = nn.Linear(2 * d, d, bias=False)
        self.attention_norm = nn.RMSNorm(d, eps=config.rms_norm_eps)
        self.wqkv = nn.Linear(d, 3 * d, bias=False)
        self.wo = nn.Linear(d, d, bias=False)
        self.ffn_norm = nn.RMSNorm(d, eps=config.rms_norm_eps)
        self.w1 = nn.Linear(d, inner, bias=False)
        self.w3 = nn.Linear(d, inner, bias=False)
        self.w2 = nn.Linear(inner, d, bias=False)
        # the block works at unit scale; one factor per channel brings it to the target's hidden space
        self.out_scale = nn.Parameter(torch.full((d,), float(config.hidden_scale)))
        # the target's final norm fixes the length of a hidden state, guidance sharpens beyond it
        self.logit_scale = nn.Parameter(torch.ones(()))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            init.normal_(module.weight, std=0.02)
        elif isinstance(module, nn.RMSNorm):
            init.ones_(module.weight)
        elif isinstance(module, EagleHead):
            init.constant_(module.out_scale, float(self.config.hidden_scale))
            init.ones_(module.logit_scale)

    def rotary(self, count: int, start: int = 0) -> tuple[Tensor, Tensor]:
        """Cosines and sines [count, head_dim / 2] of slots start, start + 1, ... on the head's device."""
        cos, sin = rotary_table(self.config)
        return cos[start : start + count].to(self.device), sin[start : start + count].to(self.device)

    def read(self, hidden: Tensor, guidance: Tensor | None) -> Tensor:
        """The target's hidden states [R, N, D] as this head takes them: a ``guided`` one combines the branches."""
        return guided_hidden(hidden, guidance) if self.config.guided and guidance is not None else hidden

    def prepare(self, embeddings: Tensor, dtype: torch.dtype | None = None) -> EagleStep:
        """The inference form over a target's embedding table [V, D]; see `EagleStep`."""
        from .eagle_step import EagleStep

        return EagleStep(self, embeddings, dtype)

    def _qkv(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        r, n, _ = x.shape
        qkv = self.wqkv(self.attention_norm(x)).view(r, n, 3, self.config.num_attention_heads, self.config.head_dim)
        q, k = rotate(qkv[:, :, 0], cos, sin), rotate(qkv[:, :, 1], cos, sin)
        return q.transpose(1, 2), k.transpose(1, 2), qkv[:, :, 2].transpose(1, 2)

    def _enter(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        return self.fc(torch.cat([self.embed_norm(embeds), self.hidden_norm(hidden)], dim=-1))

    def _leave(self, x: Tensor, attended: Tensor, hidden: Tensor) -> Tensor:
        x = x + self.wo(attended.transpose(1, 2).flatten(2))
        y = self.ffn_norm(x)
        x = x + self.w2(F.silu(self.w1(y)) * self.w3(y))
        return hidden + self.out_scale * x

    def forward(self, embeds: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """One teacher-forced pass with a causal mask.

        Args:
            embeds: [R, N, D] embeddings of tokens 0..N-1.
            hidden: [R, N, D] target hidden states that predicted those tokens (the last prefix position's first).
            cos: [N, head_dim / 2] or [R, N, head_dim / 2] cosines of the slots, see `rotary`.
            sin: the sines, same shape.

        Returns:
            [R, N, D] predicted hidden states; slot i predicts token i + 1.
        """
        x = self._enter(embeds, hidden)
        q, k, v = self._qkv(x, cos, sin)
        return self._leave(x, F.scaled_dot_product_attention(q, k, v, is_causal=True), hidden)

    def unroll(self, embeds: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, steps: int) -> list[Tensor]:
        """`steps` passes in which pass k reads pass k - 1's own predictions, as drafting will (arXiv:2503.01840, 3.2).

        Pass k (from 1) puts (embedding of token i, prediction of slot i - 1 by pass k - 1) into slot i. A draft at
        depth k sees target-fed keys up to slot i - k + 1 and one self-fed key per later slot, so the attention of
        pass k is the pass-1 score matrix, masked k - 1 slots further back, plus k - 1 extra columns (the key of pass
        m at slot i - k + m for m = 2..k): N + k - 1 columns per query instead of the k N of concatenated caches.

        Args:
            embeds, hidden, cos, sin: as in `forward`.
            steps: number of passes; 1 equals ``[forward(...)]``.

        Returns:
            Predictions [R, N, D] of every pass. Depth k is first reached at slot k - 1 (counting passes from 1), so
            leave the first k - 1 slots of pass k out of a loss.
        """
        if steps < 1:
            raise ValueError(f"steps={steps}; write steps=1 for plain teacher forcing, 2 or more to unroll")
        n, scale = embeds.shape[1], self.config.head_dim**-0.5
        index = torch.arange(n, device=embeds.device)
        age = index[:, None] - index  # query slot minus key slot
        x = self._enter(embeds, hidden)
        q, first_k, first_v = self._qkv(x, cos, sin)
        outputs = [self._leave(x, F.scaled_dot_product_attention(q, first_k, first_v, is_causal=True), hidden)]
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for step in range(1, steps):
            fed = torch.cat([hidden[:, :1], outputs[-1][:, :-1]], dim=1)
            x = self._enter(embeds, fed)
            q, k, v = self._qkv(x, cos, sin)
            keys, values = [_later(t) for t in keys] + [k], [_later(t) for t in values] + [v]
            base = (q @ first_k.transpose(-1, -2) * scale).masked_fill(age < step, float("-inf"))
            extra = torch.stack([(q * t).sum(-1) for t in keys], dim=-1) * scale
            reach = torch.arange(step - 1, -1, -1, device=embeds.device)  # slots back of every extra column
            extra = extra.masked_fill(index[:, None] < reach, float("-inf"))
            weight = torch.cat([base, extra], dim=-1).float().softmax(-1).to(v.dtype)
            attended = weight[..., :n] @ first_v
            for m, t in enumerate(values):
                attended = attended + weight[..., n + m, None] * t
            outputs.append(self._leave(x, attended, fed))
        return outputs


def _later(x: Tensor) -> Tensor:
    """x [R, H, N, head_dim] moved one slot later; slot 0 becomes zero (and is masked by the caller)."""
    return F.pad(x, (0, 0, 1, -1))
