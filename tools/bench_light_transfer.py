"""Key/value bytes, time of a decoding step and perplexity of LightTransfer against full attention on one long text.

    cat README.md docs/inspect_smollm2.md CONTRIBUTING.md NOTICE mediaspec/core/{engine,kv}.py > text.txt
    python tools/bench_light_transfer.py --model smollm2 --text text.txt --context 7680 --score 256

The text is read up to the context and the following tokens are scored in blocks of 16, so that the layers that have
let keys go really do without them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import mediaspec
from mediaspec.core.prompt import TokenPrompt
from mediaspec.eval.perplexity import held_out_ids
from mediaspec.models.smollm2 import resolve
from mediaspec.targets.causal_lm import CausalLMTarget

BLOCK, REPEATS = 16, 7


@torch.inference_mode()
def measure(model: Any, ids: Tensor, context: int) -> tuple[int, float, float]:
    """Bytes kept behind the prefill, milliseconds of a step of one token (median), perplexity of what follows."""
    target = CausalLMTarget(model, len(ids) - context + 8)
    with target.attached():
        cache = target.new_cache(1, BLOCK + 4)
        output = target.prefill(TokenPrompt.from_padded(ids[None, :context]), cache)
        kept, steps = cache.nbytes, []
        for _ in range(REPEATS):
            start = time.perf_counter()
            target.score(ids[None, context : context + 1], cache)
            steps.append(1000 * (time.perf_counter() - start))
        losses = [F.cross_entropy(output.logits[0], ids[context : context + 1], reduction="none")]
        for first in range(context, len(ids) - 1, BLOCK):
            last = min(first + BLOCK, len(ids) - 1)
            logits = target.score(ids[None, first:last], cache).logits[0]
            losses.append(F.cross_entropy(logits, ids[first + 1 : last + 1], reduction="none"))
            cache.advance(torch.full_like(cache.lengths, last - first), [last - first])
    return kept, statistics.median(steps), float(torch.cat(losses).mean().exp())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--context", type=int, default=7680)
    parser.add_argument("--score", type=int, default=256)
    options = parser.parse_args()
    folder = resolve(options.model)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = held_out_ids(tokenizer, options.context + options.score, 1, options.text.read_text())[0]
    full = measure(model, ids, options.context)
    print(f"full attention: {full[0]} bytes, {full[1]:.1f} ms a step, perplexity {full[2]:.3f}", flush=True)
    for judge in ("output", "mass"):
        with mediaspec.enable(model, attention="light_transfer", judge=judge) as handle:
            kept, step, found = measure(model, ids, options.context)
            layers = handle.summary()["lazy_layers"]
        print(
            f"light_transfer, judge {judge}: {kept / full[0]:.3f} of the bytes, {step:.1f} ms a step, perplexity "
            f"{found:.3f} ({100 * (found / full[2] - 1):+.1f} %), lazy layers {layers}",
            flush=True,
        )


if __name__ == "__main__":
    main()
