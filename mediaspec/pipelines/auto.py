"""Loads any saved pipeline by the class its folder names, any causal language model as a text pipeline, and a video
pipeline of diffusers as a `LongVideoPipeline`."""

from __future__ import annotations

import os
from typing import Any

from ..models.smollm2 import NAME as SMOLLM2
from .class_to_image import ClassToImagePipeline
from .image import ImagePipeline
from .keywords import nearest, refuse_unknown
from .loading import DOWNLOAD_KEYWORDS, EMBEDDED, LOADING_KEYWORDS, local_folder, read_index, readable_weights
from .text_generation import TextGenerationPipeline
from .text_saving import holds_causal_lm
from .text_to_image import TextToImagePipeline

__all__ = ["AutoPipeline"]

PIPELINES: dict[str, type[ImagePipeline]] = {
    "ClassToImagePipeline": ClassToImagePipeline,
    "TextToImagePipeline": TextToImagePipeline,
}
VIDEO_PIPELINES = ("AnimateDiffPipeline", "WanPipeline")
"""Pipelines of diffusers whose model `LongVideoPipeline` runs."""
MOVING_EMOJI = "moving-emoji"


class AutoPipeline:
    """`AutoPipeline.from_pretrained` finds the class; `diffusers.DiffusionPipeline` cannot, it only knows its own.

    Example:
        >>> pipe = AutoPipeline.from_pretrained("emoji-64")            # doctest: +SKIP
        >>> pipe = AutoPipeline.from_pretrained("path/to/llama")       # doctest: +SKIP
    """

    def __init__(self) -> None:
        raise TypeError("AutoPipeline makes pipelines and is none itself; write AutoPipeline.from_pretrained(...)")

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike[str], **kwargs: Any) -> Any:
        """Loads a pipeline.

        Args:
            pretrained_model_name_or_path: an embedded model ("emoji-64", "moving-emoji"), "smollm2", a folder, or
                "owner/repository"; folder and repository may be a saved pipeline, a causal language model of
                transformers, or an AnimateDiff or Wan pipeline of diffusers.
            kwargs: as in `ImagePipeline.from_pretrained` or `TextGenerationPipeline.from_pretrained`; an unknown one
                is an error there.

        Raises:
            ValueError: an unknown name (the nearest known one is named), or a folder of another library.
            TypeError: an unknown keyword.
        """
        name = os.fspath(pretrained_model_name_or_path)
        known = (*EMBEDDED, SMOLLM2)
        if "/" not in name and name not in known and not os.path.isdir(name):
            raise ValueError(
                f"there is no model or folder {name!r}; {nearest(name, known)}, or a folder, or owner/repository"
            )
        if name == SMOLLM2 or (os.path.isdir(name) and holds_causal_lm(name)):
            return TextGenerationPipeline.from_pretrained(name, **kwargs)
        folder = local_folder(name, dict(kwargs))
        if holds_causal_lm(folder):
            return TextGenerationPipeline.from_pretrained(name, **kwargs)
        found = read_index(folder).get("_class_name")
        if found in VIDEO_PIPELINES:
            return _long_video(name, folder, str(found), kwargs)
        if found not in PIPELINES:
            raise ValueError(
                f"{folder} holds a {found}, which mediaspec cannot run; it runs {', '.join(PIPELINES)}, "
                f"{', '.join(VIDEO_PIPELINES)} and causal language models of transformers. Another pipeline of "
                "diffusers is loaded with diffusers.DiffusionPipeline"
            )
        return PIPELINES[found].from_pretrained(folder if name not in EMBEDDED else name, **kwargs)


def _long_video(name: str, folder: str, kind: str, keywords: dict[str, Any]) -> Any:
    """A video pipeline of diffusers with the long samplers around it."""
    import diffusers

    from .long_video import LongVideoPipeline

    refuse_unknown(keywords, LOADING_KEYWORDS, "AutoPipeline.from_pretrained()")
    if name == MOVING_EMOJI:
        from .video_models import load_moving_emoji

        refuse_unknown(keywords, ("dtype", "torch_dtype"), f"AutoPipeline.from_pretrained({name!r})")
        dtype = keywords.get("dtype", keywords.get("torch_dtype"))
        return LongVideoPipeline(load_moving_emoji(**({} if dtype is None else {"dtype": dtype})))
    options = {key: value for key, value in keywords.items() if key not in DOWNLOAD_KEYWORDS}
    with readable_weights(folder):
        base = getattr(diffusers, kind).from_pretrained(folder, **options)
    return LongVideoPipeline(base)
