"""Class number to image by an autoregressive transformer over image tokens, decoded speculatively."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.tree import TreeSpec
from ..drafters.jacobi import JacobiDrafter
from ..models.eagle import EagleHead
from ..models.llamagen import LlamaGenGPT, LlamaGenVQ
from ..rules import AcceptanceRule
from ..targets.llamagen import ClassCondition
from .image import ImagePipeline
from .keywords import strict
from .output import ImagePipelineOutput
from .seeds import row_seeds
from .watch import Callback

__all__ = ["ClassToImagePipeline"]


class ClassToImagePipeline(ImagePipeline):
    """Draws classes with a class-conditional LlamaGen transformer.

    Args:
        transformer: the target model, `condition="class"`.
        vq: decodes image tokens to pixels.
        rule: acceptance rule; `ExactRule` where omitted. Saved with the pipeline like a scheduler.
        drafter: an EagleHead, a smaller LlamaGenGPT with the same image tokens, a JacobiDrafter, or None.
        guidance_scale, temperature, top_k, top_p, num_draft_tokens: defaults of the call.
        default_drafter: name of the drafter of chains where a call names none, e.g. "jacobi"; None: the component.

    Raises:
        ValueError: parts that do not fit each other.
    """

    model_cpu_offload_seq = "transformer->vq"  # type: ignore[assignment]

    def __init__(
        self,
        transformer: LlamaGenGPT,
        vq: LlamaGenVQ,
        rule: AcceptanceRule | None = None,
        drafter: EagleHead | LlamaGenGPT | JacobiDrafter | None = None,
        guidance_scale: float = 4.0,
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
        if transformer is not None and transformer.config.condition != "class":
            raise ValueError(
                f"the transformer has condition={transformer.config.condition!r}; ClassToImagePipeline needs 'class', "
                "text models run in TextToImagePipeline"
            )
        self._setup(rule, drafter, defaults, transformer=transformer, vq=vq)

    @strict
    @torch.no_grad()
    def __call__(
        self,
        class_labels: int | Sequence[int] | Tensor,
        guidance_scale: float | None = None,
        num_images_per_label: int = 1,
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
        """Draws pictures. A picture depends on its class, its seed and the settings, never on the rest of the batch.

        Args:
            class_labels: one class number or P of them, each in [0, num_classes).
            num_images_per_label: pictures per class, all from one prefill.
            guidance_scale, generator, seeds, temperature, top_k, top_p, rule, drafter, num_draft_tokens, tree,
            output_type, return_dict, return_trace, callback_on_step_end, callback_on_step_end_tensor_inputs:
                as in `TextToImagePipeline`.

        Returns:
            `ImagePipelineOutput` with P * num_images_per_label pictures, class by class.

        Raises:
            TypeError: an unknown keyword (the nearest valid one is named). ValueError: a value out of range.
        """
        started = time.perf_counter()
        labels = self._check_labels(class_labels)
        names = self._check_callback(callback_on_step_end, callback_on_step_end_tensor_inputs)
        copies = self._copies(len(labels), num_images_per_label)
        row_seed = row_seeds(len(copies), generator, seeds)
        plan = self._plan(
            rule=rule, drafter=drafter, guidance_scale=guidance_scale, temperature=temperature, top_k=top_k,
            top_p=top_p, num_draft_tokens=num_draft_tokens, tree=tree, output_type=output_type,
        )  # fmt: skip
        numbers = torch.tensor(labels, device=self._execution_device)
        condition = ClassCondition.build(numbers, plan.guidance_scale != 1.0)
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

    def _check_labels(self, class_labels: Any) -> list[int]:
        labels = class_labels.flatten().tolist() if hasattr(class_labels, "tolist") else class_labels
        labels = list(labels) if isinstance(labels, Sequence) else [labels]
        classes = self.transformer.config.num_classes
        if not labels:
            raise ValueError("class_labels is empty; give at least one class number")
        for label in labels:
            if isinstance(label, bool) or not isinstance(label, int) or not 0 <= label < classes:
                raise ValueError(f"class label {label!r} does not exist; this model has classes 0 to {classes - 1}")
        return labels

    def prompt_keywords(self, prompts: list[str], negative_prompts: list[str | None]) -> dict[str, Any]:
        """Keywords of a call for classes given as text; how manifests and commands feed any image pipeline."""
        if any(negative is not None for negative in negative_prompts):
            raise ValueError("a class model has no negative prompts; leave negative_prompt out")
        for text in prompts:
            if not text.strip().isdecimal():
                raise ValueError(f"prompt {text!r}: this is a class model, give class numbers such as '207'")
        return {"class_labels": [int(text) for text in prompts]}
