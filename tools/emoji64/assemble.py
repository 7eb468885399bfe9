"""Put trained parts together as the embedded pipeline `emoji-64`.

python tools/emoji64/assemble.py --parts emoji64-run/export --out mediaspec/models/emoji64
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, T5EncoderModel

from mediaspec.models.eagle import EagleHead
from mediaspec.models.llamagen import LlamaGenGPT, LlamaGenVQ
from mediaspec.pipelines import TextToImagePipeline
from mediaspec.rules import CoolSDRule


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=Path, default=Path("emoji64-run/export"))
    parser.add_argument("--prompts", type=Path, default=Path("emoji64-run/prompts.json"))
    parser.add_argument("--out", type=Path, default=Path("mediaspec/models/emoji64"))
    parser.add_argument("--guidance-scale", type=float, default=2.0)
    parser.add_argument("--num-draft-tokens", type=int, default=8)
    parser.add_argument("--default-drafter", default="jacobi", help="what drafts where a call names nothing")
    parser.add_argument("--confidence-threshold", type=float, default=0.0)
    args = parser.parse_args()
    parts: Path = args.parts
    drafter = None
    if (parts / "drafter").exists():
        drafter = EagleHead.from_pretrained(parts / "drafter", dtype=torch.float16)
        drafter.config.confidence_threshold = args.confidence_threshold
    tokenizer = PreTrainedTokenizerFast.from_pretrained(parts / "tokenizer")
    tokenizer.backend_tokenizer.no_padding()  # training pads to 16; a saved file would keep that
    pipe = TextToImagePipeline(
        transformer=LlamaGenGPT.from_pretrained(parts / "transformer", dtype=torch.float16),
        vq=LlamaGenVQ.from_pretrained(parts / "vq", dtype=torch.float16),
        text_encoder=T5EncoderModel.from_pretrained(parts / "text_encoder", dtype=torch.float16),
        tokenizer=tokenizer,
        rule=CoolSDRule(delta=1.1, length=args.num_draft_tokens),
        drafter=drafter,
        guidance_scale=args.guidance_scale,
        num_draft_tokens=args.num_draft_tokens,
        default_drafter=args.default_drafter,
    )
    pipe.to(torch.float16).save_pretrained(args.out)
    shutil.copyfile(args.prompts, args.out / "prompts.json")


if __name__ == "__main__":
    main()
