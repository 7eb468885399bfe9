"""LlamaGen tokenizer: equality with the published network written functionally, shapes, gradients and storage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModel

from mediaspec.models.llamagen import VQ_PRESETS, LlamaGenVQ, LlamaGenVQConfig

CONFIGS = {
    "f4": LlamaGenVQConfig(
        ch=8, ch_mult=(1, 2, 4), num_res_blocks=1, z_channels=12, codebook_size=32, codebook_embed_dim=4, norm_groups=4
    ),
    "f2-euclidean": LlamaGenVQConfig(
        ch=8,
        ch_mult=(2, 1),
        z_channels=6,
        codebook_size=16,
        codebook_embed_dim=4,
        codebook_l2_norm=False,
        norm_groups=8,
    ),
}


def make_model(kind: str) -> LlamaGenVQ:
    torch.manual_seed(0)
    model = LlamaGenVQ(CONFIGS[kind]).eval()
    for name, p in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(p, 0.5, 1.5)
    return model


def pixels(height: int = 16, width: int = 16, rows: int = 2) -> Tensor:
    return torch.rand(rows, 3, height, width, generator=torch.Generator().manual_seed(2)) * 2 - 1


class Functional:
    """Upstream's encoder and decoder from the bare state dict, in fp64, driven by which names exist."""

    def __init__(self, model: LlamaGenVQ) -> None:
        self.w = {k: v.double() for k, v in model.state_dict().items()}
        self.groups = model.config.norm_groups

    def conv(self, x: Tensor, name: str, stride: int = 1, padding: int = 0) -> Tensor:
        return F.conv2d(x, self.w[f"{name}.weight"], self.w[f"{name}.bias"], stride, padding)

    def norm(self, x: Tensor, name: str) -> Tensor:
        grouped = x.reshape(len(x), self.groups, -1)
        centred = grouped - grouped.mean(-1, keepdim=True)
        normed = (centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt()).view_as(x)
        return normed * self.w[f"{name}.weight"][:, None, None] + self.w[f"{name}.bias"][:, None, None]

    def swish_conv(self, x: Tensor, norm: str, conv: str) -> Tensor:
        h = self.norm(x, norm)
        return self.conv(h * torch.sigmoid(h), conv, padding=1)

    def res(self, x: Tensor, name: str) -> Tensor:
        h = self.swish_conv(x, f"{name}.norm1", f"{name}.conv1")
        h = self.swish_conv(h, f"{name}.norm2", f"{name}.conv2")
        return (self.conv(x, f"{name}.nin_shortcut") if f"{name}.nin_shortcut.weight" in self.w else x) + h

    def attn(self, x: Tensor, name: str) -> Tensor:
        h = self.norm(x, f"{name}.norm")
        q, k, v = (self.conv(h, f"{name}.{p}").flatten(2) for p in "qkv")
        weights = (torch.einsum("bci,bcj->bij", q, k) / x.shape[1] ** 0.5).softmax(-1)
        return x + self.conv(torch.einsum("bij,bcj->bci", weights, v).view_as(x), f"{name}.proj_out")

    def level(self, x: Tensor, name: str) -> Tensor:
        i = 0
        while f"{name}.res.{i}.conv1.weight" in self.w:
            x = self.res(x, f"{name}.res.{i}")
            if f"{name}.attn.{i}.q.weight" in self.w:
                x = self.attn(x, f"{name}.attn.{i}")
            i += 1
        if f"{name}.downsample.conv.weight" in self.w:
            bordered = torch.zeros(*x.shape[:2], x.shape[2] + 1, x.shape[3] + 1, dtype=x.dtype)
            bordered[:, :, :-1, :-1] = x
            x = self.conv(bordered, f"{name}.downsample.conv", stride=2)
        if f"{name}.upsample.conv.weight" in self.w:
            x = self.conv(x.repeat_interleave(2, 2).repeat_interleave(2, 3), f"{name}.upsample.conv", padding=1)
        return x

    def levels(self, x: Tensor, name: str) -> Tensor:
        i = 0
        while any(k.startswith(f"{name}.conv_blocks.{i}.") for k in self.w):
            x = self.level(x, f"{name}.conv_blocks.{i}")
            i += 1
        return x

    def middle(self, x: Tensor, name: str) -> Tensor:
        return self.res(self.attn(self.res(x, f"{name}.mid.0"), f"{name}.mid.1"), f"{name}.mid.2")

    def encode(self, x: Tensor) -> Tensor:
        h = self.middle(self.levels(self.conv(x, "encoder.conv_in", padding=1), "encoder"), "encoder")
        return self.conv(self.swish_conv(h, "encoder.norm_out", "encoder.conv_out"), "quant_conv")

    def decode(self, z: Tensor) -> Tensor:
        h = self.conv(self.conv(z, "post_quant_conv"), "decoder.conv_in", padding=1)
        return self.swish_conv(
            self.levels(self.middle(h, "decoder"), "decoder"), "decoder.norm_out", "decoder.conv_out"
        )


@pytest.mark.parametrize("kind", CONFIGS)
@torch.no_grad()
def test_network_equals_the_published_one(kind: str) -> None:
    model, naive = make_model(kind), Functional(make_model(kind))
    x = pixels()
    z_q, indices, z = model.encode(x)
    expected = naive.encode(x.double())
    book = naive.w["quantize.embedding.weight"]
    if model.config.codebook_l2_norm:
        expected = expected / expected.norm(dim=1, keepdim=True)
        book = book / book.norm(dim=1, keepdim=True)
    torch.testing.assert_close(z.double(), expected, rtol=0, atol=1e-5)
    distance = (expected.permute(0, 2, 3, 1)[..., None, :] - book).square().sum(-1)
    assert torch.equal(indices, distance.argmin(-1))
    torch.testing.assert_close(z_q.double(), book[indices].permute(0, 3, 1, 2), rtol=0, atol=1e-6)
    torch.testing.assert_close(model.decode(z_q).double(), naive.decode(z_q.double()), rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", CONFIGS)
@torch.no_grad()
def test_shapes_and_the_three_ways_to_decode(kind: str) -> None:
    model = make_model(kind)
    f = model.config.factor
    x = pixels(16, 24)
    z_q, indices, z = model.encode(x)
    h, w = 16 // f, 24 // f
    assert z_q.shape == z.shape == (2, 4, h, w)
    assert indices.shape == (2, h, w) and indices.dtype == torch.int64
    image = model.decode(z_q)
    assert image.shape == x.shape and image.dtype == torch.float32
    torch.testing.assert_close(model.decode_code(indices), image, rtol=0, atol=1e-5)
    assert torch.equal(model.decode_code(indices.flatten(1), grid=(h, w)), model.decode_code(indices))
    square = indices[:, :4, :4]
    assert torch.equal(model.decode_code(square.flatten(1)), model.decode_code(square))
    assert model.get_codebook_entry(indices).shape == (2, h, w, 4)
    reconstruction, codes = model(x)
    assert torch.equal(reconstruction, image) and torch.equal(codes, indices)


@torch.no_grad()
def test_codes_on_the_sphere_ignore_the_length_of_codebook_rows() -> None:
    model = make_model("f4")
    indices = model.encode(pixels())[1]
    image = model.decode_code(indices)
    model.quantize.embedding.weight *= torch.linspace(0.5, 2.0, 32)[:, None]
    assert torch.equal(model.encode(pixels())[1], indices)
    torch.testing.assert_close(model.decode_code(indices), image, rtol=0, atol=1e-5)


def test_gradients_pass_straight_through_the_codes() -> None:
    model = make_model("f2-euclidean")
    features = torch.randn(2, 4, 3, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    weight = torch.randn(2, 4, 3, 3, generator=torch.Generator().manual_seed(1))
    z_q, indices, z = model.quantize(features)
    (z_q * weight).sum().backward()
    assert torch.equal(features.grad, weight) and model.quantize.embedding.weight.grad is None
    torch.testing.assert_close(z, features)
    entries = model.get_codebook_entry(indices).permute(0, 3, 1, 2)
    torch.testing.assert_close(entries, z_q, rtol=0, atol=1e-6)
    (entries - z.detach()).square().mean().backward()
    assert model.quantize.embedding.weight.grad is not None

    model = make_model("f4").train()
    model.decode(model.encode(pixels())[0]).square().mean().backward()
    silent = {n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    assert silent == {"quantize.embedding.weight"}


@torch.no_grad()
def test_codes_do_not_depend_on_autocast_of_the_search() -> None:
    # Same fp32 features with and without autocast: the search itself must stay fp32.
    model = make_model("f4")
    z = torch.randn(4, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    plain = model.quantize(z)[1]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model.quantize(z)[1], plain)


@torch.no_grad()
def test_bf16_weights_decode_to_fp32_pixels() -> None:
    model = make_model("f4")
    indices = model.encode(pixels())[1]
    image = model.decode_code(indices)
    low = model.to(torch.bfloat16).decode_code(indices)
    assert low.dtype == torch.float32
    assert (low - image).abs().mean() < 0.02 * image.abs().mean() + 0.01


@pytest.mark.parametrize("kind", CONFIGS)
@torch.no_grad()
def test_save_and_load_give_the_same_pixels(kind: str, tmp_path: Path) -> None:
    model = make_model(kind)
    model.save_pretrained(tmp_path)
    for loaded in (LlamaGenVQ.from_pretrained(tmp_path), AutoModel.from_pretrained(tmp_path)):
        assert type(loaded) is LlamaGenVQ and not loaded.training
        assert (
            loaded.config.to_diff_dict() == model.config.to_diff_dict()
            and loaded.config.ch_mult == model.config.ch_mult
        )
        assert torch.equal(loaded(pixels())[0], model(pixels())[0])


def test_presets_have_the_published_parameter_counts_and_factors() -> None:
    published = {"VQ-16": (72e6, 16), "VQ-8": (70e6, 8)}
    assert set(published) == set(VQ_PRESETS)
    with torch.device("meta"):
        for name, (count, factor) in published.items():
            model = LlamaGenVQ(LlamaGenVQConfig(**VQ_PRESETS[name]))
            assert abs(sum(p.numel() for p in model.parameters()) / count - 1) < 0.02, name
            assert model.config.factor == factor


def test_wrong_sizes_are_named() -> None:
    with pytest.raises(ValueError, match="write norm_groups=8"):
        LlamaGenVQConfig(ch=8)
    with pytest.raises(ValueError, match="at least one residual block"):
        LlamaGenVQConfig(num_res_blocks=0)
    model = make_model("f4")
    with pytest.raises(ValueError, match="resize or crop to 16 x 12"):
        model.encode(pixels(17, 14))
    with pytest.raises(ValueError, match="pass grid="):
        model.decode_code(torch.zeros(1, 6, dtype=torch.long))
    with pytest.raises(ValueError, match="allowed are"):
        model.decode_code(torch.zeros(6, dtype=torch.long))
