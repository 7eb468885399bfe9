"""Published LlamaGen checkpoint files to our models.

Accepted are ``.safetensors`` files and everything ``torch.load(weights_only=True)`` reads: a bare state dict (as FSDP
training saves), or one wrapped in ``"model"`` (DDP), ``"module"`` (DeepSpeed), ``"state_dict"`` or ``"ema"``.
"""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from .gpt import GPT_PRESETS, LlamaGenConfig, LlamaGenGPT
from .vq import VQ_PRESETS, LlamaGenVQ, LlamaGenVQConfig

Model = TypeVar("Model", bound=PreTrainedModel)

WRAPPERS = ("model", "module", "state_dict", "ema")  # first match wins, as in the published samplers
PREFIXES = ("_fsdp_wrapped_module.", "_orig_mod.", "module.")  # left by FSDP, torch.compile and DDP
# State that is recomputed or only counts code usage while training the tokenizer.
DERIVED = ("freqs_cis", "causal_mask", "kv_cache.k_cache", "kv_cache.v_cache", "quantize.codebook_used")
SHOWN = 4  # names per kind in an error message


def read_checkpoint(path: str | Path) -> dict[str, Tensor]:
    """State dict of a checkpoint file, without wrappers, name prefixes and derived buffers.

    Args:
        path: a ``.safetensors`` or ``torch.save`` file. Only tensors and plain containers are unpickled.

    Raises:
        ValueError: if the file is missing, truncated, of another kind, or holds no state dict.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path} is no file; pass a LlamaGen .pt, .pth or .safetensors checkpoint")
    try:
        content: Any
        if path.suffix == ".safetensors":
            content = load_file(path)
        else:
            # training checkpoints carry their command line, an inert argparse.Namespace, beside the weights
            with torch.serialization.safe_globals([argparse.Namespace]):
                content = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, RuntimeError, EOFError, OSError, ValueError, KeyError, pickle.UnpicklingError) as error:
        reason = (str(error).strip().splitlines() or [repr(error)])[0]
        raise ValueError(
            f"{path} ({path.stat().st_size:,} bytes) cannot be read as a checkpoint: it is truncated, no checkpoint "
            f"at all (a download page or a pointer file?), or needs more than tensors to unpickle; fetch it again, or "
            f"save its state dict with torch.save. Reason: {reason}"
        ) from error
    if isinstance(content, Mapping):
        content = next((content[k] for k in WRAPPERS if isinstance(content.get(k), Mapping)), content)
    if not isinstance(content, Mapping) or not any(isinstance(v, Tensor) for v in content.values()):
        found = sorted(map(str, content))[:SHOWN] if isinstance(content, Mapping) else type(content).__name__
        raise ValueError(f"{path} holds no state dict (found {found}); allowed are a bare one or one under {WRAPPERS}")
    state = {_plain_name(k): v for k, v in content.items() if isinstance(v, Tensor)}
    return {k: v for k, v in state.items() if not k.endswith(DERIVED)}


def _plain_name(name: str) -> str:
    for prefix in PREFIXES:
        name = name.replace(prefix, "")
    return name


def _fill(model_class: type[Model], config: Any, state: dict[str, Tensor], path: str | Path, hint: str) -> Model:
    """Model with exactly these weights; differences in names or shapes are listed in one ValueError."""
    with torch.device("meta"):
        model = model_class(config)
    expected = {k: tuple(v.shape) for k, v in model.state_dict().items()}
    missing = sorted(expected.keys() - state.keys())
    surplus = sorted(state.keys() - expected.keys())
    reshaped = [
        f"{k} {tuple(state[k].shape)} instead of {expected[k]}"
        for k in sorted(expected.keys() & state.keys())
        if tuple(state[k].shape) != expected[k]
    ]
    kinds = (("missing", missing), ("not expected", surplus), ("of another shape", reshaped))
    problems = [f"{len(names)} {kind}: {', '.join(names[:SHOWN])}" for kind, names in kinds if names]
    if problems:
        raise ValueError(f"{path} does not fit: {'; '.join(problems)}. {hint}")
    model.load_state_dict(state, strict=True, assign=True)
    return model.eval()


def _gpt_hint(state: dict[str, Tensor]) -> str:
    if "tok_embeddings.weight" not in state:
        if "quantize.embedding.weight" in state:
            return "This is an image tokenizer: use convert_vq"
        return "This is no LlamaGen GPT"
    dim = state["tok_embeddings.weight"].shape[1]
    depth = len({k.split(".")[1] for k in state if k.startswith("layers.")})
    names = [n for n, size in GPT_PRESETS.items() if (size["dim"], size["n_layer"]) == (dim, depth)]
    what = f"which is {names[0]}" if names else "which is no published size: pass a LlamaGenConfig"
    return f"The file has dim={dim} and n_layer={depth}, {what}"


def _gpt_sizes(state: dict[str, Tensor]) -> dict[str, Any]:
    """Fields of `LlamaGenConfig` that the weights themselves tell."""
    sizes: dict[str, Any] = {}
    if "output.weight" in state:
        sizes["vocab_size"] = state["output.weight"].shape[0]
    if "cls_embedding.uncond_embedding" in state:
        tokens, width = state["cls_embedding.uncond_embedding"].shape
        sizes.update(condition="text", cls_token_num=tokens, caption_dim=width)
    elif "cls_embedding.embedding_table.weight" in state:
        sizes.update(condition="class", num_classes=state["cls_embedding.embedding_table.weight"].shape[0] - 1)
    return sizes


def convert_gpt(path: str | Path, size: str | LlamaGenConfig, *, block_size: int | None = None) -> LlamaGenGPT:
    """A published GPT checkpoint as a model in eval mode, in the file's dtype.

    Args:
        path: checkpoint file.
        size: a key of `GPT_PRESETS` (vocabulary and condition are then read off the weights), or all sizes.
        block_size: image tokens, which the file does not tell: with VQ-16 256 for 256 pixels, 576 for 384, 1024 for
            512. Only with a preset; 256 where omitted.

    Raises:
        ValueError: if the file cannot be read, or its names or shapes differ from the model's.

    Example:
        ``convert_gpt("t2i_XL_stage2_512.pt", "GPT-XL", block_size=1024).save_pretrained("llamagen-xl-512")``
    """
    state = read_checkpoint(path)
    if isinstance(size, LlamaGenConfig):
        if block_size is not None:
            raise ValueError(f"block_size={block_size} beside a config; set it in the config ({size.block_size})")
        config = size
    else:
        config = LlamaGenConfig.preset(size, block_size=256 if block_size is None else block_size, **_gpt_sizes(state))
    return _fill(LlamaGenGPT, config, state, path, _gpt_hint(state))


def convert_vq(path: str | Path, size: str | LlamaGenVQConfig) -> LlamaGenVQ:
    """A published tokenizer checkpoint as a model in eval mode, in the file's dtype.

    Args:
        path: checkpoint file.
        size: ``"VQ-16"`` or ``"VQ-8"`` (codebook sizes are then read off the weights), or all sizes.

    Raises:
        ValueError: if the file cannot be read, or its names or shapes differ from the model's.

    Example:
        ``convert_vq("vq_ds16_t2i.pt", "VQ-16").save_pretrained("llamagen-vq-16")``
    """
    state = read_checkpoint(path)
    if isinstance(size, LlamaGenVQConfig):
        config = size
    elif size in VQ_PRESETS:
        sizes = dict(VQ_PRESETS[size])
        if "quantize.embedding.weight" in state:
            sizes["codebook_size"], sizes["codebook_embed_dim"] = state["quantize.embedding.weight"].shape
        config = LlamaGenVQConfig(**sizes)
    else:
        raise ValueError(f"no preset {size!r}; allowed are {', '.join(VQ_PRESETS)} or a LlamaGenVQConfig")
    if "quantize.embedding.weight" in state:
        levels = len({k.split(".")[2] for k in state if k.startswith("encoder.conv_blocks.")})
        hint = f"The file has {levels} levels; VQ-16 has 5, VQ-8 has 4"
    elif "tok_embeddings.weight" in state:
        hint = "This is a GPT: use convert_gpt"
    else:
        hint = "This is no LlamaGen tokenizer"
    return _fill(LlamaGenVQ, config, state, path, hint)
