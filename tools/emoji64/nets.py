"""The networks of emoji-64 in their training form, and plain guided sampling from them."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import T5Config, T5EncoderModel

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

from captions import MAX_LENGTH  # noqa: E402
from common import average_gradients  # noqa: E402
from muon import Muon  # noqa: E402

from mediaspec.models.llamagen.gpt import LlamaGenConfig, LlamaGenGPT, attention_mask  # noqa: E402

WIDTH = 192
ENCODER_RATE = 0.1


def build_gpt(depth: int) -> LlamaGenGPT:
    """The transformer with its first `depth` layers."""
    return LlamaGenGPT(
        LlamaGenConfig(
            dim=WIDTH, n_layer=depth, n_head=6, vocab_size=1024, block_size=256, multiple_of=64, condition="text",
            cls_token_num=MAX_LENGTH, caption_dim=WIDTH, class_dropout_prob=0.1, prefix_rotation="identity",
            token_dropout_p=0.0, resid_dropout_p=0.0, ffn_dropout_p=0.0,
        )
    )  # fmt: skip


def build_text_encoder(vocabulary: int) -> T5EncoderModel:
    """A two-layer T5 encoder."""
    config = T5Config(
        vocab_size=vocabulary, d_model=WIDTH, d_kv=48, d_ff=512, num_layers=2, num_heads=4, dropout_rate=0.0,
        feed_forward_proj="gated-gelu", pad_token_id=0, eos_token_id=1, relative_attention_max_distance=16,
    )  # fmt: skip
    encoder = T5EncoderModel(config)
    with torch.no_grad():
        # Small word vectors move far in a few steps, and layers that start as the identity do not drown them: without
        # this the transformer ignores its captions for the first 20,000 pictures.
        encoder.shared.weight.mul_(0.05)
        for name, p in encoder.named_parameters():
            if name.endswith((".o.weight", ".wo.weight")):
                p.zero_()
    return encoder


class Attend(torch.autograd.Function):
    """Masked attention by batched products; on a CPU in bf16 about twice as fast as the fused kernel at this size."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """q (scaled), k, v [B, H, N, D] bf16; mask [B, 1, N, N] additive."""
        b, h, n, d = q.shape
        q, k, v = (t.reshape(b * h, n, d) for t in (q, k, v))
        s = torch.bmm(q, k.transpose(1, 2))
        s.view(b, h, n, n).add_(mask)
        p = torch.softmax(s, -1)
        ctx.save_for_backward(q, k, v, p)
        return torch.bmm(p, v).view(b, h, n, d)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, p = ctx.saved_tensors
        shape = g.shape
        g = g.reshape(q.shape)
        dv = torch.bmm(p.transpose(1, 2), g)
        ds = torch._softmax_backward_data(torch.bmm(g, v.transpose(1, 2)), p, -1, p.dtype)
        return torch.bmm(ds, k).view(shape), torch.bmm(ds.transpose(1, 2), q).view(shape), dv.view(shape), None


class CrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of bf16 logits in fp32, with its gradient made in the same pass."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
        """logits [M, V] bf16, labels [M], weight [M] of mean 1."""
        p = torch.softmax(logits.float(), -1)
        hit = p.gather(1, labels[:, None])
        p.scatter_(1, labels[:, None], hit - 1).mul_(weight[:, None] / len(p))
        ctx.save_for_backward(p.to(logits.dtype))
        return -(hit[:, 0].clamp(min=1e-30).log() * weight).mean()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        return ctx.saved_tensors[0] * g.to(ctx.saved_tensors[0].dtype), None, None


def block(
    x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor,
    norm1: Tensor, wqkv: Tensor, wo: Tensor, norm2: Tensor, w1: Tensor, w3: Tensor, w2: Tensor,
) -> Tensor:  # fmt: skip
    """One layer as a function of its weights, so that one compiled graph serves every layer.

    Args:
        x: [B, N, WIDTH] fp32 residual stream.
        cos, sin: [N, D / 2] fp32.
        mask: [B, 1, N, N] additive bf16.
    """
    b, n, d = x.shape
    h = F.rms_norm(x, (d,), norm1, 1e-5).bfloat16()
    qkv = F.linear(h, wqkv).view(b, n, 3, 6, d // 6)
    pairs = qkv[:, :, :2].float().unflatten(-1, (-1, 2))
    even, odd = pairs[..., 0], pairs[..., 1]
    c, s = cos[:, None, None, :], sin[:, None, None, :]
    turned = torch.stack([even * c - odd * s, odd * c + even * s], -1).flatten(-2).bfloat16()
    q, k, v = turned[:, :, 0].transpose(1, 2), turned[:, :, 1].transpose(1, 2), qkv[:, :, 2].transpose(1, 2)
    a = Attend.apply(q * (d // 6) ** -0.5, k, v, mask).transpose(1, 2).reshape(b, n, d)
    x = x + F.linear(a, wo).float()
    h = F.rms_norm(x, (d,), norm2, 1e-5).bfloat16()
    return x + F.linear(F.silu(F.linear(h, w1)) * F.linear(h, w3), w2).float()


class Trainer:
    """Models, optimisers and growth. Matrices reach the layers as bf16 copies of fp32 parameters."""

    block = staticmethod(block)

    def __init__(self, depth: int, vocabulary: int, compiled: bool) -> None:
        self.gpt, self.text = build_gpt(depth), build_text_encoder(vocabulary)
        for fc in (self.gpt.cls_embedding.cap_proj.fc1, self.gpt.cls_embedding.cap_proj.fc2):
            nn.init.orthogonal_(fc.weight)
        if compiled:
            self.block = torch.compile(block, dynamic=False)
        self.optimisers()

    def optimisers(self) -> None:
        # A text encoder that moves at the rate of the image embeddings outgrows its own word vectors within minutes
        # and then tells captions apart no more, so its matrices go at a tenth of that rate.
        projection = self.gpt.cls_embedding.cap_proj
        hidden = [p for p in (*self.gpt.layers.parameters(), *projection.parameters()) if p.dim() == 2]
        encoder = [p for n, p in self.text.named_parameters() if p.dim() == 2 and not n.startswith("shared")]
        ids = {id(p) for p in (*hidden, *encoder)}
        rest = [p for m in (self.gpt, self.text) for p in m.parameters() if id(p) not in ids]
        self.muon = Muon(hidden, WIDTH, weight_decay=0.01)
        old = getattr(self, "adam", None)
        groups = [{"params": rest, "scale": 1.0}, {"params": encoder, "scale": ENCODER_RATE}]
        self.adam = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.97), weight_decay=0.0, eps=1e-10)
        if old is not None:
            for p in (*rest, *encoder):
                if p in old.state:
                    self.adam.state[p] = old.state[p]

    def grow(self, depth: int) -> None:
        """Insert copies after every layer until the net has `depth` layers; the function stays the same."""
        old = list(self.gpt.layers)
        times, rest = divmod(depth, len(old))
        if rest:
            raise ValueError(f"cannot grow {len(old)} layers to {depth}; write a multiple of {len(old)}")
        layers = []
        for layer in old:
            layers.append(layer)
            for _ in range(times - 1):
                new = copy.deepcopy(layer)
                nn.init.zeros_(new.attention.wo.weight)
                nn.init.zeros_(new.feed_forward.w2.weight)
                layers.append(new)
        for i, layer in enumerate(layers):
            layer.attention.layer = i
        self.gpt.layers = nn.ModuleList(layers)
        self.gpt.config.n_layer = depth
        self.optimisers()

    def features(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.text(input_ids=ids, attention_mask=mask).last_hidden_state

    def run(self, tokens: Tensor, ids: Tensor, mask: Tensor, drop: Tensor, seen: Tensor | None = None) -> Tensor:
        """Output of the last layer [B, 16 + 256, WIDTH] before the final norm; arguments as for `loss`."""
        gpt = self.gpt
        image = gpt.tok_embeddings(tokens)
        if seen is not None:
            image = image * seen[..., None]
        h = torch.cat([gpt.embed_condition(self.features(ids, mask), mask, drop), image], 1)
        cos, sin = (t[: h.shape[1]] for t in gpt.rope_table())
        allowed = attention_mask(mask, 0, h.shape[1])
        bias = torch.zeros(allowed.shape, dtype=torch.bfloat16).masked_fill_(~allowed, -30000.0)
        for layer in gpt.layers:
            a, f = layer.attention, layer.feed_forward
            matrices = [w.weight.bfloat16() for w in (a.wqkv, a.wo, f.w1, f.w3, f.w2)]
            h = self.block(
                h,
                cos,
                sin,
                bias,
                layer.attention_norm.weight,
                matrices[0],
                matrices[1],
                layer.ffn_norm.weight,
                *matrices[2:],
            )
        return h

    def loss(
        self, tokens: Tensor, ids: Tensor, mask: Tensor, drop: Tensor, seen: Tensor | None = None, first: float = 0.0,
        written: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Mean cross-entropy per image token.

        Args:
            tokens: [B, 256] int64.
            ids, mask: [B, 16] caption tokens and their validity.
            drop: [B] bool, rows trained without condition.
            seen: [B, 256] 0 or 1; image tokens at 0 are hidden from the transformer but still to be predicted.
            first: extra weight of the first rows of a picture, where the caption decides.
            written: [B, 256] int64 tokens to read in place of the true ones, as if sampling had gone astray.
        """
        h = self.run(tokens if written is None else written, ids, mask, drop, seen)
        gpt = self.gpt
        h = gpt.norm(h[:, MAX_LENGTH - 1 : -1]).bfloat16()  # the last token is run for even shapes only
        logits = F.linear(h, gpt.output.weight.bfloat16())
        weight = 1 + first * torch.exp(-torch.arange(256).div(16, rounding_mode="floor") / 3)
        return CrossEntropy.apply(logits.flatten(0, 1), tokens.flatten(), (weight / weight.mean()).repeat(len(tokens)))

    def step(self, lr: float, muon_lr: float, rank: int, world: int) -> None:
        for m in (self.gpt, self.text):
            average_gradients(m, world)
        for group in self.adam.param_groups:
            group["lr"] = lr * group["scale"]
        self.adam.step()
        self.muon.step(muon_lr, rank, world)
        self.gpt.zero_grad(), self.text.zero_grad()


@torch.no_grad()
def draw_tokens(
    gpt: LlamaGenGPT, feats: Tensor, mask: Tensor, scale: float, temperature: float, generator: torch.Generator
) -> Tensor:
    """Codes [B, 256] int64 by plain guided sampling with a key-value cache.

    Args:
        gpt: the transformer, in any dtype.
        feats, mask: caption features [B, 16, WIDTH] and validity [B, 16].
        scale: guidance scale.
        temperature: divides the guided logits.
        generator: source of the draws.
    """
    b = len(feats)
    drop = torch.arange(2 * b) >= b
    mask2 = torch.cat([mask, mask])
    h = gpt.embed_condition(torch.cat([feats, feats]), mask2, drop)
    cos, sin = gpt.rope_table()
    heads = gpt.config.n_head
    cache = torch.zeros(len(gpt.layers), 2, 2 * b, heads, MAX_LENGTH + 256, WIDTH // heads, dtype=h.dtype)
    tokens, at = [], 0
    for _ in range(256):
        n = h.shape[1]
        end = at + n
        visible = attention_mask(mask2, at, n)

        def attend(
            layer: int, q: Tensor, k: Tensor, v: Tensor, at: int = at, end: int = end, seen: Tensor = visible
        ) -> Tensor:
            keys, values = cache[layer, 0], cache[layer, 1]
            keys[:, :, at:end], values[:, :, at:end] = k, v
            return F.scaled_dot_product_attention(q, keys[:, :, :end], values[:, :, :end], seen)

        logits = gpt.head(gpt.run_layers(h, cos[at:end], sin[at:end], attend)[:, -1])
        at = end
        guided = torch.lerp(logits[b:], logits[:b], scale) / temperature
        token = torch.multinomial(guided.softmax(-1), 1, generator=generator)
        tokens.append(token)
        h = gpt.tok_embeddings(torch.cat([token, token]))
    return torch.cat(tokens, 1)
