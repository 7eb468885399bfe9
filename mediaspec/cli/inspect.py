"""`mediaspec inspect`: what every head of a language model attends to, measured on one text."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .errors import plain_errors

if TYPE_CHECKING:
    from ..attention.diagnostics import AttentionReport

__all__ = ["inspect"]


def inspect(
    model: Annotated[str, typer.Argument(help="Folder or repository of a causal language model, or smollm2.")],
    prompt_file: Annotated[Path, typer.Option(help="The text to measure on, UTF-8.")],
    out: Annotated[Path, typer.Option(help="Folder for inspect.json and inspect.png.")],
    tokens: Annotated[int, typer.Option(help="First tokens of the text to use.")] = 4096,
    rows: Annotated[int, typer.Option(help="Last queries that are looked at.")] = 64,
    epsilon: Annotated[float, typer.Option(help="Mean attention above which token 0 is a sink.")] = 0.3,
    kappa: Annotated[float, typer.Option(help="Score above which a distance is a slash.")] = 0.1,
    target: Annotated[float, typer.Option(help="Share of a head's mass its sparse pattern should keep.")] = 0.95,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, ...; auto: cuda where there is one.")] = "auto",
    plot: Annotated[bool, typer.Option(help="Also write the heat maps (needs matplotlib).")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Last line of stdout is the report as JSON.")] = False,
) -> None:
    """Find sink, slash and lazy heads, and a sparse pattern to draft with, from one watched prefill.

    OUT/inspect.json can be given to the sparse drafter: SparseDrafter(pattern="OUT/inspect.json").
    """
    with plain_errors():
        from ..attention.diagnostics import Settings

        _check(rows, tokens, epsilon, kappa, target)
        out.mkdir(parents=True, exist_ok=True)
        loaded, ids = _load(model, prompt_file, tokens, dtype, device)
        settings = Settings(rows=rows, epsilon=epsilon, kappa=kappa, target=target)
        report, cost = measure(loaded, ids, model, settings)
        data = {**report.to_dict(), "cost": cost}
        text = json.dumps(data)
        (out / "inspect.json").write_text(text + "\n")
        if plot:
            _plot(report, out / "inspect.png")
        typer.echo(text if as_json else summary(report, cost))


def measure(model: Any, ids: Any, name: str, settings: Any) -> tuple[AttentionReport, dict[str, float]]:
    """The report, with the seconds it took and the peak of memory above what was held before, in MB.

    Other processes stretch `seconds`; `cpu_seconds` sums this process's time over all cores.
    """
    from ..eval.inspection import inspect_model

    start, worked, before = time.perf_counter(), time.process_time(), _held_mb(model)
    report = inspect_model(model, ids, name=name, settings=settings)
    layer = len(report.layers()[0]) * report.tokens**2 * 4 / 1e6
    cost = {
        "seconds": round(time.perf_counter() - start, 2),
        "cpu_seconds": round(time.process_time() - worked, 2),
        "peak_mb": round(_peak_mb(model) - before, 1),
        "full_matrix_of_one_layer_mb": round(layer, 1),
    }
    return report, cost


def summary(report: AttentionReport, cost: dict[str, float]) -> str:
    """What a reader wants first."""
    sinks, slashes, lazy = report.sinks(), report.slashes(), report.lazy()
    ratios = report.lazy_per_layer()
    laziest = sorted(range(len(ratios)), key=lambda layer: -ratios[layer])[: max(1, len(ratios) // 2)]
    lines = [
        f"{report.model}: {len(ratios)} layers, {len(report.heads)} heads, {report.tokens} tokens",
        f"sink positions {list(report.sink_set)}; value norms there are {min(report.value_ratio):.2f} to "
        f"{max(report.value_ratio):.2f} of the median",
        f"sink heads (mean attention on token 0 > {report.epsilon}): {len(sinks)}",
        f"slash heads (a distance with score >= {report.kappa}): {len(slashes)}; strongest {_strongest(slashes)}",
        f"lazy heads (ratio >= {report.lazy_at}): {len(lazy)}; laziest half of the layers {sorted(laziest)}",
        f"patterns keep {min(one.pattern_mass for one in report.heads):.3f} of the mass or more, "
        f"{_mean_keys(report):.0f} of {report.tokens} keys in the mean",
        f"{cost['seconds']} s ({cost['cpu_seconds']} s of CPU), {cost['peak_mb']} MB above the model (attention of "
        f"one layer: {cost['full_matrix_of_one_layer_mb']} MB)",
    ]
    return "\n".join(lines)


def _strongest(heads: list[Any]) -> str:
    ranked = sorted(heads, key=lambda one: -one.slash[0][1])[:5]
    return ", ".join(f"L{one.layer}H{one.head} d={one.slash[0][0]} {one.slash[0][1]:.2f}" for one in ranked) or "none"


def _mean_keys(report: AttentionReport) -> float:
    patterns = [one for layer in report.pattern().heads for one in layer]
    return sum(len(one.keys(report.tokens - 1)) for one in patterns) / len(patterns)


def _check(rows: int, tokens: int, epsilon: float, kappa: float, target: float) -> None:
    if rows < 1 or tokens < 2:
        raise ValueError(f"--rows {rows} --tokens {tokens}; give at least 1 row and 2 tokens")
    for name, value in (("epsilon", epsilon), ("kappa", kappa), ("target", target)):
        if not 0 < value <= 1:
            raise ValueError(f"--{name} {value}; it is a share of attention, give a number in (0, 1]")


def _load(model: str, prompt_file: Path, tokens: int, dtype: str, device: str) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    kinds = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype not in kinds:
        raise ValueError(f"--dtype {dtype}; write one of {', '.join(kinds)}")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    text = prompt_file.read_text(encoding="utf-8")
    folder = _resolve(model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text, return_tensors="pt").input_ids[0, :tokens]
    if len(ids) < 2:
        raise ValueError(f"{prompt_file} holds {len(ids)} token(s); give a text of at least two")
    if len(ids) < tokens:
        typer.echo(f"warning: {prompt_file} has only {len(ids)} tokens of the {tokens} wanted", err=True)
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=kinds[dtype])
    return loaded.to(device).eval(), ids


def _resolve(model: str) -> str:
    from ..models.smollm2 import resolve

    return str(resolve(model))


def _plot(report: AttentionReport, path: Path) -> None:
    from ..eval.attention_plot import plot_report

    try:
        plot_report(report, path)
    except ImportError as error:
        raise ValueError(f"{error}, or leave the maps out with --no-plot") from error


def _held_mb(model: Any) -> float:
    """Memory held now: of the device, or of the process where the model is on the CPU."""
    import torch

    if model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(model.device)
        return torch.cuda.memory_allocated(model.device) / 1e6
    status = Path("/proc/self/statm")
    if not status.exists():
        return _peak_mb(model)
    import resource

    return int(status.read_text().split()[1]) * resource.getpagesize() / 1e6


def _peak_mb(model: Any) -> float:
    """The most that was ever held; loading a model may have held more than the measurement, never less."""
    import torch

    if model.device.type == "cuda":
        return torch.cuda.max_memory_allocated(model.device) / 1e6
    try:
        import resource
    except ImportError:  # Windows
        return 0.0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
