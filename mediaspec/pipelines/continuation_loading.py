"""Finding the network of a `VideoContinuationPipeline`: a frame world of our own, or a pipeline of diffusers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .carriers import available_carriers
from .keywords import nearest, refuse_unknown
from .loading import DOWNLOAD_KEYWORDS, LOADING_KEYWORDS, local_folder, read_index, readable_weights
from .shipped_worlds import WORLDS, embedded_worlds

__all__ = ["load_base"]


def load_base(
    name: str | os.PathLike[str],
    dtype: torch.dtype | None,
    carrier_class: Callable[[str], Any],
    kwargs: dict[str, Any],
) -> Any:
    """A `FrameWorld`, or a pipeline of diffusers.

    Args:
        name: "panoroom/pack_k2", a folder, or "owner/repository".
        dtype: None is float32 for frame worlds, what diffusers takes for its own.
        carrier_class: name -> carrier, whose classes say which pipelines are known.
        kwargs: of diffusers' `from_pretrained`.

    Raises:
        ValueError: nothing there, a frame world that is not shipped, damaged files, or a pipeline that no carrier is
            for. TypeError: an unknown keyword.
    """
    refuse_unknown(kwargs, LOADING_KEYWORDS, "VideoContinuationPipeline.from_pretrained()")
    if "dtype" in kwargs:
        if dtype is not None:
            raise ValueError("torch_dtype and dtype were both given; they are the same, give one")
        dtype = kwargs.pop("dtype")
    text = os.fspath(name)
    shipped = text in embedded_worlds()
    folder = WORLDS / text if shipped else Path(text)
    if shipped or _is_frame_world(folder):
        from .carriers.frame_dit import FrameWorld

        for key in kwargs:
            if key not in DOWNLOAD_KEYWORDS:
                raise TypeError(f"a frame world takes torch_dtype only, not {key!r}")
        with readable_weights(str(folder)):
            return FrameWorld.from_pretrained(folder, dtype=dtype or torch.float32)
    path = local_folder(text, kwargs)
    import diffusers

    kind = str(read_index(path).get("_class_name"))
    known = {one for carrier in available_carriers() for one in carrier_class(carrier).pipeline_classes}
    made = getattr(diffusers, kind, None)
    if kind not in known or made is None:
        raise ValueError(f"{path} holds a {kind}, which has no carrier; {nearest(kind, known)}")
    with readable_weights(path):
        return made.from_pretrained(path, **kwargs, **({} if dtype is None else {"torch_dtype": dtype}))


def _is_frame_world(folder: Path) -> bool:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and config.get("model_type") == "mediaspec_frame_dit"
