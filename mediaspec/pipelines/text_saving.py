"""A text pipeline's folder: an ordinary folder of a transformers model and its tokenizer, and beside them what the
pipeline adds, named in `model_index.json`: the rule, the drafters and the policy.

So `AutoModelForCausalLM` reads what a pipeline saved, and a pipeline reads what `save_pretrained` of a model wrote.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from .._version import __version__
from .loading import load_component, read_index

__all__ = ["INDEX", "holds_causal_lm", "read_parts", "write_parts"]

INDEX = "model_index.json"
CLASS = "TextGenerationPipeline"


def holds_causal_lm(folder: str) -> bool:
    """Whether a folder holds a transformers model that writes texts and no other pipeline."""
    if (Path(folder) / INDEX).is_file():
        return bool(read_index(folder).get("_class_name") == CLASS)
    file = Path(folder) / "config.json"
    if not file.is_file():
        return False
    config = json.loads(file.read_text(encoding="utf-8"))
    return any(str(name).endswith("ForCausalLM") for name in config.get("architectures") or ())


def write_parts(folder: str | os.PathLike[str], *, rule: Any, drafter: Any, policy: Any) -> None:
    """Saves rule, drafters and policy and writes the index.

    Raises:
        ValueError: a part that cannot be saved, naming it.
    """
    index: dict[str, Any] = {"_class_name": CLASS, "_mediaspec_version": __version__}
    index["rule"] = _write(Path(folder), "rule", rule)
    index["policy"] = policy if policy is None or isinstance(policy, str) else _write(Path(folder), "policy", policy)
    several = isinstance(drafter, (Mapping, Sequence)) and not isinstance(drafter, str)
    if several:
        named = isinstance(drafter, Mapping)
        parts = dict(drafter) if named else {str(number): one for number, one in enumerate(drafter)}
        entries = {name: _drafter(Path(folder), f"drafter-{name}", one) for name, one in parts.items()}
        index["drafter"] = {"named": named, "parts": entries}
    else:
        index["drafter"] = _drafter(Path(folder), "drafter", drafter)
    (Path(folder) / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def read_parts(folder: str, wanted: Sequence[str], dtype: torch.dtype) -> dict[str, Any]:
    """Loads "rule", "drafter" and "policy" as far as wanted; nothing of a folder without an index.

    Raises:
        ValueError: the folder holds another pipeline, or a part is missing or damaged.
    """
    if not (Path(folder) / INDEX).is_file():
        return {}
    index = read_index(folder)
    if index.get("_class_name") != CLASS:
        raise ValueError(
            f"{folder} holds a {index.get('_class_name')}, not a {CLASS}; load it with "
            "mediaspec.AutoPipeline.from_pretrained"
        )
    parts = {}
    for name in wanted:
        entry = index.get(name)
        if name == "drafter" and isinstance(entry, Mapping):
            several = {key: _read(folder, f"drafter-{key}", one, dtype) for key, one in entry["parts"].items()}
            parts[name] = several if entry["named"] else list(several.values())
        else:
            parts[name] = _read(folder, name, entry, dtype)
    return parts


def _drafter(folder: Path, part: str, drafter: Any) -> Any:
    """An entry of the index: a name as it is, a network or component by its class."""
    return drafter if drafter is None or isinstance(drafter, str) else _write(folder, part, drafter)


def _write(folder: Path, part: str, component: Any) -> list[str]:
    if not hasattr(component, "save_pretrained"):
        raise ValueError(
            f"{part}={type(component).__name__} cannot be saved: it has no save_pretrained. Name a drafter instead, "
            f"such as drafter='ngram', or give a model or a trained head"
        )
    component.save_pretrained(folder / part)
    kind = type(component)
    library = "transformers" if kind.__module__.startswith("transformers.") else kind.__module__
    return [library, kind.__name__]


def _read(folder: str, part: str, entry: Any, dtype: torch.dtype) -> Any:
    if entry is None or isinstance(entry, str):
        return entry
    found = load_component(folder, part, entry, dtype)
    return found.eval() if isinstance(found, PreTrainedModel) else found
