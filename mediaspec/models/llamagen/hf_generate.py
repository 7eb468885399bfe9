"""Plain sampling of a `LlamaGenGPT` through transformers' own ``generate``: the reference row of speed tables.

This is the only file of the model that meets the generation loop of transformers, and the only one that knows that
the cache argument and output called ``past_key_values`` became ``cache`` in transformers 5.24.
"""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationMixin, LogitsProcessor, LogitsProcessorList
from transformers.modeling_outputs import CausalLMOutputWithPast

if TYPE_CHECKING:
    from .gpt import LlamaGenGPT

# Name of the cache in model outputs, asked of the class itself rather than of a version number.
CACHE_KEY = "cache" if "cache" in {f.name for f in fields(CausalLMOutputWithPast)} else "past_key_values"


class ImageGenerationMixin(GenerationMixin):
    """Teaches ``generate`` a prefix that is no token: ``inputs`` are the image tokens so far, possibly none."""

    config: Any  # the host model's `LlamaGenConfig`

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        cond: Tensor | None = None,
        cond_mask: Tensor | None = None,
        drop_ids: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        use_cache: bool = True,
        logits_to_keep: int = 0,
        **kwargs: Any,  # what the loop passes to every model and this one has no use for
    ) -> dict[str, Any]:
        """Arguments of the next forward pass: prefix and tokens at first, then the tokens the cache lacks.

        ``cond`` may have twice the rows of ``input_ids``: guidance runs both halves on the same tokens.
        """
        if cond is None:
            raise ValueError("generate() got no cond; pass cond=class ids [B] or text features [B, C, caption_dim]")
        cache = cache if cache is not None else past_key_values
        past = cache.get_seq_length() if cache is not None else 0
        tokens = input_ids[:, past - self.config.cls_token_num :] if past else input_ids
        return {
            "input_ids": tokens.repeat(cond.shape[0] // tokens.shape[0], 1),
            "cond": None if past else cond,
            "cond_mask": cond_mask,
            "drop_ids": None if past else drop_ids,
            "cache": cache,
            "use_cache": use_cache,
            "logits_to_keep": logits_to_keep,
        }


class PairedGuidance(LogitsProcessor):
    """Classifier-free guidance over stacked rows: ``u + scale * (c - u)`` of logits [2B, V] to [B, V].

    Args:
        scale: 1 keeps the conditional logits.
    """

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        cond, uncond = scores.chunk(2)
        return uncond + (cond - uncond) * self.scale


@torch.no_grad()
def hf_generate_images(
    model: LlamaGenGPT,
    cond: Tensor,
    cond_mask: Tensor | None = None,
    *,
    guidance_scale: float = 1.0,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    do_sample: bool = True,
    num_tokens: int | None = None,
) -> Tensor:
    """Image tokens by ``model.generate``, one token per forward pass, with a `DynamicCache`.

    Args:
        model: the network, in eval mode.
        cond: class ids [B] int64, or text features [B, C, caption_dim].
        cond_mask: [B, C] bool validity of text positions; None where all are valid.
        guidance_scale: 1 runs B rows; anything else runs conditional and unconditional rows as one batch of 2B.
        temperature: divides the guided logits.
        top_k: 0 keeps the whole vocabulary.
        top_p: 1 keeps the whole vocabulary.
        do_sample: False takes the most likely token.
        num_tokens: tokens per image; the whole grid where omitted.

    Returns:
        [B, num_tokens] int64, in raster order. Sampling draws from torch's global generator, as ``generate`` does.

    Example:
        >>> from mediaspec.models.llamagen import LlamaGenConfig, LlamaGenGPT
        >>> model = LlamaGenGPT(LlamaGenConfig(dim=32, n_layer=1, n_head=2, vocab_size=8, block_size=4)).eval()
        >>> hf_generate_images(model, torch.tensor([3]), guidance_scale=4.0).shape
        torch.Size([1, 4])
    """
    rows = cond.shape[0]
    drop_ids = None
    processors = LogitsProcessorList()
    if guidance_scale != 1.0:
        cond = torch.cat([cond, cond])
        cond_mask = None if cond_mask is None else torch.cat([cond_mask, cond_mask])
        drop_ids = torch.arange(2 * rows, device=cond.device) >= rows
        processors.append(PairedGuidance(guidance_scale))
    sampling: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p} if do_sample else {}
    tokens: Tensor = model.generate(
        inputs=torch.empty(rows, 0, dtype=torch.long, device=cond.device),
        cond=cond,
        cond_mask=cond_mask,
        drop_ids=drop_ids,
        logits_processor=processors,
        max_new_tokens=model.config.block_size if num_tokens is None else num_tokens,
        do_sample=do_sample,
        **sampling,
    )
    return tokens
