"""Copy trained frame models into the package, in half precision.

    python tools/arvdm/ship_models.py --run arvdm-run --world panoroom --memories window,pack_k2,prepend,retrieve

Reads <run>/<world>/<memory>/checkpoint.pt (the running average, finished or not) and writes config.json,
model.safetensors and codec.safetensors to mediaspec/models/frame_worlds/<world>/<memory>/, and the log of the training
to tools/arvdm/logs/<world>/<memory>.jsonl.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from train_frame_dit import Plan, new_model

from mediaspec.models.patch_codec import PatchCodec

ROOT = Path(__file__).parents[2]


def export(run: Path, world: str, memory: str, package: Path, logs: Path) -> int:
    """Writes one model and returns its bytes.

    Raises:
        ValueError: nothing was trained there.
    """
    source = run / world / memory
    if not (source / "checkpoint.pt").exists():
        raise ValueError(f"{source} holds no checkpoint.pt; train it with tools/arvdm/train_frame_dit.py first")
    state = torch.load(source / "checkpoint.pt", weights_only=True)
    codec = PatchCodec.load(run / world / "codec.safetensors")
    model = new_model(Plan(**state["plan"]), codec)
    model.load_state_dict(state["average"])
    target = package / world / memory
    model.half().save_pretrained(target)
    codec.save(target / "codec.safetensors")
    logs = logs / world
    logs.mkdir(parents=True, exist_ok=True)
    if (source / "log.jsonl").exists():
        shutil.copyfile(source / "log.jsonl", logs / f"{memory}.jsonl")
    return sum(path.stat().st_size for path in target.iterdir())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=Path("arvdm-run"))
    parser.add_argument("--world", default="panoroom")
    parser.add_argument("--memories", required=True)
    parser.add_argument("--package", type=Path, default=ROOT / "mediaspec" / "models" / "frame_worlds")
    parser.add_argument("--logs", type=Path, default=ROOT / "tools" / "arvdm" / "logs")
    args = parser.parse_args()
    for memory in args.memories.split(","):
        print(memory, export(args.run, args.world, memory, args.package, args.logs), "bytes")


if __name__ == "__main__":
    main()
