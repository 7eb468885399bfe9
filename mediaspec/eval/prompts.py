"""The prompts a model is measured with: its own held-out captions, or a file."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

from ..pipelines.loading import EMBEDDED

__all__ = ["held_out_prompts", "prompt_file", "spread"]


def prompt_file(model: str) -> Path:
    """Where a model keeps its prompts: `prompts.json` in its folder."""
    if model in EMBEDDED:
        return Path(str(resources.files("mediaspec"))) / "models" / EMBEDDED[model] / "prompts.json"
    return Path(model) / "prompts.json"


def held_out_prompts(model: str) -> list[str]:
    """Captions the model was not trained on.

    Args:
        model: embedded name or folder.

    Returns:
        `prompts.json["held_out"]`, in its order.

    Raises:
        ValueError: the model has no such file; give prompts in a file instead.
    """
    path = prompt_file(model)
    if not path.is_file():
        raise ValueError(
            f"{model} brings no prompts of its own ({path} does not exist); give captions with --prompts FILE"
        )
    data = json.loads(path.read_text(encoding="utf-8"))
    prompts = data.get("held_out") if isinstance(data, dict) else data
    if not isinstance(prompts, list) or not prompts or not all(isinstance(p, str) for p in prompts):
        raise ValueError(f'{path} must hold {{"held_out": [caption, ...]}}; give captions with --prompts FILE')
    return prompts


def spread(prompts: list[str], count: int) -> list[str]:
    """The first `count` prompts, starting over at the end when there are fewer."""
    return [prompts[k % len(prompts)] for k in range(count)]
