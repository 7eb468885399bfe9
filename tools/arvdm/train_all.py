"""Train a queue of memories on one core, in turns, so that all of them can be compared at any time.

    python tools/arvdm/train_all.py --world panoroom --out arvdm-run --minutes 60 \\
        --memories window,pack_k2,prepend,retrieve,channel,cross,pack_k4,none --slice 10

Every memory gets `--slice` minutes, then the next, until all have had `--minutes`. Stop it at any time and run the
same command again: it goes on with the memory that has had least.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from train_frame_dit import Plan, train

from mediaspec.models.frame_history import MEMORIES


def trained(folder: Path) -> float:
    """Minutes that a training has had, by its checkpoint: after a kill the log may be ahead of it."""
    checkpoint = folder / "checkpoint.pt"
    return float(torch.load(checkpoint, weights_only=True)["minutes"]) if checkpoint.exists() else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", default="panoroom")
    parser.add_argument("--memories", default=",".join(MEMORIES))
    parser.add_argument("--out", type=Path, default=Path("arvdm-run"))
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--slice", type=float, default=10.0)
    parser.add_argument("--seeds", default="0", help="training seeds, as in 0,1,2")
    parser.add_argument("--batch", type=int, default=16)
    args = parser.parse_args()
    torch.set_num_threads(1)
    names = args.memories.split(",")
    unknown = [name for name in names if name not in MEMORIES]
    if unknown:
        parser.error(f"memories {', '.join(unknown)} are none of {', '.join(MEMORIES)}")
    queue = [(int(seed), name) for seed in args.seeds.split(",") for name in names]
    had = {one: trained(args.out / args.world / (one[1] + (f"-{one[0]}" if one[0] else ""))) for one in queue}
    while any(minutes < args.minutes for minutes in had.values()):
        seed, name = min(queue, key=lambda one: had[one])
        goal = min(had[seed, name] + args.slice, args.minutes)
        plan = Plan(args.world, name, minutes=args.minutes, batch=args.batch, seed=seed)
        row = train(plan, args.out, until=goal)
        had[seed, name] = max(goal, float(row["minutes"]))
        print(json.dumps({"memory": name, "seed": seed, **row}), flush=True)


if __name__ == "__main__":
    main()
