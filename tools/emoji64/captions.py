"""The word-level tokenizer of emoji-64's captions and the lists of training and held-out prompts.

python tools/emoji64/captions.py --out emoji64-run
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from concepts import BACKGROUNDS, SIZES, STYLES, concepts  # isort: skip
from render import caption, sample_spec  # isort: skip

MAX_LENGTH = 16


def words() -> list[str]:
    """Every word a caption can hold, sorted."""
    text = " ".join([*concepts(), *BACKGROUNDS, *SIZES, *STYLES, "a an on beside background style ,"])
    return sorted(set(text.split()))


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Word-level tokenizer: lower case, the comma a word of its own, padding on the left to 16, `</s>` at the end."""
    vocabulary = {w: i for i, w in enumerate(["<pad>", "</s>", "<unk>", *words()])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        padding_side="left",
        truncation_side="right",
        model_max_length=MAX_LENGTH,
    )


def without_article(text: str) -> str:
    """A caption as a hasty user types it: "a cat on a red background" -> "cat on a red background"."""
    return re.sub(r"^an? ", "", text)


def prompts(split: str, count: int, seed: int = 0) -> list[str]:
    """The first `count` distinct captions of a split, in sampling order."""
    seen: dict[str, None] = {}
    index = 0
    while len(seen) < count:
        seen[caption(sample_spec(index, seed, split))] = None
        index += 1
    return list(seen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("emoji64-run"))
    parser.add_argument("--count", type=int, default=2304)
    args = parser.parse_args()
    build_tokenizer().save_pretrained(args.out / "tokenizer")
    lists = {split: prompts(split, args.count) for split in ("held_out", "train")}
    (args.out / "prompts.json").write_text(json.dumps(lists, indent=0))


if __name__ == "__main__":
    main()
