"""Puts trained heads where `mediaspec` finds them: `mediaspec/models/heads/<name>/<kind>` beside `target.json`.

    python tools/smollm2/ship_heads.py --model smollm2 --name smollm2 eagle3-run/eagle3 longspec-run/head
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from mediaspec.models.heads import HEADS, describe_target, head_kind, load_head
from mediaspec.models.smollm2 import resolve
from mediaspec.targets.causal_lm import CausalLMTarget


def ship(model: str, name: str, heads: list[Path], place: Path = HEADS) -> Path:
    """Copies heads and writes the description of their target.

    Args:
        model: the target's folder or name.
        name: of the folder; heads: what `save_pretrained` wrote; place: where the folder goes.

    Raises:
        ValueError: a folder without a head, or with one that does not fit the target.
    """
    target = CausalLMTarget(AutoModelForCausalLM.from_pretrained(resolve(model), dtype=torch.float32), 8, fast=False)
    folder = place / name
    for source in heads:
        head = load_head(source, target)
        if head is None:
            raise ValueError(f"{source} holds no draft head; name a folder that a training script exported")
        if head.config.hidden_size != target.hidden_size or head.config.vocab_size != target.vocab_size:
            raise ValueError(f"the head in {source} was made for another model than {model}")
        kind = head_kind(head)
        assert kind is not None
        (folder / kind).mkdir(parents=True, exist_ok=True)
        for file in ("config.json", "model.safetensors"):
            shutil.copyfile(source / file, folder / kind / file)
    (folder / "target.json").write_text(json.dumps(describe_target(target), indent=1) + "\n")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("heads", nargs="+", type=Path)
    options = parser.parse_args()
    print(ship(options.model, options.name, options.heads))


if __name__ == "__main__":
    main()
