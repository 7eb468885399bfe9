"""`mediaspec eval text`: what an attention policy that drops keys does to perplexity and to finding things."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from .errors import plain_errors
from .text import torch_dtype, usable_device

__all__ = ["text"]

FULL = "none"


def text(
    model: Annotated[str, typer.Option(help="Folder or repository of a causal language model, or smollm2.")],
    attention: Annotated[
        str, typer.Option(help="Policies, e.g. none,light_transfer or with settings, light_transfer:w_recent=508.")
    ] = "none,light_transfer",
    lengths: Annotated[str, typer.Option(help="Context lengths in tokens.")] = "2048,8192",
    texts: Annotated[int, typer.Option(help="Held-out texts per length; 0 leaves perplexity out.")] = 4,
    scored: Annotated[int, typer.Option(help="Tokens scored at the end of each of them.")] = 512,
    block: Annotated[int, typer.Option(help="Tokens per scoring pass.")] = 16,
    text_file: Annotated[
        str | None,
        typer.Option(
            help="Held-out text of your own, cut into pieces, or pydoc, the language documentation inside Python. "
            "Default: stories and minutes made for this project."
        ),
    ] = None,
    depths: Annotated[int, typer.Option(help="Needle depths per length, evenly spread; 0 leaves needles out.")] = 5,
    needles: Annotated[int, typer.Option(help="Needles per depth.")] = 2,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, ...; auto: cuda where there is one.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Last line of stdout is one JSON object.")] = False,
) -> None:
    """Measure perplexity on held-out long text and needle retrieval, with and without lossy attention."""
    with plain_errors():
        from ..eval.text_report import text_eval_table

        result = evaluate(
            model, attention, lengths, texts=texts, scored=scored, block=block, text_file=text_file, depths=depths,
            needles=needles, dtype=dtype, device=device,
        )  # fmt: skip
        typer.echo(text_eval_table(result))
        if as_json:
            typer.echo(json.dumps(result))


def evaluate(
    model: str,
    attention: str,
    lengths: str,
    *,
    texts: int,
    scored: int,
    block: int,
    text_file: str | None,
    depths: int,
    needles: int,
    dtype: str,
    device: str,
) -> dict[str, Any]:
    """The result; arguments as on the command line."""
    from ..eval.needle import ANSWER_TOKENS, needle_texts
    from ..eval.perplexity import held_out_ids, read_text
    from ..eval.rulespec import parse_rules
    from ..eval.speed import provenance
    from ..pipelines.text_generation import TextGenerationPipeline

    specs = parse_rules(attention)
    sizes = _sizes(lengths, scored if texts else 0)
    if min(texts, depths) < 0 or texts + depths == 0 or needles < 1 or block < 1 or scored < 1:
        raise ValueError(
            f"--texts {texts}, --depths {depths}, --needles {needles}, --scored {scored} and --block {block}; ask for "
            f"some text or some depth, and for at least 1 of the others"
        )
    own = None if text_file is None else read_text(text_file)
    device = usable_device(device)
    pipe = TextGenerationPipeline.from_pretrained(model, dtype=torch_dtype(dtype), device=device)
    pipe.set_progress_bar_config(disable=True)
    most = getattr(pipe.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if most is not None and sizes[-1] > most:
        raise ValueError(f"--lengths has {sizes[-1]} and the model knows {most} positions; write at most {most}")
    rows = []
    for length in sizes:
        documents = held_out_ids(pipe.tokenizer, length, texts, own) if texts else []
        spread = [(2 * k + 1) / (2 * depths) for k in range(depths)]
        haystacks = needle_texts(pipe.tokenizer, length, spread, needles) if depths else []
        full: dict[str, Any] | None = None
        for spec in sorted(specs, key=lambda one: one.name != FULL):  # full attention first, to compare with
            with _enabled(pipe.model, spec) as handle:
                row = _measure(pipe, documents, haystacks, length - scored, block, ANSWER_TOKENS)
                summary = None if handle is None else _plain(handle.summary())
            typer.echo(f"{spec.text} at {length} tokens done", err=True)
            rows.append(_row(spec.text, length, row, full, summary))
            full = row if spec.name == FULL else full
    return {
        "rows": rows,
        "settings": {
            "model": model, "texts": texts, "scored": scored, "block": block, "depths": depths, "needles": needles,
            "text_file": text_file, "text_sha256": None if own is None else hashlib.sha256(own.encode()).hexdigest(),
        },
        "provenance": provenance(device, pipe.model.dtype, 0),
    }  # fmt: skip


@contextmanager
def _enabled(model: Any, spec: Any) -> Iterator[Any]:
    """The model under an attention policy, whose handle is given; under its own for "none"."""
    if spec.name == FULL:
        yield None
        return
    from ..integrations.enable import enable

    handle = enable(model, attention=spec.name, **spec.settings)
    try:
        yield handle
    finally:
        handle.remove()


def _measure(
    pipe: Any, documents: list[Any], haystacks: list[Any], context: int, block: int, answer: int
) -> dict[str, Any]:
    """Token scores, bytes of keys and values, and needles, under whatever policy is enabled."""
    from ..eval.needle import needle_table
    from ..eval.perplexity import score_continuation

    scores = [score_continuation(pipe.model, ids, context, block) for ids in documents]

    def write(prompt: str) -> str:
        done = pipe(prompt, max_new_tokens=answer, temperature=0.0, rule="plain")
        return str(done.texts[0])

    return {
        "nll": [one.nll for one in scores],
        "kv_bytes": max((one.kv_bytes for one in scores), default=None),
        "needle": needle_table(haystacks, write) if haystacks else None,
    }


def _row(label: str, length: int, row: dict[str, Any], full: dict[str, Any] | None, summary: Any) -> dict[str, Any]:
    from ..eval.perplexity import change_of_perplexity, perplexity

    scored = bool(row["nll"])
    compared = scored and full is not None and label != FULL
    assert full is not None or not compared
    return {
        "attention": label,
        "length": length,
        "perplexity": round(perplexity(row["nll"]), 5) if scored else None,
        "perplexity_change": change_of_perplexity(full["nll"], row["nll"]) if compared and full else None,
        "scored_tokens": sum(map(len, row["nll"])),
        "needle": row["needle"],
        "kv_bytes": row["kv_bytes"],
        "kv_ratio": round(row["kv_bytes"] / full["kv_bytes"], 4) if compared and full else None,
        "summary": summary,
    }


def _sizes(lengths: str, scored: int) -> list[int]:
    words = [word.strip() for word in lengths.split(",")]
    if not all(word.isdigit() for word in words):
        raise ValueError(f"--lengths is {lengths!r}; write numbers of tokens with commas, as in 2048,8192")
    found = sorted({int(word) for word in words})
    if found[0] <= scored:
        raise ValueError(
            f"--lengths has {found[0]}, of which --scored takes {scored}; write longer lengths or a smaller --scored"
        )
    return found


def _plain(value: Any) -> Any:
    """A summary as JSON can hold it."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [_plain(one) for one in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return _plain(value.tolist()) if hasattr(value, "tolist") else str(value)
