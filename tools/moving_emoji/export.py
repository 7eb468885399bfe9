"""Write the moving-emoji pipeline folder: averaged weights of a checkpoint in float16, loadable without a network.

    python tools/moving_emoji/export.py --checkpoint run/denoiser.pt --latents run/latents.pt \
        --out mediaspec/models/moving_emoji

`--vae` takes the autoencoder of another file, for example one whose decoder was trained further.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from diffusers import AnimateDiffPipeline

from parts import build_tokenizer, new_scheduler, new_text_encoder, new_unet  # isort: skip
from train_vae import new_vae  # isort: skip

PARTS = ("vae", "unet", "text_encoder", "tokenizer", "scheduler", "model_index.json")


def build_pipeline(unet: dict[str, Any], text_encoder: dict[str, Any], vae: dict[str, Any]) -> AnimateDiffPipeline:
    """Assemble the pipeline from three state dicts, in float32."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = build_tokenizer(Path(folder))
    parts = new_vae(), new_text_encoder(tokenizer), new_unet()
    for module, state in zip(parts, (vae, text_encoder, unet), strict=True):
        module.load_state_dict(state)
        module.eval().requires_grad_(False)
    return AnimateDiffPipeline(
        vae=parts[0],
        text_encoder=parts[1],
        tokenizer=tokenizer,
        unet=parts[2],
        motion_adapter=None,
        scheduler=new_scheduler(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=Path("run/denoiser.pt"))
    parser.add_argument("--latents", type=Path, default=Path("run/latents.pt"))
    parser.add_argument("--vae", type=Path, help="take the autoencoder from this file instead of --latents")
    parser.add_argument("--out", type=Path, default=Path("mediaspec/models/moving_emoji"))
    args = parser.parse_args()
    state = torch.load(args.checkpoint)
    vae = torch.load(args.vae or args.latents)["vae"]
    pipe = build_pipeline(state["ema"]["unet"], state["ema"]["text_encoder"], vae).to(torch.float16)
    args.out.mkdir(parents=True, exist_ok=True)
    # written beside the folder first, so that a reader never meets half a file
    with tempfile.TemporaryDirectory(dir=args.out.parent) as beside:
        pipe.save_pretrained(beside, safe_serialization=True)
        for file in Path(beside).rglob("*.safetensors"):
            file.chmod(0o644)
        for name in PARTS:
            source, target = Path(beside) / name, args.out / name
            if source.is_dir():
                shutil.rmtree(target, ignore_errors=True)
            source.replace(target)
    total = sum(f.stat().st_size for f in args.out.rglob("*") if f.is_file())
    print(f"{args.out}: step {state['step']}, {state['minutes']:.1f} minutes, {total / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
