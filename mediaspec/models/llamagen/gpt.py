"""The LlamaGen autoregressive image transformer (arXiv:2406.06525, section 2.2).

Letters: B rows, C condition positions, S image positions (grid * grid), T image tokens given, N positions in one
pass, V vocabulary, H heads, D head size, L layers. Parameter names equal those of the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from transformers import Cache, DynamicCache, PretrainedConfig, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import CausalLMOutputWithPast

from .hf_generate import CACHE_KEY, ImageGenerationMixin
from .rope import apply_rotary, rope_2d

# (layer, q [B, H, N, D], k [B, H_kv, N, D], v [B, H_kv, N, D]) -> [B, H, N, D]; owns mask and cache
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]

GPT_PRESETS: dict[str, dict[str, int]] = {
    "GPT-B": {"n_layer": 12, "n_head": 12, "dim": 768},
    "GPT-L": {"n_layer": 24, "n_head": 16, "dim": 1024},
    "GPT-XL": {"n_layer": 36, "n_head": 20, "dim": 1280},
    "GPT-XXL": {"n_layer": 48, "n_head": 24, "dim": 1536},
    "GPT-XXXL": {"n_layer": 48, "n_head": 40, "dim": 2560},
    "GPT-1B": {"n_layer": 22, "n_head": 32, "dim": 2048},
    "GPT-3B": {"n_layer": 24, "n_head": 32, "dim": 3200},
    "GPT-7B": {"n_layer": 32, "n_head": 32, "dim": 4096},
}


class LlamaGenConfig(PretrainedConfig):
    """Sizes of a `LlamaGenGPT`; the defaults are the published class-conditional GPT-B at 256 pixels.

    Args:
        dim: width of the residual stream.
        n_layer: L.
        n_head: H; ``dim / n_head`` must be a multiple of 4 (two axes of rotary pairs).
        n_kv_head: key and value heads; ``n_head`` where omitted.
        multiple_of: the SwiGLU width, 8/3 ``dim``, is rounded up to a multiple of this.
        ffn_dim_multiplier: further factor on the SwiGLU width.
        norm_eps: epsilon of every RMSNorm.
        rope_base: frequency base of the rotary embedding.
        prefix_rotation: "zero" hides the condition's queries and keys as the published models do, "identity" lets
            image tokens look at single condition positions; see `rope.py`.
        vocab_size: V, the image codebook.
        block_size: S, a square number.
        condition: ``"class"`` (class ids) or ``"text"`` (features of a text encoder).
        cls_token_num: C: 1 for classes, 120 for the published text models.
        caption_dim: width of the text features.
        num_classes: number of classes; the unconditional one comes after them.
        class_dropout_prob: share of rows to train without condition; 0 drops the unconditional class embedding.
        token_dropout_p, attn_dropout_p, resid_dropout_p, ffn_dropout_p: dropout while training.
        initializer_range: standard deviation of fresh weights (the output layer starts at zero).
    """

    model_type = "mediaspec_llamagen_gpt"
    attribute_map = {
        "hidden_size": "dim",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "num_key_value_heads": "n_kv_head",
        "max_position_embeddings": "block_size",
    }

    dim: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_kv_head: int | None = None
    multiple_of: int = 256
    ffn_dim_multiplier: float | None = None
    norm_eps: float = 1e-5
    rope_base: float = 10000.0
    prefix_rotation: str = "zero"
    vocab_size: int = 16384
    block_size: int = 256
    condition: str = "class"
    cls_token_num: int = 1
    caption_dim: int = 2048
    num_classes: int = 1000
    class_dropout_prob: float = 0.1
    token_dropout_p: float = 0.1
    attn_dropout_p: float = 0.0
    resid_dropout_p: float = 0.1
    ffn_dropout_p: float = 0.1
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        self.n_kv_head = self.kv_heads
        if self.condition not in ("class", "text"):
            raise ValueError(f"condition={self.condition!r}; allowed are 'class' (c2i) and 'text' (t2i)")
        if self.condition == "class" and self.cls_token_num != 1:
            raise ValueError(f"cls_token_num={self.cls_token_num}; a class is one position: write cls_token_num=1")
        if self.prefix_rotation not in ("zero", "identity"):
            raise ValueError(f"prefix_rotation={self.prefix_rotation!r}; allowed are 'zero' (upstream) and 'identity'")
        if self.grid**2 != self.block_size:
            raise ValueError(f"block_size={self.block_size} is no square number; write e.g. {self.grid**2}")
        if self.dim % self.n_head or (self.dim // self.n_head) % 4:
            raise ValueError(f"dim={self.dim} over n_head={self.n_head} heads; a head's size must be a multiple of 4")
        if self.n_head % self.kv_heads:
            raise ValueError(f"n_kv_head={self.n_kv_head} must divide n_head={self.n_head}")
        super().__post_init__(**kwargs)

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> LlamaGenConfig:
        """A published size (a key of `GPT_PRESETS`) with other fields set by keyword."""
        if name not in GPT_PRESETS:
            raise ValueError(f"no preset {name!r}; allowed are {', '.join(GPT_PRESETS)}")
        return cls(**{**GPT_PRESETS[name], **overrides})

    @property
    def grid(self) -> int:
        """Image positions along one side."""
        return round(self.block_size**0.5)

    @property
    def head_dim(self) -> int:
        """D."""
        return self.dim // self.n_head

    @property
    def kv_heads(self) -> int:
        """H_kv."""
        return self.n_head if self.n_kv_head is None else self.n_kv_head

    @property
    def ffn_dim(self) -> int:
        """Width inside the SwiGLU."""
        width = int(8 * self.dim / 3)
        if self.ffn_dim_multiplier is not None:
            width = int(self.ffn_dim_multiplier * width)
        return -(-width // self.multiple_of) * self.multiple_of


class LabelEmbedder(nn.Module):
    """One embedding per class, with one more after them for "no class"."""

    def __init__(self, config: LlamaGenConfig) -> None:
        super().__init__()
        self.num_classes = config.num_classes
        self.embedding_table = nn.Embedding(config.num_classes + (config.class_dropout_prob > 0), config.dim)

    def forward(self, labels: Tensor, cond_mask: Tensor | None, drop_ids: Tensor | None) -> Tensor:
        if drop_ids is not None:
            labels = torch.where(drop_ids, self.num_classes, labels)
        return self.embedding_table(labels).unsqueeze(1)


class CaptionMLP(nn.Module):
    """Projects text features to the width of the transformer."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(d_in, d_out, bias=False)
        self.fc2 = nn.Linear(d_out, d_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class CaptionEmbedder(nn.Module):
    """Text features, zeroed at padding, or one learned feature sequence for "no text"."""

    def __init__(self, config: LlamaGenConfig) -> None:
        super().__init__()
        self.cap_proj = CaptionMLP(config.caption_dim, config.dim)
        self.uncond_embedding = nn.Parameter(torch.empty(config.cls_token_num, config.caption_dim))

    def forward(self, features: Tensor, cond_mask: Tensor | None, drop_ids: Tensor | None) -> Tensor:
        if features.shape[1:] != self.uncond_embedding.shape:
            raise ValueError(
                f"cond has shape {tuple(features.shape)}; this model takes text features "
                f"[B, {', '.join(map(str, self.uncond_embedding.shape))}]; pad on the left and pass cond_mask"
            )
        features = features.to(self.uncond_embedding.dtype)
        if cond_mask is not None:
            features = torch.where(cond_mask.bool()[:, :, None], features, 0.0)
        if drop_ids is not None:
            features = torch.where(drop_ids[:, None, None], self.uncond_embedding, features)
        return self.cap_proj(features)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation in fp32, scaled in the dtype of the input."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], eps=self.eps).type_as(x) * self.weight


class Attention(nn.Module):
    """Rotary multi-head attention; ``attend`` decides what is seen and what is cached."""

    def __init__(self, config: LlamaGenConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.n_head, self.n_kv_head, self.head_dim = config.n_head, config.kv_heads, config.head_dim
        self.wqkv = nn.Linear(config.dim, (self.n_head + 2 * self.n_kv_head) * self.head_dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)
        self.resid_dropout = nn.Dropout(config.resid_dropout_p)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        heads = self.wqkv(x).unflatten(-1, (-1, self.head_dim))
        rotated, v = heads.split([self.n_head + self.n_kv_head, self.n_kv_head], dim=2)
        q, k = apply_rotary(rotated, cos, sin).split([self.n_head, self.n_kv_head], dim=2)
        out = attend(self.layer, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.resid_dropout(self.wo(out.transpose(1, 2).flatten(2)))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: LlamaGenConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=False)
        self.ffn_dropout = nn.Dropout(config.ffn_dropout_p)

    def forward(self, x: Tensor) -> Tensor:
        return self.ffn_dropout(self.w2(F.silu(self.w1(x)) * self.w3(x)))


class TransformerBlock(nn.Module):
    """Pre-norm attention and SwiGLU."""

    def __init__(self, config: LlamaGenConfig, layer: int) -> None:
        super().__init__()
        self.attention = Attention(config, layer)
        self.feed_forward = FeedForward(config)
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, attend)
        return x + self.feed_forward(self.ffn_norm(x))


def attention_mask(cond_mask: Tensor | None, past: int, length: int) -> Tensor | None:
    """Who sees whom: causal, without padded condition positions, but everybody sees itself.

    Args:
        cond_mask: [B, C] bool, False at padding; None where there is none.
        past: cached positions in front of this pass.
        length: N, positions of this pass, right after the cached ones.

    Returns:
        bool, broadcastable to [B, 1, N, past + N]; None means plainly causal (N = 1: sees everything).
    """
    if cond_mask is None and (past == 0 or length == 1):
        return None
    device = None if cond_mask is None else cond_mask.device
    rows = torch.arange(past, past + length, device=device)[:, None]
    columns = torch.arange(past + length, device=device)
    causal = columns <= rows
    if cond_mask is None:
        return causal[None, None]
    valid = F.pad(cond_mask.bool(), (0, past + length - cond_mask.shape[1]), value=True)
    return (causal & (valid[:, None, :] | (columns == rows)))[:, None]


class LlamaGenGPT(ImageGenerationMixin, PreTrainedModel):
    """Decoder-only transformer over image tokens behind a class or text prefix (arXiv:2406.06525).

    Example:
        >>> model = LlamaGenGPT(LlamaGenConfig(dim=32, n_layer=1, n_head=2, vocab_size=8, block_size=4)).eval()
        >>> model(torch.tensor([[1, 5, 2, 7]]), cond=torch.tensor([3])).logits.shape
        torch.Size([1, 4, 8])
    """

    config_class = LlamaGenConfig
    main_input_name = "input_ids"
    _supports_sdpa = True
    _no_split_modules = ["TransformerBlock"]

    def __init__(self, config: LlamaGenConfig) -> None:
        super().__init__(config)
        self.cls_embedding = LabelEmbedder(config) if config.condition == "class" else CaptionEmbedder(config)
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.tok_dropout = nn.Dropout(config.token_dropout_p)
        self.layers = nn.ModuleList(TransformerBlock(config, i) for i in range(config.n_layer))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        # Not a buffer: the table must stay fp32 when the weights are cast, and has no place in checkpoints.
        self._rope: tuple[Tensor, Tensor] | None = None
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if module is self.output:
            init.zeros_(module.weight)
        elif isinstance(module, (nn.Linear, nn.Embedding)):
            init.normal_(module.weight, std=self.config.initializer_range)
        elif isinstance(module, CaptionEmbedder):
            init.normal_(module.uncond_embedding, std=self.config.caption_dim**-0.5)
        elif isinstance(module, RMSNorm):
            init.ones_(module.weight)

    def get_input_embeddings(self) -> nn.Module:
        return self.tok_embeddings

    def get_output_embeddings(self) -> nn.Module:
        return self.output

    def rope_table(self) -> tuple[Tensor, Tensor]:
        """``(cos, sin)`` of all positions, each [C + S, D / 2] fp32 on the model's device."""
        device = self.tok_embeddings.weight.device
        if self._rope is None or self._rope[0].device != device:
            c = self.config
            with torch.inference_mode(False):  # a table first made by sampling must serve training too
                cos, sin = rope_2d(c.grid, c.head_dim, c.rope_base, c.cls_token_num, c.prefix_rotation)
                self._rope = cos.to(device), sin.to(device)
        return self._rope

    def embed_condition(self, cond: Tensor, cond_mask: Tensor | None = None, drop_ids: Tensor | None = None) -> Tensor:
        """The prefix, [B, C, dim].

        Args:
            cond: class ids [B] int64, or text features [B, C, caption_dim].
            cond_mask: [B, C] bool, False at padding (its features count as zero).
            drop_ids: [B] bool, True where the row runs without condition. It changes features only: as upstream, in
                training and in sampling, an unconditional row keeps the attention mask of its caption.
        """
        return self.cls_embedding(cond, cond_mask, drop_ids)

    def run_layers(self, h: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """All blocks over embeddings.

        Args:
            h: [B, N, dim] embeddings.
            cos: rows of `rope_table` for these positions, [N, D / 2] or [B, N, D / 2].
            sin: as ``cos``.
            attend: called once per layer as ``attend(layer, q, k, v)`` with rotated q [B, H, N, D] and k, v
                [B, H_kv, N, D]; returns [B, H, N, D]. Mask, cache and attention kernel are its business.

        Returns:
            [B, N, dim], before the final norm; `head` turns it into logits.
        """
        for layer in self.layers:
            h = layer(h, cos, sin, attend)
        return h

    def head(self, h: Tensor) -> Tensor:
        """Logits [..., V] fp32 of the output of `run_layers` [..., dim]."""
        return self.output(self.norm(h)).float()

    def forward(
        self,
        input_ids: Tensor,
        cond: Tensor | None = None,
        cond_mask: Tensor | None = None,
        labels: Tensor | None = None,
        drop_ids: Tensor | None = None,
        cache: Cache | None = None,
        use_cache: bool = False,
        logits_to_keep: int = 0,
        return_dict: bool = True,
    ) -> CausalLMOutputWithPast:
        """Next-token logits; row t of the result is the law of image token t given the tokens before it.

        Args:
            input_ids: [B, T] int64 image tokens in raster order, 0 <= T <= S. The last token of a full grid predicts
                nothing and is not run, so ``tokens`` and ``tokens[:, :-1]`` give the same S rows.
            cond: class ids [B] or text features [B, C, caption_dim]; omitted once the cache holds the prefix.
            cond_mask: [B, C] bool, False at padding; needed in every pass of a padded batch.
            labels: [B, rows] int64 targets aligned with the result (no shift), -100 is ignored; adds ``loss``.
            drop_ids: [B] bool, rows to run without condition.
            cache: a transformers `Cache` to read and extend; with a filled one ``input_ids`` are new tokens only.
            use_cache: create a `DynamicCache` where none is given.
            logits_to_keep: only the last so many rows; 0 keeps all.
            return_dict: only True, the form transformers' ``generate`` asks for.

        Returns:
            ``logits`` [B, rows, V] fp32 with rows = min(T + 1, S), or T behind a filled cache; ``loss``; the cache.
        """
        if not return_dict:
            raise ValueError("return_dict=False is not offered; read .logits and .loss of the result")
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        past = cache.get_seq_length() if cache is not None else 0
        first = self.config.cls_token_num - 1  # the position that predicts image token 0
        if past:
            h = self.tok_embeddings(input_ids)
            first = 0
        elif cond is None:
            raise ValueError("cond is missing; pass class ids [B] or text features [B, C, caption_dim]")
        else:
            h = self.embed_condition(cond, cond_mask, drop_ids)
            if input_ids.shape[1]:
                tokens = input_ids[:, : self.config.block_size - 1]
                h = torch.cat([h, self.tok_embeddings(tokens)], dim=1)
        length = h.shape[1]
        cos, sin = self.rope_table()
        if past + length > len(cos):
            raise ValueError(f"{past} cached and {length} new positions exceed the {len(cos)} of prefix and grid")

        mask = attention_mask(cond_mask, past, length)
        if mask is not None:
            mask = mask.to(h.device)
        causal = mask is None and past == 0
        dropout = self.config.attn_dropout_p if self.training else 0.0
        gqa = self.config.kv_heads != self.config.n_head

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if cache is not None:
                k, v = cache.update(k, v, layer)
            return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=causal, enable_gqa=gqa)

        h = self.run_layers(self.tok_dropout(h), cos[past : past + length], sin[past : past + length], attend)
        logits = self.head(h[:, -logits_to_keep:] if logits_to_keep else h[:, first:])
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        kept: dict[str, Any] = {CACHE_KEY: cache}
        return CausalLMOutputWithPast(loss=loss, logits=logits, **kept)
