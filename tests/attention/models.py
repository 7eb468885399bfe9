"""transformers decoders of real classes at tiny size, with laws far from uniform."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

VOCAB, LAYERS, HEADS, KEY_HEADS = 50, 3, 4, 2
SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
    num_key_value_heads=KEY_HEADS, max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


def make_model(family: str = "Llama", seed: int = 0, **settings: Any) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **settings})
    model = getattr(transformers, f"{family}ForCausalLM")._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.normal_(std=1.0 if "embed" in label else 2.0 * parameter.shape[-1] ** -0.5)
    return model


def tokens(count: int, seed: int = 1) -> Tensor:
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


def attentions(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """[L, H, n, n] of the model's own eager attention."""
    with torch.no_grad():
        output = model(input_ids=ids[None], output_attentions=True, use_cache=False)
    return torch.stack([one[0] for one in output.attentions])
