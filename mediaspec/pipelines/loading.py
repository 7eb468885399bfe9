"""Finding and loading the parts of a saved pipeline where diffusers' own way does not suffice.

Measured with diffusers 0.42.1. Three facts shape this file: `DiffusionPipeline.from_pretrained` only warns about
misspelt keywords; it cannot load a component whose module lacks the base class as an attribute; and accelerate's
offload hooks fire in `forward` alone, which decoding does not call.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from .shipped_worlds import check_shipped, embedded_worlds

__all__ = [
    "EMBEDDED",
    "LOADING_KEYWORDS",
    "SAVING_KEYWORDS",
    "bring_in",
    "check_complete",
    "component_class",
    "embedded_folder",
    "load_component",
    "local_folder",
    "read_index",
    "readable_weights",
]

# every keyword that DiffusionPipeline.from_pretrained takes out of **kwargs and that a pipeline of ours can honour
LOADING_KEYWORDS = (
    "cache_dir", "device_map", "disable_mmap", "dtype", "force_download", "local_files_only", "low_cpu_mem_usage",
    "max_memory", "offload_folder", "offload_state_dict", "proxies", "quantization_config", "revision", "token",
    "torch_dtype", "use_safetensors", "variant",
)  # fmt: skip
# what DiffusionPipeline.save_pretrained takes, by name and out of **kwargs
SAVING_KEYWORDS = (
    "commit_message", "create_pr", "max_shard_size", "private", "push_to_hub", "repo_id", "safe_serialization",
    "token", "use_flashpack", "variant",
)  # fmt: skip
# models inside the package: name -> folder below mediaspec/models
EMBEDDED = {"emoji-64": "emoji64", "moving-emoji": "moving_emoji"}
DOWNLOAD_KEYWORDS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "token")


def embedded_folder(name: str) -> str:
    """The folder of a model that ships inside the package.

    Raises:
        ValueError: the weights are not there (a source checkout without them, or a package built without its data).
    """
    folder = Path(str(resources.files("mediaspec"))) / "models" / EMBEDDED[name]
    if not (folder / "model_index.json").is_file():
        raise ValueError(f"the weights of {name} are missing from {folder}; install mediaspec from a complete source")
    return str(folder)


def local_folder(name: str | os.PathLike[str], keywords: dict[str, Any]) -> str:
    """The folder of a pipeline; a repository id is fetched first.

    Args:
        name: embedded name, folder or "owner/repository".
        keywords: of `from_pretrained`; those that concern the download are taken out.

    Raises:
        ValueError: neither a folder with a model_index.json nor a repository id; a frame world, which is no pipeline.
    """
    options = {key: keywords.pop(key) for key in DOWNLOAD_KEYWORDS if key in keywords}
    text = os.fspath(name)
    if text in EMBEDDED:
        return embedded_folder(text)
    if os.path.isdir(text):
        if not os.path.isfile(os.path.join(text, "model_index.json")):
            raise ValueError(
                f"{text} has no model_index.json, so it is not a saved pipeline; give the folder that "
                "`save_pretrained` wrote"
            )
        return text
    if text.count("/") != 1 or text.startswith((".", "/", "~")):
        raise ValueError(
            f"{text!r} is neither an embedded model ({', '.join(EMBEDDED)}) nor a folder nor a repository id; check "
            "the path, or write 'owner/repository'"
        )
    if text in embedded_worlds():
        raise ValueError(
            f"{text} is a frame world, which VideoContinuationPipeline.from_pretrained and `mediaspec generate "
            "continuation` run; this needs a pipeline"
        )
    check_shipped(text)
    # DiffusionPipeline.download refuses component modules outside diffusers, hence the plain snapshot
    from huggingface_hub import snapshot_download

    options.pop("proxies", None)  # huggingface_hub 1.x reads them from its client
    patterns = ["*.json", "*.safetensors", "*.txt", "*.model"]
    return snapshot_download(text, allow_patterns=patterns, **options)


def read_index(folder: str) -> dict[str, Any]:
    """The model_index.json of a saved pipeline: component -> (module, class), defaults of the call, `_class_name`.

    Raises:
        ValueError: the file is cut off or something else.
    """
    path = os.path.join(folder, "model_index.json")
    try:
        with open(path, encoding="utf-8") as file:
            index = json.load(file)
    except ValueError as error:
        raise ValueError(f"damaged file: {path} ({error}); copy or download it again") from error
    if not isinstance(index, dict):
        raise ValueError(f"{folder}/model_index.json holds a {type(index).__name__}; save the pipeline again")
    return index


@contextmanager
def readable_weights(folder: str) -> Iterator[None]:
    """Turns the errors of damaged files into one that names them.

    Raises:
        ValueError: below `folder` a .safetensors or .json file is cut off or something else, or weights have other
            shapes than their config.json says.
    """
    try:
        yield
    except (SafetensorError, json.JSONDecodeError) as error:
        kind = "weights" if isinstance(error, SafetensorError) else "file"
        damaged = [str(path) for path in sorted(Path(folder).rglob("*")) if not _readable(path)]
        raise ValueError(
            f"damaged {kind}: {', '.join(damaged) or folder} ({error}); copy or download the file again"
        ) from error
    except RuntimeError as error:
        if "mismatched" not in str(error):
            raise
        raise ValueError(
            f"damaged weights: a part of {folder} has weights of other shapes than its config.json says, or no "
            "config.json (the report above names them); copy or download the folder again"
        ) from error


def _readable(path: Path) -> bool:
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt"):
                pass
        elif path.suffix == ".json":
            json.loads(path.read_text(encoding="utf-8"))
    except (SafetensorError, ValueError):
        return False
    return True


def check_complete(folder: str, part: str, module: Any) -> None:
    """Refuses weight files that lack tensors: loading would leave those at random values and only warn.

    Raises:
        ValueError: tensors of `module` are in no .safetensors file of its subfolder `part`, and not tied to one.
    """
    files = list(Path(folder, part).glob("*.safetensors"))
    if not isinstance(module, torch.nn.Module) or not files:
        return
    stored: set[str] = set()
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            stored |= set(tensors.keys())
    state = module.state_dict()
    known = {tensor.data_ptr() for name, tensor in state.items() if name in stored}
    lost = [name for name, tensor in state.items() if name not in stored and tensor.data_ptr() not in known]
    if lost:
        raise ValueError(
            f"damaged weights: {os.path.join(folder, part)} lacks {len(lost)} tensors of {type(module).__name__} "
            f"({', '.join(lost[:3])}); copy or download the folder again"
        )


def component_class(module: str, name: str) -> type:
    """The class that a model_index.json names. Modules of mediaspec are imported; others must be imported already.

    Raises:
        ValueError: an unknown class, or a foreign module nobody imported (a file must not choose what code runs).
    """
    if module.split(".")[0] in ("mediaspec", "transformers", "diffusers"):
        try:
            library: Any = importlib.import_module(module)
        except ImportError as error:
            raise ValueError(f"the saved component {module}.{name} cannot be imported: {error}") from error
    elif module in sys.modules:
        library = sys.modules[module]
    else:
        raise ValueError(
            f"the saved component is {module}.{name}, and {module} is not imported; write `import {module}` before "
            "loading the pipeline if you trust it"
        )
    found = getattr(library, name, None)
    if not isinstance(found, type):
        raise ValueError(f"{module} has no class {name}; the folder was saved by another version of it")
    return found


def load_component(
    folder: str, part: str, entry: Any, dtype: torch.dtype | None = None, variant: str | None = None
) -> Any:
    """Loads component `part` of a saved pipeline from its subfolder, None where the index holds none.

    Args:
        folder: the pipeline's folder.
        part: component name, which is also the subfolder.
        entry: its (module, class) pair in model_index.json.
        dtype: for modules with weights.
        variant: of the weight files, where the component has them in it (as diffusers does for the others).
    """
    if not entry or entry[0] is None:
        return None
    kind = component_class(entry[0], entry[1])
    path = os.path.join(folder, part)
    if not Path(path).is_dir():
        raise ValueError(f"{folder} names a {part} ({entry[1]}) but has no folder {part!r}; copy it from the original")
    if issubclass(kind, torch.nn.Module):
        chosen = variant if variant is not None and any(Path(path).glob(f"*.{variant}*")) else None
        return kind.from_pretrained(path, dtype=dtype, variant=chosen)  # type: ignore[attr-defined]
    return kind.from_pretrained(path)  # type: ignore[attr-defined]


def bring_in(module: torch.nn.Module) -> None:
    """Fires a module's offload hook (which also evicts its predecessor in the sequence) without calling `forward`."""
    hook = getattr(module, "_hf_hook", None)
    if hook is not None and hasattr(hook, "pre_forward"):
        hook.pre_forward(module)
