"""One text per frame in the cross-attention of Wan (PromptBlend, arXiv:2412.17254, on a full 3D transformer).

The text of all prompts goes through the model's text projection side by side; every cross-attention then cuts its
queries into frames and sends each group of frames with equal text through its own forward. Queries do not see each
other in a cross-attention, so this is exact, whatever processor, backend or fused projection the module uses.

B batch, F latent frames, T tokens per frame, P prompts, S text positions, I image tokens (image-to-video), D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from diffusers.hooks import HookRegistry, ModelHook
from torch import Tensor

from .prompt_blend import blend_prompts
from .prompt_conditioning import PromptHandle, call_arguments

__all__ = ["FrameTexts", "install_wan"]

HOOK = "mediaspec_prompt_bank"


@dataclass
class FrameTexts:
    """What the cross-attentions of the running call need to know.

    Args:
        num_prompts, positions: P and S.
        index, amount: F times i and a.
    """

    num_prompts: int = 0
    positions: int = 0
    index: list[int] | None = None
    amount: list[float] | None = None


class _FramewiseText(ModelHook):
    def __init__(self, texts: FrameTexts) -> None:
        super().__init__()
        self.texts = texts

    def new_forward(
        self, module: Any, hidden_states: Tensor, encoder_hidden_states: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        inner: Any = self.fn_ref.original_forward
        index, amount = self.texts.index, self.texts.amount
        if index is None or amount is None:
            return inner(hidden_states, encoder_hidden_states, *args, **kwargs)
        count, positions = self.texts.num_prompts, self.texts.positions
        images = encoder_hidden_states.shape[1] - count * positions
        image, text = encoder_hidden_states[:, :images], encoder_hidden_states[:, images:]
        text = text.unflatten(1, (count, positions))
        queries = hidden_states.unflatten(1, (len(index), -1))  # [B, F, T, D]
        output = torch.empty_like(queries)
        held = sorted({i for i, a in zip(index, amount) if a == 0.0})
        for prompt in held:
            frames = [n for n, (i, a) in enumerate(zip(index, amount)) if i == prompt and a == 0.0]
            words = torch.cat([image, text[:, prompt]], 1)
            done = inner(queries[:, frames].flatten(1, 2), words, *args, **kwargs)
            output[:, frames] = done.unflatten(1, (len(frames), -1))
        mixed = [n for n, a in enumerate(amount) if a != 0.0]
        if mixed:
            chosen, weights = [index[n] for n in mixed], [amount[n] for n in mixed]
            words = torch.stack([blend_prompts(row, chosen, weights) for row in text])  # [B, M, S, D]
            words = torch.cat([image[:, None].expand(-1, len(mixed), -1, -1), words], 2)
            done = inner(queries[:, mixed].flatten(0, 1), words.flatten(0, 1), *args, **kwargs)
            output[:, mixed] = done.unflatten(0, (-1, len(mixed)))
        return output.flatten(1, 2)


def install_wan(model: Any, handle: PromptHandle) -> None:
    """Hooks a WanTransformer3DModel; `handle` gets the way back."""
    bank, texts = handle.bank, FrameTexts()

    def widen(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = call_arguments(module, args, kwargs)
        sample, text = given["hidden_states"], given["encoder_hidden_states"]
        frames, fractions = handle.moment(sample.shape[2] // module.config.patch_size[0], given["timestep"])
        texts.index, texts.amount = bank.plan(frames, fractions)
        mine = handle.conditional(text, len(frames))[:, None, None, None]
        prompts = bank.prompts.to(text.device, text.dtype)[None]
        texts.num_prompts, texts.positions = len(bank), text.shape[1]
        wide = torch.where(mine, prompts, text[:, None]).flatten(1, 2)  # equal rows stay equal under blending
        return (), {**given, "encoder_hidden_states": wide}

    handle.add(model.register_forward_pre_hook(widen, with_kwargs=True).remove)
    for number, block in enumerate(model.blocks):
        registry = HookRegistry.check_if_exists_or_initialize(block.attn2)
        registry.register_hook(_FramewiseText(texts), HOOK)
        handle.add(partial(registry.remove_hook, HOOK, recurse=False))
        handle.modules.append(f"blocks.{number}.attn2")
