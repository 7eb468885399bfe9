"""The LlamaGen image tokenizer: a convolutional VQ auto-encoder (arXiv:2406.06525, section 2.1).

Letters: B images, H x W pixels, h x w code grid (h = H / factor), D codebook width, K codebook size.
Parameter names equal those of the published checkpoints, so their weights load with ``strict=True``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers import initialization as init

# Published tokenizers: the number of channel multipliers fixes the down-sampling factor, 2 ** (len - 1).
VQ_PRESETS: dict[str, dict[str, Any]] = {
    "VQ-16": {"ch_mult": (1, 1, 2, 2, 4)},
    "VQ-8": {"ch_mult": (1, 2, 2, 4)},
}


class LlamaGenVQConfig(PretrainedConfig):
    """Sizes of a `LlamaGenVQ`; the defaults are the published VQ-16.

    Args:
        ch: channels of the first level.
        ch_mult: channel multiplier of every level; each level but the last halves the resolution.
        num_res_blocks: residual blocks per encoder level (a decoder level has one more).
        z_channels: channels between the convolutional nets and the 1x1 quantiser projections.
        codebook_size: K, the number of codes.
        codebook_embed_dim: D, the width of a code.
        codebook_l2_norm: compare and return codes on the unit sphere.
        norm_groups: groups of every GroupNorm; 32 upstream, lower it for nets with fewer channels.
        dropout: dropout inside the residual blocks.
    """

    model_type = "mediaspec_llamagen_vq"

    ch: int = 128
    ch_mult: list[int] | tuple[int, ...] = (1, 1, 2, 2, 4)
    num_res_blocks: int = 2
    z_channels: int = 256
    codebook_size: int = 16384
    codebook_embed_dim: int = 8
    codebook_l2_norm: bool = True
    norm_groups: int = 32
    dropout: float = 0.0

    def __post_init__(self, **kwargs: Any) -> None:
        self.ch_mult = tuple(self.ch_mult)
        if not self.ch_mult or min(self.ch_mult) < 1 or self.num_res_blocks < 1:
            raise ValueError(
                f"ch_mult={self.ch_mult}, num_res_blocks={self.num_res_blocks}: every level needs a positive "
                "multiplier and at least one residual block; write e.g. ch_mult=(1, 2, 4), num_res_blocks=1"
            )
        bad = sorted({self.ch * m for m in (1, *self.ch_mult) if (self.ch * m) % self.norm_groups})
        if bad:
            raise ValueError(
                f"norm_groups={self.norm_groups} must divide the channels of every level, but {bad} (ch * ch_mult) "
                f"are not multiples of it; write norm_groups={_largest_divisor(self.ch, self.norm_groups)}"
            )
        super().__post_init__(**kwargs)

    @property
    def factor(self) -> int:
        """Pixels per code along one side."""
        return 2 ** (len(self.ch_mult) - 1)


def _largest_divisor(n: int, limit: int) -> int:
    return next(d for d in range(min(n, limit), 0, -1) if n % d == 0)


class ResnetBlock(nn.Module):
    """Two norm-swish-conv steps with a 1x1 shortcut where the width changes."""

    def __init__(self, c_in: int, c_out: int, groups: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, c_in, eps=1e-6)
        self.conv1 = nn.Conv2d(c_in, c_out, 3, padding=1)
        self.norm2 = nn.GroupNorm(groups, c_out, eps=1e-6)
        self.dropout = nn.Dropout(dropout)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, padding=1)
        if c_in != c_out:
            self.nin_shortcut = nn.Conv2d(c_in, c_out, 1)
        self.resize_width = c_in != c_out

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(self.dropout(F.silu(self.norm2(h))))
        return (self.nin_shortcut(x) if self.resize_width else x) + h


class AttnBlock(nn.Module):
    """Single-head self-attention over all positions of a feature map."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(groups, channels, eps=1e-6)
        self.q = nn.Conv2d(channels, channels, 1)
        self.k = nn.Conv2d(channels, channels, 1)
        self.v = nn.Conv2d(channels, channels, 1)
        self.proj_out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (p(h).flatten(2).transpose(1, 2).unsqueeze(1) for p in (self.q, self.k, self.v))
        h = F.scaled_dot_product_attention(q, k, v)  # default scale 1 / sqrt(channels)
        return x + self.proj_out(h.squeeze(1).transpose(1, 2).reshape(x.shape))


class Downsample(nn.Module):
    """Stride-2 convolution; the zero row and column go to the bottom and right only."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (0, 1, 0, 1)))


class Upsample(nn.Module):
    """Nearest-neighbour doubling followed by a convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class Level(nn.Module):
    """One resolution: residual blocks, attention after each where asked, then an optional resampling step."""

    def __init__(self, widths: list[int], attention: bool, groups: int, dropout: float) -> None:
        super().__init__()
        self.res = nn.ModuleList(ResnetBlock(i, o, groups, dropout) for i, o in zip(widths, widths[1:], strict=False))
        self.attn = nn.ModuleList(AttnBlock(o, groups) for o in widths[1:]) if attention else nn.ModuleList()

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.res):
            x = block(x)
            if len(self.attn):
                x = self.attn[i](x)
        return x


class DownLevel(Level):
    """A `Level` that halves the resolution at its end unless it is the last one."""

    def __init__(self, widths: list[int], last: bool, groups: int, dropout: float) -> None:
        super().__init__(widths, last, groups, dropout)
        if not last:
            self.downsample = Downsample(widths[-1])
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x if self.last else self.downsample(x)


class UpLevel(Level):
    """A `Level` that doubles the resolution at its end unless it is the finest one."""

    def __init__(self, widths: list[int], first: bool, last: bool, groups: int, dropout: float) -> None:
        super().__init__(widths, first, groups, dropout)
        if not last:
            self.upsample = Upsample(widths[-1])
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x if self.last else self.upsample(x)


def _middle(width: int, groups: int, dropout: float) -> nn.ModuleList:
    block = ResnetBlock(width, width, groups, dropout)
    return nn.ModuleList([block, AttnBlock(width, groups), ResnetBlock(width, width, groups, dropout)])


class Encoder(nn.Module):
    """Pixels [B, 3, H, W] to features [B, z_channels, h, w]."""

    def __init__(self, config: LlamaGenVQConfig) -> None:
        super().__init__()
        groups, dropout, n = config.norm_groups, config.dropout, config.num_res_blocks
        widths = [config.ch] + [config.ch * m for m in config.ch_mult]
        self.conv_in = nn.Conv2d(3, config.ch, 3, padding=1)
        self.conv_blocks = nn.ModuleList(
            DownLevel([widths[i]] + [widths[i + 1]] * n, i == len(widths) - 2, groups, dropout)
            for i in range(len(widths) - 1)
        )
        self.mid = _middle(widths[-1], groups, dropout)
        self.norm_out = nn.GroupNorm(groups, widths[-1], eps=1e-6)
        self.conv_out = nn.Conv2d(widths[-1], config.z_channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for block in (*self.conv_blocks, *self.mid):
            x = block(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class Decoder(nn.Module):
    """Features [B, z_channels, h, w] to pixels [B, 3, H, W]."""

    def __init__(self, config: LlamaGenVQConfig) -> None:
        super().__init__()
        groups, dropout, n = config.norm_groups, config.dropout, config.num_res_blocks
        widths = [config.ch * m for m in reversed(config.ch_mult)]
        self.conv_in = nn.Conv2d(config.z_channels, widths[0], 3, padding=1)
        self.mid = _middle(widths[0], groups, dropout)
        self.conv_blocks = nn.ModuleList(
            UpLevel([widths[max(i - 1, 0)]] + [w] * (n + 1), i == 0, i == len(widths) - 1, groups, dropout)
            for i, w in enumerate(widths)
        )
        self.norm_out = nn.GroupNorm(groups, widths[-1], eps=1e-6)
        self.conv_out = nn.Conv2d(widths[-1], 3, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        z = self.conv_in(z)
        for block in (*self.mid, *self.conv_blocks):
            z = block(z)
        return self.conv_out(F.silu(self.norm_out(z)))


class VectorQuantizer(nn.Module):
    """Nearest-code look-up with a straight-through gradient."""

    def __init__(self, config: LlamaGenVQConfig) -> None:
        super().__init__()
        self.l2_norm = config.codebook_l2_norm
        self.embedding = nn.Embedding(config.codebook_size, config.codebook_embed_dim)

    def codebook(self) -> Tensor:
        """The codes in use, [K, D]: on the unit sphere where the model was trained so."""
        return F.normalize(self.embedding.weight, dim=-1) if self.l2_norm else self.embedding.weight

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # fp32 and outside autocast: bf16 distances would swap neighbouring codes
        with torch.autocast(z.device.type, enabled=False):
            z = z.float().permute(0, 2, 3, 1).contiguous()
            codes = self.codebook().float()
            if self.l2_norm:
                z = F.normalize(z, dim=-1)
            flat = z.reshape(-1, z.shape[-1])
            distance = flat.pow(2).sum(1, keepdim=True) + codes.pow(2).sum(1) - 2 * flat @ codes.t()
            indices = distance.argmin(1).view(z.shape[:3])
            z_q = codes[indices]
        if z.requires_grad:
            z_q = z + (z_q - z).detach()
        return z_q.permute(0, 3, 1, 2).contiguous(), indices, z.permute(0, 3, 1, 2)


class LlamaGenVQ(PreTrainedModel):
    """VQ auto-encoder between pixels and a grid of code indices (arXiv:2406.06525, section 2.1).

    Example:
        >>> vq = LlamaGenVQ(LlamaGenVQConfig(ch=32, ch_mult=(1, 2, 4), z_channels=64, codebook_size=1024))
        >>> vq.decode_code(torch.zeros(1, 16 * 16, dtype=torch.long)).shape
        torch.Size([1, 3, 64, 64])
    """

    config_class = LlamaGenVQConfig
    main_input_name = "pixel_values"

    def __init__(self, config: LlamaGenVQConfig) -> None:
        super().__init__(config)
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        self.quantize = VectorQuantizer(config)
        self.quant_conv = nn.Conv2d(config.z_channels, config.codebook_embed_dim, 1)
        self.post_quant_conv = nn.Conv2d(config.codebook_embed_dim, config.z_channels, 1)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        # PyTorch's own convolution scheme, as upstream trains with, instead of transformers' normal(0, 0.02).
        if isinstance(module, nn.Conv2d):
            init.kaiming_uniform_(module.weight, a=5**0.5)
            bound = module.weight[0].numel() ** -0.5
            if module.bias is not None:
                init.uniform_(module.bias, -bound, bound)
        elif isinstance(module, nn.GroupNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            # a normal draw has a uniform direction, so with the sphere the codes start evenly spread
            init.normal_(module.weight, std=1.0 if self.config.codebook_l2_norm else 1.0 / module.num_embeddings)

    def encode(self, pixel_values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Pixels to codes.

        Args:
            pixel_values: [B, 3, H, W] in [-1, 1]; H and W are multiples of ``config.factor``.

        Returns:
            ``(z_q, indices, z)``: the codes [B, D, h, w] (with a straight-through gradient to the encoder), their
            indices [B, h, w] int64, and the encoder's output [B, D, h, w] that was quantised (on the unit sphere
            when ``codebook_l2_norm``), which is what commitment and codebook losses compare with
            `get_codebook_entry`.

        Raises:
            ValueError: if the image does not divide into whole codes.
        """
        height, width = pixel_values.shape[-2:]
        factor = self.config.factor
        if height % factor or width % factor:
            raise ValueError(
                f"pixel_values are {height} x {width}, but this tokenizer needs multiples of {factor}; resize or crop "
                f"to {max(height // factor, 1) * factor} x {max(width // factor, 1) * factor}"
            )
        return self.quantize(self.quant_conv(self.encoder(pixel_values)))

    def decode(self, z_q: Tensor) -> Tensor:
        """Codes [B, D, h, w] to pixels [B, 3, H, W], about [-1, 1], fp32."""
        return self.decoder(self.post_quant_conv(z_q.to(self.post_quant_conv.weight.dtype))).float()

    def get_codebook_entry(self, indices: Tensor) -> Tensor:
        """Vectors [..., D] of the code indices [...]; gradients flow to the codebook."""
        return self.quantize.codebook()[indices]

    def decode_code(self, indices: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
        """Code indices to pixels.

        Args:
            indices: [B, h, w] or raster order [B, h * w], int64.
            grid: (h, w) of raster-order indices; a square grid where omitted.

        Returns:
            [B, 3, H, W] fp32, about [-1, 1].

        Raises:
            ValueError: if the indices do not fill the grid.
        """
        if indices.dim() == 2:
            side = int(indices.shape[1] ** 0.5)
            h, w = grid if grid is not None else (side, side)
            if h * w != indices.shape[1]:
                raise ValueError(
                    f"{indices.shape[1]} indices per image do not fill a {h} x {w} grid; pass grid=(h, w) with "
                    f"h * w == {indices.shape[1]}, or indices of shape [B, h, w]"
                )
            indices = indices.view(-1, h, w)
        elif indices.dim() != 3:
            raise ValueError(f"indices have shape {tuple(indices.shape)}; allowed are [B, h, w] and [B, h * w]")
        return self.decode(self.get_codebook_entry(indices).permute(0, 3, 1, 2).contiguous())

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, Tensor]:
        """Reconstruction [B, 3, H, W] and code indices [B, h, w] of an image batch in [-1, 1]."""
        z_q, indices, _ = self.encode(pixel_values)
        return self.decode(z_q), indices
