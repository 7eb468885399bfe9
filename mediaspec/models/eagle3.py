"""One-block draft head over low, middle and high features of a language model (EAGLE-3, arXiv:2503.01840, 3.1-3.2).

Letters: R rows, N slots, D hidden size of the target, F feature layers, H query and K key heads, V vocabulary of the
target, W draft vocabulary.
Slot i stands at sequence position i. It holds the embedding of token i + 1 and a state for position i: the target's
fused features there, or in an unrolled pass what the head itself made of position i - 1. It predicts token i + 2.
Embeddings and output rows are the target's own; the head only keeps which of its V tokens it may draft.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers import initialization as init

if TYPE_CHECKING:
    from .eagle3_step import Eagle3Step

__all__ = ["Eagle3Config", "Eagle3Head", "default_feature_layers"]


def default_feature_layers(layers: int) -> tuple[int, ...]:
    """A low, a middle and the last of `layers` decoder layers, counted from 0; equal ones once."""
    return tuple(sorted({max(layers // 3 - 1, 0), max(2 * layers // 3 - 1, 0), layers - 1}))


class Eagle3Config(PretrainedConfig):
    """Sizes of an `Eagle3Head`.

    Args:
        hidden_size: D of the target it drafts for.
        vocab_size: V of that target.
        draft_vocab_size: W, how many of the target's tokens can be drafted.
        num_attention_heads: H; num_key_value_heads: K, divides H.
        head_dim: even; D / H where omitted.
        intermediate_size: width of the SwiGLU layer.
        feature_layers: the decoder layers of the target whose outputs are read, ascending, the last one last.
        rope_theta: base of the rotary frequencies.
        frequencies: [head_dim / 2] rotary frequencies of a target that scales them, radians per position; None
            takes ``rope_theta``.
        rms_norm_eps: epsilon of the norms.
        confidence_threshold: a chain stops where the product of the head's largest probabilities falls below it; 0
            always drafts the whole budget. It changes speed only.

    Raises:
        ValueError: sizes that do not fit each other.
    """

    model_type = "mediaspec_eagle3_head"

    hidden_size: int = 576
    vocab_size: int = 49152
    draft_vocab_size: int = 8192
    num_attention_heads: int = 9
    num_key_value_heads: int = 3
    head_dim: int | None = None
    intermediate_size: int = 1536
    feature_layers: list[int] | tuple[int, ...] = (9, 19, 29)
    rope_theta: float = 100000.0
    frequencies: list[float] | None = None
    rms_norm_eps: float = 1e-5
    confidence_threshold: float = 0.0

    def __post_init__(self, **kwargs: Any) -> None:
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even; write head_dim=64")
        if self.num_key_value_heads < 1 or self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} must be a multiple of num_key_value_heads="
                f"{self.num_key_value_heads}; write the target's own two numbers"
            )
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size={self.draft_vocab_size} is not allowed: write a number from 1 to vocab_size="
                f"{self.vocab_size}"
            )
        self.feature_layers = tuple(int(layer) for layer in self.feature_layers)
        if not self.feature_layers or list(self.feature_layers) != sorted(set(self.feature_layers)):
            raise ValueError(
                f"feature_layers={self.feature_layers} must be ascending and different; write "
                f"{default_feature_layers(max(self.feature_layers or (2,)) + 1)}"
            )
        if self.frequencies is not None and len(self.frequencies) != self.head_dim // 2:
            raise ValueError(
                f"{len(self.frequencies)} frequencies for head_dim={self.head_dim}; give {self.head_dim // 2} or None"
            )
        if not 0 <= self.confidence_threshold < 1:
            raise ValueError(
                f"confidence_threshold={self.confidence_threshold} is a probability below 1; write 0 to draft in full"
            )
        super().__post_init__(**kwargs)


def rotary(config: Eagle3Config, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [.., head_dim / 2] float32 of sequence positions [..] int64."""
    assert config.head_dim is not None
    half = config.head_dim // 2
    if config.frequencies is not None:
        frequencies = torch.tensor(config.frequencies, device=positions.device)
    else:
        frequencies = config.rope_theta ** (-torch.arange(half, device=positions.device).float() / half)
    angles = positions[..., None].float() * frequencies
    return angles.cos(), angles.sin()


def unit(x: Tensor, eps: float) -> Tensor:
    """x at root mean square 1 along the last dimension."""
    return F.rms_norm(x, x.shape[-1:], eps=eps)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pairs (j, j + head_dim / 2) of x [R, N, H, head_dim] by cos, sin [R, N, head_dim / 2]."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, :, None].to(x.dtype), sin[:, :, None].to(x.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Eagle3Head(PreTrainedModel):
    """Predicts the token after next from the target's features and the next token.

    With e the embedding at unit scale and u the state at unit scale, the block is

        x = u + mix [g_e e, g_u u];  x += attention([g_e e, g_u u]);  x += SwiGLU(norm(x));  next u = unit(x)

    `mix` (zero at first) carries the token into the residual stream: K heads of keys and values alone are a narrow way
    for it in a small target. Everything runs at unit scale, so that a state of the head and fused features are alike.

    Example:
        >>> config = Eagle3Config(hidden_size=64, vocab_size=32, draft_vocab_size=16, num_attention_heads=4,
        ...                       num_key_value_heads=2, intermediate_size=96, feature_layers=(0, 1, 2))
        >>> head = Eagle3Head(config)
        >>> state = head(torch.randn(2, 5, 64), torch.randn(2, 5, 192), torch.arange(5).expand(2, 5))
        >>> (head.read(state) @ torch.randn(16, 64).T).shape   # output rows of the tokens in head.draft_ids
        torch.Size([2, 5, 16])
    """

    config: Eagle3Config
    config_class = Eagle3Config
    main_input_name = "embeds"
    draft_ids: Tensor

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        d, eps = config.hidden_size, config.rms_norm_eps
        assert config.head_dim is not None
        wide, narrow = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        self.feature_gain = nn.Parameter(torch.ones(len(config.feature_layers), d))
        self.fc = nn.Linear(len(config.feature_layers) * d, d, bias=False)
        self.embed_norm = nn.RMSNorm(d, eps=eps)
        self.state_gain = nn.Parameter(torch.ones(d))
        self.mix = nn.Linear(2 * d, d, bias=False)
        self.wq = nn.Linear(2 * d, wide, bias=False)
        self.wk = nn.Linear(2 * d, narrow, bias=False)
        self.wv = nn.Linear(2 * d, narrow, bias=False)
        self.wo = nn.Linear(wide, d, bias=False)
        self.ffn_norm = nn.RMSNorm(d, eps=eps)
        self.w1 = nn.Linear(d, config.intermediate_size, bias=False)
        self.w3 = nn.Linear(d, config.intermediate_size, bias=False)
        self.w2 = nn.Linear(config.intermediate_size, d, bias=False)
        self.out_gain = nn.Parameter(torch.ones(d))
        # draft token j is the target's token draft_ids[j]; ascending, so that ties fall as they do in the target
        self.register_buffer("draft_ids", torch.arange(config.draft_vocab_size))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            init.normal_(module.weight, std=0.02)
        elif isinstance(module, nn.RMSNorm):
            init.ones_(module.weight)
        elif isinstance(module, Eagle3Head):
            for gain in (module.feature_gain, module.state_gain, module.out_gain):
                init.ones_(gain)
            init.copy_(module.draft_ids, torch.arange(self.config.draft_vocab_size))

    @classmethod
    def from_target(
        cls,
        model: PreTrainedModel,
        draft_ids: Tensor,
        *,
        feature_layers: tuple[int, ...] | None = None,
        feature_scale: float = 1.0,
        confidence_threshold: float = 0.0,
    ) -> Eagle3Head:
        """A head that starts as a copy of the target's last layer on top of its last features.

        Args:
            model: a Llama-like causal LM (q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj; no biases).
            draft_ids: [W] int64, the tokens to draft, without repeats; they are kept ascending.
            feature_layers: see `Eagle3Config`; None: `default_feature_layers`.
            feature_scale: root mean square of the last layer's output; the block works at scale 1, so what the copied
                layer adds is divided by it.
            confidence_threshold: see `Eagle3Config`.

        Raises:
            ValueError: the model's layers are of another make, or `draft_ids` repeat or leave the vocabulary.
        """
        target = model.config.get_text_config(decoder=True)
        layers = getattr(model.get_decoder(), "layers", None)
        layer = layers[-1] if layers is not None else None
        parts = [getattr(getattr(layer, "self_attn", None), f"{name}_proj", None) for name in "qkvo"]
        parts += [getattr(getattr(layer, "mlp", None), f"{name}_proj", None) for name in ("gate", "up", "down")]
        if any(not isinstance(part, nn.Linear) or part.bias is not None for part in parts):
            raise ValueError(
                f"{type(model).__name__}: a head is started from a last layer with bias-free q_proj, k_proj, v_proj, "
                f"o_proj, gate_proj, up_proj and down_proj; build Eagle3Head(Eagle3Config(...)) for other models"
            )
        wq, wk, wv, wo, w1, w3, w2 = (cast(nn.Linear, part).weight.detach().float() for part in parts)
        rope = getattr(target, "rope_parameters", None) or {}
        own = getattr(getattr(model.get_decoder(), "rotary_emb", None), "inv_freq", None)
        scaled = own is not None and rope.get("rope_type", "default") != "default"
        head_dim = getattr(target, "head_dim", None) or target.hidden_size // target.num_attention_heads
        head = cls(
            Eagle3Config(
                hidden_size=target.hidden_size,
                vocab_size=target.vocab_size,
                draft_vocab_size=1,
                num_attention_heads=target.num_attention_heads,
                num_key_value_heads=target.num_key_value_heads,
                head_dim=head_dim,
                intermediate_size=target.intermediate_size,
                feature_layers=feature_layers or default_feature_layers(target.num_hidden_layers),
                rope_theta=float(rope.get("rope_theta", 10000.0)),
                frequencies=[float(f) for f in own] if scaled and own is not None else None,
                rms_norm_eps=target.rms_norm_eps,
                confidence_threshold=confidence_threshold,
            )
        ).restrict(draft_ids)
        size, first = head.config.hidden_size, layer
        with torch.no_grad():
            head.fc.weight.zero_()
            head.fc.weight[:, -size:] = torch.eye(size)
            for part, weight in ((head.mix, None), (head.wq, wq), (head.wk, wk), (head.wv, wv)):
                part.weight.zero_()
                if weight is not None:
                    part.weight[:, size:] = weight
            head.state_gain.copy_(cast(Any, first).input_layernorm.weight)
            head.wo.weight.copy_(wo / feature_scale)
            head.ffn_norm.weight.copy_(cast(Any, first).post_attention_layernorm.weight)
            head.w1.weight.copy_(w1)
            head.w3.weight.copy_(w3)
            head.w2.weight.copy_(w2 / feature_scale)
            head.out_gain.copy_(cast(Any, model.get_decoder()).norm.weight)
        return head

    def restrict(self, draft_ids: Tensor) -> Eagle3Head:
        """Changes what can be drafted; the weights do not depend on it. Fewer tokens: cheaper steps, fewer hits.

        Args:
            draft_ids: [W] int64, without repeats; they are kept ascending.

        Raises:
            ValueError: they repeat or leave the vocabulary.
        """
        draft_ids = draft_ids.sort().values.to(self.draft_ids.device)
        size = self.config.vocab_size
        if not len(draft_ids) or int(draft_ids[0]) < 0 or int(draft_ids[-1]) >= size:
            raise ValueError(f"draft_ids must name 1 to {size} tokens in [0, {size})")
        if bool((draft_ids[1:] == draft_ids[:-1]).any()):
            raise ValueError("draft_ids repeat a token; give every one once")
        self.draft_ids, self.config.draft_vocab_size = draft_ids, len(draft_ids)
        return self

    def prepare(self, embeddings: Tensor, output: Tensor, dtype: torch.dtype | None = None) -> Eagle3Step:
        """The inference form over a target's embedding table and output matrix, both [V, D]; see `Eagle3Step`."""
        from .eagle3_step import Eagle3Step

        return Eagle3Step(self, embeddings, output, dtype)

    def fuse(self, features: Tensor) -> Tensor:
        """The target's features [.., F * D] as states [.., D] at unit scale.

        Every layer's output is brought to unit scale first: their scales differ by far, and single positions of a
        language model (the first token) carry activations a hundred times the usual.
        """
        levels = unit(features.unflatten(-1, self.feature_gain.shape).to(self.feature_gain.dtype), self.eps)
        return unit(self.fc((levels * self.feature_gain).flatten(-2)), self.eps)

    def read(self, states: Tensor) -> Tensor:
        """States [.., D] as the target's output rows take them (what its final norm returns)."""
        return states * self.out_gain

    @property
    def eps(self) -> float:
        return self.config.rms_norm_eps

    def forward(self, embeds: Tensor, features: Tensor, positions: Tensor) -> Tensor:
        """One teacher-forced pass with a causal mask.

        Args:
            embeds: [R, N, D], in slot i the target's embedding of token i + 1.
            features: [R, N, F * D] the target's features at position i.
            positions: [R, N] int64 sequence positions i.

        Returns:
            [R, N, D] states at unit scale; `read` of slot i's, times the output rows, are logits of token i + 2.
        """
        return self.unroll(embeds, features, positions, 1)[0]

    def unroll(
        self, embeds: Tensor, features: Tensor, positions: Tensor, steps: int, local: Tensor | None = None
    ) -> list[Tensor]:
        """`steps` passes in which pass k reads pass k - 1's own states, as drafting will (arXiv:2503.01840, 3.2).

        Pass k (from 1) puts (embedding of token i + 1, state of slot i - 1 by pass k - 1) into slot i. A draft at
        depth k sees target-fed keys up to slot i - k + 1 and one self-fed key per later slot, so the attention of
        pass k is the pass-1 score matrix, masked k - 1 slots further back, plus k - 1 extra columns (the key of pass
        m at slot i - k + m for m = 2..k): N + k - 1 columns per query instead of the k N of concatenated caches.

        Args:
            embeds, features, positions: as in `forward`.
            steps: number of passes.
            local: [R, N] int64, slots since the beginning of the slot's own text, where a row holds several texts
                one after another that must not see each other; None: a row is one text.

        Returns:
            States [R, N, D] of every pass. Depth k is first reached at slot k - 1 of a text (counting passes from 1),
            so leave its first k - 1 slots of pass k out of a loss.
        """
        if steps < 1:
            raise ValueError(f"steps={steps}; write steps=1 for plain teacher forcing, 2 or more to unroll")
        n = embeds.shape[1]
        index = torch.arange(n, device=embeds.device)
        local = index[None] if local is None else local
        age = index[:, None] - index  # query slot minus key slot
        foreign = age > local[:, :, None]  # [R or 1, N, N]
        cos, sin = rotary(self.config, positions)
        token = self.embed_norm(embeds)
        state = self.fuse(features)
        outputs: list[Tensor] = []
        keys: list[Tensor] = []
        values: list[Tensor] = []
        first_k = first_v = embeds  # replaced by pass 1
        for step in range(steps):
            if step:
                state = torch.cat([state[:, :1], outputs[-1][:, :-1]], dim=1)
            x, q, k, v = self._enter(token, state, cos, sin)
            closed = torch.zeros(foreign.shape, dtype=q.dtype, device=q.device)
            closed.masked_fill_(foreign | (age < step), float("-inf"))
            if step == 0:
                first_k, first_v = k, v
            else:
                keys, values = [_later(t) for t in keys] + [k], [_later(t) for t in values] + [v]
            # [R, K, G, N, N]: query heads of one group share a key head
            scores = (q.flatten(2, 3) @ first_k.transpose(-1, -2)).unflatten(2, q.shape[2:4]) + closed[:, None, None]
            if keys:
                extra = torch.stack([(q * t[:, :, None]).sum(-1) for t in keys], dim=-1)
                reach = torch.arange(step - 1, -1, -1, device=q.device)  # slots back of every extra column
                outside = (local[:, :, None] < reach)[:, None, None]
                scores = torch.cat([scores, extra.masked_fill(outside, float("-inf"))], dim=-1)
            weight = scores.softmax(-1)
            seen = (weight[..., :n].flatten(2, 3) @ first_v).unflatten(2, q.shape[2:4])
            for m, t in enumerate(values):
                seen = seen + weight[..., n + m, None] * t[:, :, None]
            outputs.append(self._leave(x, seen.permute(0, 3, 1, 2, 4).flatten(2)))
        return outputs

    def _enter(self, token: Tensor, state: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Residual stream [R, N, D], scaled queries [R, K, G, N, head_dim], keys and values [R, K, N, head_dim]."""
        size = self.config.head_dim
        assert size is not None
        both = torch.cat([token, state * self.state_gain], dim=-1)
        q, k, v = (layer(both).unflatten(-1, (-1, size)) for layer in (self.wq, self.wk, self.wv))
        q = _turn(q, cos, sin).unflatten(2, (self.config.num_key_value_heads, -1)) * size**-0.5
        k = _turn(k, cos, sin)
        return state + self.mix(both), q.permute(0, 2, 3, 1, 4), k.transpose(1, 2), v.transpose(1, 2)

    def _leave(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.wo(attended)
        y = self.ffn_norm(x)
        return unit(x + self.w2(F.silu(self.w1(y)) * self.w3(y)), self.eps)


def _later(x: Tensor) -> Tensor:
    """x [R, K, N, head_dim] moved one slot later; slot 0 becomes zero (and is masked by the caller)."""
    return F.pad(x, (0, 0, 1, -1))
