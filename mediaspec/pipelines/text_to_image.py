"""Text to image by an autoregressive transformer over image tokens, decoded speculatively."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, T5EncoderModel

from ..core.tree import TreeSpec
from ..drafters.jacobi import JacobiDrafter
from ..models.eagle import EagleHead
from ..models.llamagen import LlamaGenGPT, LlamaGenVQ
from ..rules import AcceptanceRule
from ..targets.llamagen import TextCondition
from .captions import check_prompts, encode_captions
from .image import ImagePipeline
from .keywords import strict
from .loading import bring_in
from .output import ImagePipelineOutput
from .seeds import row_seeds
from .watch import Callback

__all__ = ["TextToImagePipeline"]


class TextToImagePipeline(ImagePipeline):
    """Draws captions with a text-conditional LlamaGen transformer.

    Args:
        transformer: the target model, `condition="text"`.
        vq: decodes image tokens to pixels.
        text_encoder: text features of width `transformer.config.caption_dim`.
        tokenizer: of the text encoder.
        rule: acceptance rule; `ExactRule` where omitted. Saved with the pipeline like a scheduler.
        drafter: an EagleHead, a smaller LlamaGenGPT with the same image tokens, a JacobiDrafter, or None.
        guidance_scale, temperature, top_k, top_p, num_draft_tokens: defaults of the call.
        default_drafter: name of the drafter of chains where a call names none, e.g. "jacobi"; None: the component.

    Raises:
        ValueError: parts that do not fit each other.

    Example:
        >>> pipe = mediaspec.AutoPipeline.from_pretrained("emoji-64")        # doctest: +SKIP
        >>> out = pipe("a red apple on a blue background", seeds=7)          # doctest: +SKIP
        >>> out.images[0].save("apple.png"); out.stats["tokens_per_call"]    # doctest: +SKIP
    """

    text_encoder: T5EncoderModel
    tokenizer: PreTrainedTokenizerFast

    def __init__(
        self,
        transformer: LlamaGenGPT,
        vq: LlamaGenVQ,
        text_encoder: T5EncoderModel,
        tokenizer: PreTrainedTokenizerFast,
        rule: AcceptanceRule | None = None,
        drafter: EagleHead | LlamaGenGPT | JacobiDrafter | None = None,
        guidance_scale: float = 3.0,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        num_draft_tokens: int = 5,
        default_drafter: str | None = None,
    ) -> None:
        super().__init__()
        defaults = {
            "guidance_scale": guidance_scale, "temperature": temperature, "top_k": top_k, "top_p": top_p,
            "num_draft_tokens": num_draft_tokens, "default_drafter": default_drafter,
        }  # fmt: skip
        if transformer is not None and transformer.config.condition != "text":
            raise ValueError(
                f"the transformer has condition={transformer.config.condition!r}; TextToImagePipeline needs 'text', "
                "class models run in ClassToImagePipeline"
            )
        width = getattr(text_encoder.config, "d_model", None) if text_encoder is not None else None
        if transformer is not None and width is not None and width != transformer.config.caption_dim:
            raise ValueError(
                f"the text encoder gives features of width {width}, the transformer reads "
                f"{transformer.config.caption_dim}; load the text encoder it was trained with"
            )
        self._setup(
            rule, drafter, defaults, transformer=transformer, vq=vq, text_encoder=text_encoder, tokenizer=tokenizer
        )

    @strict
    @torch.no_grad()
    def __call__(
        self,
        prompt: str | Sequence[str],
        negative_prompt: str | Sequence[str | None] | None = None,
        guidance_scale: float | None = None,
        num_images_per_prompt: int = 1,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        seeds: int | Sequence[int] | Tensor | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        rule: AcceptanceRule | str | None = None,
        drafter: Any = None,
        num_draft_tokens: int | None = None,
        tree: TreeSpec | Sequence[int] | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        return_trace: bool = False,
        callback_on_step_end: Callback | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("tokens",),
    ) -> ImagePipelineOutput | tuple[Any, ...]:
        """Draws pictures. A picture depends on its prompt, its seed and the settings, never on the rest of the batch.

        Args:
            prompt: one caption or a list of P.
            negative_prompt: text for the unconditional branch, one or one per prompt; None is the model's own.
            guidance_scale: s in u + s (c - u); 1 runs without guidance at half the cost.
            num_images_per_prompt: pictures per caption, all from one prefill.
            generator: draws the seeds: one for all pictures in order, or a list with one per picture.
            seeds: an int s for s, s + 1, ..., or one int64 per picture. Without either, entropy: see `stats`.
            temperature, top_k, top_p: the sampled law; temperature 0 is greedy, top_k 0 and top_p 1 are off.
            rule: an AcceptanceRule, a name such as "exact", "coupled", "cool_sd", or "plain" for no speculation.
            drafter: "eagle", "jacobi", "model", "none", a network or an object; None is the pipeline's own.
            num_draft_tokens: tokens drafted per round; 0 switches speculation off.
            tree: a TreeSpec or the widths of a full tree, instead of a chain.
            output_type: "pil", "np", "pt" or "tokens".
            return_dict: False returns the tuple (images, stats), with the trace between them if asked for.
            return_trace: also return how every token came about.
            callback_on_step_end: called after every verification round as fn(pipe, round, committed tokens of the
                slowest picture, tensors); set `pipe._interrupt = True` in it to stop. Tokens cannot be edited.
            callback_on_step_end_tensor_inputs: which of "tokens", "num_accepted", "progress" it gets.

        Returns:
            `ImagePipelineOutput` with P * num_images_per_prompt pictures, prompt by prompt.

        Raises:
            TypeError: an unknown keyword (the nearest valid one is named) or a value of the wrong kind.
            ValueError: a value out of range, an empty or too long prompt, parts that do not fit.
        """
        started = time.perf_counter()
        prompts, negatives = check_prompts(prompt, negative_prompt)
        names = self._check_callback(callback_on_step_end, callback_on_step_end_tensor_inputs)
        copies = self._copies(len(prompts), num_images_per_prompt)
        row_seed = row_seeds(len(copies), generator, seeds)
        plan = self._plan(
            rule=rule, drafter=drafter, guidance_scale=guidance_scale, temperature=temperature, top_k=top_k,
            top_p=top_p, num_draft_tokens=num_draft_tokens, tree=tree, output_type=output_type,
        )  # fmt: skip
        condition = self.encode_prompt(prompts, negatives, plan.guidance_scale != 1.0)
        return self._generate(
            plan,
            condition,
            copies,
            row_seed,
            started=started,
            return_dict=return_dict,
            return_trace=return_trace,
            callback=callback_on_step_end,
            callback_names=names,
        )

    def encode_prompt(
        self, prompts: Sequence[str], negative_prompts: Sequence[str | None], guided: bool
    ) -> TextCondition:
        """Captions to the transformer's condition.

        Args:
            prompts: P captions.
            negative_prompts: P captions or None for the learned unconditional features.
            guided: whether the unconditional branch runs at all.
        """
        bring_in(self.text_encoder)
        positions, where = self.transformer.config.cls_token_num, self._execution_device
        parts = (self.tokenizer, self.text_encoder, positions, self._device_of(self.text_encoder))
        features, mask = (part.to(where) for part in encode_captions(prompts, *parts))
        if not guided or all(text is None for text in negative_prompts):
            return TextCondition.build(features, mask, guided)
        given = [text is not None for text in negative_prompts]
        texts = [prompt if text is None else text for prompt, text in zip(prompts, negative_prompts, strict=True)]
        negative, negative_mask = (part.to(where) for part in encode_captions(texts, *parts, "negative prompt"))
        return TextCondition.build(features, mask, True, negative, negative_mask, torch.tensor(given, device=where))

    def prompt_keywords(self, prompts: list[str], negative_prompts: list[str | None]) -> dict[str, Any]:
        """Keywords of a call that draws these captions; how manifests and commands feed any image pipeline."""
        return {"prompt": prompts, "negative_prompt": negative_prompts}
