"""Trained draft heads: loading one from a folder, and finding the shipped one that belongs to a target.

A head drafts only for the model it was trained on. Shipped heads lie in `heads/<model>/<kind>/` (config and weights)
beside `heads/<model>/target.json`, which says what that model looks like: its sizes, and numbers out of its embedding.
The numbers are compared with a tolerance, since the same weights come as float32, bfloat16, float16 or out of a
quantised file. V vocabulary, D hidden size.
"""

from __future__ import annotations

import difflib
import importlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

__all__ = ["HEADS", "describe_target", "fits", "head_kind", "load_head", "shipped_head", "shipped_names"]

HEADS = Path(__file__).with_name("heads")
"""The folder of the shipped heads."""
DESCRIPTION = "target.json"
PREFIX, SUFFIX = "mediaspec_", "_head"
"""A head's `model_type` is its kind between these: "mediaspec_eagle3_head" is of kind "eagle3"."""
ROWS, COLUMNS = 16, 4
"""Numbers of the embedding that are kept: of so many rows and columns, evenly spread."""
TOLERANCE = 0.02
"""Largest difference, as a share of the largest number: bfloat16 rounds by 0.004, other models differ by 1."""


def describe_target(target: Any) -> dict[str, Any]:
    """What tells a model from others, for `target.json`.

    Args:
        target: a `CausalLMTarget`.

    Returns:
        "vocab_size", "hidden_size", "num_hidden_layers" and "embedding", numbers out of its [V, D] input embedding.
    """
    size = int(target.model.get_input_embeddings().weight.shape[0])
    rows = torch.linspace(0, size - 1, ROWS, device=target.device).long()
    columns = torch.linspace(0, target.hidden_size - 1, COLUMNS, device=target.device).long()
    numbers = target.embed(rows[None])[0][:, columns].float().flatten()
    return {
        "vocab_size": int(target.vocab_size),
        "hidden_size": int(target.hidden_size),
        "num_hidden_layers": int(target.config.num_hidden_layers),
        "embedding": [round(float(number), 6) for number in numbers],
    }


def fits(description: dict[str, Any], target: Any) -> bool:
    """Whether a target is the one described."""
    mine = describe_target(target)
    if any(mine[key] != description.get(key) for key in ("vocab_size", "hidden_size", "num_hidden_layers")):
        return False
    theirs = torch.tensor(description["embedding"])
    if len(theirs) != len(mine["embedding"]):
        return False
    gap = (torch.tensor(mine["embedding"]) - theirs).abs().max()
    return bool(gap <= TOLERANCE * theirs.abs().max())


def shipped_names(target: Any) -> list[str]:
    """Kinds of the shipped heads that were trained on this model, e.g. ["eagle3", "longspec"]."""
    folder = _folder(target)
    return [] if folder is None else _kinds(folder)


def shipped_head(name: str, target: Any) -> PreTrainedModel:
    """The shipped head of a kind for a model, in its dtype and on its device.

    Args:
        name: "eagle3" or "longspec".
        target: a `CausalLMTarget`.

    Raises:
        ValueError: none was shipped for this model, naming the models and kinds there are.
    """
    folder = _folder(target)
    if folder is None or name not in _kinds(folder):
        known = [f"{kind} for {model.name}" for model in _models() for kind in _kinds(model)]
        raise ValueError(
            f"no trained head {name!r} is shipped for this {type(target.model).__name__} of "
            f"{target.config.num_hidden_layers} layers and hidden size {target.hidden_size}; there are "
            f"{', '.join(known) or 'none'}. Train one and pass it, drafter=head or drafter='path/to/head', or draft "
            f"without one: drafter='ngram'"
        )
    head = load_head(folder / name, target)
    assert head is not None
    return head


def head_kind(model: Any) -> str | None:
    """The kind of a head, which is the name of the drafter that runs it; None for anything else."""
    return _kind_of(getattr(getattr(model, "config", None), "model_type", None))


def load_head(folder: str | os.PathLike[str], target: Any) -> PreTrainedModel | None:
    """A head from the folder its `save_pretrained` wrote, in the dtype and on the device of the target it is for.

    Returns:
        None where the folder holds something else.

    Raises:
        ValueError: a head of a kind this library does not have.
    """
    file = Path(folder) / "config.json"
    if not file.is_file():
        return None
    config = json.loads(file.read_text(encoding="utf-8"))
    kind = _kind_of(config.get("model_type"))
    if kind is None:
        return None
    try:
        cls = getattr(importlib.import_module(f"{__package__}.{kind}"), config["architectures"][0])
    except (ImportError, AttributeError, KeyError, IndexError) as error:
        here = sorted(path.stem for path in Path(__file__).parent.glob("*.py"))
        near = difflib.get_close_matches(kind, here, 1)
        hint = f"; did you mean {near[0]!r}" if near else ""
        raise ValueError(f"{file} describes a head of kind {kind!r}, which this version cannot run{hint}") from error
    head: PreTrainedModel = cls.from_pretrained(folder, dtype=target.model.dtype)
    head = head.to(target.device)  # type: ignore[arg-type]
    return head.eval()


def _kind_of(model_type: Any) -> str | None:
    if not isinstance(model_type, str) or not model_type.startswith(PREFIX) or not model_type.endswith(SUFFIX):
        return None
    kind = model_type[len(PREFIX) : -len(SUFFIX)]
    return kind if kind.isidentifier() else None


def _models() -> list[Path]:
    return sorted(file.parent for file in HEADS.glob(f"*/{DESCRIPTION}"))


def _kinds(model: Path) -> list[str]:
    return sorted(file.parent.name for file in model.glob("*/config.json"))


def _folder(target: Any) -> Path | None:
    """The shipped heads of a target."""
    for model in _models():
        if fits(json.loads((model / DESCRIPTION).read_text(encoding="utf-8")), target):
            return model
    return None
