"""Text features of several prompts for the video pipelines of diffusers, aligned field by field or each by itself.

P prompts, S text positions, C width of the text features.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .keywords import nearest
from .prompt_align import Fill, field_tokens
from .prompt_fields import Organiser, Prompt, PromptFields, organise

__all__ = ["ALIGNS", "EncodedPrompts", "encode_aligned", "encode_each"]

ALIGNS = ("fields", "none")


@dataclass(frozen=True)
class EncodedPrompts:
    """Text features of the prompts of a video.

    Args:
        embeds: [P, S, C].
        texts: what was encoded, as readable text.
        mask: [P, S], 1 at tokens, for models that take one (HunyuanVideo); else None.
        pooled: [P, D] for models that take one; else None.
    """

    embeds: Tensor
    texts: tuple[str, ...]
    mask: Tensor | None = None
    pooled: Tensor | None = None


def encode_each(pipe: Any, prompts: Sequence[Prompt]) -> EncodedPrompts:
    """Encodes every prompt by itself with the pipeline's own `encode_prompt`.

    Args:
        pipe: a text-to-video pipeline of diffusers.
        prompts: texts, or fields (joined to a text).

    Raises:
        ValueError: a pipeline without `encode_prompt`.
    """
    if not hasattr(pipe, "encode_prompt"):
        raise ValueError(f"{type(pipe).__name__} has no encode_prompt; build PromptBank from embeddings instead")
    texts = [prompt if isinstance(prompt, str) else PromptFields.of(prompt).text for prompt in prompts]
    allowed = inspect.signature(pipe.encode_prompt).parameters
    options: dict[str, Any] = {
        "device": pipe._execution_device, "num_images_per_prompt": 1, "num_videos_per_prompt": 1,
        "do_classifier_free_guidance": False,
    }  # fmt: skip
    if type(pipe).__name__.startswith("Wan"):
        options["max_sequence_length"] = 512  # what the pipeline's call uses; its encode_prompt has another default
    options = {name: value for name, value in options.items() if name in allowed}
    if "do_classifier_free_guidance" in allowed or "prompt_2" not in allowed:
        rows = [pipe.encode_prompt(text, **options)[0][0] for text in texts]
        return EncodedPrompts(torch.stack(rows), tuple(texts))
    found = [pipe.encode_prompt(text, **options) for text in texts]  # HunyuanVideo: features, pooled, mask
    embeds, pooled, mask = (torch.cat([one[part] for one in found]) for part in range(3))
    return EncodedPrompts(embeds, tuple(texts), mask, pooled)


def encode_aligned(
    pipe: Any, prompts: Sequence[Prompt], fill: Fill = "cycle", llm: Organiser | None = None
) -> EncodedPrompts:
    """Encodes prompts aligned field by field, each once (arXiv:2412.17254).

    Args:
        pipe: a pipeline with one CLIP-like or T5 text encoder: AnimateDiff and its relatives, Wan, CogVideoX.
        prompts: texts or fields; texts are split by `PromptFields.parse` or by `llm`.
        fill: how shorter fields are filled up.
        llm: see `prompt_fields.organise`.

    Raises:
        ValueError: another kind of pipeline, or fields that are too long for its text encoder.
    """
    organised = organise(prompts, llm)
    tokenizer, encoder = getattr(pipe, "tokenizer", None), getattr(pipe, "text_encoder", None)
    name = type(pipe).__name__
    if tokenizer is None or encoder is None or getattr(pipe, "text_encoder_2", None) is not None:
        raise ValueError(
            f"the prompts of {name} cannot be aligned: it needs one tokenizer and one text encoder; write align='none'"
        )
    wan, cogvideo = name.startswith("Wan"), name.startswith("CogVideoX")
    if not wan and not cogvideo and not hasattr(pipe, "unet"):
        raise ValueError(f"how {name} encodes its text is not known, so fields cannot be aligned; write align='none'")
    length = 512 if wan else 226 if cogvideo else min(tokenizer.model_max_length, _positions(encoder))
    rows = field_tokens(organised, tokenizer, length, fill)
    device = pipe._execution_device
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    ids = torch.tensor([row + [pad] * (length - len(row)) for row in rows], device=device)
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows], device=device)
    with torch.no_grad():
        if wan:
            embeds = encoder(ids, mask).last_hidden_state * mask[..., None]  # Wan reads zeros at padding
        elif cogvideo:
            embeds = encoder(ids)[0]
        else:
            uses_mask = bool(getattr(encoder.config, "use_attention_mask", False))
            embeds = encoder(ids, attention_mask=mask if uses_mask else None)[0]
    return EncodedPrompts(embeds.to(encoder.dtype), tuple(prompt.text for prompt in organised))


def check_align(align: str) -> None:
    """Raises ValueError for an unknown `align`."""
    if align not in ALIGNS:
        raise ValueError(f"align={align!r} is not known; {nearest(str(align), ALIGNS)}")


def _positions(encoder: Any) -> int:
    return int(getattr(encoder.config, "max_position_embeddings", 512))
