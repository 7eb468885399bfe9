"""`mediaspec generate text`: a causal language model of transformers, decoded speculatively."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from .errors import plain_errors

__all__ = ["text", "torch_dtype", "usable_device"]


def text(
    prompts: Annotated[list[str], typer.Argument(help="Texts to go on from.")],
    model: Annotated[str, typer.Option(help="Folder or repository of a causal language model, or smollm2.")],
    max_new_tokens: Annotated[int, typer.Option(help="New tokens per text at most.")] = 128,
    seed: Annotated[int, typer.Option(help="Seed of text 0; text k gets seed + k.")] = 0,
    num_texts: Annotated[int, typer.Option(help="Texts per prompt.")] = 1,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 keeps all tokens.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 keeps all tokens.")] = 1.0,
    rule: Annotated[str, typer.Option(help="coupled, exact, cool_sd, ...; plain for no speculation.")] = "coupled",
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends an answer; may be given often.")] = None,
    drafter: Annotated[
        str | None,
        typer.Option(
            help="ngram, suffix, eagle3, longspec, lazy, sparse, none, or the folder of a smaller model of the same "
            "tokenizer or of a trained head; without it lookup, and every shipped head that belongs to the model."
        ),
    ] = None,
    num_draft_tokens: Annotated[
        int | None, typer.Option(help="Tokens drafted per round; 0 switches it off, without it the policy chooses.")
    ] = None,
    tree: Annotated[str | None, typer.Option(help="Draft tree: children per level, such as '[3, 2, 1]'.")] = None,
    policy: Annotated[str | None, typer.Option(help="survival (the default), ucb, exp3, fixed, ...")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put every prompt into the model's chat template.")] = False,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, ...; default: cuda where there is one.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Last line of stdout is one JSON object.")] = False,
) -> None:
    """Write texts that go on from PROMPTS."""
    with plain_errors():
        from ..pipelines.text_generation import TextGenerationPipeline

        kind, device = torch_dtype(dtype), usable_device(device)
        pipe = TextGenerationPipeline.from_pretrained(model, dtype=kind, device=device)
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
            stop=stop,
            drafter=drafter,
            num_draft_tokens=num_draft_tokens,
            tree=tree,
            policy=policy,
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


def torch_dtype(name: str) -> Any:
    """The dtype that `--dtype` names."""
    import torch

    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in kinds:
        raise ValueError(f"--dtype {name}; write one of {', '.join(kinds)}")
    return kinds[name]


def usable_device(name: str) -> str:
    """The device that `--device` names; "auto" is cuda where there is one."""
    import torch

    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"
