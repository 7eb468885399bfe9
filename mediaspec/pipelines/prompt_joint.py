"""Mass blend for models that attend to text and video jointly: CogVideoX and HunyuanVideo (arXiv:2412.17254 carried
over).

The sequence keeps one text block per prompt. A video query of frame n sees block i with its logits raised by
log(1 - a), block i + 1 by log a and no other block; that equals a mix of two plain attentions by their masses, so no
hidden text states are averaged. Text queries see their own block and the video of its frames. No L x L mask is built:
queries are grouped by what they see, and a group's bias is one number per key.

B batch, H heads, D head size, F latent frames, T tokens per frame, P prompts, S text positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.hooks import HookRegistry, ModelHook
from torch import Tensor

from .joint_projection import cogvideox_qkv, hunyuan_qkv, is_fused
from .prompt_conditioning import PromptHandle, call_arguments

__all__ = ["JointPlan", "install_joint", "joint_prompt_attention"]

HOOK = "mediaspec_prompt_bank"
COGVIDEO = ("CogVideoXAttnProcessor2_0", "FusedCogVideoXAttnProcessor2_0")
HUNYUAN = ("HunyuanVideoAttnProcessor2_0",)


@dataclass
class JointPlan:
    """What the attentions of the running call need to know.

    Args:
        num_prompts: P.
        index, amount: F times i and a.
        mine: [B] bool, rows that hold the bank's prompts; in the others all blocks are the negative prompt, and every
            text query sees all video, so they come out as without a bank.
        words: [B, P, S] bool, False at padding that must not be read; None: all are read.
    """

    num_prompts: int
    index: list[int]
    amount: list[float]
    mine: Tensor
    words: Tensor | None = None


def joint_prompt_attention(
    video: tuple[Tensor, Tensor, Tensor], text: tuple[Tensor, Tensor, Tensor], plan: JointPlan
) -> tuple[Tensor, Tensor]:
    """Attention of video and text queries under the mass blend.

    Args:
        video: query, key, value [B, H, F * T, D], frame by frame.
        text: query, key, value [B, H, P * S, D], prompt by prompt.
        plan: who sees what.

    Returns:
        (video output [B, H, F * T, D], text output [B, H, P * S, D]).
    """
    count, frames = plan.num_prompts, len(plan.index)
    video_q, video_k, video_v = video
    text_q, text_k, text_v = (one.unflatten(2, (count, -1)) for one in text)
    tokens = video_k.shape[2] // frames
    queries = video_q.unflatten(2, (frames, tokens))
    video_out, text_out = torch.empty_like(queries), torch.empty_like(text_q)
    groups: dict[tuple[int, float], list[int]] = {}
    for n, pair in enumerate(zip(plan.index, plan.amount, strict=True)):
        groups.setdefault(pair, []).append(n)
    for (i, a), chosen in groups.items():
        blocks = [(i, 1 - a), (i + 1, a)] if a else [(i, 1.0)]
        blocks = [(p, mass) for p, mass in blocks if mass > 0]
        key = torch.cat([*(text_k[:, :, p] for p, _ in blocks), video_k], 2)
        value = torch.cat([*(text_v[:, :, p] for p, _ in blocks), video_v], 2)
        bias = _text_bias(blocks, plan, text_k, video_k)
        done = F.scaled_dot_product_attention(queries[:, :, chosen].flatten(2, 3), key, value, attn_mask=bias)
        video_out[:, :, chosen] = done.unflatten(2, (len(chosen), tokens))
    for p in range(count):
        seen = [i == p or (i + 1 == p and a > 0) for i, a in zip(plan.index, plan.amount)]
        seen = [s and not (i == p and a >= 1) for s, i, a in zip(seen, plan.index, plan.amount)]
        key, value = torch.cat([text_k[:, :, p], video_k], 2), torch.cat([text_v[:, :, p], video_v], 2)
        bias = _text_bias([(p, 1.0)], plan, text_k, video_k)
        if not all(seen):
            visible = torch.tensor(seen, device=video_k.device).repeat_interleave(tokens)
            visible = visible[None] | ~plan.mine[:, None]
            hidden = torch.zeros(visible.shape, device=video_k.device, dtype=video_k.dtype)
            hidden = hidden.masked_fill(~visible, -math.inf)[:, None, None]
            zeros = hidden.new_zeros(*hidden.shape[:3], text_k.shape[3])
            bias = torch.cat([zeros, hidden], -1) + (0 if bias is None else bias)
        text_out[:, :, p] = F.scaled_dot_product_attention(text_q[:, :, p], key, value, attn_mask=bias)
    return video_out.flatten(2, 3), text_out.flatten(2, 3)


def _text_bias(blocks: list[tuple[int, float]], plan: JointPlan, text_k: Tensor, video_k: Tensor) -> Tensor | None:
    """[1 or B, 1, 1, keys]: log mass at text, -inf at padding, 0 at video; None where all is 0."""
    if plan.words is None and all(mass == 1.0 for _, mass in blocks):
        return None
    positions = text_k.shape[3]
    parts = []
    for p, mass in blocks:
        part = text_k.new_full((1, positions), math.log(mass))
        if plan.words is not None:
            part = part.expand(plan.words.shape[0], -1).masked_fill(~plan.words[:, p], -math.inf)
        parts.append(part)
    parts.append(parts[0].new_zeros(parts[0].shape[0], video_k.shape[2]))
    return torch.cat(parts, 1)[:, None, None]


class _CogVideoXPrompts:
    """Processor of CogVideoX attention; text stands first.

    Args:
        holder: of the plan; fused: see `cogvideox_qkv`.
    """

    def __init__(self, holder: dict[str, JointPlan], fused: bool) -> None:
        self.holder, self.fused = holder, fused

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> tuple[Tensor, Tensor]:
        if attention_mask is not None:
            raise ValueError("a prompt bank takes no attention_mask in CogVideoX; the pipeline passes none")
        positions = encoder_hidden_states.shape[1]
        qkv = cogvideox_qkv(attn, encoder_hidden_states, hidden_states, image_rotary_emb, fused=self.fused)
        video, text = ([one[:, :, part] for one in qkv] for part in (slice(positions, None), slice(positions)))
        video_out, text_out = joint_prompt_attention(
            (video[0], video[1], video[2]), (text[0], text[1], text[2]), self.holder["plan"]
        )
        states = torch.cat([text_out, video_out], 2).transpose(1, 2).flatten(2)
        states = attn.to_out[1](attn.to_out[0](states))
        return states[:, positions:], states[:, :positions]


class _HunyuanPrompts:
    """Processor of HunyuanVideo attention; video stands first, text has its own projections in the double blocks."""

    _attention_backend = None
    _parallel_config = None

    def __init__(self, holder: dict[str, JointPlan]) -> None:
        self.holder = holder

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> tuple[Tensor, Tensor]:
        video = hunyuan_qkv(attn, hidden_states, image_rotary_emb)
        text = hunyuan_qkv(attn, encoder_hidden_states, added=attn.add_q_proj is not None)
        (vq, vk, vv), (tq, tk, tv) = ([one.transpose(1, 2) for one in part] for part in (video, text))
        video_out, text_out = joint_prompt_attention((vq, vk, vv), (tq, tk, tv), self.holder["plan"])
        video_out, text_out = video_out.transpose(1, 2).flatten(2), text_out.transpose(1, 2).flatten(2)
        if getattr(attn, "to_out", None) is not None:
            video_out = attn.to_out[1](attn.to_out[0](video_out))
        if getattr(attn, "to_add_out", None) is not None:
            text_out = attn.to_add_out(text_out)
        return video_out, text_out


class _BlockwisePatchEmbed(ModelHook):
    """CogVideoX adds positions to text and video at once, for one text block; each block gets them by itself."""

    def __init__(self, holder: dict[str, JointPlan]) -> None:
        super().__init__()
        self.holder = holder

    def new_forward(self, module: Any, text_embeds: Tensor, image_embeds: Tensor) -> Tensor:
        inner: Any = self.fn_ref.original_forward
        count = self.holder["plan"].num_prompts
        positions = text_embeds.shape[1] // count
        parts = [inner(block, image_embeds) for block in text_embeds.split(positions, 1)]
        return torch.cat([*(part[:, :positions] for part in parts), parts[0][:, positions:]], 1)


class _BlockwiseRefiner(ModelHook):
    """HunyuanVideo refines text by attention within it; every block is refined by itself."""

    def __init__(self, holder: dict[str, JointPlan]) -> None:
        super().__init__()
        self.holder = holder

    def new_forward(self, module: Any, hidden_states: Tensor, timestep: Tensor, mask: Tensor | None = None) -> Tensor:
        inner: Any = self.fn_ref.original_forward
        count = self.holder["plan"].num_prompts
        blocks = hidden_states.unflatten(1, (count, -1)).flatten(0, 1)
        masks = None if mask is None else mask.unflatten(1, (count, -1)).flatten(0, 1)
        done = inner(blocks, timestep.repeat_interleave(count), masks)
        return done.unflatten(0, (-1, count)).flatten(1, 2)


def install_joint(model: Any, handle: PromptHandle) -> None:
    """Hooks a CogVideoXTransformer3DModel or HunyuanVideoTransformer3DModel; `handle` gets the way back.

    CogVideoX 1.5 joins two latent frames in one token; such a pair takes the text of its first frame.

    Raises:
        ValueError: attention processors that are not the model's own (TiARA's and others).
    """
    hunyuan = type(model).__name__.startswith("Hunyuan")
    bank, holder = handle.bank, dict[str, JointPlan]()
    known = HUNYUAN if hunyuan else COGVIDEO
    group = (model.config.patch_size_t or 1) if hasattr(model.config, "patch_size_t") else 1

    def widen(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = call_arguments(module, args, kwargs)
        sample, text = given["hidden_states"], given["encoder_hidden_states"]
        latents = sample.shape[2 if hunyuan else 1]
        frames, fractions = handle.moment(latents, given["timestep"])
        index, amount = bank.plan(frames[::group], fractions[::group])
        mine = handle.conditional(text, len(frames))
        prompts = bank.prompts.to(text.device, text.dtype)[None]
        new = {"encoder_hidden_states": torch.where(mine[:, None, None, None], prompts, text[:, None]).flatten(1, 2)}
        words = None
        if hunyuan:
            mask = given["encoder_attention_mask"]
            words = mask[:, None].expand(-1, len(bank), -1)
            if bank.encoded.mask is not None:
                own = bank.encoded.mask.to(mask.device, mask.dtype)[None]
                words = torch.where(mine[:, None, None], own, words)
            new["encoder_attention_mask"] = words.flatten(1, 2)
            words = words.bool()
        holder["plan"] = JointPlan(len(bank), index, amount, mine, words)
        return (), {**given, **new}

    handle.add(model.register_forward_pre_hook(widen, with_kwargs=True).remove)
    path = "context_embedder" if hunyuan else "patch_embed"
    registry = HookRegistry.check_if_exists_or_initialize(getattr(model, path))
    registry.register_hook(_BlockwiseRefiner(holder) if hunyuan else _BlockwisePatchEmbed(holder), HOOK)
    handle.add(lambda: registry.remove_hook(HOOK, recurse=False))
    for name, module in model.named_modules():
        if not name.endswith(".attn" if hunyuan else ".attn1") or name.startswith("context_embedder"):
            continue
        before = module.processor
        if type(before).__name__ not in known:
            raise ValueError(
                f"{name} has the processor {type(before).__name__}; the mass blend replaces {' or '.join(known)}, so "
                "remove what installed it first"
            )
        module.processor = _HunyuanPrompts(holder) if hunyuan else _CogVideoXPrompts(holder, is_fused(before))
        handle.add(partial(setattr, module, "processor", before))
        handle.modules.append(name)
