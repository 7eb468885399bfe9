"""What every image pipeline shares: components, saving and loading, and the one decode loop around the engine.

B pictures (prompts times pictures per prompt), G guidance branches, T tokens per picture.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import PIL.Image
import torch
from diffusers.pipelines.pipeline_utils import DiffusionPipeline

from ..core.engine import Engine
from ..core.stats import DecodeResult
from ..core.tree import TreeSpec
from ..core.types import Warp
from ..drafters.eagle import EagleDrafter
from ..drafters.model import ModelDrafter
from ..models.llamagen import LlamaGenGPT, LlamaGenVQ
from ..models.llamagen.step import weights_version
from ..rules import AcceptanceRule, ExactRule
from ..targets.llamagen import LlamaGenTarget
from .choices import choose_drafter, choose_rule, drafter_name, name_of, settings_of
from .keywords import refuse_unknown
from .loading import (
    LOADING_KEYWORDS,
    SAVING_KEYWORDS,
    bring_in,
    check_complete,
    load_component,
    local_folder,
    read_index,
    readable_weights,
)
from .output import ImagePipelineOutput
from .watch import Callback, Watch

__all__ = ["ImagePipeline", "Plan"]

OUTPUT_TYPES = ("pil", "np", "pt", "tokens")


@dataclass(frozen=True)
class Plan:
    """One call with everything resolved: what the engine gets, and what the output shows."""

    rule: AcceptanceRule | None
    drafter: Any
    warp: Warp
    guidance_scale: float
    num_draft_tokens: int
    tree: TreeSpec | None
    output_type: str
    settings: dict[str, Any]


class ImagePipeline(DiffusionPipeline):
    """Base of the image pipelines; use `TextToImagePipeline` or `ClassToImagePipeline`."""

    # the drafter is left out: it runs between target calls, and in the sequence each call would evict the other model
    model_cpu_offload_seq = "text_encoder->transformer->vq"  # type: ignore[assignment]
    _optional_components = ["rule", "drafter"]
    _callback_tensor_inputs = ["tokens", "num_accepted", "progress"]
    _interrupt = False
    _loaded = False

    transformer: LlamaGenGPT
    vq: LlamaGenVQ
    rule: AcceptanceRule
    drafter: Any

    def _setup(self, rule: AcceptanceRule | None, drafter: Any, defaults: dict[str, Any], **components: Any) -> None:
        """Registers components and the call's defaults."""
        self.register_modules(rule=ExactRule() if rule is None else rule, drafter=drafter, **components)
        self.register_to_config(**defaults)
        self._kept: dict[int, tuple[Any, ...]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": {}}  # prepared weights cannot be pickled; they are made again

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        """Loads a folder or repository that `save_pretrained` wrote.

        Args:
            pretrained_model_name_or_path: "emoji-64", a folder or "owner/repository".
            kwargs: components (`rule=`, `drafter=` also by name, `transformer=`, ...), defaults of the call
                (`guidance_scale=`, ...), and diffusers' loading keywords (`dtype=`, `device_map=`, `variant=`, ...).
                Weights load as float32 unless `dtype` says otherwise.

        Raises:
            TypeError: an unknown keyword, naming the nearest valid one.
            ValueError: no saved pipeline there, damaged weights, or components that do not fit each other.
        """
        modules, options = cls._get_signature_keys(cls)
        refuse_unknown(kwargs, [*modules, *options, *LOADING_KEYWORDS], f"{cls.__name__}.from_pretrained()")
        folder = local_folder(pretrained_model_name_or_path, kwargs)
        index = read_index(folder)
        if index.get("_class_name") not in (None, cls.__name__):
            raise ValueError(
                f"{folder} holds a {index['_class_name']}, not a {cls.__name__}; load it with "
                "mediaspec.AutoPipeline.from_pretrained"
            )
        stored = sorted(set(modules) - set(kwargs))
        given: dict[str, Any] = {name: kwargs.pop(name) for name in ("rule", "drafter") if name in kwargs}
        if "torch_dtype" not in kwargs:
            kwargs["dtype"] = kwargs.get("dtype") or torch.float32
        dtype = kwargs.get("dtype", kwargs.get("torch_dtype"))
        if isinstance(dtype, dict):
            dtype = dtype.get("drafter", dtype.get("default", torch.float32))
        with readable_weights(folder):
            pipe = super().from_pretrained(folder, rule=None, drafter=None, **kwargs)
            for name in {"rule", "drafter"} - set(given):
                given[name] = load_component(folder, name, index.get(name), dtype, kwargs.get("variant"))
        if kwargs.get("quantization_config") is None:  # quantized parts keep their weights under other names
            for name in stored:
                check_complete(folder, name, given["drafter"] if name == "drafter" else getattr(pipe, name))
        rule, drafter = choose_rule(given["rule"], pipe.rule), given["drafter"]
        if rule is None:
            raise ValueError("rule='plain' is a choice of the call, not a component; write pipe(..., rule='plain')")
        if isinstance(drafter, str):
            drafter = choose_drafter(drafter, None, pipe._drafter, False)
        if isinstance(drafter, torch.nn.Module):
            drafter = drafter.to(pipe.transformer.device)
        pipe.register_modules(rule=rule, drafter=drafter)
        pipe.register_to_config(_name_or_path=str(pretrained_model_name_or_path))
        pipe._check_fit(choose_drafter(drafter, None, pipe._drafter, False))
        if "drafter" not in stored:
            pipe.register_to_config(default_drafter=None)
        pipe._loaded = True
        return pipe

    def register_modules(self, **kwargs: Any) -> None:
        """Sets components; a drafter set after loading is the one that calls use."""
        super().register_modules(**kwargs)
        if self._loaded and "drafter" in kwargs:
            self.register_to_config(default_drafter=None)

    def save_pretrained(self, save_directory: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Saves all components, rule and drafter included; arguments as in diffusers.

        Raises:
            TypeError: an unknown keyword.
            ValueError: a component that cannot be saved (diffusers would drop it silently).
        """
        refuse_unknown(kwargs, SAVING_KEYWORDS, f"{type(self).__name__}.save_pretrained()")
        for name, part in self.components.items():
            if part is not None and not hasattr(part, "save_pretrained"):
                raise ValueError(
                    f"{name}={type(part).__name__} cannot be saved; a rule or drafter must derive from SchedulerMixin "
                    "and ConfigMixin, or be a PreTrainedModel"
                )
        super().save_pretrained(save_directory, **kwargs)

    def enable_sequential_cpu_offload(self, *args: Any, **kwargs: Any) -> None:
        """Refused: decoding prepares all weights of the transformer at once.

        Raises:
            ValueError: always, naming what works.
        """
        raise ValueError(
            "layer-wise offload cannot work here, decoding keeps the transformer's weights prepared as a whole; call "
            "enable_model_cpu_offload()"
        )

    def enable_group_offload(self, *args: Any, **kwargs: Any) -> None:
        """Refused for the reason of `enable_sequential_cpu_offload`."""
        self.enable_sequential_cpu_offload()

    @property
    def grid(self) -> tuple[int, int]:
        """(height, width) of the token grid."""
        side = self.transformer.config.grid
        return (side, side)

    @property
    def interrupt(self) -> bool:
        """Whether the running call was asked to stop; set `pipe._interrupt = True` from a callback."""
        return self._interrupt

    def _wrap(self, model: LlamaGenGPT) -> LlamaGenTarget:
        """The model as a target; kept, because it prepares the weights once and again only when they change."""
        known = self._kept.get(id(model))
        if known is None or known[0] is not model:
            known = self._kept[id(model)] = (model, LlamaGenTarget(model), None)
        target: LlamaGenTarget = known[1]
        if model is self.transformer:
            codes = self.vq.quantize.embedding.weight
            version = (self.vq, codes.data_ptr(), 0 if codes.is_inference() else codes._version)
            if known[2] != version:
                target.codebook = self.vq.quantize.codebook().detach()[: target.vocab_size]
                self._kept[id(model)] = (model, target, version)
        return target

    def _drafter(self, network: Any) -> Any:
        """The drafter that runs a network, for one run; what a head prepares is kept until either model changes."""
        if isinstance(network, LlamaGenGPT):
            return ModelDrafter(self._wrap(network))
        state = (network, weights_version(network), weights_version(self.transformer))
        known = self._kept.get(id(network))
        if known is None or known[0] is not network or known[2] != state[1:]:
            known = self._kept[id(network)] = (network, EagleDrafter(network), state[1:])
        return copy.copy(known[1])

    def _check_fit(self, drafter: Any) -> None:
        """Refuses parts with different vocabularies or sizes; a wrong drafter would draft garbage unnoticed."""
        codes, vocab = self.vq.config.codebook_size, self.transformer.config.vocab_size
        if codes < vocab:
            raise ValueError(
                f"the transformer has {vocab} image tokens but the vq {codes} codes; load the vq it was trained with"
            )
        if drafter is not None and hasattr(drafter, "check"):
            drafter.check(self._wrap(self.transformer))

    def _plan(
        self,
        *,
        rule: AcceptanceRule | str | None,
        drafter: Any,
        guidance_scale: float | None,
        temperature: float | None,
        top_k: int | None,
        top_p: float | None,
        num_draft_tokens: int | None,
        tree: TreeSpec | Sequence[int] | None,
        output_type: str,
    ) -> Plan:
        """Resolves the call's settings against the pipeline's defaults and checks them."""

        def default(name: str, value: Any) -> Any:
            return self.config[name] if value is None else value

        if output_type not in OUTPUT_TYPES:
            raise ValueError(f"output_type={output_type!r}; allowed are {', '.join(map(repr, OUTPUT_TYPES))}")
        guidance = float(default("guidance_scale", guidance_scale))
        if not np.isfinite(guidance):
            raise ValueError(f"guidance_scale={guidance_scale!r}; write a finite number, 1 switches guidance off")
        budget = default("num_draft_tokens", num_draft_tokens)
        if isinstance(budget, bool) or not isinstance(budget, int) or budget < 0:
            raise ValueError(f"num_draft_tokens={budget!r}; write an integer >= 0 (0 switches speculation off)")
        warp = Warp(default("temperature", temperature), default("top_k", top_k), default("top_p", top_p))
        chosen = choose_rule(rule, self.rule)
        explicit = chosen is not None and rule is not None
        drafting = chosen is not None and budget > 0
        if drafter is None and tree is None:
            drafter = self.config["default_drafter"]
        proposer = choose_drafter(drafter, self.drafter, self._drafter, explicit) if drafting else None
        if proposer is None:
            chosen = None
        else:
            self._check_fit(proposer)
        if tree is not None and not isinstance(tree, TreeSpec):
            if not isinstance(tree, Sequence) or not all(type(width) is int for width in tree):
                raise ValueError(f"tree={tree!r}; write a TreeSpec or the children per level, e.g. [3, 2, 1]")
            tree = TreeSpec.from_widths(tree)
        tree = tree if proposer is not None else None
        settings = {
            "rule": "plain" if chosen is None else name_of(chosen),
            "rule_settings": settings_of(chosen),
            "drafter": drafter_name(proposer),
            "num_draft_tokens": 0 if proposer is None else (budget if tree is None else tree.max_depth),
            "tree": None if tree is None else list(tree.parents),
            "guidance_scale": guidance,
            "temperature": warp.temperature,
            "top_k": warp.top_k,
            "top_p": warp.top_p,
            "dtype": str(self.transformer.dtype).removeprefix("torch."),
            "device": str(self._execution_device),
        }
        return Plan(chosen, proposer, warp, guidance, budget, tree, output_type, settings)

    def _generate(
        self,
        plan: Plan,
        condition: Any,
        copies: list[int],
        seeds: list[int],
        *,
        started: float,
        return_dict: bool,
        return_trace: bool,
        callback: Callback | None,
        callback_names: Sequence[str],
    ) -> ImagePipelineOutput | tuple[Any, ...]:
        """Decodes tokens, turns them into pixels and packs the output."""
        encoded = time.perf_counter()
        bring_in(self.transformer)
        target = self._wrap(self.transformer)
        if plan.rule is not None:
            plan.rule.prepare(target)
        count, length = len(seeds), target.num_tokens
        watch = Watch(self, count, length, callback, list(callback_names))
        self._interrupt = False
        with self.progress_bar(total=count * length) as watch.bar:
            result = Engine(target, plan.rule or ExactRule(), plan.drafter).decode(
                condition,
                torch.tensor(seeds, dtype=torch.int64),
                warp=plan.warp,
                guidance_scale=None if plan.guidance_scale == 1.0 else plan.guidance_scale,
                num_draft_tokens=plan.num_draft_tokens,
                copies=None if copies == list(range(count)) else torch.tensor(copies, device=target.device),
                tree=plan.tree,
                trace=return_trace,
                on_round=watch,
            )
        decoding = time.perf_counter()
        images = self._decode(result, plan.output_type)
        finished = time.perf_counter()
        self.maybe_free_model_hooks()
        stats = watch.stats(result, plan.settings, seeds)
        stats["seconds"] = {
            "total": finished - started,
            "encode": encoded - started,
            **result.stats.seconds,
            "decode": finished - decoding,
        }
        stats["interrupted"] = self._interrupt
        output = ImagePipelineOutput(images=images, trace=result.trace, stats=stats)
        return output if return_dict else output.to_tuple()

    def _decode(self, result: DecodeResult, output_type: str) -> Any:
        """Tokens to the asked form; cells that an interrupted run never reached are grey."""
        length = result.tokens.shape[1]
        tokens = result.tokens.clone()
        missing = torch.arange(length) >= torch.tensor(result.lengths)[:, None]
        if output_type == "tokens":
            return tokens.masked_fill(missing.to(tokens.device), -1)
        bring_in(self.vq)
        tokens = tokens.masked_fill(missing.to(tokens.device), 0).to(self._device_of(self.vq))
        # one at a time: convolutions over a batch round differently, and a picture must not depend on its batch
        pixels = torch.cat([self.vq.decode_code(row[None], self.grid) for row in tokens])
        pixels = (pixels.float() / 2 + 0.5).clamp(0, 1).cpu()
        if not pixels.isfinite().all():
            raise ValueError(
                "the vq decoded NaN pixels: its weights are damaged or overflow in their dtype (float16 does where "
                "bfloat16 and float32 do not); load it again, or write pipe.vq.float()"
            )
        if missing.any():
            cells = missing.view(-1, 1, *self.grid).float()
            pixels = torch.where(torch.nn.functional.interpolate(cells, pixels.shape[-2:]) > 0, 0.5, pixels)
        if output_type == "pt":
            return pixels
        arrays = pixels.permute(0, 2, 3, 1).numpy()
        if output_type == "np":
            return arrays
        return [PIL.Image.fromarray((array * 255).round().astype(np.uint8)) for array in arrays]

    @staticmethod
    def _device_of(module: torch.nn.Module) -> torch.device:
        return next(module.parameters()).device

    @staticmethod
    def _copies(prompts: int, per_prompt: int) -> list[int]:
        """The prompt of every picture: 0, 0, 1, 1, ... for two pictures per prompt."""
        if isinstance(per_prompt, bool) or not isinstance(per_prompt, int) or per_prompt < 1:
            raise ValueError(f"num_images_per_prompt={per_prompt!r}; write an integer >= 1")
        return [prompt for prompt in range(prompts) for _ in range(per_prompt)]

    def _check_callback(self, callback: Callback | None, names: Sequence[str]) -> Sequence[str]:
        names = getattr(callback, "tensor_inputs", names) or []
        for name in names:
            if name not in self._callback_tensor_inputs:
                allowed = ", ".join(self._callback_tensor_inputs)
                raise ValueError(f"callback_on_step_end_tensor_inputs names {name!r}; allowed are {allowed}")
        return names
