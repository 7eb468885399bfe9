"""Runs the target once over the texts of make_text.py and keeps what draft heads train on.

    python tools/smollm2/collect.py --model smollm2 --text work/text/text.jsonl --out work/shards

Shards hold packed sequences, N tokens each in all (safetensors):

    tokens [N] int32, starts [S + 1] int64 (borders of the sequences), answer [N] uint8 (1: written by the target)
    positions [N] int32: 0, 1, 2, ... or, in every second sequence, jumping by a random offset behind the first four
        tokens (anchor-offset indices, arXiv:2502.17421, section 4.2): large positions are trained with short texts
    features [N, F * D] fp16: outputs of three decoder layers side by side, the last one before the final norm
    key, value [N, Hkv, Dh] fp16: the last layer's rotated keys and its values

A run goes on behind the shards that are there; with --follow it waits for more text.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from mediaspec.models.smollm2 import resolve

ANCHORS = 4
PER_SHARD = 384  # texts
TOKENS_PER_PASS = 4096


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--follow", type=float, default=0.0, help="minutes to wait for more text")
    parser.add_argument("--longest", type=int, default=1536, help="a text is cut to its last tokens beyond this")
    parser.add_argument("--threads", type=int, default=0, help="0 leaves torch's default")
    return parser.parse_args()


def default_layers(layers: int) -> tuple[int, int, int]:
    """Low, middle and last decoder layer whose outputs a fused head reads."""
    return layers // 3 - 1, 2 * layers // 3 - 1, layers - 1


class Collector:
    """The target with an ear at three of its layers."""

    def __init__(self, model: Any) -> None:
        self.model, self.heard = model, {}
        for layer in default_layers(len(model.model.layers)):
            model.model.layers[layer].register_forward_hook(self._hear(layer))

    def _hear(self, layer: int) -> Any:
        def hook(module: Any, given: Any, output: Any) -> None:
            self.heard[layer] = output if isinstance(output, Tensor) else output[0]

        return hook

    @torch.inference_mode()
    def run(self, rows: list[list[int]], positions: list[list[int]]) -> list[dict[str, Tensor]]:
        """Features, keys and values of sequences padded on the right."""
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        places = torch.tensor([row + [0] * (longest - len(row)) for row in positions])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        cache = DynamicCache()
        name = "cache" if "cache" in self.model.forward.__code__.co_varnames else "past_key_values"
        # the body alone: logits are made from the last feature where they are needed
        name = "past_key_values" if name not in self.model.model.forward.__code__.co_varnames else name
        self.model.model(input_ids=ids, attention_mask=mask, position_ids=places, use_cache=True, **{name: cache})
        last = cache.layers[-1]
        features = torch.cat([self.heard[layer] for layer in sorted(self.heard)], -1)
        out = []
        for number, row in enumerate(rows):
            n = len(row)
            out.append(
                {
                    "features": features[number, :n].half(),
                    "key": last.keys[number, :, :n].transpose(0, 1).half(),
                    "value": last.values[number, :, :n].transpose(0, 1).half(),
                }
            )
        return out


def main() -> None:
    options = arguments()
    if options.threads:
        torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(resolve(options.model), dtype=torch.float32).eval()
    collector, limit = Collector(model), model.config.max_position_embeddings
    until = time.time() + 60 * options.follow
    while True:
        shard = len(list(options.out.glob("shard_*.safetensors")))
        lines = options.text.read_text().splitlines()[shard * PER_SHARD : (shard + 1) * PER_SHARD]
        final = time.time() >= until
        if len(lines) < PER_SHARD and not final:
            time.sleep(5)
            continue
        if not lines:
            return
        began = time.time()
        save(collector, [json.loads(line) for line in lines], options.out / f"shard_{shard:04d}.safetensors", shard,
             options.longest, limit)  # fmt: skip
        print(f"shard {shard}: {len(lines)} texts in {time.time() - began:.0f} s", flush=True)
        if len(lines) < PER_SHARD:
            return


def save(collector: Collector, texts: list[dict[str, Any]], file: Path, seed: int, longest: int, limit: int) -> None:
    """Writes one shard; the order of the texts stays."""
    rng = random.Random(seed)
    rows, answers, positions = [], [], []
    for text in texts:
        row = (text["prompt"] + text["answer"])[-longest:]
        answer = ([0] * len(text["prompt"]) + [1] * len(text["answer"]))[-longest:]
        offset = rng.randint(0, limit - len(row)) if rng.random() < 0.5 else 0
        rows.append(row)
        answers.append(answer)
        positions.append([place + (offset if place >= ANCHORS else 0) for place in range(len(row))])
    order = sorted(range(len(rows)), key=lambda number: len(rows[number]))
    parts: list[dict[str, Tensor] | None] = [None] * len(rows)
    while order:
        count = max(1, TOKENS_PER_PASS // len(rows[order[-1]]))
        batch, order = order[-count:], order[:-count]
        for number, part in zip(batch, collector.run([rows[i] for i in batch], [positions[i] for i in batch])):
            parts[number] = part
    kept = [part for part in parts if part is not None]
    tensors = {key: torch.cat([part[key] for part in kept]) for key in ("features", "key", "value")}
    tensors["tokens"] = torch.tensor([token for row in rows for token in row], dtype=torch.int32)
    tensors["positions"] = torch.tensor([place for row in positions for place in row], dtype=torch.int32)
    tensors["answer"] = torch.tensor([one for row in answers for one in row], dtype=torch.uint8)
    tensors["starts"] = torch.tensor([0, *map(len, rows)]).cumsum(0)
    part = file.with_suffix(".part")
    save_file(tensors, part)
    part.rename(file)


if __name__ == "__main__":
    main()
