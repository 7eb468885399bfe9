"""`mediaspec doctor`: what is installed, what runs where and why, and whether speculation pays on this machine."""

from __future__ import annotations

import json
import os
import platform
from typing import Annotated, Any

import typer

from .errors import plain_errors

__all__ = ["doctor", "examine"]

# rounds of the short measured run; the first ones warm up caches and threads
ROUNDS, WARM_UP = 24, 4
CAPTION = "a red apple"


def doctor(
    model: Annotated[str, typer.Option(help="Embedded name or folder of the pipeline to look at.")] = "emoji-64",
    measure: Annotated[bool, typer.Option(help="Measure plain against speculative rounds for a few seconds.")] = True,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...; auto takes cuda where there is one.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Look at versions, kernels, model parts and speed. Leaves with code 1 if something is wrong."""
    with plain_errors():
        report = examine(model, measure=measure, device=device)
    if as_json:
        typer.echo(json.dumps(report))
    else:
        _print(report)
    raise typer.Exit(1 if report["problems"] else 0)


def examine(model: str, *, measure: bool = True, device: str = "auto") -> dict[str, Any]:
    """All findings as one JSON-ready dict; `problems` lists what should be mended."""
    import torch

    problems: list[str] = []
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    report: dict[str, Any] = {
        "versions": _versions(problems),
        "device": _device(device),
        "kernels": _kernels(),
        "prepared_linear": _prepared_linear(),
        "model": {"name": model},
        "speculation": None,
        "problems": problems,
    }
    try:
        pipe = _load(model, device)
    except (ValueError, TypeError, OSError) as error:
        problems.append(f"{model}: {error}")
        return report
    report["model"] = _parts(model, pipe)
    if measure:
        report["speculation"] = _measure(pipe)
    return report


def _versions(problems: list[str]) -> dict[str, str]:
    from ..integrations import _diffusers, _transformers
    from ..pipelines.versions import versions

    problems += [text for text in (_diffusers.check_version(), _transformers.check_version()) if text]
    found = {"python": platform.python_version(), **versions()}
    for name in ("accelerate", "triton", "flash_attn"):
        found[name] = _installed(name)
    return found


def _installed(name: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _device(device: str) -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {
        "chosen": device,
        "system": f"{platform.system()} {platform.machine()}",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cpu_cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "cuda": torch.cuda.is_available(),
    }
    if torch.cuda.is_available():
        found["cuda_name"] = torch.cuda.get_device_name()
    return found


def _kernels() -> dict[str, Any]:
    from ..kernels.backend import describe

    return describe()


def _prepared_linear() -> dict[str, Any]:
    """Which prepared form of small matrix products runs here, by kind of weight."""
    import torch

    from ..models.fast_linear import PreparedLinear

    exact = torch.arange(64.0).view(8, 8) / 8
    cases = {
        "float32, exact in fp16": (exact, torch.float32),
        "float32": (exact / 3, torch.float32),
        "bfloat16": (exact, torch.bfloat16),
    }
    found = {}
    for name, (weight, dtype) in cases.items():
        layer = PreparedLinear(weight, dtype)
        found[name] = f"{layer.kind} ({layer.reason})" if layer.reason else layer.kind
    return found


def _load(model: str, device: str) -> Any:
    from ..eval.generation import RunSettings, load_pipeline

    return load_pipeline(RunSettings(model=model, device=device))


def _parts(model: str, pipe: Any) -> dict[str, Any]:
    from ..pipelines.choices import name_of

    drafter = pipe.drafter
    size = sum(p.numel() for p in pipe.transformer.parameters())
    return {
        "name": model,
        "pipeline": type(pipe).__name__,
        "target_parameters": size,
        "target_vocabulary": pipe.transformer.config.vocab_size,
        "vq_codes": pipe.vq.config.codebook_size,
        "grid": list(pipe.grid),
        "rule": name_of(pipe.rule),
        "guarantee": pipe.rule.guarantee,
        "drafter": "none" if drafter is None else type(drafter).__name__,
        "drafter_vocabulary": getattr(getattr(drafter, "config", None), "vocab_size", None),
        # loading refuses parts that do not fit, so a loaded pipeline is a matching one
        "vocabularies_match": True,
    }


def _measure(pipe: Any) -> dict[str, Any]:
    """A few rounds of plain and of exact speculative decoding of one picture, alternating, after a warm-up."""
    if pipe.drafter is None:
        return {"pays": False, "why": "the pipeline has no drafter; load one, or call with drafter='jacobi'"}
    plain, drafted = _rounds(pipe, "plain"), _rounds(pipe, "exact")
    plain, drafted = _best(plain, _rounds(pipe, "plain")), _best(drafted, _rounds(pipe, "exact"))
    ratio = drafted["tokens_per_call"] * plain["round_ms"] / drafted["round_ms"]
    return {
        "pays": ratio > 1.0,
        "expected_speed_up": round(ratio, 2),
        "tokens_per_call": round(drafted["tokens_per_call"], 2),
        "plain_round_ms": round(plain["round_ms"], 2),
        "drafted_round_ms": round(drafted["round_ms"], 2),
        "target_call_1_ms": round(plain["target_ms"], 2),
        f"target_call_{pipe.config.num_draft_tokens + 1}_ms": round(drafted["target_ms"], 2),
        "draft_ms": round(drafted["draft_ms"], 2),
        "why": f"rule exact, batch 1, {ROUNDS} rounds twice each; measured on this machine as it is loaded now",
    }


def _rounds(pipe: Any, rule: str) -> dict[str, float]:
    import time
    from statistics import median

    seen: list[tuple[float, int]] = []

    def stop(pipe: Any, step: int, committed: int, tensors: dict[str, Any]) -> dict[str, Any]:
        seen.append((time.perf_counter(), committed))
        pipe._interrupt = step >= ROUNDS
        return tensors

    text = CAPTION if "text_encoder" in pipe.components else "0"
    output = pipe(
        **pipe.prompt_keywords([text], [None]), seeds=0, rule=rule, output_type="tokens", callback_on_step_end=stop
    )
    seconds, calls = output.stats["seconds"], max(output.stats["rounds"], 1)
    seen = seen[min(WARM_UP, len(seen) - 2) :]
    spans = [later[0] - earlier[0] for earlier, later in zip(seen, seen[1:], strict=False)]
    return {
        "round_ms": 1000 * median(spans),  # other processes make some rounds long
        "tokens_per_call": (seen[-1][1] - seen[0][1]) / len(spans),
        "target_ms": 1000 * seconds.get("target", 0.0) / calls,
        "draft_ms": 1000 * seconds.get("draft", 0.0) / calls,
    }


def _best(one: dict[str, float], two: dict[str, float]) -> dict[str, float]:
    return one if one["round_ms"] <= two["round_ms"] else two


def _print(report: dict[str, Any]) -> None:
    for title in ("versions", "device", "kernels", "prepared_linear", "model", "speculation"):
        values = report[title]
        if not values:
            continue
        typer.echo(title.replace("_", " "))
        for name, value in values.items():
            shown = ", ".join(map(str, value)) if isinstance(value, list) else "not set" if value is None else value
            typer.echo(f"  {name if name.isupper() else name.replace('_', ' '):24} {shown}")
    for problem in report["problems"]:
        typer.echo(f"PROBLEM: {problem}", err=True)
    if not report["problems"]:
        typer.echo("no problems found")
