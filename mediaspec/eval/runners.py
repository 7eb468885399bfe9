"""What a speed table times: the pipeline with one rule, and transformers' own `generate` on the same weights."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from .generation import RunSettings
from .speed import Run, Runner

__all__ = ["PEER", "peer_runner", "pipeline_runner"]

PEER = "hf_generate"


def pipeline_runner(pipe: Any, label: str, settings: RunSettings) -> Runner:
    """Times whole calls of the pipeline, caption to picture.

    Args:
        pipe: an image pipeline on its device.
        label: row name.
        settings: rule, drafter and sampling; model, dtype and device are the pipe's own.
    """
    keywords = settings.call_keywords()

    def run(prompts: Sequence[str], seeds: Sequence[int]) -> Run:
        start = time.perf_counter()
        out = pipe(
            **pipe.prompt_keywords(list(prompts), [None] * len(prompts)),
            **keywords,
            seeds=list(seeds),
            output_type="pil",
        )
        seconds = time.perf_counter() - start
        stats = out.stats
        return Run(
            seconds, stats["tokens"], stats["target_calls"], stats["tokens_per_call"], stats["drift"]["mean"],
            stats["guarantee"], stats["seconds"], stats["settings"],
        )  # fmt: skip

    return Runner(label, run)


def peer_runner(pipe: Any, settings: RunSettings) -> Runner:
    """Times `transformers.generate` with the pipe's transformer, text encoder and tokenizer, and the same sampling.

    It samples with torch's generator, so its pictures are draws of the same law and not the same pictures.
    """
    from ..models.llamagen.hf_generate import hf_generate_images

    def chosen(name: str) -> Any:
        value = getattr(settings, name)
        return pipe.config[name] if value is None else value

    sampling = {name: chosen(name) for name in ("guidance_scale", "temperature", "top_k", "top_p")}
    greedy = sampling["temperature"] == 0
    model = pipe.transformer

    def run(prompts: Sequence[str], seeds: Sequence[int]) -> Run:
        start = time.perf_counter()
        torch.manual_seed(seeds[0])
        condition, mask = _condition(pipe, prompts)
        encoded = time.perf_counter()
        numbers = {**sampling, "temperature": 1.0} if greedy else sampling
        tokens = hf_generate_images(model, condition, mask, **numbers, do_sample=not greedy)
        if tokens.device.type == "cuda":
            torch.cuda.synchronize()
        generated = time.perf_counter()
        with torch.inference_mode():
            pixels = [pipe.vq.decode_code(row[None], pipe.grid).float().cpu() for row in tokens]
        end = time.perf_counter()
        count, calls = int(tokens.numel()), int(tokens.shape[1])
        split = {"encode": encoded - start, "generate": generated - encoded, "decode": end - generated}
        assert len(pixels) == len(prompts)
        return Run(end - start, count, calls, 1.0, 0.0, "exact-law", split, {"rule": PEER, **sampling})

    return Runner(PEER, run)


def _condition(pipe: Any, prompts: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What `LlamaGenGPT.generate` is conditioned on: text features and mask, or class numbers."""
    device = next(pipe.transformer.parameters()).device
    if pipe.transformer.config.condition != "text":
        return torch.tensor([int(p) for p in prompts], device=device), None
    from ..pipelines.captions import encode_captions

    with torch.inference_mode():
        features, mask = encode_captions(
            list(prompts), pipe.tokenizer, pipe.text_encoder, pipe.transformer.config.cls_token_num, device
        )
    return features.clone(), mask.clone()
