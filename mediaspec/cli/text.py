"""`mediaspec generate text`: a causal language model of transformers, decoded speculatively."""

from __future__ import annotations

import json
import os
from typing import Annotated, Any

import typer

from .errors import plain_errors

__all__ = ["text"]


def text(
    prompts: Annotated[list[str], typer.Argument(help="Texts to go on from.")],
    model: Annotated[str, typer.Option(help="Folder or repository of a transformers causal language model.")],
    max_new_tokens: Annotated[int, typer.Option(help="New tokens per text at most.")] = 128,
    seed: Annotated[int, typer.Option(help="Seed of text 0; text k gets seed + k.")] = 0,
    num_texts: Annotated[int, typer.Option(help="Texts per prompt.")] = 1,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 keeps all tokens.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 keeps all tokens.")] = 1.0,
    rule: Annotated[str, typer.Option(help="coupled, exact, cool_sd, ...; plain for no speculation.")] = "coupled",
    drafter: Annotated[
        str, typer.Option(help="ngram, suffix, none, or the folder of a smaller model of the same tokenizer.")
    ] = "ngram",
    num_draft_tokens: Annotated[int, typer.Option(help="Tokens drafted per round; 0 switches it off.")] = 5,
    chat: Annotated[bool, typer.Option("--chat", help="Put every prompt into the model's chat template.")] = False,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, ...; default: cuda where there is one.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Last line of stdout is one JSON object.")] = False,
) -> None:
    """Write texts that go on from PROMPTS."""
    with plain_errors():
        import torch
        from transformers import AutoModelForCausalLM

        from ..pipelines.text_generation import TextGenerationPipeline

        kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
        if dtype not in kinds:
            raise ValueError(f"--dtype {dtype}; write one of {', '.join(kinds)}")
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        small: Any = drafter
        if os.path.isdir(drafter):
            loaded: Any = AutoModelForCausalLM.from_pretrained(drafter, dtype=kinds[dtype])
            small = loaded.to(device).eval()
        pipe = TextGenerationPipeline.from_pretrained(model, dtype=kinds[dtype], device=device)
        given: list[Any] = [[{"role": "user", "content": one}] for one in prompts] if chat else list(prompts)
        out = pipe(
            given,
            max_new_tokens=max_new_tokens,
            num_texts_per_prompt=num_texts,
            seeds=seed,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            rule=rule,
            drafter=small,
            num_draft_tokens=num_draft_tokens,
        )
        stats, seconds = out.stats, out.stats["seconds"]["total"]
        if as_json:
            report = {
                "texts": out.texts,
                "tokens": stats["tokens"],
                "target_calls": stats["target_calls"],
                "tokens_per_call": round(stats["tokens_per_call"], 4),
                "guarantee": stats["guarantee"],
                "drift": max(stats["drift"], default=0.0),
                "seconds": round(seconds, 4),
                "tokens_per_second": round(stats["tokens"] / seconds, 2),
                "settings": stats["settings"],
                "seeds": stats["seeds"],
            }
            typer.echo(json.dumps(report))
            return
        for one in out.texts:
            typer.echo(one)
        typer.echo(
            f"{stats['tokens']} tokens in {stats['target_calls']} target calls = {stats['tokens_per_call']:.2f} per "
            f"call; {stats['tokens'] / seconds:.1f} tokens/s; guarantee {stats['guarantee']}",
            err=True,
        )
