"""Published LlamaGen checkpoints to a pipeline folder that `AutoPipeline` loads.

The folder appears under its name only when it is complete: everything is written into a hidden sibling first, the
headers of its weight files are read back, and then it is renamed.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast, T5EncoderModel

from ..drafters.jacobi import JacobiDrafter
from ..models.llamagen import LlamaGenGPT, LlamaGenVQ, convert_gpt, convert_vq
from ..models.llamagen.convert import read_checkpoint
from ..models.llamagen.gpt import GPT_PRESETS
from ..rules import AcceptanceRule, CoupledRule
from .class_to_image import ClassToImagePipeline
from .image import ImagePipeline
from .keywords import nearest
from .text_to_image import TextToImagePipeline

__all__ = ["DTYPES", "SAMPLING", "Conversion", "convert_llamagen", "image_size_of", "preset_of"]

TEXT_ENCODER = "google/flan-t5-xl"  # of the published text models (arXiv:2406.06525, section 2.2)
VQ_PRESET = "VQ-16"  # every published transformer reads codes of this tokenizer
IMAGE_SIZES = (256, 384, 512)
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
# What LlamaGen's own samplers use; guidance is s in u + s (c - u).
SAMPLING: dict[str, dict[str, Any]] = {
    "class": {"guidance_scale": 4.0, "temperature": 1.0, "top_k": 2000, "top_p": 1.0},
    "text": {"guidance_scale": 7.5, "temperature": 1.0, "top_k": 1000, "top_p": 1.0},
}
# Jacobi drafting gets about two tokens out of a pass (arXiv:2410.01699): positions far behind are scored in vain.
NUM_DRAFT_TOKENS, WINDOW = 8, 16


@dataclass(frozen=True)
class Conversion:
    """What was written.

    Args:
        folder: the pipeline's folder.
        condition: "text" or "class".
        preset: size of the transformer.
        image_size: pixels along a side.
        dtype: of the saved transformer.
        nbytes: of all weights.
    """

    folder: Path
    condition: str
    preset: str
    image_size: int
    dtype: str
    nbytes: int


def convert_llamagen(
    gpt: str | os.PathLike[str],
    vq: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    preset: str | None = None,
    condition: str | None = None,
    text_encoder: str | os.PathLike[str] | None = None,
    image_size: int | None = None,
    dtype: str | None = None,
    rule: AcceptanceRule | None = None,
    drafter: str = "jacobi",
    num_draft_tokens: int = NUM_DRAFT_TOKENS,
) -> Conversion:
    """Writes a pipeline folder from a published transformer and a published tokenizer file.

    Args:
        gpt, vq: checkpoint files (``.pt``, ``.pth``, ``.safetensors``).
        out: the new folder; it must not exist or be empty.
        preset: a key of `GPT_PRESETS`; read off the weights where omitted.
        condition: "text" or "class", only to insist: the weights tell.
        text_encoder: folder or repository of the T5 model whose features a text model reads; `TEXT_ENCODER` where
            omitted. Class models have none.
        image_size: pixels along a side, which weights do not tell; read off the file's name where omitted.
        dtype: a key of `DTYPES` for transformer and text encoder; the files' own where omitted. The tokenizer keeps
            its file's, 0.3 GB in float32 as upstream decodes.
        rule: acceptance rule; `CoupledRule` where omitted: the very pictures of plain sampling with the same seed.
        drafter: "jacobi", which needs no trained head, or "none".
        num_draft_tokens: K, tokens drafted per round.

    Raises:
        ValueError: a wrong or damaged file, parts that do not fit each other, a missing text encoder, an occupied
            folder, or no space left. Nothing is left at `out` then.

    Example:
        ``convert_llamagen("t2i_XL_stage2_512.pt", "vq_ds16_t2i.pt", "llamagen-xl-512", dtype="bfloat16")``
    """
    gpt, vq, out = Path(gpt), Path(vq), Path(out)
    _check_choices(preset, condition, dtype, drafter, num_draft_tokens)
    _check_free(out)
    image_size = image_size_of(gpt, image_size)
    preset = preset_of(gpt) if preset is None else preset

    codes = convert_vq(vq, VQ_PRESET)
    if image_size < 1 or image_size % codes.config.factor:
        raise ValueError(
            f"image_size={image_size} is no multiple of the tokenizer's {codes.config.factor} pixels per code; "
            f"published models draw {', '.join(map(str, IMAGE_SIZES))}"
        )
    side = image_size // codes.config.factor
    transformer = convert_gpt(gpt, preset, block_size=side**2)
    found = transformer.config.condition
    if condition not in (None, found):
        raise ValueError(f"{gpt} is a {found} model; write condition={found!r}, not {condition!r}, or leave it out")
    if found == "class" and text_encoder is not None:
        raise ValueError(f"{gpt} is a class model and reads no text; leave the text encoder {text_encoder} out")
    if transformer.config.vocab_size != codes.config.codebook_size:
        raise ValueError(
            f"{gpt} draws from {transformer.config.vocab_size} image tokens, but {vq} has "
            f"{codes.config.codebook_size} codes; give the tokenizer it was trained with (vq_ds16_c2i for "
            "class models, vq_ds16_t2i for text models)"
        )
    if dtype is not None:
        transformer.to(DTYPES[dtype])  # type: ignore[arg-type]

    pipe = _assemble(transformer, codes, text_encoder, dtype, rule, drafter, num_draft_tokens)
    modules = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
    nbytes = sum(p.numel() * p.element_size() for part in modules for p in part.parameters())
    with _appearing(out, nbytes) as folder:
        pipe.save_pretrained(folder)
    return Conversion(out, found, preset, image_size, str(transformer.dtype).removeprefix("torch."), nbytes)


def preset_of(path: Path) -> str:
    """The published size of a transformer file, by its width and depth.

    Raises:
        ValueError: no transformer, or of no published size.
    """
    shapes = {name: tuple(value.shape) for name, value in read_checkpoint(path).items()}
    if "tok_embeddings.weight" not in shapes:
        what = "an image tokenizer, it goes to --vq" if "quantize.embedding.weight" in shapes else "no LlamaGen GPT"
        raise ValueError(f"{path} is {what}; give a transformer to --gpt")
    dim = shapes["tok_embeddings.weight"][1]
    depth = len({name.split(".")[1] for name in shapes if name.startswith("layers.")})
    for name, size in GPT_PRESETS.items():
        if (size["dim"], size["n_layer"]) == (dim, depth):
            return name
    raise ValueError(
        f"{path} has dim={dim} and n_layer={depth}, which is no published size ({', '.join(GPT_PRESETS)}); build its "
        "pipeline in Python with LlamaGenConfig and convert_gpt"
    )


def image_size_of(path: Path, given: int | None) -> int:
    """Pixels along a side: the given number, else what the file's name says, as in ``t2i_XL_stage2_512.pt``.

    Raises:
        ValueError: none given, and the name does not tell.

    Warns:
        UserWarning: the name tells another size than the given one; the given one is taken.
    """
    named = sorted({int(n) for n in re.findall(r"(?<!\d)(256|384|512)(?!\d)", path.stem)})
    if given is not None:
        if named and given not in named:
            warnings.warn(f"{path.name} sounds like a {named[0]} pixel model, but {given} was given", stacklevel=3)
        return given
    if len(named) != 1:
        raise ValueError(
            f"neither the weights nor the name {path.name} tell the image size this transformer was trained for; "
            f"write --image-size with one of {', '.join(map(str, IMAGE_SIZES))}"
        )
    return named[0]


def _check_choices(
    preset: str | None, condition: str | None, dtype: str | None, drafter: str, num_draft_tokens: int
) -> None:
    """Refuses wrong words before gigabytes are read."""
    choices: list[tuple[str, str | None, Any]] = [
        ("preset", preset, GPT_PRESETS),
        ("condition", condition, SAMPLING),
        ("dtype", dtype, DTYPES),
        ("drafter", drafter, ("jacobi", "none")),
    ]
    for name, value, allowed in choices:
        if value is not None and value not in allowed:
            raise ValueError(f"{name}={value!r}; {nearest(value, allowed)}")
    if num_draft_tokens < 0:
        raise ValueError(f"num_draft_tokens={num_draft_tokens}; write an integer >= 0 (0 switches speculation off)")


def _assemble(
    transformer: LlamaGenGPT,
    vq: LlamaGenVQ,
    text_encoder: str | os.PathLike[str] | None,
    dtype: str | None,
    rule: AcceptanceRule | None,
    drafter: str,
    num_draft_tokens: int,
) -> ImagePipeline:
    """The pipeline of the transformer's condition, with LlamaGen's sampling defaults."""
    condition = transformer.config.condition
    parts: dict[str, Any] = {
        "transformer": transformer,
        "vq": vq,
        "rule": CoupledRule() if rule is None else rule,
        "drafter": JacobiDrafter(window=max(WINDOW, num_draft_tokens)) if drafter == "jacobi" else None,
        "num_draft_tokens": num_draft_tokens,
        **SAMPLING[condition],
    }
    if condition == "class":
        return ClassToImagePipeline(**parts)
    name, width = os.fspath(text_encoder or TEXT_ENCODER), transformer.config.caption_dim
    encoder, tokenizer = _load_text_encoder(name, width, dtype)
    return TextToImagePipeline(text_encoder=encoder, tokenizer=tokenizer, **parts)


def _load_text_encoder(name: str, width: int, dtype: str | None) -> tuple[T5EncoderModel, PreTrainedTokenizerFast]:
    """T5 encoder and its tokenizer; the small files are checked before the weights are fetched.

    Raises:
        ValueError: not found here and not to be fetched, no T5, another width, or no usable tokenizer.
    """
    with _found(name):
        config = AutoConfig.from_pretrained(name)
    if config.model_type != "t5" or config.d_model != width:
        size = getattr(config, "d_model", None)
        raise ValueError(
            f"text encoder {name!r} is a {config.model_type} model with features of width {size}, the transformer "
            f"reads T5 features of width {width}; give the one it was trained with (published: {TEXT_ENCODER})"
        )
    with _found(name):
        tokenizer = AutoTokenizer.from_pretrained(name)
    # without its files transformers makes up a tokenizer that knows special tokens only
    ids = tokenizer("a photo of a cat")["input_ids"]
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or len(tokenizer) <= len(tokenizer.all_special_ids) + 1:
        raise ValueError(
            f"{name!r} has no usable tokenizer; copy tokenizer.json and tokenizer_config.json of the same T5 there"
        )
    if len(ids) < 2 or ids[-1] != tokenizer.eos_token_id:
        raise ValueError(
            f"the tokenizer of {name!r} ends captions without {tokenizer.eos_token!r}, which T5 was trained with; "
            "take the tokenizer files of the original model"
        )
    if max(tokenizer.get_vocab().values()) >= config.vocab_size:
        raise ValueError(
            f"the tokenizer of {name!r} has {len(tokenizer)} tokens, its text encoder {config.vocab_size}; take both "
            "from the same model"
        )
    with _found(name):
        encoder = T5EncoderModel.from_pretrained(name, dtype="auto" if dtype is None else DTYPES[dtype])
    return encoder.eval(), tokenizer


@contextmanager
def _found(name: str) -> Iterator[None]:
    """Turns what transformers raises for a missing or damaged model into one sentence with the way out."""
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        reason = (str(error).strip().splitlines() or [repr(error)])[0]
        raise ValueError(
            f"the text encoder {name!r} cannot be loaded: it is neither a complete folder nor a repository that is "
            f"cached or can be fetched now. Give --text-encoder a folder with config.json, weights and tokenizer.json "
            f"of a T5, or run once with a connection. Reason: {reason}"
        ) from error


def _partial(out: Path) -> Path:
    return out.parent / f".{out.name}.partial"


def _check_free(out: Path) -> None:
    """Refuses an occupied folder, also one that another conversion writes."""
    if not out.name:
        raise ValueError(f"out={out} names no folder; write a new one, e.g. ./llamagen-xl-512")
    if out.is_symlink() or out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise ValueError(f"{out} exists already; delete it, or choose another folder")
    if _partial(out).exists():
        raise ValueError(
            f"{_partial(out)} was left by a killed conversion, which you may delete, or another one is writing it"
        )


@contextmanager
def _appearing(out: Path, nbytes: int) -> Iterator[Path]:
    """A folder to write into, which gets the name `out` when the block ends well and vanishes otherwise.

    Raises:
        ValueError: no space for `nbytes`, or the system refuses to write.
    """
    partial = _partial(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(out.parent).free
        if free < nbytes:
            raise ValueError(
                f"{out.parent.resolve()} has {free / 1e9:.1f} GB left, the pipeline needs {nbytes / 1e9:.1f} GB; free "
                "some space, write elsewhere, or choose dtype='bfloat16'"
            )
        partial.mkdir()
    except OSError as error:
        raise ValueError(f"{out} cannot be written: {error}") from error
    try:
        yield partial
        for path in partial.rglob("*.safetensors"):
            with safe_open(path, framework="pt"):
                pass
        if out.is_dir():
            out.rmdir()  # empty, as checked; not every system renames onto a folder
        partial.rename(out)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{out} could not be written and nothing is left of it: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
