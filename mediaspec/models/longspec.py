"""One-block draft head that reads the target's own key/value cache (LongSpec, arXiv:2502.17421, section 3).

The block attends to a short window of its own keys and to the cached keys of one full-attention layer of the target,
so that it keeps a constant amount of state however long the context is. Embedding table and output matrix are the
target's; they are bound when a run starts and never saved. Inference runs through `longspec_step`.

Letters: N packed positions, C hidden size, H query heads, Hkv key heads, D head size, V vocabulary of the target,
Vd reduced draft vocabulary, S sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .longspec_attention import batched, lagged_attention, packed, rotate_halves, window_attention

if TYPE_CHECKING:
    from .longspec_step import LongSpecStep

__all__ = ["LongSpecConfig", "LongSpecHead", "last_full_layer", "rope_of"]


class LongSpecConfig(PretrainedConfig):
    """Sizes of a `LongSpecHead`; those up to `target_layer` must be the target's.

    Args:
        hidden_size: C.
        vocab_size: V; checked when the two meet.
        num_attention_heads: H; num_key_value_heads: Hkv; head_dim: D.
        intermediate_size: width of the SwiGLU layer.
        rotary: the target's rotary parameters, flat: "rope_type", "rope_theta" and what that type needs.
        max_position_embeddings: the target's, which some rotary types read.
        rms_norm_eps: epsilon of the norms.
        target_layer: index of the target's layer whose cache is read: its last full-attention layer.
        draft_vocab_size: Vd; V where omitted.
        window: own keys a token sees, itself included.
        qkv_bias: biases on the query, key and value projections (True in the paper).
        final_norm: a norm before the output matrix (False in the paper).
        embed_scale: factor on the embeddings (1 in the paper); 1 / their RMS lets the block work at unit scale.
        confidence_threshold: a chain stops where the product of the head's largest probabilities falls below it; 0
            always drafts the whole budget. It changes speed only.

    Raises:
        ValueError: sizes that do not fit each other.
    """

    model_type = "mediaspec_longspec_head"

    hidden_size: int = 576
    vocab_size: int = 49152
    num_attention_heads: int = 9
    num_key_value_heads: int = 3
    head_dim: int = 64
    intermediate_size: int = 1536
    rotary: dict[str, Any] | None = None
    max_position_embeddings: int = 8192
    rms_norm_eps: float = 1e-5
    target_layer: int = 29
    draft_vocab_size: int | None = None
    window: int = 512
    qkv_bias: bool = True
    final_norm: bool = False
    embed_scale: float = 1.0
    confidence_threshold: float = 0.0

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_key_value_heads < 1 or self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} must be a multiple of num_key_value_heads="
                f"{self.num_key_value_heads}; write the target's own numbers"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even (it is rotated in pairs); write the target's own")
        if self.window < 1:
            raise ValueError(f"window={self.window} counts the token itself, so it is at least 1; the paper has 512")
        if self.draft_vocab_size is None:
            self.draft_vocab_size = self.vocab_size
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size={self.draft_vocab_size} must lie in [1, vocab_size={self.vocab_size}]; leave it "
                f"out to draft from the whole vocabulary"
            )
        if not 0 <= self.confidence_threshold < 1:
            raise ValueError(
                f"confidence_threshold={self.confidence_threshold} is a probability below 1; write 0 to draft in full"
            )
        self.rotary = dict(self.rotary or {"rope_type": "default", "rope_theta": 10000.0})
        kind = self.rotary.setdefault("rope_type", "default")
        if kind != "default" and kind not in ROPE_INIT_FUNCTIONS:
            raise ValueError(f"rotary has rope_type={kind!r}; allowed are default, {', '.join(ROPE_INIT_FUNCTIONS)}")
        super().__post_init__(**kwargs)

    def frequencies(self) -> tuple[Tensor, float]:
        """Rotary frequencies [D / 2] float32 and the factor on cosines and sines, exactly the target's."""
        assert self.rotary is not None
        if self.rotary["rope_type"] == "default":
            steps = torch.arange(0, self.head_dim, 2, dtype=torch.float) / self.head_dim
            return 1.0 / self.rotary["rope_theta"] ** steps, 1.0
        like = SimpleNamespace(
            rope_parameters=self.rotary,
            head_dim=self.head_dim,
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_attention_heads,
            max_position_embeddings=self.max_position_embeddings,
            standardize_rope_params=lambda: None,
        )
        make: Callable[[Any], tuple[Tensor, float]] = ROPE_INIT_FUNCTIONS[self.rotary["rope_type"]]
        frequencies, factor = make(like)
        return frequencies.float(), float(factor)


def last_full_layer(config: Any) -> int:
    """Index of the last full-attention layer of a transformers text config: its cache keeps every position.

    Raises:
        ValueError: all layers have a sliding window.
    """
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
            kinds = ["sliding_attention"] * config.num_hidden_layers
        else:
            return int(config.num_hidden_layers) - 1
    full = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    if not full:
        raise ValueError(
            "every layer of this target has a sliding window, so none keeps the whole context for a LongSpec head to "
            "read; use another drafter, such as drafter='eagle' or 'ngram'"
        )
    return full[-1]


def rope_of(config: Any) -> dict[str, Any]:
    """The flat rotary parameters of a text config's full-attention layers."""
    given = dict(getattr(config, "rope_parameters", None) or {})
    nested = given.get("full_attention")
    rotary = dict(nested if isinstance(nested, dict) else given)
    rotary.setdefault("rope_type", "default")
    rotary.setdefault("rope_theta", float(getattr(config, "rope_theta", None) or 10000.0))
    return rotary


class LongSpecHead(PreTrainedModel):
    """Predicts the next token from the tokens so far and a target's cached keys and values.

    Example:
        >>> config = LongSpecConfig(hidden_size=16, vocab_size=50, num_attention_heads=2, num_key_value_heads=1,
        ...                         head_dim=8, intermediate_size=32, target_layer=0)
        >>> head = LongSpecHead(config)
        >>> keys = values = torch.randn(6, 1, 8)
        >>> head(torch.randn(6, 16), torch.arange(6), keys, values, starts=[0, 4, 6], lags=[1, 2]).shape
        torch.Size([6, 16])
    """

    config: LongSpecConfig
    config_class = LongSpecConfig
    main_input_name = "embeds"
    draft_ids: Tensor

    def __init__(self, config: LongSpecConfig) -> None:
        super().__init__(config)
        c, d, inner = config.hidden_size, config.head_dim, config.intermediate_size
        q, kv, bias = config.num_attention_heads * d, config.num_key_value_heads * d, config.qkv_bias
        self.attention_norm = nn.RMSNorm(c, eps=config.rms_norm_eps)
        self.wqkv = nn.Linear(c, q + 2 * kv, bias=bias)
        self.wo = nn.Linear(q, c, bias=False)
        self.cross_norm = nn.RMSNorm(c, eps=config.rms_norm_eps)
        self.cross_q = nn.Linear(c, q, bias=bias)
        self.cross_o = nn.Linear(q, c, bias=False)
        self.mlp_norm = nn.RMSNorm(c, eps=config.rms_norm_eps)
        self.w1 = nn.Linear(c, inner, bias=False)
        self.w3 = nn.Linear(c, inner, bias=False)
        self.w2 = nn.Linear(inner, c, bias=False)
        self.norm = nn.RMSNorm(c, eps=config.rms_norm_eps) if config.final_norm else None
        assert config.draft_vocab_size is not None
        # the target's id of every draft id, ascending, so that ties go to the lowest id in both vocabularies
        self.register_buffer("draft_ids", torch.arange(config.draft_vocab_size))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            init.normal_(module.weight, std=0.02)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.RMSNorm):
            init.ones_(module.weight)
        elif isinstance(module, LongSpecHead):
            init.copy_(module.draft_ids, torch.arange(len(module.draft_ids)))

    @classmethod
    def from_target(
        cls,
        model: PreTrainedModel,
        draft_ids: Tensor | None = None,
        *,
        window: int = 512,
        qkv_bias: bool = False,
        final_norm: bool = True,
        hidden_scale: float = 1.0,
    ) -> LongSpecHead:
        """A head for a Llama-like model, started from the decoder layer whose cache it reads.

        Args:
            model: a transformers causal language model.
            draft_ids: [Vd] int64 target ids that may be drafted; None for all.
            window, qkv_bias, final_norm: see `LongSpecConfig`.
            hidden_scale: RMS of the hidden states before the model's final norm. The residual stream starts at the
                embeddings brought to unit scale, so what the layer adds to it is divided by this.

        Raises:
            ValueError: draft ids outside the vocabulary or given twice, or no full-attention layer.
        """
        text = model.config.get_text_config(decoder=True)
        layer = last_full_layer(text)
        table: Any = model.get_input_embeddings().weight
        embedding = table.detach().float()
        if draft_ids is not None:
            draft_ids = draft_ids.to(torch.int64).sort().values
            if len(draft_ids.unique()) < len(draft_ids) or not 0 <= int(draft_ids[0]) <= int(draft_ids[-1]) < len(
                embedding
            ):
                raise ValueError(
                    f"draft_ids must be distinct ids in [0, {len(embedding)}), got {len(draft_ids)} of which "
                    f"{len(draft_ids.unique())} differ, from {int(draft_ids[0])} to {int(draft_ids[-1])}"
                )
        heads = text.num_attention_heads
        config = LongSpecConfig(
            hidden_size=text.hidden_size,
            vocab_size=model.get_output_embeddings().weight.shape[0],
            num_attention_heads=heads,
            num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
            intermediate_size=text.intermediate_size,
            rotary=rope_of(text),
            max_position_embeddings=text.max_position_embeddings,
            rms_norm_eps=getattr(text, "rms_norm_eps", 1e-5),
            target_layer=layer,
            draft_vocab_size=None if draft_ids is None else len(draft_ids),
            window=window,
            qkv_bias=qkv_bias,
            final_norm=final_norm,
            embed_scale=1.0 / float(embedding.pow(2).mean().sqrt()),
        )
        head = cls(config)
        if draft_ids is not None:
            head.draft_ids.copy_(draft_ids)
        body: Any = model.get_decoder()
        head._start_from(body.layers[layer], getattr(body, "norm", None), hidden_scale)
        return head

    @torch.no_grad()
    def _start_from(self, layer: Any, final_norm: nn.Module | None, hidden_scale: float) -> None:
        """Copies a decoder layer where it has Llama's names; cross-attention starts as a copy of self-attention."""
        attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
        names = ("q_proj", "k_proj", "v_proj", "o_proj")
        if attention is not None and all(hasattr(attention, name) for name in names):
            projections = [getattr(attention, name) for name in names[:3]]
            self.wqkv.weight.copy_(torch.cat([part.weight for part in projections]))
            self.cross_q.weight.copy_(attention.q_proj.weight)
            if self.config.qkv_bias and attention.q_proj.bias is not None:
                self.wqkv.bias.copy_(torch.cat([part.bias for part in projections]))
                self.cross_q.bias.copy_(attention.q_proj.bias)
            for own in (self.wo, self.cross_o):
                own.weight.copy_(attention.o_proj.weight / hidden_scale)
        if mlp is not None and all(hasattr(mlp, name) for name in ("gate_proj", "up_proj", "down_proj")):
            self.w1.weight.copy_(mlp.gate_proj.weight)
            self.w3.weight.copy_(mlp.up_proj.weight)
            self.w2.weight.copy_(mlp.down_proj.weight / hidden_scale)
        pairs = [
            (self.attention_norm, getattr(layer, "input_layernorm", None)),
            (self.cross_norm, getattr(layer, "input_layernorm", None)),
            (self.mlp_norm, getattr(layer, "post_attention_layernorm", None)),
            (self.norm, final_norm),
        ]
        for own_norm, given in pairs:
            if own_norm is not None and given is not None:
                # what a norm makes of ones is its weight, whichever way that is stored
                ones = torch.ones_like(own_norm.weight)[None, None].to(next(given.parameters()).dtype)
                own_norm.weight.copy_(given(ones)[0, 0])

    def prepare(
        self,
        embed: Callable[[Tensor], Tensor],
        rows: Tensor,
        bias: Tensor | None = None,
        softcap: float | None = None,
        dtype: torch.dtype | None = None,
    ) -> LongSpecStep:
        """The inference form over a target's embedding function and output rows; see `LongSpecStep`."""
        from .longspec_step import LongSpecStep

        return LongSpecStep(self, embed, rows, bias, softcap, dtype)

    def forward(
        self,
        embeds: Tensor,
        positions: Tensor,
        keys: Tensor,
        values: Tensor,
        starts: Sequence[int],
        lags: Sequence[int],
        firsts: Sequence[int] | None = None,
    ) -> Tensor:
        """One teacher-forced pass over packed sequences.

        A token that nothing is asked about costs its own key and value only: with one block these depend on the token
        alone.

        Args:
            embeds: [N, C] the target's embeddings of the tokens.
            positions: [N] int64 sequence positions, ascending within a sequence; gaps are allowed.
            keys, values: [N, Hkv, D] what `config.target_layer` cached for the same tokens, keys rotated.
            starts: S + 1 borders of the sequences, 0 first and N last.
            lags: S lags j: token i of a sequence sees the target's keys 0..i - j.
            firsts: S numbers: a sequence's outputs begin at this token of it; None: 0 for all.

        Returns:
            [n, C], the tokens asked for, sequence by sequence (n = N without `firsts`); times the output rows, these
            are the logits of the token behind each position.
        """
        heads, kv, d = self.config.num_attention_heads, self.config.num_key_value_heads, self.config.head_dim
        frequencies, factor = self.config.frequencies()
        angles = positions[:, None].float() * frequencies.to(positions.device)
        cos, sin = angles.cos() * factor, angles.sin() * factor
        spans = list(zip(starts[:-1], starts[1:], strict=True))
        firsts = [0] * len(spans) if firsts is None else firsts
        asked = torch.cat([torch.arange(a + first, b) for (a, b), first in zip(spans, firsts, strict=True)])
        asked = asked.to(positions.device)
        counts = [b - a - first for (a, b), first in zip(spans, firsts, strict=True)]

        x = embeds * self.config.embed_scale
        y = self.attention_norm(x)
        by_query, by_key = self.wqkv.weight.split([heads * d, 2 * kv * d])
        bias = self.wqkv.bias
        q_bias, k_bias = (None, None) if bias is None else bias.split([heads * d, 2 * kv * d])
        own = F.linear(y, by_key, k_bias).view(-1, 2 * kv, d)
        k, v = rotate_halves(own[:, :kv], cos, sin), own[:, kv:]
        x, y, cos, sin = x[asked], y[asked], cos[asked], sin[asked]
        q = rotate_halves(F.linear(y, by_query, q_bias).view(-1, heads, d), cos, sin).split(counts)
        parts = [
            window_attention(*batched(q[s], k[a:b], v[a:b]), positions[a:b], self.config.window)
            for s, (a, b) in enumerate(spans)
        ]
        x = x + self.wo(packed(parts))
        q = rotate_halves(self.cross_q(self.cross_norm(x)).view(-1, heads, d), cos, sin).split(counts)
        keys, values = keys.to(k.dtype), values.to(k.dtype)
        parts = [lagged_attention(*batched(q[s], keys[a:b], values[a:b]), lags[s]) for s, (a, b) in enumerate(spans)]
        x = x + self.cross_o(packed(parts))
        y = self.mlp_norm(x)
        x = x + self.w2(F.silu(self.w1(y)) * self.w3(y))
        return x if self.norm is None else self.norm(x)
