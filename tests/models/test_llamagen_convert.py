"""Checkpoint conversion: every published wrapping loads with equal outputs, everything else says what is wrong."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mediaspec.models.llamagen import (
    LlamaGenConfig,
    LlamaGenGPT,
    LlamaGenVQ,
    LlamaGenVQConfig,
    convert_gpt,
    convert_vq,
    gpt,
    vq,
)
from mediaspec.models.llamagen.convert import read_checkpoint

TEXT = LlamaGenConfig(
    dim=32, n_layer=2, n_head=2, vocab_size=24, block_size=16, multiple_of=16,
    condition="text", cls_token_num=5, caption_dim=12,
)  # fmt: skip
VQ = LlamaGenVQConfig(ch=8, ch_mult=(1, 2), num_res_blocks=1, z_channels=8, codebook_size=24, norm_groups=8)


@pytest.fixture(autouse=True)
def tiny_presets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two more entries of the preset tables, so that the preset path runs at tiny size."""
    monkeypatch.setitem(gpt.GPT_PRESETS, "GPT-tiny", {"n_layer": 2, "n_head": 2, "dim": 32, "multiple_of": 16})
    sizes = {"ch": 8, "ch_mult": (1, 2), "num_res_blocks": 1, "z_channels": 8, "norm_groups": 8}
    monkeypatch.setitem(vq.VQ_PRESETS, "VQ-tiny", sizes)


def gpt_state() -> dict[str, Tensor]:
    """A checkpoint's names and shapes spelled out from the published layout, not taken from our model."""
    g = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {
        "cls_embedding.uncond_embedding": (5, 12),
        "cls_embedding.cap_proj.fc1.weight": (32, 12),
        "cls_embedding.cap_proj.fc2.weight": (32, 32),
        "tok_embeddings.weight": (24, 32),
        "norm.weight": (32,),
        "output.weight": (24, 32),
    }
    for i in range(2):
        shapes |= {
            f"layers.{i}.attention.wqkv.weight": (96, 32),
            f"layers.{i}.attention.wo.weight": (32, 32),
            f"layers.{i}.feed_forward.w1.weight": (96, 32),
            f"layers.{i}.feed_forward.w3.weight": (96, 32),
            f"layers.{i}.feed_forward.w2.weight": (32, 96),
            f"layers.{i}.attention_norm.weight": (32,),
            f"layers.{i}.ffn_norm.weight": (32,),
        }
    return {k: torch.randn(s, generator=g) * 0.2 for k, s in shapes.items()}


def logits(model: LlamaGenGPT) -> Tensor:
    g = torch.Generator().manual_seed(1)
    tokens = torch.randint(24, (2, model.config.block_size), generator=g)
    with torch.no_grad():
        return model(tokens, torch.randn(2, 5, 12, generator=g)).logits


def wrapped(state: dict[str, Tensor], how: str) -> Any:
    if how == "fsdp":
        return {
            f"_fsdp_wrapped_module.{k.replace('layers.0.', 'layers.0._fsdp_wrapped_module.')}": v
            for k, v in state.items()
        }
    if how == "training":
        compiled = {f"_orig_mod.{k}": v for k, v in state.items()}
        return {"model": compiled, "optimizer": {"state": {}}, "steps": 3, "args": argparse.Namespace(lr=1e-4)}
    if how == "bare":
        return {**state, "freqs_cis": torch.zeros(21, 8, 2), "layers.0.attention.kv_cache.k_cache": torch.zeros(1)}
    return {how: state}


@pytest.mark.parametrize("how", ["bare", "model", "module", "state_dict", "ema", "fsdp", "training"])
def test_gpt_loads_from_every_wrapping(how: str, tmp_path: Path) -> None:
    state = gpt_state()
    reference = LlamaGenGPT(TEXT).eval()
    reference.load_state_dict(state, strict=True)
    torch.save(wrapped(state, how), tmp_path / "t2i.pt")
    for size, block in ((TEXT, None), ("GPT-tiny", 16)):
        model = convert_gpt(tmp_path / "t2i.pt", size, block_size=block)
        assert not model.training and model.config.cls_token_num == 5 and model.config.condition == "text"
        assert torch.equal(logits(model), logits(reference))


def test_gpt_from_safetensors_survives_save_pretrained(tmp_path: Path) -> None:
    save_file({k: v.bfloat16() for k, v in gpt_state().items()}, tmp_path / "model.safetensors")
    model = convert_gpt(tmp_path / "model.safetensors", "GPT-tiny", block_size=16)
    assert model.output.weight.dtype == torch.bfloat16
    model.save_pretrained(tmp_path / "ours")
    loaded = LlamaGenGPT.from_pretrained(tmp_path / "ours")
    assert loaded.output.weight.dtype == torch.bfloat16
    assert torch.equal(logits(loaded), logits(model))


def test_class_checkpoint_tells_its_classes(tmp_path: Path) -> None:
    state = {k: v for k, v in gpt_state().items() if not k.startswith("cls_embedding.")}
    state["cls_embedding.embedding_table.weight"] = torch.randn(8, 32)
    torch.save({"model": state}, tmp_path / "c2i.pt")
    model = convert_gpt(tmp_path / "c2i.pt", "GPT-tiny")
    assert (model.config.condition, model.config.num_classes, model.config.block_size) == ("class", 7, 256)
    assert torch.equal(
        model.embed_condition(torch.tensor([2]))[0, 0], state["cls_embedding.embedding_table.weight"][2]
    )


@pytest.mark.parametrize("size", [VQ, "VQ-tiny"])
def test_vq_loads_without_its_usage_counter(size: str | LlamaGenVQConfig, tmp_path: Path) -> None:
    torch.manual_seed(0)
    reference = LlamaGenVQ(VQ).eval()
    state = {**reference.state_dict(), "quantize.codebook_used": torch.zeros(65536)}
    torch.save({"model": state}, tmp_path / "vq.pt")
    model = convert_vq(tmp_path / "vq.pt", size)
    codes = torch.arange(16).view(1, 4, 4)
    with torch.no_grad():
        assert torch.equal(model.decode_code(codes), reference.decode_code(codes))
    model.save_pretrained(tmp_path / "ours")
    with torch.no_grad():
        assert torch.equal(LlamaGenVQ.from_pretrained(tmp_path / "ours").decode_code(codes), model.decode_code(codes))


def test_broken_files_are_named(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.pt", tmp_path / "cut.pt"
    torch.save({"model": gpt_state()}, whole)
    cut.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    with pytest.raises(ValueError, match=r"cut\.pt .* truncated"):
        convert_gpt(cut, TEXT)
    save_file(gpt_state(), tmp_path / "whole.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "whole.safetensors").read_bytes()[:3000])
    with pytest.raises(ValueError, match="truncated"):
        convert_gpt(tmp_path / "cut.safetensors", TEXT)
    (tmp_path / "page.pt").write_text("<!DOCTYPE html><html>Not found</html>")
    with pytest.raises(ValueError, match="download page"):
        convert_gpt(tmp_path / "page.pt", TEXT)
    (tmp_path / "empty.pt").touch()
    with pytest.raises(ValueError, match="0 bytes"):
        convert_vq(tmp_path / "empty.pt", "VQ-16")
    with pytest.raises(ValueError, match="is no file"):
        convert_gpt(tmp_path / "absent.pt", TEXT)
    torch.save([1, 2, 3], tmp_path / "list.pt")
    with pytest.raises(ValueError, match="holds no state dict"):
        convert_gpt(tmp_path / "list.pt", TEXT)


class Payload:
    """Stands for code that a hostile pickle would run."""

    def __reduce__(self) -> tuple[Any, tuple[str, ...]]:
        return (eval, ("1 / 0",))


def test_pickled_code_is_not_run(tmp_path: Path) -> None:
    torch.save({"model": gpt_state(), "extra": Payload()}, tmp_path / "hostile.pt")
    with pytest.raises(ValueError, match="more than tensors"):
        read_checkpoint(tmp_path / "hostile.pt")


def test_checkpoints_that_do_not_fit_say_what_they_are(tmp_path: Path) -> None:
    state = gpt_state()
    torch.save({"model": state}, tmp_path / "t2i.pt")
    torch.save({"model": LlamaGenVQ(VQ).state_dict()}, tmp_path / "vq.pt")
    with pytest.raises(ValueError, match="dim=32 and n_layer=2, which is GPT-tiny"):
        convert_gpt(tmp_path / "t2i.pt", "GPT-B")
    with pytest.raises(ValueError, match="use convert_vq"):
        convert_gpt(tmp_path / "vq.pt", TEXT)
    with pytest.raises(ValueError, match="use convert_gpt"):
        convert_vq(tmp_path / "t2i.pt", VQ)
    with pytest.raises(ValueError, match="The file has 2 levels"):
        convert_vq(tmp_path / "vq.pt", "VQ-16")
    torch.save({k: v for k, v in state.items() if "wo" not in k} | {"extra": torch.zeros(1)}, tmp_path / "odd.pt")
    with pytest.raises(ValueError, match=r"2 missing: layers\.0\.attention\.wo\.weight, .*; 1 not expected: extra"):
        convert_gpt(tmp_path / "odd.pt", TEXT)
    torch.save(state | {"norm.weight": torch.zeros(31)}, tmp_path / "odd.pt")
    with pytest.raises(ValueError, match=r"norm\.weight \(31,\) instead of \(32,\)"):
        convert_gpt(tmp_path / "odd.pt", TEXT)
    with pytest.raises(ValueError, match="set it in the config"):
        convert_gpt(tmp_path / "t2i.pt", TEXT, block_size=16)
    with pytest.raises(ValueError, match="no preset"):
        convert_vq(tmp_path / "vq.pt", "VQ-32")
