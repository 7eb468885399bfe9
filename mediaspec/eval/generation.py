"""Makes the pictures of a manifest: a resumable run over fixed batches.

Batches are cut from the worker's list before anything is looked up, so a resumed run decodes the very batches an
undisturbed one does; a batch with an unfinished picture is decoded whole, finished pictures are never written again.
"""

from __future__ import annotations

import hashlib
import io
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..core.types import Warp
from ..pipelines.loading import EMBEDDED, embedded_folder
from ..pipelines.trace import draw_trace
from ..pipelines.versions import versions
from ..rules import make_rule
from .manifest import FinishedImage, Item, Manifest, ManifestError

__all__ = ["Generation", "RunSettings", "generate_images", "load_pipeline", "model_fingerprint", "quiet_loading"]

TRACE_FILE = "trace/{id}.png"
WHOLE_FILE = 64 << 20


@dataclass(frozen=True)
class RunSettings:
    """Everything that decides a picture besides its prompt and its seed. None leaves a value to the saved pipeline.

    Args:
        model: embedded name, folder or repository id.
        rule: rule name, "plain" for no speculation.
        rule_settings: arguments of the rule, for instance {"delta": 1.1}.
        drafter: drafter name.
        num_draft_tokens, guidance_scale, temperature, top_k, top_p: as in the pipeline call.
        tree: widths of a draft tree, level by level; None drafts chains.
        dtype: "float32", "bfloat16" or "float16".
        device: "cpu", "cuda", ...: near-ties round differently from device to device.
    """

    model: str = "emoji-64"
    rule: str | None = None
    rule_settings: dict[str, Any] = field(default_factory=dict)
    drafter: str | None = None
    num_draft_tokens: int | None = None
    tree: tuple[int, ...] | None = None
    guidance_scale: float | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    dtype: str = "float32"
    device: str = "cpu"

    def __post_init__(self) -> None:
        if self.guidance_scale is not None and not math.isfinite(self.guidance_scale):
            raise ValueError(f"guidance_scale={self.guidance_scale!r}; write a finite number, 1 switches guidance off")
        given = {name: getattr(self, name) for name in ("temperature", "top_k", "top_p")}
        Warp(**{name: value for name, value in given.items() if value is not None})  # refuses values out of range

    def call_keywords(self) -> dict[str, Any]:
        """Keywords of the pipeline call."""
        names = ("drafter", "num_draft_tokens", "tree", "guidance_scale", "temperature", "top_k", "top_p")
        keywords = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.rule == "plain":
            if self.rule_settings:
                raise ValueError(f"rule 'plain' has no settings, got {self.rule_settings}; name a rule, e.g. cool_sd")
            keywords["rule"] = "plain"
        elif self.rule is not None:
            keywords["rule"] = make_rule(self.rule, **self.rule_settings)
        elif self.rule_settings:
            raise ValueError(f"settings {self.rule_settings} belong to a rule; name one, e.g. rule='cool_sd'")
        return keywords

    def record(self) -> dict[str, Any]:
        """JSON-ready form that a manifest stores and hashes; the model counts by its files, not by its path."""
        values = {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(self).items() if v is not None}
        if not values["rule_settings"]:
            del values["rule_settings"]
        fingerprint = model_fingerprint(self.model)
        if fingerprint is not None:
            values["model_sha256"] = fingerprint
            if self.model not in EMBEDDED:
                values["model"] = Path(self.model).resolve().name
        return values


@dataclass(frozen=True)
class Generation:
    """What a run did.

    Args:
        rows: manifest rows of all requested pictures of this worker, in order.
        made: how many of them this run made; the others were there.
        tokens: image tokens of the pictures made.
        seconds: wall-clock time of their pipeline calls, without loading and files.
        phases: seconds by phase, summed over the calls.
    """

    rows: list[dict[str, Any]]
    made: int
    tokens: int
    seconds: float
    phases: dict[str, float]


def load_pipeline(settings: RunSettings) -> Any:
    """The pipeline of a run, on its device, without a progress bar of its own."""
    import torch

    from ..pipelines.auto import AutoPipeline

    names = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if settings.dtype not in names:
        raise ValueError(f"dtype {settings.dtype!r} is not known; write one of {', '.join(names)}")
    with quiet_loading():
        pipe = AutoPipeline.from_pretrained(settings.model, dtype=names[settings.dtype])
    pipe.set_progress_bar_config(disable=True)
    try:
        return pipe.to(settings.device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device {settings.device!r} cannot be used here ({reason}); write cpu") from error


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Silences the progress bars that diffusers and transformers draw while loading."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    shown = [log for log in (diffusers_logging, transformers_logging) if log.is_progress_bar_enabled()]
    for log in shown:
        log.disable_progress_bar()
    try:
        yield
    finally:
        for log in shown:
            log.enable_progress_bar()


def model_fingerprint(model: str) -> str | None:
    """First 16 hex digits of a hash over a local model's files; None for a repository id.

    Files beyond 64 MiB count by their size and both ends.
    """
    if model in EMBEDDED:
        folder = Path(embedded_folder(model))
    elif Path(model).is_dir():
        folder = Path(model)
    else:
        return None
    digest = hashlib.sha256()
    files = [p for p in folder.rglob("*") if p.is_file() and p.suffix in (".json", ".safetensors", ".txt", ".model")]
    index = folder / "model_index.json"
    parts = {p.name for p in folder.iterdir() if p.is_dir()} & set(_index_names(index))
    for path in sorted(files):
        relative = path.relative_to(folder)
        if path != index and relative.parts[0] not in parts:
            continue  # contact sheets, prompts and other company of the weights
        size = path.stat().st_size
        digest.update(f"{relative.as_posix()}:{size}\n".encode())
        with open(path, "rb") as file:
            if size <= WHOLE_FILE:
                digest.update(file.read())
            else:
                digest.update(file.read(1 << 20))
                file.seek(size - (1 << 20))
                digest.update(file.read())
    return digest.hexdigest()[:16]


def _index_names(index: Path) -> list[str]:
    import json

    try:
        return list(json.loads(index.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ManifestError(f"{index} cannot be read ({error}); give a folder that `save_pretrained` wrote") from error


def generate_images(
    items: Sequence[Item],
    out: str | Path,
    settings: RunSettings,
    *,
    batch_size: int = 8,
    shard: tuple[int, int] = (0, 1),
    trace: bool = False,
    load: Callable[[RunSettings], Any] = load_pipeline,
    on_batch: Callable[[int, int], None] | None = None,
) -> Generation:
    """Makes what is missing of `items` in the folder `out`; see `manifest` for what is kept when the process dies.

    Args:
        items: all pictures, from `make_items`; a worker takes those with index % n == i.
        out: folder of the pictures and the manifest.
        settings: what they are made with.
        batch_size: pictures decoded together; it changes no picture.
        shard: (i, n).
        trace: also write trace/<id>.png.
        load: makes the pipeline; called only if something is missing.
        on_batch: called with (finished pictures, wanted pictures) before the first and after every batch.

    Raises:
        ManifestError: the folder has other settings, cannot be written, or is in use.
        ValueError: from the pipeline.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    keywords = settings.call_keywords()
    mine = [item for item in items if item.index % shard[1] == shard[0]]
    made = tokens = 0
    seconds, phases = 0.0, dict[str, float]()
    with Manifest(out, settings.record(), versions(), shard) as manifest:
        todo = {item.id for item in manifest.pending(items, TRACE_FILE if trace else None)}
        pipe: Any = load(settings) if todo else None
        if on_batch is not None:
            on_batch(len(mine) - len(todo), len(mine))
        for start in range(0, len(mine), batch_size):
            batch = mine[start : start + batch_size]
            if not any(item.id in todo for item in batch):
                continue
            begin = time.perf_counter()
            output = pipe(
                **pipe.prompt_keywords([i.prompt for i in batch], [i.negative_prompt for i in batch]),
                **keywords, seeds=[i.seed for i in batch], output_type="pil", return_trace=trace,
            )  # fmt: skip
            seconds += time.perf_counter() - begin
            for name, value in output.stats["seconds"].items():
                phases[name] = phases.get(name, 0.0) + value
            finished = [
                _finish(item, row, output, pipe.grid) for row, item in enumerate(batch) if item.id in todo
            ]
            manifest.finish(finished)
            made += len(finished)
            tokens += output.stats["tokens"]
            todo -= {item.id for item in batch}
            if on_batch is not None:
                on_batch(len(mine) - len(todo), len(mine))
        rows = [manifest.rows[item.id] for item in mine]
    return Generation(rows, made, tokens, seconds, phases)


def _finish(item: Item, row: int, output: Any, grid: tuple[int, int]) -> FinishedImage:
    stats, picture = output.stats, output.images[row]
    calls = stats["calls_per_image"][row]
    count = stats["tokens_per_image"][row]
    values = {
        "tokens": count,
        "target_calls": calls,
        "tokens_per_call": round(count / max(calls, 1), 4),
        "drift": float(f"{stats['drift']['per_image'][row]:.6g}"),
        "guarantee": stats["guarantee"],
    }
    extra = None
    if output.trace is not None:
        rule = stats["settings"]["rule"]
        sheet = draw_trace(
            picture, output.trace.kind[row].tolist(), output.trace.drift[row].tolist(),
            output.trace.round[row].tolist(), grid, f"{item.prompt} | seed {item.seed} | {rule}",
        )  # fmt: skip
        extra = {TRACE_FILE.format(id=item.id): _png(sheet)}
    return FinishedImage(item, _png(picture), values, extra)


def _png(picture: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG", compress_level=6)
    return buffer.getvalue()
